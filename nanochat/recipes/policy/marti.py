"""MARTI (Zhang et al. 2026): a team debates or works in a chain, paid for its progress too. MAPoRL, arXiv 2502.18439.

The paper is of ICLR 2026 (openreview E7jZqo0A50), its code TsinghuaC3I/MARTI, and the shaped reward is after MAPoRL.
With --graph debate each of --num-agents answers, and then answers again after another one's answer. With --graph chain
a generator answers, a verifier judges that, and a refiner answers after both. An answer earns R = 1 if it is right, a
verification if its verdict is (the code's conditional quality). From the second turn on R becomes R + alpha Delta. Q is
the mean of what the team has earned in the turns before. --shaping margin pays for being better: Delta = R - Q. quality
pays for staying right: Delta = QR - (1 - Q)(1 - R). Defaults are the code's.

Departures:
1. One model plays all agents (theirs has a switch for that). By default theirs has one for each.
2. An agent reads one other answer, that of the next agent. Theirs reads up to 5 in random order, its own among them.
3. Q is the team's in both graphs, as in their present code. Their page and an older class have the agent's own.
4. A text is compared with the other texts of its turn about the same problem. Their trainer takes groups of n by their
   place in a list of all agents' turns.
5. A verification without a readable verdict earns 0, as theirs. One of an unknown outcome has no reward. In their
   present code verifications are graded as answers are; the rule for them is of an older class.
6. Left out: graph mixture, the final outcome as a part of the reward, the agents' implicit reward model, tree search.
7. A tiny model learns the form of a further answer by SFT first (chat_sft --demo-shares refine:0.3, and --role both for
   the chain's verifier).
"""
from typing import NamedTuple

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.recipes.policy.score import changes
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import SPLITS, are_right, pass_at_1
from nanochat.rl.measure.observe import gathered_verdict_scores, log_rewards
from nanochat.rl.measure.scores import majority, outcome_of, share_of
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.prompts import empty_verifier_prompt, refine_prompt
from nanochat.rl.records.rollouts import Rollouts
from tasks.common import Problem

STATUS = ("runs: at GRPO's tokens plain debates are 6.7 ± 4.5 below it, chains 19.5 ± 11.6; last answers are no "
          "better than first ones")
ROLES = {"generator": RoleSpec("--model-tag")}
SHOWN = {"generator": ["final/accuracy", "final/delta"]}
TABLE = {"gen/pass1_in": "first answer: greedy pass@1, in distribution",
         "gen/final_in": "what the team answers at last",
         "gen/judged_in": "verdicts that are right (graph chain)",
         "gen/pass1_out": "first answer, out of distribution",
         "gen/final_out": "what the team answers at last, out of distribution"}


# (what a turn earns, mean of the turns before) -> Delta
SHAPING = {"none": lambda R, Q: 0.0, "margin": lambda R, Q: R - Q, "quality": lambda R, Q: Q * R - (1 - Q) * (1 - R)}


def shaped(R: float | None, Q: float | None, alpha: float, shaping: str) -> float | None:
    """R + alpha Delta; R itself where no turn before it is known."""
    return None if R is None else R + (0.0 if Q is None else alpha * SHAPING[shaping](R, Q))


def means_before(turns: list[list[float | None]], num: int, team: int) -> list[float | None]:
    """Q of each of the `num` rollouts of the next turn: the mean of the known rewards of its team, `team` rollouts in a
    row, in all turns so far; None where there are none. turns: the rewards of each (N,)"""
    starts = [n - n % team for n in range(num)]
    return [share_of([R for turn in turns for R in turn[i: i + team] if R is not None]) for i in starts]


# Graphs: (t, problems, samples of each, greedy) -> turns

class Turn(NamedTuple):
    """One turn of all teams."""
    name: str
    rollouts: Rollouts
    rewards: list[bool | None]  # whether each is right, None = not scorable: what it earns by itself


def debate(t: Play, problems: list[Problem], num_samples: int, greedy: bool = False) -> list[Turn]:
    """Answers, and answers after that of the next agent of the team."""
    first, team = t.solve("solutions", problems, num_samples, greedy=greedy), t.args.num_agents
    others = first.select([n - n % team + (n + 1) % team for n in range(len(first))])
    final = t.refine("final", others, [""] * len(first), greedy=greedy)
    return [Turn("first", first, t.check(first)), Turn("final", final, t.check(final))]


