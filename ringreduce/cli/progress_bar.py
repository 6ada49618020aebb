"""How far a command that takes long has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 5.0  # between two lines
_MB = 10**6


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


@contextmanager
def bytes_bar(of: str) -> Iterator[Callable[[int, int], object]]:
    """Show on standard error how many bytes are done: as a bar in a terminal, else as lines a few seconds apart.

    Args:
        of: what is done with them.

    Yields:
        What is called with the bytes that are done, more than 0, and all there are.
    """
    if not sys.stderr.isatty():
        line = ProgressLine(of, done="MB copied")
        yield lambda done, total: line(-(-done // _MB), -(-total // _MB))
        return
    from rich.console import Console  # which takes longer to import than the rest of `ringreduce run`
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(of, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
