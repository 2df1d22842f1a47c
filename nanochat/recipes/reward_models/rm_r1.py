"""RM-R1 (Chen et al. 2025): a judge of pairs that works the problem before it judges, by RL. arXiv 2505.02387.

The verifier is shown a right and a wrong solution of a problem. It solves the problem itself, compares both with what
it found, and chooses. A choice of the right one earns 1, any other text -1: there is no reward for the form. With
--judge only it works the steps of both solutions instead. The generator of the solutions does not learn; recipe
fixed_verifier rewards one (--judge solve_pair, or pair).

Departures:
1. The judge learns the form by SFT on demonstrations (chat_sft --verifier-form solve_pair, or pair for --judge only),
   not by distilling another model's reasoning.
2. Rubrics, which the paper's judge writes for chats, are left out: every problem here is one to be solved.
3. Pairs are sampled solutions of which the task's check calls one right and one wrong, at most one of a problem.
4. The choice must be all of the final judgment. The released code looks for it in the last 80 characters.
"""
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.verify.comparing import (CHOICES_TABLE, add_judge_args, candidate_draws, chose_right, judge,
                                          learn_to_judge, read_choices, scores_of_pairs)

STATUS = "runs: that RL raises the pairs judged rightly is not shown (+17.2 ± 21.3), nor is a gain as a reward"
ROLES = {"generator": RoleSpec("--model-tag", trained=False),
         "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr")}
SHOWN = {"verifier": ["pair_acc", "parse_fail"]}
TABLE = CHOICES_TABLE
FORM = {"solve": "solve_pair", "only": "pair"}


def add_args(group) -> None:
    group.add_argument("--judge", default="solve", choices=list(FORM), help="whether it solves the problem first")
    add_judge_args(group)


def draws(args):
    return candidate_draws(args, FORM[args.judge], 2)


def play(t):
    rollouts, pairs = judge(t, FORM[t.args.judge], 2)
    choices = read_choices(t, rollouts)
    hits = [chose_right(choice, pair.right) for choice, pair in zip(choices, pairs, strict=True)]
    t.log("verifier", t.mean({"pair_acc": hits, "parse_fail": [choice is None for choice in choices]}))
    yield from learn_to_judge(t, rollouts, [1.0 if hit else -1.0 for hit in hits])


def evaluate(t) -> dict:
    return scores_of_pairs(t, FORM[t.args.judge])
