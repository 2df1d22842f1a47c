"""
Supervised fine-tuning of one role from scratch, on a task's demonstrations: the starting point of RL.

The generator learns to write solutions. The verifier learns to judge corrupted solutions and ones sampled from the SFT generator, whose
problems come from the sft split. Trained with Muon (matrices) and AdamW (the rest).

    python -m scripts.chat_sft --role generator --model-tag d4
    torchrun --standalone --nproc_per_node=2 scripts/chat_sft.py --role verifier --model-tag d4     # writes d4-ver
"""
import argparse
import random
import time

import torch

from nanochat.checkpoint import list_steps, load_model, save_model
from nanochat.common import (BadInput, add_run_args, all_reduce, check_least, check_name, check_writable, compute_dtype, init_device, path_of, print0,
                             rank_and_world, script_main)
from nanochat.engine import pad_prompts
from nanochat.gpt import GPT, GPTConfig
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.optim import all_reduce_gradients, clip_gradients, muon_adamw, warmup_cosine
from nanochat.rl.losses import PolicyLoss
from nanochat.rl.prompts import generator_prompt, verifier_prompt
from nanochat.rl.roles import copy_shared_lambdas, share_layers
from nanochat.rl.rollouts import Sampler
from nanochat.rl.trainer import head_options
from nanochat.tokenizer import Tokenizer
from tasks import add_task_args, make_task

SAMPLED_FROM = 10_000_000  # sft problems from this index on are for sampled solutions, so that no demonstration has shown them

def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_run_args(parser)
    add_task_args(parser)
    parser.add_argument("--role", choices=["generator", "verifier"], required=True)
    parser.add_argument("--model-tag", default="", help="tag of the generator, default d<depth>")
    parser.add_argument("--verifier-tag", default="", help="tag under which the verifier is saved; default: <model-tag>-ver")
    model = parser.add_argument_group("model")
    model.add_argument("--depth", type=int, default=4, help="layers: the one dial; the width is 64 per layer unless --n-embd is given")
    model.add_argument("--n-embd", type=int, default=0)
    model.add_argument("--n-head", type=int, default=0, help="default: n_embd / 128, at least 1")
    model.add_argument("--n-kv-head", type=int, default=0, help="default: --n-head")
    model.add_argument("--sequence-len", type=int, default=256)
    model.add_argument("--window-pattern", default="L")
    model.add_argument("--verifier-shared-layers", type=int, default=0, help="lowest layers the verifier takes from the generator, frozen")
    training = parser.add_argument_group("training")
    training.add_argument("--num-steps", type=int, default=700)
    training.add_argument("--examples-per-step", type=int, default=24, help="demonstrations per optimizer step, over all ranks")
    training.add_argument("--micro-batch-tokens", type=int, default=2048, help="tokens that go through the model at once; changes no result")
    training.add_argument("--matrix-lr", type=float, default=4e-3, help="Muon, for the blocks' matrices")
    training.add_argument("--embedding-lr", type=float, default=4e-3, help="AdamW, for everything else")
    training.add_argument("--num-sampled", type=int, default=2048, help="verifier: solutions sampled from the generator; half of the demonstrations judge one")
    training.add_argument("--max-new-tokens", type=int, default=96, help="verifier: length limit of those")
    return parser


