"""The kernels of the LM head, in Triton, C and PyTorch, against definitions in fp64. Without a GPU those of Triton run
in its interpreter."""
import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat.kernels import cpu, linear_logprob as linear_logprob_module
from nanochat.kernels.launch import jit, tl
from nanochat.kernels.linear_logprob import linear_logprob, rows_of_chunk
from nanochat.kernels.linear_policy_loss import LOG_RATIO_LIMIT, kl_term, linear_policy_loss, policy_term
from nanochat.kernels.losses import KL_ESTIMATORS, POLICY_LOSSES, PolicyLoss

# the interpreter's numpy, of NaNs that are masked later or meant
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter of 3.6 breaks with numpy 2.4
pytest.importorskip("triton", minversion="3.5" if DEVICE == "cuda" else "3.7")
ALL = pytest.mark.parametrize("use_triton", ["triton", "c", "torch"], indirect=True)
C = 16
# vocabulary, rows of the LM head, softcap, temperature, tokens
HEADS = {"padded": (257, 320, 15.0, 1.0, 9), "one block and a bit": (1000, 1000, 2.0, 0.7, 5),
         "no softcap": (257, 257, None, 1.0, 9),
         "no softcap, temperature": (300, 304, None, 1.7, 5), "two blocks": (4500, 4544, 15.0, 0.5, 3),
         "large": (50304, 50304, 15.0, 1.0, 2)}
EVERY_HEAD = pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
CLIPS = [dict(clip_low=0.1, clip_high=0.3), dict(clip_low=0.1, clip_high=0.3, dual_clip=1.2)]
LOSSES = [PolicyLoss("ppo_clip", kl=kl, kl_coef=0.3, entropy_coef=bonus, **clip) for kl in KL_ESTIMATORS
          for bonus, clip in ((0.0, CLIPS[0]), (0.05, CLIPS[1]))]
LOSSES += [PolicyLoss("reinforce", kl=kl, kl_coef=0.3, entropy_coef=0.05) for kl in KL_ESTIMATORS]
LOSSES += [PolicyLoss("cispo", entropy_coef=bonus, **CLIPS[0]) for bonus in (0.0, 0.05)]
LOSSES += [PolicyLoss(), PolicyLoss(dual_clip=1.2), PolicyLoss("reinforce"), PolicyLoss(entropy_coef=0.1)]


@pytest.fixture
def use_triton(request, monkeypatch) -> bool:
    """Makes the named one of the three do the work."""
    if request.param == "c" and (DEVICE == "cuda" or cpu.library() is None):
        pytest.skip("on CPU, with a C compiler")
    if request.param == "torch":
        monkeypatch.setattr(cpu, "library", lambda: None)
    return request.param == "triton"


def options_of(head) -> dict:
    return dict(vocab_size=head[0], softcap=head[2], temperature=head[3])


