"""What a rank does again and again beside its program, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Repeated"]


class Repeated:
    """Calls a function every ``every_s`` seconds, until it is ended."""

    def __init__(self, name: str, every_s: float, action: Callable[[], object]) -> None:
        self._every_s, self._action = every_s, action
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def end(self, patience_s: float | None = None) -> None:
        """Call it no more, and wait for a call that is being made; None: without limit."""
        self._ends.set()
        self._thread.join(patience_s)

    def _run(self) -> None:
        while not self._ends.wait(self._every_s):
            self._action()
