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

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import ConfigError, ShutdownError, TransportError
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.engine import Engine, InPlace
from ringreduce.training.buckets import Bucket, Buckets, names_in
from ringreduce.training.compression import WireState
from ringreduce.training.framework import Handover, Parameters
from ringreduce.training.trial import Trial

__all__ = ["Overlap", "Watched"]

_STEPS = 2  # so many alike before overlap begins

#: The rows of `Overlap.report`: what a rank says of each gradient.
_WAITS, _ADDED, _CLEARED, _NOT_CLEARED, _CHANGED = range(5)


@dataclass(slots=True, eq=False)
class Watched:
    """A parameter whose gradient is watched.

    Attributes:
        parameter: the parameter.
        times: how often its gradient was added to since the last step.
        expected: the same in the last step that added to it at all.
        gradient: the ``id`` of its gradient when that was added to, or submitted, last.
        version: the version of its gradient then.
        was_empty: whether there was no gradient when its bucket was submitted.
        added: whether it was added to after its bucket was reduced.
        cleared: whether the program has replaced its gradient, or set it to None.
        changed: whether the program has written to its gradient.
        fresh: whether it was added to since the last step, in a pass that counts or not.
        summed: the ``id`` of the gradient that the last step has summed up over the ranks; 0: of none.
    """

    parameter: Any
    times: int = 0
    expected: int = 0
    gradient: int = 0
    version: int = 0
    was_empty: bool = False
    added: bool = False
    cleared: bool = False
    changed: bool = False
    fresh: bool = False
    summed: int = 0

    def begin(self) -> None:
        """Begin the next step: forget all of the last one but how often it added to the gradient."""
        self.expected = self.times or self.expected
        self.times = self.gradient = self.version = 0
        self.added = self.cleared = self.changed = self.fresh = self.was_empty = False


class _Travelling:
    """A bucket that is to be reduced during the backward pass.

    Attributes:
        bucket: the bucket.
        handover: see `Parameters.handover`.
        members: its parameters.
        missing: how many of them have not been added to as often as expected.
        part: its reduction, once it was submitted, until the step.
        waits: whether the step reduces it.
    """

    __slots__ = ("bucket", "generation", "handover", "members", "missing", "number", "part", "waits")

    def __init__(self, number: int, bucket: Bucket, members: Sequence[Watched], handover: Handover | None) -> None:
        self.number, self.bucket, self.members, self.handover = number, bucket, members, handover
        self.generation = 0  # how often all ranks have withdrawn it; a part of its name
        self.begin()

    def begin(self) -> None:
        """Forget what has happened since the last step."""
        self.miss_all()
        self.part: InPlace | None = None
        self.waits = False

    def miss_all(self) -> None:
        """Wait for all gradients again."""
        self.missing = sum(member.expected > 0 for member in self.members)


