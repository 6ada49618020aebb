"""What every message transport offers: the seam between schedules and the libraries that move bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ringreduce.buffers import Array
from ringreduce.common.errors import ChangedMessageError, RingReduceError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.waiting import Waiter

T = TypeVar("T")

#: What a step of `together` may fail with: what it opens, maps or asks may be anybody's, and fail in any of these ways.
_FAILURES = (RingReduceError, MemoryError, OSError, ValueError)


class Prequest(Protocol):
    """A transfer that was described once and can be started any number of times, one at a time."""


class Messages(Protocol):
    """Point-to-point messages between the ranks of one process set, on a channel that nobody else uses.

    Messages of one (sender, receiver, tag) arrive in the order in which they were started. Not thread-safe: one thread
    at a time. Failures come out as `ringreduce.TransportError` or one of its kinds, never as the errors of the
    library underneath.
    """

    name: str
    #: What moves the bytes, with its version; "none" where no library does.
    library: str
    rank: int
    size: int
    #: Tags are 0 <= tag <= max_tag.
    max_tag: int
    #: Whether two transports may be used by two threads at once.
    concurrent: bool

    def send(self, data: Array, peer: int, tag: int) -> Prequest:
        """Describe a message from contiguous ``data`` (at most 2 GiB); does not start it."""

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        """Describe a message into contiguous ``data`` of exactly the size that is sent; does not start it."""

    def start(self, requests: Sequence[Prequest]) -> None:
        """Start transfers; their memory is the transport's until a test reports them complete."""

    def test_all(self, requests: Sequence[Prequest]) -> bool:
        """Return whether all started ``requests`` are complete; never blocks."""

    def test_some(self, requests: Sequence[Prequest]) -> Sequence[int]:
        """Return the indices of requests that became complete since they were last asked about; never blocks."""

    def free(self, requests: Sequence[Prequest]) -> None:
        """Give back requests that will not be started again; those that were given up go once they have ended."""

    @property
    def offers_allreduce(self) -> Callable[[int, str, ReduceOp], bool] | None:
        """Returns whether the library's own allreduce takes so many elements of a dtype; None: there is none at all."""

    def allreduce(self, data: Array, op: ReduceOp) -> None:
        """Reduce contiguous ``data`` in place by the library's own allreduce, where it is offered. Collective.

        All ranks must be known to call it with the same arguments: it compares none. Averages come out as sums.
        """

    def post(self, note: bytes, peer: int) -> None:
        """Send a short control note, beside all other traffic; never blocks."""

    def poll(self) -> tuple[int, bytes] | None:
        """Return the next control note and the rank that posted it, None if there is none; never blocks."""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` to all ranks and return everyone's, in rank order. Collective; for setting things up."""

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> Messages | None:
        """Return a transport between some of the ranks, None on the others. Collective over all of them.

        Args:
            ranks: ascending; the first becomes rank 0.
            waiter: how the collective calls of the new transport wait.
        """

    def give_up(self, requests: Sequence[Prequest]) -> None:
        """Record a call that was given up: all transfers that it had started, complete or not, in that order."""

    def renew(self) -> None:
        """End the messages that were given up, on all ranks, so that none matches a later one. Collective."""

    def abandon(self) -> None:
        """Let the others know that this rank does not close it, as messages may be under way. Local."""

    def close(self) -> None:
        """Give back what the transport holds; local, and safe to call twice."""


def exchange_json(messages: Messages, value: Any, fits: Callable[[Any], object] = lambda answer: True) -> list[Any]:
    """Give a value of JSON to all ranks and return everyone's, in rank order. Collective; see `Messages.exchange`.

    Args:
        messages: the ranks.
        value: of this one.
        fits: returns whether a value has the form that is expected, where messages are not sealed.

    Raises:
        ChangedMessageError: what a rank has given cannot be read, or does not fit.
    """
    return [_value(rank, text, fits) for rank, text in enumerate(messages.exchange(json.dumps(value).encode()))]


def _value(rank: int, text: bytes, fits: Callable[[Any], object]) -> Any:
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if fits(value):
            return value
    raise ChangedMessageError(f"what rank {rank} gives to all cannot be read: it has changed on its way")


class StepFailedError(Exception):
    """A step of `together` failed on some ranks. Raised on all, which fall back; its text names the first of them.

    Attributes:
        reasons: rank -> why it failed there, ascending.
    """

    def __init__(self, reasons: Mapping[int, str]) -> None:
        rank, reason = next(iter(reasons.items()))
        super().__init__(f"rank {rank}: {reason}")
        self.reasons = reasons


def together(messages: Messages, step: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Return what ``step`` gives on this rank, as soon as it has succeeded on all. Collective.

    Args:
        messages: the ranks.
        step: what each rank does. If it waits for the others, then not for as long as they wait for it here.
        undo: takes back what the step has done here, where it failed on another rank.

    Raises:
        StepFailedError: on all ranks, if the step raised on any of them one of our own errors, `OSError`, `ValueError`
            or `MemoryError`.
    """
    reason = None
    try:
        result = step()
    except _FAILURES as error:
        reason = str(error) or repr(error)
    everyone = enumerate(exchange_json(messages, reason))
    reasons = {rank: reason for rank, reason in everyone if reason is not None}
    if not reasons:
        return result
    if reason is None and undo is not None:
        undo(result)
    raise StepFailedError(reasons)
