"""Memory that the ranks of a node share: arenas, flags on a board, segments, and the private memory of peers."""