class Overlap:
    """The reductions of one optimizer's buckets during its backward passes.

    Thread-safe.

    Args:
        framework: the gradients'.
        engine: carries the reductions out.
        name: the optimizer's, the same on all ranks and no other's.
        described: what errors call the optimizer.
        op: `AVERAGE` or `SUM`.
        moved: see `Buckets`.
        named: returns the names of all parameters, and these.
        wanted: whether buckets are to be reduced during the backward pass; None: if that makes steps quicker, which the
            first steps try out. If not, some steps are watched, to warn a program that changes its gradients. The same
            on all ranks.

    Attributes:
        begun: whether complete buckets are submitted now; the same on all ranks.
        watching: whether anything is to be learnt from what the program does; the same on all ranks.
        suspends: whether passes do not count now.
    """

    def __init__(
        self,
        framework: Parameters,
        engine: Engine,
        name: str,
        described: str,
        op: ReduceOp,
        moved: Mapping[int, tuple[int, int]],
        *,
        named: Callable[[], Sequence[tuple[str, Any]]],
        wanted: bool | None,
    ) -> None:
        self._framework, self._engine, self._moved = framework, engine, moved
        self._name, self._described, self._op = name, described, op
        self._named = named
        self._wanted = wanted is not False
        self._trial = Trial() if wanted is None else None
        self.begun = False
        self.watching = True
        self._alike = 0  # steps in a row
        self._joins = engine.joins
        self._watched: dict[int, Watched] = {}  # by the id of the parameter
        self._buckets: list[_Travelling] = []
        self._travelling: dict[int, _Travelling] = {}  # the same, by the id of the parameter
        self._pending: list[Watched] = []  # were added to, and hooks of the program may still run
        self._passes = 0
        self.suspends = False
        self._lock = threading.RLock()

    # ---- the backward pass ----

    def watches(self, parameter: Any) -> bool:
        """Return whether a parameter is watched."""
        return id(parameter) in self._watched

    def watch(self, record: Watched) -> None:
        """Expect calls of `before_adding` and `added` with this record from now on."""
        self._watched[id(record.parameter)] = record

    def before_adding(self, record: Watched) -> None:
        """Withdraw, or wait for, the reduction of a gradient that is about to be added to."""
        travelling = self._travelling.get(id(record.parameter))
        if travelling is None or travelling.part is None:
            return
        with self._lock:
            if not self._keep_out(travelling):
                return
            self._look(record)
            empty = record.was_empty and not record.cleared
            if empty and self._framework.gradient(record.parameter) is None:
                place = next(slot.place for slot in travelling.bucket.slots if slot.parameter is record.parameter)
                self._framework.set_gradient(record.parameter, place)  # what comes is added to that
                record.was_empty = False

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
                if travelling.part is None:
                    travelling.miss_all()
                    continue
                for record in travelling.members:
                    record.cleared, record.was_empty = True, False
                    self._remember(record)

    def fresh(self, parameters: Sequence[Any]) -> list[bool]:
        """Return for each parameter whether its gradient was added to since the last step, as far as is known."""
        with self._lock:
            self._count_additions()
            records = [self._watched.get(id(parameter)) for parameter in parameters]
            return [
                self._framework.gradient(parameter) is not None if record is None else record.fresh
                for parameter, record in zip(parameters, records, strict=True)
            ]

    # ---- the step ----

    def report(self, parameters: Sequence[Any], declared: int) -> tuple[npt.NDArray[np.uint8], bytes]:
        """Return what this rank says of its gradients and passes; `conclude` takes the ranks' largest of each number.

        Args:
            parameters: all of the optimizer's, in registration order.
            declared: so many passes come before each step.

        Returns:
            Five rows with a number for each parameter, none if nothing is to overlap; and four numbers about the step:
            whether it is unlike the last, whether gradients have changed, whether sums were added to, and whether steps
            have taken longer with overlap.
        """
        with self._lock:
            self._count_additions()
            records = [record for record in self._watched.values() if record.times]
            alike = self._passes == declared and all(
                record.times == record.expected or not record.expected for record in records
            )
            if not self.begun:
                for record in records:
                    self._look(record)
            changed = not self.begun and any(record.changed or record.cleared for record in records)
            again = any(record.fresh and record.summed == record.gradient for record in self._watched.values())
            rows = np.zeros((5 if self._wanted else 0, len(parameters)), np.uint8)
            for index, parameter in enumerate(parameters) if self._wanted else ():
                if (travelling := self._travelling.get(id(parameter))) is None:
                    continue
                if travelling.part is None:
                    rows[_WAITS, index] = 1
                    continue
                record = self._watched[id(parameter)]
                self._look(record)
                rows[:, index] = (
                    0,
                    record.added and not record.cleared,
                    record.cleared,
                    not (record.cleared or record.was_empty),
                    record.changed and not record.cleared,
                )
            slower = self._trial is not None and self._trial.slower
            return rows, bytes((not alike, changed, again, slower))

    def conclude(self, parameters: Sequence[Any], rows: npt.NDArray[np.uint8], active: int) -> list[Bucket]:
        """Return the buckets that are reduced, and withdraw the others.

        Args:
            parameters: as for `report`.
            rows: the largest that any rank has reported.
            active: how many ranks contribute to the step.

        Raises:
            ConfigError: on all ranks, if gradients of some rank are lost.
        """
        if not rows.any():
            return []
        numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
        reduced, wrong, failure = [], "", None
        with self._lock:
            for travelling in self._buckets:
                columns = [numbers.get(id(member.parameter)) for member in travelling.members]
                said, part = rows[:, [each for each in columns if each is not None]].astype(bool), travelling.part
                if None in columns or said[_WAITS].any():  # the program has removed a parameter; or a rank waits
                    if part is not None:
                        self._engine.withdraw([part])
                    travelling.generation += 1
                    continue
                assert part is not None and part.done, "all ranks have submitted it before the step"
                if travelling.handover is not None:
                    travelling.handover.come_back()
                failure = failure or part.error
                wrong = wrong or self._wrong(said, part, active)
                if not said[_ADDED : _CLEARED + 1].any():
                    reduced.append(travelling.bucket)
        if failure is not None:
            raise failure
        if wrong:
            self.end()
            raise ConfigError(f"{wrong} Gradients of {self._described} are lost, and nothing overlaps from here on")
        return reduced

    def next_step(self, said: Sequence[int], buckets: Buckets, *, again: bool, everyone: bool) -> bool:
        """Prepare for the next step; return whether overlap is given up because a program changes its gradients.

        Args:
            said: the numbers about the step, the largest that any rank has reported.
            buckets: as they are now.
            again: whether the next steps have to show again that they are alike. The same on all ranks.
            everyone: whether no rank has joined.
        """
        with self._lock:
            differs, changed, _, slower = said
            self._forget_step()
            if not self.watching:
                return False
            joined, self._joins = self._joins != self._engine.joins, self._engine.joins
            if joined:  # ranks that had joined have not counted what was withdrawn since
                self._buckets.clear()
                self._travelling.clear()
            if changed:
                self.end()
                return True
            if self._trial is not None and self._trial.over and everyone:  # ranks that have joined did not hear of it
                self._trial = None
                if slower:
                    self._wanted = False
                    self.end()
                    return False
            # Steps that differ do not end overlap, nor the turns without it of a trial.
            if again or joined or (differs and not (self._wanted and self._alike >= _STEPS - 1)):
                self._alike = 0
            else:
                self._alike += 1
            self.begun = self._wanted and self._alike >= _STEPS - 1
            if self._trial is not None:
                self._trial.end_step(counts=self.begun and everyone)
                self.begun = self.begun and self._trial.on
            if not self._wanted and self._alike >= _STEPS:
                self.end()
                return False
            if self._wanted and [each.bucket for each in self._buckets] != list(buckets):
                self._take(buckets)
            for travelling in self._buckets:
                travelling.begin()
            return False

    def end(self) -> None:
        """Reduce nothing during backward passes any more; the same on all ranks."""
        self._forget_step()
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
            self._forget_step()
            self.begun, self._alike = False, 0
            for travelling in self._buckets:
                travelling.generation += 1
                travelling.begin()

    # ---- inside; the lock is held ----

    def _forget_step(self) -> None:
        for record in self._watched.values():
            if record.fresh and self._op is SUM:
                record.summed = id(self._framework.gradient(record.parameter))
            record.begin()
        self._passes = 0

    def _take(self, buckets: Buckets) -> None:
        self._buckets = [
            _Travelling(
                number,
                bucket,
                [self._watched[id(slot.parameter)] for slot in bucket.slots],
                self._framework.handover(bucket.flat),
            )
            for number, bucket in enumerate(buckets)
            if (bucket.reducer is None or isinstance(bucket.reducer, WireState))
            and all(id(slot.parameter) in self._watched for slot in bucket.slots)
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
                record.added = True
            elif record.times == record.expected:
                travelling.missing -= 1
                if travelling.missing == 0 and self.begun and not travelling.waits:
                    self._submit(travelling)

    def _remember(self, record: Watched) -> None:
        gradient = self._framework.gradient(record.parameter)
        record.gradient = id(gradient)
        record.version = 0 if gradient is None else self._framework.version(gradient)

    def _look(self, record: Watched) -> None:
        """Find out whether the program has changed or replaced a gradient since it was added to, or submitted, last."""
        gradient = self._framework.gradient(record.parameter)
        now = id(gradient), 0 if gradient is None else self._framework.version(gradient)
        if now == (record.gradient, record.version) or now == self._moved.get(id(record.parameter)):
            return
        if now[0] == record.gradient:
            record.changed = True
        else:
            record.cleared = True

    def _submit(self, travelling: _Travelling) -> None:
        bucket = travelling.bucket
        members = travelling.members
        given = any(not each.times and self._framework.gradient(each.parameter) is not None for each in members)
        with nullcontext() if travelling.handover is None else travelling.handover.filling():
            filled = not given and self._joins == self._engine.joins and bucket.fill_for_now()
        if not filled:
            travelling.waits = True
            return
        for record in members:
            record.was_empty = self._framework.gradient(record.parameter) is None
            self._remember(record)
        again = f", {travelling.generation} times withdrawn" if travelling.generation else ""
        wire = bucket.reducer if isinstance(bucket.reducer, WireState) else None
        part = InPlace(
            f"{self._name}, bucket {travelling.number}, after {self._joins} joins{again}",
            f"a bucket of {self._name}",
            self._op,
            [bucket.flat],
            wire=None if wire is None else wire.wire,
            feedbacks=() if wire is None else [wire.feedback],
            speculative=True,
            within=None if travelling.handover is None else travelling.handover.working,
        )
        part.title = f"a bucket of {self._described}"
        part.parts = partial(names_in, [bucket], self._named)
        try:
            self._engine.submit(part)
        except (ConfigError, ShutdownError, TransportError):
            travelling.waits = True  # this rank has joined, or the engine has ended: the step will raise it
        else:
            travelling.part = part

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
        travelling.part, travelling.waits = None, True
        return False

    def _wrong(self, said: npt.NDArray[np.bool_], part: InPlace, active: int) -> str:
        """Return what is wrong with a bucket that was reduced during the backward pass; empty if nothing is."""
        remedy = (
            "make passes whose gradients are not for the next step within no_sync(), call synchronize() before "
            "gradients are looked at or changed, or give overlap=False."
        )
        if part.active != active:
            return f"a rank has made a backward pass and then joined without a step: {remedy}"
        if said[_CHANGED].any():
            return f"the program has written to gradients between the backward pass and the step: {remedy}"
        sums = self._op is SUM
        if (said[_CLEARED] & said[_NOT_CLEARED]).any() or (sums and said[_CLEARED].any() and said[_NOT_CLEARED].any()):
            return f"some ranks, and not all, have cleared or replaced gradients after a backward pass: {remedy}"
        if sums and said[_ADDED].any():
            return (
                "a backward pass has added to sums over the ranks: declare all passes of a step with "
                f"backward_passes_per_step, or {remedy}"
            )
        return ""
