"""
Times one RL step (sample completions, policy gradient, optimizer step) of peers on a stated workload, and interleaved
with ours.

    python -m venv /tmp/peers/venv
    /tmp/peers/venv/bin/pip install torch==2.13.0 "trl==1.16.*" datasets accelerate psutil tiktoken rustbpe
    git clone https://github.com/karpathy/nanochat /tmp/peers/nanochat
    /tmp/peers/venv/bin/python dev/bench/peers.py nanochat --steps 2 --nanochat-dir /tmp/peers/nanochat
    python dev/bench/peers.py interleave --workload W1 --peer-python /tmp/peers/venv/bin/python \\
        --nanochat-dir /tmp/peers/nanochat

fp32 (W4: bf16), CPU, OMP_NUM_THREADS threads (default: all cores), random weights and rewards, random prompts of
exactly --prompt-len tokens, completions of exactly --completion-len (end tokens lie outside of the model's vocabulary),
temperature 1, the whole vocabulary. One warm-up step is not counted. Each peer asserts the lengths and that every
parameter moved.

trl: GRPOTrainer's defaults, but no gradient checkpointing, logging or saving, and --device-batch-size rows per pass
with gradients accumulated over one optimizer step (all rows are always sampled in one call). gen_s is tokenizing,
sampling and decoding; update_s the rest. nanochat: as scripts/chat_rl.py: Engine.generate_batch and one pass per
prompt, advantages without the group's mean, MuonAdamW. Top-k is off, windows are full (without FA3 the faster).

Blocks of ours and of nanochat have 12 d^2 parameters. Llama's gated MLP makes them 16 d^2 at --intermediate-size 4 d
(the default), 12 d^2 at 8/3 d. In all, W1 and W2: Llama 1.18M, at 8/3 d 0.92M, nanochat 1.05M of which 0.13M are value
embeddings, only looked up. W3: 20.97M, 19.92M, 36.70M (16.78M). W4 is SmolLM2-135M's shape, without nanochat.

peak_mem_mb is the peak of resident memory less that after imports and model building. interleave's last column is the
share of the machine's cores that other processes used meanwhile: two threads wait for each other at every operation, so
a busy neighbour slows a step down several times.
"""
import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

WORKLOADS = {
    "W1": dict(examples_per_step=32, num_samples=8, prompt_len=64, completion_len=128, vocab_size=512, depth=4,
               n_embd=128, n_head=4, n_kv_head=4),
    "W2": dict(examples_per_step=32, num_samples=8, prompt_len=256, completion_len=64, vocab_size=512, depth=4,
               n_embd=128, n_head=4, n_kv_head=4),
    "W3": dict(examples_per_step=16, num_samples=4, prompt_len=64, completion_len=64, vocab_size=32768, depth=4,
               n_embd=256, n_head=4, n_kv_head=4),
    "W4": dict(examples_per_step=8, num_samples=16, prompt_len=96, completion_len=64, vocab_size=49152, depth=30,
               n_embd=576, n_head=9, n_kv_head=3),
}
NARROW = {"W4": ["--shape", "smollm2-135m", "--dtype", "bfloat16"]}  # a real model's shape, in bf16 on both sides
# per pass; W3: the least memory of 1024, 2048, 4096 at one speed
OURS_TOKENS = {"W1": 4096, "W2": 4096, "W3": 1024, "W4": 4096}
TRL_ROWS = {"W1": 32, "W2": 32, "W3": 16, "W4": 16}  # W1: the fastest of 16, 32, 64, 256; W3: of 16, 32, 64; W2: as W1


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    modes = parser.add_subparsers(dest="mode", required=True)
    for peer in ("trl", "nanochat"):
        mode = modes.add_parser(peer)
        for name, value in WORKLOADS["W1"].items():
            mode.add_argument("--" + name.replace("_", "-"), type=int, default=value)
        mode.add_argument("--steps", type=int, default=5)
        if peer == "trl":
            mode.add_argument("--device-batch-size", type=int, default=32, help="rows per forward and backward pass")
            mode.add_argument("--intermediate-size", type=int, default=0, help="width of Llama's MLP (0: 4 n_embd)")
            mode.add_argument("--bf16", action="store_true", help="autocast, with one matrix for embedding and head")
        else:
            mode.add_argument("--nanochat-dir", required=True, help="a checkout of karpathy/nanochat")
    mode = modes.add_parser("interleave")
    mode.add_argument("--workload", default="W1", choices=list(WORKLOADS))
    mode.add_argument("--rounds", type=int, default=3)
    mode.add_argument("--steps", type=int, default=5)
    for name, value in (("peer-python", "/tmp/peers/venv/bin/python"), ("ours-python", ".venv/bin/python"),
                        ("nanochat-dir", "/tmp/peers/nanochat")):
        mode.add_argument("--" + name, default=value)
    return parser


def memory_mb() -> tuple[float, float]:
    """This process' resident memory now, and its peak so far (Linux)."""
    import psutil
    return psutil.Process().memory_info().rss / 2 ** 20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def random_prompts(args, n: int) -> list[list[int]]:
    import torch
    return torch.randint(args.vocab_size, (n, args.prompt_len), generator=torch.Generator().manual_seed(0)).tolist()


