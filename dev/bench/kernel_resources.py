"""
What each of the project's Triton kernels takes of a GPU: registers a thread, spilled bytes a thread, shared memory a
program. Compiles for H100 and B200 (sm_90, sm_100), which need not be there.

    python dev/bench/kernel_resources.py           # a table
    python dev/bench/kernel_resources.py --json    # one line of JSON per kernel and GPU
"""
import argparse
import json
import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass

import torch

from nanochat.kernels import attention, block, decode_attention, draw, linear_logprob, linear_policy_loss, steps

CAPABILITIES = (90, 100)
FP32 = dict.fromkeys(["logprobs", "entropies", "losses", "advantages", "weights", "old_logprobs", "ref_logprobs"],
                     "*fp32")
FLOATS = dict.fromkeys(["softcap", "temperature", "low", "high", "dual_clip", "kl_coef", "entropy_coef"], "fp32")
TYPES = FP32 | FLOATS | {"z_pointer": "*bf16", "targets": "*i64", "stride": "i32", "vocab_size": "i32"}
DRAW = dict(kth="*bf16", largest="*fp32", totals="*fp32", num_segments="i32", width="i32", keys="*i64",
            positions="*i64", position_stride="i32", tokens="*i64")


@dataclass
class Resources:
    """Of one compiled kernel: registers a thread, bytes of local memory a thread (what was spilled, and arrays that
    registers cannot hold), bytes of shared memory a program, whether global loads and stores are of 16 bytes, and
    whether products and sums of bf16 are one instruction, which leaves out a rounding."""
    registers: int
    spilled: int
    shared: int
    wide_loads: bool
    wide_stores: bool
    fused_bf16: bool


def compile_for(kernel, capability: int, types: dict[str, str], constants: dict, aligned=(), **options):
    """A kernel compiled for a GPU of this capability, 90 (H100, H200) or 100 (B200).

    types: of every argument that is no constant, such as "*bf16", "i32", "fp32". aligned: numbers that 16 divides;
    pointers are taken to be. options: of the launch, such as num_warps. TRITON_INTERPRET must not be set. -> Triton's
    CompiledKernel.
    """
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    assert set(types) | set(constants) == set(kernel.arg_names), set(kernel.arg_names) ^ (set(types) | set(constants))
    place = kernel.arg_names.index
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    attributes = {(place(name),): [["tt.divisibility", 16]] for name, kind in signature.items()
                  if kind.startswith("*") or name in aligned}
    source = ASTSource(kernel, signature, {(place(name),): value for name, value in constants.items()}, attributes)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(compiled) -> Resources:
    """What a compiled kernel takes, by cuobjdump, which comes with Triton. Raises CalledProcessError."""
    from triton.backends import nvidia
    tool = os.path.join(os.path.dirname(nvidia.__file__), "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        said = subprocess.run([tool, "--dump-resource-usage", f.name], capture_output=True, text=True,
                              check=True).stdout
    of = lambda name: int(re.search(rf"\b{name}:(\d+)", said)[1])
    ptx = compiled.asm["ptx"]
    wide = lambda what: bool(re.search(rf"{what}\.global\S*\.v4\.b32|{what}\.global\S*\.v2\.b64", ptx))
    return Resources(of("REG"), of("STACK") + of("LOCAL"), compiled.metadata.shared, wide("ld"), wide("st"),
                     bool(re.search(r"\bfma\S*\.bf16", ptx)))


def linear_cases():
    for z_type, has_softcap in (("*bf16", True), ("*bf16", False), ("*fp32", True)):
        head = dict(HAS_SOFTCAP=has_softcap, BLOCK=4096)
        name = f"{z_type[1:]}{', softcap' * has_softcap}"
        options = dict(aligned=("stride",), num_warps=16)
        yield linear_logprob.logprob_rows, name, {"z_pointer": z_type}, head, options
        for flags in (dict(LOSS="ppo_clip", KL="k3", HAS_OLD=True), dict(LOSS="reinforce", KL="", HAS_OLD=False)):
            constants = dict(LIMIT=20.0, HAS_DUAL_CLIP=has_softcap, WITH_GRADIENT=True, **head, **flags)
            yield (linear_policy_loss.policy_rows, f"{name}, {flags['LOSS']}", {"z_pointer": z_type}, constants,
                   options)


