"""Buckets that may be reduced before the step: where they are, and what has become of their gradients since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.engine import InPlaceAllreduce
from ringreduce.training.agreement import ADDED, CHANGED
from ringreduce.training.buckets import Bucket
from ringreduce.training.framework import Handover, Hooks

__all__ = ["NEXT", "STANDING", "UNKNOWN", "Event", "Fate", "Stage", "Travelling", "Watched", "what_is_wrong"]

UNKNOWN = -1  # in place of the id of a gradient

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
    (Stage.FILLING, Event.CLEARED): Stage.FILLING,
    (Stage.UNDER_WAY, Event.CLEARED): Stage.UNDER_WAY,
    (Stage.WAITING, Event.CLEARED): Stage.WAITING,
    **{(stage, Event.STEPPED): Stage.FILLING for stage in Stage},
}


class Fate(IntEnum):
    """What has become of a gradient since its bucket was submitted; what is greater hides what is less."""

    NONE = 0  # nothing
    MISSING = 1  # nothing; this rank had none, and zeros were reduced
    ADDED = 2  # a backward pass has added to it
    CHANGED = 3  # the program has written to it
    CLEARED = 4  # the program has replaced it, or set it to None


#: How a bucket stands with such a gradient.
STANDING = {Fate.ADDED: ADDED, Fate.CHANGED: CHANGED}


@dataclass(slots=True, eq=False)
class Watched:
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
    """

    parameter: Any
    times: int = 0
    expected: int = 0
    gradient: int = 0
    version: int = 0
    fate: Fate = Fate.NONE
    fresh: bool = False
    summed: int = 0

    def begin(self) -> None:
        """Begin the next step: forget all of the last one but how often it added to the gradient."""
        self.expected = self.times or self.expected
        self.times = self.gradient = self.version = 0
        self.fate, self.fresh = Fate.NONE, False

    def meet(self, fate: Fate) -> None:
        """Take note of what has become of the gradient."""
        self.fate = max(self.fate, fate)

    def reduced(self) -> None:
        """Take note that what the step has returned is the gradient now."""
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
            self.meet(Fate.CHANGED if now[0] == self.gradient else Fate.CLEARED)

    def _now(self, hooks: Hooks) -> tuple[int, int]:
        gradient = self.parameter.grad
        return id(gradient), 0 if gradient is None else hooks.version(gradient)


class Travelling:
    """A bucket that is to be reduced during the backward pass.

    Attributes:
        bucket: the bucket.
        handover: see `Streams.handover`.
        members: its parameters.
        missing: how many of them have not been added to as often as expected.
        stage: where it is.
        part: its reduction, while it is under way.
    """

    __slots__ = ("bucket", "generation", "handover", "members", "missing", "number", "part", "stage")

    def __init__(self, number: int, bucket: Bucket, members: Sequence[Watched], handover: Handover | None) -> None:
        self.number, self.bucket, self.members, self.handover = number, bucket, members, handover
        self.generation = 0  # how often all ranks have withdrawn it; a part of its name
        self.stage = Stage.FILLING
        self.part: InPlaceAllreduce | None = None
        self.meet(Event.STEPPED)

    def meet(self, event: Event) -> None:
        """Go on to the next stage."""
        self.stage = NEXT[self.stage, event]
        if self.stage is not Stage.UNDER_WAY:
            self.part = None
        if event is Event.STEPPED or (event is Event.CLEARED and self.part is None):
            self.missing = sum(member.expected > 0 for member in self.members)  # wait for all gradients again


def what_is_wrong(standing: npt.NDArray[np.uint8], cleared: _Flags, kept: _Flags, *, everyone: bool, sums: bool) -> str:
    """Return what is wrong with a bucket that was reduced during the backward pass; empty if nothing is.

    Args:
        standing: of each gradient, the largest that a rank has said.
        cleared: whether some rank has cleared it since.
        kept: whether some rank has not.
        everyone: whether the ranks that contribute to the step are those that have reduced the bucket.
        sums: whether it was summed up.
    """
    remedy = (
        "make passes whose gradients are not for the next step within no_sync(), call synchronize() before "
        "gradients are looked at or changed, or give overlap=False."
    )
    if not everyone:
        return f"a rank has made a backward pass and then joined without a step: {remedy}"
    if (standing == CHANGED).any():
        return f"the program has written to gradients between the backward pass and the step: {remedy}"
    if (cleared & kept).any() or (sums and cleared.any() and kept.any()):
        return f"some ranks, and not all, have cleared or replaced gradients after a backward pass: {remedy}"
    if sums and (standing == ADDED).any():
        return (
            "a backward pass has added to sums over the ranks: declare all passes of a step with "
            f"backward_passes_per_step, or {remedy}"
        )
    return ""
