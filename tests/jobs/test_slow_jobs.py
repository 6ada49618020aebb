"""Jobs of which something is slow: what the verdict would say agrees with the figures in their report.

They are too short to be judged, which is all that they say, so their figures are judged as those of a long job. Which
figures a job has depends on what else runs on its cores. `benchmarks/verdicts.py` counts how often the fault that was
made is named.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from launching import PROGRAMS, RINGREDUCE, Job, needs, run

from ringreduce.observe.job.job_report import figures_in
from ringreduce.observe.job.verdicts import judge

needs("torch")

TRAINING = PROGRAMS / "slow_training.py"
COUNTS = """
import sys
import numpy as np
import ringreduce as rr
rr.init()
for _ in range(int(sys.argv[1])):
    rr.allreduce(np.ones(3))
    rr.count(steps=1)
"""
SLOW_S = 0.05  # of a step: the program sleeps for longer in each
PARTS = ("compute_s", "input_s", "waiting_s", "communication_s")


def most(report: dict[str, Any], part: str) -> float:
    return max((float(each[part]) for each in report["uses"]), default=0.0)


def is_late(report: dict[str, Any], least: float, *, in_turn: bool) -> bool:
    slow = report["slow"]
    return slow is not None and (slow["rank"] < 0) == in_turn and report["waiting_s"] >= least * report["step_s"]


#: What is to be said of a job on one host, given its report.
CONDITIONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "slow rank": lambda it: is_late(it, 0.1, in_turn=False),
    "uneven ranks": lambda it: is_late(it, 0.2, in_turn=True),
    "input": lambda it: it["input_s"] >= 0.2 * it["step_s"],
    "communication": lambda it: it["ranks"] > 1 and it["communication_s"] >= 0.2 * it["step_s"] and it["crowded"] < 0.2,
    "crowded cores": lambda it: it["crowded"] >= 0.2,
    "disk": lambda it: most(it, "busy") >= 0.8,
    "garbage collector": lambda it: most(it, "collecting") >= 0.2,
    "throttled": lambda it: most(it, "throttled") >= 0.05,
    "steal": lambda it: most(it, "stolen") >= 0.05,
    "swapping": lambda it: most(it, "swapped") >= 256,
    "memory": lambda it: any(each["faults"] >= 10 and each["memory"] >= 0.95 for each in it["uses"]),
    "shared cores": lambda it: bool(it["crowds"]),
}


def train(path: Path, kind: str, ranks: int, *options: str, steps: int = 40) -> dict[str, Any]:
    """Run a training; return its report, in which all agrees, also with what the job has said."""
    command = [RINGREDUCE, "run", "-np", ranks, "--oversubscribe", "--report", path, *options, TRAINING, kind, steps]
    job = run(*command, OMP_NUM_THREADS="1").well()
    assert job.stdout.splitlines() == ["done"] * ranks, "the verdict is not on standard output"
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert (report["ranks"], report["nodes"]) == (ranks, 1)
    assert sum(report[part] for part in PARTS) == pytest.approx(report["step_s"])
    assert report["start_s"] + report["steps_s"] < report["seconds"]
    found = judge(replace(figures_in(report), steps_s=3600.0))
    is_long = report["step_s"] >= 0.005
    assert {each.name for each in found} == {name for name, holds in CONDITIONS.items() if is_long and holds(report)}
    assert [each.saves_s for each in found] == sorted((each.saves_s for each in found), reverse=True)
    assert report["found"] == []
    said = [line.removeprefix("ringreduce: ") for line in verdict(job)]
    assert said == ([] if "--quiet" in options else report["lines"])
    assert all("too short to judge" in each for each in said)
    assert len(report["lines"]) == 1
    return report


def verdict(job: Job) -> list[str]:
    return [line for line in job.stderr.splitlines() if line.startswith("ringreduce: ")]


def test_a_slow_function_makes_all_steps_longer(tmp_path: Path) -> None:
    """Those of the ranks that do not call it, too."""
    report = train(tmp_path / "report.json", "function", 3)
    assert report["step_s"] > SLOW_S
    assert report["values"]["loss"] > 0


def test_time_in_a_slow_loader_is_input(tmp_path: Path) -> None:
    """Of all ranks; at least as long as the loader sleeps."""
    report = train(tmp_path / "report.json", "loader", 2)
    assert report["input_s"] > SLOW_S


def test_two_jobs_are_compared(tmp_path: Path) -> None:
    """A job beside itself has not changed; of two, the status says whether steps have become slower.

    That of one rank whose loader is slow has time in input, too.
    """
    there, here = tmp_path / "healthy.json", tmp_path / "slow.json"
    train(there, "healthy", 1)
    assert train(here, "loader", 1)["input_s"] > SLOW_S
    assert run(RINGREDUCE, "compare", here, here).returncode == 0
    done = run(RINGREDUCE, "compare", there, here, "--tolerance", "10%")
    assert done.returncode == ("slower than 10% allow" in done.stdout), done.stderr
    assert not re.search("^(new|gone): ", done.stdout, re.MULTILINE), "nothing is said of what is too short"


def test_nothing_is_said_where_that_is_asked_for_or_steps_are_few(tmp_path: Path) -> None:
    """By `--quiet`, by the variable, and after a few steps."""
    train(tmp_path / "report.json", "healthy", 2, "--quiet", steps=30)
    program = (RINGREDUCE, "run", "-np", 1, sys.executable, "-c", COUNTS)
    assert verdict(run(*program, 30, RINGREDUCE_VERDICT="0")) == []
    assert verdict(run(*program, 10)) == []
    assert len(verdict(run(*program, 30))) == 1
