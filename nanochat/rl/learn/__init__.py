"""One optimizer step on rollouts: the trainer, micro-batches, roles and what they share, a run's state."""
