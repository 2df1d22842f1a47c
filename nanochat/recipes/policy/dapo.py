"""DAPO (Yu et al. 2025): GRPO on problems that have right and wrong solutions alone, of any number. arXiv 2503.14476.

Batches are drawn until --examples-per-step problems have solutions of both kinds (eq. 11); other groups are thrown
away, but count as sampled. A right solution earns 1, a wrong one -1 (eq. 7). The last --overlong-buffer tokens before
the limit of length cost up to 1 (eq. 13). Every token of the batch weighs the same (eq. 12), the clip range is wider
above than below (eq. 10), and there is no KL. The released settings have 16 solutions per problem and a buffer of 4096
of 20480 tokens.

Departures:
1. One optimizer step per batch (theirs: 16 on parts of it). At one the ratio is 1 and nothing is clipped; see
   --updates-per-batch.
2. A batch is drawn as large as the one that is trained on. The released settings draw three times as many problems.
3. Where --max-batches do not suffice, the groups that there are are trained on (ran_out). The released code stops.
4. Solutions that cannot be scored are left out, so a group may have fewer.
"""
from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.recipes.policy.grpo import ROLES, evaluate  # noqa: F401
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.measure.observe import log_rewards, log_variances
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.rollouts import Rollouts, join

STATUS = "works: 9.0 ± 3.7 above GRPO at equal steps, and 27.2 ± 6.1 below it at equal tokens"
SHOWN = {"generator": ["batches", "dropped/right", "dropped/wrong"]}
# Whether a group has right solutions, and wrong ones
KINDS = {(True, True): "mixed", (True, False): "right", (False, True): "wrong", (False, False): "unknown"}


def add_args(group) -> None:
    group.add_argument("--max-batches", type=at_least(1, int, 1000), default=10, help="that a step may draw")
    group.add_argument("--overlong-buffer", type=at_least(-1), default=-1,
                       help="the last tokens of --max-new-tokens, which are penalised; -1 = a fifth of it, 0 = none")
    group.set_defaults(clip_low=0.2, clip_high=0.28, aggregation="token", kl_coef=0.0)


def check(args, task) -> None:
    if args.overlong_buffer > args.max_new_tokens:
        raise BadInput(f"--overlong-buffer {args.overlong_buffer}: must be at most --max-new-tokens "
                       f"{args.max_new_tokens}")
    if args.num_samples < 2:
        raise BadInput("--num-samples 1: must be at least 2, for a group with right and wrong solutions")


def draws(args) -> dict[str, Draw]:
    """One for each batch; the groups that are trained on are of any."""
    size = (args.examples_per_step, args.num_samples, args.max_new_tokens, args.num_steps)
    return {label: Draw("generator", *size, trained=label == "solutions") for label in labels(args)}


def labels(args) -> list[str]:
    return ["solutions", *(f"batch_{i}" for i in range(2, args.max_batches + 1))]


def length_penalty(length: int, limit: int, buffer: int) -> float:
    """Eq. 13: 0 up to limit - buffer tokens, from there down to -1 at the limit."""
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer)) if buffer else 0.0


def play(t: Play):
    solutions = dynamic_sampling(t)
    if not t.total(len(solutions)):
        return  # on no rank a group of both kinds
    buffer = t.args.max_new_tokens // 5 if t.args.overlong_buffer < 0 else t.args.overlong_buffer
    outcome = [1.0 if right else -1.0 for right in solutions.columns["outcome"]]                 # eq. 7
    overlong = [length_penalty(n, solutions.limit, buffer) for n in solutions.lengths.tolist()]  # eq. 13
    rewards = [a + b for a, b in zip(outcome, overlong, strict=True)]
    advantages = t.advantages(solutions, rewards)  # eq. 9
    log_rewards(t, "generator", solutions, rewards)
    log_variances(t, "generator", solutions, {name: terminal_rewards(values, solutions.lengths)
                                              for name, values in (("outcome", outcome), ("overlong", overlong))})
    t.log("generator", t.mean({"rewards/overlong/mean": overlong}))
    yield Update("generator", [(solutions, advantages)])                                         # eq. 8


def dynamic_sampling(t: Play) -> Rollouts:
    """This rank's solutions of the first problems that are solved both rightly and wrongly, of --max-batches batches at
    most. Whose these are is decided over all ranks, so all draw as many batches."""
    P, G, drawn, kept, kinds = t.args.examples_per_step, t.args.num_samples, [], [], []
    for label in labels(t.args):
        solutions = t.solve(label, t.problems())
        outcomes = solutions.columns["outcome"] = t.check(solutions)
        groups = [outcomes[n: n + G] for n in range(0, len(solutions), G)]
        found = t.gather([KINDS[True in group, False in group] for group in groups])  # of all ranks
        first = [i for i, kind in enumerate(found) if kind == "mixed"][: P - kinds.count("mixed")]
        mine = {i // t.run.world for i in first if i % t.run.world == t.run.rank}
        kept.append(solutions.select([n for n, outcome in enumerate(outcomes)
                                      if n // G in mine and outcome is not None]))
        drawn.append(solutions)
        kinds += found
        if kinds.count("mixed") >= P:
            break
    log_draws(t, drawn, kept, kinds)
    return join(kept)


def log_draws(t: Play, drawn: list[Rollouts], kept: list[Rollouts], kinds: list[str]) -> None:
    """Logs how many batches were drawn, what became of their groups, and what share of the tokens was thrown away."""
    P, outcomes = t.args.examples_per_step, [o for batch in drawn for o in batch.columns["outcome"]]
    in_use, in_all = (t.total(sum(int(batch.lengths.sum()) for batch in batches)) for batches in (kept, drawn))
    share = {kind: kinds.count(kind) / len(kinds) for kind in KINDS.values()}
    share["surplus"] = max(0, kinds.count("mixed") - P) / len(kinds)
    t.log("generator", {
        "batches": len(drawn), "ran_out": int(kinds.count("mixed") < P), "dropped/tokens": 1 - in_use / max(1, in_all),
        **{f"dropped/{kind}": share[kind] for kind in ("right", "wrong", "unknown", "surplus")}}
        | t.mean({"rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes]}))
