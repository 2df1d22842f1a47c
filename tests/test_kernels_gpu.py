"""The kernels as GPU code: compiled for one anywhere; run on one, in bf16, where there is one."""
import glob
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import without_waiting
from test_advantages import sparse_case
from test_draw import distance_to_bounds, plain as plain_pick
from test_kernels import assert_close, entropy_and_square, full_logprobs, in_fp64, plain, run

from nanochat.engine import pick, pick_after, row_key, uniform_noise
from nanochat.kernels.draw import draw
from nanochat.kernels.linear_logprob import linear_logprob, logprob_rows
from nanochat.kernels.linear_policy_loss import linear_policy_loss, policy_rows
from nanochat.kernels.losses import PolicyLoss
from nanochat.rl.credit.advantages import PRESETS, blend, whiten

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
gpu = pytest.mark.gpu


def test_without_triton_the_pytorch_versions_work():
    code = """
import sys
sys.modules["triton"] = None  # importing it raises ImportError
import torch
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.kernels.losses import PolicyLoss
ones, hidden = torch.ones(2), torch.ones(2, 3, requires_grad=True)
linear_policy_loss(hidden, torch.eye(3), torch.tensor([0, 1]), ones, ones, loss=PolicyLoss(), vocab_size=3, softcap=None)[0].backward()
print(hidden.grad.shape)
"""  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "torch.Size([2, 3])\n", done.stderr


def without_interpreter(code: str, cache) -> str:
    """What a Python program prints that compiles kernels; it needs no GPU."""
    env = ({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
           | {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": ROOT})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_blackwell_and_spills_nothing(tmp_path):
    """Of each kernel the first variant for Hopper, the last for Blackwell. What threads read and write of long rows is
    16 bytes each. A block's operations round as PyTorch's do: no bf16 is multiplied and added in one instruction."""
    rows = [json.loads(line) for line in without_interpreter("""
import json
from dev.bench import kernel_resources
variants = {}
for case in kernel_resources.cases():
    variants.setdefault(case[0].__name__, []).append(case)
for capability, place in ((90, 0), (100, -1)):
    for row in kernel_resources.rows([capability], lambda: [cases[place] for cases in variants.values()]):
        print(json.dumps(row))
""", tmp_path).splitlines()]
    launched = {name for path in glob.glob(os.path.join(ROOT, "nanochat", "kernels", "*.py"))  # kernel[grid](...)
                for name in re.findall(r"(\w+)\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(", Path(path).read_text())}
    launched = {name for name in launched - {"dict", "list", "set", "tuple"} if not name.isupper()}  # no tables
    for capability in (90, 100):
        assert {row["kernel"] for row in rows if row["sm"] == capability} == launched
    for row in rows:
        assert row["spilled"] == 0 and row["registers"] * row["warps"] * 32 <= 65536, row
        assert row["shared"] <= 227 * 1024 and not row["fused_bf16"], row
    small = {"gate_rows", "head_rows", "join_splits", "advance_rows", "record_rows"}
    assert {row["kernel"] for row in rows if not row["wide_loads"]} <= small
    assert ({row["kernel"] for row in rows if not row["wide_stores"]}
            <= small | {"logprob_rows", "segment_statistics", "draw_rows"})


def test_a_decoding_layer_is_a_handful_of_launches():
    """Four products of matrices, two norms, heads, activation; of every other layer of a GPT a gather and a gate.
    Attention is one more."""
    from dev.bench import count_launches
    for name, model in count_launches.MODELS.items():
        counted = count_launches.table(*model)
        plain, fused = counted["layer without attention"]
        assert fused == (9 if name == "GPT d20" else 8) and plain > 28 and counted["attention"][1] == 1, name
        assert counted["around trunk and draw"][1] == 4 and counted["all else of the trunk"][1] <= 14, name
        plain, fused = counted["head and draw"]
        assert fused == 3 and plain > 30, name


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
            whiten(blend(sources, group_id, mask, preset), mask)
    without_waiting(work)


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


def drawing_case(B: int = 256, V: int = 50304):
    """Raw outputs of a head, keys and a position on the device."""
    generator = torch.Generator("cuda").manual_seed(B)
    z = 3 * torch.randn(B, V, generator=generator, device="cuda", dtype=torch.bfloat16)
    keys = torch.tensor([row_key("gpu", i) for i in range(B)], device="cuda")
    return z, keys, torch.full((1,), 7, device="cuda")


@gpu
@pytest.mark.parametrize("V, softcap", [(50304, 15.0), (151936, None)])
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 50), (0, 0)])
def test_draws_are_those_of_the_pytorch_version(V, softcap, temperature, top_k):
    """The same tokens, but where the noise lies within 1e-6 of the bound between two; logprobs to 1e-5."""
    z, keys, position = drawing_case(V=V)
    logits = z.float() if softcap is None else softcap * torch.tanh(z.float() / softcap)
    options = dict(temperature=temperature, top_k=top_k)
    expected, expected_logprobs = plain_pick(logits, keys, position, **options)
    for tokens, logprobs in (draw(z, keys, position, vocab_size=V, softcap=softcap, **options),
                             pick(logits, keys, position, **options)):
        same = tokens == expected
        assert same.float().mean() > 0.98
        torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=0, atol=1e-5)
        if temperature:
            noise = uniform_noise(keys, position)
            assert (distance_to_bounds(logits, tokens, noise, temperature, top_k) < 1e-6).all()


