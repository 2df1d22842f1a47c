"""Fixtures: a base directory with a tokenizer, a tiny pair of models and a judge, made once per test session.

The weights are written by hand: what is said is known beforehand, on every CPU, and is of all kinds: right and wrong,
read and unreadable, ended and cut. The next token's log-odds are the sum of three tables: what follows the last mark,
what follows the mark before it, and what was heard: a leaning of each by the digits and operators of the prompt.
"""
import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import tempfile

import pytest
import torch

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before any module of ours is imported
files = importlib.import_module("nanochat.storage.files")
# a process reads it once, and here one process has many; a test may import this file by another name
files.base_dir = getattr(files.base_dir, "__wrapped__", files.base_dir)
# Every test passes with any: TEST_SEED draws the crafted pair anew, TEST_THREADS changes how its sums are split.
SEED, THREADS = int(os.environ.get("TEST_SEED", "0")), int(os.environ.get("TEST_THREADS", "1"))
# The smallest chain that RL can work on: two operations at most, results modulo 3.
TASK_FLAGS = ["--chain-modulus", "3", "--chain-min-steps", "1", "--chain-max-steps", "2"]
COMMON_RL_FLAGS = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--max-new-tokens", "28",
                   "--examples-per-step", "4", "--num-samples", "4", "--eval-examples", "8", "--lr", "1e-3",
                   "--num-steps", "4", "--keep", "0"]
TANGO_FLAGS = [["--verifier-max-new-tokens", "36"], ["--warmup-steps", "2"], ["--generator-steps", "2"],
               ["--verifier-balance"], ["--verifier-replay", "0.5"], ["--alpha-start", "0.5"], ["--alpha-end", "0.05"]]
FEW = 20  # problems of a task that makes its own that a start of the trainer looks at
# Recipes that need another task than chain, of which the crafted pair solves some problems too
OTHER_TASKS = {"magrpo": ["--task", "halves", "--halves-letters", "0"],
               **dict.fromkeys(("search_r1", "r1_searcher", "ssrl", "ssp"), ["--task", "lookup"]),
               "mars": ["--task", "lookup", "--most-turns", "2", "--condense-tokens", "4", "--most-bins", "1"]}
RL_FLAGS = [*COMMON_RL_FLAGS, *(word for words in TANGO_FLAGS for word in words)]

# The crafted pair
START, END = "<|assistant_start|>", "<|assistant_end|>"
DIGIT, OP = "012", "+-*"
MARKS = [DIGIT, OP, ":", ";", "=", "TF", START, "AB,"]
# Role: log-odds of what follows the last mark (what is not there never does); what the mark before it adds; how much
# each leans by what was heard; and how much it likes to say what it heard.
TABLES = {
    # "1+2:0;0*1:2;=2", often with more or fewer steps than it should have, sometimes with no answer or two digits
    "generator": ({START: {DIGIT: 0, "=": 0}, DIGIT: {OP: 0, ":": 0, ";": 0, END: 0, DIGIT: -2}, OP: {DIGIT: 0},
                   ":": {DIGIT: 0}, ";": {DIGIT: 0, "=": 2}, "=": {"0": 1, "12": 0}},
                  {START: {OP: 5}, ";": {OP: 7}, OP: {":": 7}, ":": {";": 7}, "=": {END: 7, DIGIT: 6}}, 0.3, 0.5),
    # "T;F;=F", sometimes with no final verdict
    "verifier": ({START: {"TF": 0}, "TF": {";": 0, END: -2}, ";": {"TF": 0, "=": 2}, "=": {"TF": 0}},
                 {"=": {END: 8}}, 0.5, 0.0),
    # "T;F;=A" of two solutions, "=B2" or scores, "=1,0", sometimes none of these
    "judge": ({START: {"TF": 0}, "TF": {";": 0}, ";": {"TF": 0, "=": 2}, "=": {"AB": 0, DIGIT: 0},
               "AB,": {END: 1, DIGIT: 0}, DIGIT: {END: 1, ",": 0}}, {}, 0.5, 0.0),
}
LEANINGS = (-1.1, 1.0, 0.1)  # by one digit (and operator), against another, and never in balance
# The first channels of the residual stream: the last mark, and at half size the one before it (the smear); the last
# mark alone; the digits and operators, each its own; 1 for all other tokens, and for all; what a token heard of digits
# and operators before it; and what the last START heard: the prompt.
LAST, ALONE, HEARS, OTHER, ONE, HEARD, ASKED = 0, 8, 16, 24, 25, 32, 40
UNIT_LAST, UNIT_ALONE = 1 / 1.8, 1 / 1.7  # what makes a table's entry a logit of its size, measured
SLOW = 15                                 # the channel of a head's queries and keys that turns little with the position
# The files that take longest come first: none of them is left to one worker at the end.
LONG = [f"test_{name}" for name in (
    "recipes", "bad_flags", "tango_rl", "tango", "base_train", "sharding", "qwen", "plan", "faults", "common",
    "grading", "grading_hostile", "attention_kernels", "kernels_gpu", "bad_input", "tiles", "cpu_compile",
    "cpu_kernels", "decode_cache", "engine", "fresh_weights", "hf_tokenizer_hostile", "verifier_eval", "kernels",
    "bench", "chat_sft", "chat_eval", "report", "gpt", "label_steps", "apart", "gpu_day", "setup",
    "competition", "gguf", "attention", "tour")]


