"""The record of a run: what it was made of, its commits, what was refused, and its end, as a chain of hashes."""
