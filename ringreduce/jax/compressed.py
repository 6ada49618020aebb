"""Lossy compression of gradients for JAX: what was lost is the program's, as arrays that go in and come out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy.typing as npt

from ringreduce.buffers.codecs import CODECS
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import AVERAGE, SUM
from ringreduce.training.compression import BucketCompression, State, WireFormat, WireState, has_reducers, signature_of

__all__ = ["Compressed", "checked_compression", "find"]

_Host = npt.NDArray[Any]


def checked_compression(compression: Any) -> BucketCompression:
    """Return a compression as a user gives it: an object, a class, or the name of a wire format."""
    if isinstance(compression, str):
        if compression not in CODECS:
            raise ConfigError(f"unknown wire format {compression!r}; choose one of {', '.join(CODECS)}")
        compression = type(compression, (WireFormat,), {"wire": compression})
    if not has_reducers(compression):
        raise ConfigError(
            f"compression is one of {', '.join(CODECS)}, or a compression of buckets as PowerSGD; got {compression!r}"
        )
    made: BucketCompression = compression() if isinstance(compression, type) else compression
    return made


class Compressed:
    """Reduces lists of float32 arrays by a compression, as one bucket.

    Args:
        compression: of buckets.
        shapes: of the arrays; the same on all ranks.
        names: of what was lost.

    Attributes:
        key: by which `find` finds it: text that is the same on all ranks, and in all processes.
        count: the number of arrays; what was lost comes behind these.
    """

    def __init__(
        self, compression: BucketCompression, shapes: Sequence[tuple[int, ...]], names: Sequence[str] = ()
    ) -> None:
        self.count, self._names = len(shapes), names
        words = [*("x".join(map(str, shape)) or "scalar" for shape in shapes), *names]
        self.key = f"{signature_of(compression)} of {', '.join(words)}"
        bounds = list(accumulate(map(prod, shapes), initial=0))
        self._count, self._places = bounds[-1], [slice(*each) for each in pairwise(bounds)]
        self._reducer = compression.reducer(list(shapes), self._places)
        _known.setdefault(self.key, self)

    def begin(self, communicator: Communicator) -> State:
        """Return what is lost before the first call, by name: on each rank its own. Collective."""
        if isinstance(self._reducer, WireState):  # what a rank loses depends on how arrays travel between nodes
            self._reduce(communicator, communicator.empty(self._count), average=False)
        return self._reducer.state_dict()

    def reduce(
        self, communicator: Communicator, sources: Sequence[_Host], targets: Sequence[_Host], *, average: bool
    ) -> Sequence[_Host]:
        """Return ``targets``: reduced arrays, and what is lost now. Collective.

        Args:
            communicator: of the ranks.
            sources: the arrays, and what was lost before, in the order of its names.
            targets: of the same shapes.
            average: whether sums are divided by the number of ranks.
        """
        flat = communicator.empty(self._count)
        for place, source in zip(self._places, sources, strict=False):
            flat[place] = source.ravel()
        self._reducer.load_state_dict(dict(zip(self._names, sources[self.count :], strict=True)))
        self._reduce(communicator, flat, average)
        for place, target in zip(self._places, targets, strict=False):
            target[...] = flat[place].reshape(target.shape)
        kept = self._reducer.state_dict()
        for name, target in zip(self._names, targets[self.count :], strict=True):
            # After a change of ranks it may have another length: then nothing is kept.
            target[...] = kept[name] if kept[name].shape == target.shape else 0
        return targets

    def _reduce(self, communicator: Communicator, flat: _Host, average: bool) -> None:
        if isinstance(self._reducer, WireState):
            op, wire, feedback = AVERAGE if average else SUM, self._reducer.wire, self._reducer.feedback
            communicator.allreduce(flat, op, out=flat, compression=wire, feedback=feedback)
        else:
            self._reducer.reduce(communicator, flat, average)


_known: dict[str, Compressed] = {}


def find(key: str) -> Compressed:
    """Return the one of this key, of a program that was traced in this process."""
    return _known[key]
