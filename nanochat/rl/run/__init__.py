"""A run from its flags to its end: plan, resume, progress, the log of rollouts."""
