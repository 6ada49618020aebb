"""Simulates the schedules that are executed, and training on them, on clusters that nobody has at hand."""
