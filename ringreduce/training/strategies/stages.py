"""Buckets that may be reduced before the step: their stages, the fates of their gradients, and whether it pays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.training.binding.framework import Hooks
from ringreduce.training.gradients.record import ADDED, CHANGED

UNKNOWN = -1  # in place of the id of a gradient

_TURNS = 6
_STEPS_OF_TURN = 6  # the first one, in which things change, does not count

_Flags = npt.NDArray[np.bool_]


class Stage(Enum):
    """Where a bucket is between two steps."""

    FILLING = auto()  # some of its gradients are still to be added to
    UNDER_WAY = auto()  # submitted
    WAITING = auto()  # for the step


class Event(Enum):
    """What happens to a bucket."""

    SUBMITTED = auto()  # it is complete, and its gradients are in their places
    HELD_BACK = auto()  # it is complete, and a gradient cannot be moved, or nothing can be submitted
    WITHDRAWN = auto()  # before it was reduced
    CLEARED = auto()  # the program has cleared the gradients
    STEPPED = auto()


#: The stage that follows; what is not here cannot happen.
NEXT = {
    (Stage.FILLING, Event.SUBMITTED): Stage.UNDER_WAY,
    (Stage.FILLING, Event.HELD_BACK): Stage.WAITING,
    (Stage.UNDER_WAY, Event.WITHDRAWN): Stage.WAITING,
    **{(stage, Event.CLEARED): stage for stage in Stage},
    **{(stage, Event.STEPPED): Stage.FILLING for stage in Stage},
}


class Fate(IntEnum):
    """What has become of a gradient since its bucket was submitted; the greatest counts."""

    NONE = 0  # nothing
    MISSING = 1  # nothing; this rank had none, and zeros were reduced
    ADDED = 2  # a backward pass has added to it
    CHANGED = 3  # the program has written to it
    CLEARED = 4  # the program has replaced it, or set it to None


#: The status in the agreement of a bucket with such a gradient.
STATUS = {Fate.ADDED: ADDED, Fate.CHANGED: CHANGED}


@dataclass(slots=True, eq=False)
class GradientState:
    """A parameter whose gradient is watched.

    Attributes:
        parameter: the parameter.
        times: how often its gradient was added to since the last step.
        expected: the same in the last step that added to it at all.
        gradient: the ``id`` of its gradient when that was added to, or submitted, last.
        version: the version of its gradient then.
        fate: what has become of it since.
        fresh: whether it was added to since the last step, in a pass that counts or not.
        summed: the ``id`` of the gradient that the last step has summed up over the ranks; 0: of none.
        again: whether what is added to now, or was last, is that gradient.
    """

    parameter: Any
    times: int = 0
    expected: int = 0
    gradient: int = 0
    version: int = 0
    fate: Fate = Fate.NONE
    fresh: bool = False
    summed: int = 0
    again: bool = False

    def begin(self, *, sums: bool) -> None:
        """Begin the next step: forget all of the last one but how often it added to the gradient.

        Args:
            sums: whether the last one has summed up over the ranks what was added.
        """
        if self.fresh and sums:
            self.summed = UNKNOWN
        self.expected = self.times or self.expected
        self.times = self.gradient = self.version = 0
        self.fate = Fate.NONE
        self.fresh = False
        self.again = False

    def count(self, hooks: Hooks, *, counts: bool) -> None:
        """Record an addition; ``counts``: in a pass that counts."""
        self.remember(hooks)
        self.fresh = True
        self.times += counts

    def cleared(self) -> None:
        """Record that the program has cleared all gradients: what was added before does not count."""
        self.summed = self.times = 0
        self.fresh = self.again = False

    def watch_from_now(self, fate: Fate, hooks: Hooks) -> None:
        """Look from now on whether anything changes the gradient, of which this is the fate so far."""
        self.fate = fate
        self.remember(hooks)

    def before_adding(self, hooks: Hooks) -> None:
        """Find out whether the gradient that is added to now was summed up, and not cleared since."""
        gradient = self.parameter.grad
        self.again = id(gradient) == self.summed and not hooks.is_zero(gradient)
        if not self.again:
            self.summed = 0

    def apply(self, fate: Fate) -> None:
        """Record what has become of the gradient."""
        self.fate = max(self.fate, fate)

    def reduced(self) -> None:
        """Record that the result of the step is the gradient now."""
        if self.summed == UNKNOWN:
            self.summed = id(self.parameter.grad)

    def remember(self, hooks: Hooks) -> None:
        """Remember the gradient as it is now."""
        self.gradient, self.version = self._now(hooks)

    def look(self, hooks: Hooks, moved: Mapping[int, tuple[int, int]]) -> None:
        """Find out whether the program has changed or replaced the gradient since it was remembered.

        Args:
            hooks: the framework's.
            moved: where buckets have moved gradients meanwhile, see `Buckets`.
        """
        now = self._now(hooks)
        if now != (self.gradient, self.version) and now != moved.get(id(self.parameter)):
            self.apply(Fate.CHANGED if now[0] == self.gradient else Fate.CLEARED)

    def _now(self, hooks: Hooks) -> tuple[int, int]:
        gradient = self.parameter.grad
        return id(gradient), 0 if gradient is None else hooks.version(gradient)


def what_is_wrong(status: npt.NDArray[np.uint8], cleared: _Flags, kept: _Flags, *, everyone: bool) -> str:
    """Return what is wrong with a bucket that was reduced during the backward pass; empty if nothing is.

    Args:
        status: of each gradient, the largest that a rank has said.
        cleared: whether some rank has cleared it since.
        kept: whether some rank has not.
        everyone: whether the ranks that contribute to the step are those that have reduced the bucket.
    """
    remedy = (
        "make passes whose gradients are not for the next step within no_sync(), call synchronize() before "
        "gradients are looked at or changed, or give overlap=False."
    )
    if not everyone:
        return f"a rank has made a backward pass and then joined without a step: {remedy}"
    if (status == CHANGED).any():
        return f"the program has written to gradients between the backward pass and the step: {remedy}"
    if (cleared & kept).any():
        return f"some ranks, and not all, have cleared or replaced gradients after a backward pass: {remedy}"
    return ""


class OverlapProbe:
    """Finds out whether overlap makes steps quicker: times steps with it and without it, in turn.

    All ranks count the same steps. They time their own: as they wait for each other in every step, the slowest decides
    what all of them see.

    Attributes:
        on: whether the next step is one with it.
        over: whether it has been tried out.
    """

    def __init__(self) -> None:
        self.on = True
        self.over = False
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
        self._times_next = self._count % _STEPS_OF_TURN > 0
        self.over = self._count >= _TURNS * _STEPS_OF_TURN
        self.on = self._count // _STEPS_OF_TURN % 2 == 0

    @property
    def slower(self) -> bool:
        """Whether it is over, and steps with it have taken longer."""
        return self.over and all(self._times.values()) and median(self._times[True]) > median(self._times[False])
