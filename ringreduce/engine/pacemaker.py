"""How long ranks take for their own part of a training step, and what they do meanwhile.

Each rank measures its own time alone: from the end of one reduction of gradients to the beginning of the next, without
waits in between. No clocks are compared. Every `Pacemaker.length` steps it sends what it has measured to the
coordinator, beside the note of the step, and the coordinator tells all ranks who was last in how many of these steps.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from ringreduce.common.instruments import charge
from ringreduce.common.processes import delayed_s

T = TypeVar("T")

_LENGTH = 16
_SAMPLED_EVERY = 8  # steps: to ask the system what the process has used takes 0.6 us
_FEW_CORES = 8
_KEPT = 2  # reports that some ranks have not sent yet


class ProcessUsage(NamedTuple):
    """What this process has used: seconds of processors, seconds in which it waited for a core, page faults."""

    processor_s: float
    delayed_s: float
    faults: int

    @classmethod
    def now(cls) -> ProcessUsage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(used.ru_utime + used.ru_stime, delayed_s(), used.ru_minflt + used.ru_majflt)


class Pacemaker:
    """Measures the steps of this rank.

    Args:
        size: the number of ranks.
        waited_s: returns how long this rank has waited for others (seconds).
        send: takes a note for the coordinator.
        cores: the cores that this process may use; of many, none are reported.
        clock, usage: of this process.

    Attributes:
        length: so many steps are reported at once: more of many ranks, so that rank 0 sends no more per step.
        loading_s: how long the program has waited for data.
        number: so many reports were sent.
        lags: whether other ranks may know of a report before this one does, as `arrive` was told.
    """

    def __init__(
        self,
        size: int,
        waited_s: Callable[[], float],
        send: Callable[[list[Any]], object],
        cores: Sequence[int] = (),
        clock: Callable[[], float] = perf_counter,
        usage: Callable[[], ProcessUsage] = ProcessUsage.now,
    ) -> None:
        self.length = max(_LENGTH, size)
        self.loading_s = 0.0
        self.lags = False
        self._reported = False  # whether a report was sent in this step
        self._waited_s = waited_s
        self._send = send
        self._clock = clock
        self._usage = usage
        self._cores = tuple(cores) if len(cores) <= _FEW_CORES else ()
        self._joins = self.number = 0
        self._before: tuple[float, float, ProcessUsage | None] | None = None
        self._own: list[float] = []
        self._sampled: list[float] = []  # seconds, and what of `ProcessUsage` in these
        self._loaded_s = 0.0
        self._restart()

    @property
    def begun(self) -> bool:
        """Whether a reduction of gradients has ended."""
        return self._before is not None

    def arrive(self, joins: int | None) -> None:
        """Take note that this rank has come to a reduction.

        Args:
            joins: how often all ranks have joined; None: steps do not wait for each other, so that nobody knows.
        """
        if joins is None:
            self.lags = True
            joins = 0
        if self._before is None or joins != self._joins:  # ranks that have joined made fewer steps: all count anew
            self._joins = joins
            self.number = 0
            self._restart()
            return
        (then_s, waited_s, used), self._before = self._before, None
        now_s = self._clock() - then_s
        waits_s = self._waited_s() - waited_s
        self._own.append(now_s - waits_s)
        if used is not None and not waits_s:
            more = now_s, *(new - old for new, old in zip(self._usage(), used, strict=True))
            self._sampled = [each + new for each, new in zip(self._sampled, more, strict=True)]
        if len(self._own) == self.length:
            measured = [*self._sampled, self.loading_s - self._loaded_s, self._cores]
            self._send(["pace", self._joins, self.number, self._own, *measured])
            self.number = self.number + 1
            self._reported = True
            self._restart()

    def leave(self) -> bool:
        """Take note that the reduction has ended; return whether a report was sent since the last one."""
        sampled = len(self._own) % _SAMPLED_EVERY == 0
        self._before = self._clock(), self._waited_s(), self._usage() if sampled else None
        reported = self._reported
        self._reported = False
        return reported

    def load(self, following: Callable[[Iterator[T]], T], iterator: Iterator[T]) -> T:
        """Return the next batch of a loader; what that takes is no time for which other ranks are waited for."""
        loaded_s = self.loading_s
        began = perf_counter()
        try:
            return following(iterator)
        finally:  # a loader that gets batches of another one counts once
            self.loading_s = loaded_s + perf_counter() - began

    def _restart(self) -> None:
        self._before = None
        self._own, self._sampled, self._loaded_s = [], [0.0] * (1 + len(ProcessUsage._fields)), self.loading_s


class Paces:
    """Puts the reports of all ranks together; on the coordinator.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._reports: dict[tuple[int, int], dict[int, list[Any]]] = {}

    def receive(self, rank: int, joins: int, number: int, *report: Any) -> list[list[Any]]:
        """Take a report; return the note to all ranks once all have sent one of these steps."""
        key = joins, number
        reports = self._reports.setdefault(key, {})
        reports[rank] = list(report)
        if len(reports) < self._size:
            if len(self._reports) > _KEPT:  # ranks have joined since, and sent none
                del self._reports[min(self._reports)]
            return []
        self._reports = {each: said for each, said in self._reports.items() if each > key}
        return [["paces", self._judge([reports[each] for each in range(self._size)])]]

    def _judge(self, reports: list[list[Any]]) -> list[list[Any]]:
        """Return the arguments of a `Pace` for each rank."""
        own = [each[0] for each in reports]
        return [
            [len(times), sum(times), *charged, *more]
            for times, charged, (_, *more) in zip(own, charge(own), reports, strict=True)
        ]
