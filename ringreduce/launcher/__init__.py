"""Starts ranks: hosts, allocations, the installed mpirun, restarts."""
