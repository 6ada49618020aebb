"""Who drives an engine: a thread that waits for an operation, or else a progress thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ringreduce.engine.operations import Operation, UnderWay
from ringreduce.engine.progress import Progress

__all__ = ["Driver"]

_TRIES = 16
_YIELD_S = 0.002  # after so long without news, nap
_NAP_S = 50e-6
_UNHURRIED_NAP_S = 100e-6  # while the program does something else
_LONG_NAP_S = 1e-3  # after a second without news
_DOZE_S = 1e-3, 8e-3  # how long the progress thread dozes at a time: first, and at most when that was needless
_LINGER_S = 20e-3  # it dozes while the last news is not older than this, then it sleeps
_PROMPT_S = 200e-6  # a program that waits within this time has waited at once
_PROMPT = 2  # if it has so often in a row, it will again
_IDLE_S = 1.0  # how often the coordinator checks for messages while its rank is idle


class Driver:
    """Lets one thread at a time make progress.

    The progress thread sleeps while this rank has nothing under way, or while another thread waits and so drives. An
    idle rank costs nothing; that of the coordinator checks once a second whether others wait for it.

    Args:
        progress: what is driven.
        under_way: what the program has submitted.
        inside: entered by the progress thread for as long as it lives: what it calls back must not wait for it.
        threads, clock: as for `Engine`.

    Attributes:
        threads: the argument.
    """

    def __init__(
        self,
        progress: Progress,
        under_way: UnderWay,
        inside: AbstractContextManager[None],
        *,
        threads: bool,
        clock: Callable[[], float],
    ) -> None:
        self.threads = threads
        self._prompt = 0  # how often in a row the program has waited at once
        self._submitted_s: float | None = None  # when it submitted something after it last waited
        self._waited_s = 0.0  # in waits that have ended
        self._waits_since: float | None = None  # any thread, without a gap
        self._progress = progress
        self._under_way = under_way
        self._inside = inside
        self._clock = clock
        self._turn = threading.Lock()  # who holds it drives
        self._bell = threading.Lock()  # released to wake the progress thread: many times cheaper than a condition
        self._bell.acquire()
        self._asleep = False
        self._dozing = False  # asleep, but wakes by itself in a moment
        self._thread: threading.Thread | None = None
        if progress.followers:
            self._start()  # others may wait for this rank before it has submitted anything

    # ---- threads of the program ----

    @property
    def waited_s(self) -> float:
        """How long the program has waited for operations, on any thread, in a wait that goes on, too."""
        since = self._waits_since
        return self._waited_s + (0.0 if since is None else self._clock() - since)

    def submitted(self) -> None:
        """Let the progress thread know that something was submitted; the lock is held."""
        if self._submitted_s is None:
            self._submitted_s = self._clock()
        self.wake()

    def wake(self) -> None:
        """Let the progress thread know that there is something to do, if nobody drives; the lock is held.

        To wake it takes 15 us of this thread's time, as it wants the interpreter's lock at once. A program that has
        lately waited for what it submitted will do so again, and drive itself; if not, a dozing thread sees it soon.
        """
        if self._under_way.waiters:
            return
        if self._asleep:
            if self._dozing and self._prompt >= _PROMPT:
                return
            self._asleep = False
            self._ring()
        elif self._thread is None:
            self._start()

    def observe_wait(self) -> None:
        """Learn from the program's wait for what it has submitted whether to wake the progress thread next time."""
        # Not from who has read what it submitted: the progress thread, once woken, may do so in any moment in which the
        # program does not hold the interpreter's lock, and would then be woken, and in the way, each time.
        submitted_s, self._submitted_s = self._submitted_s, None
        if submitted_s is not None:
            self._prompt = self._prompt + 1 if self._clock() - submitted_s < _PROMPT_S else 0

    def wait(self, operation: Operation) -> None:
        """Return when an operation is done; this thread, which is counted as a waiter, drives unless another does."""
        under_way = self._under_way
        if self._waits_since is None:
            self._waits_since = self._clock()
        try:
            while self._may_drive_for(operation):
                try:
                    self._drive(lambda: operation.done, hurried=True)
                finally:
                    self._turn.release()
        finally:
            with under_way.lock:
                under_way.waiters -= 1
                if under_way.waiters:
                    under_way.changed.notify_all()
                else:
                    self._waited_s, self._waits_since = self.waited_s, None
                    if under_way.count:
                        self.wake()

    def try_step(self) -> None:
        """Make a step of progress unless another thread drives."""
        if self._turn.acquire(blocking=False):
            try:
                self._progress.step()
            finally:
                self._turn.release()
            self._under_way.wake_waiters()

    def is_patient(self) -> bool:
        """Return whether what is under way goes on beside the program, which needs the core more."""
        return self._progress.overlaps and not self._under_way.waiters

    def fail(self, error: BaseException) -> None:
        """End everything that is under way, with an error."""
        with self._turn:
            self._progress.fail(error)

    def close(self) -> None:
        """End everything that is under way, and the progress thread; does nothing the second time."""
        under_way = self._under_way
        with under_way.lock:
            if under_way.closed or under_way.barred:
                return
            under_way.closed = True
            under_way.changed.notify_all()
            self._ring()
        try:
            with self._turn:
                self._progress.end()
        finally:
            if self._thread is not None:
                self._thread.join()
            self._progress.close()

    def _may_drive_for(self, operation: Operation) -> bool:
        """Wait until this thread may drive (return True), or the operation is done (return False)."""
        # Tried with the lock held, for whoever stops driving tells the waiters so with it held.
        with self._under_way.lock:
            while not operation.done:
                if not self._under_way.closed and self._turn.acquire(blocking=False):
                    return True
                self._under_way.changed.wait(_IDLE_S)
        return False

    # ---- the progress thread ----

    def _start(self) -> None:
        if self.threads:
            self._thread = threading.Thread(target=self._run_thread, name="ringreduce", daemon=True)
            self._thread.start()

    def _ring(self) -> None:
        if self._bell.locked():
            self._bell.release()

    def _run_thread(self) -> None:
        with self._inside:
            self._make_progress()

    def _make_progress(self) -> None:
        under_way, progress = self._under_way, self._progress
        doze_s = _DOZE_S[0]
        while not under_way.closed:
            rung = True
            with under_way.lock:
                self._asleep = under_way.waiters > 0 or not under_way.count
                self._dozing = self._clock() - progress.news_s < _LINGER_S
            if self._asleep:
                until_s = doze_s if self._dozing else _IDLE_S if progress.coordinates else -1
                rung = self._bell.acquire(timeout=until_s)
                self._asleep = False
            if under_way.waiters or (self._dozing and not under_way.count):
                doze_s = min(2 * doze_s, _DOZE_S[1])
                continue
            doze_s = _DOZE_S[0]
            if not rung:  # it has slept its time out: if the program has submitted something, it did not wait for it
                self._prompt = 0
            with self._turn:
                progress.overlaps = True
                self._drive(lambda: bool(under_way.waiters) or not under_way.count, hurried=False)
                progress.overlaps = False
            under_way.wake_waiters()

    # ---- driving; it is this thread's turn ----

    def _drive(self, finished: Callable[[], bool], *, hurried: bool) -> None:
        """Make progress until ``finished()``; hurried if somebody waits for it and has nothing else to do."""
        under_way, progress = self._under_way, self._progress
        tries = 0
        while not under_way.closed and under_way.failure is None:
            moved = progress.step()
            if finished():
                return
            tries += 1
            if moved:
                tries = 0
            elif hurried and tries < _TRIES:
                os.sched_yield()
            else:
                tries = 0
                quiet_s = self._clock() - progress.news_s
                if quiet_s > _YIELD_S or not hurried:
                    # MPI has nothing to sleep on; to spin would take the core from ranks that share it.
                    time.sleep(_LONG_NAP_S if quiet_s >= 1.0 else _NAP_S if hurried else _UNHURRIED_NAP_S)
