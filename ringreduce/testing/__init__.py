"""Doubles and conformance suites for tests: ranks that are threads, transports that record or fail."""

from ringreduce.testing.conformance import (
    assert_close,
    assert_equal,
    check_choices,
    check_collectives,
    check_messages,
    expected,
    sample,
)
from ringreduce.testing.doubles import DamagingMessages, FailingMessages, RecordingMessages
from ringreduce.testing.ranks import caught, run_engines, run_process_sets, run_ranks, run_threads

__all__ = [
    "DamagingMessages",
    "FailingMessages",
    "RecordingMessages",
    "assert_close",
    "assert_equal",
    "caught",
    "check_choices",
    "check_collectives",
    "check_messages",
    "expected",
    "run_engines",
    "run_process_sets",
    "run_ranks",
    "run_threads",
    "sample",
]
