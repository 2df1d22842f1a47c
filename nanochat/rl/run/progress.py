"""
What a run prints while it goes: the health check, a line per step and the final table.
"""
import torch

from nanochat.common import Diverged, dtype_name, print0
from nanochat.rl.learn.roles import short_name
from nanochat.rl.learn.trainer import score
from nanochat.rl.measure.evals import PASS_AT_1, sampled_scores
from nanochat.rl.measure.watched import APART_BY, warnings_in
from nanochat.rl.play.play import Play, warn_once
from nanochat.rl.records.outcomes import reworded


def percent(value: float | None) -> str:
    return "    -" if value is None else f"{100 * value:5.1f}"


def print_table(before: dict, after: dict, shares: dict[str, str] | None, words: dict[str, str]) -> None:
    """Before -> after, without what has no value at either end. shares: the scores to show, and what they are; by
    default pass@1, then others by name; words: `words_of` the task."""
    plain = lambda value: "    -" if value is None else f"{value:5.3f}"
    parts = [("held-out evaluation (percent)", shares or PASS_AT_1, percent, 100)]
    if shares is None:
        parts.append(("other scores", {name: name for name in after if name not in PASS_AT_1}, plain, 1))
    for title, labels, show, scale in parts:
        rows = [(reworded(label, words), before.get(name), after[name]) for name, label in labels.items()
                if name in after and (before.get(name), after[name]) != (None, None)]
        if rows:
            print0(f"\n{title:58s} before    after   change")
        for label, old, new in rows:
            change = "     -" if None in (old, new) else f"{scale * (new - old):+6.{1 if scale == 100 else 3}f}"
            print0(f"{label:58s}  {show(old)} -> {show(new)}   {change}")


def warn_of_no_signal(t: Play, record: dict) -> None:
    """Says, once, that none of a role's rollouts could be scored in a step."""
    for role in t.roles:
        if record.get(f"{short_name(role)}/num_rollouts") and record.get(f"{short_name(role)}/reward") is None:
            warn_once(t, f"no rollout of the {role} could be scored in a step, so it learned nothing from rewards "
                         f"there: does the task's check() give None, or can no judgment be read?")


def warn_of_apart(t: Play, record: dict) -> None:
    """Says, once, that sampler and trainer were further apart in a step than a role's dtype explains."""
    for role in t.roles:
        if record.get(f"{short_name(role)}/rollout_apart"):
            warn_once(t, f"the {role}'s sampler and trainer differ by more than "
                         f"{dtype_name(t.roles[role].model.compute_dtype)} explains (rollout_logprobs_diff_max): "
                         f"{APART_BY}")


def print_step(record: dict, roles: list[str], shown: dict[str, list[str]], seconds_left: float) -> None:
    """One line per step, with a part for each role that was updated. shown: metrics that the recipe adds to it, by
    role; all of them stand after `no update`, where there was nothing to learn from."""
    parts = [step_of_role(record, role, shown.get(role, [])) for role in roles]
    idle = "no update" + "".join(f" ({role}{shown_of(record, role, shown[role])})" for role in shown)
    left = f"{record['timing_s/step']:.1f}s, {seconds_left / 60:.1f} min left"
    print0(f"step {record['step']:4d} {' || '.join(parts) or idle} | {left}")


def shown_of(record: dict, role: str, names: list[str]) -> str:
    """Metrics of a role as parts of a step's line."""
    values = {name: record.get(f"{short_name(role)}/{name}") for name in names}
    return "".join(f" | {name.replace('_', ' ')} {number(value)}" for name, value in values.items())


def number(value: float | str | None, digits: int = 3) -> str:
    return "-" if value is None else value if isinstance(value, str) else f"{value:.{digits}f}"


def step_of_role(record: dict, role: str, shown: list[str]) -> str:
    """A role's part of a step's line."""
    get = lambda name: record.get(f"{short_name(role)}/{name}")
    text = f"{role:9s}"
    if get("num_rollouts") is not None:
        text += f" | reward {number(get('reward'))} ± {number(get('reward_std'))}"
        text += f" | no signal {number(get('frac_reward_zero_std'), 2)}"
        text += f" | len {number(get('completions/mean_length'), 1)}"
    text += f" | entropy {number(get('entropy'))} | grad {number(get('grad_norm'), 2)}"
    text += shown_of(record, role, shown)
    return text + "".join(f" | WARNING: {watched.warning}" for watched in warnings_in(record, role))


def logprob_gap(t: Play, role: str) -> float:
    """The largest difference between the logprobs of sampler and trainer, over solutions of a few problems."""
    rollouts = t.solve("health", [t.task.problem("rl", i) for i in range(4)], t.args.num_samples, role=role)
    ones = torch.ones_like(rollouts.sampler_logprobs)
    batches = t.even(t.micro_batches(rollouts, ones, ones[:, 0], keep_idle=True))
    gaps = [score(t.roles[role].model, b, t.args.temperature) - b.at_trained(b.sampler_logprobs) for b in batches]
    return torch.cat(gaps).abs().max().item()


