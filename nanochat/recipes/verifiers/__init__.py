"""Verifiers that are trained on labelled solutions and write or give verdicts."""
