"""Ranks that are children of Spark's tasks: `run`, `run_elastic`. Nothing of Spark is imported before they are called.

Also ``horovod.spark``, in programs that import `ringreduce.horovod`.
"""

from ringreduce.engines.spark import run, run_elastic

__all__ = ["run", "run_elastic"]
