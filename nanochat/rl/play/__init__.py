"""What a recipe may do in a step: sample, score, check, learn."""
