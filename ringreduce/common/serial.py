"""Calls that run one at a time, in the order in which the program makes them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from ringreduce.common.errors import CollectiveTimeoutError
from ringreduce.common.lifetime import Lifetime


class SerialTask:
    """A call that runs once, now or later.

    Args:
        call: what to do.
        name: for errors.

    Attributes:
        done: whether it has ended, well or not.
        error: what it has raised.
    """

    __slots__ = ("_call", "_lock", "_name", "_over", "_then", "done", "error")

    def __init__(self, call: Callable[[], object], name: str) -> None:
        self._call: Callable[[], object] | None = call
        self._name = name
        self._lock = threading.Lock()
        self._over = threading.Lock()  # Held until it has ended; an Event takes ten times as long to make and set.
        self._over.acquire()
        self._then: list[Callable[[], object]] = []
        self.done = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it, and keep what it raises; what interrupts the program is raised as well."""
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.end()

    def end(self, error: BaseException | None = None) -> None:
        """Take note that it has ended, and how."""
        with self._lock:
            self.error = error
            self._call = None
            self.done = True
            waiting = self._then
            self._then = []
        self._over.release()
        for call in waiting:
            call()

    def when_done(self, call: Callable[[], object]) -> None:
        """Call this once it has ended: at once, or on the thread that ends it."""
        with self._lock:
            if not self.done:
                self._then.append(call)
                return
        call()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once it has ended.

        Args:
            timeout_s: how long to wait at most; None: what it does has a limit of its own.

        Raises:
            CollectiveTimeoutError: it has not ended in time, and goes on.
            Exception: what it has raised.
        """
        if not self.done:
            if not self._over.acquire(timeout=-1 if timeout_s is None else timeout_s):
                raise CollectiveTimeoutError(f"waited {timeout_s:g} s for {self._name}, which is still running")
            self._over.release()  # Lets others that wait go on.
        if self.error is not None:
            raise self.error


class InOrder:
    """Runs calls one at a time, in their order. Thread-safe.

    A call that the program waits for anyway runs in the program's thread, if nothing is before it. All others run on
    one thread, which sleeps while there are none and begins with the first of them.

    Args:
        name: of that thread.
        lifetime: of what the calls belong to; closed before this is.
        threads: whether there may be one; without it all calls run in the program's thread.
    """

    def __init__(self, name: str, lifetime: Lifetime, *, threads: bool) -> None:
        self._name = name
        self._lifetime = lifetime
        self._threads = threads
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # Held while a call runs; taken in the order of the calls.
        self._pending = 0
        self._queue: queue.SimpleQueue[SerialTask | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def queues(self) -> bool:
        """Whether a call that is made now would come after others on the thread."""
        return self._threads and self._pending > 0

    def submit(self, task: SerialTask, *, here: bool) -> None:
        """Run a task after all that were submitted before it.

        What is called when a task is done may submit others; where that is on this thread, they run at once, before all
        that are waiting. So they come at the same place on all ranks, however far ahead the program is.

        Args:
            task: which has not run.
            here: whether the program waits for it at once.

        Raises:
            ShutdownError: what it belongs to was closed.
            ConfigError: this process was forked by the rank.
        """
        if threading.current_thread() is self._thread:
            task.run()
            return
        with self._lock:
            self._lifetime.require_open()
            inline = not self._threads or (here and not self._pending)
            self._pending += 1
            if inline:
                self._turn.acquire()  # It takes no time where nothing is pending.
            else:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._queue.put(task)
        if inline:
            try:
                task.run()
            finally:
                self._turn.release()
                self._finished()

    def close(self) -> None:
        """Return when all that were submitted are done."""
        with self._lock:
            thread = self._thread
            self._thread = None
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            with self._turn, suppress(BaseException):  # The task has kept its error for those who wait.
                task.run()
            self._finished()
            del task

    def _finished(self) -> None:
        with self._lock:
            self._pending -= 1
