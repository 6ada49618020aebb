"""Process sets, under the name of Horovod's module."""

from ringreduce.process_sets import ProcessSet
from ringreduce.runtime import add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
