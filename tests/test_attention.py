"""The attention call against a loop, against repeated keys and against scaled_dot_product_attention; masks; the
cache."""
import math

import pytest
import torch

from nanochat import attention
from nanochat.attention import PADDING_POSITION, KVCache, Mask, _attend_sdpa, attend, make_mask

GQA = [(4, 1), (2, 2), (1, 6)]  # key/value heads, query heads of each
LENGTHS = (7, 4)                # tokens of the prompts of `prefix_case`
FULL = 10 ** 6                  # a context that no window here reaches


@pytest.fixture(params=[64, 2], ids=["one block", "blocks of 2"])
def blocks(request, monkeypatch):
    """All queries in one block, or in several, the last one smaller."""
    monkeypatch.setattr(attention, "QUERIES", request.param)


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_qkv(U, Hkv, R, group, T, D=8, seed=0):
    q, k, v = (random(U, Hkv, R, group, T, D, seed=seed),
               random(U, Hkv, R, T, D, seed=seed + 1),
               random(U, Hkv, R, T, D, seed=seed + 2))
    return [x.requires_grad_() for x in (q, k, v)]


def plain_mask(T, window, cache=None):
    """The mask of rows without a prefix, over the columns of `cache` and T new ones."""
    return make_mask(T, window, FULL, cache, None, torch.zeros(1, T, dtype=torch.long), torch.float64)


def prompts(R=3, T=5):
    """A cache with the positions of prompts of LENGTHS, padded; the positions (U*R, T) of the tokens after them."""
    prefix = KVCache(1)
    prefix.positions = torch.full((len(LENGTHS), max(LENGTHS)), PADDING_POSITION)
    for row, length in enumerate(LENGTHS):
        prefix.positions[row, :length] = torch.arange(length)
    return prefix, torch.tensor(LENGTHS).repeat_interleave(R)[:, None] + torch.arange(T)


def prefix_case(Hkv, group, window, T=5, context=FULL):
    """2 prompts of 7 and 4 tokens (padded to 7) with 3 rows of T tokens each -> q, k, v, prefix k, prefix v; their
    mask."""
    inputs = [*random_qkv(2, Hkv, 3, group, T), random(2, Hkv, 7, 8, seed=3).requires_grad_(),
              random(2, Hkv, 7, 8, seed=4).requires_grad_()]
    prefix, positions = prompts(T=T)
    return inputs, make_mask(T, window, context, None, prefix, positions, torch.float64)


def looped(q, k, v, window, prefix_k=None, prefix_v=None):
    """Attention by its definition, one query head and one query at a time; the last own key stands at the last query's
    position."""
    U, Hkv, R, group, T, D = q.shape
    out = torch.zeros_like(q)
    for u, h, r, g, t in torch.cartesian_prod(*map(torch.arange, (U, Hkv, R, group, T))).tolist():
        before = 0 if prefix_k is None else LENGTHS[u]
        keys, values = ([*(shared[u, h, :before] if before else []), *own[u, h, r]]
                        for shared, own in ((prefix_k, k), (prefix_v, v)))
        last = len(keys) - T + t  # the query's position
        seen = range(max(0, last - window), last + 1)
        weights = [math.exp(float(q[u, h, r, g, t] @ keys[s]) / math.sqrt(D)) for s in seen]
        out[u, h, r, g, t] = sum(w * values[s] for w, s in zip(weights, seen, strict=True)) / sum(weights)
    return out


def repeated(q, k, v, window, prefix_k, prefix_v):
    """The same rows, unit by unit, each with its own copy of its prompt's keys and no padding."""
    R, T, out = q.shape[2], q.shape[4], []
    for u, length in enumerate(LENGTHS):
        all_k, all_v = (torch.cat([shared[u: u + 1, :, None, :length].expand(-1, -1, R, -1, -1), own[u: u + 1]], dim=3)
                        for shared, own in ((prefix_k, k), (prefix_v, v)))
        cache = KVCache(1)
        cache.length = length
        out.append(attend(q[u: u + 1], all_k, all_v, plain_mask(T, window, cache)))
    return torch.cat(out)


