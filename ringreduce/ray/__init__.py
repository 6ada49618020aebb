"""Ranks that are actors of Ray: `RayExecutor`. Ray is imported when one is started.

Also ``horovod.ray``, in programs that import `ringreduce.horovod`.
"""

from ringreduce.engines.ray import RayExecutor

__all__ = ["RayExecutor"]
