"""What warns this process that it is to stop: signals, or the program."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from ringreduce.common import processes

#: A scheduler may signal all processes, and the launcher passes its own signal on: within this time (seconds) that is
#: one warning.
_ONE_WARNING_S = 3.0


class StopRequest:
    """Whether this process was asked to stop.

    Args:
        can_stop: whether this process is a rank, and its program may still ask. If not, SIGTERM does what it did
            before.
        clock: returns seconds.

    Attributes:
        made: whether it was.
    """

    def __init__(self, can_stop: Callable[[], bool], clock: Callable[[], float] = time.monotonic) -> None:
        self.made = False
        self._can_stop = can_stop
        self._clock = clock
        self._listens = False
        self._is_agreed = False
        self._terminated: float | None = None  # When SIGTERM came first.
        self._before: dict[int, Any] = {}  # The handlers that were there, by signal.

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR1 for a request from now on, where the program does not handle them itself.

        Does nothing the second time, or on another thread than the main one, which cannot handle signals.
        """
        if self._listens or threading.current_thread() is not threading.main_thread():
            return
        self._listens = True
        for number in (signal.SIGTERM, signal.SIGUSR1):
            before = signal.getsignal(number)
            if processes.is_default(number) or processes.is_own_handler(before):
                self._before[number] = signal.signal(number, self._on_signal)
        processes.end_children_by_sigterm()

    def agree(self) -> None:
        """Take note that all ranks stop: this one ends, and warnings that come until it has are the same warning."""
        if not self._is_agreed:
            self._is_agreed = True
            processes.at_exit(_ignore_warnings)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if number == signal.SIGTERM:
            now = self._clock()
            first = now if self._terminated is None else self._terminated
            if (self._is_agreed or self._can_stop()) and now - first < _ONE_WARNING_S:
                self._terminated = first
                self.made = True
                return
        else:  # At the end of the program, and in forked processes, it ends nothing.
            if self._can_stop():
                self.made = True
                if callable(before):
                    before(number, frame)  # It writes down what this rank has done last.
            return
        if callable(before):
            before(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _ignore_warnings() -> None:
    # Python then drops the handlers, while MPI and the program's objects are still to end.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        processes.ignore(number)
