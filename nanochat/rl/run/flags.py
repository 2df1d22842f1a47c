"""
The flags that all recipes share, and what is refused before anything is loaded or written.
"""
import argparse
import zlib
from itertools import combinations

from nanochat.checkpoint import default_tag, load_meta, warn_of_role
from nanochat.common import BadInput, check_choices, check_least, check_most, check_name, gather_lists, in_words, print0
from nanochat.engine import check_temperature
from nanochat.kernels.losses import KL_ESTIMATORS, POLICY_LOSSES
from nanochat.rl.credit.advantages import PRESETS
from nanochat.rl.credit.aggregation import AGGREGATIONS
from nanochat.rl.credit.schedules import LR_SCHEDULES
from nanochat.rl.learn.heads import HEADS, OPTIMIZERS, add_head_args, check_head, is_joint
from nanochat.rl.learn.roles import RoleSpec, Start, head_of, name_of
from nanochat.rl.play.play import Draw
from nanochat.rl.records.outcomes import problems_of
from nanochat.rl.records.prompts import DEMOS, check_fit, longest_problem, template_of
from nanochat.rl.run.resume import MAY_CHANGE
from nanochat.rl.verify.forms import FORMS, form_of
from nanochat.storage.run import add_keep_arg
from tasks import make_task, recorded_value, task_flags
from tasks.common import SPLIT_BUCKETS, Problem

TABLES = {"advantage": PRESETS, "loss": POLICY_LOSSES, "kl": KL_ESTIMATORS, "aggregation": AGGREGATIONS,
          "lr_schedule": LR_SCHEDULES}
LEAST = {"num_steps": 0, "examples_per_step": 1, "num_samples": 1, "max_rows": 1, "max_cached_tokens": 0,
         "max_new_tokens": 1, "top_k": 0, "updates_per_batch": 1, "micro_batch_tokens": 1, "eval_examples": 1,
         "kl_coef": 0, "lr": 0, "save_every": 0, "keep": 0, "eval_every": 0, "clip_low": 0, "clip_high": 0,
         "dual_clip": 1, "model_step": -1, "max_grad_norm": 0, "log_rollouts": 0, "entropy_coef": 0, "log_theory": 0,
         "theory_samples": 2}
MOST_LR, MOST_UPDATES = 1000, 1000  # an update that is begun is carried through with all of its optimizer steps
COUNTS = ("num_prompts", "num_samples", "max_new_tokens", "times", "quoted", "scored")  # of a Draw


SOURCES = ("sft", "rl")
SOURCE_HELP = f"stage of that checkpoint, one of: {', '.join(SOURCES)}; of rl the tag is a run's name and the role's"


