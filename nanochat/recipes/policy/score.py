"""SCoRe (Kumar et al. 2024): RL on two attempts in a row, the second to correct the first. arXiv 2409.12917.

Stage I rewards the second attempt and ties the first to the starting weights. Stage II rewards both, the second with a
bonus alpha (r2 - r1). The paper's Table 5 has alpha 10, beta1 0.01, beta2 0.1 (MATH) or 0.25 (MBPP), and 3000 and 1500
steps. How many are stage I's was not found, nor any code of the authors. The loss is REINFORCE with the KL in its
weights: --advantage, --loss, --kl-coef and --aggregation have no effect.

Departures:
1. The baseline is the mean of the problem's other G - 1 episodes (RLOO), of either turn by itself. The paper names
   REINFORCE as of Ahmadian et al. 2024, which is where RLOO is from, but no number of samples.
2. --credit own: either attempt earns its own reward. The gradient of eq. 3 and 4 as written is --credit total, where
   the first attempt also earns the second's. With alpha 10 that is 11 r2 - 9 r1: a wrong first attempt then pays.
3. The KL is per token (k2) and is not carried back to earlier tokens. The first attempt in stage I has beta2 alone.
4. The mean is over the 2G attempts at a problem, half of that over G episodes.
5. One optimizer step per batch; all first attempts are the present policy's; AdamW's averages outlive stage I.
6. A tiny model learns the form of a second attempt by SFT first (chat_sft --demo-shares refine:0.5).
"""
from nanochat.cli import at_least
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.measure.scores import share_of
from nanochat.rl.play.pairs import check  # noqa: F401
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.prompts import refine_prompt

STATUS = "runs: its second attempt corrects nothing; one seed"
ROLES = {"generator": RoleSpec("--model-tag", reference=True)}
SHOWN = {"generator": ["stage", "turn2/accuracy", "turn2/delta"]}
TABLE = {"gen/pass1_in": "first attempt: greedy pass@1, in distribution",
         "gen/turn2_in": "second attempt",
         "gen/delta_in": "second less first",
         "gen/wrong_to_right_in": "wrong at first, then right",
         "gen/right_to_wrong_in": "right at first, then wrong",
         "gen/pass1_out": "first attempt, out of distribution",
         "gen/turn2_out": "second attempt, out of distribution"}
CREDIT = {"own": lambda own, later: own, "total": lambda own, later: own + later}  # what the first attempt earns


def add_args(group) -> None:
    group.add_argument("--stage1-steps", type=at_least(0), default=50, help="steps of stage I, out of --num-steps")
    group.add_argument("--alpha", type=at_least(0, float), default=10.0, help="weight of the bonus r2 - r1 in stage II")
    group.add_argument("--beta1", type=at_least(0, float), default=0.01, help="of the KL to the starting weights")
    group.add_argument("--beta2", type=at_least(0, float), default=0.1,
                       help="the same for the first attempt in stage I")
    group.add_argument("--credit", default="own", choices=list(CREDIT), help="rewards of the first attempt")


def draws(args) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    return {"solutions": Draw("generator", P, G, limit, trained=True, scored=1),
            "second": Draw("generator", P * G, 1, limit, trained=True, wrap=refine_prompt, quoted=limit,
                           scored=1)}


def turn_rewards(first: bool | None, second: bool | None, stage: int, alpha: float, credit: str = "own") -> tuple:
    """What either attempt earns, from the outcomes of both; None, None where one is not known."""
    if first is None or second is None:
        return None, None
    if stage == 1:
        own, later = 0.0, float(second)                                    # eq. 3
    else:
        own, later = float(first), second + alpha * (second - first)       # eq. 4 and the bonus
    return CREDIT[credit](own, later), later


def changes(outcomes: list) -> dict[str, list]:
    """Per episode whose outcomes (first, second) are known: second less first, wrong then right, right then wrong."""
    known = [(a, b) for a, b in outcomes if None not in (a, b)]
    return {"delta": [b - a for a, b in known], "wrong_to_right": [b > a for a, b in known],
            "right_to_wrong": [a > b for a, b in known]}


def play(t: Play):
    args, stage = t.args, 1 if t.steps["generator"] < t.args.stage1_steps else 2
    first = t.solve("solutions", t.problems())
    second = t.refine("second", first, [""] * len(first))  # about the first one nothing is said
    outcomes = list(zip(t.check(first), t.check(second), strict=True))
    rewards = list(zip(*(turn_rewards(a, b, stage, args.alpha, args.credit) for a, b in outcomes), strict=True))
    betas = (args.beta2 if stage == 1 else args.beta1), args.beta1

    parts = []
    for turn, rollouts, values, beta in zip((1, 2), (first, second), rewards, betas, strict=True):
        # Second attempts at a problem are one group too, although each has a prompt of its own.
        advantages = t.advantages(rollouts, values, groups=first.group_id, preset="rloo")
        log_ratio = t.logprobs("generator", rollouts) - t.logprobs("generator", rollouts, reference=True)  # (N, T)
        parts.append((rollouts, advantages - beta * log_ratio))  # adds beta (log pi - log ref)^2 / 2 to the loss
        kl = log_ratio.sum(dim=1).tolist()  # of a whole attempt
        t.log("generator", t.mean({f"turn{turn}/shaped_reward": values, f"turn{turn}/kl": kl}))

    right, right_then = ([pair[turn] for pair in outcomes] for turn in (0, 1))
    first.columns = {"outcome": right, "shaped_reward": rewards[0]}
    # their record shows the first attempt too
    second.columns = {"outcome": right, "second_outcome": right_then, "shaped_reward": rewards[1]}
    log_rewards(t, "generator", first, right)
    t.log("generator", {"stage": stage} | t.mean({
        "turn2/accuracy": right_then, **{f"turn2/{name}": values for name, values in changes(outcomes).items()},
        "turn2/copied": [a == b for a, b in zip(first.texts, second.texts, strict=True)],
        "turn2/mean_length": second.lengths.tolist(), "unscorable": [None in pair for pair in outcomes]}))
    yield Update("generator", parts, loss=PolicyLoss("reinforce"), aggregation="rollout")


def evaluate(t: Play) -> dict:
    """Greedy pass@1 of the first attempt, as other recipes have it, and what becomes of it in the second."""
    scores = {}
    for split, name in SPLITS.items():
        first = t.solve("eval", t.problems(t.args.eval_examples, split), 1, role="generator", greedy=True)
        second = t.refine("eval_second", first, [""] * len(first), 1, role="generator", greedy=True)
        pairs = t.gather([[a is True, b is True] for a, b in zip(t.check(first), t.check(second), strict=True)])
        found = {"pass1": [a for a, _ in pairs], "turn2": [b for _, b in pairs], **changes(pairs)}
        scores |= {f"gen/{key}_{name}": share_of(values) for key, values in found.items()}
    return scores
