"""
Hidden states x LM head -> policy loss, forward and backward in one pass over chunks of rows, without the (N, V) logits.

On-policy losses need only a row's own logprob, so the gradients of a chunk are known as soon as its logits are: they
are taken in the forward pass, and the backward pass only scales them. Per chunk of R rows: logits by the BLAS; one
sweep of each row for logsumexp, entropy and logprob; the loss; a second sweep that puts the logits' gradient in their
place; two products for the gradients of hidden and weight.

On CUDA one Triton kernel does both sweeps and the loss between them, so that nothing is launched per vector of tokens;
on CPU in fp32 it is a kernel in C. Elsewhere, and for a loss that these do not know by name, it is PyTorch: autograd
differentiates any loss, but only as a function of (R,) logprobs and entropies.
"""
import torch

from nanochat.kernels import cpu
from nanochat.kernels.launch import jit, takes_triton, tl
from nanochat.kernels.linear_logprob import (head_arguments, logit_and_slope, logit_chunks, row_statistics, soften,
                                             takes_c, torch_statistics, wide_dtype_of)

LOG_RATIO_LIMIT = 20.0  # as in nanochat.kernels.losses, whose formulas the kernel repeats; tests hold them together
KERNEL_LOSSES, KERNEL_KLS = ("reinforce", "ppo_clip", "cispo"), ("k1", "k2", "k3")  # in the order of cpu_loss.c


# PyTorch

def token_gradients(loss, tokens: dict, logprobs, entropy):
    """Weighted losses (R,) and their derivatives in logprobs and entropy, None for one that plays no part."""
    with torch.enable_grad():
        inputs = logprobs.detach().requires_grad_(), entropy.detach().requires_grad_()
        old = logprobs.detach() if tokens["old_logprobs"] is None else tokens["old_logprobs"]
        losses = tokens["weights"] * loss(*inputs, old, tokens["ref_logprobs"], tokens["advantages"])
        return losses.detach(), *torch.autograd.grad(losses.sum(), inputs, allow_unused=True)


def torch_rows(z, tokens: dict, loss, head: dict, with_gradient: bool):
    """Raw logits z (R, V) and the tokens' vectors (R,) -> losses, logprobs, entropy (R,) and, if wanted, dL/dz (R, V).
    z is lost.

    dL/du = g (1{target} - p) - b p (log p + entropy) with g, b = dL/dlogprob, dL/dentropy. For the shifted u of soften,
    du/dz = 1/T without a softcap, else (T/S^2) u (2S/T - u).
    """
    softcap, temperature, targets = head["softcap"], head["temperature"], tokens["targets"][:, None]
    u = soften(z, softcap, temperature)
    logprobs, entropy, lse, p = torch_statistics(u, tokens["targets"])
    losses, g, b = token_gradients(loss, tokens, logprobs, entropy)
    if not with_gradient:
        return losses, logprobs, entropy, None
    scale = 1 / temperature if softcap is None else -temperature / softcap ** 2
    g = (torch.zeros_like(losses) if g is None else scale * g)[:, None]
    if b is None:
        p.mul_(-g)
    else:
        b = (scale * b)[:, None]
        p.mul_((u * -b).add_(b * (lse - entropy)[:, None] - g))
    p.scatter_add_(1, targets, g.to(p.dtype))
    if softcap is None:
        return losses, logprobs, entropy, p
    p.mul_(u)
    return losses, logprobs, entropy, u.sub_(2 * softcap / temperature).mul_(p)


# C

def c_rows(z, tokens: dict, loss, head: dict, with_gradient: bool):
    """As torch_rows."""
    losses, logprobs, entropies = torch.empty(3, len(z))
    spec = cpu.struct("Loss", KERNEL_LOSSES.index(loss.name), 1 + KERNEL_KLS.index(loss.kl) if loss.kl_coef else 0,
                      with_gradient, 1 - loss.clip_low, 1 + loss.clip_high, loss.dual_clip or 0, loss.kl_coef,
                      loss.entropy_coef, head["softcap"] or 0, head["temperature"])
    ref = tokens["ref_logprobs"] if loss.kl_coef else None
    cpu.call("policy_rows", spec, z, z.stride(0), *z.shape, tokens["targets"], tokens["advantages"], tokens["weights"],
             tokens["old_logprobs"], ref, losses, logprobs, entropies)
    return losses, logprobs, entropies, z if with_gradient else None


# Triton

