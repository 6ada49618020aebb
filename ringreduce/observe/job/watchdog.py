"""Notices that a whole job stalls: no rank makes a step, a collective or a report for some time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ringreduce.common.errors import name_ranks
from ringreduce.observe.job.waits import places_in_words, waits
from ringreduce.observe.seen.snapshots import Snapshot

_SILENT_S = 5.0  # of a rank that tells of itself every second
_SHOWN = 4  # ranks whose places are said


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

    def look(self, snapshots: Sequence[Snapshot]) -> str | None:
        """Return what the job waits for, in a paragraph, if it stalls and that was not said yet."""
        now_s = self._clock()
        moved = [(each.rank, each.progress) for each in snapshots]
        if moved != self._moved or any(each.busy for each in snapshots):
            self._moved = moved
            self._since_s = now_s
            self._has_said = False
        limit_s = self._limit_s if any(each.begun for each in snapshots) else self._first_s
        if self._has_said or now_s - self._since_s < limit_s:
            return None
        self._has_said = True
        return f"no rank has made a step, a collective or a report for {limit_s:g} s. {self._cause(snapshots)}"

    def _cause(self, snapshots: Sequence[Snapshot]) -> str:
        """Return the likely cause."""
        ranks = {each.rank: each for each in snapshots}
        now = time.time()
        silent = [rank for rank in range(self._size) if rank not in ranks]
        silent += [rank for rank, each in ranks.items() if each.age_s(now) > _SILENT_S]
        if silent:
            return f"{name_ranks(sorted(silent))} told nothing: stopped, lost, or in code that holds Python"
        places = {rank: each.place for rank, each in ranks.items()}
        for wait in waits(ranks):
            if wait.absent:
                return wait.in_words() + places_in_words(places, wait.absent[:_SHOWN])
            if wait.is_call:
                return f"{wait.in_words()}: look at the network, and at who has left before"
        return f"no rank waits for another{places_in_words(places, sorted(ranks)[:_SHOWN])}"
