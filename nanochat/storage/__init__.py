"""Files that are written whole or not at all, a run's folder, and the writer in the background."""
