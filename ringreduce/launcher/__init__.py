"""Starts ranks: hosts, allocations, the mpirun that is there, restarts."""