def draw_cases():
    for z_type, has_softcap, top_k in (("*bf16", True, False), ("*bf16", False, False), ("*fp32", False, True)):
        types = DRAW | {"z_pointer": z_type}
        head = dict(HAS_SOFTCAP=has_softcap, HAS_TOP_K=top_k, SEGMENT=draw.SEGMENT)
        name = f"{z_type[1:]}{', softcap' * has_softcap}{', top-k' * top_k}"
        options = dict(aligned=("stride", "width"), num_warps=8)
        yield draw.segment_statistics, name, types, head, options
        yield draw.draw_rows, name, types, dict(GREEDY=False, SEGMENTS=64, **head), options
    yield draw.draw_rows, "bf16, greedy", DRAW, dict(GREEDY=True, SEGMENTS=64, HAS_SOFTCAP=True, HAS_TOP_K=False,
                                                     SEGMENT=draw.SEGMENT), options


BF16 = dict.fromkeys(["x_pointer", "y_pointer", "out", "delta", "x0", "a", "b", "weight", "sums", "normed", "gates",
                      *(f"{x}_{what}" for x in "qkv" for what in ("pointer", "bias", "weight", "out")), "cos_pointer",
                      "sin_pointer", "gate", "embedding"], "*bf16")
BLOCK = BF16 | dict.fromkeys(["C", "width", "x_stride", "y_stride", "num_channels", "kv_heads", "R", "T", "group",
                              "q_stride", "k_stride", "v_stride", "capacity"], "i32")
BLOCK |= dict.fromkeys(["epsilon", "scale"], "fp32") | dict.fromkeys(["places", "lengths"], "*i64")


def block_cases():
    for width, with_delta, with_mix, with_weight in ((768, False, False, False), (768, True, True, False),
                                                     (3584, True, False, True)):
        size = block.power_of_two(width)
        constants = dict(HAS_DELTA=with_delta, HAS_MIX=with_mix, HAS_WEIGHT=with_weight, BLOCK=size)
        name = f"{width}{', added' * with_delta}{', mixed' * with_mix}{', weight' * with_weight}"
        yield (block.norm_rows, name, BLOCK, constants,
               dict(aligned=("C",), num_warps=block.warps_of(size), **block.AS_WRITTEN))
    for function in ("relu_squared", "swiglu"):
        yield (block.elements, function, BLOCK, dict(FUNCTION=function, BLOCK=block.ELEMENTS),
               dict(aligned=("width", "x_stride", "y_stride"), num_warps=4, **block.AS_WRITTEN))
    yield (block.gate_rows, "6 heads", BLOCK, dict(CHANNELS=16, HEADS=8),
           dict(aligned=("stride",), num_warps=1, **block.AS_WRITTEN))
    for name, half, group, norm, has_bias, has_gate, into_cache in (
            ("6 heads of 128, into a cache", 64, 1, "after", False, True, True),
            ("groups of 6 of 128, into a cache", 64, 8, "", True, False, True),
            ("groups of 8 of 128, into a cache", 64, 8, "before", False, False, True),
            ("groups of 8 of 128", 64, 8, "before", False, False, False)):
        constants = dict(HALF=half, HALF_BLOCK=half, GROUP=group, NORM=norm, HAS_BIAS=has_bias, HAS_GATE=has_gate,
                         INTO_CACHE=into_cache)
        yield (block.head_rows, name, BLOCK, constants,
               dict(aligned=("q_stride", "k_stride", "v_stride"), num_warps=block.warps_of(group * half),
                    **block.AS_WRITTEN))


