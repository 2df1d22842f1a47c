"""SPIN (Chen et al. 2024): tell the SFT demonstrations from what the last iteration's model writes. arXiv 2401.01335.

An iteration begins with a snapshot of the generator, the opponent. For each problem of the SFT split and its
demonstration y the opponent writes y', and the generator takes a step on -log sigma(u) with u = beta * [(log pi(y) -
log opp(y)) - (log pi(y') - log opp(y'))] (eq. 4.7, where beta is lambda): DPO's loss with the demonstration chosen and
the opponent as reference. No reward and no gold answer is used; the game ends where the opponent writes as the
demonstrations do. So SPIN learns what they show, right or wrong: those of the chain task carry misconceptions, unless
--chain-wrongness 0 is given. --advantage, --loss, --aggregation, --kl-coef and --entropy-coef have no say.

Departures:
1. Fresh demonstrations and samples for every step of an iteration. The paper makes one set of pairs per iteration, goes
   through it several times, and from the second iteration on adds the set before.
2. --num-samples y' for each y, each a pair of its own. The paper has one (--num-samples 1).
3. An iteration has 50 updates, not thousands; beta stays 0.1, where the authors' code takes 5 in the last iteration.
"""
import random

from nanochat.cli import at_least
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.pairs import add_pair_args, learn_from_pairs
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.rollouts import Rollouts, join
from tasks.common import Problem, demo_of

STATUS = ("runs: it stays at its start (+0.2 ± 1.3), as its demonstrations are those of SFT; right ones help, on one "
          "seed")
ROLES = {"generator": RoleSpec("--model-tag"), "opponent": RoleSpec("--model-tag", trained=False)}
SHOWN = {"generator": ["pair_loss", "pair_accuracy", "margin", "frac_equal"]}


def add_args(group) -> None:
    add_pair_args(group)
    group.set_defaults(kl_coef=0.0, advantage="reinforce")  # no reference is kept, no group is compared
    group.add_argument("--iteration-steps", type=at_least(1), default=50, help="updates against one opponent")


def check(args, task) -> None:
    check_one_update(args)


def draws(args) -> dict[str, Draw]:
    P, G = args.examples_per_step, args.num_samples
    return {"opponent": Draw("opponent", P, G, args.max_new_tokens, split="sft"),
            "pairs": Draw("generator", P, G + 1, args.max_new_tokens, trained=True, teacher_forced=True, scored=2,
                          split="sft")}


def play(t: Play):
    iteration, after = divmod(t.steps["generator"], t.args.iteration_steps)
    if after == 0:
        t.copy_weights("generator", "opponent")  # theta_t
    problems, G = sft_problems(t), t.args.num_samples
    real = demonstrations(t, problems)                                         # y
    generated = t.solve("opponent", problems)                   # y' ~ p(. | x; theta_t)
    real.columns, generated.columns = {"outcome": t.check(real)}, {"outcome": t.check(generated)}
    log_rewards(t, "opponent", generated, generated.columns["outcome"])
    t.log("generator", {"iteration": iteration} | t.mean({"demonstrations_right": real.columns["outcome"]}))
    generated.sampler_logprobs.fill_(float("nan"))  # the opponent's: nothing to compare the generator's with
    rollouts, P = join([real, generated]), len(real)  # after one prompt for each problem
    chosen, rejected = [p for p in range(P) for _ in range(G)], list(range(P, P + P * G))
    yield from learn_from_pairs(t, "generator", rollouts, chosen, rejected, t.logprobs("opponent", rollouts))  # eq. 4.7


def sft_problems(t: Play) -> list[Problem]:
    """This rank's share of the step's problems of the SFT split, in order from its first."""
    P, rank, world = t.args.examples_per_step, t.run.rank, t.run.world
    return [t.task.problem("sft", i) for i in range(t.step * P + rank, (t.step + 1) * P, world)]


def demonstrations(t: Play, problems: list[Problem]) -> Rollouts:
    """The task's demonstration of each problem, a function of the seed and the problem."""
    streams = [random.Random(f"spin-{t.args.seed}-{problem.split}-{problem.index}") for problem in problems]
    texts = [demo_of(t.task, "solution_demo", problem, rng) for problem, rng in zip(problems, streams, strict=True)]
    return t.written("generator", t.solve_prompts(problems), texts)


def evaluate(t: Play) -> dict:
    """pass@1, and how unlikely held-out demonstrations are: -log pi per token."""
    real = demonstrations(t, t.problems(t.args.eval_examples, "test_in"))
    nll = -t.logprobs("generator", real).sum(dim=1) / real.lengths  # (N,)
    return pass_at_1(t, "generator") | {"gen/nll": t.mean({"nll": nll.tolist()})["nll"]}
