"""What ends a task for each array that is on its way between two ranks."""

from __future__ import annotations

import threading

from ringreduce.common.lifetime import Lifetime
from ringreduce.common.serial import SerialTask
from ringreduce.transport.point_to_point import PeerTransfer, PointToPoint


class Deliveries:
    """Ends a task for each transfer when that is done, in whatever order this happens. Thread-safe.

    One thread waits for all of them, which begins with the first and sleeps while there are none.

    Args:
        name: of that thread.
        messages: of the transfers.
        lifetime: of what they belong to; closed before this is.
        threads: whether there may be one; without it, to add a transfer is to wait for it.
    """

    def __init__(self, name: str, messages: PointToPoint, lifetime: Lifetime, *, threads: bool) -> None:
        self._name = name
        self._lifetime = lifetime
        self._messages = messages
        self._threads = threads
        self._changed = threading.Condition()
        self._added: list[tuple[PeerTransfer, SerialTask]] = []  # Transfers and tasks that the thread has not seen.
        self._thread: threading.Thread | None = None

    def add(self, transfer: PeerTransfer) -> SerialTask:
        """Return what ends when a transfer does, with its error; or with why it cannot be waited for any longer."""
        task = SerialTask(lambda: self._messages.wait(transfer), str(transfer))
        if not self._threads:
            task.run()
            return task
        with self._changed:
            self._lifetime.require_open()
            self._added.append((transfer, task))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return task

    def close(self) -> None:
        """Return when all have ended; the messages are closed by then, which ends all transfers."""
        with self._changed:
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        waiting: list[tuple[PeerTransfer, SerialTask]] = []
        while True:
            with self._changed:
                if not waiting:
                    self._changed.wait_for(lambda: self._added or self._lifetime.closed)
                waiting = waiting + self._added
                self._added = []
            if not waiting:
                return
            try:
                self._messages.wait_for_some([transfer for transfer, _ in waiting], lambda: bool(self._added))
            except Exception as error:  # Nothing has come for the time limit, or never will.
                for _, task in waiting:
                    task.end(error)
                waiting = []
            for transfer, task in waiting:
                if transfer.done:
                    task.end(transfer.error)
            waiting = [pending for pending in waiting if not pending[0].done]
