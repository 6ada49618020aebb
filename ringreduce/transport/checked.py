"""Messages that are compared with what was sent: for networks, memories and libraries that are not to be trusted."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ringreduce.buffers import Array
from ringreduce.common.errors import TransportError
from ringreduce.transport.messages import Messages, Prequest
from ringreduce.transport.waiting import Waiter


@dataclass(slots=True)
class _CheckedTransfer:
    """A message and the one behind it, which holds its checksum.

    Attributes:
        data: what is sent, or where it is received.
        note: its CRC-32, as the sender has computed it.
        peer: the other rank.
        is_send: which of the two.
        parts: both, as the transport knows them.
        nopen: how many of them are not known to be complete.
    """

    data: Array
    note: Array
    peer: int
    is_send: bool
    parts: tuple[Prequest, Prequest]
    nopen: int = field(default=0)

    def checksum(self) -> int:
        return zlib.crc32(self.data.view(np.uint8).data)

    def end(self) -> None:
        """Compare what has come."""
        self.nopen = 0
        if not self.is_send and self.checksum() != int(self.note[0]):
            raise TransportError(
                f"{self.data.nbytes} bytes from rank {self.peer} have changed on their way: their CRC-32 is "
                f"{self.checksum():08x}, and was {int(self.note[0]):08x}; look for a faulty network, memory or driver"
            )


def checked(inner: Messages) -> Messages:
    """Return messages like others, but that each carries a checksum, and one that has changed is an error.

    The rank that gets it raises a `TransportError`. The library's own allreduce is not offered, as nobody sees what
    that moves. Control notes and exchanges travel as they are.

    Args:
        inner: what moves the bytes.
    """
    return cast("Messages", _CheckedMessages(inner))


class _CheckedMessages:
    """See `checked`; everything that is not here is done by the inner messages."""

    offers_allreduce = None

    def __init__(self, inner: Messages) -> None:
        self._inner = inner
        self.max_tag = (inner.max_tag - 1) // 2  # checksums have tags above those

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, data: Array, peer: int, tag: int) -> Prequest:
        return self._described(self._inner.send, data, peer, tag=tag, is_send=True)

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        return self._described(self._inner.recv, data, peer, tag=tag, is_send=False)

    def _described(
        self, describe: Callable[[Array, int, int], Prequest], data: Array, peer: int, tag: int, *, is_send: bool
    ) -> Prequest:
        note = np.zeros(1, np.uint32)
        parts = describe(data, peer, tag), describe(note, peer, tag + self.max_tag + 1)
        return _CheckedTransfer(data, note, peer, is_send=is_send, parts=parts)

    def start(self, requests: Sequence[Prequest]) -> None:
        for each in _transfers(requests):
            each.nopen = 2
            if each.is_send:
                each.note[0] = each.checksum()
        self._inner.start(_parts(requests))

    def test_all(self, requests: Sequence[Prequest]) -> bool:
        if not self._inner.test_all(_parts(requests)):
            return False
        for each in _transfers(requests):
            if each.nopen:
                each.end()
        return True

    def test_some(self, requests: Sequence[Prequest]) -> Sequence[int]:
        ended = []
        for position in self._inner.test_some(_parts(requests)):
            each = _transfers(requests)[position // 2]
            each.nopen -= 1
            if not each.nopen:
                each.end()
                ended.append(position // 2)
        return ended

    def free(self, requests: Sequence[Prequest]) -> None:
        self._inner.free(_parts(requests))

    def give_up(self, requests: Sequence[Prequest]) -> None:
        self._inner.give_up(_parts(requests))

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> Messages | None:
        part = self._inner.subset(ranks, waiter)
        return None if part is None else checked(part)


def _transfers(requests: Sequence[Prequest]) -> Sequence[_CheckedTransfer]:
    return cast("Sequence[_CheckedTransfer]", requests)


def _parts(requests: Sequence[Prequest]) -> list[Prequest]:
    """Return what the transport underneath knows of them, in their order."""
    return [part for each in _transfers(requests) for part in each.parts]