def result(args, version: str, steps: list[float], generation: list[float], peak: float, parameters: int) -> dict:
    """Medians over all steps but the first."""
    import torch
    assert len(steps) == len(generation) == args.steps + 1
    seconds = statistics.median(steps[1:])
    tokens = args.examples_per_step * args.num_samples * args.completion_len
    return {"peer": args.mode, "version": version, "s_per_step": round(seconds, 4),
            "gen_s": round(statistics.median(generation[1:]), 4),
            "update_s": round(statistics.median(s - g for s, g in zip(steps[1:], generation[1:], strict=True)), 4),
            "completion_tok_per_s": round(tokens / seconds), "peak_mem_mb": round(peak, 1), "parameters": parameters,
            "threads": torch.get_num_threads(), "torch": torch.__version__, "all_steps": [round(s, 3) for s in steps],
            **vars(args)}


def run_trl(args) -> dict:
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers

    rows = args.examples_per_step * args.num_samples
    assert rows % args.device_batch_size == 0
    # the last is not in the model's vocabulary: never sampled
    words = {str(n): n for n in range(args.vocab_size)} | {"<end>": args.vocab_size}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=args.vocab_size, hidden_size=args.n_embd,
        intermediate_size=args.intermediate_size or 4 * args.n_embd, num_hidden_layers=args.depth,
        num_attention_heads=args.n_head, num_key_value_heads=args.n_kv_head,
        max_position_embeddings=args.prompt_len + args.completion_len,
        tie_word_embeddings=args.bf16, bos_token_id=None, eos_token_id=args.vocab_size, pad_token_id=None,
        dtype="float32"))
    steps, generation = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            steps.append(-time.perf_counter())

        def on_step_end(self, *_, **__):
            steps[-1] += time.perf_counter()

    class TimedGRPO(trl.GRPOTrainer):
        def _generate(self, prompts):
            started = time.perf_counter()
            out = super()._generate(prompts)
            generation.append(time.perf_counter() - started)
            assert ([len(p) for p in out[0]] == [args.prompt_len] * rows
                    and [len(c) for c in out[1]] == [args.completion_len] * rows)
            return out

    dice = torch.Generator().manual_seed(0)
    prompts = [" ".join(map(str, prompt)) for prompt in random_prompts(args, args.examples_per_step * (args.steps + 1))]
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder, max_steps=args.steps + 1, per_device_train_batch_size=args.device_batch_size,
            gradient_accumulation_steps=rows // args.device_batch_size, num_generations=args.num_samples,
            max_completion_length=args.completion_len, learning_rate=1e-4, lr_scheduler_type="constant", beta=0.0,
            use_cpu=True, bf16=args.bf16, gradient_checkpointing=False, dataloader_pin_memory=False,
            logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True)
        trainer = TimedGRPO(
            model, reward_funcs=lambda completions, **_: torch.rand(len(completions), generator=dice).tolist(),
            args=config, train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer,
            callbacks=[Clock()])
        initial, before = [p.detach().clone() for p in model.parameters()], memory_mb()[0]
        trainer.train()
        peak = memory_mb()[1] - before
    assert not any(map(torch.equal, model.parameters(), initial)), "some parameter was not trained"
    assert next(model.parameters()).dtype == torch.float32 and trainer.state.global_step == args.steps + 1
    version = f"trl {trl.__version__}, transformers {transformers.__version__}"
    return result(args, version, steps, generation, peak, sum(p.numel() for p in model.parameters()))


def run_nanochat(args) -> dict:
    os.environ["NANOCHAT_DTYPE"] = "float32"
    sys.path.insert(0, args.nanochat_dir)
    import torch
    from nanochat.engine import Engine
    from nanochat.gpt import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(sequence_len=args.prompt_len + args.completion_len, vocab_size=args.vocab_size,
                          n_layer=args.depth, n_head=args.n_head,
                          n_kv_head=args.n_kv_head, n_embd=args.n_embd, window_pattern="L"))
    model.init_weights()
    optimizer = model.setup_optimizer()
    for group in optimizer.param_groups:
        group["lr"] *= 0.05  # chat_rl's --init-lr-frac
    engine = Engine(model, SimpleNamespace(encode_special=lambda _: args.vocab_size,
                                           get_bos_token_id=lambda: args.vocab_size))  # neither is sampled
    prompts = random_prompts(args, args.examples_per_step * (args.steps + 1))
    steps, generation = [], []
    initial, before = [p.detach().clone() for p in model.parameters()], memory_mb()[0]
    for step in range(args.steps + 1):
        sampling, started = 0.0, time.perf_counter()
        for example in range(args.examples_per_step):
            sampling -= time.perf_counter()
            model.eval()
            prompt = prompts[step * args.examples_per_step + example]
            sequences, masks = engine.generate_batch(prompt, num_samples=args.num_samples,
                                                     max_tokens=args.completion_len, temperature=1.0, top_k=None,
                                                     seed=hash((step, example, 0)) & 0x7FFFFFFF)
            sampling += time.perf_counter()
            assert [len(s) for s in sequences] == [args.prompt_len + args.completion_len] * args.num_samples
            rewards = torch.rand(args.num_samples)
            ids, mask = torch.tensor(sequences), torch.tensor(masks)
            inputs, targets = ids[:, :-1], ids[:, 1:].clone()
            targets[mask[:, 1:] == 0] = -1
            advantages = rewards - rewards.mean()
            model.train()
            logp = -model(inputs, targets, loss_reduction="none").view_as(inputs)
            num_valid = (targets >= 0).sum().clamp(min=1)
            assert num_valid == args.num_samples * args.completion_len
            loss = -(logp * advantages.unsqueeze(-1)).sum() / (num_valid * args.examples_per_step)
            loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        steps.append(time.perf_counter() - started)
        generation.append(sampling)
    peak = memory_mb()[1] - before
    assert not any(map(torch.equal, model.parameters(), initial)), "some parameter was not trained"
    commit = subprocess.run(["git", "-C", args.nanochat_dir, "log", "-1", "--format=%h %cs"], capture_output=True,
                            text=True).stdout.strip()
    return result(args, f"nanochat {commit or 'of unknown commit'}", steps, generation, peak,
                  sum(p.numel() for p in model.parameters()))


