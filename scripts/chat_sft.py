"""
Supervised fine-tuning of a role on a task's demonstrations, and on conversations: the starting point of RL.

The generator learns to write solutions. The verifier learns to judge corrupted solutions and ones sampled from the SFT
generator, whose problems come from the sft split. --role both teaches one model both, in equal parts, for
tango_rl --verifier-head trunk or prompt; the solutions are sampled from the SFT checkpoint that it starts from. Any of
them starts from random weights or, with --from-stage, from a checkpoint. Trained with Muon (matrices) and AdamW (the
rest). Example i is a function of the seed, the role and i, so that a stopped run goes on exactly, on any number of
ranks.

    python -m scripts.chat_sft --role generator --model-tag d4
    torchrun --standalone --nproc_per_node=2 scripts/chat_sft.py --role verifier --model-tag d4     # writes d4-ver
    python -m scripts.chat_sft --role both --model-tag d4-both --from-stage sft --from-tag d4 --examples-per-step 48
    python -m scripts.chat_sft --role generator --model-tag d24 --from-stage base --task gsm8k \\
        --conversations chats.jsonl --conversations-share 0.5 --pack
    torchrun --standalone --nproc_per_node=8 scripts/chat_sft.py --role generator --model-tag qwen-sft \\
        --from-stage sft --from-tag qwen7b --task gsm8k \\
        --embedding-lr 5e-6 --shard --recompute     # an imported model: AdamW for all of it
"""
import argparse
import contextlib
import math
import os
import random
import re
import time

import torch

from nanochat.checkpoint import (find_step, fingerprint, load_model, load_training, resumable_steps, resume_step,
                                 save_training, saying_what_is_whole, warn_of_dtype)
from nanochat.common import (BadInput, CannotWrite, Diverged, StopRequested, all_reduce, check_least, check_most,
                             check_name, compute_dtype, dtype_name, flag_defaults, in_words, init_device, on_all_ranks,
                             print0, rank_and_world, script_main)
from nanochat.dataloader import check_same_files, length_batches, mark_of, pack_whole, shuffled
from nanochat.engine import pad_prompts
from nanochat.gpt import add_model_args, config_of, new_model
from nanochat.hf.decoder import Decoder
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.loss_eval import supervised_loss
from nanochat.optim import muon_adamw, optimize, warmup_cosine
from nanochat.recipes.policy.critique_grpo import CRITIQUES
from nanochat.rl.learn.heads import check_shared, copy_shared_lambdas, share_layers
from nanochat.rl.learn.roles import set_recompute
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import outcomes_of, problems_digest, texts_digest
from nanochat.rl.records.prompts import DEMOS, generator_prompt, quoting_prompt, refine_prompt
from nanochat.rl.verify.forms import FORMS, check_form, form_prompt, judged_together, one_bare
from nanochat.storage.files import check_writable, path_of
from nanochat.storage.run import add_keep_arg, add_run_args, describe_versions, look_at, start_run, uses_wandb
from nanochat.weights import check_weights
from tasks import add_task_args, make_task
from tasks.common import demo_of
from tasks.conversations import load_conversations

