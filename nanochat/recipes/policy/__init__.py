"""A policy, or several, without a learned verifier."""
