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
import math
import os
import time
from dataclasses import dataclass, field

import torch

from nanochat.checkpoint import describe_disk, find_step, fingerprint, load_model, warn_of_dtype
from nanochat.cli import SHARE, at_least, check_name, flag_defaults, new_parser, script_main
from nanochat.common import BadInput, all_reduce, compute_dtype, init_device, on_all_ranks, print0, rank_and_world
from nanochat.dataloader import check_same_files, length_batches, mark_of, pack_whole
from nanochat.engine import pad_prompts
from nanochat.gpt import add_model_args, config_of, new_model
from nanochat.hf.decoder import Decoder
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.loss_eval import supervised_loss
from nanochat.optim import muon_adamw, optimize
from nanochat.own_code import check_texts, keep_texts
from nanochat.rl.credit.schedules import add_schedule_args, lr_factor
from nanochat.rl.learn.heads import check_shared, copy_shared_lambdas, share_layers
from nanochat.rl.learn.roles import set_recompute
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import outcomes_of, problems_digest, texts_digest
from nanochat.rl.verify.demonstrations import Examples, check_demos, held_out
from nanochat.rl.verify.forms import FORMS, check_form
from nanochat.storage.files import found_at, path_of
from nanochat.storage.run import Run, add_run_args
from nanochat.supervised import (add_checkpoint_args, begin_run, check_skipped, greedy_texts, load_training,
                                 resume_step, save_training, saved_when_stopped, writing_checkpoints)
from nanochat.weights import free_gathered
from tasks import add_task_args, make_task, text_of, warn_of_prompts

# sft problems from this index on are for sampled solutions: demonstrations of an endless task never get there
SAMPLED_FROM = 10_000_000
# What a micro-batch costs besides its tokens, in tokens, on CPU in fp32. Elsewhere the fewest are taken: an imported
# model in bf16 on a CPU runs no padding.
TOKENS_PER_BATCH = {torch.float32: 100}
SAMPLE_END = 60  # characters of a sample's prompt that are shown
MAY_CHANGE = {"resume_from_step", "run", "device_type", "save_every", "keep", "micro_batch_tokens", "recompute",
              "eval_every", "eval_examples"}


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_run_args(parser)
    add_checkpoint_args(parser, MAY_CHANGE)
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
    parser.add_argument("--verifier-shared-layers", type=at_least(0), default=0,
                        help="lowest layers the verifier takes from the generator, frozen")
    add_data_args(parser.add_argument_group("data"))
    add_training_args(parser.add_argument_group("training"))
    evals = parser.add_argument_group("evaluation")
    evals.add_argument("--eval-examples", type=at_least(0, int, 10 ** 6), default=64,
                       help="demonstrations of held-out problems whose loss is measured; 0 = none")
    evals.add_argument("--eval-every", type=at_least(0), default=0, help="steps between measurements; 0 = at the end")
    return parser


def add_data_args(group) -> None:
    group.add_argument("--conversations", nargs="+", default=[],
                       help="jsonl files of conversations, or datasets names, mixed in; one named twice counts twice")
    group.add_argument("--conversations-share", type=SHARE, default=0.5,
                       help="share of the examples that are conversations, if there are any")
    group.add_argument("--demo-shares", nargs="+", default=[], metavar="KIND:SHARE",
                       help="generator: shares of the demonstrations that are of another kind than a solution, for "
                       "recipes whose roles write these, such as refine:0.5. refine: a second attempt; revise: "
                       "one that mends what is said of the first (constitutional_ai); propose: a problem; argue: "
                       "a solution for a given answer (debate); first, second: half of a solution (magrpo); "
                       "reason, condense: a query, and what is found in short (mars)")
    group.add_argument("--verifier-form", default="steps", choices=list(FORMS),
                       help="verifier: how it judges; steps: one solution, as recipe tango "
                       "has it, pair and solve_pair: two for rm_r1 or think_rm, graded: for think_rm, scores: for "
                       "spct")
    group.add_argument("--num-judged", type=int, default=2, help="solutions in a prompt of --verifier-form scores")
    group.add_argument("--bare-share", type=SHARE, default=0.0,
                       help="of the demonstrations of --verifier-form pair those in which one of the two solutions is "
                       "its answer alone, for recipe debate, whose judge also hears one side")
    group.add_argument("--cut-share", type=SHARE, default=0.0,
                       help="of the demonstrations of --verifier-form steps those that judge the beginning of a "
                       "solution, which as a whole is wrong, for dev.experiments.step_retry")
    group.add_argument("--num-sampled", type=at_least(1, int, 10 ** 7), default=2048,
                       help="verifier: solutions sampled from the generator; half of its demonstrations judge one")
    group.add_argument("--max-new-tokens", type=at_least(1), default=96, help="length limit of solutions")


