"""Process sets, under the name of Horovod's module."""

from ringreduce.runtime import add_process_set, global_process_set, remove_process_set
from ringreduce.runtime.process_sets import ProcessSet

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
