"""When a rank made its steps: a few moments of a run, however long that is."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

_KEPT = 32  # laps, at least; at most twice as many


class Spent(NamedTuple):
    """How this rank has spent its time until now (seconds).

    Attributes:
        blocking_s: in blocking collectives.
        waited_s: waiting for asynchronous operations and steps of optimizers.
        loading_s: waiting for data, as far as ``loading`` has seen it.
        delayed_s: the main thread, waiting for a core that others had; 0 where the system does not count it.
    """

    blocking_s: float = 0.0
    waited_s: float = 0.0
    loading_s: float = 0.0
    delayed_s: float = 0.0

    def since(self, before: Spent) -> Spent:
        """Return what was spent since an earlier moment."""
        return Spent(*(now - then for now, then in zip(self, before, strict=True)))


class Lap(NamedTuple):
    """What a rank had done at the end of some step.

    Attributes:
        steps, samples: how many.
        moment_s: when, by `time.perf_counter`.
        spent: until then.
    """

    steps: int
    samples: int
    moment_s: float
    spent: Spent


class SpentOnSteps(NamedTuple):
    """The time since the first step, and parts of it (seconds).

    Attributes:
        steps_s: all of it.
        input_s: waiting for data.
        communication_s: in collectives, and waiting for operations.
        waiting_s: of that, for the last rank; None: not known.
    """

    steps_s: float
    input_s: float
    communication_s: float
    waiting_s: float | None = None


class StepClock:
    """Keeps laps of equal numbers of steps, from the first step on.

    Args:
        spent: returns how this rank has spent its time.
        clock: returns seconds.

    Attributes:
        laps: the oldest first.
    """

    def __init__(self, spent: Callable[[], Spent], clock: Callable[[], float] = perf_counter) -> None:
        self.laps: list[Lap] = []
        self._spent = spent
        self._clock = clock
        self._next = self._stride = 1

    def until_now(self, waiting_s: float | None = None) -> SpentOnSteps | None:
        """Return the time since the first step; None: there was none. ``waiting_s``: for the last rank."""
        if not self.laps:
            return None
        first = self.laps[0]
        spent = self._spent().since(first.spent)
        steps_s = self._clock() - first.moment_s
        return SpentOnSteps(steps_s, spent.loading_s, spent.blocking_s + spent.waited_s, waiting_s)

    def look(self, steps: int, samples: int) -> None:
        """Keep a lap if enough steps were made since the last one; to be called after each step."""
        if steps < self._next:
            return
        self.laps.append(Lap(steps, samples, self._clock(), self._spent()))
        if len(self.laps) > 2 * _KEPT:
            self.laps = self.laps[::2]
            self._stride *= 2
        self._next = self.laps[-1].steps + self._stride
