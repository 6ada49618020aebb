"""The collectives between processes: the conformance suite, and what only real processes show."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI
from suites.conformance import (
    assert_close,
    check_choices,
    check_collectives,
    check_messages,
    expected,
    ops_of,
    sample,
)
from whole_numbers import check_averages

import ringreduce as rr
from ringreduce.collectives import Context
from ringreduce.common.config import Config
from ringreduce.common.processes import host_name
from ringreduce.transport.checked import checked
from ringreduce.transport.mpi_messages import MpiMessages
from ringreduce.transport.shared.node import join
from ringreduce.transport.shared.segments import MemfdSegments
from ringreduce.transport.waiting import Waiter


def communicator(**settings: object) -> rr.Communicator:
    """Return a communicator of its own over all ranks, with other settings than the world's."""
    config = Config(timeout_s=30.0, **settings)  # type: ignore[arg-type]
    waiter = Waiter(config.timeout_s)
    messages = MpiMessages(MPI.COMM_WORLD, waiter)
    return rr.Communicator(
        Context(messages, waiter, join(messages, waiter, config, host_name(), MemfdSegments), config)
    )


def test_mpi_messages_conform() -> None:
    """Messages and notes over MPI behave as every transport must."""
    messages = MpiMessages(MPI.COMM_WORLD, Waiter(30.0, crowded=True))
    check_messages(messages)
    messages.renew()
    check_messages(messages)
    check_messages(checked(messages))
    messages.close()


def test_collectives_conform_on_one_node(world: rr.Communicator) -> None:
    """Every collective, algorithm, dtype and op gives the known answer in shared memory and over MPI."""
    check_collectives(world)


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("node_size", [1, 2])
def test_collectives_conform_on_several_nodes(node_size: int) -> None:
    """The same with nodes of one and of two ranks: messages alone, and hierarchies (uneven ones at three ranks)."""
    several = communicator(node_size=node_size, segment_nbytes=64 << 10)
    assert several.topology.single_node == (several.size <= node_size)
    check_collectives(several)
    several.close()


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
@pytest.mark.parametrize("node_size", [None, 1, 2])
def test_averages_of_long_integers(node_size: int | None, dtype: str) -> None:
    """They are exact whatever the sum, by every algorithm, the MPI library's own among them."""
    ours = communicator(node_size=node_size)
    check_averages(ours, dtype, counts=(5, 4099))
    ours.close()


@pytest.mark.sizes(2)
@pytest.mark.parametrize("node_size", [None, 1])
def test_what_is_said_is_what_runs(node_size: int | None) -> None:
    """`choose` and `explain` name the algorithm and the path of every call, the MPI library's own among them."""
    ours = communicator(node_size=node_size)
    check_choices(ours)
    ours.close()


@pytest.mark.sizes(2, 3)
def test_ranks_work_without_shared_memory() -> None:
    """With shared memory switched off everything goes over MPI, and ranks still know that they share a machine."""
    alone = communicator(shared_memory=False)
    assert len(alone.topology.nodes) == alone.size
    assert alone.hosts.single_node
    check_collectives(alone, algorithms=False)
    alone.close()


@pytest.mark.parametrize("op", ["sum", "average"])
def test_shared_and_private_buffers_meet(world: rr.Communicator, op: str) -> None:
    """Some ranks bring a communication buffer and others an array of their own: the same call, the same bits."""
    for count in (5, 70_001, 1_000_003):
        inputs = [sample(rank, count, "float32") for rank in range(world.size)]
        mine = world.empty(count) if world.rank % 2 else np.empty(count, np.float32)
        for _ in range(2):
            mine[:] = inputs[world.rank]
            world.allreduce(mine, op, out=mine)
            np.testing.assert_allclose(mine, expected(inputs, rr.ReduceOp.parse(op)), rtol=1e-6)


def test_a_buffer_that_moves_is_noticed(world: rr.Communicator) -> None:
    """A rank that frees its buffer and gets another place in the arena is found there in the next call."""
    for turn in range(4):
        padding = [world.empty(4096 * (1 + world.rank)) for _ in range(turn)]
        buffer = world.empty(100_000)
        buffer[:] = sample(world.rank, 100_000, "float32", turn)
        world.allreduce(buffer, out=buffer)
        np.testing.assert_array_equal(
            buffer, expected([sample(rank, 100_000, "float32", turn) for rank in range(world.size)], rr.SUM)
        )
        del padding, buffer


