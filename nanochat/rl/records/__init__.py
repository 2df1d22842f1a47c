"""Prompts and rollouts, and what a task says of them."""
