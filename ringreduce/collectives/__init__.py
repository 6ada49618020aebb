"""Blocking collectives of one process set: check, choose, plan, run."""

from ringreduce.algorithms import Collective
from ringreduce.collectives.call import NCCL, VENDOR, Call, Choice, Problem, Work
from ringreduce.collectives.compressed import Feedback
from ringreduce.collectives.context import Context

__all__ = ["NCCL", "VENDOR", "Call", "Choice", "Collective", "Context", "Feedback", "Problem", "Work"]