# sft problems from this index on are for sampled solutions: demonstrations of an endless task never get there
SAMPLED_FROM = 10_000_000
# What a micro-batch costs besides its tokens, in tokens, on CPU in fp32. Elsewhere the fewest are taken: an imported
# model in bf16 on a CPU runs no padding.
TOKENS_PER_BATCH = {torch.float32: 100}
MAY_CHANGE = {"resume_from_step", "run", "device_type", "save_every", "keep", "micro_batch_tokens", "recompute"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    add_run_args(parser)
    parser.add_argument("--resume-from-step", default="-1",
                        help=f"continue from this step, or from the last one with 'auto'; -1 = a fresh start; "
                             f"{in_words(MAY_CHANGE)}")
    parser.add_argument("--save-every", type=int, default=-1, help="steps between checkpoints; -1 = at the end only")
    add_keep_arg(parser)
    add_task_args(parser)
    parser.add_argument("--role", choices=["generator", "verifier", "both"], required=True)
    parser.add_argument("--model-tag", default="", help="tag of the generator, default d<depth>")
    parser.add_argument("--verifier-tag", default="",
                        help="tag under which the verifier is saved; default: <model-tag>-ver")
    parser.add_argument("--from-stage", default="", choices=["", "base", "sft"],
                        help="start from a checkpoint of this stage; default: random weights")
    parser.add_argument("--from-tag", default="", help="its tag; default: --model-tag")
    parser.add_argument("--from-step", type=int, default=-1, help="its step; -1 = the last")
    add_model_args(parser)
    parser.add_argument("--verifier-shared-layers", type=int, default=0,
                        help="lowest layers the verifier takes from the generator, frozen")
    data = parser.add_argument_group("data")
    data.add_argument("--conversations", nargs="+", default=[],
                      help="jsonl files of conversations, or datasets names, mixed in; one named twice counts twice")
    data.add_argument("--conversations-share", type=float, default=0.5,
                      help="share of the examples that are conversations, if there are any")
    data.add_argument("--demo-shares", nargs="+", default=[], metavar="KIND:SHARE",
                      help="generator: shares of the demonstrations that are of another kind than a solution, for "
                           "recipes whose roles write these, such as refine:0.5. refine: a second attempt; revise: "
                           "one that mends what is said of the first (constitutional_ai); propose: a problem; argue: "
                           "a solution for a given answer (debate); first, second: half of a solution (magrpo); "
                           "reason, condense: a query, and what is found in short (mars)")
    data.add_argument("--verifier-form", default="steps",
                      help=f"verifier: how it judges, one of: {', '.join(FORMS)}; steps: one solution, as recipe tango "
                           f"has it, pair and solve_pair: two for rm_r1 or think_rm, graded: for think_rm, scores: for "
                           f"spct")
    data.add_argument("--num-judged", type=int, default=2, help="solutions in a prompt of --verifier-form scores")
    data.add_argument("--bare-share", type=float, default=0.0,
                      help="of the demonstrations of --verifier-form pair those in which one of the two solutions is "
                           "its answer alone, for recipe debate, whose judge also hears one side")
    data.add_argument("--cut-share", type=float, default=0.0,
                      help="of the demonstrations of --verifier-form steps those that judge the beginning of a "
                           "solution, which as a whole is wrong, for dev.experiments.step_retry")
    data.add_argument("--num-sampled", type=int, default=2048,
                      help="verifier: solutions sampled from the generator; half of its demonstrations judge one")
    data.add_argument("--max-new-tokens", type=int, default=96, help="length limit of solutions")
    training = parser.add_argument_group("training")
    training.add_argument("--num-steps", type=int, default=700)
    training.add_argument("--examples-per-step", type=int, default=24,
                          help="examples per optimizer step, over all ranks")
    training.add_argument("--micro-batch-tokens", type=int, default=2048,
                          help="tokens that go through the model at once; changes no result")
    training.add_argument("--pack", action=argparse.BooleanOptionalAction, default=False,
                          help="several examples per row of the whole context, as in pretraining; a row's later "
                               "examples see its earlier ones")
    training.add_argument("--matrix-lr", type=float, default=4e-3, help="Muon, for the blocks' matrices")
    training.add_argument("--embedding-lr", type=float, default=4e-3,
                          help="AdamW, for everything else; of an imported model for all of it")
    training.add_argument("--shard", action=argparse.BooleanOptionalAction, default=False,
                          help="shard an imported model's weights, gradients and optimizer over the ranks (FSDP2); "
                               "changes no result")
    training.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=False,
                          help="run its blocks again in the backward pass instead of keeping their activations; "
                               "changes no result")
    return parser


def start_model(args, tokenizer, device):
    """The model to train: random from the seed and the role, or a checkpoint's. Raises BadInput."""
    if not args.from_stage:
        seed = 2 * args.seed + (args.role == "verifier")
        return new_model(config_of(args, tokenizer.vocab_size), seed, device, compute_dtype(device))
    model, meta = load_model(args.from_stage, args.from_tag or args.model_tag, device, None,
                             None if args.from_step < 0 else args.from_step, args.shard)
    tokenizer.check_model(f"{args.from_stage} model", model)
    print0(f"starting from {path_of(args.from_stage, args.from_tag or args.model_tag)} at step {meta['step']}")
    shape, parser = model.config.asdict() | {"depth": model.config.n_layer}, make_parser()
    for name in ("depth", "n_embd", "n_head", "n_kv_head", "sequence_len", "window_pattern"):
        if getattr(args, name) not in (parser.get_default(name), shape.get(name)):
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: the {args.from_stage} model has "
                           f"{shape.get(name)}, and keeps its shape")
    return model


