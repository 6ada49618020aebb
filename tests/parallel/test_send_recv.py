"""Reduce, gather, scatter, and arrays from one rank to another, between processes: what `ringreduce` exports."""

from __future__ import annotations

import numpy as np
import pytest
from suites.conformance import expected, sample

import ringreduce as rr


def test_members_of_a_process_set_send_by_its_numbers(world: rr.Communicator) -> None:
    """In a set, ranks, roots and peers are numbered as its members are."""
    rank, size = world.rank, world.size
    members = list(range(size))[-2:]
    some = rr.add_process_set(members) if size > 2 else rr.global_process_set
    if rank in members:
        ours = some.communicator
        mine, out = sample(rank, 1001, "int64"), np.zeros(1001, np.int64)
        last, other = ours.size - 1, (ours.rank + 1) % ours.size
        ours.sendrecv(mine, other, out, other)
        np.testing.assert_array_equal(out, sample(members[other], 1001, "int64"))
        total = ours.reduce(mine, last)
        parts = ours.gather(mine, last)
        again = ours.scatter(parts, last)
        np.testing.assert_array_equal(again, mine)
        if ours.rank == last:
            inputs = [sample(each, 1001, "int64") for each in members]
            np.testing.assert_array_equal(total, expected(inputs, rr.SUM))
            np.testing.assert_array_equal(parts, np.concatenate(inputs))
    if size > 2:
        kept = some.communicator if rank in members else None
        rr.remove_process_set(some)
        if kept is not None:
            with pytest.raises(rr.ShutdownError, match="this process set was removed"):
                kept.barrier()


def test_functions_of_the_package(world: rr.Communicator) -> None:
    """`reduce`, `gather` and `scatter` of the package are those of the world, and its metrics count them."""
    rank, size = world.rank, world.size
    before = rr.metrics().collectives
    root = size - 1
    total, rows = rr.reduce(np.full(5, rank + 1), root), rr.gather(np.full((1, 2), rank), root)
    part = rr.scatter(np.arange(3 * size) if rank == root else None, root)
    assert part.tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
    if rank == root:
        assert total.tolist() == [size * (size + 1) // 2] * 5
        assert rows.tolist() == [[each, each] for each in range(size)]
    else:
        assert total is None
        assert rows is None
    after = rr.metrics().collectives
    for name in ("reduce", "gather", "scatter"):
        assert after[name].calls - (before[name].calls if name in before else 0) == 1
        assert name in rr.explain(1 << 20, collective=name)


@pytest.mark.sizes(2, 3, 4)
def test_arrays_that_overlap_are_refused(world: rr.Communicator) -> None:
    """What comes would overwrite what is still to be sent."""
    array = np.arange(7.0)
    for out in (array, array[2:]):
        with pytest.raises(rr.ConfigError, match="no memory in common"):
            rr.sendrecv(array[: len(out)], (world.rank + 1) % world.size, out, (world.rank - 1) % world.size)


@pytest.mark.sizes(2, 3, 4)
def test_messages_need_no_help_of_their_sender(world: rr.Communicator) -> None:
    """Many small ones are sent before anybody receives, and arrive while their sender does something else."""
    rank, size = world.rank, world.size
    behind, ahead = (rank - 1) % size, (rank + 1) % size
    for number in range(300):
        rr.send(np.full(number % 9, number), ahead, number % 3)
    world.barrier()
    if rank:
        for number in sorted(range(300), key=lambda number: number % 3):
            out = np.zeros(number % 9, np.int64)
            assert rr.recv(out, behind, number % 3) == behind
            assert (out == number).all()
    world.barrier()  # in which rank 0 is until then: it has to do with nobody's messages
    if not rank:
        for number in range(300):
            rr.recv(np.zeros(number % 9, np.int64), behind, number % 3)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("count", [0, 3, 40_001])
def test_messages_that_are_begun_end_in_any_order(world: rr.Communicator, count: int) -> None:
    """All ranks begin to receive from all and to send to all, wait for the last first, and find the senders."""
    ranks = [rank for rank in range(world.size) if rank != world.rank]
    rooms = [np.full(count, -1.0) for _ in ranks]
    coming = [rr.irecv(room, rank, 7) for room, rank in zip(rooms, ranks, strict=True)]
    going = [rr.isend(np.full(count, 10.0 * world.rank + rank), rank, 7) for rank in ranks]
    for message, rank in reversed(list(zip(coming, ranks, strict=True))):
        assert message.wait() == rank
    for message in going:
        message.wait()
        assert message.test()
    for room, rank in zip(rooms, ranks, strict=True):
        assert (room == 10.0 * rank + world.rank).all()
    anyone = rr.irecv(np.zeros(count + 1), tag=8)
    rr.send(np.zeros(count), (world.rank + 1) % world.size, 8)
    with pytest.raises(rr.MismatchError):
        anyone.wait()
    with pytest.raises(rr.ConfigError, match="messages go to other ranks"):
        rr.isend(np.zeros(1), world.rank)
    world.barrier()
