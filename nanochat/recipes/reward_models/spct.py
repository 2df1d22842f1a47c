"""SPCT (Liu et al. 2025): a judge that writes principles, critiques and scores, by RL: DeepSeek-GRM. arXiv 2504.02495.

The verifier is shown --num-judged solutions of a problem, one of them right. It names the principles to judge by,
criticises each solution and scores it from 0 to 10. It earns 1 if the right one has the highest score and no other has
as much, else -1. A single solution must be scored 1 if it is right and 0 if not. There is no reward for the form. The
evaluation adds up k sampled votes. The generator of the solutions does not learn; recipe fixed_verifier rewards one
(--judge scores).

Departures:
1. Principles are the names of what will be checked, a critique is each step worked again, learned by SFT on
   demonstrations (chat_sft --verifier-form scores). The paper samples from a large model and rejects (RFT).
2. Scores are from 0 to 10, not from 1 to 10. A batch has one number of solutions, not several.
3. The meta filter keeps the half of the votes that the judge found likeliest, per token. The paper trains a meta
   reward model for that.
4. --kl-coef is 0.08 as in the paper, where less collapsed on some data.
"""
from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.measure.scores import share_of
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.comparing import (add_judge_args, candidate_draws, candidate_prompts, held_out_candidates,
                                          judge, learn_to_judge, mean_vote, read_scores, warn_of_form)
from nanochat.rl.verify.forms import MOST_SOLUTIONS

STATUS = ("runs: before RL 8 votes are 20.1 ± 5.1 better than one; no gain from RL is shown, and none from the meta "
          "filter; as a reward 12.7 ± 7.3 above GRPO on one of two machines")
ROLES = {"generator": RoleSpec("--model-tag", trained=False),
         "verifier": RoleSpec("--verifier-tag", "-ver", lr="--verifier-lr")}
SHOWN = {"verifier": ["ranked_right", "parse_fail"]}
VOTES = (1, 4, 8)  # k
TABLE = {**{f"ver/acc_k{k}_in": f"right solution scored highest, {k} vote{'s' * (k > 1)}" for k in VOTES},
         "ver/acc_meta_in": f"the same, the likelier half of {VOTES[-1]} votes",
         "ver/acc_k8_out": "8 votes, out of distribution", "ver/parse_fail_in": "votes without scores"}


def add_args(group) -> None:
    group.add_argument("--num-judged", type=at_least(1, int, MOST_SOLUTIONS), default=2, help="n, scored together")
    add_judge_args(group, least=1)
    group.set_defaults(kl_coef=0.08)


def check(args, task) -> None:
    if args.num_solutions < args.num_judged:
        raise BadInput(f"--num-solutions {args.num_solutions}: must be at least --num-judged {args.num_judged}")


def draws(args):
    return candidate_draws(args, "scores", args.num_judged)


def ranked_right(scores: list[float | None] | None, right: int) -> bool:
    """Whether the right solution has the highest score and no other as much; of a single one, whether its score is
    nearer to 1 where it is right (right 0), to 0 where it is wrong (right -1). What cannot be read is wrong."""
    if scores is None or None in scores:
        return False
    if len(scores) == 1:
        return scores[0] > 0.5 if right == 0 else scores[0] < 0.5
    return all(scores[right] > score for place, score in enumerate(scores) if place != right)


def play(t):
    rollouts, shown = judge(t, "scores", t.args.num_judged)
    scores = read_scores(t, rollouts, t.args.num_judged)
    hits = [ranked_right(row, line.right) for row, line in zip(scores, shown, strict=True)]
    t.log("verifier", t.mean({
        "ranked_right": hits, "parse_fail": [row is None for row in scores],
        "tied": [len(row) > 1 and row.count(max(row)) > 1 for row in scores if row is not None]}))
    yield from learn_to_judge(t, rollouts, [1.0 if hit else -1.0 for hit in hits])


def likelier_half(votes: list, likelihood: list[float]) -> list:
    """The half of the votes with the highest likelihood, ties going to the earlier one."""
    order = sorted(range(len(votes)), key=lambda i: -likelihood[i])
    return [votes[i] for i in sorted(order[: max(1, len(votes) // 2)])]


def mean_logprobs(rollouts: Rollouts) -> list[float]:
    """The mean logprob of each rollout's tokens, as they were sampled."""
    logprobs = rollouts.sampler_logprobs.masked_fill(~rollouts.mask, 0.0)
    return (logprobs.sum(dim=1) / rollouts.lengths.clamp(min=1)).tolist()


def evaluate(t) -> dict:
    """How often the right solution is scored highest on held-out candidates, by k votes and by the likelier half. The
    mean of votes ranks as their sum does."""
    found, n = {}, t.args.num_judged
    for split, name in SPLITS.items():
        mine = held_out_candidates(t, n, split)[t.run.rank:: t.run.world]
        rollouts = t.sample("votes", candidate_prompts(t, "scores", mine), VOTES[-1], role="verifier")
        votes, likelihood = read_scores(t, rollouts, n), mean_logprobs(rollouts)
        rows = []
        for i, line in enumerate(mine):
            own = slice(i * VOTES[-1], (i + 1) * VOTES[-1])
            by_k = {f"acc_k{k}": ranked_right(mean_vote(votes[own][:k], n), line.right) for k in VOTES}
            meta = ranked_right(mean_vote(likelier_half(votes[own], likelihood[own]), n), line.right)
            rows.append(by_k | {"acc_meta": meta, "parse_fail": votes[own].count(None) / VOTES[-1]})
        rows = t.gather(rows)
        scores = {key: share_of([row[key] for row in rows])
                  for key in (*(f"acc_k{k}" for k in VOTES), "acc_meta", "parse_fail")}
        warn_of_form(t, "scores", scores["parse_fail"])
        found |= {f"ver/{key}_{name}": value for key, value in scores.items()} | {f"ver/num_lineups_{name}": len(rows)}
    return found
