"""The kernels of a block's small operations against their PyTorch versions, rounding for rounding. Without a GPU they
run in Triton's interpreter."""
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nanochat.attention import PADDING_POSITION
from nanochat.gpt import GPT, GPTConfig, rotary
from nanochat.hf.decoder import Attention, Decoder, DecoderConfig
from nanochat.kernels import block, ops
from nanochat.kernels.launch import tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter of 3.6 breaks with numpy 2.4
pytest.importorskip("triton", minversion="3.5" if DEVICE == "cuda" else "3.7")
interpreter = pytest.importorskip("triton.runtime.interpreter")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype).to(DEVICE)


@pytest.fixture(autouse=True)
def pytorch_versions(monkeypatch):
    """ops and models run PyTorch, on CPU without kernels and on CUDA as in training."""
    monkeypatch.setattr(ops.cpu, "takes", lambda x: False)
    monkeypatch.setattr("nanochat.kernels.ops.takes_block", lambda x: False)
    monkeypatch.setattr("nanochat.hf.decoder.takes_block", lambda x: False)


@pytest.fixture(autouse=True)
def bf16_to_nearest(monkeypatch):
    """The interpreter cuts fp32 off to bf16, where GPUs round to the nearest, as PyTorch does."""
    convert = interpreter._convert_float

    def rounding(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        nearest = torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.uint16)
        return nearest.numpy().reshape(np.shape(data))
    monkeypatch.setattr(interpreter, "_convert_float", rounding)


