"""Self-Rewarding LM (Yuan et al. 2024): a model judges its own solutions, and prefers the best. arXiv 2401.10020.

An iteration begins with a snapshot of the generator, M_t. M_t writes --num-samples solutions of each problem and judges
each of them --verifications times. A solution has the mean of its points. The one with the most and the one with the
fewest are a pair of DPO with M_t as reference, unless all have the same points, and so the generator becomes M_t+1. The
paper has two such iterations after the SFT: M1, M2 and M3. The loss is dpo's: --advantage, --loss, --aggregation,
--kl-coef and --entropy-coef have no say.

No gold answer is used, but for the log: how often a pair is the right way round, and whether the judge drifts with the
generator. Both are the same weights, and a pair moves the judge although no verification is learned. The start is a
checkpoint of both roles (chat_sft --role both).

Departures:
1. The judge writes a verification as its SFT has taught it, not a score from 0 to 5. --points says what that is worth.
2. The problems are the task's. In the paper a fixed model makes new ones from examples.
3. Each update has fresh solutions and judgments of M_t. The paper makes one set of pairs per iteration.
4. A judgment that cannot be read is left out of the mean. A solution without any is in no pair.
"""
from nanochat.cli import at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import scores_of_pair
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.pairs import add_pair_args, best_and_worst, check, learn_from_pairs  # noqa: F401
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.prompts import empty_verifier_prompt
from nanochat.rl.verify.judge_evals import judge_scores
from nanochat.rl.verify.judges import Judgment, generative

STATUS = ("runs: what its first iteration gains (+41.0 ± 42.0) the next two lose (-36.2 ± 31.6), as it forgets how to "
          "judge")
ROLES = {"generator": RoleSpec("--model-tag"), "snapshot": RoleSpec("--model-tag", trained=False)}
SHOWN = {"generator": ["iteration", "pair_loss", "right_order", "no_pair"]}
TABLE = {"gen/pass1_in": "greedy pass@1, in distribution",
         "gen/pass1_out": "greedy pass@1, out of distribution",
         "gen/balanced_acc_fixed": "as a judge: balanced accuracy, solutions of the start",
         "gen/balanced_acc_current": "as a judge: balanced accuracy, its own solutions",
         "gen/pos_rate_wrong_current": "as a judge: wrong ones of its own that it passes",
         "gen/parse_fail_current": "as a judge: parse failures"}


# What a judgment is worth; None where it cannot be told. A chance is a mean over the verifications that could be read

def additive_points(judgment: Judgment) -> float | None:
    """From 0 to 5, as in the paper: up to 4 for the share of the steps that are right, and 1 for the final verdict."""
    if judgment.steps is None or judgment.final is None:
        return None
    points = 4 * sum(judgment.steps) / max(1, len(judgment.steps)) + judgment.final
    return round(points, 9)  # a sum of thirds depends on their order, and equal points are no pair


POINTS = {"additive": additive_points, "verdict": lambda judgment: judgment.final}


def add_args(group) -> None:
    add_pair_args(group)
    group.set_defaults(kl_coef=0.0, advantage="reinforce", num_samples=4)  # no reference is kept, no group is compared
    group.add_argument("--iteration-steps", type=at_least(1), default=50, help="updates against one snapshot")
    group.add_argument("--verifications", type=at_least(1), default=3, help="judgments of a solution")
    group.add_argument("--points", default="additive", choices=list(POINTS), help="of a judgment")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112)


def draws(args) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    judge = Draw("snapshot", P * G, args.verifications, args.verifier_max_new_tokens, wrap=empty_verifier_prompt,
                 quoted=limit)
    return {"candidates": Draw("snapshot", P, G, limit), "verdicts": judge,
            "pairs": Draw("generator", P, 2, limit, trained=True, teacher_forced=True, scored=2),
            "judging": judge._replace(role="generator", num_samples=1, times=0)}  # in an evaluation alone


def play(t: Play):
    iteration, after = divmod(t.steps["generator"], t.args.iteration_steps)
    if after == 0:
        t.copy_weights("generator", "snapshot")                                    # M_t
    solutions = t.solve("candidates", t.problems())  # y^1 ... y^N
    judgments = generative(t, "snapshot", solutions)
    points = [POINTS[t.args.points](judgment) for judgment in judgments]           # r^1 ... r^N
    outcomes = t.check(solutions)
    solutions.columns = {"outcome": outcomes, "points": points, "judgments": [j.texts for j in judgments]}
    log_rewards(t, "snapshot", solutions, points)
    chosen, rejected = best_and_worst(points, solutions.group_id.tolist())         # y^w, y^l
    log_judgments(t, judgments, solutions, chosen, rejected)
    t.log("generator", {"iteration": iteration} | t.mean({"unscorable": [o is None for o in outcomes]}))
    paired, Q = solutions.select(chosen + rejected), len(chosen)
    paired.sampler_logprobs.fill_(float("nan"))  # M_t's: nothing to compare the generator's with
    yield from learn_from_pairs(t, "generator", paired, list(range(Q)), list(range(Q, 2 * Q)),
                                t.logprobs("snapshot", paired))                    # M_t+1


def log_judgments(t: Play, judgments: list[Judgment], solutions, chosen: list[int], rejected: list[int]) -> None:
    """Logs how far the judge is right by the gold answers, which it does not see, and how many groups have no pair."""
    outcomes, scores = solutions.columns["outcome"], judge_scores(t, judgments, solutions, t.args.num_samples)
    t.log("snapshot", {f"verdicts/{name}": value for name, value in scores.items()})
    told = [(outcomes[w], outcomes[l]) for w, l in zip(chosen, rejected, strict=True)]
    has_pair = {solutions.group_id[w].item() for w in chosen}
    t.log("generator", t.mean({
        "right_order": [w for w, l in told if {w, l} == {True, False}],
        "no_pair": [g not in has_pair for g in range(len(solutions.prompts))],
        "unjudged": [value is None for value in solutions.columns["points"]]}))


def evaluate(t: Play) -> dict:
    """pass@1, and how the same weights judge solutions of the start and their own."""
    return scores_of_pair(t, verifier="generator")
