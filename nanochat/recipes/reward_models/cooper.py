"""Cooper (Hong et al. 2025): a policy and the reward model that scores it, trained together. arXiv 2508.05613.

The reward model reads the problem, the gold answer and a solution, and gives s, the log-odds of the verdict token at
the end. GRPO rewards the policy with sigma(s). A rule that knows the answer would be precise but miss right answers in
other forms; a reward model takes them, but a policy learns to please it. So the reward model is trained in each step
too, on a pair per problem: the first solution that the rule accepts, and a wrong version of it. What the policy has
found to please the reward model stands in both. --rm-pretrain steps of cross-entropy on the task's labelled solutions
come first. The rule is the task's `rule`, or its check where it has none; gold accuracy (rewards/outcome, pass1) is
always the check, which nothing here is trained on.

Departures:
1. s is the difference of two rows of the LM head. Theirs is a linear head of its own.
2. An LLM rewrites a right solution into a wrong one in the paper; here the task's `corrupt` does.
3. In --rm-pretrain the labels are the task's check of `corrupted_solution`; theirs are a rule's and an LLM's.
4. --lr and --rm-lr are for tiny models; theirs are 1e-6 and 1e-5. A policy that is too fast games the reward model
   before it has learned: on task brittle with --lr 3e-4 no solution was accepted any more, so no pair.
"""
import random

import torch

from nanochat.cli import at_least
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.credit.rewards import terminal_rewards
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.measure.observe import log_rewards, log_variances
from nanochat.rl.measure.scores import share_of
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.outcomes import check_task
from nanochat.rl.records.prompts import Prompt, reference_prompt
from nanochat.rl.records.rollouts import Rollouts, join
from nanochat.rl.verify.log_odds import (bce_coefficients, end_mask, end_read, ended, learn_verdicts, log_judgments,
                                         log_margins, log_odds, pair_coefficients, verdict_parts)
from tasks.common import Problem, demo_of

STATUS = ("runs: its frozen arm is gamed on three seeds; Cooper is not shown ahead of it (+24.5 ± 68.3) or of the rule "
          "(-8.7 ± 19.3)")
ROLES = {"generator": RoleSpec("--model-tag"), "rm": RoleSpec("--rm-tag", lr="--rm-lr")}
SHOWN = {"generator": ["rewards/outcome/mean", "reasoning_steps"], "rm": ["pair_loss", "pair_accuracy"]}
TABLE = {"gen/pass1_in": "greedy pass@1 by the gold check, in distribution",
         "gen/pass1_out": "the same, out of distribution",
         "gen/rule_in": "what the rule accepts of these", "gen/proxy_in": "what the reward model gives them"}
TRIES = 3  # to write a wrong version that the rule refuses

# What the policy is rewarded with: (log-odds, what the rule says) of each solution
POLICY_REWARDS = {"chance": lambda s, accepted: torch.sigmoid(s).tolist(), "verdict": lambda s, accepted: s > 0,
                  "rule": lambda s, accepted: accepted}


def add_args(group) -> None:
    group.add_argument("--policy-reward", default="chance", choices=list(POLICY_REWARDS), help="verdict: chance > .5")
    group.add_argument("--rm-update", default="pairs", choices=["pairs", "none"],
                       help="none: the reward model is frozen after --rm-pretrain")
    group.add_argument("--rm-pretrain", type=at_least(0), default=100,
                       help="steps of the reward model on labelled solutions before the policy's first")
    group.set_defaults(lr=5e-5, rm_lr=1e-3)


def check(args, task) -> None:
    if args.rm_update == "pairs":
        check_task(task, "corrupt")
    check_one_update(args)


def updates(args) -> dict[str, int]:
    return {"generator": args.num_steps, "rm": args.rm_pretrain + (args.num_steps if args.rm_update == "pairs" else 0)}


def draws(args) -> dict[str, Draw]:
    P, G = args.examples_per_step, args.num_samples
    given = dict(teacher_forced=True, wrap=reference_prompt, scored=2, quoted=args.max_new_tokens)  # the answer
    return {"solutions": Draw("generator", P, G, args.max_new_tokens, trained=True),
            "scored": Draw("rm", P, G, args.max_new_tokens + 1, **given),
            "taught": Draw("rm", P, G, args.max_new_tokens + 1, args.rm_pretrain, trained=True, **given),
            "pairs": Draw("rm", P, 2, args.max_new_tokens + 1, updates(args)["rm"] - args.rm_pretrain, trained=True,
                          **given)}


def eval_step(t: Play) -> int:
    """Evaluations go by the policy's steps; those before are counted down to 0."""
    return t.step - t.args.rm_pretrain


def with_answers(t: Play, problems: list[Problem]) -> list[Prompt]:
    """The problems with their gold answers, which solutions are scored after."""
    return t.each(lambda p: Prompt(reference_prompt(t.tokenizer, t.task.fmt, p.prompt, p.answer), p), problems)


def scores(t: Play, solutions: Rollouts) -> torch.Tensor:
    """s of each solution. -> (N,)"""
    scored = ended(t, "rm", with_answers(t, solutions.problems()), solutions)
    return end_read(scored, log_odds(t, "rm", scored))


def accepted_by_rule(t: Play, problems: list[Problem], texts: list[str]) -> list[bool | None]:
    rule = getattr(t.task, "rule", t.task.check)
    return t.each(lambda pair: rule(*pair), list(zip(problems, texts, strict=True)))


