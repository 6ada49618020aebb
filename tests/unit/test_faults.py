"""Transports that fail or lose messages: typed errors that name what was going on, and no collective after them."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest
from doubles import FailingMessages

import ringreduce as rr
from ringreduce.common.config import Config
from ringreduce.testing import caught, run_ranks
from ringreduce.transport.messages import Messages

T = TypeVar("T")
COUNT = 30_000
NAMES = ["allreduce", "reduce", "reduce_scatter", "allgather", "broadcast", "alltoall", "gather", "scatter"]


def call(communicator: rr.Communicator, name: str) -> object:
    return getattr(communicator, name)(np.ones(COUNT, np.float32))


def failing(rank: int, after: int, *, silently: bool = False):
    """Return what makes the messages of one rank fail after so many starts."""

    def wrap(messages: Messages) -> Messages:
        return FailingMessages(messages, after, silently=silently) if messages.rank == rank else messages

    return wrap


def staying(size: int, function: Callable[[rr.Communicator], T]) -> Callable[[rr.Communicator], T]:
    """Let no rank leave the world before all have done what they do: a rank that left is another fault."""
    done = threading.Barrier(size)

    def stay(communicator: rr.Communicator) -> T:
        try:
            return function(communicator)
        finally:
            done.wait(30.0)

    return stay


def call_and_go_on(communicator: rr.Communicator, name: str) -> tuple[Exception | None, list[Exception | None]]:
    """Call a collective, then all of them, and a barrier."""
    first = caught(call, communicator, name)
    return first, [*(caught(call, communicator, each) for each in NAMES), caught(communicator.barrier)]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_failure_is_typed_and_the_last(name: str, after: int) -> None:
    """The rank whose transport fails gets its TransportError, and so does whoever calls anything after a failure."""
    results = run_ranks(
        3,
        staying(3, lambda communicator: call_and_go_on(communicator, name)),
        node_size=1,
        config=Config(timeout_s=0.15, segment_nbytes=8192),
        wrap=failing(1, after),
    )
    assert any(first is not None for first, _ in results)
    for rank, (first, later) in enumerate(results):
        # A rank that is done before the failure, like the root of a broadcast, learns of it in the next call.
        errors = [first, *later] if first is not None else later
        assert isinstance(errors[0], (rr.TransportError, rr.CollectiveTimeoutError)), (rank, errors[0])
        assert all(isinstance(error, rr.TransportError) for error in errors[1:])
        assert all("an earlier collective failed" in str(error) for error in errors[1:])
    if results[1][0] is not None:
        assert "fails on purpose" in str(results[1][0])


@pytest.mark.parametrize("node_size", [1, 2])
def test_lost_messages_end_in_a_timeout(node_size: int) -> None:
    """When messages vanish every rank gets a time-out, which names the call and the ranks it waited for."""
    results = run_ranks(
        4,
        staying(4, lambda communicator: caught(call, communicator, "allreduce")),
        node_size=node_size,
        config=Config(timeout_s=1.5, segment_nbytes=8192),
        wrap=failing(1, 0, silently=True),
    )
    for rank, error in enumerate(results):
        if error is None:  # its lane of the hierarchy was whole
            continue
        assert isinstance(error, rr.CollectiveTimeoutError)
        text = str(error)
        assert "allreduce(sum, shape 30000, float32)" in text
        assert "1.5 s" in text
        assert re.search(r"for (messages of )?ranks? [0-3]", text), rank  # its peer on the node may wait for these
    assert isinstance(results[1], rr.CollectiveTimeoutError)


def test_a_rank_that_shut_down_is_named() -> None:
    """Who calls a collective after a rank has closed gets a PeerLostError that names it, on one node and on several."""

    def call(communicator: rr.Communicator) -> Exception | None:
        communicator.barrier()
        if communicator.rank == 1:
            return communicator.close()
        return caught(communicator.allreduce, np.ones(10))

    for node_size in (None, 1, 2):
        errors = run_ranks(3, call, node_size=node_size)
        for error in (errors[0], errors[2]):
            assert isinstance(error, rr.PeerLostError)
            assert error.rank == 1
            assert "allreduce(sum, shape 10, float64)" in str(error)


def test_an_interrupt_is_the_last_word() -> None:
    """An interrupt in the middle of a collective comes out as it is, and later calls refuse to go on."""

    def call(communicator: rr.Communicator) -> Exception | None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        communicator._context.waiter.watchers.append(interrupt)
        with pytest.raises(KeyboardInterrupt):
            communicator.allreduce(np.ones(10))
        return caught(communicator.allreduce, np.ones(10))

    error = run_ranks(2, staying(2, lambda each: call(each) if each.rank == 0 else None))[0]
    assert isinstance(error, rr.TransportError)
    assert "KeyboardInterrupt" in str(error)
