"""Ranks that are children of Spark's tasks: `run`. Nothing of Spark is imported before it is called.

Also ``horovod.spark``, in programs that import `ringreduce.horovod`.
"""

from ringreduce.engines.spark import run

__all__ = ["run"]