def new_model(args, tokenizer, device, dtype) -> GPT:
    """A model of the shape that the flags ask for, randomly initialised from the seed and the role."""
    n_embd = args.n_embd or 64 * args.depth
    n_head = args.n_head or max(1, n_embd // 128)
    n_kv_head = args.n_kv_head or n_head
    if args.depth < 1 or n_embd < 24 or n_embd % (2 * n_head) or n_head % n_kv_head:
        raise BadInput(f"--depth {args.depth} --n-embd {n_embd} --n-head {n_head} --n-kv-head {n_kv_head}: need depth >= 1, width >= 24 and a "
                       f"multiple of twice the heads, heads a multiple of the key/value heads")
    config = GPTConfig(args.sequence_len, tokenizer.vocab_size, args.depth, n_head, n_kv_head, n_embd, args.window_pattern)
    with torch.device(device):
        model = GPT(config, dtype)
    model.init_weights(torch.Generator(device).manual_seed(2 * args.seed + (args.role == "verifier")))
    return model


def sample_solutions(args, task, tokenizer, generator) -> list[tuple]:
    """(problem, solution text) pairs from the SFT generator on the sft split."""
    problems = [task.problem("sft", SAMPLED_FROM + i) for i in range(args.num_sampled)]
    sampler = Sampler(task, tokenizer, args.seed, args.max_new_tokens, 0)
    return list(zip(problems, (s.text for s in sampler.solve(generator, problems, 1, ("sft",))[1]), strict=True))


def demonstration(args, task, tokenizer, index: int, sampled: list) -> tuple[list[int], list[int]]:
    """Ids and loss mask of demonstration `index`: a function of the seed, the role and the index."""
    rng = random.Random(f"{args.seed}-{args.role}-{index}")
    problem = task.problem("sft", index)
    if args.role == "generator":
        prompt, completion = generator_prompt(tokenizer, task.fmt, problem.prompt), task.solution_demo(problem, rng)
    else:
        solution = task.corrupted_solution(problem, rng)
        if rng.random() < 0.5:
            problem, solution = rng.choice(sampled)
        prompt, completion = verifier_prompt(tokenizer, task.fmt, problem.prompt, solution), task.verification_demo(problem, solution, rng)
    completion = [*tokenizer.encode(completion), tokenizer.assistant_end]
    if len(prompt) + len(completion) > args.sequence_len:
        raise BadInput(f"--sequence-len {args.sequence_len}: demonstration {index} of {task.name} has {len(prompt) + len(completion)} tokens")
    return prompt + completion, [0] * len(prompt) + [1] * len(completion)


def length_batches(examples: list, max_tokens: int) -> list[list]:
    """The examples sorted by length and cut into micro-batches of at most max_tokens tokens, padding included."""
    batches = []
    for example in sorted(examples, key=lambda example: len(example[0])):
        if not batches or (len(batches[-1]) + 1) * len(example[0]) > max_tokens:
            batches.append([])
        batches[-1].append(example)
    return batches


def sft_loss(model, examples: list[tuple[list[int], list[int]]], num_tokens: float) -> torch.Tensor:
    """The cross-entropy of the trained tokens of these examples, summed and divided by num_tokens."""
    device = model.lm_head.weight.device
    ids, _ = pad_prompts([ids for ids, _ in examples], device)
    mask, _ = pad_prompts([mask for _, mask in examples], device)
    trained = mask[:, 1:].bool()
    hidden, targets = model.trunk(ids[:, :-1])[trained], ids[:, 1:][trained]  # (M, C), (M,)
    ones = torch.ones(len(targets), device=device)
    return linear_policy_loss(hidden, model.lm_head.weight, targets, ones, ones / num_tokens, loss=PolicyLoss("reinforce"),
                              **head_options(model, 1.0))[0]


def resolve_tags(args) -> str:
    """Fills in both roles' tags; the one of this model. Raises BadInput."""
    args.model_tag = args.model_tag or f"d{args.depth}"
    args.verifier_tag = args.verifier_tag or f"{args.model_tag}-ver"
    check_name("--model-tag", args.model_tag)
    check_name("--verifier-tag", args.verifier_tag)
    if args.verifier_tag == args.model_tag:
        raise BadInput(f"--verifier-tag {args.verifier_tag}: is the generator's tag")
    return args.verifier_tag if args.role == "verifier" else args.model_tag


def main(args) -> None:
    check_least(args, {"num_steps": 1, "examples_per_step": 1, "num_sampled": 1, "micro_batch_tokens": 1, "max_new_tokens": 1, "sequence_len": 2,
                       "matrix_lr": 0, "embedding_lr": 0, "verifier_shared_layers": 0})
    task = make_task(args)
    tag = resolve_tags(args)
    rank, world = rank_and_world()
    if args.examples_per_step % world:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the {world} ranks")
    check_writable(path_of("sft", tag))
    tokenizer = Tokenizer.load(path_of("tokenizer"))
    device = init_device(args.device_type)
    dtype = compute_dtype(device)
    model, sampled, num_shared = new_model(args, tokenizer, device, dtype), [], 0
    if args.role == "verifier":
        generator, _ = load_model("sft", args.model_tag, device, dtype)
        tokenizer.check_model("generator", generator)
        sampled = sample_solutions(args, task, tokenizer, generator)
        num_shared = args.verifier_shared_layers
        private = share_layers(generator, model, num_shared)
        generator.requires_grad_(False)
        for p in private:
            p.requires_grad_(True)
    for i in range(512):  # one that does not fit the context shows now, not in the middle of training
        demonstration(args, task, tokenizer, i, sampled)
    parameters = [p for p in model.parameters() if p.requires_grad]
    print0(f"SFT of the {args.role}: {model.config}, {sum(p.numel() for p in parameters):,} parameters trained, {device}, {dtype}")
    optimizers = muon_adamw(model, args.matrix_lr, args.embedding_lr)
    base_lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    started = time.time()
    for step in range(args.num_steps):
        first = step * args.examples_per_step
        examples = [demonstration(args, task, tokenizer, i, sampled) for i in range(first + rank, first + args.examples_per_step, world)]
        num_tokens = all_reduce(torch.tensor(float(sum(sum(mask) for _, mask in examples)), device=device)).item()
        loss = torch.zeros((), device=device)
        for batch in length_batches(examples, args.micro_batch_tokens):
            batch_loss = sft_loss(model, batch, num_tokens)
            batch_loss.backward()
            loss += batch_loss.detach()
        all_reduce_gradients(parameters)
        clip_gradients(parameters, 1.0)
        for optimizer, lrs in zip(optimizers, base_lrs, strict=True):
            for group, lr in zip(optimizer.param_groups, lrs, strict=True):
                group["lr"] = lr * warmup_cosine(step, args.num_steps)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if num_shared:
            copy_shared_lambdas(generator, model, num_shared)
        if step % 50 == 0 or step == args.num_steps - 1:
            loss = all_reduce(loss).item()
            left = (time.time() - started) / (step + 1) * (args.num_steps - step - 1)
            print0(f"step {step:4d}/{args.num_steps} | loss {loss:.4f} | {time.time() - started:.0f}s, {left:.0f}s left")
    if rank == 0:
        save_model("sft", tag, args.num_steps, model, {"user_config": vars(args), "loss": loss, "val_bpb": None})
    print0(f"saved {path_of('sft', tag)} at step {args.num_steps}")
    if rank == 0 and list_steps("sft", tag)[-1] != args.num_steps:
        print0(f"WARNING: {tag} also holds step {list_steps('sft', tag)[-1]}, which is what loads unless --model-step says otherwise")


if __name__ == "__main__":
    script_main(main, make_parser())