def add_training_args(group) -> None:
    group.add_argument("--num-steps", type=at_least(1), default=700)
    group.add_argument("--examples-per-step", type=at_least(1, int, 10 ** 6), default=24,
                       help="examples per optimizer step, over all ranks")
    group.add_argument("--micro-batch-tokens", type=at_least(1), default=2048,
                       help="tokens that go through the model at once; changes no result")
    group.add_argument("--pack", action=argparse.BooleanOptionalAction, default=False,
                       help="several examples per row of the whole context, as in pretraining; a row's later "
                               "examples see its earlier ones")
    group.add_argument("--matrix-lr", type=at_least(0, float), default=4e-3, help="Muon, for the blocks' matrices")
    group.add_argument("--embedding-lr", type=at_least(0, float), default=4e-3,
                       help="AdamW, for everything else; of an imported model for all of it")
    add_schedule_args(group, "cosine", 0.1)
    group.add_argument("--shard", action=argparse.BooleanOptionalAction, default=False,
                       help="shard an imported model's weights, gradients and optimizer over the ranks (FSDP2); "
                               "changes no result")
    group.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=False,
                       help="run its blocks again in the backward pass instead of keeping their activations; "
                               "changes no result")


def start_model(args, tokenizer, device):
    """The model to train: random from the seed and the role, or a checkpoint's. Raises BadInput."""
    if not args.from_stage:
        seed = 2 * args.seed + (args.role == "verifier")
        return new_model(config_of(args, tokenizer.vocab_size), seed, device, compute_dtype(device))
    model, meta = load_model(args.from_stage, args.from_tag or args.model_tag, device, None,
                             None if args.from_step < 0 else args.from_step, args.shard)
    tokenizer.check_model(f"{args.from_stage} model", model)
    print0(f"starting from {found_at(args.from_stage, args.from_tag or args.model_tag)} at step {meta['step']}")
    shape, parser = model.config.asdict() | {"depth": model.config.n_layer}, make_parser()
    for name in ("depth", "n_embd", "n_head", "n_kv_head", "sequence_len", "window_pattern"):
        if getattr(args, name) not in (parser.get_default(name), shape.get(name)):
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: the {args.from_stage} model has "
                       f"{shape.get(name)}, and keeps its shape")
    return model


@dataclass
class Training:
    """All that the steps of an SFT read and change."""
    args: argparse.Namespace
    tag: str
    tokenizer: object
    task: object
    model: torch.nn.Module
    optimizers: list
    examples: Examples
    marks: dict                # that tell what it was trained on: conversations, problems, texts, the generator
    held_out: list             # examples that it is not trained on
    generator: torch.nn.Module | None = None  # whose solutions a verifier learns to judge
    state: dict = field(default_factory=lambda: {"step": 0, "seconds": 0.0, "too_long": 0, "loss": None, "skipped": 0})
    run: Run | None = None
    stage = "sft"

    @property
    def parameters(self) -> list:
        return [p for p in self.model.parameters() if p.requires_grad]

    @property
    def lr_factor(self) -> float:
        args = self.args
        return lr_factor(args.lr_schedule, args.warmup_ratio, self.state["step"], args.num_steps, args.num_steps)

    def save(self) -> None:
        save_training(self, self.marks, {"user_config": vars(self.args), "loss": self.state["loss"], "val_bpb": None,
                                         "tokenizer": self.tokenizer.mark()}, per_rank=self.args.shard)

    def save_after_bad_input(self) -> str:
        self.save()
        return ""


