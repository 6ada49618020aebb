"""The conformance suites on ranks that are threads: shared memory, messages, and both."""

import pytest

from ringreduce.communicator import Communicator
from ringreduce.config import Config
from ringreduce.testing import check_choices, check_collectives, check_messages, run_ranks, run_threads
from ringreduce.transport.memory import MemoryWorld


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_memory_messages_conform(size: int) -> None:
    """Threads exchange messages and notes as every transport must."""
    world = MemoryWorld(size)
    run_threads(size, lambda rank: check_messages(world.messages(rank)), on_error=world.meeting.abort)


@pytest.mark.parametrize(("size", "node_size"), [(1, None), (2, None), (3, None), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_collectives_conform(size: int, node_size: int | None) -> None:
    """Every collective, algorithm, dtype and op gives the known answer, on one node and on several."""

    def check(communicator: Communicator) -> None:
        check_collectives(communicator)

    run_ranks(size, check, node_size=node_size, config=Config(timeout_s=30.0, segment_nbytes=64 << 10))


@pytest.mark.parametrize(("size", "node_size"), [(1, None), (2, None), (3, None), (2, 1), (3, 1), (4, 2), (3, 2)])
def test_what_is_said_is_what_runs(size: int, node_size: int | None) -> None:
    """`choose` and `explain` name the algorithm and the path of every call, whatever its elements, op and size."""
    run_ranks(size, check_choices, node_size=node_size, config=Config(timeout_s=30.0, segment_nbytes=64 << 10))