def assert_same(actual, expected, roundings: int = 1):
    """fp32: to 2e-6 of the largest. bf16: all but 2% of the numbers are the same bit for bit, and those differ by no
    more than so many roundings: a sum in another order may fall on the other side of a bound between two bf16."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    apart = (actual.float() - expected.float()).abs()
    if actual.dtype == torch.float32:
        assert apart.max() <= 2e-6 * expected.abs().max()
    else:
        assert (apart <= roundings * 2.0 ** -7 * expected.float().abs()).all()
        assert (apart > 0).sum() <= 0.02 * apart.numel()


@DTYPES
@pytest.mark.parametrize("shape", [(3, 2, 64), (5, 1, 100), (2, 768), (1, 1, 1536)], ids=str)
def test_norms_are_pytorchs(shape, dtype):
    """Also of rows of 1e-3 and of 0: without epsilon they would be 1 and no number."""
    x, delta, x0 = (random(*shape, dtype=dtype, seed=seed) for seed in range(3))
    a, b = random(2, dtype=dtype, seed=3).unbind()
    weight = random(shape[-1], dtype=dtype, seed=4)
    assert_same(block.norm(x)[1], ops.norm(x))
    assert_same(block.norm(x, weight=weight, epsilon=1e-2)[1], ops.norm(x, weight, 1e-2))
    for actual, expected in ((block.norm(x, delta), ops.add_norm(x, delta)),
                             (block.norm(x, delta, weight=weight, epsilon=1e-6), ops.add_norm(x, delta, weight, 1e-6)),
                             (block.norm(x, mixed=(x0, a, b)), ops.mix_norm(x, None, x0, a, b)),
                             (block.norm(x, delta, (x0, a, b)), ops.mix_norm(x, delta, x0, a, b))):
        assert_same(actual[0], expected[0])
        assert_same(actual[1], expected[1])
    x = torch.tensor([[1e-3] * 64, [0.0] * 64], dtype=dtype, device=DEVICE)
    assert_same(block.norm(x)[1], F.rms_norm(x, (64,)))


@DTYPES
@pytest.mark.parametrize("size", [1, 1000, 1024, 3000])
def test_elementwise_operations_are_pytorchs(size, dtype):
    x, y = random(2, size, dtype=dtype, scale=4.0), random(2, size, dtype=dtype, seed=1)
    assert torch.equal(block.relu_squared(x), ops.relu_squared(x))
    assert_same(block.swiglu(x, y), ops.swiglu(x, y), roundings=2)
    assert block.relu_squared(torch.tensor([float("nan")], device=DEVICE)).isnan().all()
    joined = torch.cat([x, y], dim=-1)  # parts of wider rows
    assert torch.equal(block.swiglu(*joined.chunk(2, dim=-1)), block.swiglu(x, y))


@DTYPES
def test_the_value_gate_is_pytorchs_and_empty_batches_are_no_launch(dtype):
    x = random(5, 2, 64, dtype=dtype)
    for kv_heads in (1, 6):
        weight = random(kv_heads, 12, dtype=dtype, seed=1)
        assert_same(block.value_gate(x, weight), ops.value_gate(x, weight), roundings=2)
    assert block.norm(x[:0])[1].shape == (0, 2, 64) and block.relu_squared(x[:0]).shape == (0, 2, 64)
    assert block.value_gate(x[:0], weight).shape == (0, 2, 6)


# units, query heads, key heads, head size, tokens a row
SHAPES = [(2, 6, 3, 32, 1), (1, 2, 2, 64, 1), (4, 4, 1, 24, 1), (4, 3, 1, 16, 2)]


@DTYPES
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_heads_are_split_as_by_pytorch(shape, gated, dtype):
    """Four rows, whose positions all differ."""
    U, H, Hkv, D, T = shape
    qkv = random(4, T, (H + 2 * Hkv) * D, dtype=dtype)
    cos_sin = rotary(torch.arange(4 * T, device=DEVICE).view(4, T) * 3, D, dtype)
    gate, embedding = ((random(4, T, Hkv, dtype=dtype, seed=1), random(4, T, Hkv * D, dtype=dtype, seed=2)) if gated
                       else (None, None))
    expected = ops.split_heads(qkv, cos_sin, gate, embedding, 1.2, U, H, Hkv)
    actual = block.split_heads(*qkv.split([H * D, Hkv * D, Hkv * D], dim=-1), *cos_sin, U, Hkv, scale=1.2,
                               norm="after", gate=gate, embedding=embedding)
    for a, e in zip(actual, expected, strict=True):
        assert a.is_contiguous()
        assert_same(a, e, roundings=3)


@DTYPES
def test_keys_and_values_go_into_a_cache_as_they_are(dtype):
    """Of three rows, in places 4, 0 and 2 of 5, to columns 5, 0 and 3; nothing else is touched."""
    Hkv, D = 2, 24
    q, k, v = (random(3, 1, heads * D, dtype=dtype, seed=seed) for seed, heads in enumerate((6, Hkv, Hkv)))
    cos_sin = rotary(torch.tensor([[9], [2], [5]], device=DEVICE), D, dtype)
    places, lengths = (torch.tensor(x, device=DEVICE) for x in ([4, 0, 2], [1, 99, 4, 99, 6]))
    cache = random(2, 5, Hkv, 7, D, dtype=dtype, seed=3)
    expected = cache.clone()
    queries, *made = block.split_heads(q, k, v, *cos_sin, 3, Hkv, norm="after", scale=1.2)
    for kept, new in zip(expected, made, strict=True):
        kept[places, :, lengths[places] - 1] = new[:, :, 0, 0]
    same, *nothing = block.split_heads(q, k, v, *cos_sin, 3, Hkv, norm="after", scale=1.2,
                                       into=(*cache, places, lengths))
    assert torch.equal(same, queries) and torch.equal(cache, expected) and nothing == [None, None]


@DTYPES
@pytest.mark.parametrize("shape, bias, qk_norm", [(SHAPES[0], False, False), (SHAPES[1], True, False),
                                                  (SHAPES[2], False, True), (SHAPES[3], True, True)], ids=str)
def test_heads_of_imported_models_are_split_as_by_pytorch(shape, bias, qk_norm, dtype):
    U, H, Hkv, D, T = shape
    config = DecoderConfig("qwen3", 64, 100, 1, H, Hkv, 48, D, 64, 1e-6, 1e4, None, bias, False, False, qk_norm, True)
    attention = Attention(config).to(DEVICE)
    for seed, p in enumerate(attention.parameters()):
        p.data = random(*p.shape, seed=seed, scale=0.5)
    x = random(4, T, 48, dtype=dtype, seed=20)
    cos_sin = rotary(torch.arange(4 * T, device=DEVICE).view(4, T) * 3, D, dtype)
    with torch.no_grad():
        for a, e in zip(attention.heads_in_one(x, cos_sin, U), attention.heads(x, cos_sin, U), strict=True):
            assert a.is_contiguous()
            assert_same(a, e, roundings=3)


def test_a_decoder_of_these_kernels_is_the_one_of_pytorch(monkeypatch):
    """The end of a layer is added in the next norm, also where some tokens alone are asked for. Without gradients."""
    config = DecoderConfig("qwen2", 64, 100, 2, 2, 1, 32, 16, 48, 1e-6, 1e4, None, True, False, False, False, True)
    model, ids = Decoder(config).to(DEVICE), torch.tensor([[3, 1], [4, 5]], device=DEVICE)
    for seed, p in enumerate(model.parameters()):
        p.data = random(*p.shape, seed=seed, scale=0.3)
    some = torch.tensor([3, 0], device=DEVICE)
    with torch.no_grad():
        expected = model.trunk(ids)
        for module in ("kernels.ops", "hf.decoder"):
            monkeypatch.setattr(f"nanochat.{module}.takes_block", lambda x: True)
        torch.testing.assert_close(model.trunk(ids, kept=some), expected.flatten(0, 1)[some], rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [
    lambda: Decoder(DecoderConfig("qwen2", 64, 100, 2, 2, 1, 32, 16, 48, 1e-6, 1e4, None, True, False, False, False,
                                  True)),
    lambda: GPT(GPTConfig(64, 100, 2, 2, 1, 32, "L"))], ids=["Decoder", "GPT"])
def test_rows_of_unlike_lengths_after_prompts_are_those_of_pytorch(make, monkeypatch):
    """Packed, where logprobs are asked for without gradients."""
    model, prompts, ids = make().to(DEVICE), torch.tensor([[3, 1], [7, 0]]), torch.arange(12).view(4, 3)
    for seed, p in enumerate(model.parameters()):
        p.data = random(*p.shape, seed=seed, scale=0.3)
    lengths, prompt_lengths = torch.tensor([3, 1, 0, 2]), torch.tensor([2, 1])
    prompt_positions = torch.arange(2).expand(2, 2).masked_fill(torch.arange(2) >= prompt_lengths[:, None],
                                                                PADDING_POSITION)
    positions = prompt_lengths.repeat_interleave(2)[:, None] + torch.arange(3)
    given = [x.to(DEVICE) for x in (prompts, prompt_positions, ids, positions)]
    asked = torch.arange(3) < lengths[:, None]
    with torch.no_grad():
        expected = model.trunk_after(*given)
        for module in ("kernels.ops", "hf.decoder"):
            monkeypatch.setattr(f"nanochat.{module}.takes_block", lambda x: True)
        last, rows = model.trunk_after(*given, lengths.to(DEVICE))
    torch.testing.assert_close(last, expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(rows[asked], expected[1][asked], rtol=0, atol=1e-5)
