"""The kernel that draws tokens against engine.pick's PyTorch version, its noise bit for bit. Without a GPU it runs in
Triton's interpreter."""
import pytest
import torch

from nanochat import engine
from nanochat.engine import pick, row_key, uniform_noise
from nanochat.kernels.draw import draw, uniform
from nanochat.kernels.launch import jit, tl

# the interpreter's numpy, of whole numbers that wrap as they should and of NaNs that are meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter of 3.6 breaks with numpy 2.4
pytest.importorskip("triton", minversion="3.5" if DEVICE == "cuda" else "3.7")
INF = float("inf")
# vocabulary, columns of the head's outputs, dtype, softcap
HEADS = {"257": (257, 257, torch.float32, None), "257 padded": (257, 320, torch.bfloat16, 15.0),
         "1000": (1000, 1000, torch.float32, 2.0), "1000 padded": (1000, 1024, torch.bfloat16, None),
         "a segment": (4096, 4096, torch.float32, None), "and a column": (4097, 4160, torch.bfloat16, 15.0),
         "50304": (50304, 50304, torch.float32, None), "50257 padded": (50257, 50304, torch.bfloat16, 15.0)}
EVERY_HEAD = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)


def keys_of(seed: int, count: int) -> torch.Tensor:
    return torch.tensor([row_key("draw", seed, i) for i in range(count)], device=DEVICE)


