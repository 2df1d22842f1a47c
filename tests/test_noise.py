"""The noise of sampling, and the tokens that it draws."""
import pytest
import torch

from nanochat.engine import pick, row_key, uniform_noise

MASK = 2 ** 64 - 1


def splitmix64(state):
    """The published generator (Vigna), in Python's integers: the output that follows from a state."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_noise_is_splitmix64():
    assert splitmix64(1234567) == 6457827717110365317  # the published first output for this seed
    keys = [1234567, 0, -1, 2 ** 63 - 1, -2 ** 63, row_key("a")]
    for position in (0, 1, 500):
        expected = [(splitmix64((key + position * 0x9E3779B97F4A7C15) & MASK) >> 11) / 2 ** 53 for key in keys]
        assert uniform_noise(torch.tensor(keys), position).tolist() == expected


def test_noise_is_uniform_and_independent():
    keys = torch.tensor([row_key("noise", i) for i in range(20000)])
    first, second = uniform_noise(keys, 0), uniform_noise(keys, 1)
    for noise in (first, second, uniform_noise(torch.arange(20000), 7)):
        assert noise.min() >= 0 and noise.max() < 1
        assert (abs(noise.mean() - 0.5) < 0.008  # 4 standard errors of the mean: 0.0082
                and abs(noise.var() - 1 / 12) < 0.003)
        counts = torch.histc(noise, 20, 0, 1)
        assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 19 degrees of freedom
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.03


def test_row_keys_are_stable_distinct_and_signed_64_bit():
    assert row_key(0, "generator", 1, 2) == row_key(0, "generator", 1, 2)
    keys = {row_key(0, step, problem, sample) for step in range(10) for problem in range(20) for sample in range(10)}
    assert len(keys) == 2000 and row_key(1, 11) != row_key(11, 1)
    assert all(-2 ** 63 <= key < 2 ** 63 for key in keys) and min(keys) < -2 ** 62 and max(keys) > 2 ** 62


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_the_softmax(temperature):
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.1]])
    keys = torch.tensor([row_key("draw", i) for i in range(20000)])
    tokens, logprobs = pick(logits.expand(20000, -1), keys, 3, temperature, 0)
    expected = torch.softmax(logits[0] / temperature, dim=0)
    counts = torch.bincount(tokens, minlength=8).float()
    # chi-square, 7 degrees of freedom: P < 4e-4
    assert ((counts - 20000 * expected) ** 2 / (20000 * expected)).sum() < 27
    torch.testing.assert_close(logprobs, expected.log()[tokens])


def test_top_k_never_draws_outside():
    logits = torch.randn(1, 265, generator=torch.Generator().manual_seed(0)) * 0.1  # nearly flat
    allowed = set(logits[0].topk(5).indices.tolist())
    tokens, logprobs = pick(logits.expand(5000, -1), torch.arange(5000), 0, 1.0, 5)
    assert set(tokens.tolist()) == allowed
    assert torch.tensor([logprobs[tokens == t][0] for t in allowed]).exp().sum().item() == pytest.approx(1, abs=1e-5)


def test_temperature_0_is_argmax():
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = pick(logits, torch.arange(50), 0, 0, 0)
    assert torch.equal(tokens, logits.argmax(dim=-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, dim=-1).amax(dim=-1))


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((20000, 6), float("-inf"))
    logits[:, 1], logits[:, 3] = 0.0, 30.0
    tokens, _ = pick(logits, torch.arange(20000), 0, 1.0, 0)
    assert tokens.eq(3).all()
    logits[:, 1], logits[:, 3] = 0.0, 0.0
    assert set(pick(logits, torch.arange(20000), 0, 1.0, 0)[0].tolist()) == {1, 3}


def test_noise_of_exactly_0_draws_no_impossible_token():
    key = torch.tensor([-(0x9E3779B97F4A7C15 - 2 ** 64)])  # splitmix64 of state 0 is 0
    assert uniform_noise(key, 0).item() == 0
    tokens, _ = pick(torch.tensor([[float("-inf"), float("-inf"), 0.0, 1.0]]), key, 0, 1.0, 0)
    assert tokens.item() == 2
