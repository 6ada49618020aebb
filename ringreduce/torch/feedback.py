"""What compressing a bucket keeps from step to step: the part of the gradients that was not sent yet.

Sources:
    S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599: with that
        memory, sending the largest entries converges as fast as SGD.
    S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient Compression
        Schemes", ICML 2019, arXiv 1901.09847: the same for every compression that keeps a part of the vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ringreduce.errors import ConfigError

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """What a rank means to send of one bucket: its gradients and, if it is carried, what it has not yet sent.

    A reduction adds the gradients, takes away what it sends, and settles. What is left is the residual. Over any number
    of steps, what was sent and the residual add up to the gradients, to rounding: nothing is lost, only late.

    Args:
        shapes: of the bucket's parameters.
        places: where each begins and ends in the flat bucket.
        carried: whether the residual goes into the next step.

    Attributes:
        meant: 1-D float32, like the flat bucket up to the last parameter's end, zeros where no parameter is.
        error: |left| / |meant| of the last step, L2 norms; 0.0 before, NaN for a step that was not finite.
    """

    __slots__ = ("_carried", "_norm", "_places", "error", "meant")

    def __init__(self, shapes: Sequence[torch.Size], places: Sequence[slice], carried: bool) -> None:
        self._places = [
            slice(place.start, place.start + shape.numel()) for shape, place in zip(shapes, places, strict=True)
        ]
        self._carried = carried
        self._norm = 0.0
        self.meant = torch.zeros(max((place.stop for place in self._places), default=0), device="cpu")
        self.error = 0.0

    def pieces(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters' parts of a flat bucket, one-dimensional."""
        return [flat[place] for place in self._places]

    def add(self, flat: torch.Tensor) -> None:
        """Mean to send the gradients of a flat bucket."""
        if self.meant.numel():
            combine = torch._foreach_add_ if self._carried else torch._foreach_copy_
            combine(self.pieces(self.meant), self.pieces(flat))
        self._norm = float(torch.linalg.vector_norm(self.meant))

    def settle(self, finite: bool) -> None:
        """Take note of the error, when what is sent has been taken from ``meant``.

        Args:
            finite: whether all that the ranks sent was. If not, the residual begins anew: the step's result is of no
                use, and one bad step must not spoil all later ones.
        """
        left = float(torch.linalg.vector_norm(self.meant))
        if finite and math.isfinite(left) and math.isfinite(self._norm):
            self.error = left / self._norm if self._norm else 0.0
        else:
            self.error = math.nan
            self.meant.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residual if it is carried."""
        return {"residual": self.meant.clone()} if self._carried else {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], **more: torch.Tensor) -> None:
        """Go on from what `state_dict` has returned.

        Args:
            state: as saved.
            more: tensors that were saved with it, by name, to be copied over.

        Raises:
            ConfigError: it is of another bucket: names or shapes differ. Nothing was loaded.
        """
        into = {**more, "residual": self.meant} if self._carried else more
        expected = {name: tuple(tensor.shape) for name, tensor in into.items()}
        found = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if found != expected:
            raise ConfigError(f"the saved state of a compressed bucket holds {found}, this bucket needs {expected}")
        for name, tensor in into.items():
            tensor.copy_(state[name])
