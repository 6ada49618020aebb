"""Worlds and process sets of processes: how they are made, who is named if that fails, handlers and threads."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.engine import Reduction
from ringreduce.testing import caught
from ringreduce.transport import mpi, mpi_job, mpi_messages
from ringreduce.transport.waiting import Waiter

PRIVATE = MPI.COMM_WORLD.Dup()
RANK, SIZE = PRIVATE.rank, PRIVATE.size


def total(process_set: rr.ProcessSet) -> float:
    """Return the sum of the members' world ranks, each plus one."""
    return float(process_set.communicator.allreduce(np.full(1, RANK + 1.0))[0])


@pytest.mark.sizes(2, 3, 4)
def test_sets_that_have_no_rank_in_common_are_made_in_one_go() -> None:
    """Each rank adds the set that it belongs to; all get numbers that agree, and go in one go, too."""
    mine = [rank for rank in range(SIZE) if rank % 2 == RANK % 2]
    made = rr.add_process_set(mine)
    assert made.ranks == mine
    assert total(made) == sum(rank + 1 for rank in mine)
    everyone = PRIVATE.allgather((made.process_set_id, tuple(mine)))
    assert len({number for number, _ in everyone}) == len({ranks for _, ranks in everyone}) == 2
    assert rr.remove_process_set(made)
    again = rr.add_process_set(mine)
    assert total(again) == sum(rank + 1 for rank in mine)
    assert rr.remove_process_set(again)


@pytest.mark.sizes(2, 3, 4)
def test_collectives_of_a_process_set() -> None:
    """Its members alone make them; roots have the numbers of the world; wrong ones are refused on all members."""
    ranks = list(range(1, SIZE))
    members = rr.add_process_set(ranks)
    if RANK == 0:
        assert "rank 0 does not belong to the process set" in str(caught(rr.allreduce, np.ones(3), process_set=members))
    else:
        place, count, last = RANK - 1, SIZE - 1, SIZE - 1
        mine = rr.empty(count * 3, np.float64, process_set=members)
        mine[:] = np.arange(count * 3) + 100 * RANK
        parts = {rank: (np.arange(count * 3) + 100 * rank).reshape(count, 3) for rank in ranks}
        total = sum(parts.values()).reshape(-1)
        everything = np.concatenate([parts[rank].reshape(-1) for rank in ranks])
        same = np.testing.assert_array_equal
        same(rr.allreduce(mine, process_set=members), total)
        same(rr.allreduce(mine, deterministic=True, process_set=members), total)
        same(rr.reduce_scatter(mine, process_set=members), total[place * 3 : place * 3 + 3])
        same(rr.allgather(mine, process_set=members), everything)
        same(rr.broadcast(mine, last, process_set=members), parts[last].reshape(-1))
        same(rr.alltoall(mine, process_set=members), np.concatenate([parts[rank][place] for rank in ranks]))
        for call, wanted in ((rr.reduce, total), (rr.gather, everything)):
            result = call(mine, last, process_set=members)
            same(result, wanted) if last == RANK else same(result is None, True)
        same(rr.scatter(mine, last, process_set=members), parts[last][place])
        rr.barrier(members)
        assert "rank 0 does not belong" in str(caught(rr.broadcast, mine, 0, process_set=members))
    assert "process_set must be a ProcessSet" in str(caught(rr.allreduce, np.ones(3), process_set=ranks))
    assert rr.allreduce(np.ones(3))[0] == SIZE
    assert rr.remove_process_set(members)


@pytest.mark.sizes(3, 4)
def test_sets_that_do_not_fit_together_are_a_mismatch() -> None:
    """Sets that overlap, or of which a rank is no member, are refused on all ranks, and the next one works."""
    error = caught(rr.add_process_set, [0, 1] if RANK else [0, 2])
    assert isinstance(error, rr.MismatchError)
    assert error.values[0] == "add_process_set([0, 2])"
    made = rr.add_process_set([0, 2])
    assert made.included() == (RANK in (0, 2))
    assert rr.remove_process_set(made)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("wrong", [[0, 99], [-1], [], "none"])
