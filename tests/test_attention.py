"""
The attention call against a loop, against repeated keys and against scaled_dot_product_attention; the cache.

    python -m pytest tests/test_attention.py -q
"""
import math

import pytest
import torch
import torch.nn.functional as F

from nanochat.attention import FAR, KVCache, attend, attention_bias

GQA = [(4, 4), (4, 2), (6, 1)]  # query heads, key/value heads


def random_qkv(B, H, Hkv, T, D=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(B, heads, T, D, generator=draw, dtype=torch.float64).requires_grad_() for heads in (H, Hkv, Hkv)]


def causal_bias(B, T, window=10 ** 6):
    positions = torch.arange(T).expand(B, T)
    return attention_bias(positions, positions, window, torch.float64)


def prefix_case(H, Hkv, window):
    """2 prompts of 7 and 4 tokens (padded to 7) with 3 rows of 5 tokens each -> q, k, v, prefix k, prefix v, bias over 7 + 5 columns."""
    q, k, v = random_qkv(6, H, Hkv, 5)
    _, prefix_k, prefix_v = random_qkv(2, H, Hkv, 7, seed=1)
    prompt_positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, FAR, FAR, FAR]])
    positions = torch.tensor([7] * 3 + [4] * 3)[:, None] + torch.arange(5)
    keys = torch.cat([prompt_positions.repeat_interleave(3, dim=0), positions], dim=1)
    return q, k, v, prefix_k, prefix_v, attention_bias(positions, keys, window, torch.float64)


def looped(q, k, v, bias):
    """Attention by its definition, one query head and one query at a time."""
    (B, H, T, D), Hkv = q.shape, k.shape[1]
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            g = h // (H // Hkv)
            for t in range(T):
                seen = [s for s in range(k.shape[2]) if bias[b, 0, t, s] == 0]
                weights = [math.exp(float(q[b, h, t] @ k[b, g, s]) / math.sqrt(D)) for s in seen]
                out[b, h, t] = sum(w * v[b, g, s] for w, s in zip(weights, seen, strict=True)) / sum(weights)
    return out


@pytest.mark.parametrize("H, Hkv", GQA)
@torch.no_grad()
def test_attend_equals_the_definition(H, Hkv):
    q, k, v = random_qkv(2, H, Hkv, 6)
    for window in (10, 2, 0):
        bias = causal_bias(2, 6, window)
        assert (attend(q, k, v, bias) - looped(q, k, v, bias)).abs().max() < 1e-12


