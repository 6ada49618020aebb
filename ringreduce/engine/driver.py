"""Which thread drives an engine: one that waits for an operation, or else the progress thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from ringreduce.engine.operations import Operation
from ringreduce.engine.pending import PendingOperations
from ringreduce.engine.progress import Progress

_TRIES = 16  # yields between two looks at the clock
_YIELD_S = 0.002  # after so long without news, nap
_NAP_S = 50e-6
_NAP_BESIDE_S = 100e-6  # of the progress thread, while the program computes
_LONG_NAP_S = 1e-3  # after a second without news
_BACKOFF_S = 1e-3, 8e-3  # how long the progress thread sleeps at a time: first, and at most when that was needless
_GRACE_S = 20e-3  # it looks by itself, so often, while the last news is not older than this; then it sleeps
_FAST_WAIT_S = 200e-6  # a program that waits so soon after a submission, or on average submits more, has not computed
_BURST_S = 10e-3  # submissions that take longer altogether count as computation
_FAST_WAITS = 2  # a program that has waited at once so often in a row will do so again
_IDLE_S = 1.0  # how often the coordinator's thread looks for messages while its rank is idle


class Driver:
    """Lets one thread at a time make progress.

    The progress thread sleeps while this rank has nothing pending, and while another thread waits and so drives. An
    idle rank costs nothing; that of the coordinator looks once a second whether others wait for it.

    Args:
        progress: what is driven.
        pending: what the program has submitted.
        guard: entered by the progress thread for as long as it lives: what it calls back must not wait for it.
        followers: whether other ranks may wait for this one before it has submitted anything.
        threads, clock: as for `Engine`.

    Attributes:
        ended_waits_s: how long the program has waited for operations, in waits that have ended.
    """

    def __init__(
        self,
        progress: Progress,
        pending: PendingOperations,
        guard: AbstractContextManager[None],
        *,
        followers: bool,
        threads: bool,
        clock: Callable[[], float],
    ) -> None:
        self._threads = threads
        self._progress = progress
        self._pending = pending
        self._guard = guard
        self._followers = followers
        self._clock = clock
        self._fast_waits = 0  # how often in a row the program has waited at once
        self._burst_s: float | None = None  # when the program submitted something first after its last wait
        self._burst = 0  # how much it has submitted since then
        self._active_s = 0.0  # when it last submitted something, a moment after the one before, or ended a wait
        self.ended_waits_s = 0.0
        self._waits_since: float | None = None  # any thread, without a gap
        self._turn = threading.Lock()  # the thread that holds it drives
        self._bell = threading.Lock()  # released to wake the progress thread: many times cheaper than a condition
        self._bell.acquire()
        self._asleep = False
        self._looks_soon = False  # asleep, but wakes by itself in a moment
        self._thread: threading.Thread | None = None
        if followers:
            self._start()

    # ---- threads of the program ----

    @property
    def waited_s(self) -> float:
        """How long the program has waited for operations, on any thread, including a wait that goes on."""
        since = self._waits_since
        return self.ended_waits_s + (0.0 if since is None else self._clock() - since)

    def submitted(self) -> None:
        """Let the progress thread know that something was submitted; the caller holds the lock."""
        now = self._clock()
        if self._burst_s is None:
            self._burst_s = now
            self._burst = 0
        self._burst += 1
        if now - self._burst_s < min(self._burst * _FAST_WAIT_S, _BURST_S):
            self._active_s = now
        self.wake()

    def wake(self) -> None:
        """Let the progress thread know that there is something to do, if nobody drives; the caller holds the lock.

        To wake it takes 15 us of this thread's time, as it wants the interpreter's lock at once, and takes it again and
        again while the program goes on submitting. A program that has waited at once for what it submitted will do so
        again, and drive itself; if it does not, the progress thread sees that soon.
        """
        if self._pending.waiters:
            return
        if self._asleep:
            if self._looks_soon and self._fast_waits >= _FAST_WAITS:
                return
            self._asleep = False
            self._ring()
        elif self._thread is None:
            self._start()

    def observe_wait(self) -> None:
        """Learn from the program's wait for what it has submitted whether to wake the progress thread next time."""
        # Not from who has read what it submitted: the progress thread, once woken, may do so in any moment in which the
        # program does not hold the interpreter's lock, and would then be woken, and in the way, each time.
        if self._burst_s is not None:
            self._burst_s = None
            self._fast_waits = self._fast_waits + 1 if self._clock() - self._active_s < _FAST_WAIT_S else 0

    def wait(self, operation: Operation) -> None:
        """Return when an operation is done; this thread, which is counted as a waiter, drives unless another does."""
        pending = self._pending
        pending.awaited = operation
        if pending.waiters > 1:
            pending.crowded = True
        if self._waits_since is None:
            self._waits_since = self._clock()
        try:
            while not operation.done:
                drives = not pending.lifetime.closed and self._turn.acquire(blocking=False)
                if not (drives or self._wait_for_turn(operation)):
                    return
                try:
                    self._drive(operation)
                finally:
                    self._turn.release()
        finally:
            with pending.lock:
                pending.waiters -= 1
                if pending.waiters:
                    pending.wake_sleepers()
                else:
                    pending.awaited = None
                    self._active_s = self._clock()
                    if self._waits_since is not None:
                        self.ended_waits_s += self._active_s - self._waits_since
                        self._waits_since = None
                    if pending.count:
                        self.wake()

    def try_step(self) -> None:
        """Make a step of progress unless another thread drives."""
        if self._turn.acquire(blocking=False):
            try:
                if self._pending.lifetime.open:
                    self._progress.step()
            finally:
                self._turn.release()
            with self._pending.lock:
                self._pending.wake_sleepers()

    def is_patient(self) -> bool:
        """Return whether what runs now goes on beside the program, which needs the core more."""
        return self._pending.overlaps and not self._pending.waiters

    def fail(self, error: BaseException) -> None:
        """End everything with an error."""
        with self._turn:
            if not self._pending.lifetime.closed:
                self._progress.fail(error)

    def close(self) -> None:
        """End everything, and the progress thread; does nothing the second time."""
        pending = self._pending
        with pending.lock:
            if not pending.lifetime.close():
                return
            pending.wake_sleepers()
            self._ring()
        try:
            with self._turn:
                self._progress.end()
        finally:
            if self._thread is not None:
                self._thread.join()
            self._progress.close()

    def _wait_for_turn(self, operation: Operation) -> bool:
        """Wait until this thread drives (return True), or the operation is done (return False)."""
        # Tried with the lock held, as a thread that stops driving holds it when it notifies the waiters.
        with self._pending.lock:
            while not operation.done:
                if not self._pending.lifetime.closed and self._turn.acquire(blocking=False):
                    return True
                self._ring()  # the progress thread may nap
                self._pending.sleep(_IDLE_S)
        return False

    # ---- the progress thread ----

    def _start(self) -> None:
        if self._threads:
            self._thread = threading.Thread(target=self._run_thread, name="ringreduce", daemon=True)
            self._thread.start()

    def _ring(self) -> None:
        if self._bell.locked():
            self._bell.release()

    def _run_thread(self) -> None:
        with self._guard:
            self._make_progress()

    def _make_progress(self) -> None:
        pending = self._pending
        progress = self._progress
        sleep_s = _BACKOFF_S[0]
        while not pending.lifetime.closed:
            with pending.lock:
                self._looks_soon = self._clock() - progress.news_s < _GRACE_S
                self._asleep = pending.waiters > 0 or not pending.count
                self._asleep = self._asleep or (self._looks_soon and self._program_is_active())
            rung = True
            if self._asleep:
                until_s = sleep_s if self._looks_soon else _IDLE_S if self._followers else -1
                rung = self._bell.acquire(timeout=until_s)
                self._asleep = False
            if pending.waiters or (self._looks_soon and (not pending.count or self._program_is_active())):
                sleep_s = min(2 * sleep_s, _BACKOFF_S[1])
                continue
            sleep_s = _BACKOFF_S[0]
            if not rung:  # the program has submitted something, if anything, and has not waited for it
                self._fast_waits = 0
            with self._turn, pending.beside_program():
                self._drive(None)
            with pending.lock:
                pending.wake_sleepers()

    def _program_is_active(self) -> bool:
        """Return whether the program goes on submitting, or waits for one operation after the other, and so drives."""
        return self._fast_waits >= _FAST_WAITS and self._clock() - self._active_s < _FAST_WAIT_S

    # ---- driving; it is this thread's turn ----

    def _drive(self, operation: Operation | None) -> None:
        """Make progress until an operation, for which this thread waits, is done.

        None: on the progress thread, until another thread waits or nothing is pending.
        """
        pending = self._pending
        progress = self._progress
        tries = 0
        while pending.lifetime.open:
            moved = progress.step()
            if operation.done if operation is not None else (pending.waiters or not pending.count):
                return
            tries += 1
            if moved:
                tries = 0
            elif operation is not None and tries < _TRIES:
                os.sched_yield()
            else:
                tries = 0
                quiet_s = self._clock() - progress.news_s
                # MPI has nothing to sleep on; to spin would take the core from ranks that share it.
                if operation is None:
                    self._bell.acquire(timeout=_LONG_NAP_S if quiet_s >= 1.0 else _NAP_BESIDE_S)
                elif quiet_s > _YIELD_S:
                    time.sleep(_LONG_NAP_S if quiet_s >= 1.0 else _NAP_S)
