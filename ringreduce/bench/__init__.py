"""Measures collectives, ours and those of others, and what follows for the choice of an algorithm."""
