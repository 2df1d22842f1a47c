"""
Ways of averaging, as small pure functions chosen by name. The loss is sum(weight * token loss).

The weight of each token of a rollout comes from its own length and the sizes of the whole batch, before it is split.
"""
import torch

from nanochat.common import BadInput


def check_one_update(args) -> None:
    """Raises BadInput for several optimizer steps on a batch, where a loss is written as weights of log-likelihoods:
    they are its gradient at the weights that they were computed from."""
    if args.updates_per_batch > 1:
        raise BadInput(f"--updates-per-batch {args.updates_per_batch}: the coefficients hold for one optimizer step")


def token_mean(lengths, num_tokens, num_rollouts, max_new_tokens):
    """Every token of the batch counts the same (DAPO)."""
    return torch.full_like(lengths, 1.0 / num_tokens)


def sequence_mean(lengths, num_tokens, num_rollouts, max_new_tokens):
    """Every rollout counts the same: mean over its tokens, then over rollouts (GRPO)."""
    return 1.0 / (lengths * num_rollouts)


def constant(lengths, num_tokens, num_rollouts, max_new_tokens):
    """Sum over tokens divided by a constant, so that a token's weight depends on no length (Dr. GRPO)."""
    return torch.full_like(lengths, 1.0 / (num_rollouts * max_new_tokens))


def rollout_sum(lengths, num_tokens, num_rollouts, max_new_tokens):
    """Sum over a rollout's tokens, mean over rollouts: losses of whole sequences' logprobs, such as DPO's."""
    return torch.full_like(lengths, 1.0 / num_rollouts)


AGGREGATIONS = {"token": token_mean, "sequence": sequence_mean, "constant": constant, "rollout": rollout_sum}
