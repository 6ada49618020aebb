"""The end of a job in the audit record, however it comes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import RINGREDUCE, run

FAILING = """
import os, signal, sys
import ringreduce as rr

rr.init()
rr.barrier()
if rr.rank() == {rank}:
    {end}
rr.barrier()
"""


@pytest.mark.parametrize(
    ("rank", "end", "said"),
    [
        (0, "raise ValueError('no')", "it failed: ValueError: no"),
        (0, "sys.exit(3)", "it exits with code 3"),
        (0, "os.kill(os.getpid(), signal.SIGTERM)", "it was ended by SIGTERM"),
        (1, "raise ValueError('no')", ""),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", ""),
    ],
)
def test_a_job_that_fails_has_an_end_with_the_reason(
    run_job: Any, tmp_path: Path, rank: int, end: str, said: str
) -> None:
    """As rank 0 knows it: its own, or that it lost another, or was ended with the job."""
    path = tmp_path / "audit"
    job = run_job(2, source=FAILING.format(rank=rank, end=end), RINGREDUCE_AUDIT=str(path))
    assert job.returncode != 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["event"] for each in lines] == ["begin", "end"]
    error = lines[1]["facts"]["error"]
    assert error == said if said else "rank 1" in error or "SIGTERM" in error


SURVIVING = """
import os, signal
import ringreduce as rr

rr.init()
try:
    if rr.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rr.barrier()
except rr.PeerLostError as error:
    rr.go_on(error)
rr.audit("alive", ranks=rr.size())
"""


def test_who_goes_on_after_a_death_appends_to_the_same_file(tmp_path: Path) -> None:
    """A world that lost its rank 0 has no end; that of the others is recorded by the new rank 0."""
    path = tmp_path / "audit"
    job = (RINGREDUCE, "run", "--elastic", "-np", 3, sys.executable, "-c", SURVIVING)
    done = run(*job, RINGREDUCE_AUDIT=str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["event"] for each in lines] == ["begin", "begin", "alive", "end"], done.stderr
    assert [each["facts"]["size"] for each in lines[:2]] == [3, 2]
    assert lines[2]["facts"] == {"ranks": 2}
    assert lines[3]["facts"] == {"error": None}
