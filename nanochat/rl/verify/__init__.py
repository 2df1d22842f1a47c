"""Ways to judge solutions, and what verifiers learn from."""
