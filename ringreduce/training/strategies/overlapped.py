"""Buckets that are reduced while the backward pass goes on, where they are.

Between nodes the network is the bottleneck, and it idles during the backward pass unless buckets travel as soon as they
are complete. A bucket is complete when autograd has added to each of its gradients as often as in the step before, in
all passes together. It is submitted when the next gradient comes or the pass ends, because the program's hooks that run
after ours have run by then. The engine's thread reduces it in place. In the step the ranks agree which buckets all have
submitted. Those are reduced by then; all others are withdrawn and reduced in the step.

The bucket itself is reduced, not a copy, so a gradient must not change between its last pass and the step. The versions
of the gradients show whether it did, and the ranks agree on it in the step:

* Overlap begins after two steps in which no rank has changed a gradient by itself and all have made the declared number
  of passes. A program that changes its gradients (it clips them, say) gets no overlap, and a warning. Unless a program
  asks for it, overlap then goes on and off in turns of some steps (`OverlapProbe`), and stays off if that was quicker.
* Autograd has added to a gradient again: if its bucket was not reduced yet, it is withdrawn. If it was, it is reduced
  again in the step, as each rank's share of the result and what it has added since. That gives the same as if all had
  been added up first: of averages the share is the average, of a sum over P ranks it is 1/P.
* Gradients were cleared and computed again: if so on all ranks, they are reduced again. If only on some, or if anything
  else has written to one, all ranks raise a `ConfigError`: the unreduced gradients of the others no longer exist.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from ringreduce.common.errors import ConfigError, MismatchError, RingReduceError, ShutdownError, TransportError
from ringreduce.common.reduce_ops import SUM
from ringreduce.engine import InPlaceAllreduce
from ringreduce.training.binding.framework import Found, Hooks, Look, StreamSync
from ringreduce.training.gradients.buckets import Bucket, Buckets
from ringreduce.training.gradients.checks import Checks
from ringreduce.training.gradients.record import ADDED, WAITS, Record
from ringreduce.training.strategies.stages import (
    NEXT,
    STATUS,
    UNKNOWN,
    Event,
    Fate,
    GradientState,
    OverlapProbe,
    Stage,
    what_is_wrong,
)
from ringreduce.training.strategies.strategy import Partner

_STEPS = 2  # so many alike before overlap begins


class BucketState:
    """A bucket that is to be reduced during the backward pass.

    Attributes:
        bucket: the bucket.
        sync: see `Streams.sync`.
        members: its parameters.
        missing: how many of them have not been added to as often as expected.
        stage: where it is.
        part: its reduction, while it is under way.
    """

    __slots__ = ("bucket", "generation", "members", "missing", "number", "part", "stage", "sync")

    def __init__(self, number: int, bucket: Bucket, members: Sequence[GradientState], sync: StreamSync | None) -> None:
        self.number = number
        self.bucket = bucket
        self.members = members
        self.sync = sync
        self.generation = 0  # how often all ranks have withdrawn it; a part of its name
        self.stage = Stage.FILLING
        self.part: InPlaceAllreduce | None = None
        self.apply(Event.STEPPED)

    def reduction(self, buckets: Buckets, joins: int) -> InPlaceAllreduce:
        """Return the operation that reduces it before the step; ``joins``: how often all ranks have joined."""
        ranks = buckets.ranks
        again = f", {self.generation} times withdrawn" if self.generation else ""
        return buckets.early(
            f"{ranks.name}, bucket {self.number}, after {joins} joins{again}",
            self.bucket,
            within=None if self.sync is None else self.sync.working,
        )

    def apply(self, event: Event) -> None:
        """Go on to the next stage."""
        self.stage = NEXT[self.stage, event]
        if self.stage is not Stage.UNDER_WAY:
            self.part = None
        if event is Event.STEPPED or (event is Event.CLEARED and self.part is None):
            self.missing = sum(member.expected > 0 for member in self.members)  # wait for all gradients again


class Overlap(Partner):
    """The reductions of one optimizer's buckets during its backward passes.

    Thread-safe.

    Args:
        hooks: the framework's.
        buckets: the optimizer's. Their option ``overlap`` says whether they are to be reduced during the backward
            pass; None: if that makes steps quicker, which the first steps try out. If not, some steps are watched, to
            warn a program that changes its gradients.
        checks: where gradients must be this rank's own until the step, nothing overlaps.

    Attributes:
        overlaps: whether buckets are, or may be, reduced during the backward pass; the same on all ranks.
        is_learning: whether anything is to be learnt from what the program does; the same on all ranks.
        begun: whether complete buckets are submitted now; the same on all ranks.
        suspends: whether passes do not count now.
        watched: those whose gradients are watched, by the ids of their parameters.
        declared: how many backward passes come before each step; the same on all ranks.
    """

    def __init__(self, hooks: Hooks, buckets: Buckets, checks: Checks) -> None:
        options = buckets.options
        engine = buckets.ranks.engine
        self._hooks = hooks
        self._checks = checks
        self._engine = engine
        self._in_backward = options.in_backward
        self._all = buckets
        self._moved = buckets.moved
        self._op = options.op
        plain = options.predivide_factor == 1.0 and options.compressor is None
        can = engine.threaded and plain and not checks.needs_own_gradients
        self.overlaps = can and options.overlap is not False
        self._probe = OverlapProbe() if can and options.overlap is None else None
        self.begun = False
        self.is_learning = True
        self.suspends = False
        self.declared = options.passes
        self._alike = 0  # steps in a row
        self._joins = engine.joins
        self.watched: dict[int, GradientState] = {}  # by the id of the parameter
        self._buckets: list[BucketState] = []
        self._state_of: dict[int, BucketState] = {}  # the same, by the id of the parameter
        self._pending: list[GradientState] = []  # were added to, and hooks of the program may still run
        self._passes = 0
        self._lock = threading.RLock()

    # ---- the backward pass ----

    def before_adding(self, record: GradientState) -> None:
        """Withdraw, or wait for, the reduction of a gradient that is about to be added to."""
        if record.summed:
            record.before_adding(self._hooks)
        state = self._state_of.get(id(record.parameter))
        if state is None or state.part is None:
            return
        with self._lock:
            if not self._keep_out(state):
                return
            record.look(self._hooks, self._moved)
            if record.fate <= Fate.MISSING:
                place = next(slot.place for slot in state.bucket.slots if slot.parameter is record.parameter)
                _share(self._all, state, place)
                record.parameter.grad = place  # what comes is added to that
                record.apply(Fate.ADDED)
                record.remember(self._hooks)

    def added(self, record: GradientState) -> None:
        """Record that a gradient was added to."""
        with self._lock:
            self._count_additions(record)
            self._pending.append(record)
            state = self._state_of.get(id(record.parameter))
            if state is not None and state.sync is not None:
                state.sync.mark()

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
        before = self.suspends
        self.suspends = True
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
            for state in self._buckets:
                self._keep_out(state)

    def cleared(self) -> None:
        """Record that the program has cleared all gradients, since `stop`: passes before that do not count."""
        with self._lock:
            self._passes = 0
            for record in self.watched.values():
                record.summed = record.times = 0
                record.fresh = record.again = False
            for state in self._buckets:
                state.apply(Event.CLEARED)
                for record in state.members if state.part is not None else ():
                    record.fate = Fate.CLEARED
                    record.remember(self._hooks)

    def fresh(self, parameters: Sequence[Any]) -> list[bool]:
        """Return for each parameter whether its gradient was added to since the last step, as far as is known."""
        with self._lock:
            self._count_additions()
            records = [self.watched.get(id(parameter)) for parameter in parameters]
            return [
                parameter.grad is not None if record is None else record.fresh
                for parameter, record in zip(parameters, records, strict=True)
            ]

    # ---- the step ----

    def report(self, record: Record, parameters: Sequence[Any]) -> None:
        with self._lock:
            self._count_additions()
            alike = self._passes == self.declared
            for each in self.watched.values():
                if each.fresh and each.again:
                    record.again[0] = True
                if each.times:
                    alike = alike and each.expected in (0, each.times)
                    if not self.begun:
                        each.look(self._hooks, self._moved)
                        record.changed[0] |= each.fate >= Fate.CHANGED
            record.unlike[0] = not alike
            record.slower[0] = self._probe is not None and self._probe.slower
            for index, parameter in enumerate(parameters) if self.overlaps and self._state_of else ():
                if (state := self._state_of.get(id(parameter))) is None:
                    continue
                if state.part is None:
                    record.status[index] = WAITS
                    continue
                each = self.watched[id(parameter)]
                each.look(self._hooks, self._moved)
                record.status[index] = STATUS.get(each.fate, 0)
                record.cleared[index] = each.fate is Fate.CLEARED
                record.kept[index] = each.fate not in (Fate.CLEARED, Fate.MISSING)

    def conclude(self, record: Record, active: int, gradients: list[Any]) -> list[Bucket]:
        """See `Partner.conclude`; withdraws the buckets that are not reduced.

        Raises:
            ConfigError: on all ranks, if gradients of some rank were overwritten or cleared after their reduction.
        """
        reduced: list[Bucket] = []
        wrong = ""
        failure = None
        if not (record.status.any() or record.cleared.any() or record.kept.any()):
            return reduced
        with self._lock:
            for state in self._buckets:
                numbers = state.bucket.numbers
                part = state.part
                if min(numbers) < 0 or (record.status[numbers] == WAITS).any():
                    if part is not None:  # the program has removed a parameter; or a rank waits
                        self._engine.withdraw([part])
                    state.generation += 1
                    continue
                assert part is not None and part.done, "all ranks have submitted it before the step"
                if part.error is not None:
                    failure = failure or part.error
                    continue
                if state.sync is not None:
                    state.sync.come_back()
                status = record.status[numbers]
                cleared = record.cleared[numbers] > 0
                kept = record.kept[numbers] > 0
                wrong = wrong or what_is_wrong(status, cleared, kept, everyone=part.active == active)
                again = bool((status == ADDED).any() or cleared.any())
                for slot, each, number in zip(state.bucket.slots, state.members, numbers, strict=True):
                    if each.fate > Fate.MISSING or record.cleared[number]:
                        continue
                    if again:
                        _share(self._all, state, slot.place)
                    if gradients[number] is None and record.found[number] == Found.DENSE:
                        gradients[number] = slot.place
                if not again:
                    reduced.append(state.bucket)
        if failure is not None:
            raise failure
        if wrong:
            self.end()
            raise ConfigError(
                f"{wrong} Gradients of {self._all.ranks.described} are dropped, and nothing overlaps from here on"
            )
        return reduced

    def prepare(self, record: Record, *, special: bool, active: int) -> None:
        """Decide, alike on all ranks, whether the next step overlaps; see `Partner.prepare`."""
        everyone = active == self._all.ranks.size
        with self._lock:
            self.forget_step()
            if not self.is_learning:
                return
            joined = self._joins != self._engine.joins
            self._joins = self._engine.joins
            if joined:  # ranks that had joined have not counted what was withdrawn since
                self._buckets.clear()
                self._state_of.clear()
            if record.changed.any():
                self.end()
                self._checks.warn_of_changes(in_backward=self._in_backward)
                return
            if self._probe is not None and self._probe.over and everyone:  # ranks that have joined do not know it
                self._probe = None
                if record.slower.any():
                    self.overlaps = False
                    self.end()
                    return
            # Steps that differ do not end overlap, nor the turns without it of a probe.
            differs = record.unlike.any() and not (self.overlaps and self._alike >= _STEPS - 1)
            self._alike = 0 if special or record.is_again or joined or differs else self._alike + 1
            self.begun = self.overlaps and self._alike >= _STEPS - 1
            if self._probe is not None:
                self._probe.end_step(counts=self.begun and everyone)
                self.begun = self.begun and self._probe.on
            if not self.overlaps and self._alike >= _STEPS:
                self.end()
                return
            if self.overlaps and [each.bucket for each in self._buckets] != list(self._all):
                self._take_buckets()
            for state in self._buckets:
                state.apply(Event.STEPPED)

    def reduced(self, gradients: Sequence[Any], *, repeated: bool) -> None:
        if repeated:
            self.forget_step()

    def forget_step(self) -> None:
        """Forget what was added in the last step, but how often."""
        for record in self.watched.values():
            if record.fresh and self._op is SUM:
                record.summed = UNKNOWN
            record.begin()
        self._passes = 0

    def end(self) -> None:
        """Reduce nothing during backward passes any more; the same on all ranks."""
        self.forget_step()
        self.begun = self.is_learning = False
        self._buckets.clear()
        self._state_of.clear()

    def abandon(self) -> None:
        """Withdraw what is under way; takes no lock, for finalizers."""
        self._engine.withdraw([each.part for each in self._buckets if each.part is not None and not each.part.done])

    def break_off(self, error: BaseException) -> None:
        """End a step that has failed on all ranks; the next ones begin without overlap."""
        with self._lock:
            with suppress(RingReduceError):  # what has ended everything is raised by the step
                for state in self._buckets:
                    self._keep_out(state)
            self.forget_step()
            self.begun = False
            self._alike = 0
            for state in self._buckets:
                state.generation += 1
                state.apply(Event.STEPPED)
        if self.overlaps and isinstance(error, MismatchError) and error.advice:
            # On other ranks a step of another optimizer has failed: what overlaps is not the same any more.
            self._engine.fail(error)

    # ---- inside; the lock is held ----

    def _take_buckets(self) -> None:
        streams = self._all.memory.streams
        watched = self.watched
        self._buckets = [
            BucketState(
                number,
                bucket,
                members=[watched[id(slot.parameter)] for slot in bucket.slots],
                sync=streams.sync(bucket.flat),
            )
            for number, bucket in enumerate(self._all)
            if not bucket.is_compressed and all(id(slot.parameter) in watched for slot in bucket.slots)
        ]
        self._state_of = {id(member.parameter): each for each in self._buckets for member in each.members}

    def _count_additions(self, latest: GradientState | None = None) -> None:
        """Count the additions after which the program's hooks have run by now; submit buckets that are complete.

        Args:
            latest: was added to, and hooks may still run: a bucket that is complete without that is held back.
        """
        pending = self._pending
        self._pending = []
        for record in pending:
            record.remember(self._hooks)
            record.fresh = True
            state = self._state_of.get(id(record.parameter))
            if state is not None and state.part is not None:
                record.apply(Fate.ADDED)
            if self.suspends:
                continue
            record.times += 1
            if state is not None and state.part is None and record.times == record.expected:
                state.missing -= 1
                if state.missing == 0 and self.begun and state.stage is Stage.FILLING:
                    self._submit(state, latest)

    def _submit(self, state: BucketState, latest: GradientState | None) -> None:
        bucket = state.bucket
        members = state.members
        given = any(each is latest or (not each.times and each.parameter.grad is not None) for each in members)
        filled = False
        if not given and self._joins == self._engine.joins:
            with nullcontext() if state.sync is None else state.sync.filling():
                filled = max(bucket.collect(zeros=True), default=0) <= Look.EMPTY
        if filled:
            for record in members:
                record.fate = Fate.MISSING if record.parameter.grad is None else Fate.NONE
                record.remember(self._hooks)
            part = state.reduction(self._all, self._joins)
            try:
                self._engine.submit(part)
            except (ConfigError, ShutdownError, TransportError):
                pass  # this rank has joined, or the engine has ended: the step will raise it
            else:
                state.part = part
        state.apply(Event.HELD_BACK if state.part is None else Event.SUBMITTED)

    def _keep_out(self, state: BucketState) -> bool:
        """Withdraw a bucket, or wait for it; return whether it was reduced. Others that are under way likewise."""
        if state.part is not None and not state.part.done:
            self.abandon()  # all at once: an answer may take a while
            for each in self._buckets:
                if each.part is not None and not self._engine.settle(each.part):
                    each.apply(Event.WITHDRAWN)
        if state.part is None or state.part.error is not None:  # the step raises the error
            return False
        if state.sync is not None:
            state.sync.come_back()
        return True


def _share(buckets: Buckets, state: BucketState, place: Any) -> None:
    """Make a gradient that was reduced this rank's share of the result, to be reduced again."""
    assert state.part is not None, "it was reduced"
    share = buckets.divisor(state.part.active) / state.part.active
    if share != 1.0:
        buckets.memory.scale(place, share)