@pytest.mark.parametrize("H, Hkv", GQA)
@pytest.mark.parametrize("window", [100, 4])
def test_a_shared_prefix_equals_repeated_keys(H, Hkv, window):
    q, k, v, prefix_k, prefix_v, bias = prefix_case(H, Hkv, window)
    shared = attend(q, k, v, bias, prefix_k, prefix_v)
    repeated = attend(q, torch.cat([prefix_k.repeat_interleave(3, dim=0), k], dim=2),
                      torch.cat([prefix_v.repeat_interleave(3, dim=0), v], dim=2), bias)
    assert (shared - repeated).abs().max() < 1e-12
    out_grad = torch.randn(shared.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    inputs = (q, k, v, prefix_k, prefix_v)
    for a, b in zip(torch.autograd.grad(shared, inputs, out_grad), torch.autograd.grad(repeated, inputs, out_grad), strict=True):
        assert (a - b).abs().max() < 1e-12


@torch.no_grad()
def test_each_unit_sees_its_own_prefix():
    q, k, v, prefix_k, prefix_v, bias = prefix_case(4, 2, 100)
    before = attend(q, k, v, bias, prefix_k, prefix_v)
    prefix_v[1] += 1
    gap = (attend(q, k, v, bias, prefix_k, prefix_v) - before).abs().amax(dim=(1, 2, 3))
    assert gap[:3].max() == 0 and gap[3:].min() > 1e-3


@pytest.mark.parametrize("H, Hkv", GQA)
@pytest.mark.parametrize("window", [100, 4])
def test_the_gpu_branch_computes_the_same(H, Hkv, window):
    # What attend calls on CUDA, called here by hand: forward and gradients.
    q, k, v, prefix_k, prefix_v, bias = prefix_case(H, Hkv, window)
    ours = attend(q, k, v, bias, prefix_k, prefix_v)
    all_k = torch.cat([prefix_k.repeat_interleave(3, dim=0), k], dim=2)
    all_v = torch.cat([prefix_v.repeat_interleave(3, dim=0), v], dim=2)
    theirs = F.scaled_dot_product_attention(q, all_k, all_v, attn_mask=bias, enable_gqa=Hkv < H)
    assert (ours - theirs).abs().max() < 1e-12
    grads = [torch.autograd.grad(out.square().sum(), (q, k, v, prefix_k, prefix_v)) for out in (ours, theirs)]
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-11


def test_a_query_sees_itself_and_the_window_before_it():
    bias = causal_bias(1, 5, window=2)[0, 0]
    seen = [[1, 0, 0, 0, 0],
            [1, 1, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [0, 1, 1, 1, 0],
            [0, 0, 1, 1, 1]]
    assert (bias == 0).int().tolist() == seen
    assert ((bias == 0) | (bias == float("-inf"))).all() and bias.dtype == torch.float64


def test_no_token_sees_padding_and_padding_sees_something():
    positions = torch.tensor([[0, 1, 2, FAR, FAR]])
    bias = attention_bias(positions, positions, 256, torch.float32)[0, 0]
    assert (bias[:3] == 0).int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert (bias[3:] == 0).any(dim=1).all()  # its softmax is finite


def test_windows_are_measured_in_positions_not_columns():
    # A prompt of 2 tokens padded to 4 columns; the query at position 3 with window 1 sees positions 2 and 3.
    keys = torch.tensor([[0, 1, FAR, FAR, 2, 3]])
    bias = attention_bias(torch.tensor([[3]]), keys, 1, torch.float32)
    assert (bias == 0).int().tolist() == [[[[0, 0, 0, 0, 1, 1]]]]


def test_a_cache_returns_all_columns_so_far():
    cache, columns = KVCache(2, capacity=5), torch.randn(2, 3, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    k, v = columns
    assert all(torch.equal(a, b) for a, b in zip(cache.append(1, k[:, :, :3], v[:, :, :3]), (k[:, :, :3], v[:, :, :3]), strict=True))
    cache.length = 3
    assert all(torch.equal(a, b) for a, b in zip(cache.append(1, k[:, :, 3:], v[:, :, 3:]), (k, v), strict=True))
    assert cache.append_positions(torch.tensor([[0, 1]])).tolist() == [[0, 1]]
    assert cache.append_positions(torch.tensor([[2]])).tolist() == [[0, 1, 2]]


def test_select_repeats_and_drops_rows():
    cache = KVCache(1, capacity=2)
    k, v = torch.randn(2, 3, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    cache.append(0, k, v)
    cache.append_positions(torch.tensor([[0, 1], [0, FAR], [5, 6]]))
    cache.last_embedding = torch.arange(3.0).view(3, 1, 1)
    cache.select(torch.tensor([2, 0, 2]))
    assert torch.equal(cache.k[0], k[[2, 0, 2]]) and torch.equal(cache.v[0], v[[2, 0, 2]])
    assert cache.key_positions.tolist() == [[5, 6], [0, 1], [5, 6]] and cache.last_embedding.flatten().tolist() == [2, 0, 2]


def test_a_prefix_cache_keeps_gradients():
    cache, k = KVCache(1), torch.randn(1, 1, 2, 4, requires_grad=True)
    cache.append(0, 2 * k, 3 * k)
    assert torch.autograd.grad(cache.k[0].sum() + cache.v[0].sum(), k)[0].unique().tolist() == [5.0]