def micro_batches(t: Training, examples: list):
    """This rank's examples as ids and masks (B, T + 1) int64 that go through the model together."""
    args, device = t.args, t.run.device
    of_batch = TOKENS_PER_BATCH.get(t.model.compute_dtype, 2 ** 20) if device.type == "cpu" else 2 ** 20
    batches = length_batches(examples, args.micro_batch_tokens, of_batch)
    if args.shard:  # all ranks gather weights as often: some train nothing
        most = int(all_reduce(torch.tensor(len(batches), device=device), "max"))
        batches += [[([0, 0], [0, 0])]] * (most - len(batches))
    for number, batch in enumerate(batches):
        t.run.tell(f"step {t.state['step']}: {number} of {len(batches)} micro-batches are done")
        yield [pad_prompts([example[i] for example in batch], device)[0] for i in range(2)]


@torch.no_grad()
def held_out_loss(t: Training) -> float | None:
    """The mean loss per trained token of the held-out examples, over all ranks; None where there are none."""
    if not t.held_out:
        return None
    num_tokens, loss = sum(sum(mask) for _, mask in t.held_out), torch.zeros((), device=t.run.device)
    for ids, mask in micro_batches(t, t.held_out[t.run.rank:: t.run.world]):
        loss += supervised_loss(t.model, ids, mask, num_tokens)
    free_gathered(t.model)
    return all_reduce(loss).item()


def train_step(t: Training, examples: list) -> tuple[float, float, float]:
    """One optimizer step on this rank's examples. -> mean loss per trained token, gradient norm, trained tokens."""
    args, model, device = t.args, t.model, t.run.device
    num_tokens = all_reduce(torch.tensor(float(sum(sum(mask) for _, mask in examples)), device=device)).item()
    loss = torch.zeros((), device=device)
    if args.pack:
        examples = pack_whole(examples, model.config.sequence_len, 0)
    for ids, mask in micro_batches(t, examples):
        batch_loss = supervised_loss(model, ids, mask, max(1.0, num_tokens))
        batch_loss.backward()
        loss += batch_loss.detach()
    grad_norm = optimize(t.optimizers, t.parameters, t.lr_factor, 1.0)
    if args.verifier_shared_layers and t.generator is not None:
        copy_shared_lambdas(t.generator, model, args.verifier_shared_layers)
    return all_reduce(loss).item(), grad_norm, num_tokens


def train(t: Training) -> None:
    """Runs the steps that are left."""
    args, state, run = t.args, t.state, t.run
    while state["step"] < args.num_steps:
        run.check_stop()
        step, factor, started = state["step"], t.lr_factor, time.time()
        first = step * args.examples_per_step
        share = range(first + run.rank, first + args.examples_per_step, run.world)
        found = on_all_ranks(lambda share=share: [*map(t.examples, share)], run.device)
        fitting = [example for example in found if example is not None]
        loss, grad_norm, num_tokens = train_step(t, fitting)
        too_long = int(all_reduce(torch.tensor(len(found) - len(fitting), device=run.device)))
        failed = not (math.isfinite(loss) and math.isfinite(grad_norm))
        state |= {"step": step + 1, "loss": loss, "too_long": state["too_long"] + too_long,
                  "seconds": state["seconds"] + time.time() - started, "skipped": state["skipped"] + 1 if failed else 0}
        record = {"step": step, "loss": loss, "grad_norm": grad_norm, "trained_tokens": num_tokens,
                  "conversations_too_long": state["too_long"], "lr_factor": factor, "skipped": int(failed),
                  "timing_s/step": time.time() - started}
        is_last = state["step"] == args.num_steps
        if is_last or args.eval_every and state["step"] % args.eval_every == 0:
            record["val_loss"] = held_out_loss(t)
        run.log(record | run.writer.take_record())
        left = state["seconds"] / state["step"] * (args.num_steps - state["step"])
        val_loss = f" | held-out {record['val_loss']:.4f}" if record.get("val_loss") is not None else ""
        run.tell(f"step {step:4d}/{args.num_steps} | loss {loss:.4f}{val_loss} | {state['seconds']:.0f}s, {left:.0f}s "
                 f"left", step % 50 == 0 or is_last or bool(val_loss))
        check_skipped(state)
        if args.save_every > 0 and state["step"] % args.save_every == 0 and state["step"] < args.num_steps:
            t.save()


