"""Buckets that are reduced while the backward pass goes on, where they are.

Between nodes the network is the bottleneck, and it idles during the backward pass unless buckets travel as soon as they
are complete. A bucket is complete when autograd has added to each of its gradients as often as in the step before, in
all passes together. It is submitted when the next gradient comes or the pass ends, because the program's hooks that run
after ours have run by then. The engine's thread reduces it in place. In the step the ranks tell each other which
buckets they have submitted. Those that all have submitted are reduced; all others are withdrawn and reduced in the
step.

No copy of a bucket is reduced but the bucket itself, so a gradient must not change between its last pass and the step.
The versions of the gradients show whether it did, and the ranks tell each other in the step:

* Overlap begins after two steps in which no rank has changed a gradient by itself and all have made the declared number
  of passes. A program that changes its gradients (it clips them, say) gets no overlap, and a warning. Unless a program
  asks for it, overlap then goes on and off in turns of some steps (`Trial`), and stays off if that was quicker.
* Autograd has added to a gradient again: if its bucket was not reduced yet, it is withdrawn. If it was, averages are
  averaged again, which gives the same as if all had been added up first; a sum is refused.
* Gradients were cleared and computed anew: if so on all ranks, they are reduced again. If only on some, or if anything
  else has written to one, all ranks raise a `ConfigError`: what the others had is gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import ConfigError, ShutdownError, TransportError
from ringreduce.common.reduce_ops import SUM
from ringreduce.engine import InPlace
from ringreduce.training.agreement import ADDED, CHANGED, WAITS, Record
from ringreduce.training.buckets import Bucket, Buckets, names_in
from ringreduce.training.framework import EMPTY, Handover, Hooks
from ringreduce.training.reducer import GradientReducer
from ringreduce.training.trial import Trial

__all__ = ["NEXT", "Event", "Overlap", "Stage", "Watched", "what_is_wrong"]

_log = logging.getLogger(__name__)

_STEPS = 2  # so many alike before overlap begins

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
_STANDING = {Fate.ADDED: ADDED, Fate.CHANGED: CHANGED}


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


class _Travelling:
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
        self.part: InPlace | None = None
        self.meet(Event.STEPPED)

    def meet(self, event: Event) -> None:
        """Go on to the next stage."""
        self.stage = NEXT[self.stage, event]
        if self.stage is not Stage.UNDER_WAY:
            self.part = None
        if event is Event.STEPPED or (event is Event.CLEARED and self.part is None):
            self.missing = sum(member.expected > 0 for member in self.members)  # wait for all gradients again


class Overlap:
    """The reductions of one optimizer's buckets during its backward passes.

    Thread-safe.

    Args:
        hooks: the framework's.
        reducer: of the optimizer's gradients. Its option ``overlap`` says whether buckets are to be reduced during the
            backward pass; None: if that makes steps quicker, which the first steps try out. If not, some steps are
            watched, to warn a program that changes its gradients. Where gradients must be this rank's own until the
            step, nothing overlaps.

    Attributes:
        wanted: whether buckets are, or may be, reduced during the backward pass; the same on all ranks.
        begun: whether complete buckets are submitted now; the same on all ranks.
        watching: whether anything is to be learnt from what the program does; the same on all ranks.
        suspends: whether passes do not count now.
        declared: how many backward passes come before each step; the same on all ranks.
    """

    def __init__(self, hooks: Hooks, reducer: GradientReducer) -> None:
        options, engine = reducer.options, reducer.engine
        self._hooks, self._engine, self._memory = hooks, engine, reducer.memory
        self._moved = reducer.buckets.moved
        self._name, self._described, self._named = reducer.name, reducer.described, reducer.named
        self._op, self._in_backward, self._speaks = options.op, options.in_backward, reducer.ranks.rank == 0
        plain = options.predivide_factor == 1.0 and options.compressor is None
        can = engine.threaded and plain and not reducer.checks.needs_own_gradients
        self.wanted = can and options.overlap is not False
        self._trial = Trial() if can and options.overlap is None else None
        self.begun = False
        self.watching = True
        self.suspends = False
        self.declared = options.passes
        self._alike = 0  # steps in a row
        self._joins = engine.joins
        self._watched: dict[int, Watched] = {}  # by the id of the parameter
        self._buckets: list[_Travelling] = []
        self._travelling: dict[int, _Travelling] = {}  # the same, by the id of the parameter
        self._pending: list[Watched] = []  # were added to, and hooks of the program may still run
        self._passes = 0
        self._lock = threading.RLock()

    # ---- the backward pass ----

    def watches(self, parameter: Any) -> bool:
        """Return whether a parameter is watched."""
        return id(parameter) in self._watched

    def watch(self, record: Watched) -> None:
        """Expect calls of `before_adding` and `added` with this record from now on."""
        self._watched[id(record.parameter)] = record

    def unwatch(self) -> None:
        """Expect no more calls."""
        self._watched.clear()

    def before_adding(self, record: Watched) -> None:
        """Withdraw, or wait for, the reduction of a gradient that is about to be added to."""
        travelling = self._travelling.get(id(record.parameter))
        if travelling is None or travelling.part is None:
            return
        with self._lock:
            if not self._keep_out(travelling):
                return
            self._look(record)
            if record.fate is Fate.MISSING and record.parameter.grad is None:
                place = next(slot.place for slot in travelling.bucket.slots if slot.parameter is record.parameter)
                record.parameter.grad = place  # what comes is added to that
                record.fate = Fate.NONE

    def added(self, record: Watched) -> None:
        """Record that a gradient was added to."""
        with self._lock:
            self._count_additions()
            self._pending.append(record)
            travelling = self._travelling.get(id(record.parameter))
            if travelling is not None and travelling.handover is not None:
                travelling.handover.mark()

    def pass_ended(self, nested: bool) -> int:
        """Record the end of a backward pass; return how many there were since the last step.

        Args:
            nested: whether it was made within another one, and does not count.
        """
        with self._lock:
            self._count_additions()
            self._passes += not (self.suspends or nested)
            return self._passes

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which passes do not count, and submit nothing."""
        before, self.suspends = self.suspends, True
        try:
            yield
        finally:
            with self._lock:
                self._count_additions()
            self.suspends = before

    def stop(self) -> None:
        """Withdraw, or wait for, all reductions that are under way."""
        with self._lock:
            self._count_additions()
            for travelling in self._buckets:
                self._keep_out(travelling)

    def cleared(self) -> None:
        """Record that the program has cleared all gradients, since `stop`: passes before that do not count."""
        with self._lock:
            self._passes = 0
            for record in self._watched.values():
                record.summed = record.times = 0
                record.fresh = False
            for travelling in self._buckets:
                travelling.meet(Event.CLEARED)
                for record in travelling.members if travelling.part is not None else ():
                    record.fate = Fate.CLEARED
                    self._remember(record)

    def fresh(self, parameters: Sequence[Any]) -> list[bool]:
        """Return for each parameter whether its gradient was added to since the last step, as far as is known."""
        with self._lock:
            self._count_additions()
            records = [self._watched.get(id(parameter)) for parameter in parameters]
            return [
                parameter.grad is not None if record is None else record.fresh
                for parameter, record in zip(parameters, records, strict=True)
            ]

    # ---- the step ----

    def report(self, record: Record, parameters: Sequence[Any]) -> None:
        """Say what this rank knows of its gradients and passes."""
        with self._lock:
            self._count_additions()
            added = [each for each in self._watched.values() if each.times]
            alike = all(each.times == each.expected or not each.expected for each in added)
            record.unlike[0] = not (alike and self._passes == self.declared)
            if not self.begun:
                for each in added:
                    self._look(each)
                record.changed[0] = any(each.fate >= Fate.CHANGED for each in added)
            record.again[0] = any(each.fresh and each.summed == each.gradient for each in self._watched.values())
            record.slower[0] = self._trial is not None and self._trial.slower
            for index, parameter in enumerate(parameters) if self.wanted and self._travelling else ():
                if (travelling := self._travelling.get(id(parameter))) is None:
                    continue
                if travelling.part is None:
                    record.standing[index] = WAITS
                    continue
                each = self._watched[id(parameter)]
                self._look(each)
                record.standing[index] = _STANDING.get(each.fate, 0)
                record.cleared[index] = each.fate is Fate.CLEARED
                record.kept[index] = each.fate not in (Fate.CLEARED, Fate.MISSING)

    def conclude(self, record: Record, active: int) -> list[Bucket]:
        """Return the buckets that are reduced, and withdraw the others.

        Args:
            record: what all ranks have said.
            active: how many ranks contribute to the step.

        Raises:
            ConfigError: on all ranks, if gradients of some rank are lost.
        """
        reduced: list[Bucket] = []
        wrong, failure = "", None
        if not (record.standing.any() or record.cleared.any() or record.kept.any()):
            return reduced
        with self._lock:
            for travelling in self._buckets:
                numbers, part = travelling.bucket.numbers, travelling.part
                if min(numbers) < 0 or (record.standing[numbers] == WAITS).any():
                    if part is not None:  # the program has removed a parameter; or a rank waits
                        self._engine.withdraw([part])
                    travelling.generation += 1
                    continue
                assert part is not None and part.done, "all ranks have submitted it before the step"
                if travelling.handover is not None:
                    travelling.handover.come_back()
                failure = failure or part.error
                standing, cleared, kept = (
                    record.standing[numbers],
                    record.cleared[numbers] > 0,
                    record.kept[numbers] > 0,
                )
                wrong = wrong or what_is_wrong(
                    standing, cleared, kept, everyone=part.active == active, sums=self._op is SUM
                )
                if not (standing == ADDED).any() and not cleared.any():
                    reduced.append(travelling.bucket)
        if failure is not None:
            raise failure
        if wrong:
            self.end()
            raise ConfigError(f"{wrong} Gradients of {self._described} are lost, and nothing overlaps from here on")
        return reduced

    def next_step(self, record: Record, buckets: Buckets, *, again: bool, everyone: bool) -> None:
        """Prepare for the next step; give up overlap, with a warning, if a program changes its gradients.

        Args:
            record: what all ranks have said.
            buckets: as they are now.
            again: whether the next steps have to show again that they are alike. The same on all ranks.
            everyone: whether no rank has joined.
        """
        with self._lock:
            self.forget_step()
            if not self.watching:
                return
            joined, self._joins = self._joins != self._engine.joins, self._engine.joins
            if joined:  # ranks that had joined have not counted what was withdrawn since
                self._buckets.clear()
                self._travelling.clear()
            if record.changed.any():
                self.end()
                self._warn_of_changes()
                return
            if self._trial is not None and self._trial.over and everyone:  # ranks that have joined did not hear of it
                self._trial = None
                if record.slower.any():
                    self.wanted = False
                    self.end()
                    return
            # Steps that differ do not end overlap, nor the turns without it of a trial.
            differs = record.unlike.any() and not (self.wanted and self._alike >= _STEPS - 1)
            self._alike = 0 if again or joined or differs else self._alike + 1
            self.begun = self.wanted and self._alike >= _STEPS - 1
            if self._trial is not None:
                self._trial.end_step(counts=self.begun and everyone)
                self.begun = self.begun and self._trial.on
            if not self.wanted and self._alike >= _STEPS:
                self.end()
                return
            if self.wanted and [each.bucket for each in self._buckets] != list(buckets):
                self._take(buckets)
            for travelling in self._buckets:
                travelling.meet(Event.STEPPED)

    def forget_step(self) -> None:
        """Forget what was added in the last step, but how often."""
        for record in self._watched.values():
            if record.fresh and self._op is SUM:
                record.summed = id(record.parameter.grad)
            record.begin()
        self._passes = 0

    def end(self) -> None:
        """Reduce nothing during backward passes any more; the same on all ranks."""
        self.forget_step()
        self.begun = self.watching = False
        self._buckets.clear()
        self._travelling.clear()

    def abandon(self) -> None:
        """Withdraw what is under way; takes no lock, for finalizers."""
        self._engine.withdraw([each.part for each in self._buckets if each.part is not None and not each.part.done])

    def break_off(self) -> None:
        """End a step that has failed on all ranks: begin anew, without overlap at first."""
        with self._lock:
            self.abandon()
            self.forget_step()
            self.begun, self._alike = False, 0
            for travelling in self._buckets:
                travelling.generation += 1
                travelling.meet(Event.STEPPED)

    # ---- inside; the lock is held ----

    def _take(self, buckets: Buckets) -> None:
        self._buckets = [
            _Travelling(
                number,
                bucket,
                [self._watched[id(slot.parameter)] for slot in bucket.slots],
                self._memory.streams.handover(bucket.flat),
            )
            for number, bucket in enumerate(buckets)
            if not bucket.is_compressed and all(id(slot.parameter) in self._watched for slot in bucket.slots)
        ]
        self._travelling = {id(member.parameter): each for each in self._buckets for member in each.members}

    def _count_additions(self) -> None:
        """Count the additions after which the program's hooks have run by now; submit buckets that are complete."""
        pending, self._pending = self._pending, []
        for record in pending:
            self._remember(record)
            record.fresh = True
            if self.suspends:
                continue
            record.times += 1
            travelling = self._travelling.get(id(record.parameter))
            if travelling is None:
                continue
            if travelling.part is not None:
                record.meet(Fate.ADDED)
            elif record.times == record.expected:
                travelling.missing -= 1
                if travelling.missing == 0 and self.begun and travelling.stage is Stage.FILLING:
                    self._submit(travelling)

    def _now(self, record: Watched) -> tuple[int, int]:
        gradient = record.parameter.grad
        return id(gradient), 0 if gradient is None else self._hooks.version(gradient)

    def _remember(self, record: Watched) -> None:
        record.gradient, record.version = self._now(record)

    def _look(self, record: Watched) -> None:
        """Find out whether the program has changed or replaced a gradient since it was added to, or submitted, last."""
        now = self._now(record)
        if now != (record.gradient, record.version) and now != self._moved.get(id(record.parameter)):
            record.meet(Fate.CHANGED if now[0] == record.gradient else Fate.CLEARED)

    def _submit(self, travelling: _Travelling) -> None:
        bucket, members = travelling.bucket, travelling.members
        given = any(not each.times and each.parameter.grad is not None for each in members)
        filled = False
        if not given and self._joins == self._engine.joins:
            with nullcontext() if travelling.handover is None else travelling.handover.filling():
                filled = max(bucket.collect_own(zeros=True), default=0) <= EMPTY
        if filled:
            for record in members:
                record.fate = Fate.MISSING if record.parameter.grad is None else Fate.NONE
                self._remember(record)
            part = self._part(travelling)
            try:
                self._engine.submit(part)
            except (ConfigError, ShutdownError, TransportError):
                pass  # this rank has joined, or the engine has ended: the step will raise it
            else:
                travelling.part = part
        travelling.meet(Event.HELD_BACK if travelling.part is None else Event.SUBMITTED)

    def _part(self, travelling: _Travelling) -> InPlace:
        bucket = travelling.bucket
        again = f", {travelling.generation} times withdrawn" if travelling.generation else ""
        part = InPlace(
            f"{self._name}, bucket {travelling.number}, after {self._joins} joins{again}",
            f"a bucket of {self._name}",
            self._op,
            [bucket.flat],
            wire=bucket.wire,
            feedbacks=bucket.feedbacks,
            speculative=True,
            within=None if travelling.handover is None else travelling.handover.working,
        )
        part.title = f"a bucket of {self._described}"
        part.parts = partial(names_in, [bucket], self._named)
        return part

    def _keep_out(self, travelling: _Travelling) -> bool:
        """Withdraw a bucket, or wait for it; return whether it was reduced."""
        if travelling.part is None:
            return False
        if not travelling.part.done:
            self.abandon()  # all at once: an answer may take a while
        if self._engine.settle(travelling.part):
            if travelling.handover is not None:
                travelling.handover.come_back()
            return True
        travelling.meet(Event.WITHDRAWN)
        return False

    def _warn_of_changes(self) -> None:
        if self._speaks and not self._in_backward:
            _log.warning(
                "%s: gradients were changed between the backward pass and the step, on each rank its own, before they "
                "were averaged. To clip or look at averages, call synchronize() first and step within "
                'skip_synchronize(), or give DistributedOptimizer(..., reduce_in="backward")',
                self._described,
            )


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
