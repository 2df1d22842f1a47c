"""
What metrics are called in reports, and how their values are shown.
"""
from nanochat.rl.measure.scores import verdict_scores
from nanochat.rl.records.outcomes import reworded
from nanochat.rl.report.report import EVALS, INDICATORS, Run, is_count

# A metric that is not among them is titled by its name.
TITLES = EVALS | INDICATORS | {
    "gen/uncounted_in": "right answers that do not count, in distribution",
    "gen/uncounted_out": "right answers that do not count, out of distribution",
    "gen/alpha": "weight of step rewards (alpha)", "gen/wrong_passed": "wrong steps passed, moving average",
    "ver/balanced_acc": "verifier balanced accuracy, in training", "ver/step_f1": "verifier step F1, in training"}
# Names of metrics that are shares, under any role's prefix: from 0 to 100 percent in every report.
SHARES = ({*verdict_scores([]), *(name.partition("/")[2] for name in EVALS), "alpha", "wrong_passed", "step_label_mean",
           "rewards/step/mean", "frac_ranking_reversed", "frac_reward_zero_std", "accuracy", "pair_accuracy",
           "label_accuracy", "reward_accuracy", "majority_ratio", "step_auc", "pass1_lenient_in", "pass1_lenient_out",
           "stepless", "completions/clipped_ratio"}
          - {"step_outcome_corr"})


def title_of(metric: str, run: Run) -> str:
    """A metric's title, in the words of a run's task."""
    return reworded(TITLES.get(metric, metric), run.words)


def scores_in(run: Run) -> list[str]:
    """The held-out scores that have a value in some evaluation of a run."""
    indicators = {*INDICATORS, *(run.config.get("shown") or ())}
    return [name for name in run.points[-1] if not is_count(name) and name not in indicators
            and any(point.get(name) is not None for point in run.points)]


def axis_of(metric: str) -> tuple[int, int] | None:
    """The ends of a metric's axis: shares are from 0 to 1, correlations from -1. None: it follows the values."""
    name = metric.partition("/")[2]
    if name.endswith("_corr"):
        return -1, 1
    return (0, 1) if name in SHARES or name.removeprefix("verdicts/") in SHARES else None


def scale_of(metric: str) -> int:
    """What a metric is multiplied by to be shown: shares are in percent."""
    return 100 if axis_of(metric) == (0, 1) else 1


def unit_of(metric: str) -> str:
    return "%" if scale_of(metric) == 100 else ""


def value_of(metric: str, value: float) -> str:
    """A value as text, with its unit."""
    digits = 0 if isinstance(value, int) else 3
    return f"{100 * value:.1f}%" if unit_of(metric) else f"{value:.{digits}f}"


def difference_of(metric: str, change: float, sign: str = "+") -> str:
    """A difference of two values as text, in points where they are in percent. sign: "" for its size alone."""
    return f"{scale_of(metric) * change:{sign}.{1 if unit_of(metric) else 3}f}"
