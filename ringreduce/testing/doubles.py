"""Message transports that record what they are asked to do, or fail on purpose: wrappers around any other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from ringreduce.errors import TransportError
from ringreduce.reduce_ops import ReduceOp
from ringreduce.transport.messages import Messages, Request
from ringreduce.transport.waiting import Waiter

__all__ = ["FailingMessages", "RecordingMessages"]

Array = npt.NDArray[Any]


class _Wrapper:
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Messages) -> None:
        self._inner = inner
        self.name = inner.name
        self.library = inner.library
        self.rank = inner.rank
        self.size = inner.size
        self.max_tag = inner.max_tag
        self.has_allreduce = inner.has_allreduce
        self.concurrent = inner.concurrent

    def send(self, data: Array, peer: int, tag: int) -> Request:
        return self._inner.send(data, peer, tag)

    def recv(self, data: Array, peer: int, tag: int) -> Request:
        return self._inner.recv(data, peer, tag)

    def start(self, requests: Sequence[Request]) -> None:
        self._inner.start(requests)

    def test_all(self, requests: Sequence[Request]) -> bool:
        return self._inner.test_all(requests)

    def test_some(self, requests: Sequence[Request]) -> Sequence[int]:
        return self._inner.test_some(requests)

    def free(self, requests: Sequence[Request]) -> None:
        self._inner.free(requests)

    def offers_allreduce(self, count: int, dtype: str, op: ReduceOp) -> bool:
        return self._inner.offers_allreduce(count, dtype, op)

    def allreduce(self, data: Array, dtype: str, op: ReduceOp) -> None:
        self._inner.allreduce(data, dtype, op)

    def post(self, note: bytes, peer: int) -> None:
        self._inner.post(note, peer)

    def poll(self) -> tuple[int, bytes] | None:
        return self._inner.poll()

    def exchange(self, payload: bytes) -> list[bytes]:
        return self._inner.exchange(payload)

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> Messages | None:
        return self._inner.subset(ranks, waiter)

    def give_up(self, requests: Sequence[Request]) -> None:
        self._inner.give_up(requests)

    def renew(self) -> None:
        self._inner.renew()

    def close(self) -> None:
        self._inner.close()


class RecordingMessages(_Wrapper):
    """Keeps a list of what was started.

    Attributes:
        started: ``("send" or "recv", peer, bytes)`` in the order in which transfers were started.
    """

    def __init__(self, inner: Messages) -> None:
        super().__init__(inner)
        self.started: list[tuple[str, int, int]] = []
        self._described: dict[int, tuple[str, int, int]] = {}

    def send(self, data: Array, peer: int, tag: int) -> Request:
        request = super().send(data, peer, tag)
        self._described[id(request)] = ("send", peer, data.nbytes)
        return request

    def recv(self, data: Array, peer: int, tag: int) -> Request:
        request = super().recv(data, peer, tag)
        self._described[id(request)] = ("recv", peer, data.nbytes)
        return request

    def start(self, requests: Sequence[Request]) -> None:
        self.started += [self._described[id(request)] for request in requests if id(request) in self._described]
        super().start(requests)


class FailingMessages(_Wrapper):
    """Fails, or goes silent, after so many starts.

    Args:
        inner: what carries the messages until then.
        after: how many starts succeed.
        silently: whether the messages then vanish, as if the network had gone, instead of raising.
    """

    def __init__(self, inner: Messages, after: int, *, silently: bool = False) -> None:
        super().__init__(inner)
        self._left = after
        self._silently = silently

    def start(self, requests: Sequence[Request]) -> None:
        self._left -= 1
        if self._left >= 0:
            super().start(requests)
        elif not self._silently:
            raise TransportError("this transport was told to fail")

    def test_all(self, requests: Sequence[Request]) -> bool:
        return self._left >= 0 and super().test_all(requests)

    def test_some(self, requests: Sequence[Request]) -> Sequence[int]:
        return super().test_some(requests) if self._left >= 0 else ()
