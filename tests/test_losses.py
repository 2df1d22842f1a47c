"""Policy losses, KL estimators and averaging by hand; the fused LM-head kernels against autograd on full logits."""
import math

import pytest
import torch

from nanochat.kernels.linear_logprob import linear_logprob
from nanochat.kernels.linear_policy_loss import linear_policy_loss
from nanochat.kernels.losses import KL_ESTIMATORS, POLICY_LOSSES, PolicyLoss, importance_ratio, sequence_old_logprobs
from nanochat.rl.credit.aggregation import AGGREGATIONS


def row(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def assert_same(actual, expected, rtol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol)


def ppo(ratios, advantages, **spec) -> list[float]:
    logprobs = torch.log(row(*ratios)) - 3.0
    return POLICY_LOSSES["ppo_clip"](PolicyLoss(**spec), logprobs, torch.full_like(logprobs, -3.0),
                                     row(*advantages)).tolist()


@pytest.mark.parametrize("ratio, advantage, spec, expected", [
    (1.0, 2.0, {}, -2.0), (1.0, -2.0, {}, 2.0), (math.e, 1.0, {}, -1.2), (math.e, -1.0, {}, math.e),
    (1.1, 2.0, {}, -2.2), (0.9, -2.0, {}, 1.8),         # within the range: -ratio * A
    (1.5, 2.0, {}, -2.4), (0.5, -2.0, {}, 1.6),         # clipped: -1.2 * 2, 0.8 * 2
    (0.5, 2.0, {}, -1.0), (1.5, -2.0, {}, 3.0),         # on the pessimistic side: not clipped
    (1.5, 0.0, {}, 0.0),
    (2.0, 1.0, dict(clip_low=0.1, clip_high=0.3), -1.3), (0.5, -1.0, dict(clip_low=0.1, clip_high=0.3), 0.9),
    (10.0, -2.0, {}, 20.0), (10.0, -2.0, dict(dual_clip=3.0), 6.0),  # at most 3 * 2
    (2.0, -2.0, dict(dual_clip=3.0), 4.0), (0.5, -2.0, dict(dual_clip=3.0), 1.6),
    (10.0, 2.0, dict(dual_clip=3.0), -2.4)])
def test_ppo_clips_only_what_would_gain(ratio, advantage, spec, expected):
    assert ppo([ratio], [advantage], **spec) == pytest.approx([expected], rel=1e-12)


def test_clipped_tokens_get_no_gradient_and_others_minus_ratio_times_advantage():
    logprobs = torch.log(row(1.5, 1.5, 1.1, 0.5, 10.0)).requires_grad_()
    loss = PolicyLoss(dual_clip=3.0)(logprobs, None, torch.zeros(5, dtype=torch.float64), None, row(1, -1, 2, -1, -1))
    assert_same(torch.autograd.grad(loss.sum(), logprobs)[0], row(0, 1.5, -2.2, 0, 0))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_every_loss_has_the_policy_gradient(name):
    """reinforce is -A log pi, and the old policy plays no part in it."""
    logprobs, advantages = row(-0.5, -2.0, -7.0).requires_grad_(), row(1.5, -0.5, 0.0)
    loss = PolicyLoss(name)(logprobs, None, logprobs.detach(), None, advantages)
    assert_same(torch.autograd.grad(loss.sum(), logprobs)[0], -advantages)
    if name == "reinforce":
        assert_same(POLICY_LOSSES[name](PolicyLoss(name), logprobs, None, advantages), -advantages * logprobs)


@pytest.mark.parametrize("ratio, advantage, weight", [
    (1.0, 2.0, 1.0), (1.1, -2.0, 1.1), (1.5, 2.0, 1.2), (1.5, -2.0, 1.2), (0.5, 2.0, 0.8), (0.5, -2.0, 0.8)])
def test_cispo_bounds_a_tokens_weight_and_keeps_its_gradient(ratio, advantage, weight):
    """-weight * A * log pi, whose slope is -weight * A: PPO has none at 1.5 with A = 2 and at 0.5 with A = -2."""
    logprobs = row(-3.0).requires_grad_()
    loss = PolicyLoss("cispo")(logprobs, None, -3.0 - torch.log(row(ratio)), None, row(advantage))
    assert loss.item() == pytest.approx(3 * weight * advantage, rel=1e-12)
    assert torch.autograd.grad(loss, logprobs)[0].item() == pytest.approx(-weight * advantage, rel=1e-12)
    unbounded = PolicyLoss("cispo", clip_low=1.0)(logprobs, None, -3.0 - torch.log(row(ratio)), None, row(advantage))
    assert unbounded.item() == pytest.approx(3 * min(ratio, 1.2) * advantage, rel=1e-12)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    """Log ratios 0.2, 0.4 and -0.3, 0, 0.6, row 1 having no token: each token's becomes 0.3 and 0.1."""
    logprobs, rows = row(-1, -2, -3, -4, -5), torch.tensor([0, 0, 2, 2, 2])
    old = logprobs - row(0.2, 0.4, -0.3, 0, 0.6)
    assert_same(logprobs - sequence_old_logprobs(logprobs, old, rows, 3), row(0.3, 0.3, 0.1, 0.1, 0.1))
    nothing = sequence_old_logprobs(row(), row(), rows[:0], 1)
    assert nothing.tolist() == []


def test_kl_estimators_by_hand_and_in_the_mean():
    """pi = 1/2, ref = 1/4: log ratio ln 2. k1 = ln 2; k2 = ln 2^2 / 2; k3 = 1/2 + ln 2 - 1. pi = 1/4, ref = 1/2: -ln 2;
    the same; 2 - ln 2 - 1. Where they agree: 0."""
    pi, ref, ln2 = torch.log(row(0.5, 0.25)), torch.log(row(0.25, 0.5)), math.log(2)
    assert KL_ESTIMATORS["k1"](pi, ref).tolist() == pytest.approx([ln2, -ln2], rel=1e-12)
    assert KL_ESTIMATORS["k2"](pi, ref).tolist() == pytest.approx([ln2 ** 2 / 2] * 2, rel=1e-12)
    assert KL_ESTIMATORS["k3"](pi, ref).tolist() == pytest.approx([ln2 - 0.5, 1 - ln2], rel=1e-12)
    assert all(estimate(pi, pi).tolist() == [0.0, 0.0] for estimate in KL_ESTIMATORS.values())
    # Means over three tokens, weighted by the policy; for gradients these weights are no function of its logits z.
    z = row(0.3, -1.0, 0.5).requires_grad_()
    logprobs, ref = torch.log_softmax(z, 0), torch.log(row(0.2, 0.5, 0.3))
    kl = (logprobs.exp() * (logprobs - ref)).sum()
    mean = lambda name, weights: (weights * KL_ESTIMATORS[name](logprobs, ref)).sum()
    gradient = lambda x: torch.autograd.grad(x, z, retain_graph=True)[0]
    for name in ("k1", "k3"):
        assert_same(mean(name, logprobs.exp()), kl)
    assert_same(gradient(mean("k1", logprobs.detach().exp())), torch.zeros(3, dtype=torch.float64))
    assert_same(gradient(mean("k2", logprobs.detach().exp())), gradient(kl))


@pytest.mark.parametrize("kl, expected", [("k1", -1.9336853), ("k2", -1.9789773), ("k3", -1.9836853)])
def test_policy_loss_adds_kl_and_takes_off_entropy(kl, expected):
    """-2 on policy; 0.1 of ln 2, 0.240227 or 0.193147; -0.003. Terms with coefficient zero need no input."""
    half, quarter = torch.log(row(0.5)), torch.log(row(0.25))
    loss = PolicyLoss(kl=kl, kl_coef=0.1, entropy_coef=0.01)(half, row(0.3), half, quarter, row(2.0))
    assert loss.item() == pytest.approx(expected, abs=1e-7)
    assert PolicyLoss(kl=kl)(half, None, half, None, row(2.0)).tolist() == [-2.0]


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("kl", KL_ESTIMATORS)
def test_extreme_ratios_stay_finite(name, kl):
    """Differences of +-500 in fp32, whose exponential overflows, also where the advantage or the weight is 0."""
    logprobs = torch.tensor([-0.5, -500.0, -0.5, -500.0, -0.5]).requires_grad_()
    other = torch.tensor([-500.0, -0.5, -500.0, -0.5, -500.0])
    loss = PolicyLoss(name, kl=kl, kl_coef=0.1)(logprobs, None, other, other, torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0]))
    total = (loss * torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0])).sum()
    gradient, = torch.autograd.grad(total, logprobs)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert torch.isfinite(importance_ratio(logprobs, other)).all()


