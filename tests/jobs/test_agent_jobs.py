"""Elastic jobs whose hosts are parts of this machine, with a daemon of mpirun each, as slots of an engine are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import LIMIT_S

import ringreduce as rr
from ringreduce.common.errors import CollectiveError, PeerLostError
from ringreduce.common.processes import ancestors
from ringreduce.elastic import NumpyState, run
from ringreduce.engines import run_on
from ringreduce.engines.slots import Slots, hold, slots

STEPS = 10
HOSTS = {f"part-{number}": 1 for number in range(3)}


@pytest.fixture
def held() -> Iterator[Slots]:
    """Slots of three parts of this machine, each held as by a task of an engine."""
    with ThreadPoolExecutor(len(HOSTS)) as tasks, slots("127.0.0.1") as made:
        holding = [tasks.submit(hold, made.ticket, host) for host in HOSTS]
        made.wait(list(HOSTS), LIMIT_S, lambda: None)
        yield made
    for task in holding:
        task.result()


def sums_without(doomed: int) -> list[float]:
    """Return the sum of ones over all ranks, and over those that go on when one has died."""
    rr.init()
    found = [float(rr.allreduce(np.ones(1), op=rr.SUM)[0])]
    try:
        if rr.rank() == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        rr.allreduce(np.ones(1), op=rr.SUM)
    except PeerLostError as error:
        rr.go_on(error)
        found.append(float(rr.allreduce(np.ones(1), op=rr.SUM)[0]))
    return found


@pytest.mark.parametrize("doomed", [0, 1, 2])
def test_ranks_go_on_when_one_dies(held: Slots, doomed: int) -> None:
    """Whichever it is: Open MPI knows some of them by names that all have."""
    found = run_on(held, HOSTS, sums_without, (doomed,), options=["--elastic"])
    assert found == [[3.0, 2.0]] * 2


def steps_with_a_daemon_that_dies(folder: str, doomed: int) -> tuple[int, bool, int]:
    """Count steps; return the number of ranks, whether the last job began with a commit, and the sum over the steps."""
    rr.init()
    begun = None

    @run
    def count(state: Any) -> None:
        while state.step < STEPS:
            if state.step == STEPS // 2 and rr.rank() == doomed and begun is None:
                while len(list(Path(folder).glob("commit-*"))) < 2:  # the launcher has heard of the first
                    time.sleep(0.01)  # they are written in the background
                os.kill(next(pid for pid, name in ancestors() if name == "prted"), signal.SIGKILL)
            state.total += int(rr.allreduce(np.ones(1), op=rr.AVERAGE)[0])
            state.step += 1
            state.commit()

    state: Any = NumpyState(step=0, total=0)
    begun = state.keep_on_disk(folder)
    count(state)
    return rr.size(), begun is not None, state.total


def test_the_job_begins_again_when_a_daemon_dies(held: Slots, tmp_path: Path) -> None:
    """From its last commit, without that part; each step counts once."""
    call = (str(tmp_path / "commits"), 1)
    found = run_on(held, HOSTS, steps_with_a_daemon_that_dies, call, options=["--elastic"])
    assert found == [(2, True, STEPS)] * 2


def daemon_dies() -> None:
    """Kill the daemon over rank 1."""
    rr.init()
    if rr.rank() == 1:
        os.kill(next(pid for pid, name in ancestors() if name == "prted"), signal.SIGKILL)
    rr.allreduce(np.ones(1))
    signal.pause()


def test_a_job_without_commits_ends_with_a_daemon(held: Slots) -> None:
    """Its ranks end, too: Open MPI ends them all."""
    with pytest.raises(CollectiveError):
        run_on(held, HOSTS, daemon_dies, options=["--elastic"])
