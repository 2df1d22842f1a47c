"""DPO (Rafailov et al. 2023): learn from pairs without a reward model, here from right against wrong. arXiv 2305.18290.

A pair is a right (chosen, y_w) and a wrong (rejected, y_l) solution of the same problem. Its loss is -log sigma(u) with
u = beta * [(log pi(y_w) - log ref(y_w)) - (log pi(y_l) - log ref(y_l))] (eq. 7): sums over the solutions' tokens, the
starting weights as ref. A step takes the mean over the pairs of all ranks. The loss is the recipe's own: --advantage,
--loss, --aggregation, --kl-coef and --entropy-coef have no say.

Departures:
1. Online: a step's pairs are sampled from the present model. The paper goes several times through a fixed set of pairs.
2. The preferences are the task's gold check, not people's: nothing says that they follow the Bradley-Terry model.
3. A problem gives as many pairs as it can without using a solution twice, so those that are solved half of the time
   weigh most.
"""
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.pairs import add_pair_args, check, learn_from_pairs  # noqa: F401
from nanochat.rl.play.play import Draw, Play

STATUS = "runs: it learns, from 16.4 to 53.6, and is 13.2 ± 9.6 below GRPO at equal tokens"
ROLES = {"generator": RoleSpec("--model-tag", reference=True)}
SHOWN = {"generator": ["pair_loss", "pair_accuracy", "margin"]}
add_args, evaluate = add_pair_args, pass_at_1


def draws(args) -> dict[str, Draw]:
    P, G = args.examples_per_step, args.num_samples
    return {"solutions": Draw("generator", P, G, args.max_new_tokens, trained=True, scored=1)}


def play(t: Play):
    solutions = t.solve("solutions", t.problems())
    outcomes = solutions.columns["outcome"] = t.check(solutions)
    log_rewards(t, "generator", solutions, outcomes)
    t.log("generator", t.mean({"unscorable": [o is None for o in outcomes]}))
    chosen, rejected = right_and_wrong(outcomes, solutions.group_id.tolist())                   # y_w > y_l | x
    paired, Q = solutions.select(chosen + rejected), len(chosen)  # no rollouts on a rank without pairs
    ref_logprobs = t.logprobs("generator", paired, reference=True)
    yield from learn_from_pairs(t, "generator", paired, list(range(Q)), list(range(Q, 2 * Q)), ref_logprobs)


def right_and_wrong(outcomes: list[bool | None], group_id: list[int]) -> tuple[list[int], list[int]]:
    """Pairs of a right and a wrong rollout of one group: its first right one with its first wrong one, and so on. None
    is neither. -> the indices of the chosen, those of the rejected"""
    groups: dict[int, tuple[list[int], list[int]]] = {}  # the right and the wrong rollouts of each
    for n, (g, outcome) in enumerate(zip(group_id, outcomes, strict=True)):
        if outcome is not None:
            groups.setdefault(g, ([], []))[0 if outcome else 1].append(n)
    pairs = [pair for group in groups.values() for pair in zip(*group, strict=False)]
    return [w for w, _ in pairs], [l for _, l in pairs]
