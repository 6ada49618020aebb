"""What a strategy is: it makes averages of what the ranks contribute to a step.

`strategy_for` in `chosen.py` chooses, as `path_for` does for a call. Strategies wrap each other, as the transformations
of optax do: `PacedSteps` measures any of them, `RepeatedSteps` makes a step like the last one and leaves others to
`WholeSteps`. What else takes part in a step is a `Partner`: it has something to say in the agreement of the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringreduce.training.binding.framework import Memory, Named
from ringreduce.training.gradients.buckets import Bucket, Buckets
from ringreduce.training.gradients.checks import Checks
from ringreduce.training.gradients.record import OptimizerRanks, Record
from ringreduce.training.options.options import Options

#: Averages of gradients, oldest first: each by the number of the parameter.
Averages = Sequence[Mapping[int, Any]]


class Contribution(NamedTuple):
    """What one rank gives to a step.

    Attributes:
        parameters: all of the optimizer's, in registration order.
        gradients: theirs, None where there is none; a strategy puts averages in their place.
        found: of each, what `Memory.found` has found; `Found.NO_GRADIENT` for those that do not count.
        samples: over how many samples the gradients are a mean; None: the program does not say. `RepeatedSteps` puts in
            the checked number, or the `ConfigError` that the agreement raises on all ranks.
    """

    parameters: Sequence[Any]
    gradients: list[Any]
    found: bytes
    samples: Any


class StepCount:
    """How many steps one optimizer has made on this rank; counted anew when all ranks have joined.

    Attributes:
        reduced: whose gradients were reduced.
        stepped: in which parameters were changed.
        looks_closer: whether the ranks compare more than gradients in the next one: in the 1st, 2nd, 4th, 8th and so
            on.
    """

    def __init__(self) -> None:
        self.reduced = 0
        self.stepped = 0
        self.looks_closer = True

    def add(self) -> None:
        """Count a step whose gradients were reduced."""
        self.reduced += 1
        self.looks_closer = self.reduced & (self.reduced + 1) == 0

    def restart(self) -> None:
        """Count anew, as ranks that had joined have made fewer steps; from 1, so that weights are not compared."""
        self.reduced = 1
        self.stepped = 0
        self.looks_closer = True


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all strategies of one optimizer work with.

    Attributes:
        memory: the gradients'.
        ranks: its collectives.
        named: returns names and parameters, all of the optimizer's, in registration order; equal on all ranks.
        options: settled; the same on all ranks.
        buckets: of its gradients.
        checks: of its gradients, before they are reduced.
        count: of its steps.
    """

    memory: Memory
    ranks: OptimizerRanks
    named: Callable[[], Named]
    options: Options
    buckets: Buckets
    checks: Checks
    count: StepCount


class PendingAverages(ABC):
    """Averages of earlier steps that are still to be applied."""

    @property
    @abstractmethod
    def pending(self) -> bool:
        """Whether there are some."""

    @abstractmethod
    def next(self) -> list[Any]:
        """Return the oldest ones, one for each parameter or None; waits for them."""

    @abstractmethod
    def state(self) -> list[dict[int, Any]]:
        """Return copies of all; waits for them. From then on a new world keeps them."""

    @abstractmethod
    def load(self, averages: Averages) -> None:
        """Put averages, which nobody else may change, in place of those that there are; waits for these."""

    @abstractmethod
    def loaded(self) -> Averages:
        """Return those that `state` has waited for or `load` has got."""


class Strategy(ABC):
    """Makes averages, or sums, of what the ranks contribute to a step."""

    @abstractmethod
    def reduce(self, contribution: Contribution) -> list[Any]:
        """Return what the step is to apply, one array for each parameter or None. Collective."""

    @property
    def late(self) -> PendingAverages | None:
        """The averages that later steps apply; None: each step applies its own."""
        return None


class Partner:
    """Takes part in the steps of a strategy: it has something to say in an agreement, and learns what came of it.

    In each step `settle` is called; unless the step repeats the last one, `report`, `heed`, `conclude`, `moved` if
    buckets are new, and `prepare`; then `reduced`. If the step fails, `break_off` is called. Each does nothing here.

    Attributes:
        overlaps: whether it may reduce gradients before the step; the same on all ranks.
        begun: whether it does so now; the same on all ranks.
        is_learning: whether it must hear of each step in an agreement, so that none is repeated without one.
    """

    overlaps = False
    begun = False
    is_learning = False

    def settle(self) -> bool:
        """Look at the gradients before a step. Local. Return whether the step may do without an agreement."""
        return True

    def report(self, record: Record, parameters: Sequence[Any]) -> None:
        """Say what this rank knows of its gradients. Local."""

    def heed(self, record: Record) -> None:
        """Take note of what all ranks have said; raise, on all ranks, what is wrong with it."""

    def conclude(self, record: Record, active: int, gradients: list[Any]) -> Sequence[Bucket]:
        """Return the buckets that are reduced already.

        Args:
            record: what all ranks have said.
            active: how many ranks contribute to the step.
            gradients: of all parameters; those that this rank lacks may become what was reduced for it.
        """
        return ()

    def moved(self) -> None:
        """Take note that there are other buckets now. Collective."""

    def prepare(self, record: Record, *, special: bool, active: int) -> None:
        """Prepare for the next step.

        Args:
            record: what all ranks have said in this one.
            special: whether this step does not show what the next ones are like (buckets are new, averages are
                weighted), or the next one compares gradients before they are reduced. The same on all ranks.
            active: as for `conclude`.
        """

    def reduced(self, gradients: Sequence[Any], *, repeated: bool) -> None:
        """Take note that the gradients of all parameters were reduced; ``repeated``: without an agreement."""

    def break_off(self, error: BaseException) -> None:
        """End a step that an error has ended, on all ranks or, as an interrupt does, here alone."""
