"""Random calls, right ones and wrong ones, and the same call many times: nothing wrong, nothing left behind.

``RINGREDUCE_TEST_STEPS`` sets how many random calls there are, and ``RINGREDUCE_TEST_SEED`` which.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launching import PROGRAMS, run_job, run_together

STEPS = os.environ.get("RINGREDUCE_TEST_STEPS", "100")
SEED = os.environ.get("RINGREDUCE_TEST_SEED", "1")


def test_random_calls_end_as_they_must(tmp_path: Path) -> None:
    """No wrong number, no hang, no crash, no error on some ranks only; worlds usable, or closed, as they must be."""
    program = [str(PROGRAMS / "fuzz.py"), "--steps", STEPS, "--seed", SEED]
    layouts = {"one node": "", "messages": "1", "hierarchy": "2"}
    scripts = {name: [*program, f"--node-size={size}"] for name, size in layouts.items()}
    said = run_together(3, tmp_path, scripts, RINGREDUCE_TIMEOUT="20")
    assert all(each.startswith("well: ") for each in said.values()), said


@pytest.mark.parametrize(
    ("what", "times", "node_size"),
    [
        pytest.param("algorithms", 30, "", marks=pytest.mark.thorough),
        ("algorithms", 30, "1"),
        ("mismatches", 125, "1"),
        ("worlds", 20, ""),
    ],
)
def test_memory_does_not_grow(what: str, times: int, node_size: str) -> None:
    """Whatever is done again and again; tests/jobs/programs/memory.py does it any number of times."""
    run_job(2, str(PROGRAMS / "memory.py"), what, str(times), RINGREDUCE_NODE_SIZE=node_size).well()
