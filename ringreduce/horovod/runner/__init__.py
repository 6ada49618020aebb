"""What is found below ``horovod.runner``."""

from ringreduce.launcher.function import run

__all__ = ["run"]