def test_a_set_that_one_rank_cannot_make(wrong: object) -> None:
    """It raises its own error, the others hear of it, and all can make another one."""
    error = caught(rr.add_process_set, wrong if RANK == 0 else [1])
    assert isinstance(error, rr.ConfigError if RANK == 0 else rr.MismatchError)
    if RANK != 0:
        assert error.values[0].startswith("add_process_set(refused: ")
    made = rr.add_process_set([1])
    assert rr.remove_process_set(made)


@pytest.mark.sizes(2, 3, 4)
def test_nobody_waits_for_a_rank_that_abandons_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_PARTING_S", 3600.0)
    messages = mpi_messages.MpiMessages(PRIVATE, Waiter(20.0))
    if RANK == SIZE - 1:
        messages.abandon()
    else:
        messages.close()


def test_ranks_that_are_not_there_are_in_no_set() -> None:
    """To remove a set with some of them removes nothing, on any rank."""
    assert rr.remove_process_set(rr.ProcessSet([0, 7])) is False
    assert rr.remove_process_set(rr.ProcessSet([7])) is False


@pytest.mark.sizes(2, 3, 4)
def test_a_trace_that_a_rank_begins_at_the_second_try_is_that_of_the_others(tmp_path: Path) -> None:
    """And the next one is as well: no rank begins the file anew that another one writes to."""
    folder = Path(PRIVATE.bcast(str(tmp_path)))
    path = folder / "trace.json"
    for _ in range(2):
        if RANK == SIZE - 1:
            assert isinstance(caught(rr.start_timeline, folder / "none" / "trace.json"), rr.ConfigError)
        rr.start_timeline(path)
        rr.barrier()
        rr.barrier()
        rr.stop_timeline()
        PRIVATE.Barrier()
        assert {event["pid"] for event in json.loads(path.read_text())} == set(range(SIZE))
        PRIVATE.Barrier()


@pytest.mark.sizes(2, 3, 4)
def test_starting_a_second_time_registers_what_is_new() -> None:
    """`init` with sets that are there already lets the new objects stand for them; it adds the others."""
    first, second = rr.ProcessSet([0]), rr.ProcessSet([0])
    rr.init(process_sets=[first])
    rr.init(process_sets=[second])
    assert first.process_set_id == second.process_set_id is not None
    other = rr.ProcessSet(range(1, SIZE))
    rr.init(process_sets=[second, other])
    for each in (first, second, other):
        assert each.included() == (RANK in each.ranks)
        if each.included():
            assert total(each) == sum(rank + 1 for rank in each.ranks)
    assert rr.remove_process_set(first)
    assert second.process_set_id is None
    assert rr.remove_process_set(other)


@pytest.mark.sizes(3, 4)  # with 2, the set of both is the world
def test_a_set_can_be_given_the_number_of_another() -> None:
    """It stands for that one as long as there is one; a number that no set has is an error where it is used."""
    first = rr.add_process_set([0, 1])
    other = rr.ProcessSet([1])
    other.process_set_id = first.process_set_id
    assert (other.ranks, other.included()) == ([0, 1], RANK < 2)
    if other.included():
        assert total(other) == 3
    with pytest.raises(rr.ConfigError, match="is registered as"):
        other.process_set_id = 0
    assert rr.remove_process_set(first)
    assert other.process_set_id is None
    other.process_set_id = 99
    assert other.process_set_id == 99
    for use in (other.included, other.size, other.rank, lambda: total(other)):
        with pytest.raises(rr.ConfigError, match="there is no process set 99"):
            use()
    other.process_set_id = None
    with pytest.raises(rr.ConfigError, match="is not registered"):
        other.size()


