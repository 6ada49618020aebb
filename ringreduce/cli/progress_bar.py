"""How far a command that takes long has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["ProgressLine"]

_EVERY_S = 5.0  # between two lines


class ProgressLine:
    """Says on standard error how much is done, a few seconds apart.

    Args:
        of: what the lines begin with.
        clock: returns seconds since some time or other.
        done: what was done with the parts.
    """

    def __init__(self, of: str, clock: Callable[[], float] = time.monotonic, *, done: str = "measured") -> None:
        self._of = of
        self._clock = clock
        self._verb = done
        self._began = self._said = clock()

    def __call__(self, done: int, total: int) -> None:
        """Take note that so many parts of all are done."""
        now = self._clock()
        if now - self._said < _EVERY_S or done == total:
            return
        self._said = now
        left_s = (now - self._began) / done * (total - done)
        sys.stderr.write(f"ringreduce: {self._of}: {done} of {total} {self._verb}, about {left_s:.0f} s to go\n")
        sys.stderr.flush()
