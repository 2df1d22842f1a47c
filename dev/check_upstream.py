"""
Checks that checkpoints and tokenizers of upstream's nanochat mean the same here, and ours the same there, by running
upstream's own code.

    git clone https://github.com/karpathy/nanochat /tmp/nanochat
    python dev/check_upstream.py --upstream /tmp/nanochat

In a temporary base directory and a process of its own (fp32, CPU), upstream trains a tokenizer with its tok_train,
saves models with its save_checkpoint, reads them back with its load_model and writes down what they compute: logits of
a full forward, of a prefill and of decode steps through its cache, and what its Engine generates at temperature 0. The
same files are then opened here and compared. Last, models and a tokenizer saved here are opened by upstream.

One line per check: what was measured and its limit (a largest difference of logits, or a number of things that differ).
Exit code 1 when one fails. Where upstream's packages are not in this environment, --python names an interpreter that
has them.
"""
import argparse
import os
import random
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

LIMIT = 1e-5
VOCAB_SIZE = 389     # no multiple of 64
SEQUENCE_LEN = 256   # the short window is 128
NUM_IDS, NUM_PREFILLED = 200, 170
PROMPT_LENGTHS = (1, 5, 60, 127, 128, 140, 200)
MAX_NEW_TOKENS = 24
STEP = 60
# tag: stage, layers, heads, key/value heads, width, window pattern, what is special about the file
CASES = {
    "d1": ("base", 1, 2, 1, 48, "L", ""),
    "d2": ("sft", 2, 4, 2, 64, "SL", "_orig_mod"),
    "d3": ("rl", 3, 4, 1, 64, "SSSL", "bf16"),
    "d4": ("base", 4, 6, 2, 96, "SSSL", "trained"),
    "d5": ("rl", 5, 4, 2, 64, "L", "old"),
    "d6": ("sft", 6, 4, 2, 128, "SSSL", ""),
    "d8": ("rl", 8, 8, 2, 256, "SL", ""),
}
TEXTS = ["", " ", "Hello world!", "the number 1234567 and 3.14, 007",
         "I'm you'RE we'd\r\n\r\n  tabs\t\tand   spaces   ", "<|bos|><|assistant_end|>",
         "a<|user_start|>b <|python_end|", "\x00\x01\x7f \u00a0\u200b\ufeff", "naïve café 你好世界 🌍 e\u0301",
         "\ufffd?\ufffd", "\n" * 9 + " " * 33, "xy" * 99]
CONVERSATION = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": "What is 12 + 30?<|assistant_start|>"},
                {"role": "assistant", "content": "It is 42.<|assistant_end|>"}, {"role": "user", "content": "Sure? 🌍"},
                {"role": "assistant", "content": ""}]


def make_text(seed: int) -> str:
    """Sums in words and digits, with something that is not ASCII."""
    draw = random.Random(seed)
    words = ["apples", "pears", "naïve", "cafés", "世界", "don't", "The answer", "is", "therefore", "<step>"]
    return "\n".join(f"{draw.choice(words)} {draw.randrange(1000)} + {draw.randrange(99)} {draw.choice(words)} = "
                     f"{draw.choice(words)}!" for _ in range(3000))


@torch.no_grad()
def randomize(model, seed: int) -> None:
    """Random numbers for every parameter, zero-initialised ones too, of a size that keeps activations and logits near
    1."""
    draw = torch.Generator().manual_seed(seed)
    centers = {"resid_lambdas": 1.0, "x0_lambdas": 0.3, "smear_lambda": 0.5, "backout_lambda": 0.3}
    for name, p in model.named_parameters():
        values = torch.randn(p.shape, generator=draw)
        if name in centers:
            values = centers[name] + 0.1 * values
        elif name != "transformer.wte.weight" and not name.startswith("value_embeds"):
            values *= p.shape[1] ** -0.5
        p.copy_(values)


# What runs in upstream's process: there, `nanochat` is upstream's.

def upstream_tokenizer(seed: int) -> None:
    """Runs upstream's tok_train on the generated text."""
    import nanochat.dataset
    nanochat.dataset.parquets_iter_batched = lambda split: [[make_text(seed)]]
    sys.argv = ["tok_train", "--vocab-size", str(VOCAB_SIZE), "--doc-cap", "1000000"]
    runpy.run_module("scripts.tok_train")


