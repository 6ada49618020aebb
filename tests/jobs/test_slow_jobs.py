"""Jobs of which something is slow: the verdict at their end names it, and `ringreduce compare` tells them apart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from launching import PROGRAMS, RINGREDUCE, Job, needs, run

needs("torch")

TRAINING = PROGRAMS / "slow_training.py"
BUSY = {"crowded cores", "shared cores"}  # as this machine may be, whatever a job does


def train(path: Path, kind: str, ranks: int, *options: str, steps: int = 100) -> tuple[Job, dict[str, Any]]:
    """Run a training; return how it ended, and its report."""
    command = [RINGREDUCE, "run", "-np", ranks, "--oversubscribe", "--report", path, *options, TRAINING, kind, steps]
    job = run(*command, OMP_NUM_THREADS="1")
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["done"] * ranks, "the verdict is not on standard output"
    return job, json.loads(path.read_text(encoding="utf-8"))


def verdict(job: Job) -> list[str]:
    return [line for line in job.stderr.splitlines() if line.startswith("ringreduce: ")]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_with_a_slow_function_is_named(tmp_path: Path, ranks: int) -> None:
    """With how much faster all would be without it, at most."""
    job, report = train(tmp_path / "report.json", "function", ranks)
    assert report["slow"]["rank"] == ranks - 1
    assert report["slow"]["kind"] == "always"
    found = {each["name"]: each for each in report["found"]}
    assert found.keys() - BUSY <= {"slow rank", "communication"}
    assert found["slow rank"]["speedup"] > 1.2
    lines = verdict(job)
    assert len(lines) <= 8
    assert [line.removeprefix("ringreduce: ") for line in lines] == report["lines"]
    assert any(f"rank {ranks - 1} is last in " in line for line in lines)
    assert report["values"]["loss"] > 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_slow_loader_is_named(tmp_path: Path, ranks: int) -> None:
    """It is what most of a step goes to, on all ranks."""
    job, report = train(tmp_path / "report.json", "loader", ranks)
    assert report["input_s"] > 0.05
    assert next(each["name"] for each in report["found"] if each["name"] not in BUSY) == "input"
    assert any("ranks wait for data in " in line for line in verdict(job))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores")
def test_a_rank_on_a_shared_core_is_named(tmp_path: Path) -> None:
    """Another program has the core of the second rank most of the time."""
    _, report = train(tmp_path / "report.json", "core", 2, "--mpi-args", "--bind-to none")
    assert (report["slow"]["rank"], report["slow"]["cause"]) == (1, "crowded")
    names = {each["name"] for each in report["found"]}
    assert names & {"slow rank", "uneven ranks", *BUSY}, "rank 0 is slow as well where others have its core"


def test_a_healthy_job_gets_no_blame_and_is_faster_than_a_slow_one(tmp_path: Path) -> None:
    """Where others have its cores, or its ranks share them, that is said, and nothing else."""
    job, report = train(tmp_path / "healthy.json", "healthy", 1)
    assert {each["name"] for each in report["found"]} <= BUSY
    assert verdict(job)[1].startswith("ringreduce: a step: compute ")
    train(tmp_path / "slow.json", "loader", 1, "--quiet")
    there, here = tmp_path / "healthy.json", tmp_path / "slow.json"
    slower = run(RINGREDUCE, "compare", there, here, "--tolerance", "10%")
    assert slower.returncode == 1
    assert "slower than 10% allow" in slower.stdout
    assert "new: ranks wait for data" in slower.stdout
    assert run(RINGREDUCE, "compare", here, there).returncode == 0
    assert run(RINGREDUCE, "compare", there, there).returncode == 0


def test_nothing_is_said_where_that_is_asked_for_or_steps_are_few(tmp_path: Path) -> None:
    """By `--quiet`, by the variable, and after a few steps."""
    job, _ = train(tmp_path / "report.json", "healthy", 2, "--quiet", steps=30)
    assert verdict(job) == []
    program = (RINGREDUCE, "run", "-np", 1, TRAINING, "healthy")
    assert verdict(run(*program, 30, RINGREDUCE_VERDICT="0")) == []
    assert verdict(run(*program, 10)) == []
    assert len(verdict(run(*program, 30))) >= 3
