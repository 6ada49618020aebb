"""Moves bytes between ranks: messages (over MPI, or between threads) and memory that the ranks of a node share."""
