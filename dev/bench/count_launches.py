"""
How many kernels one decoding step launches on CUDA, per layer and in all, with PyTorch's operations and with the Triton
kernels for decoding. Needs no GPU.

A whole step of engine.Decoding, as a CUDA graph replays it, is run on tensors that have shapes but no numbers (device
meta), on the way that CUDA tensors take. Counted are the ATen operations that it calls and the Triton kernels that it
launches. Views and allocations launch nothing and are not counted. Others count once, so does RMSNorm; some launch more
than one kernel (a scan, a matrix product that splits its sum): the true numbers are a little larger. A layer is half
the difference between models of two and of four layers, since layers with and without value embeddings alternate. Of
attention without Triton only the writes into the cache are counted.

    python dev/bench/count_launches.py
"""
import argparse
import collections
import contextlib
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import decode_cache, engine

from nanochat.decode_cache import DecodeCache
from nanochat.engine import Decoding
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf import decoder
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels import block, decode_attention, draw, ops, steps

TRITON = [(block, name) for name in ("norm_rows", "elements", "gate_rows", "head_rows")] + [
    (draw, name) for name in ("segment_statistics", "draw_rows")] + [(decode_attention, "decode_rows")] + [
    (steps, name) for name in ("advance_rows", "record_rows")]
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
COPIES_OR_VIEWS = {"to", "contiguous", "reshape"}


class Launches(TorchDispatchMode):
    """Counts by name what is launched meanwhile; `where` is put before the names."""

    def __init__(self):
        super().__init__()
        self.counts, self.where = collections.Counter(), ""

    def add(self, name: str) -> None:
        self.counts[self.where + name] += 1

    def marking(self, where: str, function):
        """The function, what it launches marked so."""
        def marked(*args, **options):
            before, self.where = self.where, where
            result = function(*args, **options)
            self.where = before
            return result
        return marked

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, result = function.overloadpacket.__name__, function(*args, **(kwargs or {}))
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in function._schema.returns)
        if name in COPIES_OR_VIEWS:
            is_view = result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
        if not is_view and name not in FREE:
            self.add(name)
        return result


class Launcher:
    """Stands in for a Triton kernel: its launch is counted and does nothing."""

    def __init__(self, name: str, launches: Launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.add(self.name)


def gpt(num_layers: int) -> GPT:
    """nanochat's speedrun shape."""
    return GPT(GPTConfig(2048, 50304, num_layers, 10, 10, 1280, "L"), torch.bfloat16)


def qwen(num_layers: int, qk_norm: bool, bias: bool) -> Decoder:
    """The shape of Qwen2.5-1.5B, and with norms of queries and keys Qwen3's layers."""
    return Decoder(DecoderConfig("qwen2", 4096, 151936, num_layers, 12, 2, 1536, 128, 8960, 1e-6, 1e6, None, bias,
                                 False, False, qk_norm, True), torch.bfloat16)


# Of each model how to make it of so many layers, and how many it has.
MODELS = {"GPT d20": (gpt, 20), "Qwen2.5-1.5B": (lambda n: qwen(n, qk_norm=False, bias=True), 28),
          "Qwen3, same size": (lambda n: qwen(n, qk_norm=True, bias=False), 28)}


def launches_of_step(make, num_layers: int, fused: bool, rows: int = 256, units: int = 32) -> collections.Counter:
    """Launches of one decoding step of `rows` rows after `units` prompts, by name."""
    launches = Launches()
    with torch.device("meta"), torch.inference_mode():
        model = make(num_layers).to(torch.bfloat16).requires_grad_(False)
        if fused and hasattr(model, "join_weights"):
            model.join_weights()
        batch = Decoding(model, [[0] * 100] * units, rows // units, 256, [0], [0] * rows, 1.0, 0, rows, None)
        batch.cache.last_embedding = torch.zeros(rows, 1, model.config.n_embd if make is gpt else 0,
                                                 dtype=torch.bfloat16)
        places = torch.zeros(rows, dtype=torch.long)
        with model.joined_projections(), contextlib.ExitStack() as stack:
            for patch in patches(launches, fused):
                stack.enter_context(patch)
            batch.step(places)  # the first makes what later ones find
            launches.counts.clear()
            batch.model.trunk = launches.marking("trunk: ", model.trunk)
            with launches:
                launches.marking("step: ", batch.step)(places)
    return launches.counts


def patches(launches: Launches, fused: bool):
    """What makes tensors without a device go CUDA's way, and marks what the parts of a step launch."""
    def rms_norm(x, *args):
        launches.add("rms_norm")
        return torch.empty_like(x)
    yield mock.patch("torch.nn.functional.rms_norm", rms_norm)
    for module, name in TRITON:
        yield mock.patch.object(module, name, Launcher(name, launches))
    yield mock.patch.object(DecodeCache, "attend", launches.marking("attention: ", DecodeCache.attend))
    yield mock.patch.object(engine, "pick_after", launches.marking("draw: ", engine.pick_after))
    yield mock.patch.object(decode_cache, "decode_attention_plain", lambda q, *args: torch.empty_like(q))
    for module, name in ((ops, "takes_block"), (decoder, "takes_block"), (engine, "takes_triton"),
                         (decode_cache, "takes_triton")):
        yield mock.patch.object(module, name, lambda x: fused)


def table(make, depth: int) -> dict:
    """-> per kind of part (a layer without attention, attention of a layer, head and draw, what else the trunk does,
    and the step around it) and of a step of a model of this depth: the launches with PyTorch and with Triton."""
    rows = {}
    for column, fused in enumerate((False, True)):
        small, large = (launches_of_step(make, n, fused) for n in (2, 4))
        apart = lambda counts, start: sum(n for name, n in counts.items() if name.startswith(start))
        layer, attention = (apart(large - small, part) / 2 for part in ("trunk: ", "attention: "))
        for name, value in (("layer without attention", layer), ("attention", attention),
                            ("head and draw", apart(small, "draw: ")),
                            ("all else of the trunk", apart(small, "trunk: ") - 2 * layer),
                            ("around trunk and draw", apart(small, "step: ")),
                            (f"a step of {depth} layers", small.total() + (depth - 2) * (layer + attention))):
            rows.setdefault(name, [0, 0])[column] = value
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list what a model of two layers launches with Triton")
    args = parser.parse_args()
    print("| model | part | launches with PyTorch | with Triton |\n| --- | --- | --- | --- |")
    for name, (make, depth) in MODELS.items():
        for part, (plain, fused) in table(make, depth).items():
            print(f"| {name} | {part} | {plain:g} | {fused:g} |")
        if args.names:
            print(*launches_of_step(make, 2, True).most_common(), sep="\n")


if __name__ == "__main__":
    main()
