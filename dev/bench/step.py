"""
Times full RL steps on a stated workload, with a random-init model and completions of exactly the asked length.

--role plain is a GRPO step: sample, update. generator and verifier are the steps of tango_rl: one verification of every
solution goes with a generator step, one solution per problem with a verifier step, whose groups are its verifications.
Rewards are random numbers. The last line is JSON: medians over --steps (one step before them is not counted), the
memory of all ranks, what the planner says of one, and the floor that this machine's measured matrix-product and copy
speeds set.

    python -m dev.bench.step --vocab-size 512 --prompt-len 64 --completion-len 128
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 dev/bench/step.py --vocab-size 512
"""
import argparse
import json
import resource
import statistics
import sys
import time

import torch

from dev.bench.common import COUNT, DTYPES, add_model_args, random_model
from nanochat.cli import at_least, script_main
from nanochat.common import BadInput, all_reduce, init_device, print0, rank_and_world
from nanochat.engine import generate, row_key
from nanochat.flops import decode_floor, machine_speed, matrix_weights, prefill_floor, prompt_weights, synchronize
from nanochat.kernels import cpu
from nanochat.kernels.attention import register_operator
from nanochat.kernels.losses import PolicyLoss
from nanochat.optim import adamw
from nanochat.rl.learn.packing import pack, token_weights
from nanochat.rl.learn.roles import Role, set_recompute
from nanochat.rl.learn.trainer import update
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.run.memory import Held, PlannedDraw, Setting, memory_plan


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--role", default="plain", choices=["plain", "generator", "verifier"])
    parser.add_argument("--num-roles", type=at_least(1, int, 100), default=1,
                        help="of --role plain: each makes a step with its own model and optimizer")
    parser.add_argument("--examples-per-step", type=COUNT, default=32, help="prompts per step, over all ranks")
    parser.add_argument("--num-samples", type=at_least(1, int, 10 ** 5), default=8, help="completions per prompt")
    parser.add_argument("--prompt-len", type=COUNT, default=64)
    parser.add_argument("--completion-len", type=COUNT, default=128)
    parser.add_argument("--verification-len", type=COUNT,
                        help="tokens the verifier writes, 64 unless given; its prompt is a prompt and a completion")
    parser.add_argument("--steps", type=COUNT, default=5)
    parser.add_argument("--micro-batch-tokens", type=at_least(0), default=0,
                        help="default: 4096 on CPU, 16384 on a GPU")
    parser.add_argument("--max-rows", type=at_least(1), default=1024, help="rows that decode together")
    parser.add_argument("--recompute", action="store_true",
                        help="run blocks again in the backward pass; for --shape alone")
    parser.add_argument("--compile", action="store_true",
                        help="compile the blocks that are trained (torch.compile); for --shape on CUDA alone, where "
                             "sampling has a copy, and without --recompute")
    add_model_args(parser)
    return parser


def peak_memory_mb(device) -> float:
    """The most memory held so far: the allocator's peak on CUDA, this process' resident memory elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2 ** 20
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2 ** 20


def check_compile(args, device) -> None:
    """Raises BadInput where blocks cannot be compiled: on CPU they sample, too, and a GPT's are not made for it."""
    if args.compile and (device.type != "cuda" or args.recompute or not args.shape):
        raise BadInput("--compile: for --shape on CUDA alone, without --recompute")


def make_role(args, name: str, context: int, device) -> Role:
    model = random_model(args, context, device)
    set_recompute(model, args.recompute, name)
    if args.compile:
        register_operator()
        for block in model.blocks:
            block.compile()
    parameters = list(model.parameters())
    return Role(name, model, parameters, adamw(parameters, 1e-4))


def sample(args, role: Role, prompts, num_samples: int, length: int, stream: tuple, families=None) -> Rollouts:
    keys = [row_key(args.seed, *stream, n) for n in range(len(prompts) * num_samples)]
    out = generate(role.model, prompts, num_samples, max_new_tokens=length, stop_tokens=[], keys=keys,
                   max_rows=args.max_rows, families=families)
    assert out.tokens.shape == (len(prompts) * num_samples, length)
    group_id = torch.arange(len(prompts), device=out.tokens.device).repeat_interleave(num_samples)
    return Rollouts([Prompt(ids) for ids in prompts], group_id, out.tokens, out.logprobs, out.lengths, out.stopped)