def test_aggregations_by_hand():
    for name, weights in (("token", [1 / 10] * 3), ("sequence", [1 / 6, 1 / 9, 1 / 15]), ("constant", [1 / 24] * 3),
                          ("rollout", [1 / 3] * 3)):
        assert AGGREGATIONS[name](row(2, 3, 5), 10, 3, 8).tolist() == pytest.approx(weights, rel=1e-12)


V, ROWS, C, N = 37, 40, 12, 23  # ROWS - V padded vocabulary rows
HEADS = [dict(vocab_size=V, softcap=15.0, temperature=1.0), dict(vocab_size=V, softcap=2.0, temperature=0.7)]
EVERY_HEAD = pytest.mark.parametrize("head", HEADS, ids=["cap 15", "cap 2, temperature 0.7"])
LOSSES = {f"{name} {kl}": PolicyLoss(name, kl=kl, kl_coef=0.3, entropy_coef=0.05) for name in POLICY_LOSSES
          for kl in KL_ESTIMATORS}
LOSSES |= {"ppo_clip dual": PolicyLoss(dual_clip=1.5), "ppo_clip alone": PolicyLoss(),
           "reinforce alone": PolicyLoss("reinforce"), "cispo alone": PolicyLoss("cispo")}
EVERY_LOSS = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)


