"""The executor: exactly the messages of the schedule, in segments, with the same results however they are cut."""

from __future__ import annotations

import numpy as np
import pytest
from doubles import RecordingMessages

from ringreduce.algorithms import Collective, schedule_for
from ringreduce.algorithms.schedule import Schedule, Step, Transfer
from ringreduce.buffers import DTYPES, kernels_for
from ringreduce.collectives.plans.bound import BlockMemory, BoundSchedule, Link
from ringreduce.common.partition import Partition, segments_of_buffer
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.common.topology import Topology
from ringreduce.testing import run_threads
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.waiting import Waiter

FLOAT32 = DTYPES["float32"]
MESSAGE_ALGORITHMS = ["ring", "double_tree", "recursive_doubling", "halving_doubling", "direct"]


def allreduce(
    inputs: list[np.ndarray], algorithm: str, limit: int = 1 << 30, op: ReduceOp = SUM, runs: int = 1
) -> tuple[list[np.ndarray], list[list[tuple[str, int, int]]]]:
    """Run an allreduce over messages and return each rank's result and what it started; inputs are left alone."""
    size, count = len(inputs), inputs[0].size
    world = MemoryWorld(size)

    def run(rank: int) -> tuple[np.ndarray, list[tuple[str, int, int]]]:
        messages = RecordingMessages(world.messages(rank))
        schedule = schedule_for(Collective.ALLREDUCE, algorithm, rank, Topology.uniform(size, 1))
        mine = inputs[rank].copy()
        plan = BoundSchedule(
            schedule,
            segments_of_buffer(count, schedule.nblocks, limit),
            BlockMemory(mine),
            kernels_for(FLOAT32, op, size),
            Link(rank, Waiter(20.0, crowded=True), "test", messages),
        )
        for _ in range(runs):
            mine[:] = inputs[rank]
            plan.run()
        plan.close()
        return mine, messages.started

    results = run_threads(size, run)
    return [result for result, _ in results], [started for _, started in results]


def random_inputs(size: int, count: int, rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.standard_normal(count).astype(np.float32) for _ in range(size)]


def test_a_ring_of_three_starts_exactly_these_messages() -> None:
    """Each rank sends one block to the next and receives one from the one before, four times; nothing else."""
    _, started = allreduce([np.ones(7, np.float32)] * 3, "ring")
    sizes = [8, 8, 12]  # of the blocks, bytes: 7 elements in three
    assert started == [
        [
            part
            for turn in range(4)
            for part in (
                ("send", (rank + 1) % 3, sizes[(rank - 1 - turn) % 3]),
                ("recv", (rank - 1) % 3, sizes[(rank - 2 - turn) % 3]),
            )
        ]
        for rank in range(3)
    ]


