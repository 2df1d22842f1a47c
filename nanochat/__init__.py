"""
Trains language models from nothing, and a generator and its verifier together by RL.
"""
__version__ = "0.2.0"  # the one place: pyproject.toml reads it here