def play(t: Play):
    if t.step < t.args.rm_pretrain:
        yield from pretrain(t)
        return
    solutions = t.solve("solutions", t.problems())
    outcomes, s = t.check(solutions), scores(t, solutions)
    accepted = accepted_by_rule(t, solutions.problems(), solutions.texts)
    rewards = [float(r) if r is not None else None for r in POLICY_REWARDS[t.args.policy_reward](s, accepted)]
    advantages = t.advantages(solutions, rewards)
    solutions.columns = {"outcome": outcomes, "accepted": accepted, "chance": torch.sigmoid(s).tolist()}
    log_solutions(t, solutions, rewards)
    log_variances(t, "generator", solutions, {t.args.policy_reward: terminal_rewards(rewards, solutions.lengths)})
    yield Update("generator", [(solutions, advantages)])
    if t.args.rm_update == "pairs":
        yield from learn_pairs(t, solutions)


def pretrain(t: Play):
    """Cross-entropy of sigma(s) against the outcomes of G solutions of each problem, of which some are corrupted."""
    drawn = [(p, rng) for p in t.problems() for rng in [drawing(t, p)] for _ in range(t.args.num_samples)]
    texts = [demo_of(t.task, "corrupted_solution", *pair) for pair in drawn]
    prompts = with_answers(t, [p for p, _ in drawn])
    rollouts = t.written("rm", prompts, texts).with_prompts(prompts)
    outcomes = t.check(rollouts)
    known = [n for n, outcome in enumerate(outcomes) if outcome is not None]
    rollouts = rollouts.select(known)
    places = end_mask(rollouts, [])                                                              # (N, T)
    labels = places * torch.tensor([[float(outcomes[n])] for n in known], device=t.device).view(-1, 1)
    s = log_odds(t, "rm", rollouts)
    log_judgments(t, "rm", s, labels, places)
    yield from learn_verdicts(t, "rm", (verdict_parts(t, rollouts, bce_coefficients(s, labels, places)), len(known)))


def learn_pairs(t: Play, solutions: Rollouts):
    """-log sigma(s+ - s-), the mean over problems that have a pair; no update where none has."""
    chosen, wrong = pairs_of(t, solutions)
    right = solutions.select(chosen)
    prompts, Q = with_answers(t, right.problems()), len(chosen)
    pairs = join([ended(t, "rm", prompts, right), t.written("rm", prompts, wrong)])            # (2Q, T)
    s = end_read(pairs, log_odds(t, "rm", pairs))
    log_margins(t, "rm", s[:Q] - s[Q:])
    t.log("rm", t.mean({"has_pair": [1.0] * Q + [0.0] * (len(solutions.prompts) - Q)}))
    coefficients = pair_coefficients(s, list(range(Q)), list(range(Q, 2 * Q)))                 # +-sigma(-(s+ - s-))
    yield from learn_verdicts(t, "rm", (verdict_parts(t, pairs, coefficients[:, None] * end_mask(pairs, [])), Q))


def pairs_of(t: Play, solutions: Rollouts) -> tuple[list[int], list[str]]:
    """The first solution of each problem that the rule accepts, and a version of it that the rule refuses, of those
    that have both."""
    accepted, first = solutions.columns["accepted"], {}
    for n, g in enumerate(solutions.group_id.tolist()):
        if accepted[n]:
            first.setdefault(g, n)
    problems, chosen, wrong = solutions.problems(), [], []
    for n in first.values():
        rng = drawing(t, problems[n])
        for text in (t.task.corrupt(problems[n], solutions.texts[n], rng) for _ in range(TRIES)):
            if accepted_by_rule(t, [problems[n]], [text]) == [False]:
                chosen.append(n)
                wrong.append(text)
                break
    return chosen, wrong


def drawing(t: Play, problem: Problem) -> random.Random:
    """The random stream of a problem in this step."""
    return random.Random(f"{t.args.seed}-rm-{t.step}-{problem.index}")


def log_solutions(t: Play, solutions: Rollouts, rewards: list[float | None]) -> None:
    """Logs what the policy was rewarded with beside what its solutions are worth."""
    outcomes, accepted, chances = (solutions.columns[name] for name in ("outcome", "accepted", "chance"))
    log_rewards(t, "generator", solutions, rewards)
    of = lambda kind: [c for c, o in zip(chances, outcomes, strict=True) if o is kind]
    t.log("generator", t.mean({
        "rewards/outcome/mean": outcomes, "unscorable": [o is None for o in outcomes], "rewards/rule/mean": accepted,
        "rewards/chance/mean": chances, "chance_of_right": of(True), "chance_of_wrong": of(False),
        "reasoning_steps": [len(s.step_ends) for s in t.read_solutions(solutions)]}))


def evaluate(t: Play) -> dict:
    found = {}
    for split, name in SPLITS.items():
        solutions = t.solve("eval", t.problems(t.args.eval_examples, split), 1, role="generator", greedy=True)
        chances = torch.sigmoid(scores(t, solutions)).tolist()
        accepted = accepted_by_rule(t, solutions.problems(), solutions.texts)
        columns = [[o is True for o in t.check(solutions)], [a is True for a in accepted], chances]
        rows = t.gather([list(row) for row in zip(*columns, strict=True)])
        for k, key in enumerate(("pass1", "rule", "proxy")):
            found[f"gen/{key}_{name}"] = share_of([row[k] for row in rows])
    return found
