"""Streams of torch that are not there: a double of what `ringreduce.torch` uses of ``torch.cuda``, and its record.

It does nothing but to keep, for every stream, which events and works it comes after. So a test can ask, on a machine
without a GPU, whether one thing is sure to be done before another, and can read what was asked for in what order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Stream:
    """A stream.

    Attributes:
        name: ``"main"``, ``"own 1"``, ...
        before: the works that are done before whatever is enqueued on it next.
    """

    def __init__(self, name: str, record: list[str]) -> None:
        self.name = name
        self.before: frozenset[str] = frozenset()
        self._record = record

    def enqueue(self, work: str) -> frozenset[str]:
        """Enqueue a work; return what is sure to be done before it."""
        before = self.before
        self.before |= {work}
        return before

    def wait_event(self, event: _Event) -> None:
        self._record.append(f"{self.name} waits for {event.name}")
        self.before |= event.before


class _Event(_Stream):
    """An event; one that was never recorded stands for nothing."""

    def record(self, stream: _Stream) -> None:
        self._record.append(f"{self.name} on {stream.name}")
        self.before = stream.before


class TorchStreams:
    """Stands for the module ``torch.cuda``. The current stream is a thread's own, as it is there.

    Attributes:
        record: what was asked for, in order.
        main: the current stream of threads that have chosen none.
    """

    def __init__(self) -> None:
        self.record: list[str] = []
        self.main = _Stream("main", self.record)
        self._chosen = threading.local()
        self._streams = 0
        self._events = 0
        self.Stream = self._new_stream
        self.Event = self._new_event

    def is_initialized(self) -> bool:
        return True

    def current_stream(self, device: object = None) -> _Stream:
        stream: _Stream = getattr(self._chosen, "stream", self.main)
        return stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Make a stream the current one of this thread."""
        previous, self._chosen.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._chosen.stream = previous

    def _new_stream(self, device: object = None, priority: int = 0) -> _Stream:
        self._streams += 1
        return _Stream(f"own {self._streams}", self.record)

    def _new_event(self) -> _Event:
        self._events += 1
        return _Event(f"event {self._events}", self.record)