# Largest difference of logprobs that two ways to add up the same numbers may have. bf16 logits of 16 to 32 are spaced
# .125: each of the two logits that make a logprob may be off by half of that, in either of the two ways.
LARGEST_GAP = {torch.float32: 0.1, torch.bfloat16: 0.5}


def largest_gap(model) -> float:
    """The bar for a model's dtype."""
    return LARGEST_GAP.get(model.compute_dtype, 0.1)


def count_apart(t: Play, roles: list[str], record: dict) -> dict:
    """Counts, for each of these roles, its steps in a row in which sampler and trainer were further apart than the
    dtype explains; one in which that cannot be told is passed over. -> what is logged of it"""
    counted, in_a_row = {}, t.state.apart_in_a_row
    for role in roles:
        gap = record.get(f"{short_name(role)}/rollout_logprobs_diff_max")
        if gap is not None:
            in_a_row[role] = 0 if gap <= largest_gap(t.roles[role].model) else in_a_row.get(role, 0) + 1  # nan too
        counted[f"{short_name(role)}/rollout_apart"] = None if gap is None else in_a_row[role]
    return counted


def check_apart(t: Play, record: dict) -> None:
    """Raises Diverged where a role's sampler and trainer were apart three times in a row."""
    for role, in_a_row in t.state.apart_in_a_row.items():
        if in_a_row >= 3:
            model, gap = t.roles[role].model, record[f"{short_name(role)}/rollout_logprobs_diff_max"]
            raise Diverged(f"step {record['step']}: three times in a row the {role}'s sampler and trainer differed by "
                           f"more than {dtype_name(model.compute_dtype)} explains (now by {gap:.3g} in a token's "
                           f"logprob, where {largest_gap(model)} is the most): {APART_BY}")


def health_check(t: Play, role: str) -> list[str]:
    """Prints what RL starts from and returns the warnings: each names the likely cause. role: the one that solves. A
    role named verifier is looked at where the recipe evaluates it on fixed solutions."""
    sampled, gap, scores = sampled_scores(t, role, 64), logprob_gap(t, role), t.state.before
    print0(f"health check of the starting point: {min(64, t.args.eval_examples)} problems, sampled, not greedy")
    for name, value in sampled.items():
        print0(f"  {role:9s} {name:22s} {percent(value)}%")
    judged = {name: scores[f"ver/{name}_fixed"]
              for name in ("parse_fail", "pred_pos_rate", "label_pos_rate", "balanced_acc", "outcome_f1",
                           "wrong_steps_passed", "right_steps_blamed")
              if scores.get(f"ver/{name}_fixed") is not None}
    for name, value in judged.items():
        print0(f"  verifier  {name:22s} {percent(value)}%")
    print0(f"  sampler vs trainer, largest logprob difference {gap:.2e}")
    warnings = health_warnings(sampled, judged, gap, t.roles[role].model.compute_dtype,
                               learns=t.roles[role].optimizer is not None)
    for warning in warnings:
        print0(f"  WARNING: {warning}")
    return warnings


def health_warnings(sampled: dict, judged: dict, gap: float, dtype: torch.dtype, learns: bool = True) -> list[str]:
    """What is wrong with a start. sampled: of `sampled_scores`; judged: a verifier's scores, {} without one; learns:
    whether the role that was sampled is trained."""
    warnings = []
    if learns and sampled["pass@1"] == 0:
        warnings.append("no sampled solution is right: RL finds nothing to reinforce; "
                        "give SFT longer or easier problems")
    if learns and sampled["pass@1"] > 0.9 and sampled["frac_reward_zero_std"] > 0.75:
        warnings.append(f"the start leaves little to learn: pass@1 is {100 * sampled['pass@1']:.0f}%, and "
                        f"{100 * sampled['frac_reward_zero_std']:.0f}% of the groups give no signal; give RL harder "
                        f"problems")
    if sampled["end_token_rate"] < 0.5:
        warnings.append("under half of the completions end: SFT never taught the end token, "
                        "or --max-new-tokens is too small")
    if judged.get("parse_fail", 0) > 0.5:
        warnings.append("under half of the verifications parse: the verifier has not learned its format; "
                        "train its SFT longer")
    elif judged.get("pred_pos_rate") in (0.0, 1.0) or judged.get("balanced_acc") == 0.5:
        warnings.append("the verifier is constant (balanced accuracy 0.5): SFT it on balanced solutions, and use "
                        "--verifier-balance")
    if judged.get("wrong_steps_passed", 0) > 0.5:
        warnings.append("the verifier passes over half of the wrong steps: a generator learns to write what it passes; "
                        "train its SFT longer, or on solutions with more mistakes")
    if not gap <= LARGEST_GAP.get(dtype, 0.1):  # nan too
        warnings.append("sampler and trainer disagree on logprobs: check --top-k, --temperature and dtypes")
    return warnings
