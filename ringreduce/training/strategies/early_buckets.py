"""Buckets that are reduced before the step: what becomes of each, and which are under way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

from ringreduce.common.errors import ConfigError, ShutdownError, TransportError
from ringreduce.engine import InPlaceAllreduce
from ringreduce.training.binding.framework import Hooks, StreamSync
from ringreduce.training.gradients.buckets import Bucket, Buckets
from ringreduce.training.strategies.stages import NEXT, Event, Fate, GradientState, Stage


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

    def __init__(
        self, number: int, bucket: Bucket, watched: Mapping[int, GradientState], sync: StreamSync | None
    ) -> None:
        self.number = number
        self.bucket = bucket
        self.members = [watched[id(slot.parameter)] for slot in bucket.slots]
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

    def withdraw(self) -> None:
        """Record that all ranks have withdrawn it, or none has reduced it."""
        self.generation += 1

    def count(self) -> bool:
        """Count a gradient that was added to as often as expected; return whether it was the last one missing."""
        self.missing -= 1
        return self.missing == 0 and self.stage is Stage.FILLING

    def share(self, place: Any, buckets: Buckets) -> None:
        """Make a gradient that was reduced this rank's share of the result, to be reduced again."""
        assert self.part is not None, "it was reduced"
        share = buckets.divisor(self.part.active) / self.part.active
        if share != 1.0:
            buckets.memory.scale(place, share)

    def apply(self, event: Event, part: InPlaceAllreduce | None = None) -> None:
        """Go on to the next stage; ``part``: its reduction, if it was submitted."""
        self.stage = NEXT[self.stage, event]
        self.part = (part or self.part) if self.stage is Stage.UNDER_WAY else None
        if event is Event.STEPPED or (event is Event.CLEARED and self.part is None):
            self.missing = sum(member.expected > 0 for member in self.members)  # wait for all gradients again


class EarlyBuckets:
    """The buckets of one optimizer that may be reduced before the step, if they are; those under way among them.

    Args:
        hooks: the framework's.
        buckets: the optimizer's.
    """

    def __init__(self, hooks: Hooks, buckets: Buckets) -> None:
        self._hooks = hooks
        self._all = buckets
        self._engine = buckets.ranks.engine
        self._states: list[BucketState] = []
        self._state_of: dict[int, BucketState] = {}  # the same, by the id of the parameter

    def __iter__(self) -> Iterator[BucketState]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def of(self, parameter: Any) -> BucketState | None:
        """Return the bucket of a parameter, if it is one of these."""
        return self._state_of.get(id(parameter))

    def update(self, watched: Mapping[int, GradientState]) -> None:
        """Take the buckets that there are now, of gradients that are watched."""
        if [each.bucket for each in self._states] == list(self._all):
            return
        streams = self._all.memory.streams
        self._states = [
            BucketState(number, bucket, watched, sync=streams.sync(bucket.flat))
            for number, bucket in enumerate(self._all)
            if not bucket.is_compressed and all(id(slot.parameter) in watched for slot in bucket.slots)
        ]
        self._state_of = {id(member.parameter): each for each in self._states for member in each.members}

    def clear(self) -> None:
        """Take none."""
        self._states.clear()
        self._state_of.clear()

    def submit(self, state: BucketState, latest: GradientState | None, joins: int) -> None:
        """Submit a bucket that is complete, unless its gradients cannot be collected.

        Args:
            state: of the bucket.
            latest: was added to, and hooks may still run.
            joins: how often all ranks had joined in the last step.
        """
        bucket = state.bucket
        members = state.members
        given = any(each is latest or (not each.times and each.parameter.grad is not None) for each in members)
        filled = False
        if not given and joins == self._engine.joins:
            with nullcontext() if state.sync is None else state.sync.filling():
                filled = bucket.collect()
        if filled:
            for record in members:
                record.watch_from_now(Fate.MISSING if record.parameter.grad is None else Fate.NONE, self._hooks)
            part = state.reduction(self._all, joins)
            # Where this rank has joined, or the engine has ended, the step will raise it.
            with suppress(ConfigError, ShutdownError, TransportError):
                self._engine.submit(part)
                state.apply(Event.SUBMITTED, part)
                return
        state.apply(Event.HELD_BACK)

    def abandon(self) -> None:
        """Withdraw what is under way; takes no lock, for finalizers."""
        self._engine.withdraw([each.part for each in self._states if each.part is not None and not each.part.done])

    def keep_out(self, state: BucketState) -> bool:
        """Withdraw a bucket, or wait for it; return whether it was reduced. Others that are under way likewise."""
        if state.part is not None and not state.part.done:
            self.abandon()  # all at once: an answer may take a while
            for each in self._states:
                if each.part is not None and not self._engine.settle(each.part):
                    each.apply(Event.WITHDRAWN)
        if state.part is None or state.part.error is not None:  # the step raises the error
            return False
        if state.sync is not None:
            state.sync.come_back()
        return True
