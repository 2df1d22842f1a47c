"""AlphaProof (Hubert et al. 2025), the perfect-verifier arm: expert iteration against a kernel. arXiv 2202.01344.

AlphaProof (Nature, doi 10.1038/s41586-025-09833-y) has no arXiv number. The one above is of its nearest relative, the
expert iteration of Polu et al. 2022. All that is claimed here is what a verifier that is never wrong gives to RL.

The reward is the task's check: of task rewrite, a kernel. As in AlphaProof the model learns the found proofs by
cross-entropy, drawn from a window of the last ones, and failed attempts teach nothing (Methods, "Main RL"). The window
has one proof of each theorem, the shortest. --advantage, --loss, --aggregation, --kl-coef and --entropy-coef have a say
with --learner grpo alone, which learns from failures too. --reward claim, a control, pays whatever states what was to
be proved.

Test-time RL (Methods, "Scaling with TTRL") trains a specialist on targets and their variants. The targets are theorems
of --targets-of that the start proves neither greedily nor in --num-samples attempts. With --curriculum variants a place
of a batch has a target with chance --target-share, else a variant of one. A target that is proved is left alone, and so
are its variants. --curriculum rl is the control: the same targets and ordinary training. Other held-out theorems may be
among the variants: gen/targets/* is what counts.

Departures:
1. No tree search, no value, no tactics: a proof is written as a whole, and --num-samples are tried.
2. A reward of 1 for a proof, not -1 for each step. Shortest proofs are kept, which the -1 is for.
3. Nothing is disproved, as all theorems here are true. In the paper's pseudocode every second attempt is to disprove.
4. Theorems of the curriculum are drawn evenly. The paper's matchmaker prefers those that are proved now and then.
5. Batches are of found proofs alone; the paper mixes in 10% of its SFT proofs. Ours are wrong in part.
6. The model goes on from where it is, as in AlphaProof. Polu et al. fine-tune the start anew in each iteration.
7. Variants are made by the task's programs, with up to 3 changes. In the paper a language model writes most of them.
"""
import random
from dataclasses import replace

from nanochat.cli import SHARE, at_least
from nanochat.common import BadInput
from nanochat.rl.credit.aggregation import check_one_update
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import SPLITS, are_right
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.measure.scores import pass_at_k, share_of
from nanochat.rl.play.play import Draw, Play, Update, warn_once
from nanochat.rl.records.outcomes import answers_of, check_task
from nanochat.rl.records.prompts import count_copies
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.log_odds import learn_likelihood
from tasks.common import Problem

STATUS = "works: training on variants proves 21.7 ± 19.0 more of the targets; paid for a claim, it stops proving"
ROLES = {"generator": RoleSpec("--model-tag")}
SHOWN = {"generator": ["theorems_proved", "claimed_falsely", "proofs_known"]}
WINDOW = 1024  # theorems whose proofs are kept: the last ones that got a proof, or a shorter one
TABLE = {"gen/pass1_in": "proved greedily, in distribution",
         "gen/pass_k_in": "proved in --num-samples attempts",
         "gen/pass1_out": "proved greedily, out of distribution",
         "gen/pass_k_out": "proved in --num-samples attempts, out of distribution",
         "gen/targets/pass1": "targets proved greedily",
         "gen/targets/pass_k": "targets proved in --num-samples attempts"}


def add_args(group) -> None:
    group.set_defaults(kl_coef=0.0)  # the paper has none
    group.add_argument("--learner", default="expert_iteration", choices=list(LEARNERS))
    group.add_argument("--reward", default="kernel", choices=list(REWARDS))
    group.add_argument("--num-proofs", type=at_least(1), default=64, help="that an update of expert iteration draws")
    group.add_argument("--curriculum", default="rl", choices=list(CURRICULA), help="what is trained on")
    group.add_argument("--targets-of", default="", choices=["", *SPLITS], help="split of the targets")
    group.add_argument("--num-targets", type=at_least(1), default=20, help="targets at most")
    group.add_argument("--target-share", type=SHARE, default=0.1,
                       help="how often --curriculum variants has a target itself; 0 = it is never trained on")


def check(args, task) -> None:
    if args.learner == "expert_iteration":
        check_one_update(args)
    if args.curriculum == "variants":
        check_task(task, "variants")
        if not args.targets_of:
            raise BadInput(f"--curriculum variants: of which theorems? --targets-of is one of: {', '.join(SPLITS)}")


