"""The observer interface: watch collectives from outside, at no cost while nobody does; and what is always counted.

An observer overrides the methods it wants. It is called on the thread that does the thing; one that raises is removed
and logged, and the collective goes on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from operator import add, sub
from typing import Any

_log = logging.getLogger(__name__)

#: A rank that comes this much after the last but one is last; less is no news.
LATE_S = 1e-3

_REMEMBERED = 256
_RECENT = 8  # Reports of paces, each of 16 steps, or with more than 16 ranks of as many steps as ranks.


class Instrument:
    """Base class of observers; every method may be overridden, none has to be.

    A collective runs in steps, one after the other: each begins where the last one ended, or where the collective
    began. An asynchronous operation is submitted, announced to the other ranks, and started together with others once
    all ranks have submitted it; what starts together is finished together, with collectives and steps in between.
    """

    def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
        """A collective over ``nbytes`` bytes begins on this rank."""

    def collective_finished(self, collective: str, algorithm: str, nbytes: int, duration_s: float) -> None:
        """That collective has ended on this rank after ``duration_s`` seconds."""

    def step_finished(self, step: str) -> None:
        """A step has ended: of a collective, or of packing and unpacking what travels together."""

    def operation_submitted(self, name: str) -> None:
        """The program has submitted a named operation; on its thread, which may be any."""

    def operation_described(self, name: str, parts: Sequence[str]) -> None:
        """The operation that was submitted just now is over these: names of parameters, whose gradients it reduces."""

    def operation_announced(self, name: str) -> None:
        """The engine has taken the oldest submitted operation of this name, and announces it to the other ranks."""

    def rank_was_late(self, rank: int, seconds: float, batch: int) -> None:
        """All other ranks have waited for one, to announce what starts next.

        Args:
            rank: among those of the communicator.
            seconds: for how long.
            batch: how many times operations have started before, the same on all ranks.
        """

    def operations_started(self, names: Sequence[str]) -> None:
        """All ranks have announced these operations; they run now, as one."""

    def operations_finished(self, names: Sequence[str]) -> None:
        """These operations have come to an end, with results or errors, whether or not they were started."""


class Instruments:
    """The observers of one communicator, in the order in which they were added.

    And what was called last, for `ringreduce.observe.seen.recorder`; lists of plain values, as these cost the least.

    Attributes:
        observers: looked at before each event; nothing else happens while it is empty.
        calls: of the last blocking collectives: when it was started and ended (`time.perf_counter`; 0: it has not),
            which, and bytes.
        operations: of the last named ones: when it was submitted, started and ended, its name, its signature, where the
            program submitted it, and the error with which it ended.
    """

    def __init__(self) -> None:
        self.observers: tuple[Instrument, ...] = ()
        self.calls: deque[list[Any]] = deque(maxlen=_REMEMBERED)
        self.operations: deque[list[Any]] = deque(maxlen=_REMEMBERED)

    def add(self, observer: Instrument) -> None:
        self.observers += (observer,)

    def remove(self, observer: Instrument) -> None:
        self.observers = tuple(other for other in self.observers if other is not observer)

    def notify(self, event: str, *what: object) -> None:
        """Call the method ``event`` of all observers."""
        for observer in self.observers:
            try:
                getattr(observer, event)(*what)
            except Exception:
                _log.exception("instrument %r raised and was removed", observer)
                self.remove(observer)

    def step(self, step: str) -> None:
        """Tell that a step has ended; to be called only where there are observers."""
        self.notify("step_finished", step)


@dataclass(slots=True)
class Tally:
    """What the calls of one collective add up to.

    Attributes:
        calls: how many there were.
        nbytes: how many bytes of this rank's they were over.
        seconds: how long they took, waiting for other ranks included.
    """

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, nbytes: int, seconds: float) -> None:
        """Count a message; `CallTimer` and `Runner.make` count collectives, without this call."""
        self.calls += 1
        self.nbytes += nbytes
        self.seconds += seconds


@dataclass(frozen=True, slots=True)
class Pace:
    """How one rank goes through training steps: what its own parts of them add up to.

    A rank's own part of a step lasts from the end of one reduction of gradients to the beginning of the next, without
    its waits for others.

    Attributes:
        steps: how many.
        own_s: how long its own parts took (seconds).
        last: in how many steps it came last, at least a millisecond after the last but one.
        late_s: how long after that it came then: no other rank is to blame for this wait (seconds).
        waited_s: how long it has waited for the last rank, in all steps (seconds).
        sampled_s: how long those own parts took of which the following is known (seconds).
        processor_s: of processors that the process used in these, all its threads together (seconds).
        delayed_s: how long its main thread waited for a core in these, which others had; 0 where the system does not
            count that (seconds).
        faults: page faults in these.
        loading_s: how long the program has waited for data, as far as ``loading`` has seen it (seconds).
        cores: on which the process may run, by number.
    """

    steps: int
    own_s: float
    last: int
    late_s: float
    waited_s: float
    sampled_s: float
    processor_s: float
    delayed_s: float
    faults: int
    loading_s: float
    cores: tuple[int, ...]

    def __add__(self, more: Pace) -> Pace:
        return self._with(add, more, more.cores)

    def __sub__(self, before: Pace) -> Pace:
        return self._with(sub, before, self.cores)

    def _with(self, combine: Callable[[Any, Any], Any], other: Pace, cores: tuple[int, ...]) -> Pace:
        names = [tally.name for tally in fields(self)[:-1]]
        return Pace(**{name: combine(getattr(self, name), getattr(other, name)) for name in names}, cores=cores)


@dataclass(slots=True)
class EngineTally:
    """What an engine has done.

    Attributes:
        operations: how many have ended, well or not.
        batches: in how many pieces they ran; operations that travel together are one piece.
        seconds: how long those took.
        overlapped_s: how much of that passed while the program did something else.
        late: the rank that others last waited for: the clock when they noticed, the rank, and how long they waited
            (seconds); None: there was none.
        paces: of each rank, in steps of all of which all ranks know; the same on all ranks that have ended the same
            steps. Empty: there were not enough.
        before: `paces` before each of the last eight reports, oldest first.
        reports: how many were counted.
    """

    operations: int = 0
    batches: int = 0
    seconds: float = 0.0
    overlapped_s: float = 0.0
    late: tuple[float, int, float] | None = None
    paces: list[Pace] = field(default_factory=list)
    before: deque[list[Pace]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    reports: int = 0

    @property
    def earlier(self) -> list[Pace]:
        """`paces` without the last report."""
        return self.before[-1] if self.before else []

    @property
    def recent(self) -> list[Pace]:
        """`paces` in the steps of the last eight reports."""
        if not self.before or not self.before[0]:
            return self.paces
        return [new - old for new, old in zip(self.paces, self.before[0], strict=True)]

    @property
    def windows(self) -> list[list[Pace]]:
        """`paces` in the steps of each of the last eight reports, oldest first."""
        reports = [*self.before, self.paces] if self.before else []
        return [
            [new - old for new, old in zip(after, before, strict=True)] if before else after
            for before, after in pairwise(reports)
        ]

    def count_batch(self, seconds: float, *, overlapped: bool) -> None:
        """Count operations that ran as one piece."""
        self.batches += 1
        self.seconds += seconds
        if overlapped:
            self.overlapped_s += seconds

    def count_late(self, now: float, rank: int, seconds: float) -> None:
        """Take note of a rank that others have waited for."""
        self.late = now, rank, seconds

    def add_paces(self, more: Sequence[Sequence[Any]]) -> None:
        """Count some more steps, given the arguments of a `Pace` for each rank."""
        new = [Pace(*numbers) for numbers in more]
        self.before.append(self.paces)
        self.reports += 1
        self.paces = [old + pace for old, pace in zip(self.paces, new, strict=True)] if self.paces else new


def charge(came: Sequence[Sequence[float]]) -> list[tuple[int, float, float]]:
    """Charge the wait of each step to its last rank alone, from when the last but one has come.

    Args:
        came: when each rank came (seconds), by rank and step; of a step, from any moment on.

    Returns:
        By rank: in how many steps it was last, how long it is charged with, and how long it waited itself (seconds).
    """
    last = [0] * len(came)
    late_s = [0.0] * len(came)
    ended_s = 0.0
    for moments in zip(*came, strict=True):
        end_s = max(moments)
        ended_s += end_s
        rank = moments.index(end_s)
        behind_s = end_s - max((*moments[:rank], *moments[rank + 1 :]), default=end_s)
        if behind_s >= LATE_S:
            last[rank] += 1
            late_s[rank] += behind_s
    return [(last[rank], late_s[rank], max(ended_s - sum(times), 0.0)) for rank, times in enumerate(came)]


def mean_values(ranks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over ranks of the last value of each name."""
    lists: dict[str, list[float]] = {}
    for last in ranks:
        for name, value in last.items():
            lists.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in lists.items()}
