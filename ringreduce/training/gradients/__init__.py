"""Gradients in memory that travels: buckets, what ranks agree on, weights and checks."""
