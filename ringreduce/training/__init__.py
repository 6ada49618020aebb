"""What data-parallel training is, whatever the framework: NumPy alone, on flat views of what frameworks hold."""