def assert_gradients_agree(a, b, inputs, tolerance):
    out_grad = random(*a.shape, seed=9)
    for x, y in zip(torch.autograd.grad(a, inputs, out_grad), torch.autograd.grad(b, inputs, out_grad), strict=True):
        assert (x - y).abs().max() < tolerance and x.abs().max() > 1e-3


@pytest.mark.parametrize("Hkv, group", GQA)
@torch.no_grad()
def test_attend_equals_the_definition(blocks, Hkv, group):
    q, k, v = random_qkv(2, Hkv, 2, group, 6)
    for window in (10, 2, 0):
        assert (attend(q, k, v, plain_mask(6, window)) - looped(q, k, v, window)).abs().max() < 1e-12


@pytest.mark.parametrize("Hkv, group", GQA)
@pytest.mark.parametrize("window, context", [(100, 100), (100, FULL), (4, FULL), (0, FULL)])
@torch.no_grad()
def test_attend_after_a_prefix_equals_the_definition(blocks, Hkv, group, window, context):
    (q, k, v, *prefix), mask = prefix_case(Hkv, group, window, context=context)
    assert (attend(q, k, v, mask, *prefix) - looped(q, k, v, window, *prefix)).abs().max() < 1e-12


@pytest.mark.parametrize("Hkv, group", GQA)
@pytest.mark.parametrize("window", [100, 4])
def test_a_shared_prefix_equals_repeated_keys(blocks, Hkv, group, window):
    (q, k, v, *prefix), mask = prefix_case(Hkv, group, window)
    ours, theirs = attend(q, k, v, mask, *prefix), repeated(q, k, v, window, *prefix)
    assert (ours - theirs).abs().max() < 1e-12
    assert_gradients_agree(ours, theirs, (q, k, v, *prefix), 1e-12)


@pytest.mark.parametrize("T", [1, 5])
def test_queries_and_keys_may_lie_in_any_order_in_memory(blocks, T):
    (q, k, v, *prefix), mask = prefix_case(2, 2, 4, T=T)
    turned = [x.detach().transpose(0, 2).contiguous().transpose(0, 2).requires_grad_() for x in (q, k, v, *prefix)]
    expected, out = attend(q, k, v, mask, *prefix), attend(*turned[:3], mask, *turned[3:])
    grad = random(*out.shape[::-1], seed=9).permute(5, 4, 3, 2, 1, 0)
    assert (out - expected).abs().max() < 1e-12
    for a, b in zip(torch.autograd.grad(out, turned, grad), torch.autograd.grad(expected, (q, k, v, *prefix), grad),
                    strict=True):
        assert (a - b).abs().max() < 1e-12
    with torch.no_grad():
        assert (attend(*turned[:3], mask, *turned[3:]) - expected).abs().max() < 1e-12


def test_inputs_without_gradient_change_no_other():
    (q, k, v, *prefix), mask = prefix_case(2, 2, 4)
    inputs = (q, k, v, *prefix)
    every = torch.autograd.grad(attend(q, k, v, mask, *prefix).square().sum(), inputs)
    for i in range(5):
        a, b, c, *rest = (x if i == j else x.detach() for j, x in enumerate(inputs))
        assert (torch.autograd.grad(attend(a, b, c, mask, *rest).square().sum(),
                                    inputs[i])[0] - every[i]).abs().max() < 1e-12


@pytest.mark.parametrize("Hkv, group", GQA)
@pytest.mark.parametrize("window, context", [(100, 100), (100, FULL), (4, FULL)])
def test_the_gpu_branch_computes_the_same(blocks, Hkv, group, window, context):
    # What attend calls on CUDA, called here by hand: forward and gradients.
    (q, k, v, *prefix), mask = prefix_case(Hkv, group, window, context=context)
    ours, theirs = attend(q, k, v, mask, *prefix), _attend_sdpa(q, k, v, mask, *prefix)
    assert (ours - theirs).abs().max() < 1e-12
    assert_gradients_agree(ours, theirs, (q, k, v, *prefix), 1e-11)