def sample_solutions(args, task, tokenizer, generator, run) -> list[tuple]:
    """(problem, solution text) pairs from the SFT generator on the sft split. Solutions whose outcome cannot be told
    are left out and counted: a demonstration would call them wrong."""
    problems = [task.problem("sft", SAMPLED_FROM + i) for i in range(args.num_sampled)]
    sampler = Sampler(task, tokenizer, args.seed, args.max_new_tokens, 0, should_stop=run.should_stop)
    solutions = sampler.solve(generator, problems, 1, ("sft",))[1]
    texts = [solution.text for solution in solutions]
    outcomes = outcomes_of(task, problems, texts, run.should_stop)
    run.check_stop()
    kept = [(problem, text) for problem, text, outcome in zip(problems, texts, outcomes, strict=True)
            if outcome is not None]
    if len(kept) < len(texts):
        print0(f"{len(texts) - len(kept)} of {len(texts)} sampled solutions could not be checked and are left out")
    return kept


def demonstration(args, task, tokenizer, index: int, sampled: list, context: int) -> tuple[list[int], list[int]]:
    """Ids and loss mask of demonstration `index`: a function of the seed, the role and the index. Of both roles by
    turns, each its own as if it were alone. Raises BadInput when it exceeds the context."""
    role = args.role
    if role == "both":
        role, index = ("generator", "verifier")[index % 2], index // 2
    rng = random.Random(f"{args.seed}-{role}-{index}")
    problem = task.problem("sft", index)
    if role == "generator":
        prompt = generator_prompt(tokenizer, task.fmt, problem.prompt)
        completion = demo_of(task, "solution_demo", problem, rng)
        kind = drawn_kind(shares_of(args.demo_shares), rng)
        if kind == "refine":
            prompt = second_attempt(task, tokenizer, problem, rng)
        elif kind:
            prompt, completion = other_demo(task, tokenizer, kind, problem, rng)
    else:
        solution = demo_of(task, "corrupted_solution", problem, rng)
        if sampled and rng.random() < 0.5:
            problem, solution = rng.choice(sampled)
        if args.cut_share and rng.random() < args.cut_share:
            solution = beginning(task.fmt, solution, rng)
        form = FORMS[args.verifier_form]
        solutions = judged_together(task, problem, solution, form.num or args.num_judged, rng)
        if args.bare_share and rng.random() < args.bare_share:
            solutions = one_bare(task.fmt, solutions, rng)
        prompt = form_prompt(tokenizer, task.fmt, args.verifier_form, problem.prompt, solutions)
        completion = form.demo(task, problem, solutions, rng)
    completion = [*tokenizer.encode(completion), tokenizer.assistant_end]
    if len(prompt) + len(completion) > context:
        raise BadInput(f"the context (--sequence-len {context}) is too short: demonstration {index} of {task.name} "
                       f"has {len(prompt) + len(completion)} tokens")
    return prompt + completion, [0] * len(prompt) + [1] * len(completion)


def beginning(fmt, solution: str, rng: random.Random) -> str:
    """A solution up to the end of one of its steps, each as likely; all of one that has none."""
    ends = [end for _, end in fmt.step_spans(solution)]
    return solution[: rng.choice(ends)] if ends else solution


def second_attempt(task, tokenizer, problem, rng: random.Random) -> list[int]:
    """The prompt of a second attempt after a corrupted solution, with nothing said about it or a critique of any
    kind."""
    solution = demo_of(task, "corrupted_solution", problem, rng)
    outcome = outcomes_of(task, [problem], [solution])[0]
    critiques = ["", demo_of(task, "verification_demo", problem, solution, rng)]
    critiques += [critique(task, problem, solution, outcome) for critique in CRITIQUES.values() if outcome is not None]
    return refine_prompt(tokenizer, task.fmt, problem.prompt, solution, rng.choice(critiques))


