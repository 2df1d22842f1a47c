"""RL Tango, and what shows where it comes from."""
