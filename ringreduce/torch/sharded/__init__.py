"""Parameters in memory of the node, of which each rank updates a part."""