def shares_of(texts: list[str]) -> dict[str, float]:
    """The shares that --demo-shares gives. Raises BadInput."""
    shares = {}
    for text in texts:
        kind, _, share = text.partition(":")
        if kind not in DEMOS or kind in shares:
            raise BadInput(f"--demo-shares {text}: there are {', '.join(DEMOS)}, each once, as in refine:0.5")
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", share) or not 0 <= float(share) <= 1:
            raise BadInput(f"--demo-shares {text}: needs a share from 0 to 1, as in refine:0.5")
        shares[kind] = float(share)
    if sum(shares.values()) > 1 + 1e-9:
        raise BadInput(f"--demo-shares {' '.join(texts)}: together they are more than 1")
    return shares


def check_demos(args, task) -> None:
    """Raises BadInput for kinds of demonstrations that the role or the task does not have."""
    shares = shares_of(args.demo_shares)
    if shares and args.role == "verifier":
        raise BadInput(f"--demo-shares {' '.join(args.demo_shares)}: are shares of the generator's demonstrations")
    for kind in shares:
        if kind != "refine" and not hasattr(task, f"{kind}_demo"):
            raise BadInput(f"--demo-shares {kind}: task {task.name} has no {kind}_demo")


def drawn_kind(shares: dict[str, float], rng: random.Random) -> str:
    """A kind of demonstration, each as often as its share says; "" for a solution. Nothing is drawn without shares."""
    at = rng.random() if shares else 1.0
    for kind, share in shares.items():
        at -= share
        if at < 0:
            return kind
    return ""


def other_demo(task, tokenizer, kind: str, problem, rng: random.Random) -> tuple[list[int], str]:
    """Prompt and completion of a demonstration that is no solution; what the prompt quotes is the task's too. Raises
    BadInput for what is no text."""
    quoted, completion = getattr(task, f"{kind}_demo")(problem, rng)
    if not all(isinstance(text, str) for text in (completion, *quoted.values())):
        raise BadInput(f"task {task.name}: {kind}_demo() gives no text for problem {problem.index} of {problem.split}")
    return quoting_prompt(tokenizer, task.fmt, problem.prompt, DEMOS[kind], **quoted), completion


class Examples:
    """Example i, for any i: a conversation or a demonstration, at even distances by --conversations-share. sampled:
    solutions that the verifier's demonstrations judge beside corrupted ones."""

    def __init__(self, args, task, tokenizer, context: int):
        self.sampled: list = []
        self.demonstration = lambda index: demonstration(args, task, tokenizer, index, self.sampled, context)
        self.tokenizer, self.context = tokenizer, context
        self.conversations = load_conversations(args.conversations) if args.conversations else []
        self.share = args.conversations_share if self.conversations else 0.0
        self.row = shuffled(len(self.conversations), args.seed)
        self.names = " ".join(args.conversations)
        # all of a finite task; a verifier's would all be graded
        num_all = task.num_problems("sft") if args.role != "verifier" and hasattr(task, "num_problems") else 0
        num_all *= 1 + (args.role == "both")
        self.num_checked = min(num_all, args.num_steps * args.examples_per_step)

    def check(self) -> list[int]:
        """Trained tokens of the first 512 examples. Raises BadInput when one of the demonstrations that are looked at
        (the first 512, and all of a finite task that the generator will see), or none of 512 conversations, fits the
        context: now, not in the middle of training."""
        for index in range(512, self.num_checked):
            self.demonstration(index)
        found = [self(i) for i in range(512)]
        num_long = found.count(None)
        if num_long and num_long == math.floor(512 * self.share):
            raise BadInput(f"--conversations {self.names}: none of the first {num_long} fits the context of "
                           f"{self.context}")
        return [sum(example[1]) for example in found if example]

    def __call__(self, index: int) -> tuple[list[int], list[int]] | None:
        """Ids and loss mask, None for a conversation longer than the context: to be counted."""
        num_before = math.floor(index * self.share)
        if math.floor((index + 1) * self.share) == num_before:
            return self.demonstration(index - num_before)
        ids, mask = self.tokenizer.render_conversation(self.conversations[self.row(num_before)], None)
        return (ids, mask) if len(ids) <= self.context else None


