"""``doctor`` as a whole job under mpirun."""

from __future__ import annotations

import json
from typing import Any

from launching import run_job, run_program


def topics(report: str) -> dict[str, dict[str, Any]]:
    return {each["topic"]: each for each in json.loads(report)["findings"]}


def test_the_ranks_of_a_job_are_examined_together():
    """Rank 0 speaks once for all ranks, and a job that works has no problem."""
    done = run_job(2, "-m", "ringreduce", "doctor", "--json", HOROVOD_CYCLE_TIME="1").well()
    found = topics(done.stdout)
    assert {each["level"] for each in found.values()} <= {"ok", "warning"}
    assert found["nodes"]["value"].endswith(": ranks 0-1")
    assert "HOROVOD_CYCLE_TIME" in found["settings"]["remedy"]
    assert [each["rank"] for each in json.loads(done.stdout)["ranks"]] == [0, 1]


def test_ranks_that_cannot_start_a_world_are_examined():
    """Settings that differ between ranks are named in a report of one rank, and the exit status is 1."""
    source = """
        import os, sys
        os.environ["RINGREDUCE_TIMEOUT"] = str(30 + int(os.environ["OMPI_COMM_WORLD_RANK"]))
        from ringreduce.cli import main
        main(["doctor", "--json"])
    """
    done = run_program(source)
    assert done.returncode == 1
    start = topics(done.stdout)["start"]
    assert start["level"] == "problem"
    assert start["value"] == "the ranks disagree: rank 0: RINGREDUCE_TIMEOUT=30.0; rank 1: RINGREDUCE_TIMEOUT=31.0"
