"""Transports, and a communicator, that record what they are asked to do, fail or do damage on purpose: wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import TransportError
from ringreduce.transport.messages import Messages, Prequest

Array = npt.NDArray[Any]


class Wrapper:
    """Passes everything on to ``inner``; a `Messages`, or a communicator, as that is."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class RecordingMessages(Wrapper):
    """Keeps a list of what was started.

    Attributes:
        started: ``("send" or "recv", peer, bytes)`` in the order in which transfers were started.
    """

    def __init__(self, inner: Messages) -> None:
        super().__init__(inner)
        self.started: list[tuple[str, int, int]] = []
        self._described: dict[int, tuple[str, int, int]] = {}

    def send(self, data: Array, peer: int, tag: int) -> Prequest:
        request = self._inner.send(data, peer, tag)
        self._described[id(request)] = ("send", peer, data.nbytes)
        return request

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        request = self._inner.recv(data, peer, tag)
        self._described[id(request)] = ("recv", peer, data.nbytes)
        return request

    def start(self, requests: Sequence[Prequest]) -> None:
        self.started += [self._described[id(request)] for request in requests if id(request) in self._described]
        self._inner.start(requests)


class FailingMessages(Wrapper):
    """Fails, or goes silent, after so many starts.

    Args:
        inner: what carries the messages until then.
        after: how many starts succeed.
        silently: whether the messages then vanish, as if the network had failed, instead of raising.
    """

    def __init__(self, inner: Messages, after: int, *, silently: bool = False) -> None:
        super().__init__(inner)
        self._left = after
        self._silently = silently

    def start(self, requests: Sequence[Prequest]) -> None:
        self._left -= 1
        if self._left >= 0:
            self._inner.start(requests)
        elif not self._silently:
            raise TransportError("this transport fails on purpose")

    def test_all(self, requests: Sequence[Prequest]) -> bool:
        return self._left >= 0 and self._inner.test_all(requests)

    def test_some(self, requests: Sequence[Prequest]) -> Sequence[int]:
        return self._inner.test_some(requests) if self._left >= 0 else ()


class DamagingMessages(Wrapper):
    """Flips one bit of one message that this rank receives.

    Args:
        inner: what carries the messages.
        after: how many come as they are before that one.
    """

    def __init__(self, inner: Messages, after: int) -> None:
        super().__init__(inner)
        self._left = after
        self._places: dict[int, Array] = {}

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        request = self._inner.recv(data, peer, tag)
        self._places[id(request)] = data
        return request

    def test_all(self, requests: Sequence[Prequest]) -> bool:
        self.test_some(requests)
        return self._inner.test_all(requests)

    def test_some(self, requests: Sequence[Prequest]) -> Sequence[int]:
        ended = self._inner.test_some(requests)
        for index in ended:
            place = self._places.get(id(requests[index]))
            if place is not None:
                if self._left == 0:
                    place.view(np.uint8)[place.nbytes // 2] ^= 4
                self._left -= 1
        return ended


class Faulty(Wrapper):
    """A communicator that adds one to the first element of what ``collective`` returns on ``rank``."""

    def __init__(self, communicator: Any, collective: str, rank: int) -> None:
        super().__init__(communicator)
        self._collective = collective
        self._at = rank

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name != self._collective or self._inner.rank != self._at:
            return value

        def call(array: Array, *arguments: Any, **options: Any) -> Any:
            result = value(array, *arguments, **options)
            if array.dtype == np.float32:  # not the times and counts of a benchmark itself
                result.reshape(-1)[0] += 1
            return result

        return call
