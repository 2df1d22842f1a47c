"""
Hidden states x LM head -> logprobs and entropy of target tokens, without the (N, V) logits.
"""
import torch

ROWS_PER_CHUNK = 4096


def row_logprobs(hidden, weight, targets, *, vocab_size: int, softcap: float, temperature: float):
    """Logprobs and entropies of rows, by plain differentiable PyTorch; holds (N, V) logits.

    hidden (N, C), weight (rows >= vocab_size, C), targets (N,) int64 -> two of (N,) fp32. Logits are softcapped, then divided
    by the temperature, in fp32; padded vocabulary rows take no part.
    """
    logits = (hidden @ weight[:vocab_size].to(hidden.dtype).t()).float()  # (N, V)
    logits = softcap * torch.tanh(logits / softcap) / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return logprobs.gather(1, targets[:, None]).squeeze(1), entropy


@torch.no_grad()
def linear_logprob(hidden, weight, targets, *, vocab_size: int, softcap: float, temperature: float = 1.0, rows_per_chunk: int = ROWS_PER_CHUNK):
    """Scoring without gradient: as row_logprobs, in chunks of rows, so that only (rows_per_chunk, V) logits exist at a time."""
    options = dict(vocab_size=vocab_size, softcap=softcap, temperature=temperature)
    chunks = [row_logprobs(hidden[i: i + rows_per_chunk], weight, targets[i: i + rows_per_chunk], **options)
              for i in range(0, len(hidden), rows_per_chunk)]
    if not chunks:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)