def sample_what_is_judged(t: Training) -> None:
    """Takes (problem, solution text) pairs from the SFT generator on the sft split. Solutions whose outcome cannot be
    told are left out and counted: a demonstration would call them wrong."""
    args, task, run = t.args, t.task, t.run
    problems = [task.problem("sft", SAMPLED_FROM + i) for i in range(args.num_sampled)]

    def should_stop() -> bool:  # asked before each token
        run.tell(f"sampling {len(problems)} solutions to judge from the generator")
        return run.should_stop()

    sampler = Sampler(task, t.tokenizer, args.seed, args.max_new_tokens, 0, should_stop=should_stop)
    texts = [solution.text for solution in sampler.solve(t.generator, problems, 1, ("sft",))[1]]
    outcomes = outcomes_of(task, problems, texts, run.should_stop)
    run.check_stop()
    t.examples.sampled = [(problem, text) for problem, text, outcome in zip(problems, texts, outcomes, strict=True)
                          if outcome is not None]
    if num_left_out := outcomes.count(None):
        print0(f"{num_left_out} of {len(texts)} sampled solutions could not be checked and are left out")
    t.examples.check()
    if not args.verifier_shared_layers:
        t.generator = None  # its memory is the training's


def print_samples(t: Training, num: int = 3) -> None:
    """Greedily, what the model writes after the prompts of the first held-out examples, or where there are none of
    those that it learned, and what stands there."""
    found = t.held_out[:num] or [example for example in map(t.examples, range(num)) if example]
    pairs = [(ids[:mask.index(1)], ids[mask.index(1):]) for ids, mask in found]
    prompts, learned = [prompt for prompt, _ in pairs], [rest for _, rest in pairs]
    room = t.model.config.sequence_len - max(map(len, prompts), default=0)
    new = min(room, max([t.args.max_new_tokens, *map(len, learned)]))
    texts, spell = greedy_texts(t.model, t.tokenizer, prompts, new), t.tokenizer.spell
    for prompt, rest, text in zip(prompts, learned, texts, strict=True):
        print0(f"  sample: ...{spell(prompt)[-SAMPLE_END:]!r} -> {text!r}\n  it was: {spell(rest)!r}")


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
    """Tag and step (None = the last) of the SFT generator whose solutions the verifier learns to judge; None where
    corrupted solutions alone are judged."""
    if args.role == "verifier":
        return args.model_tag, None
    if args.role == "both" and args.from_stage == "sft":
        return args.from_tag or args.model_tag, None if args.from_step < 0 else args.from_step
    return None


def load_generator(args, judged: tuple, tokenizer, model, device, resumed: bool):
    """The SFT generator whose solutions the verifier learns to judge; makes the verifier share its lowest layers.
    Raises BadInput, also where a resumed verifier's shared layers are not the generator's."""
    generator, meta = load_model("sft", judged[0], device, model.compute_dtype, judged[1],
                                 trained=args.verifier_shared_layers > 0)  # shared layers are the model's too
    warn_of_prompts(judged[0], meta["user_config"], args, "generator")
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


def check_args(args, task, world: int) -> None:
    """Raises BadInput for settings that do not go together."""
    if args.verifier_shared_layers and args.role != "verifier":
        raise BadInput(f"--verifier-shared-layers {args.verifier_shared_layers}: is of --role verifier")
    check_demos(args, task)
    check_form(task, args.verifier_form, args.num_judged)
    if args.bare_share and args.verifier_form != "pair":
        raise BadInput(f"--bare-share {args.bare_share}: is of --verifier-form pair")
    if args.cut_share and not (args.verifier_form == "steps" and args.role != "generator"):
        raise BadInput(f"--cut-share {args.cut_share}: is of a verifier's demonstrations, of --verifier-form steps")
    if args.verifier_form != "steps" and args.role == "generator":
        raise BadInput(f"--verifier-form {args.verifier_form}: is of a verifier's demonstrations, not the generator's")
    if args.shard and world == 1:
        raise BadInput("--shard: there is one rank, so nothing to shard over; start several with torchrun")
    if args.examples_per_step % world:
        raise BadInput(f"--examples-per-step {args.examples_per_step}: must be a multiple of the {world} ranks")


