"""Agents that search, and write what they search for."""