def draws(args) -> dict[str, Draw]:
    P, G, limit = args.examples_per_step, args.num_samples, args.max_new_tokens
    split = args.targets_of if args.curriculum == "variants" else "rl"  # a variant is about as long as its target
    attempts = {"solutions": Draw("generator", P, G, limit, trained=args.learner == "grpo", split=split)}
    found = {"proofs": Draw("generator", args.num_proofs, 1, limit, trained=True, teacher_forced=True, split=split)}
    return attempts if args.learner == "grpo" else attempts | found


REWARDS = {"kernel": "outcome", "claim": "claimed"}  # columns of the attempts


def of_targets(t: Play) -> tuple[list[Problem], list[int]]:
    """This rank's share of a batch of targets that are still to be proved and variants of them, and how often each has
    come before in the whole batch. Raises BadInput where there never was a target."""
    args, rng = t.args, random.Random(f"variants-{t.args.seed}-{t.step}")
    targets = [t.task.problem(args.targets_of, i) for i in t.memory["targets"]]
    if not targets:
        raise BadInput(f"--targets-of {args.targets_of}: the start leaves none of its first {args.eval_examples} "
                       f"theorems unproved, so there is no target")
    left = [target for target in targets if target.index not in t.memory["proved"]]
    if not left:
        warn_once(t, "all targets are proved, and nothing more is learned")
    drawn = [rng.choice(left) for _ in range(args.examples_per_step)] if left else []
    problems = [target if rng.random() < args.target_share else variant_of(t.task, target, targets, rng)
                for target in drawn]
    # A place of its own in the noise for every variant.
    problems = [problem if problem in targets else replace(problem, split="variants", index=t.step * len(drawn) + p)
                for p, problem in enumerate(problems)]
    share = slice(t.run.rank, None, t.run.world)
    return problems[share], count_copies(problems)[share]


def variant_of(task, target: Problem, targets: list[Problem], rng: random.Random) -> Problem:
    """A variant of a target that is no target itself. Raises BadInput where a thousand are."""
    prompts = {other.prompt for other in targets}
    for _ in range(1000):
        if (variant := task.variants(target, rng)).prompt not in prompts:
            return variant
    raise BadInput(f"task {task.name}: 1000 variants of {target.prompt!r} are targets too; lower --num-targets")


CURRICULA = {"rl": lambda t: (t.problems(), None), "variants": of_targets}


def shortest(rewards: list, lengths: list[int], group_id: list[int]) -> dict[int, int]:
    """Of each group that has a rewarded rollout the shortest of these, the first where several are."""
    found: dict[int, int] = {}
    for n, (reward, length, g) in enumerate(zip(rewards, lengths, group_id, strict=True)):
        if reward and (g not in found or length < lengths[found[g]]):
            found[g] = n
    return found


def remembered(window: dict[str, list], found: list[list], most: int) -> dict[str, list]:
    """The window with the proofs that were found ([theorem, answer, proof, problem's index]): a theorem keeps its
    shortest, and moves to the end when it gets another. The last `most` theorems stay."""
    for theorem, answer, proof, index in found:
        if theorem not in window or len(proof) < len(window[theorem][1]):
            window.pop(theorem, None)
            window[theorem] = [answer, proof, index]
    return dict(list(window.items())[-most:])


def expert_iteration(t: Play, attempts: Rollouts, rewards: list):
    """One step of cross-entropy on proofs drawn from the window."""
    best = shortest(rewards, [len(text) for text in attempts.texts], attempts.group_id.tolist())
    tried = [prompt.problem for prompt in attempts.prompts]
    rows = [[problem.prompt, problem.answer, attempts.texts[best[g]], problem.index] if g in best else None
            for g, problem in enumerate(tried)]
    found = [row for row in t.gather(rows) if row]
    window = t.memory["proofs"] = remembered(t.memory.get("proofs", {}), found, WINDOW)
    t.log("generator", {"proofs_known": len(window)})
    if not window:
        return
    rng = random.Random(f"proofs-{t.args.seed}-{t.step}")
    drawn = rng.sample(list(window.items()), min(t.args.num_proofs, len(window)))[t.run.rank:: t.run.world]
    problems = [Problem("proofs", index, theorem, answer) for theorem, (answer, _, index) in drawn]
    proofs = t.written("generator", t.solve_prompts(problems), [proof for _, (_, proof, _) in drawn])
    yield from learn_likelihood(t, "generator", proofs)