def chain(t: Play, problems: list[Problem], num_samples: int, greedy: bool = False) -> list[Turn]:
    """Answers, verifications of them, and answers after both."""
    first = t.solve("solutions", problems, num_samples, greedy=greedy)
    written = t.verify("verifications", first, greedy=greedy)
    verifications, outcomes = t.read_verifications(written), t.check(first)
    judged = [None if R is None else v.verdict == R for v, R in zip(verifications, outcomes, strict=True)]
    if not t.evaluating:
        found = gathered_verdict_scores(t, first, outcomes, verifications)
        t.log("generator", {f"verdicts/{name}": value for name, value in found.items()})
    final = t.refine("final", first, [v.text for v in verifications], greedy=greedy)
    return [Turn("first", first, outcomes), Turn("judged", written, judged), Turn("final", final, t.check(final))]


GRAPHS = {"debate": debate, "chain": chain}


def team_size(args) -> int:
    """Agents that answer side by side."""
    return args.num_agents if args.graph == "debate" else 1


def add_args(group) -> None:
    group.add_argument("--graph", default="debate", choices=list(GRAPHS), help="who works with whom")
    group.add_argument("--num-agents", type=at_least(2), default=2,
                       help="agents of a debate; --num-samples of each problem are dealt out to as many teams as there "
                            "are")
    group.add_argument("--shaping", default="margin", choices=list(SHAPING),
                       help="what a turn is paid for beside its own outcome")
    group.add_argument("--alpha", type=at_least(0, float), default=0.5, help="weight of that")
    group.add_argument("--verifier-max-new-tokens", type=at_least(1), default=112, help="in --graph chain")


def check(args, task) -> None:
    if args.graph == "chain" and args.num_agents != 2:
        raise BadInput(f"--num-agents {args.num_agents}: a chain has two, who solves and who verifies")
    if args.num_samples % team_size(args):
        raise BadInput(f"--num-samples {args.num_samples}: must be a multiple of --num-agents {args.num_agents}")


def draws(args) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    judged = args.verifier_max_new_tokens if args.graph == "chain" else 0
    found = {"solutions": Draw("generator", P, G, limit, trained=True),
             "final": Draw("generator", P * G, 1, limit, trained=True, wrap=refine_prompt, quoted=limit + judged)}
    if judged:
        found["verifications"] = Draw("generator", P * G, 1, judged, trained=True, wrap=empty_verifier_prompt,
                                      quoted=limit)
    return found


def play(t: Play):
    turns = GRAPHS[t.args.graph](t, t.problems(), t.args.num_samples)
    first, earned, parts = turns[0].rollouts, [], []
    for turn in turns:
        Qs = means_before(earned, len(first), team_size(t.args))
        rewards = [shaped(R, Q, t.args.alpha, t.args.shaping) for R, Q in zip(turn.rewards, Qs, strict=True)]
        # All texts of a turn at a problem are one group, although later ones have prompts of their own.
        parts.append((turn.rollouts, t.advantages(turn.rollouts, rewards, groups=first.group_id)))
        turn.rollouts.columns = {"outcome": turn.rewards, "shaped_reward": rewards}
        earned.append(turn.rewards)
        t.log("generator", t.mean({f"{turn.name}/accuracy": turn.rewards, f"{turn.name}/shaped_reward": rewards,
                                   f"{turn.name}/mean_length": turn.rollouts.lengths.tolist()}))
    log_rewards(t, "generator", first, earned[0])
    pairs = list(zip(earned[0], earned[-1], strict=True))
    t.log("generator", t.mean({"unscorable": [None in pair for pair in pairs],
                               **{f"final/{name}": values for name, values in changes(pairs).items()}}))
    yield Update("generator", parts)


def evaluate(t: Play) -> dict:
    """Greedy pass@1 of one agent alone, and what a team answers at last: a debate, whose agents are sampled, the
    majority of its last answers; a chain, greedy, its refiner's. A verdict on what cannot be scored is left out."""
    team = team_size(t.args)
    scores = pass_at_1(t, "generator") if team > 1 else {}  # the first answer of a chain is that
    for split, name in SPLITS.items():
        turns = GRAPHS[t.args.graph](t, t.problems(t.args.eval_examples, split), team, greedy=team == 1)
        answers, final, voted = t.answers(turns[-1].rollouts, team), turns[-1].rewards, []
        for i in range(0, len(final), team):
            said = answers[i: i + team]
            voted.append(outcome_of(majority(said), said, final[i: i + team]))
        outcomes = {turn.name: t.gather(turn.rewards) for turn in turns[:-1]} | {"final": t.gather(voted)}
        judged = [R for R in outcomes.pop("judged", []) if R is not None]
        scores |= {f"gen/{turn}_{name}": share_of(are_right(found, split)) for turn, found in outcomes.items()}
        if team == 1:
            scores |= {f"gen/pass1_{name}": scores[f"gen/first_{name}"], f"gen/judged_{name}": share_of(judged)}
    return scores
