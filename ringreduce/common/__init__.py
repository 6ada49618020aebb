"""Errors, settings, topology, arithmetic of blocks, checks of arguments: what every other folder may import."""
