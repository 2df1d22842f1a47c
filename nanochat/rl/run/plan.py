"""
What a run will need, from what its recipe declares: memory per rank, hours, what a stop takes.
"""
import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from nanochat.common import BadInput
from nanochat.engine import CHECK_EVERY_CUDA
from nanochat.flops import PEAK_FLOPS, decode_floor, flops_per_token, prefill_floor
from nanochat.hf.decoder import DecoderConfig
from nanochat.kernels.attention import takes_attention
from nanochat.rl.learn.heads import num_shared, shared_names
from nanochat.rl.learn.roles import head_of
from nanochat.rl.records.outcomes import num_problems_of
from nanochat.rl.records.prompts import longest_problem
from nanochat.rl.run.memory import Config, Held, PlannedDraw, Setting, memory_plan, model_of, saved_bytes, sizes_of
from nanochat.slots import num_places
from tasks import flags_of_others

# bytes/s of a GPU's memory, from the vendor's data sheets
BANDWIDTH = {"B200": 8.0e12, "H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}
DISK_SPEED = 1e9  # bytes/s that a disk is taken to write, for all ranks together

# What a rollout and a problem hold as Python objects and rows, whatever their length: text, prompt, keys, records
BYTES_OF_ROLLOUT, BYTES_OF_TOKEN, BYTES_OF_PROBLEM = 2000, 24, 1000


def machine_memory(device: torch.device) -> int:
    """Bytes of memory that this rank can have: the GPU's, else its share of the machine's or of its cgroup's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as f:  # "max" is no limit
            found.append(int(f.read()))
    return min(found) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def check_sizes(args, task, draws: dict, ranks: int) -> None:
    """Raises BadInput for more rollouts in a step, or problems in an evaluation, than memory can hold."""
    limit = machine_memory(torch.device("cpu"))
    rows = {name: -(-draw.num_prompts // ranks) * draw.num_samples for name, draw in draws.items()}
    size = sum(rows[name] * (BYTES_OF_ROLLOUT + BYTES_OF_TOKEN * draw.max_new_tokens) for name, draw in draws.items())
    if size > limit:
        raise BadInput(f"--examples-per-step {args.examples_per_step} --num-samples {args.num_samples}: a step holds "
                       f"{sum(rows.values()):,} rollouts per rank, which need at least {size / 1e9:,.0f} GB; there are "
                       f"{limit / 1e9:,.0f} GB")
    for flag, num, samples in (("--eval-examples", args.eval_examples, 1),
                               ("--log-theory", args.log_theory, args.theory_samples)):
        held_out = max(num_problems_of(task, split, num) for split in ("test_in", "test_out"))
        per_problem = BYTES_OF_PROBLEM + samples * (BYTES_OF_ROLLOUT + BYTES_OF_TOKEN * args.max_new_tokens)
        if held_out * per_problem > limit:
            raise BadInput(f"{flag} {num}: {held_out:,} problems per split need at least "
                           f"{held_out * per_problem / 1e9:,.0f} GB; there are {limit / 1e9:,.0f} GB")


def check_plan(plan: dict, device: torch.device) -> None:
    """Raises BadInput where the plan of a run needs more memory than there is."""
    limit, phase = machine_memory(device), max(plan["phases"], key=plan["phases"].get)
    if plan["peak"] > limit:
        raise BadInput(f"this needs {plan['peak'] / 1e9:,.1f} GB per rank, most while {phase}; there are "
                       f"{limit / 1e9:,.1f} GB. See --dry-run, --micro-batch-tokens, --max-rows and --shard")


def show_plan(plan: dict, limit_gb: float | None) -> list[str]:
    """A plan in lines. limit_gb: a device's memory, in 10^9 bytes."""
    names = list(plan["resident"])
    lines = [f"{'GB per rank':44s}" + "".join(f"{name:>12s}" for name in names)]
    for what in plan["resident"][names[0]]:
        lines.append(f"{what:44s}" + "".join(f"{plan['resident'][name][what] / 1e9:12.3f}" for name in names))
    named = {"the copy that a checkpoint is written from": plan["copy"]} if plan["copy"] else {}
    lines += [f"{what:44s}{size / 1e9:12.3f}" for what, size in (named | plan["phases"]).items()]
    fits = ("" if limit_gb is None
            else f"  {'fits' if plan['peak'] / 1e9 <= limit_gb else 'does not fit'} {limit_gb:g} GB")
    return [*lines, f"{'peak: all that stays and the largest phase':44s}{plan['peak'] / 1e9:12.3f}{fits}"]


def variants(setting: Setting, ranks: list[int]) -> list[Setting]:
    """The setting on other numbers of ranks, with and without sharding and recomputing."""
    found = []
    for n in ranks:
        for shard in (False, True) if n > 1 else (False,):
            found += [replace(setting, ranks=n, shard=shard, recompute=recompute) for recompute in (False, True)]
    return found


@dataclass(frozen=True)
class Speed:
    """What a GPU is taken to reach."""
    gpu: str = "H100"
    mfu: float = 0.35               # share of its peak FLOPs, in training
    decode_efficiency: float = 0.2  # share of the speed that its memory's bandwidth allows, in decoding

    @property
    def limits(self) -> tuple[float, float]:
        """FLOP/s and bytes/s."""
        return PEAK_FLOPS[self.gpu], BANDWIDTH[self.gpu]


def gpu_name(device: torch.device) -> str:
    """The name in BANDWIDTH of a CUDA device, H100 where there is none or it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((known for known in BANDWIDTH if known in name), "H100")


def sampling_seconds(model, prompts: float, rows: float, prompt_tokens: int, new_tokens: int, speed: Speed) -> float:
    """Seconds to run prompts and decode rows after them, on one GPU."""
    floor = (decode_floor(model, prompts, rows, prompt_tokens, new_tokens, speed.limits)
             + prefill_floor(model, prompts, prompt_tokens, speed.limits))
    return floor / speed.decode_efficiency


def draw_seconds(config: Config, draw: PlannedDraw, held: Held, setting: Setting, speed: Speed,
                 context: int | None = None) -> dict[str, float]:
    """Seconds of sampling a draw, and of what is done with it (scoring, the update), on each of the GPUs that share it.
    Lengths in `draw` are mean ones here. context: the tokens that attention sees, by default the model's context."""
    model, P, new = model_of(config, torch.bfloat16), draw.prompts / setting.ranks, draw.new_tokens
    sampling = (0.0 if draw.teacher_forced else
                sampling_seconds(model, P, P * draw.samples, draw.prompt_tokens, new, speed))
    # a forward pass is a third of an update; a reference runs forward, as a block that is run again, and the old
    # logprobs of several updates and the present ones of a sequence's ratio
    updates = setting.updates_per_batch
    of_update = updates * (3 + setting.recompute + setting.sequence_ratio) + held.reference + (updates > 1)
    passes = draw.scored + of_update * draw.trained
    tokens = P * draw.prompt_tokens + P * draw.samples * new
    update = tokens * flops_per_token(model, context) * passes / 3 / (speed.limits[0] * speed.mfu)
    return {"sampling": sampling, "update": update}


def seconds_unheard(config: Config, draw: PlannedDraw, held: Held, setting: Setting, speed: Speed) -> float:
    """The longest that a draw goes on without looking whether the run is to stop: one prefill, CHECK_EVERY_CUDA tokens
    for all rows, one micro-batch, or, of several updates of a batch, all after the first."""
    model, P = model_of(config, torch.bfloat16), -(-draw.prompts // setting.ranks)
    rows, spans = num_places(P, draw.samples, draw.prompt_tokens, draw.new_tokens, setting.max_rows,
                             setting.max_cached_tokens), [0.0]
    if not draw.teacher_forced:
        ends = (draw.prompt_tokens + max(0, draw.new_tokens - CHECK_EVERY_CUDA), min(draw.new_tokens, CHECK_EVERY_CUDA))
        spans = [decode_floor(model, min(P, rows), rows, *ends, speed.limits) / speed.decode_efficiency,
                 prefill_floor(model, min(P, rows), draw.prompt_tokens, speed.limits) / speed.decode_efficiency]
    if draw.trained:
        once = replace(draw, scored=0, teacher_forced=True)
        seconds = draw_seconds(config, once, held, setting, speed, draw.prompt_tokens + draw.new_tokens)["update"]
        tokens, updates = P * (draw.prompt_tokens + draw.samples * draw.new_tokens), setting.updates_per_batch
        spans += [seconds / updates * min(1.0, setting.micro_batch_tokens / tokens), seconds * (1 - 1 / updates)]
    return max(spans)


def describe_stop(configs: dict[str, Config], held: dict[str, Held], draws: list[PlannedDraw], setting: Setting,
                  speed: Speed, disk_speed: float = DISK_SPEED) -> str:
    """What a request to stop takes, from the signal to the exit, in a line."""
    first, other = saved_bytes(configs, held, setting)
    total = first + (setting.ranks - 1) * other
    unheard = max(seconds_unheard(configs[draw.role], draw, held[draw.role], setting, speed) for draw in draws)
    return (f"a stop saves {first / 1e9:.3f} GB per rank at most, {total / 1e9:.3f} GB in all: about "
            f"{unheard + total / disk_speed:.0f} seconds at {disk_speed / 1e9:g} GB/s, {unheard:.1f} of them until the "
            f"run looks; {total / disk_speed:.0f} more where a checkpoint is being written")


def planned(draws: dict, prompt_tokens: Callable, share: float = 1.0) -> list[PlannedDraw]:
    """A recipe's draws, sized. prompt_tokens(wrap): of a prompt; share: of their limits that completions run to."""
    return [PlannedDraw(draw.role, name, draw.num_prompts, draw.num_samples,
                        prompt_tokens(draw.wrap) + int(share * draw.quoted), max(1, int(share * draw.max_new_tokens)),
                        draw.times, draw.trained, draw.teacher_forced, draw.scored)
            for name, draw in draws.items()]


def held_by(args, specs: dict, configs: dict[str, Config]) -> dict[str, Held]:
    """What each role of a recipe holds. specs: its RoleSpecs."""
    held = {}
    for name, spec in specs.items():
        has_reference, head = spec.reference or (spec.trained and args.kl_coef > 0), head_of(args, spec)
        own = private_size(configs[name], num_shared(args, configs[name]), head.is_one) if head.shares else None
        all_moments = head.is_joint and args.verifier_optimizer == "own"
        held[name] = Held(spec.trained, has_reference, own, None if all_moments else own)
    return held


def private_size(config: Config, num_layers: int, is_one: bool = False) -> int:
    """Parameters of a role that shares so many layers, or all that there is, which it has for itself."""
    if is_one:
        return 0
    model = model_of(config)
    tied = config.tied if isinstance(config, DecoderConfig) else False
    shared = sum(model.get_parameter(name).numel() for name in shared_names(model, num_layers))
    return sizes_of(config).total - shared + (sizes_of(config).head if tied and num_layers else 0)


def setting_of(args, ranks: int, dtype: torch.dtype, device: torch.device) -> Setting:
    """The setting that tango_rl's flags mean."""
    repeats_keys = device.type == "cuda" and not takes_attention(device, dtype)
    return Setting(ranks, args.shard, args.recompute, dtype, device.type, args.micro_batch_tokens, args.max_rows,
                   args.max_cached_tokens, args.updates_per_batch, args.sequence_ratio, repeats_keys)


def prompt_lengths(tokenizer, fmt, problems: list[str]) -> tuple[Callable, Callable]:
    """Functions of `wrap`: the tokens of such a prompt of the longest problem, and of a mean one."""
    longest, first = longest_problem(tokenizer, problems), problems[:1000]
    length = lambda wrap, problem: len(wrap(tokenizer, fmt, problem))
    return (functools.cache(lambda wrap: length(wrap, longest)),
            functools.cache(lambda wrap: sum(length(wrap, problem) for problem in first) // len(first)))


def plan_of(configs: dict[str, Config], held: dict[str, Held], draws: list[PlannedDraw], setting: Setting) -> dict:
    """`memory_plan` of a run: of a micro-batch no more tokens than a draw has."""
    most = max(-(-d.prompts // setting.ranks) * (d.prompt_tokens + d.samples * d.new_tokens) for d in draws)
    return memory_plan(configs, held, draws, replace(setting, micro_batch_tokens=min(setting.micro_batch_tokens, most)))


def describe_run(args, configs: dict[str, Config], held: dict[str, Held], draws: dict, totals: dict[str, int],
                 setting: Setting, plan: dict, lengths: tuple[Callable, Callable], device: torch.device) -> list[str]:
    """What tango_rl --dry-run prints: flags as resolved, memory per rank, tokens per step, hours. totals: updates of
    each role in the run; plan: of `plan_of`; lengths: of `prompt_lengths`."""
    speed, (longest, mean), others = Speed(gpu_name(device)), lengths, flags_of_others(args.task)
    most, ranks = planned(draws, longest), setting.ranks
    lines = ["settings: " + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(args).items()
                                     if not name.startswith(others)), ""]
    lines += show_plan(plan, machine_memory(device) / 1e9)
    lines += ["", "tokens per step, at most: " + ", ".join(
        f"{draw.prompts * draw.samples * draw.new_tokens:,} of {draw.name} ({draw.role})" for draw in most)]
    lines += ["updates: " + ", ".join(f"{count} of the {role}" for role, count in totals.items())
              + f", or fewer: it ends after {args.token_budget:,} tokens" * bool(args.token_budget)]
    for share, words in ((0.5, "half of their limits"), (1.0, "their limits")):
        total, shown = 0.0, []
        context = max(mean(draw.wrap) + int(share * (draw.quoted + draw.max_new_tokens)) for draw in draws.values())
        for draw in planned(draws, mean, share):
            seconds = draw_seconds(configs[draw.role], draw, held[draw.role], setting, speed, context)
            total += draw.times * sum(seconds.values())
            shown.append(f"{draw.name} {sum(seconds.values()):.1f}s x {draw.times}")
        lines.append(f"{total / 3600:.2f} hours if completions run to {words}: {', '.join(shown)}, evaluation apart")
    first, other = saved_bytes(configs, held, setting)
    lines.append(f"{(first + (ranks - 1) * other) / 1e9:.3f} GB on disk per checkpoint set (weights, and AdamW of what "
                 f"is trained); --save-every {args.save_every}, "
                 + (f"the last {args.keep} kept (--keep)" if args.keep else "none is removed"))
    lines.append(describe_stop(configs, held, most, setting, speed))
    return [*lines,
            f"computed for {ranks} x {speed.gpu} at {100 * speed.mfu:.0f}% of the peak FLOPs in training and "
            f"{100 * speed.decode_efficiency:.0f}% of the bandwidth's speed in decoding; "
            f"nothing was measured or loaded"
            + ("" if device.type == "cuda" else "; hours on a machine without a GPU are not computed")]
