"""
The flags that all recipes share, and what is refused before anything is loaded or written.
"""
import argparse
import zlib
from argparse import BooleanOptionalAction
from itertools import combinations
from types import ModuleType

from nanochat.checkpoint import default_tag, load_meta, warn_of_role
from nanochat.cli import SHARE, at_least, check_name, in_words
from nanochat.common import BadInput, gather_lists, print0
from nanochat.engine import LEAST_TEMPERATURE
from nanochat.kernels.losses import KL_ESTIMATORS, POLICY_LOSSES
from nanochat.own_code import blaming
from nanochat.rl.credit.advantages import PRESETS
from nanochat.rl.credit.aggregation import AGGREGATIONS
from nanochat.rl.credit.schedules import add_schedule_args
from nanochat.rl.learn.heads import add_head_args, check_head
from nanochat.rl.learn.roles import RoleSpec, Start, head_of, name_of
from nanochat.rl.play.play import Draw
from nanochat.rl.records.outcomes import problems_of
from nanochat.rl.records.prompts import DEMOS, check_fit, longest_problem, template_of
from nanochat.rl.run.resume import MAY_CHANGE
from nanochat.rl.verify.forms import FORMS, form_of
from nanochat.storage.run import add_keep_arg
from tasks import make_task, own_flags, recorded_value, task_flags, warn_of_prompts
from tasks.common import SPLIT_BUCKETS, Problem

MOST_LR = 1000
COUNTS = ("num_prompts", "num_samples", "max_new_tokens", "times", "quoted", "scored")  # of a Draw
SOURCE = dict(default="sft", choices=["sft", "rl"],
              help="stage of that checkpoint; of rl the tag is a run's name and the role's")


def add_common_args(parser) -> None:
    parser.add_argument("--resume-from-step", default="-1",
                        help=f"continue --run from this step, which removes the checkpoints after it, or from its "
                             f"last with 'auto'; -1 = a fresh run; {in_words(MAY_CHANGE)}, and the learning rates of "
                             f"roles")
    parser.add_argument("--dry-run", action="store_true", help="print settings, memory, tokens and hours, and stop")
    parser.add_argument("--save-every", type=at_least(0), default=50, help="steps between checkpoints; 0 = at the end")
    add_keep_arg(parser)
    parser.add_argument("--num-steps", type=at_least(0), default=200, help="updates of the first role that is trained")
    parser.add_argument("--token-budget", type=at_least(0), default=0,
                        help="the run also ends once all roles have sampled so many tokens, evaluation apart, and what "
                             "is scheduled over a run follows these; 0 = no bound")
    add_model_args(parser.add_argument_group("models"))
    add_rollout_args(parser.add_argument_group("rollouts"))
    add_loss_args(parser.add_argument_group("advantages, loss and optimizer"))
    add_eval_args(parser.add_argument_group("evaluation and logs"))


def add_model_args(group) -> None:
    group.add_argument("--model-tag", default="", help="SFT checkpoint of the generator; default: the largest d<N>")
    group.add_argument("--model-source", **SOURCE)
    group.add_argument("--model-step", type=at_least(-1), default=-1,
                       help="step of the starting checkpoints; -1 = the last")
    group.add_argument("--shard", action=BooleanOptionalAction, default=False,
                       help="shard weights, gradients and optimizers over the ranks (FSDP2); changes no result")
    group.add_argument("--recompute", action=BooleanOptionalAction, default=False,
                       help="run blocks of imported models again instead of keeping activations; changes no result")


def add_rollout_args(group) -> None:
    group.add_argument("--examples-per-step", type=at_least(1), default=32, help="problems per step, over all ranks")
    group.add_argument("--num-samples", type=at_least(1), default=8, help="G: rollouts per prompt")
    group.add_argument("--num-labelled", type=at_least(0), default=0,
                       help="only the first so many problems of RL have a gold answer; 0 = all (tasks/few_labels.py)")
    group.add_argument("--labelled-share", type=SHARE, default=0.5,
                       help="with --num-labelled: share of a step's problems that are of these; 1 = no others")
    group.add_argument("--max-new-tokens", type=at_least(1), default=96, help="of a solution")
    group.add_argument("--temperature", type=at_least(LEAST_TEMPERATURE, float), default=1.0,
                       help="of sampling; evaluations are greedy by themselves")
    group.add_argument("--top-k", type=at_least(0), default=0, help="0 = the full softmax; else the ratio is biased")
    group.add_argument("--max-rows", type=at_least(1), default=1024,
                       help="rollouts per rank that decode together; changes memory, no result")
    group.add_argument("--max-cached-tokens", type=at_least(0), default=0,
                       help="tokens per rank whose keys and values are held while rollouts decode; 0: no bound but "
                            "--max-rows")
    group.add_argument("--count-copies", action=BooleanOptionalAction, default=False,
                       help="a right answer counts also where it is the problem's own text and not the gold's")
    group.add_argument("--calculator", action=BooleanOptionalAction, default=False,
                       help="solutions may call the calculator (python_start ... python_end)")