def add_common_args(parser) -> None:
    parser.add_argument("--resume-from-step", default="-1",
                        help=f"continue --run from this step, which removes the checkpoints behind it, or from its "
                             f"last with 'auto'; -1 = a fresh run; {in_words(MAY_CHANGE)}, and the learning rates of "
                             f"roles")
    parser.add_argument("--dry-run", action="store_true",
                        help="print the resolved settings, memory per rank, tokens per step and hours, and stop")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; 0 = at the end only")
    add_keep_arg(parser)
    parser.add_argument("--num-steps", type=int, default=200, help="updates of the recipe's first role that is trained")
    models = parser.add_argument_group("models")
    models.add_argument("--model-tag", default="", help="SFT checkpoint of the generator; default: the largest d<N>")
    models.add_argument("--model-source", default="sft", help=SOURCE_HELP)
    models.add_argument("--model-step", type=int, default=-1, help="step of the starting checkpoints; -1 = the last")
    models.add_argument("--shard", action=argparse.BooleanOptionalAction, default=False,
                        help="shard weights, gradients and optimizers over the ranks (FSDP2); changes no result")
    models.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=False,
                        help="run blocks of imported models again in the backward pass instead of keeping their "
                             "activations; changes no result")
    rollout = parser.add_argument_group("rollouts")
    rollout.add_argument("--examples-per-step", type=int, default=32, help="problems per step, over all ranks")
    rollout.add_argument("--num-samples", type=int, default=8, help="G: rollouts per prompt")
    rollout.add_argument("--max-new-tokens", type=int, default=96, help="of a solution")
    rollout.add_argument("--temperature", type=float, default=1.0)
    rollout.add_argument("--top-k", type=int, default=0, help="0 = the full softmax; anything else biases the ratio")
    rollout.add_argument("--max-rows", type=int, default=1024,
                         help="rollouts per rank that decode together; changes memory, no result")
    rollout.add_argument("--max-cached-tokens", type=int, default=0,
                         help="tokens per rank whose keys and values are held while rollouts decode: where prompts or "
                              "completions are long, fewer decode together; 0: no bound but --max-rows")
    rollout.add_argument("--calculator", action=argparse.BooleanOptionalAction, default=False,
                         help="solutions may call the calculator (python_start ... python_end); its output is forced "
                              "and not trained")
    loss = parser.add_argument_group("advantages, loss and optimizer")
    loss.add_argument("--advantage", default="grpo", help=f"one of: {', '.join(PRESETS)}")
    loss.add_argument("--loss", default="ppo_clip", help=f"one of: {', '.join(POLICY_LOSSES)}")
    loss.add_argument("--clip-low", type=float, default=0.2)
    loss.add_argument("--clip-high", type=float, default=0.2)
    loss.add_argument("--dual-clip", type=float, default=None)
    loss.add_argument("--sequence-ratio", action=argparse.BooleanOptionalAction, default=False,
                      help="a token's ratio is that of its whole sequence, to the power of 1 / length (GSPO); needs "
                           "--aggregation sequence and --updates-per-batch above 1")
    loss.add_argument("--kl", default="k3", help=f"one of: {', '.join(KL_ESTIMATORS)}")
    loss.add_argument("--kl-coef", type=float, default=1e-3, help="beta: weight of the KL to the starting weights")
    loss.add_argument("--entropy-coef", type=float, default=0.0)
    loss.add_argument("--aggregation", default="sequence", help=f"one of: {', '.join(AGGREGATIONS)}")
    loss.add_argument("--updates-per-batch", type=int, default=1, help="optimizer steps on each batch of rollouts")
    loss.add_argument("--lr", type=float, default=1e-4, help="AdamW; 1e-6 for pretrained 7B models")
    loss.add_argument("--lr-schedule", default="constant", help=f"one of: {', '.join(LR_SCHEDULES)}")
    loss.add_argument("--max-grad-norm", type=float, default=1.0, help="0 = no clipping")
    loss.add_argument("--micro-batch-tokens", type=int, default=4096,
                      help="tokens that go through a model at once; changes no result")
    loss.add_argument("--prefix-sharing", action=argparse.BooleanOptionalAction, default=True,
                      help="run a group's prompt once per update, not once per rollout; changes no result")
    evals = parser.add_argument_group("evaluation and logs")
    evals.add_argument("--eval-every", type=int, default=0, help="steps between evaluations; 0 = before and after only")
    evals.add_argument("--eval-examples", type=int, default=400, help="problems per test split")
    evals.add_argument("--log-rollouts", type=int, default=2,
                       help="problems per update (of those on rank 0) of which all rollouts go to rollouts.jsonl")
    evals.add_argument("--log-theory", type=int, default=0,
                       help="evaluations also log how many weights have not moved, and pass@1, 2, 4 ... of sampled "
                            "solutions of so many problems per test split; 0 = off")
    evals.add_argument("--theory-samples", type=int, default=64, help="samples of each of them")


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
            group.add_argument(spec.source, default="sft", help=SOURCE_HELP)
        if spec.trained and spec.lr not in known:
            group.add_argument(spec.lr, type=float, default=None, help=f"learning rate of the {role}; default: --lr")
        if spec.shares and "--verifier-head" not in known:
            add_head_args(group, role, spec.shares)


def check_args(args, world: int) -> None:
    """Refuses what cannot work, before anything is loaded or written."""
    check_choices(args, TABLES)
    check_least(args, LEAST | {name: 0 for name in ("verifier_lr",) if hasattr(args, name)})
    if hasattr(args, "verifier_head"):
        check_choices(args, {"verifier_head": HEADS, "verifier_optimizer": OPTIMIZERS})
        check_head(args)
    check_most(args, {name: MOST_LR for name in vars(args) if name == "lr" or name.endswith("_lr")})
    check_most(args, {"updates_per_batch": MOST_UPDATES, **dict.fromkeys(("clip_low", "clip_high", "dual_clip"), 1e6)})
    if not args.temperature > 0:
        raise BadInput(f"--temperature {args.temperature}: must be above 0 (evaluation is greedy by itself)")
    check_temperature("--temperature", args.temperature)
    if args.shard and world == 1:
        raise BadInput("--shard: there is one rank, so nothing to shard over; start several with torchrun")
    if args.examples_per_step % world or args.eval_examples < world:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the {world} ranks (and "
                       f"--eval-examples at least that)")
    has_ratio = args.updates_per_batch > 1 and args.loss != "reinforce"
    if args.sequence_ratio and (not has_ratio or args.aggregation != "sequence"):
        raise BadInput("--sequence-ratio: needs --updates-per-batch above 1, --aggregation sequence and a --loss with "
                       "a ratio")
    if args.num_samples < 2 and PRESETS[args.advantage].scope == "group" and PRESETS[args.advantage].center != "none":
        raise BadInput(f"--num-samples 1: --advantage {args.advantage} compares the rollouts of a group and needs at "
                       f"least 2")


def complete_args(args, roles: dict[str, RoleSpec]) -> None:
    """Gives the flags of roles their defaults. Raises BadInput."""
    check_choices(args, {name_of(spec.source): SOURCES for spec in roles.values()})
    args.model_tag = args.model_tag or default_tag(args.model_source)
    for spec in roles.values():
        name, rate = name_of(spec.tag), name_of(spec.lr)
        ending = "" if is_joint(head_of(args, spec)) else spec.ending  # both roles are in one checkpoint
        setattr(args, name, getattr(args, name) or args.model_tag + ending)
        check_name(spec.tag, getattr(args, name))
        if spec.trained and getattr(args, rate) is None:
            setattr(args, rate, args.lr)


