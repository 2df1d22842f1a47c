"""The Triton kernels of attention against its definition. Without a GPU they run in Triton's interpreter."""
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from conftest import without_waiting

from nanochat import attention as attention_module
from nanochat.attention import PADDING_POSITION, KVCache, Mask, _Attend, bias, make_mask
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels import attention as kernels, decode_attention as decode_module
from nanochat.kernels.attention import attention, num_parts, register_operator
from nanochat.kernels.decode_attention import LEAST_KEYS, decode_attention, decode_attention_plain, num_splits
from nanochat.rl.learn.packing import MicroBatch
from nanochat.rl.learn.trainer import completion_hidden

# the interpreter's numpy, of -inf that is meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter of 3.6 breaks with numpy 2.4
pytest.importorskip("triton", minversion="3.5" if DEVICE == "cuda" else "3.7")
gpu = pytest.mark.gpu
QUICK = pytest.mark.usefixtures("overflow_unchecked")
FULL = 10 ** 6  # a window that reaches everything here


@pytest.fixture
def overflow_unchecked(monkeypatch):
    """Triton's interpreter checks every sum and product of 32-bit numbers for overflow, in half of its time. Tests
    without this fixture launch every kernel too, and leave it the check."""
    if DEVICE == "cpu":
        from triton.runtime.interpreter import interpreter_builder
        monkeypatch.setattr(interpreter_builder, "options",
                            replace(interpreter_builder.options, sanitize_overflow=False))


def normal(draw, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=draw).to(DEVICE, dtype)


