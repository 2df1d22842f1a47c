"""Debate with a judge that learns (RL Tango, Zha et al. 2025): it is paid for being right. arXiv 2505.15034.

Recipe debate, and the judge takes a step too. It learns from the verifications by which it has just rewarded the
debaters. One earns 1 if it chooses the side with the right answer, and else 0, also where no choice can be read. It is
compared (--advantage) with the other verifications of the same debate in the same order. The debaters see no gold
answer beside the two that they argue for.

Departures:
1. Arnesen et al. (arXiv 2409.16636) keep the judge as it is: this variant is none of theirs. Tango's verifier judges
   one solution, step by step, and is also paid for its form.
2. Where the debater has no pair to learn from the judge does not learn either.
"""
from nanochat.common import BadInput
from nanochat.recipes.self_play import debate
from nanochat.recipes.self_play.debate import TABLE, evaluate  # noqa: F401
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.verify.comparing import candidate_columns, chose_right, learn_to_judge, read_choices

STATUS = "runs: that its judge gets righter is not shown (+0.4 ± 11.6)"
ROLES = {**debate.ROLES, "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr")}
SHOWN = {**debate.SHOWN, "verifier": ["reward", "parse_fail"]}


def add_args(group) -> None:
    debate.add_args(group)
    group.set_defaults(verifications=2)


def check(args, task) -> None:
    debate.check(args, task)
    if args.verifications < 2:
        raise BadInput(f"--verifications {args.verifications}: must be at least 2, for a group")


def draws(args) -> dict[str, Draw]:
    return {name: draw._replace(trained=draw.trained or draw.role == "verifier")
            for name, draw in debate.draws(args).items()}


def play(t: Play):
    verifications, shown = yield from debate.play(t)
    if t.metrics["gen/num_pairs"] == 0:  # a step without an update counts, one of the judge alone would not
        return
    verifications.columns = candidate_columns(shown)
    choices = read_choices(t, verifications)
    t.log("verifier", t.mean({"parse_fail": [choice is None for choice in choices]}))
    rewards = [float(chose_right(choice, line.right)) for choice, line in zip(choices, shown, strict=True)]
    yield from learn_to_judge(t, verifications, rewards)
