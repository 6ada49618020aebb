"""Top-k: of a bucket of gradients only the largest entries travel; the rest waits for later steps.

Sources:
    A. F. Aji, K. Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, arXiv 1704.05021: the
        largest entries by magnitude, and what is not sent is added to the next gradient.
    Those of `ringreduce.torch.feedback`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ringreduce.communicator import Communicator
from ringreduce.errors import ConfigError
from ringreduce.torch.feedback import ErrorFeedback

__all__ = ["TopK", "TopKReducer", "largest"]

_INFINITY_BITS = 0x7F800000  # of a float32; what is above is not a number
_MAGNITUDE_BITS = 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class TopK:
    """Send the largest entries of each bucket, by magnitude.

    Each is 8 bytes, and every rank gets those of all P ranks. That is less than an uncompressed allreduce moves, which
    in a ring is 8 bytes times (P - 1) / P for each entry of the bucket, as long as ``fraction`` is below 1 / P.

    Args:
        fraction: of a bucket's entries, how many travel; at least one does. Must agree on all ranks.
        error_feedback: whether what was not sent is added to the next gradient. Without, it is lost, and training
            with small fractions goes elsewhere.

    Raises:
        ConfigError: ``fraction`` is not within (0, 1].
    """

    fraction: float = 0.01
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(f"the fraction of entries that top-k sends must be in (0, 1], got {self.fraction}")

    def reducer(self, shapes: Sequence[torch.Size], places: Sequence[slice]) -> TopKReducer:
        """Return what reduces one bucket on this rank.

        Args:
            shapes: of the bucket's parameters; must agree on all ranks.
            places: where each begins and ends in the flat bucket; must agree.
        """
        return TopKReducer(shapes, places, self)


class TopKReducer:
    """Reduces one bucket on one rank by its largest entries; made by `TopK.reducer`.

    One allgather. Its rows are pairs of int32: the number of entries first, then position and bits of each.

    Attributes:
        error: the part of this rank's contribution that the last `reduce` left unsent, |sent - meant| / |meant|.
    """

    wire = None

    __slots__ = ("_count", "_feedback")

    def __init__(self, shapes: Sequence[torch.Size], places: Sequence[slice], settings: TopK) -> None:
        self._feedback = ErrorFeedback(shapes, places, settings.error_feedback)
        assert self._feedback.meant.numel() <= np.iinfo(np.int32).max, "positions travel as int32"
        size = sum(shape.numel() for shape in shapes)
        self._count = min(size, max(1, math.ceil(settings.fraction * size)))

    @property
    def error(self) -> float:
        return self._feedback.error

    @torch.no_grad()
    def reduce(self, communicator: Communicator, flat: torch.Tensor, average: bool) -> None:
        """Replace a bucket by the sum or average of the ranks' largest entries. Collective.

        An entry that is not finite on some rank is so in the result, however many there are.

        Args:
            communicator: the ranks; the same as in earlier calls.
            flat: 1-D float32, contiguous; all of it is written, zeros where no parameter is. Same bits on all ranks
                afterwards: the ranks' entries are added in rank order.
            average: whether to divide the sum by the number of ranks; must agree.
        """
        if not self._count:
            return
        self._feedback.add(flat)
        meant = self._feedback.meant
        chosen = torch.from_numpy(largest(meant.numpy(), self._count))
        gathered = communicator.allgather(_packed(chosen, meant[chosen]))
        meant[chosen] = 0.0
        flat.zero_()
        finite = True
        for positions, values in _unpacked(gathered):
            # No position comes twice from one rank, so that the order within one call does not matter.
            flat.index_add_(0, positions, values)
            finite = finite and bool(values.isfinite().all())
        if average:
            flat.div_(communicator.size)
        self._feedback.settle(finite)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return clones of what the next `reduce` depends on: ``residual``, different on each rank, or nothing."""
        return self._feedback.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on from what `state_dict` has returned.

        Raises:
            ConfigError: it is of another bucket, or of one with another error feedback.
        """
        self._feedback.load_state_dict(state)


def largest(values: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
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


def _packed(positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    rows = torch.empty(len(positions) + 1, 2, dtype=torch.int32, device="cpu")
    rows[0] = len(positions)
    rows[1:, 0] = positions
    rows[1:, 1] = values.view(torch.int32)
    return rows


def _unpacked(rows: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each rank's positions and values, in rank order."""
    found, start = [], 0
    while start < len(rows):
        end = start + 1 + int(rows[start, 0])
        found.append((rows[start + 1 : end, 0], rows[start + 1 : end, 1].contiguous().view(torch.float32)))
        start = end
    return found
