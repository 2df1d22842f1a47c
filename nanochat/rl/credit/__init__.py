"""From what happened to a weight for each token: rewards, advantages, averaging, schedules."""
