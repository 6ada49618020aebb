"""What a rank sees of itself: values that other rooms read, and what records them."""
