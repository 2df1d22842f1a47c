"""TTRL (Zuo et al. 2025): GRPO without gold answers, rewarded for agreeing with the majority vote. arXiv 2504.16084.

Of each problem --num-votes solutions are sampled. Their most frequent answer is its pseudo label, and a solution with
that answer earns 1, any other 0 (section 2.2). Of the votes the first --num-samples are trained on: 32 of 64 in the
paper. A solution without a readable answer has no vote and earns 0, but counts in the majority ratio; a tie goes to the
answer that came first. This is as in the released code (ttrl_utils.py).

No gold answer enters an update: where a wrong answer has the majority, it is rewarded. Gold answers are for the log
alone, over all votes (the paper's appendix E): label_accuracy (maj@n), reward_accuracy (the share of rewards that the
gold answer would give too) and ground_truth_ratio (the share of right votes). majority_ratio, the share of votes that
agree with the label, needs none.

Departures:
1. The problems are those of the rl split, and pass@1 is that of held-out ones. The paper trains on the unlabelled
   problems of a test set, 10 to 80 times over, and reports these.
2. Two answers agree where the task reads the same text: 1/2 and 0.5 are two votes. The released code compares
   simplified texts and rewards what its grader takes for equal to the label.
3. One optimizer step per batch; the released script takes one for each of its 8 problems. It averages over tokens
   (--aggregation token).
"""
from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.measure.scores import majority, outcome_of
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.rollouts import Rollouts

STATUS = ("works: sampled pass@1 rises by 8.2 ± 5.6 where the majority is right, while greedy falls by 16.0 ± 5.5; it "
          "falls by 3.1 ± 2.1 where it is wrong")
ROLES = {"generator": RoleSpec("--model-tag")}
SHOWN = {"generator": ["majority_ratio", "label_accuracy", "reward_accuracy"]}
evaluate = pass_at_1


def add_args(group) -> None:
    group.add_argument("--num-votes", type=at_least(2, also=0), default=0,
                       help="N: solutions per problem that vote; 0 = twice --num-samples, which are trained on")


def check(args, task) -> None:
    if 0 < args.num_votes < args.num_samples:
        raise BadInput(f"--num-votes {args.num_votes}: must be at least --num-samples {args.num_samples}, which are "
                       f"taken from the votes (or 0 for twice as many)")


def votes_per_problem(args) -> int:
    return args.num_votes or 2 * args.num_samples


def draws(args) -> dict[str, Draw]:
    """The votes, and those of them that are trained on."""
    P, limit = args.examples_per_step, args.max_new_tokens
    return {"votes": Draw("generator", P, votes_per_problem(args), limit),
            "solutions": Draw("generator", P, args.num_samples, limit, trained=True, teacher_forced=True)}


def pseudo_labels(answers: list[str | None], num_votes: int) -> list[str | None]:
    """The majority answer of each problem, whose votes follow each other; None where none of them is readable."""
    return [majority(answers[i: i + num_votes]) for i in range(0, len(answers), num_votes)]


def majority_rewards(answers: list[str | None], labels: list[str | None]) -> list[float]:
    """1 for each vote that gives its problem's label, else 0: also where there is nothing to read."""
    N = len(answers) // max(1, len(labels))
    return [float(answer is not None and answer == labels[n // N]) for n, answer in enumerate(answers)]


def cast_votes(t: Play) -> tuple[Rollouts, list[str | None]]:
    """The votes of each problem, with what they say and earn as columns, and the problems' labels. They are logged."""
    N = votes_per_problem(t.args)
    votes = t.solve("votes", t.problems(), N)                        # y_1 ... y_N
    answers = t.answers(votes, N)
    labels = pseudo_labels(answers, N)                                            # y*
    votes.columns = {"outcome": t.check(votes), "answer": answers,
                     "majority_reward": majority_rewards(answers, labels),        # R(y_i, y*)
                     "pseudo_label": [label for label in labels for _ in range(N)]}
    of_label = outcomes_of_labels(votes.columns, labels)
    votes.columns["label_outcome"] = [outcome for outcome in of_label for _ in range(N)]
    log_votes(t, votes.columns)
    return votes, labels


def play(t: Play):
    N, M = votes_per_problem(t.args), t.args.num_samples
    votes, _ = cast_votes(t)
    solutions = votes.select([n for n in range(len(votes)) if n % N < M])         # vote, then sample
    rewards = solutions.columns["majority_reward"]
    log_rewards(t, "generator", solutions, rewards)
    yield Update("generator", [(solutions, t.advantages(solutions, rewards))])


def outcomes_of_labels(columns: dict[str, list], labels: list[str | None]) -> list[bool | None]:
    """Whether each label is right, as the votes for it are; wrong where there is none."""
    N = len(columns["answer"]) // max(1, len(labels))
    return [outcome_of(label, *(columns[name][i * N: (i + 1) * N] for name in ("answer", "outcome")))
            for i, label in enumerate(labels)]


def log_votes(t: Play, columns: dict[str, list]) -> None:
    """Logs how far the votes agree, and how far they and their labels are right, where that is known."""
    outcomes, answers, rewards = columns["outcome"], columns["answer"], columns["majority_reward"]
    pairs = list(zip(rewards, outcomes, strict=True))
    t.log("generator", t.mean({
        "majority_ratio": rewards, "label_accuracy": columns["label_outcome"],  # each label N times
        "reward_accuracy": [None if outcome is None else reward == outcome for reward, outcome in pairs],
        "ground_truth_ratio": outcomes, "unreadable": [answer is None for answer in answers],
        "unscorable": [outcome is None for outcome in outcomes]}))
