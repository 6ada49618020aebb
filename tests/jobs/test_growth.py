"""Elastic jobs that begin again with more ranks, or on other hosts; and what takes no part in that."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import launching
import pytest

PROGRAM = """
import logging, os, signal, sys
from pathlib import Path
import numpy as np
import ringreduce as rr
from ringreduce.elastic import run
from ringreduce.elastic import NumpyState
from ringreduce.training.data.epochs import EpochDivision

ROWS, BATCH, EPOCHS, STEP, COMMITS = 60, 2, 3, 6, 200_000
folder, event, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

class Complaints(logging.Handler):
    heard = 0
    def emit(self, record):
        Complaints.heard += "keep_on_disk" in record.getMessage()
        print(record.getMessage(), file=sys.stderr)

class Division(EpochDivision):
    def shuffled(self, seed):
        return np.random.default_rng(seed).permutation(ROWS).tolist()

def happen():
    if event == "a death" and rr.rank() == 1 and "RINGREDUCE_RESTART" not in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)
    if event == "more slots" and rr.rank() == 0:
        (folder / "new").write_text(os.environ.get("HOSTS_THEN", f"localhost:{size}\\n"))
        (folder / "new").rename(folder / "hosts")

def has_happened():
    return rr.size() == size if keeps else rr.allreduce(Complaints.heard) > 0

@run
def train(state):
    if rr.rank() == 0:
        print(f"{rr.size()} ranks from step {state.step}", flush=True)
    while state.epoch < EPOCHS:
        mine = list(division)
        for first in range(0, len(mine), BATCH):
            if state.step == STEP:
                happen()
                for _ in range(COMMITS):
                    if has_happened():
                        break
                    state.commit()
            batch = mine[first : first + BATCH]
            state.weights = state.weights + rr.allreduce(np.bincount(batch, minlength=ROWS))
            division.record_indices(batch)
            state.step += 1
            state.commit()
        state.epoch += 1
        division.set_epoch(state.epoch)
        state.commit()

rr.init()
logging.getLogger("ringreduce").addHandler(Complaints())
division = Division(range(ROWS))
keeps = "no commits" not in sys.argv
state = NumpyState(division=division, weights=np.zeros(ROWS, int), epoch=0, step=0)
if keeps and "by itself" not in sys.argv:
    state.keep_on_disk(folder / "commits", every=10**9)
train(state)
if rr.rank() == 0:
    print(f"{rr.size()} ranks have seen each row {set(state.weights.tolist())} times")