def test_many_threads_may_start_the_world(no_world: None) -> None:
    """One of them does, the others wait for it, and all find it started."""
    sizes: list[int] = []

    def start() -> None:
        rr.init()
        sizes.append(rr.size())

    threads = [threading.Thread(target=start) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sizes == [SIZE] * 8


@pytest.mark.sizes(3, 4)
def test_a_world_of_some_ranks(no_world: None) -> None:
    """The others may make worlds of their own; ranks are counted anew, and who is no member is told."""
    mine = [rank for rank in range(SIZE) if rank % 2 == RANK % 2]
    with pytest.raises(rr.ConfigError, match="ranks of the job"):
        rr.init(comm=[(RANK + 1) % SIZE])
    rr.init(comm=mine)
    assert (rr.rank(), rr.size()) == (mine.index(RANK), len(mine))
    assert rr.allreduce(np.ones(2)).tolist() == [len(mine)] * 2


@pytest.mark.sizes(2, 3, 4)
def test_a_world_of_some_ranks_has_a_time_limit(no_world: None) -> None:
    """The ranks that do not come are named, also those of a communicator."""
    if RANK == SIZE - 1:
        PRIVATE.Barrier()
        return
    error = caught(mpi_job.subworld, range(SIZE), Waiter(0.2))
    assert isinstance(error, rr.CollectiveTimeoutError)
    assert f"rank {SIZE - 1} to call init" in str(error)
    PRIVATE.Barrier()


@pytest.mark.sizes(3, 4)
def test_an_exchange_that_is_given_up_names_who_is_missing() -> None:
    """All that have come say the same, who comes late hears of it, and the next exchange is not taken for that one."""
    messages = mpi_messages.MpiMessages(PRIVATE, Waiter(20.0))
    messages._waiter.timeout_s = 0.3
    last = RANK == SIZE - 1
    if last:
        PRIVATE.Barrier()
    error = caught(messages.exchange, b"x")
    assert isinstance(error, rr.CollectiveTimeoutError)
    assert (f"for rank {SIZE - 1} to join" if not last else f"ranks 0-{SIZE - 2} had stopped waiting") in str(error)
    if not last:
        PRIVATE.Barrier()
    with pytest.raises(rr.TransportError, match="an earlier exchange"):
        messages.exchange(b"y")
    messages.close()


# ---- signal handlers and threads ----


class Interrupting(rr.Instrument):
    """Sends this process a signal in the midst of every collective."""

    def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.spread
@pytest.mark.parametrize("name", ["allreduce", "allgather", "reduce_scatter", "broadcast", "alltoall", "barrier"])
def test_a_handler_that_communicates_is_told_so(world: rr.Communicator, name: str) -> None:
    """At once, where it interrupts a collective; and nothing that is under way is harmed."""
    errors: list[rr.RingReduceError | None] = []
    arguments = [] if name == "barrier" else [np.ones(SIZE)]
    before = signal.signal(signal.SIGUSR1, lambda *_: errors.append(caught(getattr(world, name), *arguments)))
    instrument = Interrupting()
    world.instruments.add(instrument)
    try:
        assert world.allreduce(np.ones(3)).tolist() == [SIZE] * 3
    finally:
        world.instruments.remove(instrument)
        signal.signal(signal.SIGUSR1, before)
    assert all(isinstance(error, rr.ConfigError) for error in errors)
    assert errors
    assert "sets a flag" in str(errors[0])
    assert world.allreduce(np.ones(3)).tolist() == [SIZE] * 3


def test_a_second_thread_is_told_so(world: rr.Communicator) -> None:
    """While one thread is in a collective, another one's raises at once, and the first goes on."""
    errors: list[rr.RingReduceError | None] = []

    class Meanwhile(rr.Instrument):
        def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
            thread = threading.Thread(target=lambda: errors.append(caught(world.allreduce, np.ones(3))))
            thread.start()
            thread.join()

    instrument = Meanwhile()
    world.instruments.add(instrument)
    try:
        assert world.allreduce(np.ones(3)).tolist() == [SIZE] * 3
    finally:
        world.instruments.remove(instrument)
    (error,) = errors
    assert isinstance(error, rr.ConfigError)
    assert "one call at a time" in str(error)


# ---- ends ----


def test_worlds_that_have_ended_leave_no_descriptors(no_world: None) -> None:
    """Nor memory that they shared: all is given back when a world ends, not when Python's collector comes by."""

    def live() -> int:
        rr.init()
        assert rr.allreduce(np.ones(3)).tolist() == [SIZE] * 3
        operation = Reduction("some", "sum of some", rr.SUM, [np.ones(5)], [target := np.empty(5)])
        engine = rr.global_process_set.engine
        engine.submit(operation)
        engine.wait(operation)
        assert target.tolist() == [SIZE] * 5
        if SIZE > 1:
            made = rr.add_process_set([0])
            if made.included():
                assert total(made) == 1
            rr.remove_process_set(made)
        rr.shutdown()
        return len(os.listdir("/proc/self/fd"))

    gc.collect()
    gc.disable()
    try:
        live()  # opens what this process keeps
        before = live()
        assert [live() for _ in range(5)] == [before] * 5
    finally:
        gc.enable()