def prepare(args) -> Training | None:
    """An SFT that is about to begin or to go on; None for one that is finished. What is refused is refused here, before
    anything is written. Raises BadInput."""
    task = make_task(args)
    check_args(args, task, rank_and_world()[1])
    tag = resolve_tags(args)
    tokenizer = load_tokenizer(path_of("tokenizer"))
    resumed, seen, said = resume_step("sft", tag, args, MAY_CHANGE, flag_defaults(make_parser()))
    device = init_device(args.device_type)
    model = (start_model(args, tokenizer, device) if resumed is None
             else load_model("sft", tag, device, None, resumed, args.shard)[0])
    if resumed is None and args.resume_from_step == "auto":
        print0(f"{path_of('sft', tag)} has no checkpoint: it starts from step 0")
    if args.shard and not isinstance(model, Decoder):
        raise BadInput("--shard: Muon needs whole matrices; only imported models, which AdamW trains, "
                       "can be sharded here")
    set_recompute(model, args.recompute, args.role)
    judged = judged_tag(args)
    generator = load_generator(args, judged, tokenizer, model, device, resumed is not None) if judged else None
    if args.role == "both" and not judged:
        print0("its verifier's demonstrations judge corrupted solutions alone: nothing is sampled without "
               "--from-stage sft")
    marks = {"files": {path: mark_of(path) for path in args.conversations if os.path.exists(path)},
             "problems": problems_digest(task, tokenizer), "texts": texts_digest(task),
             "generator": fingerprint(found_at("sft", judged[0], f"model_{find_step('sft', *judged):06d}.pt"))
                          if judged else None}  # which tells it from others
    if resumed is not None and resumed >= args.num_steps:
        print0(f"{path_of('sft', tag)} is finished at step {resumed}")
        return None
    context = model.config.sequence_len
    t = Training(args, tag, tokenizer, task, model, muon_adamw(model, args.matrix_lr, args.embedding_lr),
                 Examples(args, task, tokenizer, context), marks, held_out(args, task, tokenizer, context), generator)
    if resumed is not None:
        go_on(t, resumed, judged)
    lengths = t.examples.check()  # before anything is sampled or written, and with what was sampled below
    num_cut = sum(length > args.max_new_tokens for length in lengths)
    if args.role == "generator" and num_cut and not t.examples.conversations:
        print0(f"{num_cut} of the first {len(lengths)} demonstrations are longer than the --max-new-tokens "
               f"{args.max_new_tokens} that solutions are given: it cannot write the like")
    print0(f"SFT of the {args.role}{f' after step {resumed}' if resumed else ''}: {model.config}, "
           f"{sum(p.numel() for p in t.parameters):,} parameters trained, {device}, {model.compute_dtype}")
    begin_run(t, device, seen, resumed, said)
    if resumed is None and t.run.rank == 0:
        keep_texts(path_of("sft", tag), {"task": text_of(args.task)})
    return t


def go_on(t: Training, step: int, judged: tuple | None) -> None:
    """Takes over what was saved at a step. Raises BadInput where it was trained on something else."""
    saved, where = load_training(t, step, per_rank=t.args.shard), path_of("sft", t.tag)
    before = t.marks | {name: saved[name] for name in t.marks if name in saved}  # older ones do not tell of all
    check_same_files(before["files"], t.marks["files"], f"step {step} of {t.tag}")
    check_texts(f"step {step} of {t.tag}", where, {"task": text_of(t.args.task)})
    if (before["problems"], before["texts"]) != (t.marks["problems"], t.marks["texts"]):
        raise BadInput(f"{where} was trained on other problems of task {t.task.name} or with another tokenizer: put "
                       f"its data file, its code or the tokenizer back as it was, or take another --model-tag")
    if before["generator"] != t.marks["generator"]:
        raise BadInput(f"{path_of('sft', judged[0])} is not the generator whose solutions {where} was trained on: its "
                       f"SFT was done again; take another tag")
    warn_of_dtype(f"step {step} of {t.tag}", saved.get("dtype"), t.model.compute_dtype)


def main(args) -> None:
    t = prepare(args)
    if t is None:
        return
    with writing_checkpoints(t):
        with saved_when_stopped(t):
            if t.generator is not None:
                sample_what_is_judged(t)
            train(t)
        t.save()
        t.run.writer.finish()
        t.run.finish()
    left_out = (f", {t.state['too_long']} conversations were longer than the context and left out"
                if args.conversations else "")
    print0(f"saved {path_of('sft', t.tag)} at step {args.num_steps}{left_out}")
    print_samples(t)
    if t.run.rank == 0:
        print0(describe_disk([path_of("sft", t.tag)]))


if __name__ == "__main__":
    script_main(main, make_parser())