"""


def run(
    folder: Path,
    arguments: list[Any],
    *program: str | int,
    command: str = "ringreduce run --elastic",
    before: tuple[str, ...] = (),
    **environment: str | None,
) -> launching.Job:
    """Run the program as an elastic job; ``before``: words that the command line begins with."""
    name, *words = command.split()
    line = [*before, launching.RINGREDUCE.with_name(name), *words, *arguments]
    temporary = folder / "temporary"
    temporary.mkdir()
    line += [sys.executable, "-c", PROGRAM, folder, *program]
    done = launching.run(*line, TMPDIR=str(temporary), **environment)
    assert not list(temporary.glob("ringreduce-commits-*"))
    return done


def script_in(folder: Path, hosts: str) -> Path:
    """Return a script that says which hosts there are: those in the file ``hosts`` of a folder."""
    (folder / "hosts").write_text(hosts)
    script = folder / "discover"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("command", ["ringreduce run --elastic", "horovodrun"])
def test_a_job_grows_when_there_are_more_slots(tmp_path: Path, command: str) -> None:
    """In the midst of an epoch, of which no row is lost or repeated; the commit is written whatever `every` says.

    Those of Horovod's command go to disk without a call, to a folder that is gone with the job.
    """
    script = script_in(tmp_path, "localhost:2\n")
    arguments = ["-np", 2, "--max-np", 3, "--host-discovery-script", script]
    by_itself = ["by itself"] if command == "horovodrun" else []
    done = run(tmp_path, arguments, "more slots", 3, *by_itself, command=command).well()
    said = ["2 ranks from step 0", "3 ranks from step 6", "3 ranks have seen each row {3} times"]
    assert done.stdout.splitlines() == said
    assert "there are slots for 3 ranks, and 2 live" in done.stderr
    assert "\x1e" not in done.stderr


def test_a_job_leaves_slots_that_are_no_longer_there(tmp_path: Path) -> None:
    """With what the ranks there have done."""
    script = script_in(tmp_path, "localhost:3\n")
    done = run(tmp_path, ["-np", 3, "--host-discovery-script", script], "more slots", 2).well()
    said = ["3 ranks from step 0", "2 ranks from step 6", "2 ranks have seen each row {3} times"]
    assert done.stdout.splitlines() == said


def test_a_job_that_has_failed_starts_where_slots_count_again(tmp_path: Path) -> None:
    """With too few ranks left, and no commit on disk, from the start."""
    done = run(tmp_path, ["-np", 2, "--min-np", 2, "--max-restarts", 1, "--cooldown", 0.5], "a death", 2).well()
    assert done.stdout.splitlines() == ["2 ranks from step 0"] * 2 + ["2 ranks have seen each row {3} times"]


def test_a_dead_rank_is_replaced(tmp_path: Path) -> None:
    """On one machine, whose slots count again at once; until then the other goes on."""
    done = run(tmp_path, ["-np", 2, "--cooldown", 0], "a death", 2).well()
    said = ["2 ranks from step 0", "1 ranks from step 6", "2 ranks from step 6", "2 ranks have seen each row {3} times"]
    assert done.stdout.splitlines() == said


def test_a_job_ends_when_its_ranks_would_change_too_often(tmp_path: Path) -> None:
    """By an error that says so, and it is not started again."""
    done = run(tmp_path, ["-np", 2, "--reset-limit", 0, "--max-restarts", 3], "a death", 1)
    assert done.returncode == 1
    assert "TransportError: ranks have failed more often than --reset-limit allows" in done.stderr
    assert "where --reset-limit is 0: it is not started again" in done.stderr
    assert done.stdout == "2 ranks from step 0\n"


def test_a_program_without_commits_on_disk_goes_on(tmp_path: Path) -> None:
    """It is told what growth takes, once, and ends as if nothing had happened."""
    script = script_in(tmp_path, "localhost:2\n")
    arguments = ["-np", 2, "--max-np", 3, "--host-discovery-script", script]
    done = run(tmp_path, arguments, "more slots", 3, "no commits").well()
    assert done.stdout.splitlines() == ["2 ranks from step 0", "2 ranks have seen each row {3} times"]
    assert done.stderr.count("call state.keep_on_disk(folder) before the training") == 1


def test_too_few_slots_for_too_long(tmp_path: Path) -> None:
    """The job does not start, and the error says what is there and what to do."""
    script = script_in(tmp_path, "localhost:1\n")
    arguments = ["-np", 2, "--min-np", 2, "--host-discovery-script", script, "--start-timeout", 0.5]
    done = run(tmp_path, arguments, "nothing", 2)
    assert done.returncode == 2
    assert "Error: after 0.5 s there are 1 slots to use, and the job needs 2 (--min-np)" in done.stderr
    assert done.stdout == ""


SPAWN = """
import sys
from mpi4py import MPI
import ringreduce as rr

if MPI.Comm.Get_parent() != MPI.COMM_NULL:
    rr.init()
    rr.shutdown()
    MPI.Comm.Get_parent().Disconnect()
else:
    MPI.COMM_WORLD.Spawn(sys.executable, ["-c", sys.argv[1]], maxprocs=2).Disconnect()
"""


def test_spawned_ranks_are_told_that_deaths_are_not_noticed() -> None:
    """Once, by the first of them."""
    done = launching.run(launching.RINGREDUCE, "run", "--elastic", "-np", 1, sys.executable, "-c", SPAWN, SPAWN).well()
    assert done.stderr.count("does not report when one of them dies") == 1
