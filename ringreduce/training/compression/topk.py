"""Top-k: of a bucket of gradients only the largest entries travel; the rest waits for later steps.

Sources:
    A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv 1704.05021: the
        largest entries by magnitude, and what is not sent is added to the next gradient.
    Those of `ringreduce.training.compression.Residual`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import ConfigError
from ringreduce.training.compression import Floats, ReducingRanks, Residual

_INFINITY_BITS = 0x7F800000  # of a float32; what is above is not a number
_MAGNITUDE_BITS = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class TopK:
    """Send the largest entries of each bucket, by magnitude.

    Each is 8 bytes, and every rank gets those of all P ranks. That is less than an uncompressed allreduce moves, which
    in a ring is 8 bytes times (P - 1) / P for each entry of the bucket, as long as ``fraction`` is below 1 / P.

    Args:
        fraction: of a bucket's entries, how many travel; at least one does. Must agree on all ranks.
        error_feedback: whether what was not sent is added to the next gradient. Without, it is lost, and training with
            small fractions ends elsewhere.

    Raises:
        ConfigError: ``fraction`` is not within (0, 1].
    """

    fraction: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"the fraction of entries that top-k sends must be in (0, 1], got {self.fraction}")

    def reducer(self, shapes: Sequence[tuple[int, ...]], places: Sequence[slice]) -> TopKReducer:
        """Return what reduces one bucket on this rank; see `BucketCompression.reducer`."""
        return TopKReducer(shapes, places, self)


class TopKReducer(Residual):
    """Reduces one bucket on one rank by its largest entries; made by `TopK.reducer`.

    One allgather. Its rows are pairs of int32: the number of entries first, then position and bits of each.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], places: Sequence[slice], settings: TopK) -> None:
        super().__init__(shapes, places, settings.error_feedback)
        assert self.unsent.size <= np.iinfo(np.int32).max, "positions travel as int32"
        size = sum(map(math.prod, shapes))
        self._count = min(size, max(1, math.ceil(settings.fraction * size)))

    @np.errstate(all="ignore")  # what is not finite travels as any other number
    def reduce(self, ranks: ReducingRanks, flat: Floats, average: bool) -> None:
        """Replace a bucket by the sum or average of the ranks' largest entries. Collective.

        An entry that is not finite on some rank is so in the result, however many there are.

        Args:
            ranks: the same in every call.
            flat: 1-D float32, contiguous; all of it is written, zeros where no parameter is. Same bits on all ranks
                afterwards: the ranks' entries are added in rank order.
            average: whether to divide the sum by the number of ranks; must agree.
        """
        if not self._count:
            return
        self.add(flat)
        unsent = self.unsent
        chosen = largest(unsent, self._count)
        gathered = ranks.allgather(_packed(chosen, unsent[chosen]))
        unsent[chosen] = 0.0
        flat.fill(0.0)
        finite = True
        for positions, values in _unpacked(gathered):
            flat[positions] += values  # no position comes twice from one rank
            finite = finite and bool(np.isfinite(values).all())
        if average:
            np.divide(flat, ranks.size, out=flat)
        self.settle(finite)


def largest(values: Floats, count: int) -> npt.NDArray[np.int64]:
    """Return the positions of the largest entries by magnitude, ascending.

    Of equal ones the first are taken. Zeros are left out. All entries that are not finite are in, even if they are
    more than ``count``.

    Args:
        values: 1-D.
        count: from 1 to the number of values.
    """
    # The bits of floats that are not negative, read as integers, have the floats' order; NaNs come after infinity.
    magnitudes = values.view(np.int32) & np.int32(_MAGNITUDE_BITS)
    place = magnitudes.size - count
    smallest = int(np.partition(magnitudes, place)[place])
    smallest = min(max(smallest, 1), _INFINITY_BITS)
    found = np.flatnonzero(magnitudes >= smallest)
    surplus = found.size - count
    if surplus > 0 and smallest < _INFINITY_BITS:
        equal = np.flatnonzero(magnitudes[found] == smallest)
        found = np.delete(found, equal[-surplus:])
    return found


def _packed(positions: npt.NDArray[np.int64], values: Floats) -> npt.NDArray[np.int32]:
    rows = np.empty((positions.size + 1, 2), np.int32)
    rows[0] = positions.size
    rows[1:, 0] = positions
    rows[1:, 1] = values.view(np.int32)
    return rows


def _unpacked(rows: npt.NDArray[np.int32]) -> Iterator[tuple[npt.NDArray[np.int32], Floats]]:
    """Yield each rank's positions and values, in rank order."""
    start = 0
    while start < len(rows):
        end = start + 1 + int(rows[start, 0])
        yield rows[start + 1 : end, 0], np.ascontiguousarray(rows[start + 1 : end, 1]).view(np.float32)
        start = end
