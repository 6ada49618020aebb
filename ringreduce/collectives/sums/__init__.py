"""Reductions above communicators: adaptive and exact sums."""