@pytest.mark.parametrize("Hkv, group", GQA)
@pytest.mark.parametrize("window, length", [(100, 0), (2, 0), (100, 3), (2, 3)])
def test_the_gpu_branch_computes_the_same_without_a_prefix(blocks, Hkv, group, window, length):
    # `length` columns are in the cache already; a query sees no column after it.
    q, k, v = random_qkv(2, Hkv, 3, group, 5 + length)
    q, cache = q[..., length:, :].detach().requires_grad_(), KVCache(1)
    cache.length = length
    mask = plain_mask(5, window, cache)
    assert mask.causal == (window == 100 and length == 0)  # by is_causal, or by numbers added to scores
    ours, theirs = attend(q, k, v, mask), _attend_sdpa(q, k, v, mask, None, None)
    assert (ours - theirs).abs().max() < 1e-12
    assert_gradients_agree(ours, theirs, (q, k, v), 1e-11)


@torch.no_grad()
def test_the_gpu_branch_takes_one_query_that_sees_everything():
    (q, k, v, *prefix), mask = prefix_case(2, 2, 100, T=1)
    assert mask.own is None
    assert (_attend_sdpa(q, k, v, mask, *prefix) - looped(q, k, v, 100, *prefix)).abs().max() < 1e-12
    assert (_attend_sdpa(q, k, v, Mask(), None, None) - v.unsqueeze(3)).abs().max() < 1e-12


@pytest.mark.parametrize("Hkv, group", GQA)
@pytest.mark.parametrize("own", [1, 5, 35])
@pytest.mark.parametrize("window", [100, 4])
@pytest.mark.parametrize("after", [True, False])
def test_one_query_after_the_columns_of_a_cache_equals_the_definition(Hkv, group, own, window, after):
    (q, _, _, *shared), _ = prefix_case(Hkv, group, window, T=1)
    _, k, v = random_qkv(2, Hkv, 3, group, own, seed=5)
    prefix, positions = prompts(T=1)
    cache = KVCache(1)
    cache.length = own - 1
    mask = make_mask(1, window, FULL, cache, prefix if after else None, positions + cache.length, torch.float64)
    shared = shared if after else []
    before = [x.clone() for x in (q, k, v, *shared)]
    out = attend(q, k, v, mask, *shared).detach()
    with torch.no_grad():
        assert torch.equal(attend(q, k, v, mask, *shared), out)
        assert (out - looped(q, k, v, window, *shared)).abs().max() < 1e-12
    assert all(map(torch.equal, (q, k, v, *shared), before))  # nothing was written into them


@pytest.mark.parametrize("window", [100, 2])
def test_gradients_equal_differences(blocks, window):
    prefix, positions = prompts(R=2, T=3)
    mask = make_mask(3, window, FULL, None, prefix, positions, torch.float64)
    inputs = [x.requires_grad_()
              for x in (random(2, 1, 2, 2, 3, 4), random(2, 1, 2, 3, 4, seed=1), random(2, 1, 2, 3, 4, seed=2),
                        random(2, 1, 7, 4, seed=3), random(2, 1, 7, 4, seed=4))]
    assert torch.autograd.gradcheck(lambda q, k, v, *shared: attend(q, k, v, mask, *shared), inputs)
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mask), inputs[:3])
    # The keys of a prefix that is not trained
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, mask, *(x.detach() for x in inputs[3:])),
                                    inputs[:3])


def test_single_precision_is_exact_to_rounding(blocks):
    inputs, mask = prefix_case(2, 2, 4)
    mask32 = Mask(mask.own.float(), mask.prefix.float())
    inputs32 = [x.detach().float().requires_grad_() for x in inputs]
    outs = [attend(q, k, v, m, *shared) for (q, k, v, *shared), m in ((inputs, mask), (inputs32, mask32))]
    assert outs[1].dtype == torch.float32 and (outs[0] - outs[1]).abs().max() < 2e-6
    grads = [torch.autograd.grad(out.square().sum(), x) for out, x in zip(outs, (inputs, inputs32), strict=True)]
    assert all((a - b).abs().max() < 2e-5 for a, b in zip(*grads, strict=True))