@pytest.mark.parametrize("algorithm", MESSAGE_ALGORITHMS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_empty_blocks_send_nothing(algorithm: str, count: int) -> None:
    """With fewer elements than ranks no message is empty, and without elements there is no message."""
    results, started = allreduce([np.full(count, 2.0, np.float32)] * 4, algorithm)
    assert [result.tolist() for result in results] == [[8.0] * count] * 4
    assert all(nbytes > 0 for each in started for _, _, nbytes in each)
    assert count or started == [[]] * 4


@pytest.mark.parametrize(("limit", "nsegments"), [(100, 1), (99, 2), (50, 2), (10, 10), (1, 100)])
def test_segments_cut_messages(limit: int, nsegments: int) -> None:
    """A buffer of 3 x 100 elements goes in so many segments, no message larger than the limit, the bytes as before."""
    results, started = allreduce([np.ones(300, np.float32)] * 3, "ring", limit)
    assert all((result == 3).all() for result in results)
    for each in started:
        sends = [nbytes for kind, _, nbytes in each if kind == "send"]
        assert len(sends) == 4 * nsegments
        assert max(sends) <= 4 * limit
        assert sum(sends) == 4 * 400


@pytest.mark.parametrize("op", [SUM, ReduceOp.MAX, ReduceOp.PRODUCT], ids=lambda op: op.value)
@pytest.mark.parametrize("algorithm", ["double_tree", "recursive_doubling"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_segment_size_does_not_change_the_bits(
    size: int, algorithm: str, op: ReduceOp, rng: np.random.Generator
) -> None:
    """Where every block is reduced in one order, cutting into segments changes no bit; all ranks agree in any case."""
    inputs = random_inputs(size, 512, rng)
    whole, _ = allreduce(inputs, "recursive_doubling", op=op)
    assert len({result.tobytes() for result in whole}) == 1
    for limit in (64, 33, 7):
        results, _ = allreduce(inputs, algorithm, limit, op)
        assert len({result.tobytes() for result in results}) == 1
        if algorithm == "recursive_doubling":
            assert results[0].tobytes() == whole[0].tobytes()
        np.testing.assert_allclose(results[0], whole[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", MESSAGE_ALGORITHMS)
def test_runs_are_reproducible(algorithm: str, rng: np.random.Generator) -> None:
    """The order in which messages happen to arrive changes no bit: two runs of several streams are equal."""
    inputs = random_inputs(4, 2000, rng)
    first, _ = allreduce(inputs, algorithm, limit=60)
    second, _ = allreduce(inputs, algorithm, limit=60, runs=2)
    assert [result.tobytes() for result in first] == [result.tobytes() for result in second]


def test_a_plan_without_messages_touches_memory_alone() -> None:
    """A schedule of loads and stores runs on views of the peers' memory: two ranks, one after the other."""
    buffers = [np.arange(10, dtype=np.float32), np.full(10, 100, np.float32)]
    for rank in (0, 1):
        schedule = schedule_for(Collective.ALLREDUCE, "two_shot", rank, Topology.uniform(1, 2))
        memory = BlockMemory(buffers[rank], {1 - rank: buffers[1 - rank]})
        segments = [Partition.even(10, schedule.nblocks).segment]
        kernels = kernels_for(FLOAT32, SUM, 2)
        for call in BoundSchedule(schedule, segments, memory, kernels, Link(rank, Waiter(1.0), "test")).calls:
            call()
    assert [buffer.tolist() for buffer in buffers] == [[100.0 + index for index in range(10)]] * 2


def test_loads_that_are_reduced_are_reduced_by_rank() -> None:
    """What would only be copied is refused before anything runs, rather than lost."""
    whole = range(1)
    step = Step(loads=(Transfer(1, whole, reduce=True),))
    memory = BlockMemory(np.zeros(4, np.float32), {1: np.ones(4, np.float32)})
    with pytest.raises(AssertionError, match="reduced by rank"):
        BoundSchedule(
            Schedule(1, (step,)), [(slice(0, 4),)], memory, kernels_for(FLOAT32, SUM, 2), Link(0, Waiter(1.0), "test")
        )


def test_requests_are_given_back() -> None:
    """A plan that is closed has freed each request that it described, once."""

    class Counting(RecordingMessages):
        described = freed = 0

        def send(self, data: np.ndarray, peer: int, tag: int) -> object:
            self.described += 1
            return super().send(data, peer, tag)

        def recv(self, data: np.ndarray, peer: int, tag: int) -> object:
            self.described += 1
            return super().recv(data, peer, tag)

        def free(self, requests: list[object]) -> None:
            self.freed += len(requests)
            self._inner.free(requests)

    messages = Counting(MemoryWorld(3).messages(0))
    memory, kernels = BlockMemory(np.ones(30, np.float32)), kernels_for(FLOAT32, SUM, 3)
    for name in MESSAGE_ALGORITHMS:
        schedule = schedule_for(Collective.ALLREDUCE, name, 0, Topology.uniform(3, 1))
        segments = segments_of_buffer(30, schedule.nblocks, 2)
        BoundSchedule(schedule, segments, memory, kernels, Link(0, Waiter(1.0), "test", messages)).close()
    assert messages.described == messages.freed > 0
