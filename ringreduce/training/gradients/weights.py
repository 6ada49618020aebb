"""Averages of gradients that are means over different numbers of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ringreduce.engine import InPlaceAllreduce, Operation
from ringreduce.engine.operations import CollectiveOp


class Weights(NamedTuple):
    """What the ranks' gradients are multiplied by: their mean over all samples is the sum of these.

    Attributes:
        of_ranks: for each rank, its part of the samples; 0 if it has joined.
        factor: this rank's part times the number by which a plain average would divide.
        everyone: whether no rank has joined.
    """

    of_ranks: tuple[float, ...]
    factor: float
    everyone: bool

    @classmethod
    def of(cls, samples: Mapping[int, int], rank: int, size: int, divisor: int) -> Weights | None:
        """Return the weights; None: all ranks have equally many samples, or none has any.

        Args:
            samples: how many, by rank, of all that have not joined.
            rank, size: this rank, and how many there are.
            divisor: by which number a plain average divides.
        """
        total = sum(samples.values())
        if total == 0 or len(set(samples.values())) == 1:
            return None
        parts = tuple(samples.get(each, 0) / total for each in range(size))
        return cls(parts, parts[rank] * divisor, len(samples) == size)

    def apply(self, operation: Operation, *, inside: bool, scale: Callable[[float], object]) -> None:
        """Let an operation, which is an average, weight what it reduces.

        Args:
            operation: a reduction in place, or a collective of parts.
            inside: whether one rank of the node has all terms of an element at hand, and may weight them there.
            scale: multiplies this rank's array, where it is.
        """
        assert isinstance(operation, (InPlaceAllreduce, CollectiveOp))
        if self.everyone:
            operation.require_everyone()
        if inside and self.everyone and isinstance(operation, InPlaceAllreduce):
            operation.weights = self.of_ranks
        else:
            operation.before = partial(scale, self.factor)