def test_float16_sums_are_rounded_once(world: rr.Communicator, rng: np.random.Generator) -> None:
    """Random float16 data gives the float32 sum in rank order, rounded to float16 once, on every path."""
    mine = rng.standard_normal(50_001).astype(np.float16)
    everyone = world.allgather(mine).reshape(world.size, -1)
    total = everyone[0].astype(np.float32)
    for each in everyone[1:]:
        total = total + each.astype(np.float32)
    for count in (100, 50_001):
        np.testing.assert_array_equal(world.allreduce(mine[:count].copy()), total[:count].astype(np.float16))


def test_random_sums_have_equal_bits_on_all_ranks(world: rr.Communicator, rng: np.random.Generator) -> None:
    """Whatever the algorithm, every rank holds the same bits, near the float64 sum."""
    mine = rng.standard_normal(30_011).astype(np.float32)
    exact = world.allgather(mine[None]).astype(np.float64).sum(axis=0)
    for algorithm in [None, *world.algorithms()]:
        result = world.allreduce(mine, algorithm=algorithm)
        assert (world.allgather(result[None].view(np.uint32)) == result.view(np.uint32)).all(), algorithm
        np.testing.assert_allclose(result, exact, rtol=0, atol=world.size * 2.0**-22)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float64", "bfloat16", "bool"])
def test_prefixes_are_those_of_the_ranks_before(world: rr.Communicator, dtype: str) -> None:
    """`scan` with this rank's own terms, `exscan` without: in place and not, of odd counts, in every operation."""
    for count in (0, 1, 33, 40_001):
        inputs = [sample(rank, count, dtype) for rank in range(world.size)]
        for op in ops_of(dtype):
            if op is rr.AVERAGE:
                continue
            mine = inputs[world.rank].copy()
            assert_close(rr.scan(mine, op), expected(inputs[: world.rank + 1], op))
            before = rr.exscan(mine, op, out=mine)
            assert before is mine
            assert_close(mine, expected(inputs[: world.rank], op) if world.rank else inputs[0])


def test_prefixes_and_operations_are_those_of_mpi(world: rr.Communicator) -> None:
    """The same numbers by mpi4py, where it has them."""
    mine = np.arange(101, dtype=np.int64) * (world.rank + 3) % 17
    for op in (rr.SUM, rr.MIN, rr.MAX, rr.PRODUCT, rr.BAND, rr.BOR, rr.BXOR, rr.LAND, rr.LOR, rr.LXOR):
        theirs = getattr(MPI, {rr.PRODUCT: "PROD"}.get(op, op.value.upper()))
        found = np.empty_like(mine)
        MPI.COMM_WORLD.Allreduce(mine, found, theirs)
        assert np.array_equal(rr.allreduce(mine, op), found), op
        MPI.COMM_WORLD.Scan(mine, found, theirs)
        assert np.array_equal(rr.scan(mine, op), found), op
        MPI.COMM_WORLD.Exscan(mine, found, theirs)
        before = rr.exscan(mine, op)
        assert world.rank == 0 or np.array_equal(before, found), op


def test_wrong_prefixes_are_refused_on_all_ranks(world: rr.Communicator) -> None:
    """An average, floats bit by bit, an output of another kind; and calls that differ."""
    with pytest.raises(rr.ConfigError, match="takes no average"):
        rr.scan(np.ones(3), rr.AVERAGE)
    with pytest.raises(rr.UnsupportedBufferError, match="band takes integers and bool, got float64"):
        rr.scan(np.ones(3), "band")
    with pytest.raises(rr.UnsupportedBufferError, match="exscan of"):
        rr.exscan(np.ones(3), out=np.ones(4))
    if world.size > 1:
        with pytest.raises(rr.MismatchError):
            rr.scan(np.ones(3 + world.rank))
    assert rr.scan(np.ones(1)) == world.rank + 1
