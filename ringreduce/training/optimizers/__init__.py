"""What hands gradients to strategies: reducers, optimizers of all frameworks, and replicas that step by themselves."""