def full_logprobs(hidden, weight, targets, vocab_size, softcap, temperature):
    """Logprobs and entropies by the definition, on (N, V) logits."""
    z = hidden @ weight[:vocab_size].T
    logits = softcap * torch.tanh(z / softcap) / temperature
    logprobs = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    return logprobs[torch.arange(len(targets)), targets], -(logprobs.exp() * logprobs).sum(dim=1)


def case(head, seed=0, rows=N):
    """fp32 inputs of the fused loss; about half of the tokens are clipped."""
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(rows, C, generator=draw), torch.randn(ROWS, C, generator=draw)
    targets = torch.randint(V, (rows,), generator=draw)
    noise = 0.4 * torch.randn(2, rows, generator=draw)
    old, ref = full_logprobs(hidden, weight, targets, **head)[0] + noise
    return (hidden, weight, targets, torch.randn(rows, generator=draw),
            torch.rand(rows, generator=draw) / max(1, rows), old, ref)


def fused(loss, head, inputs, scale=1, **options):
    """-> loss, gradient of hidden, gradient of weight, logprobs, entropy"""
    hidden, weight, targets, advantages, weights, old, ref = inputs
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, logprobs, entropy = linear_policy_loss(hidden, weight, targets, advantages, weights, loss=loss,
                                                  old_logprobs=old, ref_logprobs=ref, **head, **options)
    assert not logprobs.requires_grad and not entropy.requires_grad
    (scale * total).backward()
    return total.detach(), hidden.grad, weight.grad, logprobs, entropy


def plain(loss, head, inputs):
    hidden, weight, targets, advantages, weights, old, ref = (x if x is None or x.dtype == torch.int64 else x.double()
                                                              for x in inputs)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = full_logprobs(hidden, weight, targets, **head)
    total = (weights * loss(logprobs, entropy, logprobs.detach() if old is None else old, ref, advantages)).sum()
    total.backward()
    return total.detach(), hidden.grad, weight.grad, logprobs.detach(), entropy.detach()


def assert_close(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=1e-5, atol=1e-6)


@EVERY_HEAD
@EVERY_LOSS
@pytest.mark.parametrize("has_old", [True, False])
def test_the_fused_loss_equals_autograd_on_full_logits(loss, head, has_old):
    """Whatever the size of the chunks; without old logprobs the tokens are exactly on policy."""
    inputs = list(case(head))
    if not has_old:
        inputs[5] = None
    expected = plain(loss, head, inputs)
    for rows_per_chunk in (8, N) if has_old else (7, N + 1):
        actual = fused(loss, head, inputs, rows_per_chunk=rows_per_chunk)
        assert actual[0].dtype == torch.float32
        assert_close(actual, expected)
    scaled = fused(loss, head, inputs, -3)  # by what comes from above
    assert_close(scaled[1:3], [-3 * x for x in expected[1:3]])


@EVERY_HEAD
def test_padded_vocabulary_rows_take_no_part(head):
    loss, inputs = LOSSES["ppo_clip k3"], case(head)
    actual = fused(loss, head, inputs)
    assert torch.equal(actual[2][V:], torch.zeros(ROWS - V, C)) and (actual[2][:V] != 0).any(dim=1).all()
    inputs[1][V:] = 1e4
    for a, b in zip(fused(loss, head, inputs), actual, strict=True):
        assert torch.equal(a, b)
    inputs[4][3] = 0  # nor a token of weight 0
    actual = fused(loss, head, inputs)
    assert torch.equal(actual[1][3], torch.zeros(C)) and actual[1][2].any()