def attention_cases():
    """Groups of six query heads, head sizes 64 and 128."""
    sizes = dict.fromkeys([*attention.SIZES, "num_keys", "parts", "offset", "splits", "rows",
                           *(f"{x}_{of}" for x in ("q", "k", "v", "prefix_k", "prefix_v")
                             for of in ("row", "head", "member", "column"))], "i32")
    others = dict.fromkeys(["lse", "delta", "partial", "partial_lse"], "*fp32")
    others |= dict.fromkeys(["scale", "slope"], "fp32")
    others |= dict.fromkeys(["prefix_lengths", "places", "lengths", "slots"], "*i64")
    strides = [name for name in sizes if name[0] in "qkvp" and name.endswith(("row", "head", "member", "column"))]
    tensors = ["q", "k", "v", "prefix_k", "prefix_v", "out", "grad", "dq", "dk", "dv"]
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        types = sizes | others | dict.fromkeys(tensors, f"*{short}")
        for D in (64, 128):
            name, heads = f"{short}, heads of {D}", dict(GROUP=6, D=D)
            forward, of_queries, of_keys = ({**options} for options in attention.tiles(D, dtype))
            for kernel, tiles, flags in ((attention.attention_forward, forward, dict(HAS_PREFIX=True)),
                                         (attention.query_gradients, of_queries, dict(HAS_PREFIX=True)),
                                         (attention.key_gradients, of_keys, dict(OF_PREFIX=False)),
                                         (attention.key_gradients, of_keys, dict(OF_PREFIX=True))):
                constants = {key: value for key, value in tiles.items() if key.startswith("BLOCK")}
                options = {key: value for key, value in tiles.items() if key.startswith("num")}
                yield (kernel, f"{name}{', prefix' * flags.get('OF_PREFIX', False)}", types,
                       heads | flags | constants, options)
            for split in (False, True):
                yield (decode_attention.decode_rows, f"{name}{', split' * split}",
                       types if split else types | dict(partial=types["out"], partial_lse=types["out"]),
                       dict(Hkv=2, SPLIT=split, BLOCK_G=16, BLOCK_D=D, **heads,
                            BLOCK=decode_attention.keys_of_block(D, dtype)),
                       dict(aligned=strides, num_warps=decode_attention.warps_of(dtype)))
            yield decode_attention.join_splits, name, types, dict(D=D, BLOCK_D=D), dict(num_warps=1)


def step_cases():
    types = dict.fromkeys(["n", "N", "T", "num_stop"], "i32")
    types |= dict.fromkeys(["places", "num_own", "rests", "lengths", "slots", "prefix_lengths", "positions", "rows",
                            "t", "new", "stop_tokens", "tokens", "row", "token", "drawn"], "*i64")
    types |= dict.fromkeys(["new_logprobs", "logprobs"], "*fp32")
    for kernel in (steps.advance_rows, steps.record_rows):
        yield kernel, "", types, dict(ROWS=steps.ROWS), dict(num_warps=4)


def cases():
    """Of every kernel the variants that are run: kernel, name of the variant, types of its arguments (those that TYPES
    lacks or has otherwise), constants, options of compile_for."""
    yield from linear_cases()
    yield from draw_cases()
    yield from block_cases()
    yield from step_cases()
    yield from attention_cases()


def rows(capabilities=CAPABILITIES, cases=cases):
    """A dict per kernel, variant and GPU."""
    for kernel, variant, types, constants, options in cases():
        types = {name: (TYPES | types)[name] for name in kernel.arg_names if name not in constants}
        for capability in capabilities:
            compiled = compile_for(kernel, capability, types, constants, **options)
            yield dict(kernel=kernel.__name__, variant=variant, sm=capability, warps=compiled.metadata.num_warps,
                       **asdict(resources(compiled)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="lines of JSON in place of a table")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled")
    if not args.json:
        print("| kernel | variant | sm | warps | registers | spilled bytes | shared bytes | 16-byte loads | stores "
              "| fused bf16 |")
        print("| --- " * 10 + "|")
    for row in rows():
        print(json.dumps(row) if args.json else "| " + " | ".join(map(str, row.values())) + " |", flush=True)


if __name__ == "__main__":
    main()
