"""GPU memory and what is done there."""
