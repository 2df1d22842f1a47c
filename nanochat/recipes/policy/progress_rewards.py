"""Progress rewards (PAV, Setlur et al. 2024): what each step adds to a prover's chance of success. arXiv 2410.08146.

The values after a solution's steps are measured, not learned: a prover goes on from there several times, and the task
checks where it ends. PAV's step reward is the progress Q(after the step) - Q(before it) of a prover that keeps the
best of K. A step's tokens are weighed by the outcome plus alpha times the progress of that step alone (eq. 5): summed
over the steps to come, progress is Q(end) - Q(before), a baseline that teaches nothing, so --credit to_go is refused.
--step-values names other rewards of the same measurements: Math-Shepherd's hard and soft estimates (Wang et al. 2024,
arXiv 2312.08935) and GenPRM's relative progress. The prover is --prover-tag as it is, by default what the policy
starts from.

Departures:
1. The papers train a verifier on such estimates and let it reward; here they reward directly, at the cost of
   --continuations completions of each prefix. Equal prefixes share theirs.
2. Outcome and progress are each normalised within the group, or with --combine rewards together. The paper's are not.
3. A solution of more than --most-steps steps is rewarded by its outcome alone, and counted (step_abstained).
"""
from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.rl.credit.advantages import COMBINE, PRESETS, check_combine
from nanochat.rl.credit.rewards import CREDIT, at_step_ends, terminal_rewards
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards, log_variances
from nanochat.rl.measure.scores import pass_at_k
from nanochat.rl.measure.step_labels import METHODS, run_plans
from nanochat.rl.play.play import Draw, Play, Update, solution_draws
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.prefixes import prompt_after

STATUS = ("runs: with its start as the prover, as in the paper, no gain is shown (-2.3 ± 8.5); with a strong prover, "
          "of RL on gold step labels, 11.8 ± 7.9 above GRPO at equal steps, for six times the tokens")
ROLES = {"generator": RoleSpec("--model-tag"), "prover": RoleSpec("--prover-tag", trained=False)}
SHOWN = {"generator": ["rewards/step/mean", "step_abstained"]}
evaluate = pass_at_1
STEP_VALUES = ("pav", "math_shepherd", "math_shepherd_soft", "rpe")  # of METHODS those that ask in one round


def add_args(group) -> None:
    group.add_argument("--step-values", default="pav", choices=STEP_VALUES)
    group.add_argument("--continuations", type=at_least(1), default=8, help="completions of each prefix")
    group.add_argument("--best-of", type=at_least(1), default=4, help="pav: the prover keeps the best of so many")
    group.add_argument("--alpha", type=at_least(0, float), default=3.0,
                       help="weight of the steps' rewards beside the outcome's 1")
    group.add_argument("--most-steps", type=at_least(1), default=12, help="a longer solution has no step rewards")
    group.add_argument("--credit", default="own_step", choices=list(CREDIT), help="which tokens a step's reward moves")
    group.add_argument("--combine", default="advantages", choices=list(COMBINE),
                       help="how outcome and steps make one advantage, as in recipe tango")


def check(args, task) -> None:
    if args.best_of > args.continuations:
        raise BadInput(f"--best-of {args.best_of}: of --continuations {args.continuations} no so many can be kept")
    check_combine(args)
    if (args.step_values, args.credit) == ("pav", "to_go"):
        raise BadInput("--credit to_go: with --step-values pav it cancels, for progress to go is Q(end) - Q(before), a "
                       "baseline; see own_step")


def draws(args) -> dict[str, Draw]:
    num_prefixes = args.examples_per_step * args.num_samples * (args.most_steps + 1)
    return solution_draws(args) | {
        "continued": Draw("prover", num_prefixes, args.continuations, args.max_new_tokens, quoted=args.max_new_tokens)}


def play(t: Play):
    solutions = t.solve("solutions", t.problems())
    outcomes, read = t.check(solutions), t.read_solutions(solutions)
    step_ends = [s.step_ends for s in read]
    values = step_values(t, solutions, step_ends)
    sources = {"outcome": terminal_rewards(outcomes, solutions.lengths, t.args.negative_weight),
               "step": CREDIT[t.args.credit](at_step_ends(step_ends, values, t.device))}
    weighted = list(zip((1.0, t.args.alpha), sources.values(), strict=True))
    advantages = COMBINE[t.args.combine](weighted, solutions.group_id, solutions.mask, PRESETS[t.args.advantage],
                                         t.reduce)
    solutions.columns = {"outcome": outcomes, "step_values": values}
    log_rewards(t, "generator", solutions, outcomes)
    log_variances(t, "generator", solutions, sources)
    t.log("generator", t.mean({
        "rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes],
        "rewards/step/mean": [x for row in values for x in row or []],
        "step_abstained": [row is None for row in values]}))
    yield Update("generator", [(solutions, advantages)])


def step_values(t: Play, solutions: Rollouts, step_ends: list[list[int]]) -> list[list[float] | None]:
    """A number per reasoning step of each solution, by --step-values from the values of its prefixes; None where the
    continuations of one cannot be scored, or there are too many steps."""
    rows, prompts, method = solutions.completions(), solutions.prompt_of(), METHODS[t.args.step_values]
    few = [n for n, ends in enumerate(step_ends) if len(ends) <= t.args.most_steps]

    def values_of(asked: list[tuple[int, int]]) -> list[float | None]:
        """Of prefixes: the k-th of the i-th of these few solutions ends with its k-th step."""
        prefixes = [(prompts[n], tuple(rows[n][: step_ends[n][k - 1] + 1] if k else ()))
                    for n, k in ((few[i], k) for i, k in asked)]
        keys = [(prompt.problem, begun) for prompt, begun in prefixes]
        found = prefix_values(t, dict(zip(keys, prefixes, strict=True)), method.value)
        return [found[key] for key in keys]

    labels = dict(zip(few, run_plans([method.plan(len(step_ends[n])) for n in few], values_of), strict=True))
    return [labels.get(n) for n in range(len(solutions))]


def prefix_values(t: Play, prefixes: dict, value: str) -> dict:
    """What the prover's continuations of each prefix, a prompt and the tokens after it, are worth: the share that is
    right, or with value "best_of" the chance that one of --best-of is, without bias. None where too few can be
    scored."""
    N, K = t.args.continuations, t.args.best_of if value == "best_of" else 1
    asked = [prompt_after(prompt.ids, prompt.problem, list(begun)) for prompt, begun in prefixes.values()]
    rollouts = t.sample("continued", asked, N, tool=t.sampler.calculator_tool())
    begun = [begun for _, begun in prefixes.values() for _ in range(N)]
    texts = [t.tokenizer.decode([*before, *tokens[: len(tokens) - stopped]]) for before, tokens, stopped in zip(
        begun, rollouts.completions(), rollouts.stopped.tolist(), strict=True)]
    outcomes = t.check_texts(rollouts.problems(), texts)
    known = [[o for o in outcomes[i: i + N] if o is not None] for i in range(0, len(outcomes), N)]
    return {key: pass_at_k(len(row), sum(row), K) if len(row) >= K else None
            for key, row in zip(prefixes, known, strict=True)}
