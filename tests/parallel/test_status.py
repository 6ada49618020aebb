"""What ranks say of themselves for `ringreduce top`."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce import runtime
from ringreduce.engine import Reduction
from ringreduce.observe.job.job_view import rows
from ringreduce.observe.seen.recorder import read_all
from ringreduce.observe.seen.snapshots import Snapshot

PRIVATE = MPI.COMM_WORLD.Dup()


def said_by_all() -> list[Snapshot]:
    """Return what the ranks of this world say now, without waiting for the thread that writes it."""
    own = runtime._process.own()
    assert own is not None
    own.observer.recorder.write_status()
    pids = PRIVATE.allgather(os.getpid())
    found = [each for each in read_all() if each.pid in pids]
    PRIVATE.Barrier()
    return found


def test_ranks_say_what_they_have_done(world: rr.Communicator) -> None:
    """Each has a file of one job, with its steps, samples and calls; it goes with the world."""
    before = [each.samples[-1] for each in said_by_all()]  # tests before this one may have trained
    rr.count(steps=2, samples=10 * (world.rank + 1))
    for _ in range(3):
        rr.allreduce(np.ones(5))
    found = said_by_all()
    assert [each.rank for each in found] == list(range(world.size))
    assert len({each.job for each in found}) == 1
    assert {each.size for each in found} == {world.size}
    for old, each, row in zip(before, found, rows(found), strict=True):
        steps, samples = (each.samples[-1][i] - old[i] for i in (1, 2))
        assert (steps, samples) == (2, 10 * (each.rank + 1))
        (everyone,) = [entry for entry in each.sets if entry.name == "world"]
        assert everyone.ranks is None, "all of them"
        (call,) = everyone.calls
        assert call.collective == "allreduce"
        assert call.ended is not None
        assert row.resident_memory_bytes > 1 << 20
        assert row.error is None
    rr.shutdown()
    PRIVATE.Barrier()
    pids = PRIVATE.allgather(os.getpid())
    assert [each for each in read_all() if each.pid in pids] == []
    PRIVATE.Barrier()
    rr.init()


@pytest.mark.sizes(2, 3, 4)
def test_what_a_rank_waits_for_is_said(world: rr.Communicator) -> None:
    """An operation that not all have submitted, by name, and how long the program has waited for others."""
    engine = rr.global_process_set.engine
    first, target = np.ones(3), np.empty(3)
    operation = Reduction("grad", "sum of grad", rr.SUM, [first], [target])
    before = rr.metrics().waited_s
    if world.rank == 0:
        engine.submit(operation)
    PRIVATE.Barrier()
    found = said_by_all()
    waiting = [[each.name for entry in said.sets for each in entry.operations] for said in found]
    assert waiting == [["grad"]] + [[]] * (world.size - 1)
    if world.rank:
        engine.submit(operation)
    engine.wait(operation)
    assert target.tolist() == [float(world.size)] * 3
    assert rr.metrics().waited_s >= before
