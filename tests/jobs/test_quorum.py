"""DiLoCo with a quorum goes on while replicas freeze, thaw and die (programs/quorum_training.py)."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from launching import PROGRAMS, needs, run, run_job

needs("torch")

PROGRAM = PROGRAMS / "quorum_training.py"
STEPS = 10


def trained(folder: Path, ranks: int, quorum: int, *events: str) -> list[dict[str, Any]]:
    """Return what the ranks that have reached the end say; all must have learnt, and have the same weights."""
    arguments = [str(folder), str(quorum), str(STEPS), *events]
    if any(event.endswith(":kill") for event in events):
        command = [sys.executable, str(PROGRAM), *arguments]
        done = run("ringreduce", "run", "--elastic", "-np", ranks, *command, RINGREDUCE_TIMEOUT="20")
    else:
        done = run_job(ranks, PROGRAM, *arguments, RINGREDUCE_TIMEOUT="20")
    lines = [line for line in done.well().stdout.splitlines() if line.startswith("{")]
    said = [json.loads(line) for line in lines]
    assert len({json.dumps(each["weights"]) for each in said}) == 1
    assert all(each["error"] < 0.05 and each["steps"] > STEPS for each in said)
    return said


def test_a_frozen_replica_goes_on_from_the_steps_of_others(tmp_path: Path) -> None:
    said = trained(tmp_path, 3, 2, "2@2:freeze:7")
    assert len(said) == 3
    assert {each["rank"]: max(each["jumps"]) for each in said}[2] >= 5


def test_all_wait_for_the_rank_that_keeps_the_weights(tmp_path: Path) -> None:
    said = trained(tmp_path, 2, 1, "0@2:freeze:7")
    assert len(said) == 2


def test_survivors_go_on_whoever_dies(tmp_path: Path) -> None:
    for rank in (0, 2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        said = trained(folder, 3, 2, f"{rank}@3:kill")
        assert sorted(each["rank"] for each in said) == [each for each in range(3) if each != rank]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(50))
def test_random_events(tmp_path: Path, seed: int) -> None:
    """One or two replicas freeze, one after the other, or one dies."""
    drawn = random.Random(seed)
    ranks = drawn.randint(2, 4)
    quorum = drawn.randint(1, ranks - 1)
    if drawn.random() < 0.4:
        trained(tmp_path, ranks, quorum, f"{drawn.randrange(ranks)}@{drawn.randint(1, 8)}:kill")
        return
    victims = drawn.sample(range(ranks), drawn.randint(1, min(2, ranks - 1)))
    events = [f"{victim}@{1 + 4 * place}:freeze:{4 + 4 * place}" for place, victim in enumerate(victims)]
    assert len(trained(tmp_path, ranks, quorum, *events)) == ranks
