"""What a framework says of itself, and NumPy as the simplest one."""
