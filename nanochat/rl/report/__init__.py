"""What a run shows of itself: tables, curves, pages, the terminal."""
