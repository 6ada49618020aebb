"""Random calls, right ones and wrong ones, and the same call many times: nothing wrong, nothing left behind.

``RINGREDUCE_TEST_STEPS`` sets how many random calls there are, and ``RINGREDUCE_TEST_SEED`` which.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
STEPS = os.environ.get("RINGREDUCE_TEST_STEPS", "100")
SEED = os.environ.get("RINGREDUCE_TEST_SEED", "1")


@pytest.mark.parametrize("node_size", ["", "1", "2"], ids=["one node", "messages", "hierarchy"])
def test_random_calls_end_as_they_must(run_job, node_size: str) -> None:
    """No wrong number, no hang, no crash, no error on some ranks only; worlds usable, or closed, as they must be."""
    job = run_job(
        3,
        str(PROGRAMS / "fuzz.py"),
        *("--steps", STEPS, "--seed", SEED),
        RINGREDUCE_NODE_SIZE=node_size,
        RINGREDUCE_TIMEOUT="20",
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith("well: ")


@pytest.mark.parametrize(
    ("what", "times", "node_size"),
    [("algorithms", 30, ""), ("algorithms", 30, "1"), ("mismatches", 500, "1"), ("worlds", 20, "")],
)
def test_memory_does_not_grow(run_job, what: str, times: int, node_size: str) -> None:
    """Whatever is done again and again; tests/jobs/programs/memory.py does it any number of times."""
    job = run_job(2, str(PROGRAMS / "memory.py"), what, str(times), RINGREDUCE_NODE_SIZE=node_size)
    assert job.returncode == 0, job.stdout + job.stderr
