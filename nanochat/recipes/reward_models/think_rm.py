"""Think-RM (Hong et al. 2025): a judge of pairs that thinks at length, by RL, binary or graded. arXiv 2505.16265.

The verifier is shown a right and a wrong solution of a problem, judges the steps of both and chooses. With --grades
binary the right choice earns 1. With --grades graded it also says how much better the chosen one is, from 1 to 3:
exactly what is true earns 1, the right choice alone 0.5. The generator of the solutions does not learn. The paper then
trains a policy on differences within a group: recipe think_rm_policy. Recipe fixed_verifier adds the judge's choices to
outcomes (--judge pair, or graded).

Departures:
1. Long thoughts are each step worked again, learned by SFT on demonstrations (chat_sft --verifier-form pair, or
   graded). The paper starts from the longest of several chains of thought of another model.
2. Preferences are the task's check, and their strengths how many more gold step labels are wrong in the wrong
   solution, at least 1 and at most 3. The paper's are people's, from -3 to 3.
3. At most one pair of a problem, both orders equally often. Only pairs are judged, no single solutions.
4. --kl-coef is 1e-3, as in all recipes (theirs: 1e-4).
"""
from nanochat.common import BadInput
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.records.outcomes import labels_of
from nanochat.rl.verify.comparing import (CHOICES_TABLE, Candidates, add_judge_args, candidate_draws, chose_right,
                                          judge, learn_to_judge, read_choices, scores_of_pairs)
from nanochat.rl.verify.forms import num_wrong, strength

STATUS = "runs: RL leaves it where SFT did, at 59% of pairs (-0.6 ± 2.6)"
ROLES = {"generator": RoleSpec("--model-tag", trained=False),
         "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr")}
SHOWN = {"verifier": ["pair_acc", "exact", "parse_fail"]}
TABLE = CHOICES_TABLE


# What a choice earns: (choice, the true one) -> reward

def binary_reward(choice: int | None, truth: int) -> float:
    """1 for the right choice, else 0."""
    return float(choice is not None and (choice > 0) == (truth > 0))


def graded_reward(choice: int | None, truth: int) -> float:
    """1 for the right choice with the right strength, 0.5 for the right choice, else 0."""
    return (binary_reward(choice, truth) + (choice == truth)) / 2


REWARDS = {"binary": binary_reward, "graded": graded_reward}
FORM = {"binary": "pair", "graded": "graded"}


def add_args(group) -> None:
    group.add_argument("--grades", default="binary", choices=list(REWARDS), help="of a choice")
    add_judge_args(group)


def check(args, task) -> None:
    if args.grades == "graded" and not getattr(task, "has_step_labels", True):
        raise BadInput(f"--grades graded: task {task.name} has no gold labels of steps")


def draws(args):
    return candidate_draws(args, FORM[args.grades], 2)


def true_choice(task, pair: Candidates) -> int:
    """The graded choice that is true of a pair: 3 where A is right and B has three wrong steps more."""
    wrong = [num_wrong(labels_of(task, pair.problem, text)) for text in pair.texts]
    return strength(*wrong) if pair.right == 0 else -strength(*wrong[::-1])


def play(t):
    rollouts, pairs = judge(t, FORM[t.args.grades], 2)
    choices = read_choices(t, rollouts, graded=t.args.grades == "graded")
    said = list(zip(choices, [true_choice(t.task, pair) for pair in pairs], strict=True))
    hits = [chose_right(choice, pair.right) for choice, pair in zip(choices, pairs, strict=True)]
    t.log("verifier", t.mean({"pair_acc": hits, "exact": [choice == truth for choice, truth in said],
                              "parse_fail": [choice is None for choice in choices]}))
    yield from learn_to_judge(t, rollouts, [REWARDS[t.args.grades](*row) for row in said])


def evaluate(t) -> dict:
    return scores_of_pairs(t, FORM[t.args.grades], graded=t.args.grades == "graded")
