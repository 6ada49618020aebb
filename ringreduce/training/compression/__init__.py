"""Compressions that reduce whole buckets of gradients, on flat NumPy views of them: protocols and wire formats.

A `BucketCompression` makes one `Reducer` for each bucket, which reduces it step after step and keeps its compression
error, to send it in a later step. There are wire formats (here), `powersgd` and `topk`; these two are a `Residual`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, ClassVar, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from ringreduce.buffers.codecs import CODECS
from ringreduce.buffers.dtypes import DType
from ringreduce.collectives import Feedback
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM, ReduceOp

Floats = npt.NDArray[np.float32]

#: What a reducer keeps, by name.
State = dict[str, npt.NDArray[Any]]


class ReducingRanks(Protocol):
    """The ranks that reduce a bucket together, and all that a reducer asks of them; a `Communicator` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def empty(self, shape: int) -> npt.NDArray[Any]:
        """Return a float32 array that these ranks reduce without copying it first."""

    def allreduce(self, array: Any, op: ReduceOp, *, out: Any) -> Any:
        """Reduce an array as `Communicator.allreduce` does."""

    def allgather(self, array: Any) -> Any:
        """Concatenate the ranks' arrays as `Communicator.allgather` does."""


class Reducer(Protocol):
    """Reduces one bucket of gradients, step after step."""

    @property
    def error(self) -> float:
        """The relative error that compressing made on this rank in the last call, in the Euclidean norm; 0.0 before."""

    def reduce(self, ranks: ReducingRanks, flat: npt.NDArray[Any], average: bool) -> None:
        """Replace a bucket by its approximate sum or average over the ranks, of the same bits on all. Collective.

        Args:
            ranks: the same in every call.
            flat: 1-D float32, contiguous.
            average: whether the sum is divided by the number of ranks; must agree.
        """

    def state_dict(self) -> State:
        """Return copies of what the next `reduce` depends on."""

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` has returned, which is copied."""


@runtime_checkable
class BucketCompression(Protocol):
    """A compression that reduces whole buckets itself."""

    def reducer(self, shapes: Sequence[tuple[int, ...]], places: Sequence[slice]) -> Reducer:
        """Return what reduces one bucket on this rank.

        Args:
            shapes: of the bucket's parameters, their dimensions in the order that they have in memory; must agree on
                all ranks.
            places: where each parameter begins and ends in the flat bucket; must agree.
        """


class WireFormat:
    """Base of compressions that send floats between nodes in a wire format, and sum them up in float32.

    Attributes:
        wire: a name in `ringreduce.buffers.codecs.CODECS`.
        error_feedback: whether the rounding error is added in the next step.
    """

    wire: ClassVar[str]
    error_feedback: ClassVar[bool] = True

    @classmethod
    def reducer(cls, shapes: Sequence[tuple[int, ...]], places: Sequence[slice]) -> WireState:
        """Return the format of one bucket, in memory of any framework and on any device."""
        return WireState(cls.wire, cls.error_feedback)


def is_wire_format(compression: object) -> bool:
    """Return whether a compression is a `WireFormat`, or the class of one, and no user's own in its place."""
    kind = compression if isinstance(compression, type) else type(compression)
    return has_reducers(compression) and issubclass(kind, WireFormat)


def wire_format(name: object) -> type[WireFormat]:
    """Return the compression with a format of `ringreduce.buffers.codecs.CODECS`; raise `ConfigError` for any other."""
    if not isinstance(name, str) or name not in CODECS:
        raise ConfigError(f"unknown wire format {name!r}; choose one of {', '.join(CODECS)}")
    return type(name, (WireFormat,), {"wire": name})


class WireState:
    """Reduces one bucket in a wire format, and keeps the error of rounding to it.

    Attributes:
        wire: a name in `ringreduce.buffers.codecs.CODECS`.
        feedback: the rounding error; for `Communicator.allreduce`.
    """

    def __init__(self, wire: str, keep: bool) -> None:
        self.wire = wire
        self.feedback = Feedback(keep=keep)

    @property
    def error(self) -> float:
        """As of a `Reducer`."""
        return self.feedback.error

    def reduce(self, ranks: Any, flat: Any, average: bool) -> None:
        """As of a `Reducer`, for floats of any kind and library; ``ranks`` is a `Communicator`."""
        op = AVERAGE if average else SUM
        ranks.allreduce(flat, op, out=flat, compression=self.wire, feedback=self.feedback)

    def state_dict(self) -> State:
        """Return copies of the rounding error, if it is kept."""
        kept = {"sent": self.feedback.sent, "summed": self.feedback.summed} if self.feedback.keep else {}
        return {name: array.copy() for name, array in kept.items() if array is not None}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` has returned, which is copied."""
        self.feedback.load(state.get("sent"), state.get("summed"))


def has_reducers(compression: object) -> TypeGuard[BucketCompression]:
    """Return whether a compression reduces buckets itself, those of some dtypes at least.

    A user's subclass of one of ours does not if it defines ``compress`` or ``decompress``: these are called instead.
    """
    return isinstance(compression, BucketCompression) and not (
        isinstance(compression, type) and any(_is_users(compression, name) for name in ("compress", "decompress"))
    )


def reduces(compression: object, dtype: Any) -> bool:
    """Return whether a compression reduces buckets of this dtype, NumPy's or a framework's, itself."""
    if not has_reducers(compression):
        return False
    row = DType.of(dtype)
    is_wire = isinstance(compression, type) and issubclass(compression, WireFormat)
    return row.kind == "float" if is_wire else row.name == "float32"


def signature_of(compression: object) -> str:
    """Return text that differs between compressions and is the same on all ranks: without addresses."""
    if isinstance(compression, type):
        return compression.__qualname__
    return repr(compression) if is_dataclass(compression) else type(compression).__qualname__


def _is_users(compression: type, name: str) -> bool:
    """Return whether the method of this name, if there is one, was defined outside of this package."""
    makers = (each.__module__ for each in compression.__mro__ if name in vars(each))
    return next(makers, __name__).partition(".")[0] != __name__.partition(".")[0]


class Residual:
    """Base of what reduces one bucket: keeps what this rank has not sent yet, of this step and, if carried, of earlier.

    Sources:
        S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599: with that
            memory, sending the largest entries converges as fast as SGD.
        S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi, "Error Feedback Fixes SignSGD and other Gradient
            Compression Schemes", ICML 2019, arXiv 1901.09847: the same for every compression that keeps a part of the
            vector.

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
