"""
The Triton kernels of attention against its definition. Without a GPU they run in Triton's interpreter.

    python -m pytest tests/test_attention_kernels.py -q
"""
import math

import pytest
import torch

from nanochat.kernels.decode_attention import LEAST_KEYS, decode_attention, decode_attention_plain, num_splits

# the interpreter's numpy, of -inf that is meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter of 3.6 breaks with numpy 2.4
pytest.importorskip("triton", minversion="3.5" if DEVICE == "cuda" else "3.7")
FULL = 10 ** 6  # a window that reaches everything here


def normal(draw, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=draw).to(DEVICE, dtype)


# Decoding

def decode_case(Hkv=2, group=2, D=32, capacity=70, Tp=70, dtype=torch.float32) -> dict:
    """Four rows behind three prompts: a full one, an idle one, one of a single token behind no prompt, one in between.
    What lies behind the filled columns is not a number."""
    draw = torch.Generator().manual_seed(D + group + capacity + Tp)
    case = dict(q=normal(draw, 4, Hkv, group, D, dtype=dtype),
                k=normal(draw, 4, Hkv, capacity, D, dtype=dtype), v=normal(draw, 4, Hkv, capacity, D, dtype=dtype),
                lengths=torch.tensor([capacity, 0, 1, max(1, capacity // 2)], device=DEVICE),
                prefix_k=normal(draw, 3, Hkv, Tp, D, dtype=dtype), prefix_v=normal(draw, 3, Hkv, Tp, D, dtype=dtype),
                prefix_lengths=torch.tensor([Tp, Tp // 3, 0], device=DEVICE),
                slots=torch.tensor([0, 0, 2, 1], device=DEVICE), places=torch.tensor([2, 0, 3, 1], device=DEVICE))
    for names, filled in ((("k", "v"), "lengths"), (("prefix_k", "prefix_v"), "prefix_lengths")):
        for name in names:
            for row, length in zip(case[name], case[filled].tolist(), strict=True):
                row[:, length:] = math.nan
    return case


def numbers(case: dict) -> dict:
    """The case with numbers in the columns that are not filled."""
    return {name: x.nan_to_num(7.0) if x.is_floating_point() else x for name, x in case.items()}


def decode_by_loop(q, k, v, places, lengths, prefix_k, prefix_v, prefix_lengths, slots, window):
    """By the definition, one row at a time, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for b, place in enumerate(places.tolist()):
        length, slot = int(lengths[place]), int(slots[place])
        if length:
            keys, values = (torch.cat([prefix[slot, :, : prefix_lengths[slot]], own[place, :, :length]], 1).double()
                            for prefix, own in ((prefix_k, k), (prefix_v, v)))
            seen = slice(max(0, keys.shape[1] - 1 - window), None)
            scores = q[b].double() @ keys[:, seen].mT / math.sqrt(q.shape[-1])  # (Hkv, group, keys)
            out[b] = scores.softmax(dim=-1) @ values[:, seen]
    return out


@pytest.mark.parametrize("window", [FULL, 100, 20, 0])
@pytest.mark.parametrize("sizes", [dict(), dict(group=1, D=64), dict(group=6, D=128, Hkv=1), dict(group=17, D=24),
                                   dict(Tp=0), dict(Tp=5), dict(capacity=1), dict(capacity=130, Tp=200)], ids=str)
def test_decoding_equals_the_definition(sizes, window):
    case = decode_case(**sizes)
    expected = decode_by_loop(**case, window=window)
    for splits in (1, 3):
        out = decode_attention(**case, window=window, splits=splits)
        assert (out.cpu() - expected).abs().max() < 2e-6 and out[3].eq(0).all() and out.dtype == torch.float32
    assert (decode_attention_plain(**numbers(case), window=window).cpu() - expected).abs().max() < 2e-6


def test_half_precision_rounds_probabilities_and_the_result():
    # Weights of a mean are off by half a unit in the last place, 2^-11, each, and so is the result.
    case = decode_case(dtype=torch.float16, D=64, group=6)
    expected = decode_by_loop(**case, window=FULL)
    for out in (decode_attention(**case, window=FULL), decode_attention_plain(**numbers(case), window=FULL)):
        assert out.dtype == torch.float16 and 1e-6 < (out.cpu() - expected).abs().max() < 2 ** -10


def test_heads_may_lie_in_any_order_in_memory():
    case = decode_case()
    expected = decode_attention(**case, window=50)
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for name, x in case.items()}
    assert turned["k"].stride() != case["k"].stride()
    assert torch.equal(decode_attention(**turned, window=50), expected)


def test_idle_rows_may_name_any_slot():
    case = decode_case()
    expected = decode_attention(**case, window=FULL)
    case["slots"][1] = 2 ** 40
    assert torch.equal(decode_attention(**case, window=FULL), expected)


def test_splits_fill_the_gpu_and_no_more():
    assert num_splits(1024, 10 ** 5, 132) == 1 and num_splits(1, 2 * LEAST_KEYS - 1, 132) == 1
    assert num_splits(32, 10 ** 5, 132) == 16 and num_splits(32, 8 * LEAST_KEYS, 132) == 8
