"""Options of optimizers, and the one table of those that do not go together."""