def add_loss_args(group) -> None:
    group.add_argument("--advantage", default="grpo", choices=list(PRESETS))
    group.add_argument("--negative-weight", type=SHARE, default=1.0,
                       help="factor on the negative advantages of outcomes, where --advantage makes them: below 1 what "
                            "is right weighs more than what is wrong; small weights need a start that works in steps")
    group.add_argument("--loss", default="ppo_clip", choices=list(POLICY_LOSSES))
    group.add_argument("--clip-low", type=at_least(0, float, 1e6), default=0.2)
    group.add_argument("--clip-high", type=at_least(0, float, 1e6), default=0.2)
    group.add_argument("--dual-clip", type=at_least(1, float, 1e6), default=None)
    group.add_argument("--sequence-ratio", action=BooleanOptionalAction, default=False,
                       help="a token's ratio is that of its whole sequence, to the power of 1 / length (GSPO)")
    group.add_argument("--kl", default="k3", choices=list(KL_ESTIMATORS))
    group.add_argument("--kl-coef", type=at_least(0, float), default=1e-3,
                       help="beta: weight of the KL to the starting weights")
    group.add_argument("--entropy-coef", type=at_least(0, float), default=0.0)
    group.add_argument("--aggregation", default="sequence", choices=list(AGGREGATIONS))
    group.add_argument("--updates-per-batch", type=at_least(1, int, 1000), default=1,
                       help="optimizer steps on each batch of rollouts")
    group.add_argument("--lr", type=at_least(0, float, MOST_LR), default=1e-4, help="AdamW; 1e-6 for 7B models")
    add_schedule_args(group, "constant", 0.0)
    group.add_argument("--max-grad-norm", type=at_least(0, float), default=1.0, help="0 = no clipping")
    group.add_argument("--micro-batch-tokens", type=at_least(1), default=4096,
                       help="tokens that go through a model at once; changes no result")
    group.add_argument("--prefix-sharing", action=BooleanOptionalAction, default=True,
                       help="run a group's prompt once per update, not once per rollout; changes no result")


def add_eval_args(group) -> None:
    group.add_argument("--eval-every", type=at_least(0), default=0, help="steps between evaluations; 0 = at both ends")
    group.add_argument("--eval-examples", type=at_least(1), default=400, help="problems per test split")
    group.add_argument("--log-rollouts", type=at_least(0), default=2,
                       help="problems per update (of those on rank 0) of which all rollouts go to rollouts.jsonl")
    group.add_argument("--log-theory", type=at_least(0), default=0,
                       help="problems per test split of which evaluations log pass@1, 2, 4 ... (and how many "
                            "weights have not moved); 0 = off")
    group.add_argument("--theory-samples", type=at_least(2), default=64, help="samples of each of them")


def add_role_args(group, roles: dict[str, RoleSpec]) -> None:
    """The flags of roles that are not there yet. Raises BadInput for one that means something else."""
    known = group._option_string_actions
    taken = set(known) - {"--model-tag", "--model-source", "--lr"}
    for role, spec in roles.items():
        for flag in {spec.tag, spec.source, spec.lr} & taken or {spec.tag} & {spec.lr, "--lr"}:
            raise BadInput(f"{flag} of role {role}: this flag means something else")
        if spec.tag not in known:
            group.add_argument(spec.tag, default="",
                               help=f"SFT checkpoint of the {role}; default: <model-tag>{spec.ending}")
            group.add_argument(spec.source, **SOURCE)
        if spec.trained and spec.lr not in known:
            group.add_argument(spec.lr, type=at_least(0, float, MOST_LR), default=None,
                               help=f"learning rate of the {role}, if not --lr")
        if spec.shares and "--verifier-head" not in known:
            add_head_args(group, role, spec.shares)


