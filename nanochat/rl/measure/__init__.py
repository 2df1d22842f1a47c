"""Scores, votes, held-out evaluations."""
