"""How a step gets its averages: one file for each strategy, and what hands gradients to them."""
