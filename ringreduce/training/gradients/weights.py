"""Averages of gradients that are means over different numbers of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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
