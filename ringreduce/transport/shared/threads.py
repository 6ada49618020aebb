"""Threads of a rank that carry out parts of a compiled call, each on a core of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Threads:
    """Some threads, which are started when they are first needed, and sleep between calls.

    Args:
        count: how many, the caller's among them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._workers: list[_Worker] = []

    def run(self, parts: Sequence[Callable[[], object]]) -> None:
        """Run as many parts as there are threads, at once; return when all are done, also by an interrupt."""
        while len(self._workers) < len(parts) - 1:
            self._workers.append(_Worker())
        first, *others = parts
        busy = self._workers[: len(others)]
        for worker, part in zip(busy, others, strict=True):
            worker.begin(part)
        try:
            first()
        finally:
            for worker in busy:
                worker.done.acquire()

    def close(self) -> None:
        """End them."""
        for worker in self._workers:
            worker.begin(None)
        self._workers = []


class _Worker:
    def __init__(self) -> None:
        self.done = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self._part: Callable[[], object] | None = None
        threading.Thread(target=self._work, name="ringreduce adds", daemon=True).start()

    def begin(self, part: Callable[[], object] | None) -> None:
        """Have it carry out a part; None: end it."""
        self._part = part
        self._begun.release()

    def _work(self) -> None:
        while self._begun.acquire() and self._part is not None:
            try:
                self._part()
            finally:
                self.done.release()
