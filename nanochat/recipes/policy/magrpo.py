"""MAGRPO (Liu et al. 2025): two agents with weights of their own learn from one joint reward. arXiv 2508.04652.

Both agents read the problem, and each writes a part of its solution without seeing the other's. Each samples G
completions. A joint action is a completion of either, and it earns 1 if the two together are right. --joint aligned
takes the g-th completions of both. cross takes all G^2 pairs, and the return of a completion is then the sum over its
pairs, as in the released code (OpenMLRL/CoMLRL). An agent's advantage is the return less the mean over its completions
of the problem. The loss is -A log pi: a sum over tokens, a mean over completions, without ratio, clip or KL, so --loss
and --aggregation have no say. The released code has G 4, aligned, temperature and top-p 0.6, top-k 50, and two turns.

Departures:
1. One turn. Theirs adds 0.9 times the mean return of the next turn, whose prompts hold what the environment says.
2. All tokens learn. Their loss loses the last one of each completion: it drops a logit too many.
3. --advantage has their baselines mean (dr_grpo, the default), rloo and raw (reinforce), and not their max.
4. A completion of which a pair cannot be scored teaches nothing. In theirs all rewards are known.
5. One optimizer step for a batch of problems (theirs: 2).
6. Both agents start from one checkpoint that writes either part (task halves, chat_sft --demo-shares first:0.4
   second:0.4).
"""
from dataclasses import replace
from functools import partial
from itertools import product

from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.learn.roles import RoleSpec, short_name
from nanochat.rl.measure.evals import SPLITS, are_right
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.measure.scores import share_of
from nanochat.rl.play.play import Draw, Play, Update
from nanochat.rl.records.outcomes import check_task
from nanochat.rl.records.prompts import quoting_prompt
from nanochat.rl.records.rollouts import Rollouts
from tasks.common import Problem

STATUS = "works: two agents find one convention, 51.8 ± 5.0 above one that learns beside a frozen partner"
ROLES = {"first": RoleSpec("--model-tag"), "second": RoleSpec("--model-tag")}
SHOWN = {"first": ["half_accuracy", "joint_accuracy", "agree"], "second": ["half_accuracy"]}
TABLE = {"joint/pass1_in": "joint solutions that are right: greedy, in distribution",
         "joint/sampled_in": "the same, sampled",
         "joint/agree_in": "pairs that follow one convention, greedy",
         "joint/sampled_agree_in": "the same, sampled",
         "fir/half_in": "halves of the first agent that are right, greedy",
         "sec/half_in": "of the second one",
         "joint/pass1_out": "joint solutions that are right: greedy, out of distribution"}
# Joint actions: of G completions of each agent, which ones are taken together
JOINT = {"aligned": lambda G: [(g, g) for g in range(G)], "cross": lambda G: list(product(range(G), repeat=2))}


def add_args(group) -> None:
    group.set_defaults(kl_coef=0.0, advantage="dr_grpo", aggregation="rollout")
    group.add_argument("--joint", default="aligned", choices=list(JOINT), help="completions that are taken together")
    group.add_argument("--frozen", default="none", choices=["none", "second"], help="the agent that stays as it is")


def check(args, task) -> None:
    check_task(task, "joint", "half_outcomes", "agrees")
    check_one_update(args)


def updates(args) -> dict[str, int]:
    return {role: 0 if role == args.frozen else args.num_steps for role in ROLES}


def draws(args) -> dict[str, Draw]:
    size = args.examples_per_step, args.num_samples, args.max_new_tokens
    return {role: Draw(role, *size, trained=True, wrap=partial(quoting_prompt, template=f"{role}_prompt"))
            for role in ROLES}


def returns_of(agent: int, actions: list[tuple[int, int]], outcomes: list[bool | None], num: int) -> list[float | None]:
    """The sum of the outcomes of the joint actions that each completion is in; None where one is not known."""
    returns: list[float | None] = [0.0] * num
    for action, outcome in zip(actions, outcomes, strict=True):
        n = action[agent]
        returns[n] = None if outcome is None or returns[n] is None else returns[n] + outcome
    return returns


def sample_parts(t: Play, problems: list[Problem], num_samples: int, label: str,
                 greedy: bool = False) -> list[Rollouts]:
    """What each agent writes."""
    return [t.sample(label.format(role), t.prompts(f"{role}_prompt", problems), num_samples, role=role, greedy=greedy,
                     tool=t.sampler.calculator_tool()) for role in ROLES]


def joint_texts(t: Play, parts: list[Rollouts], actions: list[tuple[int, int]]) -> list[str]:
    """What the completions of each joint action make together."""
    first, second = (part.texts for part in parts)
    return [t.task.joint(first[i], second[j]) for i, j in actions]


def play(t: Play):
    G, problems = t.args.num_samples, t.problems()
    parts = sample_parts(t, problems, G, "{}")
    actions = [(p * G + i, p * G + j) for p in range(len(problems)) for i, j in JOINT[t.args.joint](G)]
    texts = joint_texts(t, parts, actions)
    outcomes = t.check_texts([problems[i // G] for i, _ in actions], texts)
    log_joint(t, parts, outcomes, texts)
    for agent, (role, part) in enumerate(zip(ROLES, parts, strict=True)):
        returns = returns_of(agent, actions, outcomes, len(part))
        part.columns = {"partner": parts[1 - agent].texts,
                        "outcome": outcomes if t.args.joint == "aligned" else [None] * len(part)}
        log_rewards(t, role, part, returns)
        if role != t.args.frozen:
            yield Update(role, [(part, t.advantages(part, returns))], replace(t.loss, name="reinforce"),
                         aggregation="rollout")


def log_joint(t: Play, parts: list[Rollouts], outcomes: list[bool | None], texts: list[str]) -> None:
    """Logs how often joint solutions are right and follow one convention, and how often each agent's part is right."""
    t.log("first", t.mean({"joint_accuracy": outcomes, "agree": [t.task.agrees(text) for text in texts],
                           "unscorable": [outcome is None for outcome in outcomes]}))
    aligned_texts = joint_texts(t, parts, [(n, n) for n in range(len(parts[0]))])
    halves = list(map(t.task.half_outcomes, parts[0].problems(), aligned_texts))
    for agent, role in enumerate(ROLES):
        t.log(role, t.mean({"half_accuracy": [pair[agent] for pair in halves]}))


def evaluate(t: Play) -> dict:
    """The same of one joint solution of each problem, greedy and sampled."""
    scores = {}
    for split, name in SPLITS.items():
        problems = t.problems(t.args.eval_examples, split)
        for kind, greedy in (("", True), ("sampled_", False)):
            parts = sample_parts(t, problems, 1, f"eval_{kind}{{}}", greedy)
            texts = joint_texts(t, parts, [(n, n) for n in range(len(problems))])
            right = are_right(t.gather(t.check_texts(problems, texts)), split)
            halves = t.gather(list(map(t.task.half_outcomes, problems, texts)))
            scores |= {f"joint/{kind or 'pass1_'}{name}": share_of(right),
                       f"joint/{kind}agree_{name}": share_of(t.gather(list(map(t.task.agrees, texts))))}
            scores |= {f"{short_name(role)}/{kind}half_{name}": share_of([pair[agent] for pair in halves])
                       for agent, role in enumerate(ROLES)}
    return scores