def decode_case(Hkv=2, group=2, D=32, capacity=70, Tp=70, dtype=torch.float32) -> dict:
    """Four rows in four of five places: half full, idle, full, of a single token and after no prompt; three prompts.
    What lies after the filled columns is large."""
    draw = torch.Generator().manual_seed(D + group + capacity + Tp)
    numbers = lambda *values: torch.tensor(values, device=DEVICE)
    case = dict(q=normal(draw, 4, Hkv, group, D, dtype=dtype), places=numbers(3, 1, 0, 2),
                k=normal(draw, 5, Hkv, capacity, D, dtype=dtype), v=normal(draw, 5, Hkv, capacity, D, dtype=dtype),
                lengths=numbers(capacity, 0, 1, max(1, capacity // 2), 1),
                prefix_k=normal(draw, 3, Hkv, Tp, D, dtype=dtype), prefix_v=normal(draw, 3, Hkv, Tp, D, dtype=dtype),
                prefix_lengths=numbers(Tp, Tp // 3, 0), slots=numbers(0, 0, 2, 1, 1))
    for names, filled in ((("k", "v"), "lengths"), (("prefix_k", "prefix_v"), "prefix_lengths")):
        for name in names:
            for row, length in zip(case[name], case[filled].tolist(), strict=True):
                row[:, length:] = 1000.0
    return case


def decode_by_loop(q, places, k, v, lengths, prefix_k, prefix_v, prefix_lengths, slots, window):
    """By the definition, one row at a time, in fp64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, place in enumerate(places.tolist()):
        slot, length = int(slots[place]), int(lengths[place])
        if length:
            keys, values = (torch.cat([prefix[slot, :, : prefix_lengths[slot]], own[place, :, :length]], dim=1).double()
                            for prefix, own in ((prefix_k, k), (prefix_v, v)))
            seen = slice(max(0, keys.shape[1] - 1 - window), None)
            scores = q[row].double() @ keys[:, seen].mT / math.sqrt(q.shape[-1])  # (Hkv, group, keys)
            out[row] = scores.softmax(dim=-1) @ values[:, seen]
    return out


@QUICK
@pytest.mark.parametrize("sizes, window", [
    *((dict(), window) for window in (FULL, 20, 0)), (dict(group=1, D=64), 20), (dict(group=6, D=128, Hkv=1), FULL),
    (dict(group=17, D=24), FULL), (dict(Tp=0), FULL), (dict(Tp=0), 20), (dict(capacity=1, Tp=5), FULL),
    (dict(capacity=1, Tp=5), 0), (dict(capacity=5, Tp=130), FULL), (dict(capacity=5, Tp=130), 20),
    (dict(capacity=130), FULL), (dict(capacity=130), 20)], ids=str)
def test_decoding_equals_the_definition(sizes, window):
    case = decode_case(**sizes)
    expected = decode_by_loop(**case, window=window)
    for splits in (1, 3):
        out = decode_attention(**case, window=window, splits=splits)
        assert (out.cpu() - expected).abs().max() < 2e-6 and out[1].eq(0).all() and out.dtype == torch.float32
    assert (decode_attention_plain(**case, window=window).cpu() - expected).abs().max() < 2e-6


def test_decoding_in_half_precision_is_exact_to_rounding():
    # Weights of a mean are off by half a unit in the last place, 2^-11, each, and so is the result.
    case = decode_case(dtype=torch.float16, D=64, group=6)
    expected, out = decode_by_loop(**case, window=FULL), decode_attention(**case, window=FULL)
    assert out.dtype == torch.float16 and (out.cpu() - expected).abs().max() < 2 ** -10


def test_scores_far_apart_neither_overflow_nor_underflow():
    """Scores of about +-1000 whose largest is in an early block of keys."""
    case = decode_case(capacity=130)
    case["q"] *= 1000
    case["k"][:, :, 3], case["prefix_k"][:, :, 3] = case["q"][0, :, 0] / 1000, case["q"][0, :, 1] / 1000
    expected = decode_by_loop(**case, window=FULL)
    for splits in (1, 3):
        assert (decode_attention(**case, window=FULL, splits=splits).cpu() - expected).abs().max() < 1e-3


def test_what_is_not_filled_is_never_read_and_an_idle_place_may_name_any_slot():
    case = decode_case()
    expected = decode_attention(**case, window=FULL)
    nan = {name: x.masked_fill(x == 1000.0, math.nan) if x.dim() == 4 else x for name, x in case.items()}
    nan["slots"][1] = 2 ** 40
    assert nan["k"].isnan().any() and torch.equal(decode_attention(**nan, window=FULL), expected)


def test_splits_fill_the_gpu_and_no_more():
    assert num_splits(1024, 10 ** 5, 132) == 1 and num_splits(1, 2 * LEAST_KEYS - 1, 132) == 1
    assert num_splits(32, 10 ** 5, 132) == 16 and num_splits(32, 8 * LEAST_KEYS, 132) == 8


def training_case(U=2, Hkv=1, R=2, group=2, T=17, Tk=None, Tp=40, D=32, dtype=torch.float32):
    """Inputs that want gradients, q, k, v, prefix_k, prefix_v, and the lengths of the prefixes, of which the second is
    half as long as it could be and the third of one token. What lies after them is large."""
    draw, Tk = torch.Generator().manual_seed(T + Tp + D), T if Tk is None else Tk
    shapes = [(U, Hkv, R, group, T, D), *[(U, Hkv, R, Tk, D)] * 2, *[(U, Hkv, Tp, D)] * 2 * (Tp > 0)]
    inputs = [normal(draw, *shape, dtype=dtype) for shape in shapes]
    lengths = torch.tensor([Tp, max(1, Tp // 2), 1][:U], device=DEVICE) if Tp else None
    for x in inputs[3:]:
        for u, length in enumerate(lengths.tolist()):
            x[u, :, length:] = 1000.0
    return [x.requires_grad_() for x in inputs], lengths


def explicit(inputs, lengths, window):
    """_Attend in fp64, with masks by their definition: positions count from the first own key."""
    q, k, v, *prefix = (x.detach().double().requires_grad_() for x in inputs)
    keys = torch.arange(k.shape[3], device=DEVICE)
    queries = torch.arange(k.shape[3] - q.shape[4], k.shape[3], device=DEVICE)[:, None]
    seen_by = lambda keys: bias((keys <= queries) & (queries - keys <= window), torch.float64)
    of_prefix = None
    if prefix:
        keys_of_prefix = torch.arange(prefix[0].shape[2], device=DEVICE) - lengths[:, None]
        of_prefix = seen_by(keys_of_prefix.masked_fill(keys_of_prefix >= 0, PADDING_POSITION)[:, None])  # (U, T, Tp)
    y = _Attend.apply(q, k, v, seen_by(keys), *(prefix or (None, None)), of_prefix)
    return y, (q, k, v, *prefix)


def gradients_of(y, inputs, seed=9):
    """Of inputs that have elements, by a gradient of the result that is normal."""
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed))
    return torch.autograd.grad(y, [x for x in inputs if x.numel()], grad.to(y))


def assert_is_explicit(inputs, lengths, window, tolerance=3e-6):
    y = attention(*inputs[:3], *(inputs[3:] or (None, None)), lengths, window)
    expected, exact_inputs = explicit(inputs, lengths, window)
    assert y.dtype == inputs[0].dtype and (y - expected).abs().max() < tolerance
    grads, exact_grads = gradients_of(y, inputs), gradients_of(expected, exact_inputs)
    for grad, exact in zip(grads, exact_grads, strict=True):
        assert grad.dtype == y.dtype and (grad - exact).abs().max() < 2 * tolerance
    return y, grads


@QUICK
@pytest.mark.parametrize("sizes, windows", [
    (dict(T=1, Tp=5), [FULL, 2]), (dict(T=17, Tp=0), [FULL, 4]), (dict(T=65, Tp=64, group=1, U=1, R=1), [70, 33]),
    (dict(T=17, Tp=130, U=3, R=1), [FULL, 120, 9]), (dict(T=17, D=64, group=6, U=1), [FULL]),
    (dict(T=33, D=128, group=1, U=1, R=1), [20]), (dict(T=5, D=24, Hkv=2, R=1), [FULL]),
    (dict(T=5, Tk=40, U=1, R=1), [FULL, 50, 20]),   # own keys before the queries'
    (dict(T=1, Tk=0, R=1), [FULL, 9])],        # a prompt's last token, after its own keys
    ids=str)
def test_training_equals_the_explicit_products(sizes, windows):
    inputs, lengths = training_case(**sizes)
    for window in windows:
        assert_is_explicit(inputs, lengths, window)


def test_training_in_half_precision_is_exact_to_rounding():
    """In blocks of another size than fp32's. What is summed are numbers of about 1 with errors of 2^-11 each."""
    inputs, lengths = training_case(T=150, Tp=140, U=1, D=64, dtype=torch.float16)
    (y, grads), (exact, exact_inputs) = assert_is_explicit(inputs, lengths, 130, 0.02), explicit(inputs, lengths, 130)
    for a, e in zip((y, *grads), (exact, *gradients_of(exact, exact_inputs)), strict=True):
        assert (a - e).norm() / e.norm() < 1e-3


@QUICK
def test_queries_of_a_prefix_are_split_where_programs_are_few(monkeypatch):
    inputs, lengths = training_case(Tp=40, R=3)
    whole = gradients_of(attention(*inputs, lengths, FULL), inputs)
    monkeypatch.setattr(kernels, "num_parts", lambda *sizes: 4)
    parts = gradients_of(attention(*inputs, lengths, FULL), inputs)
    assert all(map(torch.equal, whole[:3], parts[:3]))
    for a, b in zip(whole[3:], parts[3:], strict=True):
        assert not torch.equal(a, b) and (a - b).abs().max() < 1e-5
    assert num_parts(32, 400, 132) == 8 and num_parts(32, 40, 132) == 5 and num_parts(500, 400, 132) == 1


def test_results_lie_as_the_projection_reads_them_and_what_is_kept_is_linear_in_tokens():
    """Heads side by side. Kept are queries, keys, values and the result; the prefix once; one fp32 number of each query
    and head. No scores."""
    inputs, lengths = training_case(U=1, R=3)
    q, k, _, prefix_k, _ = inputs
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        y = attention(*inputs, lengths, FULL)
    assert y.permute(0, 2, 4, 1, 3, 5).is_contiguous()  # (U, R, T, Hkv, group, D)
    assert sum(x.nbytes for x in kept.values()) == (
        2 * q.nbytes + 2 * k.nbytes + 2 * prefix_k.nbytes + 4 * q[..., 0].numel() + lengths.nbytes)


@QUICK
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decoding_rounds_as_training_does(dtype):
    """The same blocks of keys in the same order: bit by bit in the interpreter, where a product of few rows is that of
    many. A GPU has other instructions for few rows: there the last bit may differ."""
    inputs, lengths = training_case(T=70, Tp=130, R=1, D=64, dtype=dtype)
    rows = lambda x: x.transpose(1, 2).flatten(0, 1)  # (U * R, Hkv, ...)
    q, k, v, *prefix = (x.detach() for x in inputs)
    unit = torch.arange(2, device=DEVICE)
    for window in (FULL, 100) if dtype == torch.float32 else (FULL, 20):
        y = rows(attention(q, k, v, *prefix, lengths, window))
        for t in (0, 33, 69):
            one = decode_attention(rows(q)[:, :, :, t], rows(k), rows(v), unit, torch.full_like(unit, t + 1), *prefix,
                                   lengths, unit, window, splits=1)
            gap = (one - y[:, :, :, t]).abs().max()
            assert gap == 0 if DEVICE == "cpu" else gap < 8 * torch.finfo(dtype).eps


def small_model(kind, layers=2):
    """Groups of two query heads; of the GPT, windows that reach into the prompt or not."""
    torch.manual_seed(0)
    if kind == "gpt":
        model = GPT(GPTConfig(256, 100, 2, 4, 2, 64, "L"))
        model.windows = [4, 256]
    else:
        model = Decoder(DecoderConfig("llama", 256, 100, layers, 4, 2, 64, 16, 96, 1e-6, 1e4, None, *[False] * 5))
    for p in model.parameters():
        p.data = torch.randn(p.shape) * (p.shape[1] ** -0.5 if p.dim() == 2 else 0.5)
    return model.to(DEVICE)


def micro_batch(ids) -> MicroBatch:
    """Completions of 6 tokens after two prompts of 7 and 3, two rows each."""
    positions = torch.arange(7).repeat(2, 1).masked_fill(torch.arange(7) >= torch.tensor([[7], [3]]), PADDING_POSITION)
    everything = torch.arange(24, device=DEVICE)
    return MicroBatch(ids(2, 7), positions.to(DEVICE), ids(4, 6), None, everything, *[None] * 4)


def drawn_ids(*shape, draw):
    return torch.randint(100, shape, generator=draw).to(DEVICE)


def hidden_states_and_gradients(model):
    """Of completions after two prompts, and of two pieces of text after a prompt, the second of which sees the first
    in a cache."""
    ids = partial(drawn_ids, draw=torch.Generator().manual_seed(1))
    parts = [completion_hidden(model, micro_batch(ids))]
    prompt, own = KVCache(2), KVCache(2)
    model.trunk(ids(1, 5), cache=prompt)
    for start, length in ((5, 3), (8, 4)):
        at = torch.arange(start, start + length, device=DEVICE).repeat(2, 1)
        parts.append(model.trunk(ids(2, length), positions=at, cache=own, prefix=prompt))
    y = torch.cat([part.flatten(0, 1) for part in parts])
    return [y.detach(), *model_gradients(model, y)]


def model_gradients(model, y):
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    grads = torch.autograd.grad((weights * y).sum(), list(model.parameters()), allow_unused=True)
    return [grad for grad in grads if grad is not None]


@QUICK
@pytest.mark.parametrize("kind", ["gpt", "decoder"])
def test_models_compute_the_same_by_the_kernels_and_make_no_masks(kind, monkeypatch):
    model = small_model(kind)
    monkeypatch.setattr(attention_module, "takes_attention", lambda device, dtype: False)
    expected = hidden_states_and_gradients(model)
    calls, masks = [], []
    monkeypatch.setattr(attention_module, "takes_attention", lambda device, dtype: True)
    monkeypatch.setattr(attention_module, "attention", lambda *inputs: calls.append(1) or attention(*inputs))
    monkeypatch.setattr(attention_module, "bias", lambda *inputs: masks.append(1) or bias(*inputs))
    actual = hidden_states_and_gradients(model)
    # Two layers of three passes after prompts; the last layer of prompts; of the GPT a window within prompts.
    assert not masks and len(calls) == (8 if kind == "gpt" else 7)
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= 5e-5 * e.abs().max() + 5e-5


def test_without_prefix_and_window_no_kernel_of_ours_is_asked(monkeypatch):
    monkeypatch.setattr(attention_module, "takes_attention", lambda device, dtype: True)
    monkeypatch.setattr(attention_module, "attention", None)
    model = small_model("gpt")
    model.windows = [256, 256]
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    expected = model.trunk(ids)
    monkeypatch.setattr(attention_module, "takes_attention", lambda device, dtype: False)
    assert (model.trunk(ids) - expected).abs().max() < 1e-5
    mask = make_mask(6, 256, 256, None, None, torch.zeros(2, 6, dtype=torch.long), torch.float32)
    assert mask.causal and isinstance(mask, Mask)


@QUICK
def test_compiled_training_takes_the_kernel_as_it_is(monkeypatch):
    """A window without a prefix, as in pretraining, in one graph."""
    monkeypatch.setattr(attention_module, "takes_attention",
                        torch.compiler.assume_constant_result(lambda device, dtype: True))
    model = small_model("gpt")
    ids = torch.arange(12, device=DEVICE).view(2, 6)
    register_operator()
    compiled = torch.compile(model.trunk, backend="aot_eager", fullgraph=True, dynamic=False)
    expected, actual = ([y, *model_gradients(model, y)] for y in (model.trunk(ids), compiled(ids)))
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= 1e-5 * e.abs().max() + 5e-5


def plain_and_compiled(model, **options) -> list[list[torch.Tensor]]:
    """Hidden states of completions after prompts, and gradients, before and after each block is compiled by itself;
    more graphs than PyTorch allows, after which it compiles no more, are an error."""
    batch = micro_batch(partial(drawn_ids, draw=torch.Generator().manual_seed(1)))
    found = []
    register_operator()
    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for compiled in (False, True):
            for block in model.blocks if compiled else ():
                block.compile(fullgraph=True, dynamic=False, **options)
            y = completion_hidden(model, batch)
            found.append([y.detach(), *model_gradients(model, y)])
    return found


def test_blocks_of_an_imported_model_are_compiled_once_for_all_layers():
    """After a prefix: one graph, and one for the last layer, which leaves prompts out."""
    torch._dynamo.utils.counters.clear()
    expected, actual = plain_and_compiled(small_model("decoder", layers=3), backend="eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= 1e-5 * e.abs().max() + 5e-5


@QUICK
def test_the_operator_that_is_compiled_gives_the_gradients_of_a_prefix_too():
    register_operator()
    inputs, lengths = training_case(U=2, Hkv=1, R=2, group=2, T=3, Tp=5, D=16)
    out = kernels.OPERATOR[0](*inputs, lengths, FULL)[0].permute(0, 3, 1, 4, 2, 5)
    expected = attention(*inputs, lengths, FULL)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, gradients_of(out, inputs), gradients_of(expected, inputs)))


@gpu
def test_compiled_blocks_on_a_gpu_give_the_same_gradients():
    """In fp32, of more layers than graphs may be."""
    expected, actual = plain_and_compiled(small_model("decoder", layers=10))
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() <= 1e-2 * e.norm()


@gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("window", [FULL, 200])
def test_bf16_is_as_exact_as_sdpa(D, window):
    inputs, lengths = training_case(Hkv=2, R=4, group=6, T=300, Tp=500, D=D, dtype=torch.bfloat16)
    exact, exact_inputs = explicit(inputs, lengths, window)
    exact = [exact, *gradients_of(exact, exact_inputs)]
    prefix = KVCache(1)
    prefix.positions = torch.arange(500, device=DEVICE).repeat(2, 1)
    prefix.positions.masked_fill_(prefix.positions >= lengths[:, None], PADDING_POSITION)
    positions = lengths.repeat_interleave(4)[:, None] + torch.arange(300, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_module, "takes_attention", lambda device, dtype: False)
        mask = make_mask(300, window, FULL, None, prefix, positions, torch.bfloat16)
    results = []
    for y in (attention(*inputs, lengths, window), attention_module.attend(*inputs[:3], mask, *inputs[3:]),
              attention(*inputs, lengths, window)):
        results.append([y, *gradients_of(y, inputs)])
    assert all(map(torch.equal, results[0], results.pop()))  # bit by bit again
    for ours, theirs, e in zip(*results, exact, strict=True):
        assert (ours - e).norm() <= 1.5 * (theirs - e).norm() and (ours - e).norm() < 1e-2 * e.norm()


@gpu
def test_nothing_waits_for_the_gpu_and_a_graph_replays_other_lengths():
    inputs, lengths = training_case(Hkv=2, R=4, group=6, T=300, Tp=500, D=128, dtype=torch.bfloat16)
    case = decode_case(group=6, D=128, capacity=600, Tp=500, dtype=torch.bfloat16)

    def work():
        y = attention(*inputs, lengths, FULL)
        torch.autograd.grad(y, inputs, y)
        return [decode_attention(**case, window=FULL, splits=splits) for splits in (1, 4)]
    without_waiting(work)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        captured = [decode_attention(**case, window=FULL, splits=splits) for splits in (1, 4)]
    case["lengths"].copy_(torch.tensor([1, 7, 600, 130, 0]))
    case["slots"].copy_(torch.tensor([1, 1, 0, 2, 0]))
    graph.replay()
    for out in captured:
        expected = decode_by_loop(**{name: x.cpu() for name, x in case.items()}, window=FULL)
        assert (out.cpu() - expected).abs().max() < 0.02


@gpu
def test_other_sizes_compile_nothing_new():
    every = [kernels.attention_forward, kernels.query_gradients, kernels.key_gradients, decode_module.decode_rows,
             decode_module.join_splits]
    num_compiled = lambda: sum(len(caches[0]) for kernel in every for caches in kernel.device_caches.values())

    def work(U, R, T, Tp, capacity, window):
        inputs, lengths = training_case(U=U, Hkv=2, R=R, group=6, T=T, Tp=Tp, D=64, dtype=torch.bfloat16)
        y = attention(*inputs, lengths, window)
        torch.autograd.grad(y, inputs, y)
        case = decode_case(group=6, D=64, capacity=capacity, Tp=Tp, dtype=torch.bfloat16)
        for splits in (1, 3):
            decode_attention(**case, window=window, splits=splits)
    work(1, 8, 512, 512, 512, FULL)  # the queries of prefix keys are split over programs
    work(3, 1, 16, 16, 16, 8)        # they are not
    before = num_compiled()
    for sizes in ((1, 1, 1, 1, 1, FULL), (2, 3, 17, 130, 99, 5), (3, 2, 300, 77, 1000, 64), (1, 8, 640, 999, 257, 1)):
        work(*sizes)
    assert num_compiled() == before
