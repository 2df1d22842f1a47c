"""
What a run shows while it goes: the health check, a line per step, rollout records and the final table.
"""
from nanochat.common import print0

TABLE = {
    "gen/pass1_in": "generator greedy pass@1, in distribution",
    "gen/pass1_out": "generator greedy pass@1, out of distribution (longer)",
    "ver/outcome_f1_fixed": "verifier outcome F1 (macro), fixed solutions",
    "ver/balanced_acc_fixed": "verifier balanced accuracy, fixed solutions",
    "ver/step_f1_fixed": "verifier step F1 (macro, gold labels), fixed solutions",
    "ver/step_f1_fixed_out": "verifier step F1, fixed solutions, out of distribution",
    "ver/step_f1_current": "verifier step F1, current generator's solutions",
    "ver/parse_fail_fixed": "verifier parse failures",
}


def percent(value: float | None) -> str:
    return "    -" if value is None else f"{100 * value:5.1f}"


def print_table(before: dict, after: dict) -> None:
    """Before RL -> after RL, in percent and points."""
    print0(f"\n{'held-out evaluation (percent)':58s} before    after   change")
    for name, label in TABLE.items():
        if name in after:
            old, new = before.get(name), after[name]
            change = f"{100 * (new - old):+6.1f}" if None not in (old, new) else "     -"
            print0(f"{label:58s}  {percent(old)} -> {percent(new)}   {change}")


def print_step(record: dict, role: str, seconds_left: float) -> None:
    """One line per optimizer step."""
    prefix = "gen" if role == "generator" else "ver"
    get = lambda name: record.get(f"{prefix}/{name}")
    number = lambda name: "-" if get(name) is None else f"{get(name):.3f}"
    shown = f"reward {number('reward')} ± {number('reward_std')} | no signal {100 * get('frac_reward_zero_std'):3.0f}%"
    shown += f" | len {get('completions/mean_length'):5.1f} | entropy {get('entropy'):.3f} | grad {get('grad_norm'):.2f}"
    if role == "generator":
        shown += f" | alpha {record['gen/alpha']:.3f}"
    else:
        shown += f" | balanced acc {percent(get('balanced_acc'))} | step F1 {percent(get('step_f1'))}"
        if get("pred_pos_rate") in (0.0, 1.0):
            shown += " | WARNING: constant verifier"
    print0(f"step {record['step']:4d} {role:9s} | {shown} | {record['timing_s/step']:.1f}s, {seconds_left / 60:.1f} min left")


def rollout_records(role: str, fmt, problems, solutions, verifications, rollouts, advantages, outcomes, labels, rows) -> list[dict]:
    """The given rows of a step's rollouts for rollouts.jsonl: texts, verdicts, gold labels, and the advantages of the trained tokens.
    step_spans: characters [start, end) of the steps in the solution; step_ends: their last tokens."""
    records = []
    for n in rows:
        records.append({
            "role": role, "problem": problems[n].prompt, "gold": problems[n].answer, "solution": solutions[n].text, "outcome": outcomes[n],
            "step_labels": labels[n], "step_spans": fmt.step_spans(solutions[n].text), "step_ends": solutions[n].step_ends,
            "finish_reason": "stop" if bool(rollouts.stopped[n]) else "length",
            "advantages": [round(a, 4) for a in advantages[n, : rollouts.lengths[n]].tolist()],
            **({"verification": None} if verifications is None else {
                "verification": verifications[n].text, "step_verdicts": verifications[n].step_verdicts, "verdict": verifications[n].verdict,
                "unmet": list(verifications[n].unmet)})})
    return records


def health_check(scores: dict, sampled: dict, logprob_gap: float | None) -> list[str]:
    """Prints what RL starts from and returns the warnings: each names the likely cause."""
    print0("health check of the starting point")
    for name, value in sampled.items():
        print0(f"  generator {name:22s} {percent(value)}%")
    for name in ("parse_fail", "pred_pos_rate", "label_pos_rate", "balanced_acc", "outcome_f1"):
        if f"ver/{name}_fixed" in scores:
            print0(f"  verifier  {name:22s} {percent(scores[f'ver/{name}_fixed'])}%")
    if logprob_gap is not None:
        print0(f"  sampler vs trainer, largest logprob difference {logprob_gap:.2e}")
    warnings = []
    if sampled["pass@1"] == 0:
        warnings.append("no sampled solution is right: RL finds nothing to reinforce; give SFT longer or easier problems")
    if sampled["end_token_rate"] < 0.5:
        warnings.append("under half of the completions end: SFT never taught the end token, or --max-new-tokens is too small")
    if scores.get("ver/parse_fail_fixed", 0) > 0.5:
        warnings.append("under half of the verifications parse: the verifier has not learned its format; train its SFT longer")
    elif scores.get("ver/pred_pos_rate_fixed") in (0.0, 1.0) or scores.get("ver/balanced_acc_fixed") == 0.5:
        warnings.append("the verifier is constant (balanced accuracy 0.5): SFT it on balanced solutions, and use --verifier-balance")
    if logprob_gap is not None and logprob_gap > 0.1:
        warnings.append("sampler and trainer disagree on logprobs: check --top-k, --temperature and dtypes")
    for warning in warnings:
        print0(f"  WARNING: {warning}")
    return warnings