def allowed(bias):
    assert ((bias == 0) | (bias == float("-inf"))).all()
    return (bias == 0).int().tolist()


def test_a_query_sees_itself_and_the_window_before_it():
    mask = plain_mask(5, window=2)
    assert allowed(mask.own) == [[1, 0, 0, 0, 0],
                                 [1, 1, 0, 0, 0],
                                 [1, 1, 1, 0, 0],
                                 [0, 1, 1, 1, 0],
                                 [0, 0, 1, 1, 1]]
    assert mask.own.dtype == torch.float64 and not mask.causal and mask.prefix is None
    assert not plain_mask(5, window=3).causal and plain_mask(5, window=4).causal
    assert torch.equal(plain_mask(5, window=4).own, plain_mask(5, window=FULL).own)


def test_new_columns_stand_after_those_of_the_cache():
    cache = KVCache(1)
    cache.length = 3
    mask = plain_mask(2, 2, cache)
    assert allowed(mask.own) == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]] and not mask.causal
    assert not plain_mask(2, 100, cache).causal
    assert plain_mask(1, 3, cache).own is None  # four columns, all seen
    assert allowed(plain_mask(1, 2, cache).own) == [[0, 1, 1, 1]]


def test_no_token_sees_padding_and_padding_sees_something():
    prefix, positions = prompts(R=1, T=3)
    positions[1, 2] = PADDING_POSITION
    for window, context in ((100, 100), (100, FULL), (4, FULL)):
        mask = make_mask(3, window, context, None, prefix, positions, torch.float32)
        real = mask.prefix.expand(2, 3, 7)[1, :2]
        assert real[:, 4:].eq(float("-inf")).all() and real[0, :4].eq(0).all()
        assert mask.prefix.expand(2, 3, 7)[0, 0, 3:].eq(0).all() and mask.prefix.dtype == torch.float32
        assert mask.own.diagonal().eq(0).all()  # so that every softmax is finite


def test_windows_are_measured_in_positions_not_columns():
    # Prompts of 2 and 4 tokens, padded to 4 columns; own tokens at 2, 3 and at 4, 5; window 2.
    prefix = KVCache(1)
    prefix.positions = torch.tensor([[0, 1, PADDING_POSITION, PADDING_POSITION], [0, 1, 2, 3]])
    mask = make_mask(2, 2, FULL, None, prefix, torch.tensor([[2, 3], [2, 3], [4, 5], [4, 5]]), torch.float32)
    assert allowed(mask.prefix) == [[[1, 1, 0, 0], [0, 1, 0, 0]], [[0, 0, 1, 1], [0, 0, 0, 1]]]
    assert allowed(mask.own) == [[1, 0], [1, 1]]


def columns(T, U=2, Hkv=2, R=3, D=4, seed=0):
    return random(U, Hkv, R, T, D, seed=seed), random(U, Hkv, R, T, D, seed=seed + 100)


@pytest.mark.parametrize("sizes", [[1] * 37, [3] + [1] * 48, [2, 3, 1, 1, 4, 1, 1, 1, 2], [1, 5] + [1] * 16 + [2, 1]])
def test_a_cache_returns_all_columns_so_far(sizes):
    cache, total = KVCache(3), sum(sizes)
    layers, end = {1: columns(total), 2: columns(total, R=1, seed=7)}, 0
    for size in sizes:
        start, end = end, end + size
        for layer, (k, v) in layers.items():
            returned = cache.append(layer, k[..., start:end, :], v[..., start:end, :])
            assert all(map(torch.equal, returned, (k[..., :end, :], v[..., :end, :])))
            assert returned[0] is cache.k[layer] and returned[1] is cache.v[layer]
    assert cache.k[0] is None and cache.v[0] is None


def test_a_prefix_cache_keeps_gradients():
    cache, k = KVCache(1), random(1, 1, 1, 2, 4).requires_grad_()
    cache.append(0, 2 * k, 3 * k)
    assert torch.autograd.grad(cache.k[0].sum() + cache.v[0].sum(), k)[0].unique().tolist() == [5.0]
