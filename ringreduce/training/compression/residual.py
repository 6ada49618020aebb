"""What compressing a bucket keeps from step to step: the part of the gradients that was not sent yet.

Sources:
    S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599: with that
        memory, sending the largest entries converges as fast as SGD.
    S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes", ICML 2019, arXiv 1901.09847: the same for every compression that keeps a part of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import ConfigError
from ringreduce.training.compression import State

Floats = npt.NDArray[np.float32]


class Residual:
    """Base of what reduces one bucket: keeps what this rank has not sent yet, of this step and, if carried, of earlier.

    In each step `reduce` adds the gradients, subtracts what it sends from ``unsent``, and calls `settle`. Over any
    number of steps, what was sent and the residual add up to the gradients, to rounding: everything is sent, only late.

    Args:
        shapes: of the bucket's parameters.
        places: where each begins and ends in the flat bucket.
        carried: whether the residual goes into the next step.

    Attributes:
        unsent: 1-D float32, like the flat bucket up to the last parameter's end, zeros where no parameter is.
        error: |left| / |gradients and what was carried| of the last step, L2 norms; 0.0 before, NaN for a step that was
            not finite.
    """

    __slots__ = ("_carried", "_norm", "_places", "error", "unsent")

    def __init__(self, shapes: Sequence[tuple[int, ...]], places: Sequence[slice], carried: bool) -> None:
        self._places = [
            slice(place.start, place.start + math.prod(shape)) for shape, place in zip(shapes, places, strict=True)
        ]
        self._carried = carried
        self._norm = 0.0
        self.unsent: Floats = np.zeros(max((place.stop for place in self._places), default=0), np.float32)
        self.error = 0.0

    def pieces(self, flat: Floats) -> list[Floats]:
        """Return the parameters' parts of a flat bucket, one-dimensional."""
        return [flat[place] for place in self._places]

    def add(self, flat: Floats) -> None:
        """Add the gradients of a flat bucket to what was carried, if it is."""
        for unsent, gradient in zip(self.pieces(self.unsent), self.pieces(flat), strict=True):
            if self._carried:
                np.add(unsent, gradient, out=unsent)
            else:
                np.copyto(unsent, gradient)
        self._norm = _norm(self.unsent)

    def settle(self, finite: bool) -> None:
        """Measure the error, once all that is sent has been subtracted from ``unsent``.

        Args:
            finite: whether all that the ranks sent was finite. If not, nothing is carried: the step's result is of no
                use, and one bad step must not spoil all later ones.
        """
        left = _norm(self.unsent)
        if finite and math.isfinite(left) and math.isfinite(self._norm):
            self.error = left / self._norm if self._norm else 0.0
        else:
            self.error = math.nan
            self.unsent.fill(0.0)

    def kept(self) -> State:
        """Return what the next `reduce` depends on, by name: ``residual``, different on each rank, if it is carried."""
        return {"residual": self.unsent} if self._carried else {}

    def state_dict(self) -> State:
        """Return copies of what is `kept`."""
        return {name: array.copy() for name, array in self.kept().items()}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` has returned.

        Raises:
            ConfigError: it is of another bucket, or of one with other settings: names or shapes differ. Nothing was
                loaded.
        """
        into = self.kept()
        expected = {name: array.shape for name, array in into.items()}
        found = {name: array.shape for name, array in state.items()}
        if found != expected:
            raise ConfigError(f"the saved state of a compressed bucket holds {found}, this bucket needs {expected}")
        for name, array in into.items():
            np.copyto(array, state[name])


def _norm(values: Floats) -> float:
    return math.sqrt(np.dot(values, values))
