"""What ranks read: samplers, shares by speed, generators of random numbers."""
