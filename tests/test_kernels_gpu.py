"""
The kernels as GPU code: compiled for one anywhere; run on one, in bf16, where there is one.

    python -m pytest tests/test_kernels_gpu.py -q
"""
import os
import subprocess
import sys

import pytest
import torch
from test_advantages import sparse_case
from test_kernels import assert_close, entropy_and_square, full_logprobs, in_fp64, plain, run

from nanochat.kernels.linear_logprob import linear_logprob, logprob_rows
from nanochat.kernels.linear_policy_loss import linear_policy_loss, policy_rows
from nanochat.rl.advantages import PRESETS, blend, whiten
from nanochat.rl.losses import PolicyLoss

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
gpu = pytest.mark.gpu


# Triton itself

def test_without_triton_the_pytorch_versions_work():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.rl.losses import PolicyLoss
ones, hidden = torch.ones(2), torch.ones(2, 3, requires_grad=True)
linear_policy_loss(hidden, torch.eye(3), torch.tensor([0, 1]), ones, ones, loss=PolicyLoss(), vocab_size=3, softcap=None)[0].backward()
print(hidden.grad.shape)
"""  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "torch.Size([2, 3])\n", done.stderr


def compile_kernels() -> None:
    """Compiles every variant for a Hopper GPU; needs none."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    fp32 = dict.fromkeys(["logprobs", "entropies", "losses", "advantages", "weights", "old_logprobs", "ref_logprobs"],
                         "*fp32")
    types = fp32 | {"targets": "*i64", "stride": "i32", "vocab_size": "i32"}

    def compiled(kernel, z_type="*bf16", **constants):
        signature = {name: "constexpr" if name in constants
                     else types.get(name, z_type if name == "z_pointer" else "fp32") for name in kernel.arg_names}
        at = kernel.arg_names.index
        aligned = {(at(name),): [["tt.divisibility", 16]] for name in signature if name in ("z_pointer", "stride")}
        source = ASTSource(kernel, signature, {(at(name),): value for name, value in constants.items()}, aligned)
        return compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=8)).asm["ptx"]

    for z_type, has_softcap in (("*bf16", True), ("*bf16", False), ("*fp32", True)):
        head = dict(HAS_SOFTCAP=has_softcap, BLOCK=2048)
        assert "ld.global.v4.b32" in compiled(logprob_rows, z_type, **head)
        for flags in (dict(LOSS="ppo_clip", KL="k3", HAS_OLD=True), dict(LOSS="reinforce", KL="", HAS_OLD=False)):
            ptx = compiled(policy_rows, z_type, LIMIT=20.0, HAS_DUAL_CLIP=has_softcap, WITH_GRADIENT=True, **head,
                           **flags)
            assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx  # 16 bytes a thread
    print("compiled")


def test_the_kernels_compile_for_hopper_without_one(tmp_path):
    """Rows are read and written 16 bytes a thread."""
    env = ({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
           | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ROOT})
    done = subprocess.run([sys.executable, "-c", "import test_kernels_gpu; test_kernels_gpu.compile_kernels()"],
                          cwd=os.path.dirname(__file__), env=env, capture_output=True, text=True)
    assert done.stdout == "compiled\n", done.stderr[-2000:]


# On a GPU

def gpu_case(N: int, V: int = 50304, width: int = 256) -> dict:
    """bf16 inputs of a size that takes several chunks of 512 rows."""
    draw = torch.Generator("cuda").manual_seed(N)
    hidden = torch.randn(N, width, generator=draw, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(V, width, generator=draw, device="cuda", dtype=torch.bfloat16) / 8
    targets = torch.randint(V, (N,), generator=draw, device="cuda")
    old, ref = (full_logprobs(hidden.float(), weight.float(), targets, V, 15.0, 1.0)[0]
                + 0.3 * torch.randn(2, N, generator=draw, device="cuda"))
    return dict(hidden=hidden, weight=weight, targets=targets, advantages=torch.randn(N, generator=draw, device="cuda"),
                weights=torch.full((N,), 1 / N, device="cuda"), old_logprobs=old, ref_logprobs=ref)


GPU_HEAD, GPU_LOSS = dict(vocab_size=50304, softcap=15.0, temperature=1.0), PolicyLoss(kl_coef=0.1, entropy_coef=0.01)


@gpu
def test_bf16_is_as_exact_as_the_naive_computation():
    inputs = gpu_case(1500)
    exact = run(plain, in_fp64(inputs), loss=GPU_LOSS, **GPU_HEAD)
    naive = run(plain, inputs, loss=GPU_LOSS, **GPU_HEAD)
    fused = run(linear_policy_loss, inputs, loss=GPU_LOSS, rows_per_chunk=512, **GPU_HEAD)
    for f, n, e in zip(fused, naive, exact, strict=True):
        assert (f.double() - e).norm() <= 2 * (n.double() - e).norm() + 1e-5 * e.norm()
    scores = linear_logprob(*(inputs[name] for name in ("hidden", "weight", "targets")), **GPU_HEAD)
    assert_close(scores, fused[3:], rtol=1e-5, atol=1e-5)


@gpu
def test_nothing_waits_for_the_gpu():
    inputs = gpu_case(1500)
    sources = [(0.5, sparse_case(seed, 64, K, 50, "cuda")) for seed, K in ((0, 3), (1, 1))]
    group_id, mask = torch.arange(64, device="cuda") // 8, torch.ones(64, 50, dtype=torch.bool, device="cuda")

    def work():
        for loss in (GPU_LOSS, entropy_and_square):
            run(linear_policy_loss, inputs, loss=loss, rows_per_chunk=512, **GPU_HEAD)
        linear_logprob(*(inputs[name] for name in ("hidden", "weight", "targets")), **GPU_HEAD)
        for preset in PRESETS.values():
            whiten(blend(sources, group_id, 50, preset), mask)
    work()  # compiling may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        work()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
def test_other_lengths_compile_nothing_new():
    def num_compiled() -> int:
        return sum(len(caches[0]) for kernel in (logprob_rows, policy_rows) for caches in kernel.device_caches.values())

    def work(N):
        inputs = gpu_case(N)
        run(linear_policy_loss, inputs, loss=GPU_LOSS, **GPU_HEAD)
        linear_logprob(*(inputs[name] for name in ("hidden", "weight", "targets")), **GPU_HEAD)
    work(64)
    before = num_compiled()
    for N in (1, 17, 100, 1023):
        work(N)
    assert num_compiled() == before


@gpu
def test_memory_is_one_chunk_and_the_gradients():
    """4096 rows of 50304 bf16 logits are 412 MB, a chunk of 512 is 52 MB."""
    inputs = gpu_case(4096)
    run(linear_policy_loss, inputs, loss=GPU_LOSS, rows_per_chunk=512, **GPU_HEAD)  # cuBLAS takes its workspace
    hidden, weight = (inputs[name].requires_grad_() for name in ("hidden", "weight"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_policy_loss(**inputs, loss=GPU_LOSS, rows_per_chunk=512, **GPU_HEAD)[0].backward()
    chunk, gradients = (512 * 50304 * 2,
                        2 * hidden.nbytes + weight.nbytes + weight.numel() * 4)  # the sum over chunks is in fp32
    assert torch.cuda.max_memory_allocated() - before < chunk + gradients + 2 ** 20
