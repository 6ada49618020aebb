"""What ringreduce has to know of a framework: the page to read first for whoever binds another one.

A framework has arrays and, for training, gradients. `Arrays` describes the arrays; `ringreduce.torch.arrays` is the
model of one that is complete. With it, a collective of the binding is a few lines:

    preparing = partial(PreparingArrays, ARRAYS)  # of ringreduce.training.requests

    def allreduce_async(array, name=None, op=AVERAGE, process_set=global_process_set):
        with preparing("allreduce", name, process_set) as prepare:
            request = prepare.allreduce([array], [ARRAYS.empty_like(array)], op, 1.0, 1.0)
        return request.submit()  # a Handle, for poll() and synchronize(); carry_out() waits

What is wrong with the arguments is raised inside the ``with``, and the other ranks hear of it. A binding is a part of
this package, so that the lines which errors name, and ranks compare, are the program's and not the binding's.

Names, negotiation, fusion, errors and `join` come from below. So do, in the other modules of this package, handles,
`barrier`, gradients through collectives, parameters that are broadcast and compared, elastic training, and objects,
for which a binding enters its arrays in `ringreduce.training.objects.REDUCERS`.

Arrays have a ``shape`` (a tuple of whole numbers) and a ``dtype`` (that prints as NumPy's or torch's do); both can be
hashed. Memory is read and written by `ringreduce.buffers`, which takes NumPy arrays, torch tensors, CuPy arrays and
what has a ``__cuda_array_interface__``. A framework with memory of another kind passes NumPy views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from ringreduce.communicator import Communicator
from ringreduce.reduce_ops import ReduceOp

__all__ = ["Arrays"]

_Result = TypeVar("_Result")


class Arrays(Protocol):
    """The arrays of a framework.

    Attributes:
        expected: what errors say was expected: ``"a torch tensor"``.
        conversion: what makes an array of other things: ``"torch.as_tensor(...)"``.
    """

    expected: str
    conversion: str

    def is_array(self, value: object) -> bool:
        """Return whether this is one of the framework's arrays."""
        ...

    def require_usable(self, communicator: Communicator, array: Any, *, writable: bool = False) -> None:
        """Check that a collective can read an array, and store a result there if ``writable``. Local.

        Raises:
            UnsupportedBufferError: of its layout or elements, or because this rank cannot use its device.
        """
        ...

    def without_graph(self, array: Any) -> Any:
        """Return an array of the same memory that no gradient flows through: itself if none does."""
        ...

    def empty_like(self, array: Any) -> Any:
        """Return an uninitialised array of the same shape, strides and dtype, in the same place."""
        ...

    def zeros_like(self, array: Any) -> Any:
        """Return zeros of the same shape and dtype, in the same place."""
        ...

    def scale(self, source: Any, factor: float, target: Any) -> None:
        """Store ``source`` times ``factor`` in ``target``, which may be ``source`` itself.

        Integers are multiplied in float64 and truncated toward zero. A factor of 1 copies. May be called on any thread.
        """
        ...

    def changed(self, array: Any) -> Any:
        """Return an array that a collective has overwritten, after telling the framework so if it keeps versions."""
        ...

    def differentiable(
        self,
        run: Callable[[Sequence[Any]], Sequence[Any]],
        rule: Callable[[], Callable[[Sequence[Any]], Sequence[Any]]],
        arrays: Sequence[Any],
    ) -> Sequence[Any]:
        """Return what ``run`` makes of arrays, so that gradients flow through it; for `Differentiable`.

        Args:
            run: takes the arrays `without_graph` and returns others.
            rule: returns what makes gradients of the arrays of those of the results. Called once, before ``run``, if a
                gradient may be asked for, and else never.
            arrays: of any number.
        """
        ...

    # What follows is for devices with streams. A framework on the host alone returns None, "cpu", the arrays and `run`.

    def device_of(self, arrays: Sequence[Any]) -> Any | None:
        """Return the device on which some of the arrays are; None: all are in host memory."""
        ...

    def place(self, array: Any) -> str:
        """Return the kind of device that an array is on, as mismatches say it: ``"cpu"`` or ``"cuda"``."""
        ...

    def on_host(self, arrays: Sequence[Any]) -> AbstractContextManager[Sequence[Any]]:
        """Return a context that lends the arrays in host memory: themselves, or copies that are copied back."""
        ...

    def reduce_on_device(
        self, communicator: Communicator, op: ReduceOp, sources: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        """Reduce arrays of which some are on a device, each into its target."""
        ...

    def on_callers_stream(
        self, run: Callable[[Communicator], _Result], device: Any
    ) -> Callable[[Communicator], _Result]:
        """Return a function that does what ``run`` does on the stream that is current now, on whichever thread.

        For operations that the caller waits for.
        """
        ...

    def beside_callers_stream(
        self, run: Callable[[Communicator], _Result], arrays: Sequence[Any]
    ) -> tuple[Callable[[Communicator], _Result], Callable[[object], object]]:
        """Return a function that does what ``run`` does on another stream, after what the caller has enqueued by now.

        Args:
            run: of an operation that the caller does not wait for.
            arrays: that it reads and writes.

        Returns:
            The function, and one that takes its result and makes the stream that is current then wait for it.
        """
        ...