def check_args(args, world: int) -> None:
    """Refuses what cannot work, before anything is loaded or written."""
    if hasattr(args, "verifier_head"):
        check_head(args)
    if args.shard and world == 1:
        raise BadInput("--shard: there is one rank, so nothing to shard over; start several with torchrun")
    if args.examples_per_step % world or args.eval_examples < world:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the {world} ranks (and "
                       f"--eval-examples at least that)")
    has_ratio = args.updates_per_batch > 1 and args.loss != "reinforce"
    if args.sequence_ratio and (not has_ratio or args.aggregation != "sequence"):
        raise BadInput("--sequence-ratio: needs --updates-per-batch above 1, --aggregation sequence and a --loss with "
                       "a ratio")
    is_default = args.aggregation == "sequence" and "aggregation" not in getattr(args, "explicit", set())
    if args.advantage == "dr_grpo" and is_default:
        raise BadInput("--advantage dr_grpo: Dr. GRPO also sums over tokens: add --aggregation constant, or "
                       "--aggregation sequence to keep the mean over each rollout's tokens")
    if args.num_samples < 2 and PRESETS[args.advantage].scope == "group" and PRESETS[args.advantage].center != "none":
        raise BadInput(f"--num-samples 1: --advantage {args.advantage} compares the rollouts of a group and needs at "
                       f"least 2")


def complete_args(args, roles: dict[str, RoleSpec]) -> None:
    """Gives the flags of roles their defaults. Raises BadInput."""
    args.model_tag = args.model_tag or default_tag(args.model_source)
    for spec in roles.values():
        name, rate = name_of(spec.tag), name_of(spec.lr)
        ending = "" if head_of(args, spec).is_joint else spec.ending  # both roles are in one checkpoint
        setattr(args, name, getattr(args, name) or args.model_tag + ending)
        check_name(spec.tag, getattr(args, name))
        if spec.trained and getattr(args, rate) is None:
            setattr(args, rate, args.lr)


def check_problems(args, task, tokenizer, draws: dict[str, Draw], configs: dict, device) -> list[str]:
    """The problems' texts. Raises BadInput for one that does not fit, an empty split and ranks that differ."""
    task.problem("test_in", 0)  # what is evaluated must be there
    splits = dict.fromkeys(["rl", "test_in", "test_out", *(draw.split for draw in draws.values())])
    by_split = {split: problems_of(task, split, -1) for split in splits}
    if empty := [split for split in ("rl", "test_in") if not by_split[split]]:
        raise BadInput(f"--task {args.task}: it has no problems for split {empty[0]}")
    warn_of_shared(by_split)
    problems = [task.problem("rl", 0), *(problem for of_split in by_split.values() for problem in of_split)]
    checksum = zlib.crc32("\n".join(problem.prompt + problem.answer for problem in problems).encode())
    if len(set(gather_lists([checksum], device))) > 1:
        raise BadInput(f"--task {args.task}: the ranks have loaded different problems; are their files the same?")
    prompts = [problem.prompt for problem in problems]
    longest = longest_problem(tokenizer, prompts)
    for draw in draws.values():
        check_fit(draw.role, draw.wrap, draw.quoted, draw.max_new_tokens, configs[draw.role].sequence_len, tokenizer,
                  task.fmt, longest, draw.remedy)
    return prompts


def warn_of_shared(by_split: dict[str, list[Problem]]) -> None:
    """Says where splits have problems in common, which are then not held out."""
    texts = {split: {problem.prompt for problem in problems} for split, problems in by_split.items()}
    for split, other in combinations(texts, 2):
        if shared := texts[split] & texts[other]:
            print0(f"WARNING: splits {split} and {other} share {len(shared)} of the {len(texts[other])} problems "
                   f"that were looked at, for example {min(shared)[:60]!r}")


def check_task(args, task, starts: dict[str, Start]) -> None:
    """Raises BadInput for a start from another task, or problems of other flags, that nobody has asked for."""
    explicit = getattr(args, "explicit", set())
    for name, start in starts.items():
        where = start.path("meta.json")
        recorded = load_meta(where)[0]["user_config"]
        num_steps = recorded.get("num_steps")
        if start.source == "sft" and isinstance(num_steps, int) and start.step < num_steps:
            print0(f"WARNING: the {name} starts from step {start.step} of {start.tag}, "
                   f"whose SFT was to make {num_steps}")
        warn_of_prompts(start.tag, recorded, args, name)
        if recorded.get("task", args.task) != args.task and "task" not in explicit:
            raise BadInput(f"the {name}'s checkpoint {start.tag} was trained on task {recorded['task']}, and this run "
                           f"is on {args.task} by default: say --task {recorded['task']}, or --task {args.task}")
        if recorded.get("task") != args.task or hasattr(task, "num_problems"):
            continue  # a finite task's flags say where its files are
        defaults = task_flags() | own_flags(args.task)
        for flag in defaults.keys() & recorded.keys() - explicit:
            value = recorded_value(recorded, flag, defaults[flag], where)
            other = argparse.Namespace(**vars(args) | {flag: value})
            if value != getattr(args, flag) and first_problems(make_task(other)) != first_problems(task):
                words, own = f"--{flag.replace('_', '-')}", getattr(args, flag)
                raise BadInput(f"the {name}'s checkpoint {start.tag} was trained with {words} {recorded[flag]}, and "
                               f"this run has {own} by default: say {words} {recorded[flag]}, or {words} {own}")


