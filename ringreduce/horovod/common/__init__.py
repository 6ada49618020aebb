"""What is found below ``horovod.common``: what Horovod's bindings for all frameworks have in common."""

from ringreduce.horovod.common import basics, elastic, exceptions, process_sets, util

__all__ = ["basics", "elastic", "exceptions", "process_sets", "util"]
