"""What a framework has to say about its gradients, so that the rest of this package trains with it.

A binding (`ringreduce.torch`, the toy in `ringreduce.testing.toy`) implements `Framework` and `Slot`, calls
`Gradients.reduce` before it steps, and calls `Overlap.before_adding`, `added` and `pass_ended` from the framework's own
hooks, if it has any. All methods are local, touch the framework's arrays and call nothing of ringreduce but
`Communicator.empty`. The conformance suite in `ringreduce.testing.training` says what must come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy.typing as npt

from ringreduce.communicator import Communicator

__all__ = ["DENSE", "NO_GRADIENT", "SPARSE", "UNSUPPORTED", "Framework", "Handover", "Removable", "Slot", "Watcher"]

#: What `Framework.found` finds. A sparse gradient is `SPARSE` plus the number of its sparse dimensions.
NO_GRADIENT, DENSE, SPARSE, UNSUPPORTED = 0, 1, 2, 255


class Slot(Protocol):
    """A parameter, and the place in a bucket where its gradient is reduced.

    Attributes:
        parameter: whose gradient.
        place: a view of the bucket with the parameter's shape.
    """

    parameter: Any
    place: Any

    def is_filled(self) -> bool:
        """Return whether the parameter's gradient is the place itself."""
        ...

    def is_kept(self) -> bool:
        """Return whether somebody holds the place, or a view of it, although it is not the gradient now."""
        ...

    def is_outgrown(self) -> bool:
        """Return whether the parameter has another shape, dtype or device than when the place was made."""
        ...


class Watcher(Protocol):
    """What a framework calls in a backward pass.

    Attributes:
        number: of several, the first made has the lowest.
    """

    number: int

    def before_adding(self, record: Any) -> None:
        """To be called before a gradient is added to, where the framework can."""
        ...

    def added(self, record: Any) -> None:
        """To be called after that."""
        ...

    def pass_ended(self, number: int) -> None:
        """To be called at the end of a pass that has called `added`; on several watchers in the order of their numbers.

        Args:
            number: greater than those of passes that began earlier.
        """
        ...


class Handover(Protocol):
    """The order, on a GPU, around a bucket that the backward pass fills and that is reduced beside it, again and again."""

    def note(self) -> None:
        """To be called where a gradient of the bucket is added to."""
        ...

    def filling(self) -> AbstractContextManager[None]:
        """Return a context to fill the bucket in: it waits, on the device, until nobody works on the bucket."""
        ...

    def working(self) -> AbstractContextManager[None]:
        """Return a context to reduce the bucket in, on whichever thread."""
        ...

    def come_back(self) -> None:
        """Let what the caller enqueues from now on see the reduced bucket."""
        ...


class Removable(Protocol):
    """A hook that was set."""

    def remove(self) -> None:
        """Take it away."""
        ...


class Framework(Protocol):
    """The operations of one framework on parameters and gradients.

    Parameters are whatever the framework calls so; they are told apart by ``id``. Gradients are its arrays.
    """

    def gradient(self, parameter: Any) -> Any:
        """Return the gradient; None: there is none."""
        ...

    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """Make an array, or None, the gradient."""
        ...

    def found(self, parameter: Any) -> int:
        """Return `NO_GRADIENT`, `DENSE`, `SPARSE` plus the sparse dimensions, or `UNSUPPORTED`."""
        ...

    def is_trainable(self, parameter: Any) -> bool:
        """Return whether the parameter takes gradients now."""
        ...

    def version(self, gradient: Any) -> int:
        """Return a number that grows with every write to the array that the program makes, as far as is known."""
        ...

    def kind(self, parameter: Any) -> tuple[Any, int]:
        """Return what only parameters that may share a bucket have in common (dtype, device), and the gradient's bytes."""
        ...

    def lay_out(
        self, communicator: Communicator, parameters: Sequence[Any], starts: Sequence[int]
    ) -> tuple[Any, Sequence[Slot]]:
        """Make the memory of a bucket, zeros, by `Communicator.empty`.

        Args:
            communicator: makes the memory.
            parameters: all of one kind.
            starts: where each gradient begins, in bytes, and the length of the bucket at the end.

        Returns:
            The bucket as one flat array, and its slots.
        """
        ...

    def copy(self, targets: Sequence[Any], sources: Sequence[Any]) -> None:
        """Copy arrays into others of the same shapes."""
        ...

    def clone(self, array: Any) -> Any:
        """Return a copy in memory of its own."""
        ...

    def zero(self, arrays: Sequence[Any]) -> None:
        """Fill arrays with zeros."""
        ...

    def scale(self, array: Any, factor: float) -> None:
        """Multiply an array in place."""
        ...

    def movable(self, slot: Slot) -> bool:
        """Return whether the gradient, which is there, may become the slot's place without loss."""
        ...

    def shape_in_memory(self, place: Any) -> tuple[int, ...]:
        """Return the lengths of the dimensions, from the one that goes farthest in memory to the nearest."""
        ...

    def is_on_host(self, array: Any) -> bool:
        """Return whether a parameter or a bucket is in host memory."""
        ...

    def on_host(self, flat: Any) -> AbstractContextManager[npt.NDArray[Any]]:
        """Lend a bucket as a NumPy array: itself, or a copy that is copied back in the end."""
        ...

    def rows(self, parameter: Any, sparse_dims: int) -> tuple[Any, Any]:
        """Return a gradient as sparse rows: places, (count, sparse_dims) int64, and values, (count, elements of one).

        Args:
            parameter: whose gradient; None and dense ones count as well.
            sparse_dims: how many dimensions the places index.
        """
        ...

    def set_rows(self, parameter: Any, places: Any, values: Any, divisor: int) -> None:
        """Make what `rows` returned on all ranks, one after the other, the gradient: added up and divided."""
        ...

    def after_adding(self, parameter: Any, action: Callable[[], object]) -> Sequence[Removable]:
        """Have a function called each time that the framework has added to a gradient."""
        ...

    def watch(self, parameter: Any, watcher: Watcher, record: Any) -> Sequence[Removable]:
        """Have a watcher called around each time that the framework adds to a gradient, with a record.

        What this leaves with the parameter must not keep the watcher alive.
        """
        ...

    def checksum(self, parameters: Sequence[Any]) -> int:
        """Return a checksum of 32 bits of the parameters' values."""
        ...

    def handover(self, flat: Any) -> Handover | None:
        """Return what orders the work of others on a bucket and that of the backward pass; None: nothing has to."""
        ...

    def around(self, arrays: Sequence[Any]) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return what an operation on these arrays is to be carried out in, on whichever thread; None: in nothing.

        Of a GPU: the stream on which the caller works now.
        """
        ...