@pytest.fixture(autouse=True, scope="session")
def short_starts():
    shorten_starts()


def shorten_starts() -> None:
    """A start looks at few problems and examples, not at hundreds; pretraining does not measure the machine; a
    configuration is tried once: each takes much of a short run's time."""
    from nanochat import checkpoint
    from nanochat.rl.records.outcomes import problems_of
    from nanochat.rl.run import flags
    from nanochat.rl.verify import demonstrations
    from scripts import base_train
    flags.problems_of = lambda task, split, num: problems_of(
        task, split, FEW if num < 0 and not hasattr(task, "num_problems") else num)
    demonstrations.NUM_FIRST = 64
    base_train.machine_speed = lambda device, dtype: (1e11, 1e10)
    check_config, sound = checkpoint.check_config, set()

    def check_once(config, path: str) -> None:
        if repr(config) not in sound:
            check_config(config, path)
            sound.add(repr(config))
    checkpoint.check_config = check_once


@pytest.fixture(autouse=True, scope="session")
def prepared_once():
    """Triton's interpreter prepares its language whenever a kernel calls a function: once per launch is enough."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter
    if not hasattr(interpreter, "_LangPatchScope"):  # another version
        return
    prepare, scope, prepared = interpreter._patch_lang, interpreter._LangPatchScope, set()
    restore = scope.restore

    def prepare_once(function):
        modules = {module for module in (tl, tl.core) if module in function.__globals__.values()}
        if modules and modules <= prepared:
            return scope()
        prepared.update(modules)
        return prepare(function)
    interpreter._patch_lang, scope.restore = prepare_once, lambda self: (restore(self), prepared.clear())


def pytest_collection_finish():
    """No later garbage collection looks through what thousands of collected tests hold."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # or extensions complain at the end


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))
    for item in items:
        if "browser" in item.fixturenames:
            item.add_marker("browser")
        if not torch.cuda.is_available() and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def parse(script, flags: list[str]) -> argparse.Namespace:
    """The flags as the script reads them; a trainer's parser depends on the recipe among them."""
    from nanochat.cli import parse_flags
    is_trainer = script.__name__ in ("scripts.tango_rl", "scripts.chat_rl")
    return parse_flags(script.make_parser(flags) if is_trainer else script.make_parser(), flags)


@functools.cache
def known_flags(recipe: str) -> set[str]:
    from scripts import tango_rl
    return set(tango_rl.make_parser(["--recipe", recipe])._option_string_actions)


def rl_flags(*flags: str) -> list[str]:
    """The flags of a short run, with those of tango's that the recipe named in `flags` knows too."""
    from nanochat import recipes
    recipe = flags[flags.index("--recipe") + 1] if "--recipe" in flags else "tango"
    known = known_flags(recipe) if recipe in recipes.names() else known_flags.__wrapped__(recipe)
    labels = ["--labels", os.path.join(os.environ["NANOCHAT_BASE_DIR"], "labels.jsonl")] if "--labels" in known else []
    own = [word for words in TANGO_FLAGS if words[0] in known for word in words]
    return [*COMMON_RL_FLAGS, *OTHER_TASKS.get(recipe, []), *labels, *own, *flags]


