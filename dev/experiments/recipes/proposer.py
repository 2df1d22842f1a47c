"""A proposer beside the pair (ours): Tango with a third model that proposes half of the problems. After 2505.15034.

The proposer writes problems after given ones, by its SFT (chat_sft --demo-shares propose:0.5). Those that can be read,
with the answer that the task works out, take the place of the given ones, and the generator and its verifier play as in
recipe tango. A proposal earns 4 p (1 - p), where p is the share of its solutions that are right, and nothing where it
is no problem; what it earns is compared with the whole batch. The verifier learns from solutions of given problems.
"""
from nanochat.recipes.tango import tango
from nanochat.recipes.tango._judged import written
from nanochat.recipes.tango._phases import begin_phase, eval_step  # noqa: F401
from nanochat.recipes.tango._pool import keep
from nanochat.recipes.tango.tango import TABLE, add_args, evaluate  # noqa: F401
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play import proposals
from nanochat.rl.play.play import Draw, Update

ROLES = {**tango.ROLES, "proposer": RoleSpec("--proposer-tag", "-pro", lr="--proposer-lr")}
SHOWN = {**tango.SHOWN, "proposer": ["proposals/valid", "proposals/solved"]}


def check(args, task) -> None:
    tango.check(args, task)
    proposals.check(args, task)


def updates(args) -> dict[str, int]:
    return {**tango.updates(args), "proposer": args.num_steps}


def draws(args):
    proposed = Draw("proposer", args.examples_per_step // 2, 1, args.max_new_tokens, trained=True,
                    wrap=proposals.propose_prompt)
    return {**tango.draws(args), "proposals": proposed}


def play(t):
    if begin_phase(t) != "generator":
        yield from tango.verifier_step(t)
        return
    given, G = t.problems(), t.args.num_samples
    half = len(given) // 2
    found = proposals.propose(t, "proposer", given[:half], 1, "proposals")
    problems = [new or old for new, old in zip(found.problems, given, strict=False)] + given[half:]
    update, = tango.generator_step(t, written, problems=problems)
    solutions, _ = update.parts[0]
    keep(t, solutions.select([n for n, problem in enumerate(solutions.problems()) if problem.split == "rl"]))
    solved = proposals.accuracies(solutions.columns["outcome"], G)[:half]
    solved = [share if new else None for share, new in zip(solved, found.problems, strict=True)]
    earned = [proposals.earns(why, share, proposals.parabola)
              for why, share in zip(found.refusals, solved, strict=True)]
    proposals.log_proposals(t, "proposer", found, reward=earned, solved=solved)
    log_rewards(t, "proposer", found.rollouts, earned)
    yield update
    yield Update("proposer", [(found.rollouts, t.advantages(found.rollouts, earned, preset="reinforce++"))])
