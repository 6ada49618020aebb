"""Blocking collectives of one process set: check, choose, plan, run."""

from ringreduce.collectives.call import DETERMINISTIC, NCCL, VENDOR, Call, Choice, Problem, Signature, Task
from ringreduce.collectives.compressed import Feedback
from ringreduce.collectives.context import Context
from ringreduce.collectives.path import Path, Work
from ringreduce.collectives.plan import Plan
from ringreduce.collectives.state import CommState
from ringreduce.common.cleanup import close_all

__all__ = [
    "DETERMINISTIC",
    "NCCL",
    "VENDOR",
    "Call",
    "Choice",
    "CommState",
    "Context",
    "Feedback",
    "Path",
    "Plan",
    "Problem",
    "Signature",
    "Task",
    "Work",
    "close_all",
]