def judged_prompts(rollouts: Rollouts) -> list[list[int]]:
    """What the verifier reads of each rollout: the prompt and the solution."""
    return [rollouts.prompts[g].ids + completion
            for g, completion in zip(rollouts.group_id.tolist(), rollouts.completions(), strict=True)]


def train(args, role: Role, rollouts: Rollouts, generator: torch.Generator, device) -> None:
    """One update on these rollouts, with random advantages."""
    advantages = torch.randn(rollouts.tokens.shape, generator=generator).to(device)
    weights = token_weights(rollouts.lengths, "sequence", rollouts.tokens.shape[1], all_reduce)
    batches = pack(rollouts, advantages, weights, args.micro_batch_tokens, keep_idle=False)
    update(role, batches, PolicyLoss(), lr=1e-4, max_grad_norm=1.0, temperature=1.0, device=device)


def one_step(args, step: int, roles: dict[str, Role], device) -> dict[str, float]:
    """Seconds of sampling solutions, of verification and of the update; those of all roles with --num-roles."""
    if args.role == "plain" and len(roles) > 1:
        each = [one_step(args, step, {"generator": role}, device) for role in roles.values()]
        return {name: sum(seconds[name] for seconds in each) for name in each[0]}
    rank, world = rank_and_world()
    generator = torch.Generator().manual_seed((args.seed * 1000 + step) * world + rank)
    prompts = torch.randint(args.vocab_size, (args.examples_per_step // world, args.prompt_len),
                            generator=generator).tolist()
    synchronize(device)
    started = time.perf_counter()
    per_problem = 1 if args.role == "verifier" else args.num_samples
    rollouts = sample(args, roles["generator"], prompts, per_problem, args.completion_len, ("solve", step, rank))
    synchronize(device)
    solved = time.perf_counter()
    trained = roles["generator"]
    if args.role != "plain":
        trained = roles[args.role]
        per_solution = args.num_samples if args.role == "verifier" else 1
        judged = sample(args, roles["verifier"], judged_prompts(rollouts), per_solution, args.verification_len,
                        ("verify", step, rank), rollouts.group_id.tolist())
        rollouts = judged if args.role == "verifier" else rollouts
    synchronize(device)
    verified = time.perf_counter()
    train(args, trained, rollouts, generator, device)
    synchronize(device)
    return {"gen_s": solved - started, "verify_s": verified - solved, "update_s": time.perf_counter() - verified,
            "s_per_step": time.perf_counter() - started}


def sampling_floor(model, prompts: int, rows: int, prompt_len: int, completion_len: int, speed) -> float:
    return (prefill_floor(model, prompts, prompt_len, speed)
            + decode_floor(model, prompts, rows, prompt_len, completion_len, speed))


def update_flops(model, prompts: int, rows: int, prompt: int, completion: int) -> dict[str, int]:
    """FLOPs of an update: three times the forward pass of each distinct token. prompt, completion: tokens of one."""
    config = model.config
    return {"products": 6 * (prompt_weights(model) * prompts * prompt + matrix_weights(model) * rows * completion),
            "attention": 6 * config.n_head * config.head_dim * (
                (config.n_layer - 1) * prompts * prompt ** 2
                + config.n_layer * rows * completion * (2 * prompt + completion)),
            "head": 6 * model.lm_head.weight.numel() * rows * completion}


def floor_seconds(args, model, speed) -> float:
    """The floor of a whole step: sampling, and an update's FLOPs."""
    P, G = args.examples_per_step, args.num_samples
    prompt, completion = args.prompt_len, args.completion_len
    if args.role == "verifier":
        sampling = sampling_floor(model, P, P, prompt, completion, speed)
        prompt, completion = prompt + completion, args.verification_len
        sampling += sampling_floor(model, P, P * G, prompt, completion, speed)
    else:
        sampling = sampling_floor(model, P, P * G, prompt, completion, speed)
        if args.role == "generator":  # verifications of one problem share its prompt
            sampling += (prefill_floor(model, P, prompt, speed) + prefill_floor(model, P * G, completion, speed)
                         + decode_floor(model, P, P * G, prompt, args.verification_len, speed, completion))
    return sampling + sum(update_flops(model, P, P * G, prompt, completion).values()) / speed[0]


def planned_bytes(args, roles: dict[str, Role], device) -> int:
    """The peak of one rank by the planner (rl/plan.py), without a checkpoint's copy: none is written here."""
    prompt, completion, verification = args.prompt_len, args.completion_len, args.verification_len
    P, G = args.examples_per_step, args.num_samples
    solutions = PlannedDraw(next(iter(roles)), "solutions", P, 1 if args.role == "verifier" else G, prompt, completion,
                     trained=args.role != "verifier")
    verifications = {"plain": [], "generator": [PlannedDraw("verifier", "verifications", P * G, 1, prompt + completion,
                                                     verification)],
                     "verifier": [PlannedDraw("verifier", "verifications", P, G, prompt + completion, verification,
                                       trained=True)]}[args.role]
    setting = Setting(rank_and_world()[1], False, args.recompute, DTYPES[args.dtype], device.type,
                      args.micro_batch_tokens, args.max_rows)
    idle = {"plain": None, "generator": "verifier", "verifier": "generator"}[args.role]  # its optimizer never steps
    held = {name: Held(reference=False, moments=0 if name == idle else None) for name in roles}
    configs = {name: role.model.config for name, role in roles.items()}
    plan = memory_plan(configs, held, [solutions, *verifications], setting)
    return plan["peak"] - plan["copy"]


def main(args) -> None:
    if args.role == "plain" and args.verification_len is not None:
        raise BadInput(f"--verification-len {args.verification_len}: --role plain has no verifier")
    args.verification_len = 64 if args.verification_len is None else args.verification_len
    if args.num_roles > 1 and args.role != "plain":
        raise BadInput(f"--num-roles {args.num_roles}: with --role plain alone")
    if args.examples_per_step % rank_and_world()[1]:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the "
                       f"{rank_and_world()[1]} ranks")
    device = init_device(args.device_type)
    check_compile(args, device)
    args.micro_batch_tokens = args.micro_batch_tokens or (16384 if device.type == "cuda" else 4096)
    context = args.prompt_len + args.completion_len + args.verification_len
    names = [f"role {n}" for n in range(args.num_roles)] if args.num_roles > 1 else ["generator"]
    roles = {name: make_role(args, name, context, device)
             for name in (names if args.role == "plain" else ("generator", "verifier"))}
    before = 0 if device.type == "cuda" else peak_memory_mb(device)
    seconds = [one_step(args, step, roles, device) for step in range(args.steps + 1)][1:]
    peak = all_reduce(torch.tensor(peak_memory_mb(device) - before, device=device)).item()
    medians = {name: round(statistics.median(s[name] for s in seconds), 4) for name in seconds[0]}
    speed, model = machine_speed(device, DTYPES[args.dtype]), next(iter(roles.values())).model
    sampled = {"plain": args.num_samples * args.num_roles, "generator": args.num_samples, "verifier": 1}[args.role]
    sampled *= args.completion_len
    verifications = {"plain": 0, "generator": args.num_samples, "verifier": args.num_samples}[args.role]
    sampled += verifications * args.verification_len
    print0(json.dumps({
        **medians, "completion_tok_per_s": round(args.examples_per_step * sampled / medians["s_per_step"]),
        "peak_mem_mb": round(peak, 1),
        "planned_mem_mb": round(planned_bytes(args, roles, device) / 2 ** 20, 1),
        "floor_s": round(args.num_roles * floor_seconds(args, model, speed), 4),
        "matmul_gflop_per_s": round(speed[0] / 1e9), "copy_gb_per_s": round(speed[1] / 1e9, 1),
        "cpu_kernels": device.type == "cpu" and cpu.library() is not None,
        "threads": torch.get_num_threads(), "ranks": rank_and_world()[1], "torch": torch.__version__,
        "device": str(device), **vars(args)}))


if __name__ == "__main__":
    script_main(main, make_parser())
