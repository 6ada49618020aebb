"""What is found below ``horovod.runner.common``."""