def warn_of_starts(starts: dict[str, Start], draws: dict[str, Draw]) -> None:
    """Says where a starting checkpoint was trained in another role, or not taught the form of verification or the kind
    of demonstration that it is asked for. A verifier that reads the generator's prompts may start from either role."""
    warnings = []
    for name, start in starts.items():
        meta, _ = load_meta(start.path("meta.json"))
        config, of_role = meta["user_config"], [draw for draw in draws.values() if draw.role == name]
        asked = {form_of(draw.wrap) for draw in of_role} - {""}
        if name != "verifier" or asked:
            warn_of_role(start.tag, meta, name)
        taught = config.get("verifier_form")
        if config.get("role") in ("verifier", "both") and taught in FORMS and asked - {taught}:
            warnings.append(f"{start.tag} was taught verifications of form {taught} (chat_sft --verifier-form), and is "
                            f"asked for form {min(asked - {taught})} here")
        if name != "verifier" and asked and config.get("role") == "generator":
            warnings.append(f"the SFT of {start.tag} had no verifications (chat_sft --role both), and here it is asked "
                            f"for them")
        if isinstance(shares := config.get("demo_shares"), list):
            known = {DEMOS.get(str(text).partition(":")[0]) for text in shares}
            wanted = {template_of(draw.wrap) for draw in of_role if not draw.teacher_forced} - known
            for template in sorted(wanted & set(DEMOS.values())):
                kinds = " or ".join(kind for kind, of_kind in DEMOS.items() if of_kind == template)
                warnings.append(f"the SFT of {start.tag} had no demonstrations of kind {kinds} (chat_sft "
                                f"--demo-shares), and here it is asked for them")
    for text in dict.fromkeys(warnings):  # two roles may start from one checkpoint
        print0(f"WARNING: {text}")


def first_problems(task) -> list[tuple[str, str]]:
    """The first problems of RL, by which flags that change problems are told from others."""
    return [(problem.prompt, problem.answer) for problem in problems_of(task, "rl", 20)]


def check_draws(name: str, roles: dict[str, RoleSpec], draws: dict[str, Draw]) -> None:
    """Raises BadInput for declarations of a recipe that cannot be."""
    if not draws or not isinstance(draws, dict) or not all(isinstance(draw, Draw) for draw in draws.values()):
        raise BadInput(f"--recipe {name}: its draws() must give a dict of names and Draws")
    for label, draw in draws.items():
        numbers = {field: value or 0 for field, value in draw._asdict().items() if field in COUNTS}
        wrong = next((field for field, value in numbers.items() if not isinstance(value, int) or value < 0), None)
        if wrong or not callable(draw.wrap) or draw.split not in SPLIT_BUCKETS:
            raise BadInput(f"--recipe {name}: its draws() declare {label!r} with {wrong or 'wrap or split'} as "
                           f"nothing that can be: {numbers.get(wrong, (draw.wrap, draw.split))}")
        if draw.role not in roles:
            raise BadInput(f"--recipe {name}: its draws() name a role {draw.role}; there are {', '.join(roles)}")
        if min(draw.num_prompts, draw.num_samples, draw.max_new_tokens) < 1:
            raise BadInput(f"--recipe {name}: its draws() declare nothing to sample as {label}: prompts, samples "
                           f"and --max-new-tokens must be at least 1")
    learned = {draw.role for draw in draws.values() if draw.trained}
    if idle := [role for role, spec in roles.items() if spec.trained and role not in learned]:
        raise BadInput(f"--recipe {name}: {idle[0]} is trained, and none of its draws() is trained=True")


def with_times(args, draws):
    """The draws with --num-steps where they do not say in how many steps of a run they happen."""
    return {name: draw._replace(times=args.num_steps) if draw.times is None else draw for name, draw in draws.items()}


def ask(name: str, recipe: ModuleType, part: str, *args):
    """What a recipe's function, if it has it, answers before the run. Raises BadInput, with the line, for any error."""
    with blaming(f"--recipe {name}: {part}()", recipe.__file__):
        return getattr(recipe, part)(*args) if hasattr(recipe, part) else None