def train_step(args, model, parameters, optimizers, examples: list, step: int, device) -> tuple[float, float, float]:
    """One optimizer step on this rank's examples. -> mean loss per trained token over all ranks, gradient norm, number
    of trained tokens."""
    num_tokens = all_reduce(torch.tensor(float(sum(sum(mask) for _, mask in examples)), device=device)).item()
    loss = torch.zeros((), device=device)
    if args.pack:
        examples = pack_whole(examples, model.config.sequence_len, 0)
    of_batch = TOKENS_PER_BATCH.get(model.compute_dtype, 2 ** 20) if device.type == "cpu" else 2 ** 20
    batches = length_batches(examples, args.micro_batch_tokens, of_batch)
    if args.shard:  # all ranks gather weights as often: some train nothing
        most = int(all_reduce(torch.tensor(len(batches), device=device), "max"))
        batches += [[([0, 0], [0, 0])]] * (most - len(batches))
    for batch in batches:
        ids, mask = (pad_prompts([example[i] for example in batch], device)[0] for i in range(2))
        batch_loss = supervised_loss(model, ids, mask, max(1.0, num_tokens))
        batch_loss.backward()
        loss += batch_loss.detach()
    grad_norm = optimize(optimizers, parameters, warmup_cosine(step, args.num_steps), 1.0)
    return all_reduce(loss).item(), grad_norm, num_tokens


def train(args, run, model, parameters, optimizers, examples: Examples, state: dict, after_step, save) -> None:
    """Runs the steps after state["step"]; state holds step, seconds, conversations left out, the last loss and steps
    skipped in a row."""
    while state["step"] < args.num_steps:
        run.check_stop()
        step, started = state["step"], time.time()
        first = step * args.examples_per_step
        share = range(first + run.rank, first + args.examples_per_step, run.world)
        found = on_all_ranks(lambda share=share: [*map(examples, share)], run.device)
        fitting = [example for example in found if example is not None]
        loss, grad_norm, num_tokens = train_step(args, model, parameters, optimizers, fitting, step, run.device)
        after_step()
        too_long = int(all_reduce(torch.tensor(len(found) - len(fitting), device=run.device)))
        failed = not (math.isfinite(loss) and math.isfinite(grad_norm))
        state |= {"step": step + 1, "loss": loss, "too_long": state["too_long"] + too_long,
                  "seconds": state["seconds"] + time.time() - started, "skipped": state["skipped"] + 1 if failed else 0}
        run.log({"step": step, "loss": loss, "grad_norm": grad_norm, "trained_tokens": num_tokens,
                 "conversations_too_long": state["too_long"], "lr_factor": warmup_cosine(step, args.num_steps),
                 "skipped": int(failed), "timing_s/step": time.time() - started, **run.writer.take_record()})
        if step % 50 == 0 or state["step"] == args.num_steps:
            left = state["seconds"] / state["step"] * (args.num_steps - state["step"])
            print0(f"step {step:4d}/{args.num_steps} | loss {loss:.4f} | {state['seconds']:.0f}s, {left:.0f}s left")
        if state["skipped"] == 3:
            raise Diverged(f"step {step}: loss or gradient was not finite three times in a row; "
                           f"lower the learning rates")
        if args.save_every > 0 and state["step"] % args.save_every == 0 and state["step"] < args.num_steps:
            save()


def resolve_tags(args) -> str:
    """Fills in both roles' tags; the one of this model. Raises BadInput."""
    args.model_tag = args.model_tag or f"d{args.depth}"
    args.verifier_tag = args.verifier_tag or f"{args.model_tag}-ver"
    for flag, tag in (("--model-tag", args.model_tag), ("--verifier-tag", args.verifier_tag),
                      ("--from-tag", args.from_tag or "d0"), ("--run", args.run)):
        check_name(flag, tag)
    if args.verifier_tag == args.model_tag:
        raise BadInput(f"--verifier-tag {args.verifier_tag}: is the generator's tag")
    return args.verifier_tag if args.role == "verifier" else args.model_tag


def judged_tag(args) -> tuple[str, int | None] | None:
    """Tag and step of the SFT generator whose solutions the verifier learns to judge; step None = the last. None where
    there is none: corrupted solutions alone are judged then."""
    if args.role == "verifier":
        return args.model_tag, None
    if args.role == "both" and args.from_stage == "sft":
        return args.from_tag or args.model_tag, None if args.from_step < 0 else args.from_step
    return None


