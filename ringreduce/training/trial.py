"""Finds out which of two ways to do something makes steps quicker, by doing both in turn."""

from __future__ import annotations

from statistics import median
from time import perf_counter

__all__ = ["Trial"]

_TURNS = 6
_STEPS = 6  # in a turn; the first one, in which things change, does not count


class Trial:
    """Times steps with something and without it, in turn.

    All ranks count the same steps. They time their own: as they wait for each other in every step, the slowest decides
    what all of them see.

    Attributes:
        on: whether the next step is one with it.
        over: whether it has been tried out.
    """

    def __init__(self) -> None:
        self.on, self.over = True, False
        self._times: dict[bool, list[float]] = {True: [], False: []}
        self._count = 0
        self._ended_s = 0.0
        self._times_next = False

    def end_step(self, *, counts: bool) -> None:
        """End a step.

        Args:
            counts: whether it was with it, or without, as `on` said. If not, the next one, which may have to catch up,
                is not timed either.
        """
        if not counts:
            self._times_next = False
            return
        now = perf_counter()
        if self._times_next:
            self._times[self.on].append(now - self._ended_s)
        self._ended_s = now
        self._count += 1
        self._times_next = self._count % _STEPS > 0
        self.over = self._count >= _TURNS * _STEPS
        self.on = self._count // _STEPS % 2 == 0

    @property
    def slower(self) -> bool:
        """Whether it is over, and steps with it have taken longer."""
        return self.over and all(self._times.values()) and median(self._times[True]) > median(self._times[False])
