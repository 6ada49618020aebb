"""Tensors as arrays, their gradients and their streams."""