def grpo(t: Play, attempts: Rollouts, rewards: list):
    """One step of the policy gradient, of proofs against failed attempts."""
    yield Update("generator", [(attempts, t.advantages(attempts, rewards))])


LEARNERS = {"expert_iteration": expert_iteration, "grpo": grpo}


def play(t: Play):
    theorems, copies = CURRICULA[t.args.curriculum](t)
    attempts = t.solve("solutions", theorems, copies=copies)
    attempts.columns["outcome"] = t.check(attempts)
    answers = answers_of(t.task, attempts.texts)  # an attempt claims what was to be proved, be it proved or not
    attempts.columns["claimed"] = [a == problem.answer for a, problem in zip(answers, attempts.problems(), strict=True)]
    rewards = attempts.columns[REWARDS[t.args.reward]]
    log_rewards(t, "generator", attempts, rewards)
    log_proofs(t, attempts)
    if t.total(len(attempts)):  # none where every target is proved
        yield from LEARNERS[t.args.learner](t, attempts, rewards)


def log_proofs(t: Play, attempts: Rollouts) -> None:
    """Logs what was proved and what was only claimed, and notes the targets that were proved."""
    outcomes, claimed = attempts.columns["outcome"], attempts.columns["claimed"]
    proved = [False] * len(attempts.prompts)
    for g, outcome in zip(attempts.group_id.tolist(), outcomes, strict=True):
        proved[g] |= outcome is True
    steps = [len(solution.step_ends) for solution in t.read_solutions(attempts)]
    t.log("generator", t.mean({
        "proved": outcomes, "theorems_proved": proved, "claimed": claimed,
        "claimed_falsely": [said and outcome is False for said, outcome in zip(claimed, outcomes, strict=True)],
        "proof_steps": [num for num, outcome in zip(steps, outcomes, strict=True) if outcome],
        "unscorable": [outcome is None for outcome in outcomes]}))
    if t.args.curriculum == "variants":
        rows = [[prompt.problem.index, is_proved] if prompt.problem.split == t.args.targets_of else None
                for prompt, is_proved in zip(attempts.prompts, proved, strict=True)]
        tried = [row for row in t.gather(rows) if row]
        done = t.memory["proved"] = sorted({*t.memory["proved"], *(index for index, is_proved in tried if is_proved)})
        t.log("generator", {"targets/tried": len(tried), "targets/left": len(t.memory["targets"]) - len(done)})


def evaluate(t: Play) -> dict:
    """What is proved of both test splits, and of the targets, which the first evaluation, of the start, chooses."""
    scores, k = {}, t.args.num_samples
    for split, name in SPLITS.items():
        problems = t.problems(t.args.eval_examples, split)
        greedy = are_right(t.gather(t.check(t.solve("eval", problems, 1, role="generator", greedy=True))), split)
        outcomes = t.check(t.solve("eval_sampled", problems, k, role="generator"))
        groups = t.gather([outcomes[n: n + k] for n in range(0, len(outcomes), k)])
        sampled = are_right([outcome for group in groups for outcome in group], split)
        rows = [[right, sum(sampled[i * k: i * k + k])] for i, right in enumerate(greedy)]
        scores |= proved_of(rows, k, "gen/{}_" + name)
        if split == t.args.targets_of:
            unproved = [i for i, (right, num) in enumerate(rows) if not right and not num]
            targets = t.memory.setdefault("targets", unproved[: t.args.num_targets])
            t.memory.setdefault("proved", [])
            scores |= proved_of([rows[i] for i in targets], k, "gen/targets/{}") | {"gen/targets/num": len(targets)}
    return scores


def proved_of(rows: list[list], k: int, names: str) -> dict[str, float | None]:
    """The shares of theorems that are proved greedily and in k attempts, from [greedily, number of k]; None of none."""
    return {names.format("pass1"): share_of([right for right, _ in rows]),
            names.format("pass_k"): share_of([pass_at_k(k, num, k) for _, num in rows])}
