"""Persistent collectives: planned once, with the errors of the call, and run again and again."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

import ringreduce as rr


@pytest.mark.spread("count")
@pytest.mark.parametrize("count", [1, 7, 1021, 200_003])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_plan_is_run_again_and_again(world: rr.Communicator, count: int, in_place: bool) -> None:
    """Each run sums up what the arrays hold then, into the same result; also when it is started and waited for."""
    rank, size = world.rank, world.size
    array = np.empty(count)
    with rr.allreduce_init(array, out=array if in_place else None) as plan:
        for turn in range(5):
            array[:] = np.arange(count) * (turn + 1) + rank
            if turn % 2:
                plan.start()
                result = plan.wait()
            else:
                result = plan.run()
            assert result is plan.result
            assert (result is array) == in_place
            np.testing.assert_array_equal(result, np.arange(count) * (turn + 1) * size + size * (size - 1) / 2)


def test_every_collective_that_can_be_planned(world: rr.Communicator) -> None:
    """Results are NumPy's, run after run, where ranks give different numbers of rows, too."""
    rank, size = world.rank, world.size
    rows, whole = np.empty((rank + 1, 3)), np.empty((2 * size + 1, 2))
    equal, sent = np.empty((2 * size, 2)), np.empty(5)
    plans = {
        "allgather": rr.allgather_init(rows),
        "reduce_scatter": rr.reduce_scatter_init(whole, "max"),
        "alltoall": rr.alltoall_init(equal),
        "broadcast": rr.broadcast_init(sent, root=size - 1),
    }
    for turn in range(3):
        rows[:], whole[:], sent[:] = rank + turn, np.arange(2)[None] + rank * turn, rank * 10 + turn
        equal[:] = np.repeat(np.arange(size), 2)[:, None] + 100 * rank + turn
        got = {name: plan.run() for name, plan in plans.items()}
        gathered = np.concatenate([np.full((peer + 1, 3), peer + turn) for peer in range(size)])
        np.testing.assert_array_equal(got["allgather"], gathered)
        most = np.tile(np.arange(2) + (size - 1) * turn, (2 * size + 1, 1))
        np.testing.assert_array_equal(got["reduce_scatter"], np.array_split(most, size)[rank])
        received = np.repeat(np.arange(size) * 100.0 + rank + turn, 2)[:, None] * np.ones(2)
        np.testing.assert_array_equal(got["alltoall"], received)
        np.testing.assert_array_equal(got["broadcast"], np.full(5, (size - 1) * 10 + turn))
        assert all(plan.result is got[name] for name, plan in plans.items())


def test_some_ranks_give_an_array_for_the_result(world: rr.Communicator) -> None:
    """It is up to each rank, as in the call; one of the wrong size is an error on all ranks, and the world goes on."""
    rank, size = world.rank, world.size
    rows, equal, total = np.full(rank + 1, float(rank)), np.arange(size) + 10.0 * rank, size * (size + 1) // 2
    out = np.empty(total) if rank == 0 else None
    gather, exchange = rr.allgather_init(rows, out=out), rr.alltoall_init(equal, out=None if rank == 0 else equal)
    for turn in range(3):
        rows[:], equal[:] = rank + turn, np.arange(size) + 10 * rank + turn
        gathered = np.concatenate([np.full(peer + 1, peer + turn) for peer in range(size)])
        np.testing.assert_array_equal(gather.run(), gathered)
        np.testing.assert_array_equal(exchange.run(), np.arange(size) * 10 + rank + turn)
    assert gather.result is out or rank != 0
    with pytest.raises(rr.MismatchError, match=rf"allgather_init.*out has {total + 1} rows, and the result {total}"):
        rr.allgather_init(rows, out=np.empty(total + 1) if rank == 0 else None)
    assert rr.allreduce(1) == size


@pytest.mark.sizes(2, 3, 4)
def test_plans_that_differ_are_an_error_on_all_ranks(world: rr.Communicator) -> None:
    """They are compared when they are made, and the world goes on."""
    rank = world.rank
    with pytest.raises(rr.MismatchError, match="allreduce_init"):
        rr.allreduce_init(np.ones(3 + (rank == 1)))
    with pytest.raises(rr.MismatchError if rank != 1 else rr.UnsupportedBufferError):
        rr.allreduce_init(np.ones(3) if rank != 1 else 3.0)
    assert rr.allreduce(1) == rr.size()


def test_misuse_is_an_error_that_says_what_to_do(world: rr.Communicator) -> None:
    """A plan runs once at a time, and not after it was closed; what was not started is not waited for."""
    plan = rr.allreduce_init(np.ones(4))
    with pytest.raises(rr.ConfigError, match="was not started"):
        plan.wait()
    plan.start()
    with pytest.raises(rr.ConfigError, match="is under way; call wait"):
        plan.run()
    with pytest.raises(rr.ConfigError, match="is under way; call wait"):
        plan.start()
    assert plan.wait().tolist() == [world.size] * 4
    plan.close()
    plan.close()
    with pytest.raises(rr.ConfigError, match="is closed"):
        plan.run()


def test_a_closed_plan_holds_no_array(world: rr.Communicator) -> None:
    """Its arrays are freed with their last other reference."""
    array = np.ones(1000)
    plan, watched = rr.allreduce_init(array, out=array), weakref.ref(array)
    plan.run()
    plan.close()
    del array
    gc.collect()
    assert watched() is None
