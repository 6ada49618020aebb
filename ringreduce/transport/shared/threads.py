"""Threads of a rank that carry out parts of a compiled call, each on a core of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

_Part = Callable[[], object]


class Threads:
    """Some threads, which sleep between calls.

    Args:
        count: how many, the caller's among them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._workers: list[_Worker] = []

    def start(self) -> bool:
        """Start them, if that was not done; return whether there are several."""
        try:
            while len(self._workers) < self.count - 1:
                self._workers.append(_Worker())
        except RuntimeError:  # There is a limit, or the interpreter ends.
            self.count = 1 + len(self._workers)
        return self.count > 1

    def run(self, parts: Sequence[_Part]) -> None:
        """Run as many parts as there are threads, at once; return, or raise, when all have ended.

        Raises:
            BaseException: an error of a part; or an interrupt, when all have ended all the same.
        """
        first, *others = parts
        errors: list[BaseException] = []
        busy: list[_Worker] = []
        try:
            for worker, part in zip(self._workers, others, strict=False):
                busy.append(worker)
                worker.begin(part)
            first()
        except BaseException as error:
            errors.append(error)
        for worker in busy:
            while not worker.idle:
                try:
                    worker.done.acquire()
                    worker.idle = True
                except BaseException as error:  # An interrupt; memory that a part works in is the caller's.
                    errors.append(error)
            errors += [worker.error] if worker.error is not None else []
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End them."""
        for worker in self._workers:
            worker.begin(None)
        self._workers = []


class _Worker:
    """A thread.

    Attributes:
        idle: whether the last part has ended, as far as its user knows.
        done: released when a part has ended.
        error: of the last part.
    """

    def __init__(self) -> None:
        self.idle = True
        self.done = threading.Semaphore(0)
        self.error: BaseException | None = None
        self._begun = threading.Semaphore(0)
        self._part: _Part | None = None
        threading.Thread(target=self._work, name="ringreduce adds", daemon=True).start()

    def begin(self, part: _Part | None) -> None:
        """Have it carry out a part; None: end it."""
        self._part = part
        self.error = None
        self.idle = False
        self._begun.release()

    def _work(self) -> None:
        while self._begun.acquire() and self._part is not None:
            try:
                self._part()
            except BaseException as error:
                self.error = error
            finally:
                self.done.release()
