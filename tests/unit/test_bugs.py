"""Bugs that were found, each told as a story; what they broke must hold for ever."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.testing import run_ranks
from ringreduce.transport.agreement import Agreement
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.shared import Arena, Block, MemfdSegments, PrivateSegments
from ringreduce.transport.waiting import Waiter


def test_a_bound_call_outlives_its_plan() -> None:
    """One rank keeps so many buffers that its plan for the first is dropped; the call on it is the same as before.

    The call was bound to the plan, which went on with its views gone, in step with nobody.
    """

    def body(communicator: rr.Communicator) -> float:
        first = communicator.empty(5000)
        kept = []
        for _ in range(300):
            first[:] = communicator.rank + 1
            communicator.allreduce(first, out=first)
            other = communicator.empty(5000)
            other[:] = communicator.rank + 1
            communicator.allreduce(other, out=other)
            if communicator.rank == 1:
                kept.append(other)
        return float(first.min() + first.max())

    assert run_ranks(2, body) == [6.0, 6.0]


def test_arena_survives_arrays_that_die_at_any_time() -> None:
    """Arrays dropped by the collector or by another thread never make two live arrays share memory.

    The finalizer changed the list of holes while `allocate` was reading it.
    """
    arena = Arena(PrivateSegments())
    stop = threading.Event()
    handed_over: list[object] = []

    def drop() -> None:
        while not stop.is_set():
            if handed_over:
                handed_over.pop()

    thread = threading.Thread(target=drop)
    thread.start()
    live: list[np.ndarray] = []
    rng = np.random.default_rng(1)
    try:
        for turn in range(300):
            array = arena.array(int(rng.integers(1, 20_000)))
            array[:] = turn % 251
            cycle = [arena.array(100)]
            cycle.append(cycle)
            del cycle
            live.append(array)
            if len(live) > 20:
                handed_over.append(live.pop(int(rng.integers(len(live)))))
            if turn % 50 == 0:
                gc.collect()
            for each in live:
                assert (each == each[0]).all()
            spans = sorted((each.__array_interface__["data"][0], each.nbytes) for each in live)
            assert all(start + nbytes <= after for (start, nbytes), (after, _) in pairwise(spans))
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("shared", [True, False])
def test_arena_gives_free_memory_back_when_it_grows(shared: bool) -> None:
    """Ten arrays of growing size, one alive at a time, do not add up."""
    arena = Arena(MemfdSegments({0: 0}) if shared else PrivateSegments())
    resident = 0
    for number in range(10):
        array = arena.array((70 + number) << 20)
        array[::4096] = 1
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if number == 0 else resident
        del array
    assert int(Path("/proc/self/statm").read_text().split()[1]) * 4096 < resident + (200 << 20)
    arena.close()


def test_a_late_answer_is_no_mismatch() -> None:
    """A rank that hears only after thousands of calls that a peer was once worried says nothing about that old call."""
    world = MemoryWorld(2)
    slow, other = (Agreement(world.messages(rank), Waiter(1.0)) for rank in (0, 1))
    slow._known.add("call")
    other._known.add("call")
    other.enter("call")
    for _ in range(other.patience):
        other.watch()
    for _ in range(5000):
        slow.enter("call")
    slow.watch()
    other.watch()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_go_into_views_of_any_stride(dtype: str) -> None:
    """Reversed views are reduced in place, for 16-bit floats too, whose kernels take no negative strides."""

    def body(communicator: rr.Communicator) -> list[float]:
        array = np.arange(5).astype(dtype)
        communicator.allreduce(array[::-1], out=array[::-1])
        return array.tolist()

    assert run_ranks(2, body) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_rows_of_ragged_calls_leave_nothing_behind() -> None:
    """An allgather with other rows each time is one signature, not ever more of them."""

    def body(communicator: rr.Communicator) -> int:
        for rows in range(20):
            communicator.allgather(np.ones((rows + communicator.rank, 2)))
        return len(communicator._signatures)

    assert run_ranks(2, body) == [1, 1]


def test_blocks_can_be_released_by_hand() -> None:
    """Releasing a block makes its place free at once."""
    arena = Arena(PrivateSegments())
    block: Block = arena.allocate(5000)
    place = block.location
    arena.release(block)
    assert arena.allocate(5000).location == place


def test_a_dropped_array_is_not_kept_by_the_arena() -> None:
    """Memory that comes back is only a block: the array itself is gone."""
    arena = Arena(PrivateSegments())
    array = arena.array(100)
    gone = weakref.ref(array.base)
    del array
    assert gone() is None


@pytest.mark.parametrize("count", [16_383, 16_384, 65_537])
@pytest.mark.parametrize("algorithm", [None, "one_shot"])
def test_averages_of_integers_may_outgrow_the_mailbox(count: int, algorithm: str | None) -> None:
    """They are summed in 64 bits, which are eight times as many bytes as those by which the algorithm was chosen."""

    def check(communicator: rr.Communicator) -> None:
        mine = np.full(count, communicator.rank + 1, np.int8)
        assert (communicator.allreduce(mine, "average", algorithm=algorithm) == 2).all()

    run_ranks(3, check)