def check_problems(args, task, tokenizer, draws: dict[str, Draw], configs: dict, device) -> list[str]:
    """The problems' texts, all of a finite task. Raises BadInput where one does not fit a role's context, a split is
    missing or ranks have others."""
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
    """Says where splits have problems in common: what is trained on is then not held out, or two tests are one."""
    texts = {split: {problem.prompt for problem in problems} for split, problems in by_split.items()}
    for split, other in combinations(texts, 2):
        if shared := texts[split] & texts[other]:
            print0(f"WARNING: splits {split} and {other} share {len(shared)} of the {len(texts[other])} problems "
                   f"that were looked at, for example {min(shared)[:60]!r}")


def check_task(args, task, starts: dict[str, Start]) -> None:
    """Raises BadInput where a starting checkpoint was trained on another task than this one, or on problems of other
    flags, and nobody has said that it is to be so."""
    given = getattr(args, "given", set())
    for name, start in starts.items():
        where = start.path("meta.json")
        meta, _ = load_meta(where)
        recorded, num_steps = meta["user_config"], meta["user_config"].get("num_steps")
        if start.source == "sft" and isinstance(num_steps, int) and start.step < num_steps:
            print0(f"WARNING: the {name} starts from step {start.step} of {start.tag}, whose SFT was to make "
                   f"{num_steps}")
        if recorded.get("task", args.task) != args.task and "task" not in given:
            raise BadInput(f"the {name}'s checkpoint {start.tag} was trained on task {recorded['task']}, and this run "
                           f"is on {args.task} by default: say --task {recorded['task']}, or --task {args.task}")
        if recorded.get("task") != args.task or hasattr(task, "num_problems"):
            continue  # a finite task's flags say where its files are
        defaults = task_flags()
        for flag in defaults.keys() & recorded.keys() - given:
            value = recorded_value(recorded, flag, defaults[flag], where)
            other = argparse.Namespace(**vars(args) | {flag: value})
            if value != getattr(args, flag) and first_problems(make_task(other)) != first_problems(task):
                words = f"--{flag.replace('_', '-')}"
                raise BadInput(f"the {name}'s checkpoint {start.tag} was trained with {words} {recorded[flag]}, and "
                               f"this run has {getattr(args, flag)} by default: say {words} {recorded[flag]}, or "
                               f"{words} {getattr(args, flag)}")


def warn_of_starts(starts: dict[str, Start], draws: dict[str, Draw]) -> None:
    """Says so where a starting checkpoint was trained in another role, was taught another form of verification, or no
    demonstrations of the kind that it is asked for. A verifier that reads solutions as the generator's prompts have
    them may start from either role. What RL has trained does not say what it was taught."""
    warnings = []
    for name, start in starts.items():
        meta, _ = load_meta(start.path("meta.json"))
        of_role = [draw for draw in draws.values() if draw.role == name]
        asked = {form_of(draw.wrap) for draw in of_role} - {""}
        if name != "verifier" or asked:
            warn_of_role(start.tag, meta, name)
        taught = meta["user_config"].get("verifier_form")
        if meta["user_config"].get("role") in ("verifier", "both") and taught in FORMS and asked - {taught}:
            warnings.append(f"{start.tag} was taught verifications of form {taught} (chat_sft --verifier-form), and is "
                            f"asked for form {min(asked - {taught})} here")
        if name != "verifier" and asked and meta["user_config"].get("role") == "generator":
            warnings.append(f"the SFT of {start.tag} had no verifications (chat_sft --role both), and here it is asked "
                            f"for them")
        if isinstance(shares := meta["user_config"].get("demo_shares"), list):
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
        numbers = {field: value for field, value in draw._asdict().items() if field in COUNTS}
        wrong = next((field for field, value in numbers.items() if not isinstance(value, int) or value < 0), None)
        if wrong or not callable(draw.wrap) or draw.split not in SPLIT_BUCKETS:
            raise BadInput(f"--recipe {name}: its draws() declare {label!r} with {wrong or 'wrap or split'} as "
                           f"nothing that can be: {numbers.get(wrong, (draw.wrap, draw.split))}")
        if draw.role not in roles:
            raise BadInput(f"--recipe {name}: its draws() name a role {draw.role}; there are {', '.join(roles)}")
        if min(draw.num_prompts, draw.num_samples, draw.max_new_tokens) < 1:
            raise BadInput(f"--recipe {name}: its draws() declare nothing to sample as {label}: prompts, samples "
                           f"and --max-new-tokens must be at least 1")
    idle = [role for role, spec in roles.items()
            if spec.trained and not any(draw.role == role and draw.trained for draw in draws.values())]
    if idle:
        raise BadInput(f"--recipe {name}: {idle[0]} is trained, and none of its draws() is trained=True")


def with_times(args, draws):
    """The draws with --num-steps where they do not say in how many steps of a run they happen."""
    return {name: draw._replace(times=args.num_steps) if isinstance(draw, Draw) and draw.times is None else draw
            for name, draw in draws.items()} if isinstance(draws, dict) else draws