@gpu
def test_drawing_waits_for_nothing_makes_no_logits_and_replays_in_a_graph():
    """256 rows of 50304 bf16 are 26 MB, in fp32 twice that."""
    z, keys, position = drawing_case()
    work = lambda *cases: [draw(z, keys, position, vocab_size=50304, softcap=15.0, temperature=t, top_k=k)
                           for t, k in cases or ((1.0, 0), (0, 0), (0.7, 20))]
    without_waiting(lambda: (work(), pick(z.float(), keys, 3, 1.0, 0)))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work((1.0, 0))
    assert torch.cuda.max_memory_allocated() - before < 2 ** 18
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    position += 1
    graph.replay()
    for a, b in zip(captured, work(), strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


@gpu
@pytest.mark.parametrize("kind", ["gpt", "qwen2", "qwen3"])
def test_decoding_kernels_give_what_pytorch_gives(kind):
    """Hidden states of a prompt in bf16, and of one more token each: as near to fp32 as PyTorch's are."""
    from nanochat.gpt import GPT, GPTConfig
    from nanochat.hf import decoder
    from nanochat.kernels import ops
    if kind == "gpt":
        make = lambda dtype: GPT(GPTConfig(256, 1000, 4, 6, 3, 384, "SL"), dtype)
    else:
        config = decoder.DecoderConfig(kind, 256, 1000, 4, 6, 2, 384, 64, 512, 1e-6, 1e4, None, kind == "qwen2", False,
                                       False, kind == "qwen3", True)
        make = lambda dtype: decoder.Decoder(config, dtype)
    ids = torch.randint(1000, (5, 40), generator=torch.Generator().manual_seed(0)).cuda()

    def hidden(dtype):
        generator = torch.Generator().manual_seed(1)
        model = make(dtype)
        for p in model.parameters():
            p.data = 0.05 * torch.randn(p.shape, generator=generator)
        model = model.cuda()
        with torch.no_grad():
            return model.trunk(ids).float()
    fused, fused_wide = hidden(torch.bfloat16), hidden(torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        for module in (ops, decoder):
            patch.setattr(module, "takes_block", lambda x: False)
        plain, exact = hidden(torch.bfloat16), hidden(torch.float32)
    assert (fused_wide - exact).norm() <= 1e-3 * exact.norm()
    assert (fused - exact).norm() <= 1.2 * (plain - exact).norm()


@gpu
def test_decoding_kernels_wait_for_nothing():
    from nanochat.gpt import GPT, GPTConfig
    model = GPT(GPTConfig(256, 1000, 4, 6, 3, 384, "L"), torch.bfloat16).cuda()
    ids = torch.zeros(5, 1, dtype=torch.long, device="cuda")
    positions = torch.full((5, 1), 3, device="cuda")

    def work():
        with torch.inference_mode():
            pick_after(model, model.trunk(ids, positions=positions)[:, 0], ids[:, 0], 0, 1.0, 0)
    without_waiting(work)