@jit
def policy_term(logprob, old, advantage, low, high, dual_clip, LIMIT: tl.constexpr, LOSS: tl.constexpr,
                HAS_DUAL_CLIP: tl.constexpr):
    """The policy loss of a token and its derivative in the logprob, as autograd has it: a clamp passes the gradient at
    its bounds, and a minimum of equals halves it."""
    loss = -advantage * logprob
    g = -advantage
    log_ratio = logprob - old
    limited = tl.where(log_ratio > LIMIT, LIMIT, tl.where(log_ratio < -LIMIT, -LIMIT, log_ratio))
    ratio = tl.exp(limited)
    clipped = tl.where(ratio > high, high, tl.where(ratio < low, low, ratio))
    if LOSS == "cispo":
        loss = -clipped * advantage * logprob
        g = -clipped * advantage
    if LOSS == "ppo_clip":
        ratio_slope = tl.where(limited == log_ratio, ratio, 0.0)
        clipped_slope = tl.where(clipped == ratio, ratio_slope, 0.0)
        gain, clipped_gain = ratio * advantage, clipped * advantage
        loss = -tl.where(gain < clipped_gain, gain, clipped_gain)
        g = -advantage * tl.where(gain < clipped_gain, ratio_slope,
                                  tl.where(gain == clipped_gain, 0.5 * (ratio_slope + clipped_slope), clipped_slope))
        if HAS_DUAL_CLIP:
            bound = -dual_clip * advantage
            g = tl.where((advantage < 0) & (loss >= bound), tl.where(loss == bound, 0.5 * g, 0.0), g)
            loss = tl.where((advantage < 0) & (loss > bound), bound, loss)
    return loss, g


@jit
def kl_term(logprob, ref, LIMIT: tl.constexpr, KL: tl.constexpr):
    """The KL estimate of a token and its derivative in the logprob."""
    difference = logprob - ref
    kl = difference
    slope = difference * 0.0 + 1.0
    if KL == "k2":
        kl = 0.5 * difference * difference
        slope = difference
    if KL == "k3":
        limited = tl.where(difference > LIMIT, LIMIT, tl.where(difference < -LIMIT, -LIMIT, difference))
        kl = tl.exp(-limited) + limited - 1.0
        slope = tl.where(limited == difference, 1.0 - tl.exp(-limited), 0.0)
    return kl, slope