def full_logprobs(hidden, weight, targets, vocab_size, softcap, temperature):
    """Logprobs and entropies by the definition, on (N, V) logits."""
    z = hidden @ weight[:vocab_size].T
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    u = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    logprobs = u - u.logsumexp(dim=1, keepdim=True)
    return logprobs.gather(1, targets[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(dim=1)


def case(head, seed=0) -> dict:
    """Inputs whose last target is the vocabulary's last id, whose padding rows are huge, and whose ratios are about
    half outside the clip range."""
    V, rows, *_, N = head
    draw = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(N, C, generator=draw), torch.randn(rows, C, generator=draw)
    targets = torch.randint(V, (N,), generator=draw)
    targets[-1] = V - 1
    weight[V:] = 1e4
    old, ref = full_logprobs(hidden, weight, targets, **options_of(head))[0] + 0.4 * torch.randn(2, N, generator=draw)
    inputs = dict(hidden=hidden, weight=weight, targets=targets, advantages=torch.randn(N, generator=draw),
                  weights=torch.rand(N, generator=draw) / N, old_logprobs=old, ref_logprobs=ref)
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def run(op, inputs, **options) -> tuple:
    """-> loss, gradient of hidden, gradient of weight, logprobs, entropy of linear_policy_loss or of `plain`."""
    hidden, weight = (inputs[name].detach().clone().requires_grad_() for name in ("hidden", "weight"))
    total, logprobs, entropy = op(**{**inputs, "hidden": hidden, "weight": weight}, **options)
    total.backward()
    return total.detach(), hidden.grad, weight.grad, logprobs.detach(), entropy.detach()


def plain(hidden, weight, targets, advantages, weights, old_logprobs, ref_logprobs, loss, **head):
    logprobs, entropy = full_logprobs(hidden, weight, targets, **head)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    return (weights * loss(logprobs, entropy, old, ref_logprobs, advantages)).sum(), logprobs, entropy


def in_fp64(inputs) -> dict:
    return {name: x if x is None or x.dtype == torch.int64 else x.double() for name, x in inputs.items()}


def assert_close(actual, expected, rtol=2e-5, atol=2e-6):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.double(), e.double(), rtol=rtol, atol=atol)


@ALL
@EVERY_HEAD
def test_linear_logprob_is_the_definition(head, use_triton):
    inputs = case(head)
    args = [inputs[name] for name in ("hidden", "weight", "targets")]
    expected = full_logprobs(*(x.double() if x.is_floating_point() else x for x in args), **options_of(head))
    for rows_per_chunk in (None, 2):
        actual = linear_logprob(*args, **options_of(head), rows_per_chunk=rows_per_chunk, use_triton=use_triton)
        assert actual[0].dtype == torch.float32
        assert_close(actual, expected)


@ALL
def test_logprobs_by_hand(use_triton):
    """All logits -100: log p = -ln 257, entropy ln 257, with a softcap or without. Logits 0, 300 and 600 without one:
    log p = -600, -300, 0; entropy 0."""
    hidden, weight = torch.full((2, C), -100.0 / C, device=DEVICE), torch.ones(320, C, device=DEVICE)
    for softcap in (None, 15.0):
        logprobs, entropy = linear_logprob(hidden, weight, torch.tensor([0, 256], device=DEVICE), vocab_size=257,
                                           softcap=softcap, use_triton=use_triton)
        assert (logprobs.tolist() == pytest.approx([-math.log(257)] * 2, rel=1e-6)
                and entropy.tolist() == pytest.approx([math.log(257)] * 2, rel=1e-6))
    weight = torch.tensor([[0.0], [300.0], [600.0]], device=DEVICE)
    logprobs, entropy = linear_logprob(torch.ones(3, 1, device=DEVICE), weight, torch.arange(3, device=DEVICE),
                                       vocab_size=3, softcap=None, use_triton=use_triton)
    assert logprobs.tolist() == [-600.0, -300.0, 0.0] and entropy.tolist() == [0.0] * 3


@jit
def tokens_kernel(logprobs, old, advantages, losses, slopes, low, high, dual_clip, N, LIMIT: tl.constexpr,
                  LOSS: tl.constexpr, KL: tl.constexpr, HAS_DUAL_CLIP: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    x = tl.load(logprobs + n, mask=n < N, other=0.0)
    y = tl.load(old + n, mask=n < N, other=0.0)
    if KL != "":
        loss, slope = kl_term(x, y, LIMIT, KL)
    else:
        loss, slope = policy_term(x, y, tl.load(advantages + n, mask=n < N, other=0.0), low, high, dual_clip, LIMIT,
                                  LOSS, HAS_DUAL_CLIP)
    tl.store(losses + n, loss, mask=n < N)
    tl.store(slopes + n, slope, mask=n < N)


SPECS = [(PolicyLoss(name, **clip), "") for name in POLICY_LOSSES
         for clip in ({}, *CLIPS, dict(clip_low=0.0, clip_high=0.0), dict(dual_clip=1.0))]


@pytest.mark.parametrize("spec, kl", SPECS + [(PolicyLoss(), kl) for kl in KL_ESTIMATORS])
def test_the_kernels_formulas_are_those_of_the_losses(spec, kl):
    """Value and derivative, also where autograd has a choice: a ratio of exactly 1 or e^20, clip bounds of 1, A = 0,
    loss and dual clip equal."""
    differences = [0.0, 0.1, -0.1, 0.5, -0.5, 20.0, -20.0, 21.0, -21.0, 1000.0, -1000.0, 1e-7]
    grid = torch.tensor(list(itertools.product(differences, [0.0, 1.0, -1.0, 0.3, -2.0])), device=DEVICE)  # (60, 2)
    old, advantages = torch.zeros(len(grid), device=DEVICE), grid[:, 1].contiguous()
    logprobs = grid[:, 0].contiguous().requires_grad_()
    expected = KL_ESTIMATORS[kl](logprobs, old) if kl else POLICY_LOSSES[spec.name](spec, logprobs, old, advantages)
    slope, = torch.autograd.grad(expected.sum(), logprobs)
    losses, slopes = torch.empty(2, len(grid), device=DEVICE)
    tokens_kernel[(1,)](logprobs.detach(), old, advantages, losses, slopes, 1.0 - spec.clip_low, 1.0 + spec.clip_high,
                        float(spec.dual_clip or 0), len(grid), LIMIT=LOG_RATIO_LIMIT, LOSS=spec.name, KL=kl,
                        HAS_DUAL_CLIP=spec.dual_clip is not None, BLOCK=128)
    assert_close([losses, slopes], [expected.detach(), slope], rtol=1e-6, atol=1e-7)


@ALL
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_the_fused_loss_is_autograd_on_full_logits(loss, use_triton):
    head = HEADS["padded"]
    inputs = case(head)
    actual = run(linear_policy_loss, inputs, loss=loss, use_triton=use_triton,
                 rows_per_chunk=4, **options_of(head))  # chunks of 4, 4 and 1 rows
    assert_close(actual, run(plain, in_fp64(inputs), loss=loss, **options_of(head)))
    assert torch.equal(actual[2][257:], torch.zeros(63, C, device=DEVICE))


@ALL
@EVERY_HEAD
@pytest.mark.parametrize("on_policy", [False, True])
def test_the_fused_loss_of_every_head(head, use_triton, on_policy):
    loss, inputs = PolicyLoss(kl="k3", kl_coef=0.3, entropy_coef=0.05), case(head)
    if on_policy:
        inputs["old_logprobs"] = None
    actual = run(linear_policy_loss, inputs, loss=loss, use_triton=use_triton, **options_of(head))
    assert_close(actual, run(plain, in_fp64(inputs), loss=loss, **options_of(head)))


@ALL
@pytest.mark.parametrize("spec", [spec for spec, _ in SPECS], ids=str)
def test_where_autograd_has_a_choice(spec, use_triton):
    """Ratios of exactly 1, with clip bounds of 1, A = 0, loss and dual clip equal."""
    head = HEADS["padded"]
    inputs = case(head) | {"old_logprobs": None}
    inputs["advantages"] = torch.tensor([0.0, 1.0, -1.0, 0.3, -2.0, 0.0, 1.0, -1.0, 0.3], device=DEVICE)
    actual = run(linear_policy_loss, inputs, loss=spec, use_triton=use_triton, **options_of(head))
    assert_close(actual, run(plain, in_fp64(inputs), loss=spec, **options_of(head)))


@ALL
@pytest.mark.parametrize("old", [-1000.0, 1000.0])
def test_ratios_that_overflow_stay_finite_and_right(use_triton, old):
    head = HEADS["padded"]
    inputs = case(head)
    inputs["old_logprobs"] = torch.full_like(inputs["old_logprobs"], old)
    for loss in (PolicyLoss(), PolicyLoss(dual_clip=3.0), PolicyLoss("reinforce"), PolicyLoss("cispo")):
        actual = run(linear_policy_loss, inputs, loss=loss, use_triton=use_triton, **options_of(head))
        assert_close(actual, run(plain, in_fp64(inputs), loss=loss, **options_of(head)))


@ALL
def test_no_tokens(use_triton):
    head = (257, 320, 15.0, 1.0, 0)
    inputs = {name: x[:0] if name != "weight" else x for name, x in case(HEADS["padded"]).items()}
    total, grad_hidden, grad_weight, logprobs, entropy = run(linear_policy_loss, inputs, loss=PolicyLoss(),
                                                             use_triton=use_triton, **options_of(head))
    assert (total.item() == 0 and grad_hidden.shape == (0, C)
            and not grad_weight.any() and logprobs.shape == entropy.shape == (0,))
    scores = linear_logprob(inputs["hidden"], inputs["weight"], inputs["targets"], use_triton=use_triton,
                            **options_of(head))
    assert [x.shape for x in scores] == [(0,), (0,)]


@ALL
def test_inputs_may_have_any_strides(use_triton):
    head, loss = HEADS["padded"], LOSSES[1]
    inputs = case(head) | {"weights": torch.full((9,), 0.5, device=DEVICE)}
    expected = run(linear_policy_loss, inputs, loss=loss, use_triton=use_triton, **options_of(head))
    wide = torch.full((2 * 9, 3 * C), float("nan"), device=DEVICE)
    wide[::2, ::3] = inputs["hidden"]
    strided = {name: x if name in ("hidden", "weight") else torch.stack([x, x + 1], dim=1)[:, 0]
               for name, x in inputs.items()} | {"weights": torch.tensor(0.5, device=DEVICE).expand(9)}
    for hidden in (wide[::2, ::3], inputs["hidden"].t().contiguous().t()):
        strided["hidden"], weight = hidden.requires_grad_(), inputs["weight"].detach().requires_grad_()
        total, logprobs, entropy = linear_policy_loss(**{**strided, "weight": weight}, loss=loss, rows_per_chunk=4,
                                                      use_triton=use_triton, **options_of(head))
        grads = torch.autograd.grad(total, (hidden, weight))
        assert_close((total.detach(), *grads, logprobs, entropy), expected)
    scores = linear_logprob(*(strided[name] for name in ("hidden", "weight", "targets")), use_triton=use_triton,
                            **options_of(head))
    assert_close(scores, expected[3:], rtol=1e-6, atol=1e-6)


@ALL
def test_a_frozen_input_gets_no_gradient_and_no_grad_mode_none(use_triton):
    head, loss = HEADS["padded"], LOSSES[1]
    inputs = case(head)
    total, grad_hidden, grad_weight, logprobs, entropy = run(linear_policy_loss, inputs, loss=loss,
                                                             use_triton=use_triton, **options_of(head))
    for name, expected in (("hidden", grad_hidden), ("weight", grad_weight)):
        trained = inputs[name].detach().clone().requires_grad_()
        alone = linear_policy_loss(**{**inputs, name: trained}, loss=loss, use_triton=use_triton, **options_of(head))[0]
        assert_close(torch.autograd.grad(alone, trained), [expected], rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        actual = linear_policy_loss(**{**inputs, "weight": trained}, loss=loss, use_triton=use_triton,
                                    **options_of(head))
    assert not actual[0].requires_grad
    assert_close(actual, [total, logprobs, entropy], rtol=1e-6, atol=1e-7)


@ALL
def test_a_logit_that_is_no_number_shows_in_the_loss(use_triton):
    head = HEADS["padded"]
    inputs = case(head)
    inputs["hidden"][3, 0] = float("nan")
    total, _, _, logprobs, entropy = run(linear_policy_loss, inputs, loss=PolicyLoss(), use_triton=use_triton,
                                         **options_of(head))
    assert total.isnan() and logprobs.isnan().tolist() == entropy.isnan().tolist() == [n == 3 for n in range(9)]


def entropy_and_square(logprobs, entropy, old_logprobs, ref_logprobs, advantages):
    """A loss that no kernel knows."""
    return advantages * logprobs ** 2 + entropy ** 2 * old_logprobs


def only_entropy(logprobs, entropy, old_logprobs, ref_logprobs, advantages):
    return advantages * entropy


@ALL
@pytest.mark.parametrize("loss", [entropy_and_square, only_entropy])
def test_any_function_of_logprobs_and_entropies_is_a_loss(loss, use_triton):
    head = HEADS["padded"]
    inputs = case(head)
    actual = run(linear_policy_loss, inputs, loss=loss, use_triton=use_triton, **options_of(head))
    assert_close(actual, run(plain, in_fp64(inputs), loss=loss, **options_of(head)), rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """How many bytes the largest tensor made meanwhile has."""
    nbytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.numel() * x.element_size())
        return result


@ALL
def test_no_tensor_is_larger_than_a_chunk(use_triton):
    """30 rows of 300 logits in chunks of 7: nothing has more than 7 * 320 fp32, whatever the loss."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(30, 2, generator=draw).to(DEVICE).requires_grad_(),
                      torch.randn(320, 2, generator=draw).to(DEVICE).requires_grad_())
    targets, ones = torch.zeros(30, dtype=torch.int64, device=DEVICE), torch.ones(30, device=DEVICE)
    for loss in (PolicyLoss(entropy_coef=0.1), PolicyLoss("reinforce"), only_entropy):
        with LargestTensor() as largest:
            linear_policy_loss(hidden, weight, targets, ones, ones, loss=loss, vocab_size=300, softcap=15.0,
                               rows_per_chunk=7, use_triton=use_triton)[0].backward()
            linear_logprob(hidden, weight, targets, vocab_size=300, softcap=None, rows_per_chunk=7,
                           use_triton=use_triton)
        assert 4 * 7 * 300 <= largest.nbytes <= 4 * 7 * 320


@pytest.mark.parametrize("V, N", [(265, 4096), (32768, 4096), (151936, 16384), (151936, 100), (50257, 16385)])
def test_chunks_are_small_on_cpu_and_even_on_cuda(V, N):
    """CPU: 1 MiB of fp32, but at least 128 rows. CUDA: at most 8192 rows and about 2 GiB, in chunks that differ by less
    than 128 rows each."""
    assert rows_of_chunk(N, V, torch.float32, False) == max(128, 2 ** 18 // V)
    assert rows_of_chunk(0, V, torch.bfloat16, True) == 128  # a micro-batch that trains nothing
    R = rows_of_chunk(N, V, torch.bfloat16, True)
    num_chunks = -(-N // R)
    assert R % 128 == 0 and R <= 8192 + 128 and R * V * 2 < 1.05 * 2 ** 31 and num_chunks * R - N < 128 * num_chunks


@pytest.mark.parametrize("slow", [True, False])  # MKL: either way on every machine
@pytest.mark.parametrize("of_total, of_a, of_b", [(torch.float32, torch.float32, torch.float32),
                                                  (torch.float32, torch.float32, torch.bfloat16),
                                                  (torch.float64, torch.float64, torch.float32)])
def test_products_are_added_in_the_totals_dtype(monkeypatch, slow, of_total, of_a, of_b):
    monkeypatch.setattr(linear_logprob_module, "mkl_is_slow", lambda: slow)
    draw = torch.Generator().manual_seed(0)
    total, a, b = (torch.randn(shape, generator=draw).to(dtype)
                   for shape, dtype in (((70, 20), of_total), ((33, 70), of_a), ((33, 20), of_b)))
    expected = total.double() + a.t().double() @ b.double()
    linear_logprob_module.add_product(total[:50], a.t()[:50], b)
    linear_logprob_module.add_product(total[50:], a.t()[50:], b)
    assert total.dtype == of_total and (total - expected).abs().max() < (1e-5 if of_total == torch.float32 else 1e-12)
