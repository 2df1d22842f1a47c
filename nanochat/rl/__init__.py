"""What recipes are made of. A package imports from itself and from those after it: run, report, verify, measure,
play, learn, credit, records."""
