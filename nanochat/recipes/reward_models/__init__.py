"""Models that give rewards: trained on labels, on preferences, or together with the policy."""