def train(*flags: str) -> None:
    from scripts import tango_rl
    tango_rl.main(parse(tango_rl, rl_flags(*flags)))


def randomized(model, seed: int = 0):
    """The model, of which every parameter is random then: gates, smear, backout and lambdas take part."""
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw, dtype=p.dtype) * (p.shape[1] ** -0.5 if p.dim() == 2 else 0.5)
    return model


def random_model(n_layer: int = 2, seed: int = 0, dtype=torch.float64, n_embd: int = 48, context: int = 64,
                 window: str = "L"):
    from nanochat.gpt import GPT, GPTConfig
    return randomized(GPT(GPTConfig(context, 265, n_layer, 2, 1, n_embd, window), dtype).to(dtype), seed)


def crafted_model(tokenizer, role: str, seed: int):
    """A model of 2 layers that writes what TABLES say of a role. The seed draws the first layer's queries and keys, and
    which way the marks lean, T and F apart."""
    from nanochat.gpt import GPT, GPTConfig
    follows, earlier, leaning, copying = TABLES[role]
    ids = lambda marks: [tokenizer.special(marks)] if marks in (START, END) else tokenizer.encode(marks)
    draw = torch.Generator().manual_seed(seed)
    model = GPT(GPTConfig(128, tokenizer.vocab_size, 2, 2, 2, 64, "L"))
    model.init_weights(draw)  # blocks begin as the identity
    wte, head, blocks = model.transformer.wte.weight.data, model.lm_head.weight.data, model.transformer.h
    value_embeds = [embedding.weight.data for embedding in model.value_embeds.values()]
    for p in (wte, head, model.backout_lambda.data, model.x0_lambdas.data, *value_embeds):
        p.zero_()
    model.smear_lambda.data.fill_(1.0)
    wte[:, ONE] = wte[:, OTHER] = 1.0
    written = sorted({token for after in follows.values() for marks in after for token in ids(marks)})
    head[:, ONE] = -4.0  # others hardly ever come; how unlikely each is differs with the prompt
    head[:, ASKED: ASKED + 6] = torch.rand((len(head), 6), generator=draw) - 0.5
    head[written, ONE] = 0.0
    c_fc, c_proj = blocks[0].mlp.c_fc.weight.data, blocks[0].mlp.c_proj.weight.data
    for k, marks in enumerate(MARKS):
        wte[ids(marks), LAST + k] = 1.0
        # A unit that the last mark reaches and the one before it, at half size, does not.
        c_fc[k] = 0.0
        c_fc[k, LAST + k], c_fc[k, ONE] = 1.0, -0.5
        c_proj[ALONE + k, k] = 3.0
        head[written, ALONE + k] = -30 * UNIT_ALONE
        for after, odds in follows.get(marks, {}).items():
            head[ids(after), ALONE + k] = odds * UNIT_ALONE
        for after, odds in earlier.get(marks, {}).items():
            head[ids(after), LAST + k] = odds * UNIT_LAST
    orders = {token: [k for _ in range(2) for k in torch.randperm(3, generator=draw).tolist()] for token in written}
    leanings = {token: leaning * torch.tensor([LEANINGS[k] for k in order]) for token, order in orders.items()}
    true, false = ids("TF")
    leanings[true], leanings[false] = leaning * torch.tensor(2 * LEANINGS), -leaning * torch.tensor(2 * LEANINGS)
    for k, token in enumerate(ids(DIGIT + OP)):
        wte[token, HEARS + k], wte[token, OTHER] = 1.0, 0.0
        head[written, ASKED + k] = torch.stack([leanings[t][k] for t in written])
        if token in written:
            head[token, ASKED + k] += copying
    for first in (0, 32):  # of each attention head
        for block, source, to in zip(blocks, (HEARS, HEARD), (HEARD, ASKED), strict=True):
            for k in range(6):
                block.attn.c_v.weight.data[first + k] = 0.0
                block.attn.c_v.weight.data[first + k, source + k] = 1.0
                block.attn.c_proj.weight.data[to + k, first + k] = 0.5
        for x in (blocks[0].attn.c_q, blocks[0].attn.c_k):  # the first layer looks at all tokens, a little more at some
            x.weight.data[first + SLOW, ONE] = 4.0
        c_q, c_k = (x.weight.data[first: first + 32].zero_() for x in (blocks[1].attn.c_q, blocks[1].attn.c_k))
        c_q[SLOW, ONE], c_k[SLOW, ONE], c_k[SLOW, LAST + MARKS.index(START)] = 1.0, -1.0, 2.0  # the second at START
    return model


