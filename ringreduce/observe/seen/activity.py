"""What the program of a rank is at: whether it is busy with something that makes no steps, and where it is."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NOT_THE_PROGRAM = (str(Path(__file__).parents[2]), "<frozen")


class Activity:
    """Whether this rank is busy with something that makes no steps."""

    def __init__(self) -> None:
        self._busy: list[str] = []

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Return a context in which no progress of this rank is expected."""
        self._busy.append(what)
        try:
            yield
        finally:
            self._busy.remove(what)

    def now(self) -> str | None:
        """Return with what this rank is busy, the innermost of several; None: with nothing of that kind."""
        return self._busy[-1] if self._busy else None


def place_in_program(frames: Iterable[tuple[str, int, str, str]]) -> str:
    """Return where a thread is in the program's own code; empty if it is nowhere there.

    Args:
        frames: file, line, function and text of the line of each frame, the innermost first.
    """
    for file, line, function, text in frames:
        if not file.startswith(_NOT_THE_PROGRAM):
            return f"{file}:{line} in {function}" + (f" ({text})" if text else "")
    return ""


def main_thread_place() -> str:
    """Return where the main thread is in the program's own code, without the text of the line: no file is read."""
    ident = threading.main_thread().ident
    frame = None if ident is None else sys._current_frames().get(ident)
    if frame is None:
        return ""
    return place_in_program(
        (each.f_code.co_filename, line, each.f_code.co_name, "") for each, line in traceback.walk_stack(frame)
    )
