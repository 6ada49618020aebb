"""A process between the launcher and a rank dies, or is stopped: the job ends all the same."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launching import RINGREDUCE, Job, run

#: Each of three ranks knows the processes of rank 1: mpirun, the shell over it, and the rank.
_KNOWN = """
import os, signal, sys
import ringreduce as rr
from ringreduce.elastic import run
from ringreduce.elastic import NumpyState

def above(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

rr.init()
me = rr.rank()
mpirun, shell, rank = rr.broadcast_object((above(os.getppid()), os.getppid(), os.getpid()), 1)
"""
_TRAINS = """
@run
def train(state):
    if not state.begun:
        state.begun = True
        state.commit()
        if me == 0:
            os.kill(shell, signal.SIGKILL)
    while rr.size() == 3:
        rr.barrier()
    print(me, "goes on with", rr.size(), flush=True)

train(NumpyState(begun=False))
"""
#: Rank 1 is in the end of MPI, or about to be, when rank 0 reads that all its files are closed.
_LEAVES = """
import atexit
ready = sys.argv[1]
rr.barrier()
if me == 0:
    open(ready).read()
    os.kill(shell, signal.SIGKILL)
    print(me, "goes on", flush=True)
elif me == 1:
    file = open(ready, "w")
    atexit.register(file.close)
"""
_STOPS = """
rr.barrier()
if me == 0:
    os.kill({"mpirun": mpirun, "shell": shell, "rank": rank}[sys.argv[1]], signal.SIGSTOP)
    print(me, "goes on", flush=True)
if me == 1 and sys.argv[1] == "rank":
    while True:  # it is here, or in the midst of the barrier, when it is stopped
        signal.pause()
"""
_BEFORE_INIT = """
import os, signal, sys
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getppid()))
    while True:
        signal.pause()
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    shell = int(open(sys.argv[1]).read())
import ringreduce as rr
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    os.kill(shell, signal.SIGKILL)
rr.init()
"""


def job(program: str, *arguments: object, options: tuple[str, ...] = ("--elastic",)) -> Job:
    """Run a program as three ranks."""
    words = (*options, "-x", "RINGREDUCE_TIMEOUT=4", sys.executable, "-c", program, *arguments)
    return run(RINGREDUCE, "run", "-np", 3, *words, limit_s=60)


def test_the_others_go_on_when_the_shell_over_a_rank_is_killed() -> None:
    """As MPI counts the rank as dead, it ends with its shell."""
    done = job(_KNOWN + _TRAINS).well()
    assert sorted(done.stdout.splitlines()) == ["0 goes on with 2", "2 goes on with 2"]


def test_a_rank_does_not_stay_behind_in_the_end_of_mpi(tmp_path: Path) -> None:
    """Where nothing of Python runs any more when its shell is killed."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    done = job(_KNOWN + _LEAVES, ready).well()
    assert done.stdout == "0 goes on\n"


def test_a_shell_that_dies_before_its_rank_is_known_ends_the_job(tmp_path: Path) -> None:
    """The launcher kills the rank, which is not connected to anything yet, and says so; the others notice that."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    done = job(_BEFORE_INIT, ready)
    assert done.returncode == 1, done.stderr
    assert "the shell over rank 1 (process " in done.stderr
    assert "has died before all ranks came to init(), so the job is ended" in done.stderr


@pytest.mark.parametrize("what", ["mpirun", "shell"])
def test_what_is_stopped_over_a_rank_is_continued(what: str) -> None:
    """Or it would never report that the rank has ended."""
    done = job(_KNOWN + _STOPS, what).well()
    assert done.stdout == "0 goes on\n"


@pytest.mark.parametrize("options", [(), ("--elastic",)], ids=["", "elastic"])
def test_a_rank_that_stays_stopped_is_killed(options: tuple[str, ...]) -> None:
    """After the time limit, though the others have nothing more to do with it and are at the end of MPI."""
    program = _KNOWN if options else _KNOWN.replace("above(os.getppid()), os.getppid()", "os.getppid(), 0")
    done = job(program + _STOPS, "rank", options=options)
    assert done.stdout == "0 goes on\n"
    assert "rank 1 (process " in done.stderr
    assert (done.returncode == 0) == bool(options), done.stderr
