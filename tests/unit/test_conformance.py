"""The conformance suites on ranks that are threads: shared memory, messages, and both."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from doubles import DamagingMessages
from suites.conformance import check_choices, check_collectives, check_messages

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import Config
from ringreduce.common.errors import TransportError
from ringreduce.testing import caught, run_ranks, run_threads
from ringreduce.transport.checked import checked
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages


def as_sent(messages: Messages) -> Messages:
    return messages


@pytest.mark.parametrize("wrap", [as_sent, checked])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_memory_messages_conform(size: int, wrap: Callable[[Messages], Messages]) -> None:
    """Threads exchange messages and notes as every transport must, also with a checksum behind each message."""
    world = MemoryWorld(size)
    run_threads(size, lambda rank: check_messages(wrap(world.messages(rank))), on_error=world.meeting.abort)


@pytest.mark.parametrize(("size", "node_size", "wrap"), [(3, None, as_sent), (5, 2, as_sent), (3, 1, checked)])
def test_collectives_conform(size: int, node_size: int | None, wrap: Callable[[Messages], Messages]) -> None:
    """Every collective, algorithm, dtype and op gives the known answer, also where tests/parallel has too few ranks."""
    config = Config(timeout_s=30.0, segment_nbytes=64 << 10)
    run_ranks(size, check_collectives, node_size=node_size, config=config, wrap=wrap)


@pytest.mark.parametrize("damaged", [0, 1, 5])
def test_a_message_that_has_changed_is_an_error(damaged: int) -> None:
    """One flipped bit makes the call fail on the rank that has received it; unchecked, the result is wrong."""

    def reduced(communicator: Communicator) -> object:
        return communicator.allreduce(np.full(100_003, 1.0), algorithm="ring")

    def damaging(messages: Messages) -> Any:
        return DamagingMessages(messages, damaged) if messages.rank == 1 else messages

    config = Config(timeout_s=5.0, segment_nbytes=64 << 10)
    unchecked = run_ranks(3, reduced, node_size=1, config=config, wrap=damaging)
    assert not all(np.array_equal(each, np.full(100_003, 3.0)) for each in unchecked)
    errors = run_ranks(
        3, partial(caught, reduced), node_size=1, config=config, wrap=lambda inner: checked(damaging(inner))
    )
    assert isinstance(errors[1], TransportError)
    assert "have changed on their way" in str(errors[1])
    assert "CRC-32" in str(errors[1])


def test_what_is_said_is_what_runs() -> None:
    """`choose` and `explain` name the algorithm and the path of every call: here on two full nodes."""
    run_ranks(4, check_choices, node_size=2, config=Config(timeout_s=30.0, segment_nbytes=64 << 10))
