"""The outer steps of DiLoCo with a quorum: arithmetic, and who takes part; `quorum` has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple

import numpy as np

from ringreduce.training.optimizers.local import Flat, outer_step


class Wanted(IntFlag):
    """What a replica wants; the last two are made of all replicas.

    Attributes:
        STEP: an outer step.
        AVERAGE: the average of what all have, without momentum.
        LOADED: it has loaded a state, which may have other weights and another number of steps than those of others.
    """

    STEP = 0
    AVERAGE = 1
    LOADED = 2


class Differences(NamedTuple):
    """The difference of a replica: how far its weights have moved in a period.

    Attributes:
        replica: its number.
        since: the number of outer steps when it began the period.
        wanted: what it wants.
        values: ``agreed - local``, by part.
        agreed: the weights that it began with, by part, if it has loaded them.
    """

    replica: int
    since: int
    wanted: Wanted
    values: Sequence[Flat]
    agreed: Sequence[Flat] = ()


class OuterRates(NamedTuple):
    """Learning rate and momentum of the outer steps of a part."""

    lr: float
    mu: float


class OuterSteps:
    """The weights that replicas agree on, and the steps that they make together. Local.

    Args:
        weights: by part.
        momentum: by part; None: zeros.
        rates: by part.
        ranks: how many each replica has.
        quorum: so many replicas make a step.
        count: how many steps there were.

    Attributes:
        count: as above.
        weights, momentum: by part; arrays that nothing writes to.
        waiting: the replicas whose weights come with the next step.
    """

    def __init__(
        self,
        weights: Sequence[Flat],
        momentum: Sequence[Flat | None],
        *,
        rates: Sequence[OuterRates],
        ranks: Sequence[int],
        quorum: int,
        count: int = 0,
    ) -> None:
        self.count = count
        self.weights = list(weights)
        self.momentum = [
            None if not rate.mu else np.zeros_like(flat) if kept is None else kept
            for flat, kept, rate in zip(weights, momentum, rates, strict=True)
        ]
        self.waiting: set[int] = set()
        self._expected = set(range(len(ranks)))
        self._come: list[Differences] = []
        self._rates = rates
        self._ranks = ranks
        self._quorum = quorum

    def take(self, differences: Differences) -> bool:
        """Add a difference to the next step; return whether the replica has the weights of the last step."""
        self._come.append(differences)
        self.waiting.add(differences.replica)
        return differences.since >= self.count

    def forget(self) -> list[Differences]:
        """Return what has come of replicas that wait, and forget all that has."""
        waiting = [each for each in self._come if each.replica in self.waiting]
        self._come, self.waiting = [], set()
        return waiting

    @property
    def complete(self) -> bool:
        """Whether enough replicas wait."""
        return len(self.waiting) >= self._quorum

    @property
    def all_here(self) -> bool:
        """Whether all replicas that took part in the last step of a quorum wait; before the first such step, all."""
        return self.waiting >= self._expected

    def possible(self, absent: int) -> bool:
        """Return whether there can be another step, if so many replicas do not come."""
        return len(self._ranks) - absent >= self._quorum

    def make(self) -> None:
        """Make a step."""
        self._expected = {each.replica for each in self._come}
        self._step(self._rates)

    def make_of_all(self, everyone: Sequence[Differences]) -> None:
        """Make a step of all replicas: an average if all want that; from the newest weights that one has loaded."""
        newest = max(everyone, key=lambda each: each.since if each.agreed else -1)
        if newest.agreed and newest.since > self.count:
            self.count, self.weights = newest.since, list(newest.agreed)
        self._come += everyone
        average = all(Wanted.AVERAGE in each.wanted for each in everyone)
        self._step([OuterRates(1.0, 0.0)] * len(self._rates) if average else self._rates)

    def _step(self, rates: Sequence[OuterRates]) -> None:
        factors = [self._ranks[each.replica] / (1 + max(0, self.count - each.since)) for each in self._come]
        for part, rate in enumerate(rates):
            delta = np.zeros_like(self.weights[part])
            for factor, each in zip(factors, self._come, strict=True):
                delta += delta.dtype.type(factor) * each.values[part]
            delta /= sum(factors)
            changed = self.weights[part].copy()  # Others read the old ones, and messages are under way with them.
            momentum = self.momentum[part]
            if rate.mu and momentum is not None:
                self.momentum[part] = momentum = momentum.copy()
            outer_step(changed, momentum if rate.mu else None, delta, lr=rate.lr, mu=rate.mu)
            self.weights[part] = changed
        self.forget()
        self.count += 1
