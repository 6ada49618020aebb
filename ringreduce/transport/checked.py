"""Messages that carry a few bytes more, by which the receiver knows that they are what was sent: checksums here.

`ringreduce.transport.sealed` has those that are encrypted.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from ringreduce.buffers import Array
from ringreduce.common.errors import ChangedMessageError
from ringreduce.transport.messages import Messages, Prequest
from ringreduce.transport.waiting import Waiter


class _Route(NamedTuple):
    """What must agree for one buffer to serve two messages.

    Attributes:
        is_send: whether this rank sends.
        peer: the other rank.
        tag: of the message.
        nbytes: of the data.
    """

    is_send: bool
    peer: int
    tag: int
    nbytes: int


class _StagedMessage(NamedTuple):
    """A buffer from which a message travels, or into which it does, and the request of the transport for that."""

    room: memoryview
    request: Prequest


@dataclass(slots=True, eq=False)
class GuardedTransfer:
    """A message that was described.

    Attributes:
        data: what is sent, or where it is received, as bytes.
        route: where it goes.
        is_send, tag: of the route.
        spare: buffers of this route that no message uses now.
        stream: what those who count messages have for its peer and direction.
        number: which message it is of that one and of the tag.
        staged: the buffer that it was started with last.
        under_way: whether it was started, and is not known to be complete.
    """

    data: memoryview
    route: _Route
    is_send: bool
    tag: int
    spare: list[_StagedMessage]
    stream: Any = None
    number: int = 0
    staged: _StagedMessage | None = None
    under_way: bool = field(default=False)


class GuardedMessages(ABC):
    """Messages like others, but that each travels with more bytes behind it; what is not here the others do.

    The data of a message is copied into a buffer and out of it. Buffers are used again by messages of the same
    peer, tag and length, so there are as many as travel at once.

    Args:
        inner: what moves the bytes.
        more: how many bytes a message has behind it.
    """

    offers_allreduce = None  # Nobody sees what the library's own allreduce moves.

    def __init__(self, inner: Messages, more: int) -> None:
        self._inner = inner
        self._more = more
        self._users: Counter[_Route] = Counter()  # Transfers that were described, and not given back.
        self._spare: dict[_Route, list[_StagedMessage]] = {}
        self._given_up: list[tuple[_Route, _StagedMessage]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def describe(self, transfer: GuardedTransfer) -> None:  # noqa: B027  # those that count messages do more
        """Take note of a message that was described."""

    @abstractmethod
    def begin(self, transfer: GuardedTransfer, room: memoryview) -> None:
        """Take note that a message starts; of a send, lay out in ``room`` what travels for the data."""

    @abstractmethod
    def unpack(self, transfer: GuardedTransfer, room: memoryview) -> None:
        """Move what has come in ``room`` to its place, or raise a `ChangedMessageError` if it is not what was sent."""

    # ---- messages ----

    def send(self, data: Array, peer: int, tag: int) -> Prequest:
        return self._described(data, peer, tag, is_send=True)

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        return self._described(data, peer, tag, is_send=False)

    def _described(self, data: Array, peer: int, tag: int, *, is_send: bool) -> Prequest:
        route = _Route(is_send, peer, tag, data.nbytes)
        self._users[route] += 1
        spare = self._spare.setdefault(route, [])
        content = data.reshape(-1).view(np.uint8).data
        transfer = GuardedTransfer(content, route, is_send=is_send, tag=tag, spare=spare)
        self.describe(transfer)
        return transfer

    def start(self, requests: Sequence[Any]) -> None:
        inner = []
        for request in requests:
            spare = request.spare
            staged = request.staged = spare.pop() if spare else self._new_buffer(request.route)
            self.begin(request, staged.room)
            request.under_way = True
            inner.append(staged.request)
        self._inner.start(inner)

    def _new_buffer(self, route: _Route) -> _StagedMessage:
        room = np.empty(route.nbytes + self._more, np.uint8)
        describe = self._inner.send if route.is_send else self._inner.recv
        return _StagedMessage(room.data, describe(room, route.peer, route.tag))

    def test_all(self, requests: Sequence[Any]) -> bool:
        if not self._inner.test_all([request.staged.request for request in requests if request.under_way]):
            return False
        self._end(requests)
        return True

    def test_some(self, requests: Sequence[Any]) -> Sequence[int]:
        left = [number for number, request in enumerate(requests) if request.under_way]
        inner = [requests[number].staged.request for number in left]
        ended = [left[place] for place in self._inner.test_some(inner)]
        self._end([requests[number] for number in ended])
        return ended

    def _end(self, requests: Sequence[Any]) -> None:
        """Take note that messages are complete for the transport."""
        for request in requests:
            if request.under_way:
                request.under_way = False
                request.spare.append(request.staged)
                if not request.is_send:
                    self.unpack(request, request.staged.room)

    def free(self, requests: Sequence[Any]) -> None:
        freed: list[Prequest] = []
        for request in requests:
            if request.under_way:
                request.under_way = False
                freed.append(request.staged.request)
            self._users[request.route] -= 1
            if not self._users[request.route]:
                freed += self._buffers_of(request.route)
        self._inner.free(freed)

    def _buffers_of(self, route: _Route) -> list[Prequest]:
        """Forget the buffers of a route that nobody uses any more; return their requests."""
        del self._users[route]
        buffers = self._spare.pop(route, [])
        buffers += [staged for other, staged in self._given_up if other == route]
        self._given_up = [transfer for transfer in self._given_up if transfer[0] != route]
        return [buffer.request for buffer in buffers]

    def give_up(self, requests: Sequence[Any]) -> None:
        self._inner.give_up([request.staged.request for request in requests])
        for each in requests:
            if each.under_way:
                each.under_way = False
                self._given_up.append((each.route, each.staged))

    def renew(self) -> None:
        self._inner.renew()
        for route, staged in self._given_up:
            self._spare[route].append(staged)
        self._given_up = []


_CHECKSUM_NBYTES = 4


def checked(inner: Messages) -> Messages:
    """Return messages like others, but that each carries a checksum, and one that has changed is an error.

    For networks, memories and libraries that are not to be trusted. The rank that gets a changed message raises a
    `ChangedMessageError`. Control notes and exchanges travel as they are.

    Args:
        inner: what moves the bytes.
    """
    return cast("Messages", _CheckedMessages(inner, _CHECKSUM_NBYTES))


class _CheckedMessages(GuardedMessages):
    """See `checked`."""

    def begin(self, transfer: GuardedTransfer, room: memoryview) -> None:
        if transfer.is_send:
            room[:-_CHECKSUM_NBYTES] = transfer.data
            room[-_CHECKSUM_NBYTES:] = zlib.crc32(transfer.data).to_bytes(_CHECKSUM_NBYTES, "big")

    def unpack(self, transfer: GuardedTransfer, room: memoryview) -> None:
        transfer.data[:] = room[:-_CHECKSUM_NBYTES]
        checksum = zlib.crc32(transfer.data)
        sent = int.from_bytes(room[-_CHECKSUM_NBYTES:], "big")
        if checksum != sent:
            raise ChangedMessageError(
                f"{transfer.data.nbytes} bytes from rank {transfer.route.peer} have changed on their way: their CRC-32 "
                f"is {checksum:08x}, and was {sent:08x}; look for a faulty network, memory or driver"
            )

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> Messages | None:
        part = self._inner.subset(ranks, waiter)
        return None if part is None else checked(part)