def train(model, ids: list[int]):
    """A few steps of AdamW on text; returns the optimizer."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw, losses = random.Random(0), []
    for _ in range(STEP):
        rows = torch.tensor([ids[i: i + SEQUENCE_LEN + 1]
                             for i in (draw.randrange(len(ids) - SEQUENCE_LEN) for _ in range(2))])
        loss = model(rows[:, :-1], rows[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses
    return optimizer


def save_upstream(tag: str, ids: list[int], seed: int) -> None:
    """Makes a model of upstream's and saves it with upstream's code."""
    from nanochat.checkpoint_manager import save_checkpoint
    from nanochat.gpt import GPT, GPTConfig
    stage, n_layer, n_head, n_kv_head, n_embd, pattern, special = CASES[tag]
    torch.manual_seed(seed)
    config = GPTConfig(SEQUENCE_LEN, VOCAB_SIZE, n_layer, n_head, n_kv_head, n_embd, pattern)
    model = GPT(config)
    model.init_weights()
    optimizer = None
    if special == "trained":
        optimizer = train(model, ids).state_dict()
    else:
        randomize(model, seed + n_layer)
    if special == "bf16":
        for embedding in (model.transformer.wte, *model.value_embeds.values()):
            embedding.to(torch.bfloat16)
    state, meta = model.state_dict(), {"model_config": dict(vars(config))}  # chat_rl's meta has no more
    if stage != "rl":
        meta |= {"step": STEP, "val_bpb": 1.5, "user_config": {"run": "dummy"}, "max_seq_len": SEQUENCE_LEN,
                 "loop_state": {"min_val_bpb": 1.5}}
    if special == "_orig_mod":
        state = {f"_orig_mod.{name}": p for name, p in state.items()}
    if special == "old":
        del state["resid_lambdas"], state["x0_lambdas"], meta["model_config"]["window_pattern"]
    folder = {"base": "base_checkpoints", "sft": "chatsft_checkpoints", "rl": "chatrl_checkpoints"}[stage]
    save_checkpoint(os.path.join(os.environ["NANOCHAT_BASE_DIR"], folder, tag), STEP, state, optimizer, meta)


@torch.no_grad()
def record_model(model, tokenizer, row: list[int]) -> dict:
    """What upstream computes with a model for a row of ids."""
    from nanochat.engine import Engine, KVCache
    config, ids = model.config, torch.tensor([row])
    full, cached = model(ids)[0], []
    cache = KVCache(1, config.n_kv_head, SEQUENCE_LEN, config.n_embd // config.n_head, config.n_layer, "cpu",
                    torch.float32)
    for start, end in [(0, NUM_PREFILLED)] + [(t, t + 1) for t in range(NUM_PREFILLED, NUM_IDS)]:
        cached.append(model(ids[:, start: end], kv_cache=cache)[0, -1])
    greedy = []
    for length in PROMPT_LENGTHS:
        (tokens,), (mask,) = Engine(model, tokenizer).generate_batch(
            row[:length], temperature=0.0, max_tokens=MAX_NEW_TOKENS)
        assert all(mask[length:]), "a tool was called: try another --seed"
        greedy.append(tokens[length:])
    windows, model.window_sizes = model.window_sizes, [(SEQUENCE_LEN, 0)] * config.n_layer
    gap = (model(ids)[0] - full).abs().amax(dim=1)
    model.window_sizes = windows
    is_short = any(window < SEQUENCE_LEN for window, _ in windows)
    assert gap[:129].max() < 1e-4 and (gap[129:].max() > 1e-3) == is_short, (
        f"the short window does not matter: {gap[129:].max()}")
    return {"ids": row, "full": full, "cached": torch.stack(cached), "greedy": greedy}


def record_tokenizer(tokenizer) -> dict:
    from nanochat.tokenizer import get_token_bytes
    ids, mask = tokenizer.render_conversation({"messages": CONVERSATION})
    return {"texts": [tokenizer.encode(text) for text in TEXTS], "conversation": [ids, mask],
            "bytes": get_token_bytes(), "prompt": tokenizer.render_for_completion({"messages": CONVERSATION[1:3]})}


def worker(mode: str, upstream: str, seed: int) -> None:
    """mode make: tokenizer and checkpoints of upstream's, with records; mode open: records of what is in the base
    directory."""
    import nanochat.gpt
    assert Path(nanochat.gpt.__file__).resolve().is_relative_to(Path(upstream).resolve()), (
        f"{nanochat.gpt.__file__} is not upstream's")
    from nanochat.checkpoint_manager import load_model
    from nanochat.tokenizer import get_tokenizer
    if mode == "make":
        upstream_tokenizer(seed)
    tokenizer, records = get_tokenizer(), {}
    text_ids, draw = tokenizer.encode(make_text(seed)), random.Random(seed)
    for tag, (stage, *_, special) in CASES.items():
        if mode == "make":
            save_upstream(tag, text_ids, seed)
        row = [tokenizer.get_bos_token_id(),
               *(text_ids if special == "trained" else [draw.randrange(VOCAB_SIZE) for _ in range(NUM_IDS)])][:NUM_IDS]
        model, _, _ = load_model(stage, torch.device("cpu"), "eval", model_tag=tag)
        records[tag] = record_model(model, tokenizer, row)
    records["tokenizer"] = record_tokenizer(tokenizer)
    torch.save(records, os.path.join(os.environ["NANOCHAT_BASE_DIR"], "records.pt"))


# What runs here, in our process. Checks are (name, what was measured, its limit).

def run_upstream(args, base: str, mode: str) -> dict:
    """The records of a worker with this base directory."""
    os.makedirs(base, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(Path(args.upstream).resolve()), "NANOCHAT_BASE_DIR": base,
           "NANOCHAT_DTYPE": "float32", "CUDA_VISIBLE_DEVICES": "", "RANK": "0"}
    command = [args.python, os.path.abspath(__file__), "--upstream", os.path.abspath(args.upstream), "--seed",
               str(args.seed), "--worker", mode]
    done = subprocess.run(command, cwd=base, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"upstream's process failed:\n{done.stderr[-2000:]}")
    return torch.load(os.path.join(base, "records.pt"), weights_only=True)


def cached_logits(model, ids, split: bool) -> torch.Tensor:
    """Logits of a prefill's last token and of the decode steps after it. split: new tokens have a cache after a
    prefix, as in the engine."""
    from nanochat.attention import KVCache
    prefix = KVCache(model.config.n_layer)
    hidden = [model.trunk(ids[:, :NUM_PREFILLED], cache=prefix, last_only=split)[:, -1]]
    after = {"cache": KVCache(model.config.n_layer), "prefix": prefix} if split else {"cache": prefix}
    for t in range(NUM_PREFILLED, NUM_IDS):
        hidden.append(model.trunk(ids[:, t: t + 1], positions=torch.tensor([[t]]), **after)[:, -1])
    return model.head(torch.cat(hidden))


def compare_model(model, record: dict, stop_tokens: list[int]):
    from nanochat.engine import generate
    ids = torch.tensor([record["ids"]])
    with torch.no_grad():
        logits = {"full forward": model(ids)[0],
                  "prefill and decode, prefix and cache": cached_logits(model, ids, split=True),
                  "prefill and decode, one cache": cached_logits(model, ids, split=False)}
    for name, ours in logits.items():
        yield name, (ours - record["full" if name == "full forward" else "cached"]).abs().max().item(), LIMIT
    prompts = [record["ids"][:length] for length in PROMPT_LENGTHS]
    out = generate(model, prompts, 1, max_new_tokens=MAX_NEW_TOKENS, stop_tokens=stop_tokens,
                   keys=list(range(len(prompts))), temperature=0.0)
    lengths = (out.lengths - out.stopped.long()).tolist()  # upstream leaves the end token out
    ours = [tokens[:length] for tokens, length in zip(out.tokens.tolist(), lengths, strict=True)]
    name = f"greedy completions of {sum(map(len, ours))} tokens that differ, of {len(ours)}"
    yield name, sum(a != b for a, b in zip(ours, record["greedy"], strict=True)), 0


def compare_tokenizer(tokenizer, record: dict):
    yield "texts with other ids", sum(tokenizer.encode(text) != ids
                                      for text, ids in zip(TEXTS, record["texts"], strict=True)), 0
    yield "texts that do not come back", sum(tokenizer.decode(ids) != text.replace("\ufffd", "?")
                                             for text, ids in zip(TEXTS, record["texts"], strict=True)), 0
    yield ("conversation: ids or mask differ",
           int(list(tokenizer.render_conversation(CONVERSATION, 2048)) != record["conversation"]), 0)
    sizes = [len(tokenizer.token_bytes(i)) for i in range(VOCAB_SIZE - 9)] + [0] * 9
    yield "tokens with another number of bytes", sum(a != b
                                                     for a, b in zip(sizes, record["bytes"].tolist(), strict=True)), 0
    yield "prompt: ids differ", int(tokenizer.render_prompt(CONVERSATION[1]["content"]) != record["prompt"]), 0


def checks(args, base: str):
    """All checks, in the order of the work."""
    from nanochat.checkpoint import load_model, save_model
    from nanochat.storage.files import base_dir, path_of
    from nanochat.tokenizer import Tokenizer
    os.environ["NANOCHAT_BASE_DIR"] = theirs = os.path.join(base, "theirs")
    records = run_upstream(args, theirs, "make")
    tokenizer = Tokenizer.load(path_of("tokenizer"))
    for check in compare_tokenizer(tokenizer, records["tokenizer"]):
        yield "upstream's tokenizer", *check
    models = {}
    for tag, (stage, *shape, special) in CASES.items():
        models[tag], _ = load_model(stage, tag, torch.device("cpu"), torch.float32)
        for check in compare_model(models[tag], records[tag], tokenizer.stop_tokens):
            yield f"upstream's {stage}/{tag} {' '.join(map(str, shape))} {special}", *check
    os.environ["NANOCHAT_BASE_DIR"] = ours = os.path.join(base, "ours")
    base_dir.cache_clear()  # it is read once
    tokenizer = Tokenizer.train(iter([make_text(args.seed)]), VOCAB_SIZE)
    tokenizer.save(path_of("tokenizer"))
    for check in compare_tokenizer(tokenizer, records["tokenizer"]):
        yield "our tokenizer, of the same text", *check
    for tag, (stage, *_, special) in CASES.items():
        if special != "trained":  # that one goes back as it came
            randomize(models[tag], args.seed + 1000)
        save_model(stage, tag, STEP, models[tag], {})
    records = run_upstream(args, ours, "open")
    for check in compare_tokenizer(tokenizer, records["tokenizer"]):
        yield "our tokenizer, opened by upstream", *check
    for tag, (stage, *_) in CASES.items():
        for check in compare_model(models[tag], records[tag], tokenizer.stop_tokens):
            yield f"our {stage}/{tag}, opened by upstream", *check


def main(args) -> int:
    if args.worker:
        worker(args.worker, args.upstream, args.seed)
        return 0
    commit = subprocess.run(["git", "-C", args.upstream, "rev-parse", "--short", "HEAD"], capture_output=True,
                            text=True).stdout.strip()
    print(f"upstream {commit or args.upstream}, torch {torch.__version__}, seed {args.seed}")
    print("models: stage/tag, layers, heads, key/value heads, width, windows, what is special about the file",
          flush=True)
    failed = 0
    with tempfile.TemporaryDirectory() as base:
        for subject, name, measured, limit in checks(args, base):
            ok = measured <= limit  # False for nan
            failed += not ok
            print(f"{'ok' if ok else 'FAILED':6}  {subject:44}  {name:49}  {measured:<7.2g}  limit {limit:g}",
                  flush=True)
    print(f"{failed} failed" if failed else "all equal")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--upstream", required=True, help="a clone of karpathy/nanochat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that runs upstream's code")
    parser.add_argument("--worker", choices=["make", "open"], help=argparse.SUPPRESS)
    sys.exit(main(parser.parse_args()))