@pytest.fixture(scope="session")
def sft_base(tmp_path_factory):
    """A base directory that holds a tokenizer and the pair tiny and tiny-ver as SFT leaves it, but of crafted weights.
    tiny-judge judges several solutions together, in all forms."""
    from nanochat.checkpoint import save_model
    from nanochat.tokenizer import Tokenizer
    from scripts import chat_sft, tok_train
    from tasks import make_task
    base = tmp_path_factory.mktemp("base")
    torch.set_num_threads(THREADS)  # at this size threads only wait for each other
    model = [*TASK_FLAGS, "--device-type", "cpu", "--model-tag", "tiny", "--depth", "2", "--n-embd", "64",
             "--n-head", "2", "--sequence-len", "128", "--max-new-tokens", "28", "--num-steps", "200"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        tok_train.main(parse(tok_train, TASK_FLAGS))
        tokenizer = Tokenizer.load(str(base / "tokenizer"))
        for seed, (role, tables) in enumerate(zip(("generator", "verifier", "verifier"), TABLES, strict=True)):
            args = parse(chat_sft, ["--role", role, *model])
            tag = "tiny-judge" if tables == "judge" else chat_sft.resolve_tags(args)
            crafted = crafted_model(tokenizer, tables, 2 * SEED + seed)
            save_model("sft", tag, 200, crafted, {"user_config": vars(args), "loss": None, "val_bpb": None,
                                                    "tokenizer": tokenizer.mark()})
        write_labelled(base / "labels.jsonl", make_task(args))
    return base


def write_labelled(path, task, num: int = 24) -> None:
    """Labelled solutions of the first problems of RL: right ones and corrupted ones, with gold labels."""
    with open(path, "w") as f:
        for i in range(num):
            problem = task.problem("rl", i // 2)
            text = task.corrupted_solution(problem, random.Random(i))
            labels = [float(label) for label in task.step_labels(problem, text)]
            f.write(json.dumps({"split": "rl", "index": i // 2, "prompt": problem.prompt, "solution": text,
                                "outcome": None if i == 7 else task.check(problem, text), "labels": labels}) + "\n")


@pytest.fixture
def base(sft_base, tmp_path, monkeypatch):
    """A private copy of sft_base, set as NANOCHAT_BASE_DIR."""
    shutil.copytree(sft_base, tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


def on_ranks(world: int, share, *args) -> None:
    """Runs share(*args), a function of a test's module, on so many ranks, forks of a server with torch and the
    trainer."""
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "scripts.tango_rl"])
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(as_rank, args=(world, folder, dict(os.environ), share, args),
                                              nprocs=world, start_method="forkserver")


def on_two_ranks(share, *args) -> None:
    on_ranks(2, share, *args)


def as_rank(rank: int, world: int, folder: str, environment: dict, share, args: tuple) -> None:
    shorten_starts()
    torch.set_num_threads(1)
    os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    share(*args)
    torch.distributed.destroy_process_group()
    os._exit(0)  # as script_main does: Gloo's threads may abort the interpreter's shutdown


def scripts_on_two_ranks(*calls: tuple[str, list[str]]) -> str:
    """Runs scripts, (module, flags) each, one after the other on two ranks, without torchrun; what they print."""
    with tempfile.TemporaryDirectory() as folder:
        on_two_ranks(run_scripts, calls, f"{folder}/printed")
        with open(f"{folder}/printed") as f:
            return f.read()


def run_scripts(calls, path: str) -> None:
    with open(path if os.environ["RANK"] == "0" else os.devnull, "w") as f, contextlib.redirect_stdout(f):
        for name, flags in calls:
            script = importlib.import_module(name)
            script.main(parse(script, flags))



def without_waiting(work) -> None:
    """Runs work on a GPU twice: compiling may wait for it, and the second time that is an error."""
    work()
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
