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
from contextlib import contextmanager, suppress
from typing import Any

from ringreduce.common.errors import ConfigError, MismatchError, RingReduceError
from ringreduce.common.reduce_ops import SUM
from ringreduce.training.binding.framework import Found, Hooks
from ringreduce.training.gradients.buckets import Bucket, Buckets
from ringreduce.training.gradients.checks import Checks
from ringreduce.training.gradients.record import ADDED, WAITS, Record
from ringreduce.training.strategies.early_buckets import EarlyBuckets
from ringreduce.training.strategies.stages import STATUS, Event, Fate, GradientState, OverlapProbe, what_is_wrong
from ringreduce.training.strategies.strategy import Partner

_STEPS = 2  # so many alike before overlap begins


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
        self._all = buckets
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
        self._early = EarlyBuckets(hooks, buckets)
        self._pending: list[GradientState] = []  # were added to, and hooks of the program may still run
        self._passes = 0
        self._lock = threading.RLock()

    # ---- the backward pass ----

    def before_adding(self, record: GradientState) -> None:
        """Withdraw, or wait for, the reduction of a gradient that is about to be added to."""
        if record.summed:
            record.before_adding(self._hooks)
        state = self._early.of(record.parameter)
        if state is None or state.part is None:
            return
        with self._lock:
            if not self._early.keep_out(state):
                return
            record.look(self._hooks, self._all.moved)
            if record.fate <= Fate.MISSING:
                place = next(slot.place for slot in state.bucket.slots if slot.parameter is record.parameter)
                state.share(place, self._all)
                record.parameter.grad = place  # what comes is added to that
                record.apply(Fate.ADDED)
                record.remember(self._hooks)

    def added(self, record: GradientState) -> None:
        """Record that a gradient was added to."""
        with self._lock:
            self._count_additions(record)
            self._pending.append(record)
            state = self._early.of(record.parameter)
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
            for state in self._early:
                self._early.keep_out(state)

    def cleared(self) -> None:
        """Record that the program has cleared all gradients, since `stop`: passes before that do not count."""
        with self._lock:
            self._passes = 0
            for record in self.watched.values():
                record.cleared()
            for state in self._early:
                state.apply(Event.CLEARED)
                for record in state.members if state.part is not None else ():
                    record.watch_from_now(Fate.CLEARED, self._hooks)

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
                        each.look(self._hooks, self._all.moved)
                        record.changed[0] |= each.fate >= Fate.CHANGED
            record.unlike[0] = not alike
            record.slower[0] = self._probe is not None and self._probe.slower
            for index, parameter in enumerate(parameters) if self.overlaps and len(self._early) else ():
                if (state := self._early.of(parameter)) is None:
                    continue
                if state.part is None:
                    record.status[index] = WAITS
                    continue
                each = self.watched[id(parameter)]
                each.look(self._hooks, self._all.moved)
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
            for state in self._early:
                numbers = state.bucket.numbers
                part = state.part
                if min(numbers) < 0 or (record.status[numbers] == WAITS).any():
                    if part is not None:  # the program has removed a parameter; or a rank waits
                        self._engine.withdraw([part])
                    state.withdraw()
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
                        state.share(slot.place, self._all)
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
                self._early.clear()
            if record.changed.any():
                self.end()
                self._checks.warn_of_changes(in_backward=self._all.options.in_backward)
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
            if self.overlaps:
                self._early.update(self.watched)
            for state in self._early:
                state.apply(Event.STEPPED)

    def reduced(self, gradients: Sequence[Any], *, repeated: bool) -> None:
        if repeated:
            self.forget_step()

    def forget_step(self) -> None:
        """Forget what was added in the last step, but how often."""
        sums = self._all.options.op is SUM
        for record in self.watched.values():
            record.begin(sums=sums)
        self._passes = 0

    def end(self) -> None:
        """Reduce nothing during backward passes any more; the same on all ranks."""
        self.forget_step()
        self.begun = self.is_learning = False
        self._early.clear()

    def abandon(self) -> None:
        """Withdraw what is under way; takes no lock, for finalizers."""
        self._early.abandon()

    def break_off(self, error: BaseException) -> None:
        """End a step that has failed on all ranks; the next ones begin without overlap."""
        with self._lock:
            with suppress(RingReduceError):  # what has ended everything is raised by the step
                for state in self._early:
                    self._early.keep_out(state)
            self.forget_step()
            self.begun = False
            self._alike = 0
            for state in self._early:
                state.withdraw()
                state.apply(Event.STEPPED)
        if self.overlaps and isinstance(error, MismatchError) and error.advice:
            # On other ranks a step of another optimizer has failed: what overlaps is not the same any more.
            self._engine.fail(error)

    # ---- inside; the lock is held ----

    def _count_additions(self, latest: GradientState | None = None) -> None:
        """Count the additions after which the program's hooks have run by now; submit buckets that are complete.

        Args:
            latest: was added to, and hooks may still run: a bucket that is complete without that is held back.
        """
        pending = self._pending
        self._pending = []
        for record in pending:
            record.count(self._hooks, counts=not self.suspends)
            state = self._early.of(record.parameter)
            if state is None:
                continue
            if state.part is not None:
                record.apply(Fate.ADDED)
            elif not self.suspends and record.times == record.expected and state.count() and self.begun:
                self._early.submit(state, latest, self._joins)
