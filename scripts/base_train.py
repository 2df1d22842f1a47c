"""
Pretraining of a base model on text: packed batches, Muon for the blocks' matrices and AdamW for the rest.

--depth is the one dial. From it follow the width, the number of tokens (--target-param-data-ratio per weight), the
batch size (~ tokens ^ 0.383), the learning rates (~ sqrt(batch size)) and the weight decay: upstream nanochat's rules,
with its reference of depth 12 and 524,288 tokens.

    python -m scripts.base_train --data text/*.jsonl --depth 4 --sequence-len 256 --num-iterations 500 \\
        --total-batch-size 8192     # a laptop
    torchrun --standalone --nproc_per_node=8 scripts/base_train.py -- --data shards/*.parquet --depth 24 --run base
"""
import argparse
import math
import os
import time
from dataclasses import dataclass, field
from itertools import islice

import torch

from nanochat.checkpoint import describe_disk, load_model, save_model, warn_of_dtype
from nanochat.cli import SHARE, above, at_least, check_name, flag_defaults, new_parser, not_empty, script_main
from nanochat.common import (BadInput, Diverged, all_reduce, compute_dtype, init_device, on_all_ranks, print0,
                             rank_and_world)
from nanochat.dataloader import Documents, PackedBatches, check_same_files, find_files, is_hub_name, mark_files
from nanochat.flops import flops_per_token, machine_speed, matrix_parameters, peak_flops
from nanochat.gpt import GPT, add_model_args, config_of, new_model
from nanochat.hf.tokenizer import load_own_tokenizer
from nanochat.kernels.attention import register_operator
from nanochat.loss_eval import bits_per_byte, supervised_loss
from nanochat.optim import optimize, pretraining_optimizers, warmup_warmdown
from nanochat.storage.files import path_of
from nanochat.storage.run import Run, add_run_args
from nanochat.supervised import (add_checkpoint_args, begin_run, check_skipped, greedy_texts, load_training,
                                 resumable_steps, resume_step, save_training, saved_when_stopped, writing_checkpoints)
from nanochat.weights import check_weights

REFERENCE_DEPTH, REFERENCE_BATCH = 12, 2 ** 19  # where upstream tuned the learning rates; tokens
MAY_CHANGE = {"resume_from_step", "run", "device_type", "device_batch_size", "compile", "eval_every", "eval_tokens",
              "sample_every", "save_every", "keep"}


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    add_run_args(parser)
    parser.add_argument("--model-tag", default="", help="name of the checkpoint; default d<depth>")
    add_checkpoint_args(parser, MAY_CHANGE)
    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", type=not_empty, required=True,
                      help="files of one kind, folders, patterns, or one datasets name: "
                           ".txt (each one document), .jsonl or .parquet (column text)")
    data.add_argument("--val-data", nargs="+", type=not_empty, default=[],
                      help="the same for validation; default: the last file of --data, which is then not trained on")
    add_model_args(parser, depth=20, sequence_len=2048, window_pattern="SSSL")
    horizon = parser.add_argument_group("horizon, in order of precedence")
    horizon.add_argument("--num-iterations", type=at_least(1, also=-1), default=-1,
                         help="optimizer steps; -1 = by the next")
    horizon.add_argument("--target-flops", type=at_least(-1, float), default=-1.0,
                         help="as many steps as these FLOPs allow; -1 = by the next")
    horizon.add_argument("--target-param-data-ratio", type=above(0, 1e9), default=12.0,
                         help="tokens per weight of the matrices")
    training = parser.add_argument_group("training")
    training.add_argument("--device-batch-size", type=at_least(1, int, 10 ** 6), default=32,
                          help="rows that go through the model at once, per rank; changes no result")
    training.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None,
                          help="compile the forward and backward pass of training (torch.compile), which rounds "
                               "differently; default: on CUDA")
    training.add_argument("--total-batch-size", type=at_least(1, int, 2 ** 30, also=-1), default=-1,
                          help="tokens per step over all ranks; -1 = by the rule")
    training.add_argument("--matrix-lr", type=at_least(0, float), default=0.02,
                          help="Muon, for the blocks' matrices; this and the next are for 524,288 tokens")
    training.add_argument("--embedding-lr", type=at_least(0, float), default=0.3, help="AdamW, at width 768")
    training.add_argument("--unembedding-lr", type=at_least(0, float), default=0.008, help="AdamW, at width 768")
    training.add_argument("--scalar-lr", type=at_least(0, float), default=0.5, help="AdamW, for the per-layer scalars")
    training.add_argument("--weight-decay", type=at_least(0, float), default=0.28,
                          help="of Muon, at depth 12; falls to 0 over the run")
    training.add_argument("--warmup-steps", type=at_least(0), default=40)
    training.add_argument("--warmdown-ratio", type=SHARE, default=0.65,
                          help="share of the steps over which the learning rate falls")
    training.add_argument("--final-lr-frac", type=SHARE, default=0.05)
    training.add_argument("--max-grad-norm", type=at_least(0, float), default=1.0, help="0 = no clipping")
    evals = parser.add_argument_group("evaluation")
    evals.add_argument("--eval-every", type=int, default=250,
                       help="steps between evaluations of validation bits per byte; -1 = at the end only")
    evals.add_argument("--eval-tokens", type=at_least(1), default=80 * 2 ** 19,
                       help="tokens of validation text, over all ranks")
    evals.add_argument("--sample-every", type=int, default=2000, help="steps between samples; -1 = at the end only")
    return parser