@jit
def write_gradient(z_row, stride, vocab_size, target, lse, entropy, g, b, softcap, temperature,
                   HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """The second sweep: dL/dz in place of z, 0 after the vocabulary. g = dL/dlogprob, b = dL/dentropy."""
    for start in range(0, stride, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z = tl.load(z_row + columns, mask=columns < stride, other=0.0).to(tl.float32)
        u, slope = logit_and_slope(z, softcap, temperature, HAS_SOFTCAP)
        inside = columns < vocab_size
        log_p = tl.where(inside, u - lse, float("-inf"))
        du = -tl.exp(log_p) * (g + b * (tl.where(inside, log_p, 0.0) + entropy))
        dz = slope * tl.where(columns == target, du + g, du)
        tl.store(z_row + columns, dz.to(z_row.dtype.element_ty), mask=columns < stride)


# Only the logits' alignment is compiled in: other token vectors or lengths need no other kernel.
@jit(do_not_specialize=["vocab_size"], do_not_specialize_on_alignment=[
    "targets", "advantages", "weights", "old_logprobs", "ref_logprobs", "losses", "logprobs", "entropies"])
def policy_rows(z_pointer, stride, vocab_size, targets, advantages, weights, old_logprobs, ref_logprobs, losses,
                logprobs, entropies, low, high, dual_clip, kl_coef, entropy_coef, softcap, temperature,
                LIMIT: tl.constexpr, LOSS: tl.constexpr, KL: tl.constexpr, HAS_OLD: tl.constexpr,
                HAS_DUAL_CLIP: tl.constexpr, WITH_GRADIENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
                BLOCK: tl.constexpr):
    """One program per row: statistics, the loss of its token, the gradient in place of the logits."""
    row = tl.program_id(0)
    z_row = z_pointer + row.to(tl.int64) * stride
    target = tl.load(targets + row)
    z = tl.load(z_row + target).to(tl.float32)
    u, _ = logit_and_slope(z, softcap, temperature, HAS_SOFTCAP)
    lse, entropy = row_statistics(z_row, stride, vocab_size, softcap, temperature, HAS_SOFTCAP, BLOCK)
    logprob = u - lse
    old = logprob
    if HAS_OLD:
        old = tl.load(old_logprobs + row)
    loss, g = policy_term(logprob, old, tl.load(advantages + row), low, high, dual_clip, LIMIT, LOSS, HAS_DUAL_CLIP)
    if KL != "":
        kl, kl_slope = kl_term(logprob, tl.load(ref_logprobs + row), LIMIT, KL)
        loss += kl_coef * kl
        g += kl_coef * kl_slope
    weight = tl.load(weights + row)
    tl.store(losses + row, weight * (loss - entropy_coef * entropy))
    tl.store(logprobs + row, logprob)
    tl.store(entropies + row, entropy)
    if WITH_GRADIENT:
        tl.debug_barrier()  # all threads have read the target's logit
        write_gradient(z_row, stride, vocab_size, target, lse, entropy, weight * g, -weight * entropy_coef, softcap,
                       temperature, HAS_SOFTCAP, BLOCK)


def triton_rows(z, tokens: dict, loss, head: dict, with_gradient: bool):
    """As torch_rows; z may be bf16 and have more columns than the vocabulary, whose gradient is 0."""
    losses, logprobs, entropies = torch.empty(3, len(z), device=z.device)
    old, ref, advantages = tokens["old_logprobs"], tokens["ref_logprobs"], tokens["advantages"]
    policy_rows[(len(z),)](
        z, z.stride(0), head["vocab_size"], tokens["targets"], advantages, tokens["weights"],
        advantages if old is None else old, advantages if ref is None else ref, losses, logprobs, entropies,
        1.0 - loss.clip_low, 1.0 + loss.clip_high, float(loss.dual_clip or 0), float(loss.kl_coef),
        float(loss.entropy_coef), LIMIT=LOG_RATIO_LIMIT, LOSS=loss.name, KL=loss.kl if loss.kl_coef else "",
        HAS_OLD=old is not None, HAS_DUAL_CLIP=loss.dual_clip is not None, WITH_GRADIENT=with_gradient,
        **head_arguments(z, head["softcap"], head["temperature"]))
    return losses, logprobs, entropies, z if with_gradient else None


# Both

def known_to_kernel(loss) -> bool:
    return getattr(loss, "name", None) in KERNEL_LOSSES and (not loss.kl_coef or loss.kl in KERNEL_KLS)


def loss_and_gradients(hidden, weight, tokens: dict, loss, head: dict, rows_per_chunk, use_triton: bool, narrow: bool,
                       wanted: tuple[bool, bool]):
    """-> weighted losses, logprobs, entropy (N,), and the gradients of hidden and weight, None where not wanted."""
    wide = wide_dtype_of(hidden)
    losses = torch.empty(len(hidden), dtype=wide, device=hidden.device)
    logprobs, entropy = torch.empty(2, len(hidden), device=hidden.device)
    grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if wanted[0] else None
    grad_weight = (torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, wide), device=weight.device)
                   if wanted[1] else None)
    for rows, z, matrix in logit_chunks(hidden, weight, head["vocab_size"], rows_per_chunk, use_triton,
                                        narrow):
        chunk = {name: None if x is None else x[rows] for name, x in tokens.items()}
        in_c = known_to_kernel(loss) and takes_c(z, *chunk.values())
        rows_of = triton_rows if use_triton else c_rows if in_c else torch_rows
        losses[rows], logprobs[rows], entropy[rows], dz = rows_of(z, chunk, loss, head, any(wanted))
        if grad_hidden is not None:
            grad_hidden[rows] = matrix.back(dz)
        if grad_weight is not None:
            matrix.add_gradient(grad_weight[: len(matrix.weight)], dz, hidden[rows])
    return losses, logprobs, entropy, grad_hidden, grad_weight


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, *arguments):
        losses, logprobs, entropy, grad_hidden, grad_weight = loss_and_gradients(hidden, weight, *arguments)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(logprobs, entropy)
        return losses.sum(), logprobs, entropy

    @staticmethod
    def backward(ctx, grad_total, *_):
        grad_hidden, grad_weight = (None if x is None else x * grad_total for x in ctx.saved_tensors)
        return grad_hidden, grad_weight, *[None] * 7


def linear_policy_loss(hidden, weight, targets, advantages, weights, *, loss, old_logprobs=None, ref_logprobs=None,
                       vocab_size: int, softcap: float | None, temperature: float = 1.0,
                       rows_per_chunk: int | None = None, use_triton: bool | None = None, narrow: bool = False):
    """sum(weights * loss) over N tokens, differentiable in hidden and weight, and the logprobs and entropy met on the
    way.

    hidden (N, C), any strides; weight (rows >= vocab_size, C), whose padding rows take no part; targets (N,) int64
    below vocab_size; advantages, weights (N,) fp32, one per token, any strides; loss: a kernels.losses.PolicyLoss, or
    any such function of the logprobs and entropies of single tokens; old_logprobs (N,) fp32, or None for exactly
    on-policy tokens (the current logprobs stand in, the ratio is 1); ref_logprobs (N,) fp32 or None; softcap None: no
    softcap. use_triton None: by device; True on CPU tensors needs TRITON_INTERPRET=1. narrow: on CPU, products of
    operands rounded to bf16.
    -> scalar fp32 (fp64 for fp64), logprobs (N,) fp32, entropy (N,) fp32, the last two without gradient.
    """
    tokens = dict(targets=targets, advantages=advantages, weights=weights, old_logprobs=old_logprobs,
                  ref_logprobs=ref_logprobs)
    tokens = {name: None if x is None else x.contiguous() for name, x in tokens.items()}
    head = dict(vocab_size=vocab_size, softcap=softcap, temperature=temperature)
    use_triton = known_to_kernel(loss) and (takes_triton(hidden) if use_triton is None else use_triton)
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    return _LinearPolicyLoss.apply(hidden, weight, tokens, loss, head, rows_per_chunk, use_triton, narrow, wanted)