def load_generator(args, judged: tuple, tokenizer, model, device, dtype, resumed: bool):
    """The SFT generator whose solutions the verifier learns to judge; makes the verifier share its lowest layers.
    Raises BadInput, also where a resumed verifier's shared layers are not the generator's."""
    generator, _ = load_model("sft", judged[0], device, dtype, judged[1],
                              trained=args.verifier_shared_layers > 0)  # shared layers are the model's too
    tokenizer.check_model("generator", generator)
    if args.max_new_tokens >= generator.config.sequence_len:
        raise BadInput(f"--max-new-tokens {args.max_new_tokens}: the generator's context is "
                       f"{generator.config.sequence_len}")
    if resumed:
        check_shared(generator, model, args.verifier_shared_layers, args.verifier_tag)
    private = share_layers(generator, model, args.verifier_shared_layers)
    generator.requires_grad_(False)
    for p in private:
        p.requires_grad_(True)
    return generator


def generator_mark(tag: str, step: int | None) -> int:
    """A number that tells the generator whose solutions a verifier learns to judge from others."""
    return fingerprint(path_of("sft", tag, f"model_{find_step('sft', tag, step):06d}.pt"))


def main(args) -> None:
    check_least(args, {"num_steps": 1, "examples_per_step": 1, "num_sampled": 1, "micro_batch_tokens": 1,
                       "max_new_tokens": 1, "sequence_len": 2, "matrix_lr": 0, "embedding_lr": 0,
                       "verifier_shared_layers": 0, "conversations_share": 0, "keep": 0})
    check_most(args, {"examples_per_step": 10 ** 6, "num_sampled": 10 ** 7})
    if args.conversations_share > 1:
        raise BadInput(f"--conversations-share {args.conversations_share}: is a share, at most 1")
    if args.verifier_shared_layers and args.role != "verifier":
        raise BadInput(f"--verifier-shared-layers {args.verifier_shared_layers}: is of --role verifier")
    task = make_task(args)
    check_demos(args, task)
    check_form(task, args.verifier_form, args.num_judged)
    if not 0 <= args.bare_share <= 1 or args.bare_share and args.verifier_form != "pair":
        raise BadInput(f"--bare-share {args.bare_share}: must be from 0 to 1, and is of --verifier-form pair")
    if not 0 <= args.cut_share <= 1 or args.cut_share and (args.verifier_form != "steps" or args.role == "generator"):
        raise BadInput(f"--cut-share {args.cut_share}: must be from 0 to 1, and is of a verifier's demonstrations, of "
                       f"--verifier-form steps")
    if args.role == "generator" and args.verifier_form != "steps":
        raise BadInput(f"--verifier-form {args.verifier_form}: is of a verifier's demonstrations, not the generator's")
    tag = resolve_tags(args)
    rank, world = rank_and_world()
    if args.shard and world == 1:
        raise BadInput("--shard: there is one rank, so nothing to shard over; start several with torchrun")
    if args.examples_per_step % world:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the {world} ranks")
    uses_wandb(args.run)
    check_writable(path_of("sft", tag))
    tokenizer = load_tokenizer(path_of("tokenizer"))
    seen = look_at(path_of("sft", tag))
    resumed = resume_step("sft", tag, args, MAY_CHANGE, flag_defaults(make_parser()))
    device = init_device(args.device_type)
    model = (start_model(args, tokenizer, device) if resumed is None
             else load_model("sft", tag, device, None, resumed, args.shard)[0])
    dtype = model.compute_dtype
    if resumed is None and args.resume_from_step == "auto":
        print0(f"{path_of('sft', tag)} has no checkpoint: it starts from step 0")
    if args.shard and not isinstance(model, Decoder):
        raise BadInput("--shard: Muon needs whole matrices; only imported models, which AdamW trains, "
                       "can be sharded here")
    set_recompute(model, args.recompute, args.role)
    judged = judged_tag(args)
    generator = load_generator(args, judged, tokenizer, model, device, dtype, resumed is not None) if judged else None
    if args.role == "both" and not judged:
        print0("its verifier's demonstrations judge corrupted solutions alone: nothing is sampled without "
               "--from-stage sft")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizers = muon_adamw(model, args.matrix_lr, args.embedding_lr)
    files = {path: mark_of(path) for path in args.conversations if os.path.exists(path)}
    problems, texts = problems_digest(task, tokenizer), texts_digest(task)
    mark = generator_mark(*judged) if judged else None
    state = {"step": 0, "seconds": 0.0, "too_long": 0, "loss": None, "skipped": 0}
    if resumed is not None:
        if resumed >= args.num_steps:
            print0(f"{path_of('sft', tag)} is finished at step {resumed}")
            return
        saved = load_training("sft", tag, resumed, rank, optimizers, per_rank=args.shard)
        check_same_files(saved.get("files", files), files, f"step {resumed} of {tag}")  # older ones tell of neither
        if (saved.get("problems", problems), saved.get("texts", texts)) != (problems, texts):
            raise BadInput(f"{path_of('sft', tag)} was trained on other problems of task {task.name} or with another "
                           f"tokenizer: put its data file, its code or the tokenizer back as it was, or take another "
                           f"--model-tag")
        if saved.get("generator", mark) != mark:
            raise BadInput(f"{path_of('sft', judged[0])} is not the generator whose solutions "
                           f"{path_of('sft', tag)} was trained on: its SFT was done again; take another tag")
        warn_of_dtype(f"step {resumed} of {tag}", saved.get("dtype"), dtype)
        state = saved["state"]
    examples = Examples(args, task, tokenizer, model.config.sequence_len)
    lengths = examples.check()  # before anything is sampled or written, and with what was sampled below
    num_cut = sum(length > args.max_new_tokens for length in lengths)
    if args.role == "generator" and num_cut and not examples.conversations:
        print0(f"{num_cut} of the first {len(lengths)} demonstrations are longer than the --max-new-tokens "
               f"{args.max_new_tokens} that solutions are given: it cannot write the like")
    print0(f"SFT of the {args.role}{f' after step {resumed}' if resumed else ''}: {model.config}, "
           f"{sum(p.numel() for p in parameters):,} parameters trained, {device}, {dtype}")
    run = start_run(args, device, {"args": vars(args), "world": world, **describe_versions()}, seen,
                    resumed is not None, path_of("sft", tag))
    run.resumed_from = resumed
    run.trim("metrics.jsonl", state["step"])

    def after_step() -> None:
        if args.verifier_shared_layers and generator is not None:
            copy_shared_lambdas(generator, model, args.verifier_shared_layers)

    def save() -> None:
        check_weights(model, args.role)
        save_training(run, "sft", tag, state["step"], model, optimizers,
                      {"state": dict(state), "files": files, "problems": problems, "texts": texts, "generator": mark,
                       "dtype": dtype_name(dtype)},
                      {"user_config": vars(args), "loss": state["loss"], "val_bpb": None,
                       "tokenizer": tokenizer.mark()}, keep=args.keep, per_rank=args.shard)

    with saying_what_is_whole(lambda: resumable_steps("sft", tag),
                              "the same flags and --resume-from-step auto"), run.writer:
        try:
            if generator is not None:
                examples.sampled = sample_solutions(args, task, tokenizer, generator, run)
                examples.check()
                if not args.verifier_shared_layers:
                    generator = None  # its memory is the training's
            train(args, run, model, parameters, optimizers, examples, state, after_step, save)
        except CannotWrite:  # the log, where its folder was moved: the model may be written all the same
            if world == 1 and state["step"]:
                with contextlib.suppress(CannotWrite):
                    save()
                    run.writer.finish()
            raise
        except (StopRequested, BadInput) as stop:
            if state["step"]:
                save()
                run.writer.finish()
            run.finish()
            if isinstance(stop, BadInput):
                raise BadInput(f"{stop}; the model after step {state['step']} is saved" if state["step"]
                               else str(stop)) from None
            raise StopRequested(f"stopped after step {state['step']}; go on with the same flags and "
                                f"--resume-from-step auto") from None
        save()
        run.writer.finish()
        run.finish()
    left_out = (f", {state['too_long']} conversations were longer than the context and left out"
                if args.conversations else "")
    print0(f"saved {path_of('sft', tag)} at step {args.num_steps}{left_out}")


if __name__ == "__main__":
    script_main(main, make_parser())