def busy_seconds() -> float:
    """CPU seconds that this machine has spent in all processes (Linux)."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def run_child(command: list[str], threads: int) -> dict | str:
    """The child's last line of JSON, with the share of the machine that others used meanwhile; or what went wrong."""
    env = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    clocks = lambda: (time.perf_counter(), busy_seconds(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]))
    started = clocks()
    try:
        done = subprocess.run(command, cwd=Path(__file__).resolve().parents[2], env=env, capture_output=True,
                              text=True)
    except OSError as error:
        return str(error)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    wall, busy, own = (after - before for before, after in zip(started, clocks(), strict=True))
    return (json.loads(done.stdout.strip().splitlines()[-1])
            | {"others_cpu": round(max(0.0, busy - own) / wall / os.cpu_count(), 3)})


def interleave(args) -> dict:
    """Ours, then each peer, `rounds` times over. This process stays small: a child's peak of resident memory starts
    from its parent's."""
    flags = [word for name, value in WORKLOADS[args.workload].items()
             for word in ("--" + name.replace("_", "-"), str(value))] + ["--steps", str(args.steps)]
    narrow = NARROW.get(args.workload, [])
    ours = [args.ours_python, "-m", "dev.bench.step", *flags, *(narrow or ["--dtype", "float32"]), "--device-type",
            "cpu", "--micro-batch-tokens", str(OURS_TOKENS[args.workload]), "--role"]
    peer = [args.peer_python, "dev/bench/peers.py"]
    ranks = [args.ours_python, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={os.cpu_count()}",
             *ours[1:]]
    commands = {"ours": [*ours, "plain"], "ours, ranks of one thread": [*ranks, "plain"],
                "trl": [*peer, "trl", *flags, "--device-batch-size", str(TRL_ROWS[args.workload]),
                        *(["--bf16", "--intermediate-size", "1536"] if narrow else [])]}
    if not narrow:
        commands["nanochat"] = [*peer, "nanochat", *flags, "--nanochat-dir", str(Path(args.nanochat_dir).resolve())]
    if args.workload == "W1":
        commands["ours, generator step with its verification"] = [*ours, "generator"]
        commands["ours, generator step, ranks of one thread"] = [*ranks, "generator"]
    runs = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name in list(runs):
            run = run_child(commands[name], 1 if "ranks" in name else os.cpu_count())
            if isinstance(run, str):
                print(f"{name} left out: {run}")
                del runs[name]
            else:
                runs[name].append(run)
    print(f"\n{args.workload}: {WORKLOADS[args.workload]}, {args.rounds} rounds of {args.steps} steps, "
          f"{os.cpu_count()} threads\n")
    print("| | s per step (min - max) | sampling s | update s | peak MB | times ours | others' CPU |\n"
          "| --- | --- | --- | --- | --- | --- | --- |")
    for name, rows in runs.items():
        seconds, gen, update, peak, others = ([row[key] for row in rows]
                                              for key in ("s_per_step", "gen_s", "update_s", "peak_mem_mb",
                                                          "others_cpu"))
        ratio = (f"{statistics.median(seconds) / statistics.median(row['s_per_step'] for row in runs['ours']):.2f}"
                 if "ours" in runs else "")
        print(f"| {rows[0].get('version', name)} | {statistics.median(seconds):.2f} ({min(seconds):.2f} - "
              f"{max(seconds):.2f}) | {statistics.median(gen):.2f} | "
              f"{statistics.median(update):.2f} | {statistics.median(peak):.0f} | {ratio} | {max(others):.0%} |")
    return {"workload": args.workload, "runs": runs}


def main(args) -> None:
    if args.mode == "interleave":
        print(json.dumps(interleave(args)))
        return
    import torch
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count()))
    print(json.dumps({"trl": run_trl, "nanochat": run_nanochat}[args.mode](args)))


if __name__ == "__main__":
    main(make_parser().parse_args())
