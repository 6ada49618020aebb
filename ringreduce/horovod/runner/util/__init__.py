"""What is found below ``horovod.runner.util``."""
