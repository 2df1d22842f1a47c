"""
Hidden states x LM head -> policy loss, forward and backward in one pass over chunks of rows, without the (N, V) logits.

On-policy losses need only a row's own logprob, so the gradients of a chunk are known as soon as its logits are: they are taken in
the forward pass, and the backward pass only scales them.
"""
import torch

from nanochat.kernels.linear_logprob import ROWS_PER_CHUNK, row_logprobs


class _LinearPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, rows, loss, options, rows_per_chunk):
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        logprobs, entropy = torch.zeros_like(rows["advantages"]), torch.zeros_like(rows["advantages"])
        for start in range(0, len(hidden), rows_per_chunk):
            chunk = slice(start, start + rows_per_chunk)
            with torch.enable_grad():
                x, w = hidden[chunk].detach().requires_grad_(), weight.detach().requires_grad_()
                lp, ent = row_logprobs(x, w, rows["targets"][chunk], **options)
                old = lp.detach() if rows["old_logprobs"] is None else rows["old_logprobs"][chunk]
                ref = None if rows["ref_logprobs"] is None else rows["ref_logprobs"][chunk]
                chunk_loss = (loss(lp, ent, old, ref, rows["advantages"][chunk]) * rows["weights"][chunk]).sum()
                grad_hidden[chunk], grad_w = torch.autograd.grad(chunk_loss, (x, w))
            grad_weight += grad_w
            total += chunk_loss.detach()
            logprobs[chunk], entropy[chunk] = lp.detach(), ent.detach()
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(logprobs, entropy)
        return total, logprobs, entropy

    @staticmethod
    def backward(ctx, grad_total, *_):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_total, grad_weight * grad_total, None, None, None, None


def linear_policy_loss(hidden, weight, targets, advantages, weights, *, loss, old_logprobs=None, ref_logprobs=None,
                       vocab_size: int, softcap: float, temperature: float = 1.0, rows_per_chunk: int = ROWS_PER_CHUNK):
    """sum(weights * loss) over N tokens, differentiable in hidden and weight, and the logprobs and entropy met on the way.

    hidden (N, C); weight (rows >= vocab_size, C); targets (N,) int64; advantages, weights (N,) fp32, one per token; loss: a
    nanochat.rl.losses.PolicyLoss; old_logprobs (N,) fp32, or None for exactly on-policy tokens (the current logprobs stand in, the ratio
    is 1); ref_logprobs (N,) fp32 or None. -> scalar fp32, logprobs (N,), entropy (N,), the last two without gradient.
    """
    rows = dict(targets=targets, advantages=advantages, weights=weights, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    options = dict(vocab_size=vocab_size, softcap=softcap, temperature=temperature)
    return _LinearPolicyLoss.apply(hidden, weight, rows, loss, options, rows_per_chunk)