def test_no_tokens_give_no_loss_and_no_gradient():
    inputs = case(HEADS[0], rows=0)
    total, grad_hidden, grad_weight, *logprobs = fused(LOSSES["ppo_clip k3"], HEADS[0], inputs)
    assert total.item() == 0 and grad_hidden.shape == (0, C) and torch.equal(grad_weight, torch.zeros(ROWS, C))
    assert [x.shape for x in (*logprobs, *linear_logprob(*inputs[:3], **HEADS[0]))] == [(0,)] * 4


@pytest.mark.parametrize("name", ["ppo_clip k3", "reinforce k2", "ppo_clip k1"])
def test_gradcheck(name):
    """Numeric differences of the fused loss itself, over 1e-2: it computes logits in fp32."""
    draw, head = torch.Generator().manual_seed(0), dict(vocab_size=3, softcap=2.0, temperature=0.7)
    hidden, weight = (torch.randn(4, 2, generator=draw, dtype=torch.float64).requires_grad_()
                      for _ in range(2))  # the fourth id is padding
    targets, advantages = torch.tensor([0, 1, 2, 1]), torch.tensor([1.0, -1.0, 0.5, -2.0])
    # Ratios 1.1, 0.9, 0.5 and 1.5 are far from the kinks at 0.8 and 1.2; none is clipped.
    old = (full_logprobs(hidden.detach(), weight.detach(), targets, **head)[0].float()
           - torch.log(torch.tensor([1.1, 0.9, 0.5, 1.5])))

    def total(hidden, weight):
        return linear_policy_loss(hidden, weight, targets, advantages, torch.ones(4), loss=LOSSES[name],
                                  old_logprobs=old, ref_logprobs=old - 0.3, rows_per_chunk=3, **head)[0].double()
    assert torch.autograd.gradcheck(total, (hidden, weight), eps=1e-2, atol=2e-3, rtol=2e-3)


def test_a_bf16_head_accumulates_its_gradient_in_fp32():
    """64 gradients of 1: chunks of one row must not lose what one chunk has."""
    hidden, weight = torch.ones(64, C, dtype=torch.bfloat16), torch.zeros(ROWS, C, dtype=torch.bfloat16)
    inputs = [hidden, weight, torch.zeros(64, dtype=torch.int64), torch.ones(64), torch.full((64,), 1.0 + 1 / 64),
              None, None]
    by_row, at_once = (fused(PolicyLoss("reinforce"), HEADS[0], inputs, rows_per_chunk=rows)[2] for rows in (1, 64))
    assert by_row.dtype == torch.bfloat16
    torch.testing.assert_close(by_row.float(), at_once.float(), rtol=2 ** -7, atol=2 ** -9)  # a bf16 has 8 bits


def test_linear_logprob_by_hand():
    """Logits before the cap of 15 are 15 atanh(2/15) and 0, so 2 and 0 after it; at temperature 2: 1 and 0.
    log p = 1 - ln(e + 1) = -0.313262; p = 0.731059; entropy = 0.731059 * 0.313262 + 0.268941 * 1.313262 = 0.582203."""
    weight = torch.tensor([[15 * math.atanh(2 / 15)], [0.0], [9.0]])  # the third row is padding
    logprobs, entropy = linear_logprob(torch.ones(1, 1), weight, torch.tensor([0]), vocab_size=2, softcap=15.0,
                                       temperature=2.0)
    assert logprobs.item() == pytest.approx(-0.313262, rel=1e-5) and entropy.item() == pytest.approx(0.582203, rel=1e-5)


@EVERY_HEAD
@pytest.mark.parametrize("rows_per_chunk", [1, 8, 100])
def test_linear_logprob_equals_full_logits(head, rows_per_chunk):
    hidden, weight, targets, *_ = case(head)
    actual = linear_logprob(hidden.requires_grad_(), weight, targets, rows_per_chunk=rows_per_chunk, **head)
    assert_close(actual, full_logprobs(hidden.detach().double(), weight.double(), targets, **head))
    assert not actual[0].requires_grad and not actual[1].requires_grad and actual[0].dtype == torch.float32
