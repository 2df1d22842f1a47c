"""
Triton kernels compiled for a GPU that need not be there, and what they take of it, read from the compiled kernel.
"""
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass


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
