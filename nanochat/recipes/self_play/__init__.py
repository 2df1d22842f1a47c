"""Models that set their own problems, judge themselves or play against each other."""
