"""Doubles and conformance suites for tests: ranks that are threads, transports that record or fail."""

from ringreduce.testing.ranks import run_ranks

__all__ = ["run_ranks"]
