"""Data-parallel training, whatever the framework."""
