"""Jobs that stall: `ringreduce run --watchdog` says why, and ends them or starts them again."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import RINGREDUCE, run

PROGRAM = """
import os, time
import numpy as np
import ringreduce as rr

def load():
    time.sleep(100)  # stands for a function that does not return

rr.init()
for step in range(20):
    rr.allreduce(np.ones(4))
    rr.count(steps=1)
    if step == 10 and rr.rank() == rr.size() - 1 and "RINGREDUCE_RESTART" not in os.environ:
        {what}
print("done")
rr.shutdown()
"""
EVALUATES = 'with rr.busy("evaluation"): time.sleep(8)  # longer than the watchdog waits'


@pytest.mark.parametrize(("ranks", "elastic"), [(1, ("--elastic",)), (2, ()), (3, ("--elastic",))])
def test_a_job_that_stalls_is_ended_and_the_rank_named(tmp_path: Path, ranks: int, elastic: tuple[str, ...]) -> None:
    """With where it is; each rank has written down what it does; the status is 124, and nothing begins again."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(what="load()"), encoding="utf-8")
    options = ["-np", ranks, "--oversubscribe", "--max-restarts", "1", *elastic]
    job = run(RINGREDUCE, "run", *options, "--watchdog", 4, "--watchdog-action", "end", script, cwd=tmp_path)
    assert job.returncode == 124, job.stderr
    assert "no rank has made a step, a collective or a report for 4 s" in job.stderr
    assert f"rank {ranks - 1} is at {script}:7 in load" in job.stderr
    assert "done" not in job.stdout
    assert len([*(tmp_path / "ringreduce-dumps").glob("rank-*.json")]) == ranks


def test_a_job_that_stalls_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(what="load()"), encoding="utf-8")
    action = ("--watchdog-action", "restart", "--max-restarts", "1")
    job = run(RINGREDUCE, "run", "-np", 2, "--watchdog", 4, *action, script, cwd=tmp_path).well()
    assert "starting it again (1 of 1)" in job.stderr
    assert job.stdout.splitlines() == ["done"] * 2


def test_an_evaluation_that_is_told_stalls_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.format(what=EVALUATES), encoding="utf-8")
    job = run(RINGREDUCE, "run", "-np", 2, "--watchdog", 4, "--watchdog-action", "end", script, cwd=tmp_path).well()
    assert job.stdout.splitlines() == ["done"] * 2
    assert "no rank has made a step" not in job.stderr
