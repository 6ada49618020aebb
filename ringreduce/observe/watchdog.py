"""Notices that a whole job stalls: no rank makes a step, a collective or a report for some time."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ringreduce.common.errors import name_ranks
from ringreduce.observe.waits import place_in_program, places_in_words, waits

_SILENT_S = 5.0  # of a rank that tells of itself every second
_SHOWN = 4  # ranks whose places are said


class Activity:
    """Whether this rank is busy with something that makes no steps, and where its main thread is."""

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

    def told(self, made: int, calls: int) -> dict[str, Any]:
        """Return what a `Watchdog` needs of a snapshot; ``made``: steps and reports."""
        return {
            "progress": made + calls,
            "begun": made > 0,
            "busy": self._busy[-1] if self._busy else None,
            "place": _main_thread_place(),
        }


class Watchdog:
    """Looks at snapshots of ranks, and says once for each stall that there is one.

    Args:
        limit_s: so long nothing has to happen on any rank (seconds).
        first_s: and so long, if that is longer, while no rank has made a step or a report: libraries are imported, data
            are read, and programs are compiled.
        size: of the world.
        clock: returns seconds.
    """

    def __init__(self, limit_s: float, first_s: float, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._first_s = max(limit_s, first_s)
        self._size = size
        self._clock = clock
        self._since_s = clock()
        self._moved: list[tuple[int, int]] = []
        self._has_said = False

    def look(self, snapshots: Sequence[dict[str, Any]]) -> str | None:
        """Return what the job waits for, in a paragraph, if it stalls and that was not said yet."""
        now_s = self._clock()
        moved = [(each["rank"], each["progress"]) for each in snapshots]
        if moved != self._moved or any(each["busy"] for each in snapshots):
            self._moved = moved
            self._since_s = now_s
            self._has_said = False
        limit_s = self._limit_s if any(each["begun"] for each in snapshots) else self._first_s
        if self._has_said or now_s - self._since_s < limit_s:
            return None
        self._has_said = True
        return f"no rank has made a step, a collective or a report for {limit_s:g} s. {self._cause(snapshots)}"

    def _cause(self, snapshots: Sequence[dict[str, Any]]) -> str:
        """Return the likely cause."""
        ranks = {each["rank"]: each for each in snapshots}
        now = time.time()
        silent = [rank for rank in range(self._size) if rank not in ranks]
        silent += [rank for rank, each in ranks.items() if now - each.get("arrived", each["time"]) > _SILENT_S]
        if silent:
            return f"{name_ranks(sorted(silent))} told nothing: stopped, lost, or in code that holds Python"
        places = {rank: each["place"] for rank, each in ranks.items()}
        for wait in waits(ranks):
            if wait.absent:
                return wait.in_words() + places_in_words(places, wait.absent[:_SHOWN])
            if wait.is_call:
                return f"{wait.in_words()}: look at the network, and at who has left before"
        return f"no rank waits for another{places_in_words(places, sorted(ranks)[:_SHOWN])}"


def _main_thread_place() -> str:
    """Return where the main thread is in the program's own code, without the text of the line: no file is read."""
    ident = threading.main_thread().ident
    frame = None if ident is None else sys._current_frames().get(ident)
    if frame is None:
        return ""
    return place_in_program(
        (each.f_code.co_filename, line, each.f_code.co_name, "") for each, line in traceback.walk_stack(frame)
    )