def key_of(bits: int) -> int:
    """The key whose noise at position 0 is bits / 2^53: splitmix64 backwards."""
    mask, x = 2 ** 64 - 1, bits << 11
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, None)):
        y = x
        for _ in range(64 // shift + 1):
            y = x ^ (y >> shift)
        x = y if factor is None else y * pow(factor, -1, 2 ** 64) & mask
    x = (x - 0x9E3779B97F4A7C15) & mask
    return x - 2 ** 64 if x >= 2 ** 63 else x


def outputs(head, rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    """Raw outputs of a head, huge and no number after the vocabulary."""
    V, columns, dtype, _ = head
    z = scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    z[:, V:] = 1e4
    z[:, V + 1:] = float("nan")
    return z.to(dtype).to(DEVICE)


def logits_of(z, head) -> torch.Tensor:
    """What GPT.head makes of them, fp32."""
    z, softcap = z[:, : head[0]].float(), head[3]
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def plain(logits, keys, position, temperature, top_k):
    """pick by PyTorch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "takes_triton", lambda x: False)
        patch.setattr(engine.cpu, "takes_rows", lambda x: False)
        return pick(logits, keys, position, temperature, top_k)


def distance_to_bounds(logits, tokens, noise, temperature, top_k) -> torch.Tensor:
    """How far the noise lies outside of the tokens' intervals of the cumulative distribution, fp64: 0 inside."""
    u = logits.double() / temperature
    if top_k:
        u = u.masked_fill(u < u.topk(top_k, dim=1).values[:, -1:], -INF)
    cumulative = torch.softmax(u, dim=1).cumsum(dim=1)
    high = cumulative.gather(1, tokens[:, None])[:, 0]
    low = torch.where(tokens > 0, cumulative.gather(1, (tokens - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return (noise - high).clamp(min=0) + (low - noise).clamp(min=0)


@jit
def noise_kernel(keys, positions, noise):
    i = tl.program_id(0)
    tl.store(noise + i, uniform(tl.load(keys + i), tl.load(positions + i)))


def test_the_kernels_noise_is_the_engines_bit_for_bit():
    keys = torch.cat([keys_of(0, 100), torch.tensor([0, -1, 2 ** 63 - 1, -2 ** 63, key_of(0)], device=DEVICE)])
    positions = torch.arange(len(keys), device=DEVICE) ** 3 % 5000
    positions[-1] = 0
    noise = torch.empty(len(keys), dtype=torch.float64, device=DEVICE)
    noise_kernel[(len(keys),)](keys, positions, noise)
    assert torch.equal(noise, uniform_noise(keys, positions)) and noise[-1] == 0


@EVERY_HEAD
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 0), (1.3, 20)])
def test_draws_and_logprobs_are_those_of_the_pytorch_version(head, temperature, top_k):
    """The same tokens, but where the noise lies within 1e-6 of the bound between two; logprobs to 1e-5."""
    rows = 2 if head[0] > 10000 else 8
    z, keys = outputs(head, rows), keys_of(1, rows)
    logits, noise = logits_of(z, head), uniform_noise(keys, 7)
    tokens, logprobs = draw(z, keys, 7, vocab_size=head[0], softcap=head[3], temperature=temperature, top_k=top_k)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32
    expected, expected_logprobs = plain(logits, keys, 7, temperature, top_k)
    assert (distance_to_bounds(logits, tokens, noise, temperature, top_k) < 1e-6).all()
    same = tokens == expected
    assert same.sum() >= rows - 1  # a row whose noise lies at a bound is rare
    torch.testing.assert_close(logprobs[same], expected_logprobs[same], rtol=0, atol=1e-5)


@EVERY_HEAD
def test_temperature_0_takes_the_first_of_the_largest(head):
    z = outputs(head, 4)
    z[1:, head[0] - 1] = z[1:, head[0] - 9] = 40.0
    z[2:, 3] = 40.0
    z[3:, 200] = 41.0
    tokens, logprobs = draw(z, keys_of(0, 4), 0, vocab_size=head[0], softcap=head[3], temperature=0, top_k=5)
    logits = logits_of(z, head)
    expected, expected_logprobs = plain(logits, keys_of(0, 4), 0, 0, 5)
    if head[3] is None:  # with a softcap of 2 both are 2
        assert tokens.tolist() == [expected[0].item(), head[0] - 9, 3, 200]
    assert torch.equal(tokens, expected)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=0, atol=1e-5)


def test_noise_of_0_and_of_almost_1_stays_inside_of_what_can_be_drawn():
    """The first and the last column that has weight, beside columns of -inf and of weights that round to 0."""
    ends = torch.tensor([key_of(0), key_of(2 ** 53 - 1)], device=DEVICE)
    assert uniform_noise(ends, 0).tolist() == [0.0, 1 - 2.0 ** -53]
    for V, low, high in ((257, 3, 250), (5000, 4100, 4996), (9000, 5, 4098), (50304, 8191, 8192)):
        z = torch.full((2, V), -INF, device=DEVICE)
        z[:, low], z[:, high] = 1.0, 0.5
        z[:, 0] = z[:, -1] = -300.0
        tokens, logprobs = draw(z, ends, 0, vocab_size=V, softcap=None, temperature=1.0)
        assert tokens.tolist() == [low, high] == plain(z, ends, 0, 1.0, 0)[0].tolist()
        assert logprobs.tolist() == pytest.approx(torch.tensor([1.0, 0.5]).log_softmax(0).tolist(), abs=1e-6)


def test_rows_without_a_number_give_a_token_and_no_logprob():
    z = torch.zeros(5, 5000, device=DEVICE)
    z[0], z[1], z[2, 4500], z[3, 7] = -INF, float("nan"), float("nan"), INF
    for temperature in (0, 1.0):
        tokens, logprobs = draw(z, keys_of(0, 5), 0, vocab_size=5000, softcap=None, temperature=temperature)
        assert ((tokens >= 0) & (tokens < 5000)).all()
        assert logprobs.isnan().tolist() == [True, True, True, True, False]


def test_rows_may_have_any_stride_and_a_position_each():
    keys, positions = keys_of(4, 6), torch.tensor([0, 1, 2, 300, 4, 5], device=DEVICE)
    head = dict(vocab_size=257, softcap=None, temperature=1.0)
    z = outputs(HEADS["257"], 12, seed=4)[::2]
    tokens, logprobs = draw(z, keys, positions, **head)
    for row in range(6):
        alone = draw(z[row: row + 1].contiguous(), keys[row: row + 1], int(positions[row]), **head)
        assert tokens[row] == alone[0].item() and logprobs[row] == alone[1].item()
    assert [x.shape for x in draw(z[:0], keys[:0], 0, **head)] == [(0,), (0,)]


def test_top_k_keeps_ties_and_is_all_of_a_small_vocabulary():
    z = torch.zeros(24, 300, device=DEVICE)
    z[:, 100:104] = 2.0
    head = dict(vocab_size=300, softcap=None, temperature=1.0)
    tokens, logprobs = draw(z, keys_of(5, 24), 0, top_k=2, **head)
    assert set(tokens.tolist()) == {100, 101, 102, 103}
    torch.testing.assert_close(logprobs, torch.full((24,), 0.25, device=DEVICE).log(), rtol=0, atol=1e-6)
    for a, b in zip(draw(z, keys_of(5, 24), 0, top_k=1000, **head), draw(z, keys_of(5, 24), 0, **head), strict=True):
        assert torch.equal(a, b)