def reference_weights(args, vocab_size: int) -> int:
    """Weights of the matrices of a model of the reference depth and its own width, without making it."""
    shape = argparse.Namespace(**{**vars(args), "depth": REFERENCE_DEPTH, "n_embd": 0, "n_head": 0, "n_kv_head": 0})
    with torch.device("meta"):
        return matrix_parameters(GPT(config_of(shape, vocab_size)))


def apply_rules(args, model, world: int) -> dict:
    """What follows from --depth: steps, batch size, factors on learning rates and weight decay. Raises BadInput.

    Tokens D = ratio * weights; batch size B ~ D^0.383 (Power Lines, arXiv 2505.13738), rounded to a power of 2;
    learning rates ~ sqrt(B); weight decay so that B / (lr * decay * D) stays what it is at the reference (arXiv
    2405.13698).
    """
    weights = matrix_parameters(model)
    tokens = args.target_param_data_ratio * weights
    reference = args.target_param_data_ratio * reference_weights(args, model.vocab_size)
    batch = args.total_batch_size
    if batch == -1:
        batch = 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference) ** 0.383))
    row = args.sequence_len * world
    if batch % row:
        raise BadInput(f"--total-batch-size {batch}: must be a multiple of --sequence-len {args.sequence_len} times "
                       f"{world} ranks")
    if args.num_iterations > 0:
        num_steps = args.num_iterations
    elif args.target_flops > 0:
        num_steps = round(args.target_flops / (flops_per_token(model) * batch))
    else:
        num_steps = int(tokens // batch)
    if num_steps < 1:
        raise BadInput(f"--target-flops {args.target_flops} --target-param-data-ratio "
                       f"{args.target_param_data_ratio}: not one step of {batch} tokens")
    lr_factor = math.sqrt(batch / REFERENCE_BATCH)
    return {"weights": weights, "num_steps": num_steps, "batch": batch, "rows": batch // row, "lr_factor": lr_factor,
            "weight_decay": args.weight_decay * lr_factor * reference / tokens}


def split_sources(args) -> tuple[list[str], list[str]]:
    """Training and validation sources: without --val-data the last of several files is validation. Raises BadInput."""
    if args.val_data or is_hub_name(args.data):
        if not args.val_data:
            raise BadInput(f"--data {args.data[0]}: give --val-data too, for example "
                           f"{args.data[0].split(':')[0]}:validation")
        sources = args.data, args.val_data
    else:
        files = find_files(args.data)
        if len(files) < 2:
            raise BadInput(f"--data {' '.join(args.data)}: is one file; give a second one or --val-data, for "
                           f"validation")
        sources = files[:-1], files[-1:]
    train, val = (set() if is_hub_name(names) else {*map(os.path.realpath, find_files(names))} for names in sources)
    if both := sorted(train & val):
        raise BadInput(f"{both[0]}: is in the text to validate on, and would be trained on too")
    return sources


def validation_batches(args, sources, tokenizer, run):
    """The same first --eval-tokens tokens of the validation text each time, this rank's share."""
    batches = PackedBatches(Documents(sources, run.rank, run.world), tokenizer, args.device_batch_size,
                            args.sequence_len + 1)
    for _ in range(max(1, args.eval_tokens // (args.device_batch_size * args.sequence_len * run.world))):
        run.check_stop()
        yield batches.next_batch()


def print_samples(args, model, tokenizer, sources, num: int = 3) -> None:
    """Greedy continuations of the first 8 tokens of the first documents."""
    prompts = [[tokenizer.bos, *tokenizer.encode(text)[:8]] for text in islice(Documents(sources), num)]
    new = min(32, args.sequence_len - max(map(len, prompts)))
    if new < 1:
        print0(f"  no samples: --sequence-len {args.sequence_len} has no room after their beginnings")
        return
    for prompt, text in zip(prompts, greedy_texts(model, tokenizer, prompts, new), strict=True):
        print0(f"  sample: {tokenizer.decode(prompt[1:])!r} -> {text!r}")


def training_trunk(args, model, device: torch.device):
    """model.trunk, compiled where --compile asks for it: for rows of one length, by as many kernels as there are
    numbers of rows. Evaluation and samples use the model as it is."""
    if not (device.type == "cuda" if args.compile is None else args.compile):
        return model.trunk
    register_operator()
    return torch.compile(model.trunk, dynamic=False)


@dataclass
class Pretraining:
    """All that the steps of a run read and change."""
    args: argparse.Namespace
    tag: str
    tokenizer: object
    val_sources: list[str]
    texts: list[dict]           # marks of the files of training and of validation
    model: GPT
    optimizers: list
    batches: PackedBatches
    rules: dict                 # of apply_rules
    state: dict = field(default_factory=lambda: {"step": 0, "seconds": 0.0, "skipped": 0})  # skipped: in a row
    run: Run | None = None
    stage = "base"

    def evaluate(self) -> float:
        """Validation bits per byte. Raises Diverged."""
        check_weights(self.model, "model")
        batches = validation_batches(self.args, self.val_sources, self.tokenizer, self.run)
        val_bpb = bits_per_byte(self.model, batches, self.tokenizer.num_bytes())
        if not math.isfinite(val_bpb):
            raise Diverged(f"after step {self.state['step']}: validation bits per byte are {val_bpb}; lower the "
                           f"learning rates")
        return val_bpb

    def meta(self, val_bpb: float | None = None) -> dict:
        return {"user_config": vars(self.args), "tokenizer": self.tokenizer.mark(), "val_bpb": val_bpb,
                "total_batch_size": self.rules["batch"], "device_batch_size": self.args.device_batch_size,
                "max_seq_len": self.args.sequence_len}

    def save(self, val_bpb: float | None = None) -> None:
        save_training(self, {"batches": self.batches.state_dict(), "texts": self.texts}, self.meta(val_bpb),
                      per_rank=True)

    def save_after_bad_input(self) -> str:
        """Saves the model alone: where its text is bad, the stream cannot go on."""
        check_weights(self.model, "model")
        self.run.writer.finish()
        if self.run.rank == 0:
            save_model("base", self.tag, self.state["step"], self.model, self.meta())
        return ", and cannot be trained on" + "".join(f"; with the text as it was, --resume-from-step {step} goes on"
                                                      for step in resumable_steps("base", self.tag)[-1:])


def train_step(t: Pretraining, trunk) -> tuple[float, float, float]:
    """One optimizer step. -> mean loss per token over all ranks, gradient norm, learning-rate factor."""
    args, rules, step, device = t.args, t.rules, t.state["step"], t.run.device
    loss, num_tokens = torch.zeros((), device=device), float(rules["batch"])
    rows = on_all_ranks(t.batches.next_batch, device)
    for part in rows.to(device).split(args.device_batch_size):
        part_loss = supervised_loss(t.model, part, None, num_tokens, trunk)
        part_loss.backward()
        loss += part_loss.detach()
    factor = warmup_warmdown(step, rules["num_steps"], args.warmup_steps, args.warmdown_ratio, args.final_lr_frac)
    for group in t.optimizers[0].param_groups:
        group["weight_decay"] = rules["weight_decay"] * 0.5 * (1 + math.cos(math.pi * step / rules["num_steps"]))
    grad_norm = optimize(t.optimizers, list(t.model.parameters()), factor, args.max_grad_norm)
    return all_reduce(loss).item(), grad_norm, factor


def train(t: Pretraining) -> None:
    """Runs the steps that are left."""
    args, rules, state, batches = t.args, t.rules, t.state, t.batches
    speed = peak_flops(t.run.device)
    speed = speed * t.run.world if speed else machine_speed(t.run.device, t.model.compute_dtype)[0]
    num_steps, flops, trunk = rules["num_steps"], flops_per_token(t.model), training_trunk(args, t.model, t.run.device)
    is_due = lambda every: every > 0 and state["step"] % every == 0 and state["step"] < num_steps
    while state["step"] < num_steps:
        t.run.check_stop()
        step, started = state["step"], time.time()
        record = {"step": step, "tokens": step * rules["batch"]}
        if is_due(args.eval_every):
            record["val_bpb"] = t.evaluate()
        trained_from = time.time()
        loss, grad_norm, factor = train_step(t, trunk)
        seconds = time.time() - trained_from
        tokens_per_s = rules["batch"] / seconds
        state |= {"step": step + 1, "seconds": state["seconds"] + time.time() - started,
                  "skipped": 0 if math.isfinite(grad_norm) and math.isfinite(loss) else state["skipped"] + 1}
        record |= {"loss": loss, "grad_norm": grad_norm, "lr_factor": factor, "skipped": int(state["skipped"] > 0),
                   "epoch": batches.documents.epoch, "documents_cut": batches.num_cut,
                   "documents_empty": batches.num_empty, "tokens_per_s": tokens_per_s,
                   "mfu": flops * tokens_per_s / speed, "timing_s/step": seconds, **t.run.writer.take_record()}
        t.run.log(record)
        t.run.tell(step_line(record, num_steps, state), step % 50 == 0 or step == num_steps - 1 or "val_bpb" in record)
        check_skipped(state)
        if is_due(args.save_every):
            t.save()
        if is_due(args.sample_every):
            print_samples(args, t.model, t.tokenizer, batches.documents.sources)


def step_line(record: dict, num_steps: int, state: dict) -> str:
    bpb = f" | val bpb {record['val_bpb']:.4f}" if "val_bpb" in record else ""
    left = state["seconds"] / state["step"] * (num_steps - state["step"])
    return (f"step {record['step']:5d}/{num_steps} | loss {record['loss']:.4f}{bpb} | "
            f"{record['tokens_per_s']:,.0f} tokens/s | MFU {100 * record['mfu']:.0f}% | epoch {record['epoch']} | "
            f"{left / 60:.1f} min left")


def prepare(args) -> Pretraining | None:
    """A run that is about to begin or to go on; None for one that is finished. What is refused is refused here, before
    anything is written. Raises BadInput."""
    rank, world = rank_and_world()
    args.model_tag = tag = args.model_tag or f"d{args.depth}"
    check_name("--model-tag", tag)
    check_name("--run", args.run)
    train_sources, val_sources = split_sources(args)
    tokenizer = load_own_tokenizer(path_of("tokenizer"))
    config = config_of(args, tokenizer.vocab_size)
    # the same text may be in another folder now; of a hub's there is the name alone
    moved = set() if is_hub_name(args.data) or is_hub_name(val_sources) else {"data", "val_data"}
    resumed, seen, said = resume_step("base", tag, args, MAY_CHANGE | moved, flag_defaults(make_parser()))
    texts = [mark_files(train_sources), mark_files(val_sources)]
    for sources in (train_sources, val_sources):  # bad text shows before anything is written
        PackedBatches(Documents(sources, rank, world), tokenizer, 1, args.sequence_len + 1).next_batch()
    device = init_device(args.device_type)
    if resumed is None:
        model = new_model(config, args.seed, device, compute_dtype(device))
    else:
        model, _ = load_model("base", tag, device, compute_dtype(device), resumed)
        tokenizer.check_model("base model", model)
    rules = apply_rules(args, model, world)
    if resumed is not None and resumed >= rules["num_steps"]:
        print0(f"{path_of('base', tag)} is finished at step {resumed}")
        return None
    lrs = [rules["lr_factor"] * lr for lr in (args.matrix_lr, args.embedding_lr, args.unembedding_lr, args.scalar_lr)]
    t = Pretraining(args, tag, tokenizer, val_sources, texts, model,
                    pretraining_optimizers(model, *lrs, rules["weight_decay"]),
                    PackedBatches(Documents(train_sources, rank, world), tokenizer, rules["rows"],
                                  args.sequence_len + 1), rules)
    if resumed is not None:
        go_on(t, resumed)
    num_tokens = rules["num_steps"] * rules["batch"]
    print0(f"pretraining of {tag}{f' after step {resumed}' if resumed else ''}: {model.config}, "
           f"{sum(p.numel() for p in model.parameters()):,} parameters, {rules['weights']:,} in matrices\n"
           f"{rules['num_steps']} steps of {rules['batch']:,} tokens ({num_tokens / rules['weights']:.1f} per weight), "
           f"{num_tokens * flops_per_token(model):.2e} FLOPs, learning rates x {rules['lr_factor']:.4f}, weight decay "
           f"{rules['weight_decay']:.4f}, {world} x {device}, {model.compute_dtype}")
    begin_run(t, device, seen, resumed, said)
    return t


def go_on(t: Pretraining, step: int) -> None:
    """Takes over what was saved at a step. Raises BadInput where the text is another one."""
    saved, what = load_training(t, step, per_rank=True, parts=("batches", "texts")), f"step {step} of {t.tag}"
    for before, now in zip(saved["texts"], t.texts, strict=True):
        check_same_files(before, now, what)
    warn_of_dtype(what, saved.get("dtype"), t.model.compute_dtype)
    t.batches.load_state_dict(saved["batches"])


def main(args) -> None:
    t = prepare(args)
    if t is None:
        return
    with writing_checkpoints(t):
        with saved_when_stopped(t):
            train(t)
            val_bpb = t.evaluate()
        t.save(val_bpb)
        t.run.writer.finish()
        t.run.log({"step": t.state["step"], "tokens": t.state["step"] * t.rules["batch"], "val_bpb": val_bpb,
                   **t.run.writer.take_record()})
        t.run.finish()
    print_samples(args, t.model, t.tokenizer, t.val_sources)
    print0(f"validation bits per byte {val_bpb:.4f}; {t.batches.num_cut} documents were cut over rows, "
           f"{t.batches.num_empty} had no text\n"
           f"saved {path_of('base', t.tag)} at step {t.state['step']}")
    if t.run.rank == 0:
        print0(describe_disk([path_of("base", t.tag)]))


if __name__ == "__main__":
    script_main(main, make_parser())
