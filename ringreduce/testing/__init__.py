"""Doubles and conformance suites for tests: ranks that are threads, transports that record or fail."""

from ringreduce.testing.conformance import check_collectives, check_messages
from ringreduce.testing.doubles import FailingMessages, RecordingMessages
from ringreduce.testing.ranks import run_ranks
from ringreduce.testing.samples import expected, sample

__all__ = [
    "FailingMessages",
    "RecordingMessages",
    "check_collectives",
    "check_messages",
    "expected",
    "run_ranks",
    "sample",
]
