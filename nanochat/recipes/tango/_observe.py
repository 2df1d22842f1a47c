"""
What RL Tango's steps log beside what all solving logs.
"""
from nanochat.recipes.tango._judged import Judged
from nanochat.rl.credit.rewards import format_reward, terminal_rewards
from nanochat.rl.measure.observe import (gathered_verdict_scores, log_rewards, log_variances, passed_by_error,
                                         verification_columns)
from nanochat.rl.measure.watched import LENIENT
from nanochat.rl.play.play import Play
from nanochat.rl.records.prompts import Verification
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.judge_evals import judge_scores

MOVING_DECAY = 0.8  # of the share of wrong steps that pass


def observe_judged(t: Play, solutions: Rollouts, judged: Judged, alpha: float) -> None:
    """Logs alpha, the chances that are rewarded, how many solutions have no step, and how right the judge is."""
    t.log("generator", {"alpha": alpha} | t.mean({
        "stepless": [not s.step_ends for s in t.read_solutions(solutions)],
        "step_abstained": [row is None for row in judged.steps],
        "rewards/step/mean": [x for row in judged.chances if row for x in row]}))
    outcomes, scores = solutions.columns["outcome"], {}
    if judged.judgments:
        scores = judge_scores(t, judged.judgments, solutions, t.args.num_samples)
    elif judged.verifications:
        scores = gathered_verdict_scores(t, solutions, outcomes, judged.verifications)
        scores |= passed_by_error(t, solutions, judged.verifications)
        watch_leniency(t, scores)
        log_hidden(t, solutions, judged.verifications)
    t.log("generator", {f"verdicts/{name}": value for name, value in scores.items()})


def log_hidden(t: Play, solutions: Rollouts, verifications: list[Verification]) -> None:
    """With --num-labelled: logs how right solutions without a gold answer are, and the verdicts on them."""
    if not hasattr(t.task, "hidden"):
        return
    rows = zip(solutions.problems(), solutions.texts, verifications, strict=True)
    known = [(v.verdict, outcome) for problem, text, v in rows if (outcome := t.task.hidden(problem, text)) is not None]
    t.log("generator", t.mean({"unlabelled/outcome/mean": [outcome for _, outcome in known],
                               "unlabelled/verdict_accuracy": [verdict == outcome for verdict, outcome in known]}))


def observe_verifier(t: Play, solutions: Rollouts, rollouts: Rollouts, verifications: list[Verification],
                     outcomes: list[bool], rewards: list[float | None]) -> None:
    """Logs a step of the verifier: its rewards by part, and how right it is on average."""
    judged = solutions.select([n for n in range(len(solutions)) for _ in range(t.args.num_samples)])
    rollouts.columns = {"outcome": outcomes} | verification_columns(verifications)
    scores = gathered_verdict_scores(t, judged, outcomes, verifications)
    parts = {"verdict": [v.verdict == outcome for v, outcome in zip(verifications, outcomes, strict=True)],
             "format": [format_reward(v.unmet) for v in verifications]}
    t.log("verifier", scores)
    log_rewards(t, "verifier", rollouts, rewards)
    log_variances(t, "verifier", rollouts, {name: terminal_rewards(values, rollouts.lengths)
                                            for name, values in parts.items()})
    t.log("verifier", t.mean({f"rewards/{name}/mean": values for name, values in parts.items()}))


def watch_leniency(t: Play, scores: dict) -> None:
    """Logs what share of the wrong steps has passed lately (wrong_passed), of the wrong solutions where the task has no
    step labels, and whether that is too much (lenient). It is a moving average, None before its first value."""
    has_labels = getattr(t.task, "has_step_labels", True)
    passed, now = t.memory.get("wrong_passed"), scores["wrong_steps_passed" if has_labels else "pos_rate_wrong"]
    if now is not None:
        passed = now if passed is None else MOVING_DECAY * passed + (1 - MOVING_DECAY) * now
        t.memory["wrong_passed"] = passed
    t.log("generator", {"wrong_passed": passed, "lenient": passed is not None and passed > LENIENT})
