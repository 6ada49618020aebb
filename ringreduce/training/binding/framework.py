"""What ringreduce must know of a framework: read this page first if you bind another one.

A framework has arrays and, for training, parameters with gradients. `Arrays` describes the former, `Memory` the
latter; `ringreduce.torch.tensors.arrays` and `ringreduce.torch.tensors.gradients` are complete,
`trainees.toy` is small. With an `Arrays`, a collective of the binding is a few lines:

    preparing = partial(RequestBuilder, arrays=ARRAYS)  # of ringreduce.training.calls.requests

    def allreduce_async(array, name=None, op=AVERAGE, process_set=global_process_set):
        with preparing("allreduce", name, process_set) as prepare:
            request = prepare.allreduce([array], prepare.new_like([array]), op, 1.0, 1.0)
        return request.submit()  # a Handle, for poll() and synchronize(); carry_out() waits

Wrong arguments raise inside the ``with``, and the other ranks are notified. A binding must be a part of this package:
errors name, and ranks compare, the lines of source that call the package, which are then the program's.

A binding gets names, negotiation, fusion, errors and `join` from below. The other modules of this package give it
handles, `barrier`, gradients through collectives, broadcasts and checks of parameters, elastic training, and objects,
for which it enters its arrays in `ringreduce.training.calls.objects.REDUCERS`.

Training takes values: a `Memory` (five methods, and defaults for what it need not have) is enough for a
`ringreduce.training.optimizers.reducer.GradientReducer`, which takes lists of gradients and returns others;
`ringreduce.training.binding.host` is complete. A framework whose parameters keep their gradients in an attribute
``grad``, and that calls hooks in a backward pass, has `Hooks` as well: then buckets can be reduced while the pass goes
on. `Sparse` is for gradients of few rows, `Streams` for devices. A binding derives one class from those that it can
serve.

A distributed optimizer is the framework's own optimizer with a `Training` of
`ringreduce.training.optimizers.optimizer`: it calls `Training.prepare` and `begin` when it is made and
`Gradients.reduce` before each step; hooks call a `Watcher`. The methods of these classes are local: they touch the
framework's arrays and call nothing of ringreduce but `Communicator.empty`. `tests/suites` checks any binding.

Arrays have a ``shape`` (a tuple of whole numbers) and a ``dtype`` (that prints as NumPy's or torch's do); both can be
hashed. Memory is read and written by `ringreduce.buffers`, which takes NumPy arrays, torch tensors, CuPy arrays and
what has a ``__cuda_array_interface__``. A framework with memory of another kind passes NumPy views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.reduce_ops import ReduceOp

#: Names and parameters, in registration order.
Named = Sequence[tuple[str, Any]]

#: Takes arrays, and returns others.
ArrayFunction = Callable[[Sequence[Any]], Sequence[Any]]

_Result = TypeVar("_Result")


class Arrays(Protocol):
    """The arrays of a framework. The defaults are those of one whose arrays are in host memory and keep their place.

    Attributes:
        expected: what errors call one of its arrays: ``"a torch tensor"``.
        conversion: how users make one of other things, for errors: ``"torch.as_tensor(...)"``.
    """

    expected: str
    conversion: str

    def is_array(self, value: object) -> bool:
        """Return whether this is one of the framework's arrays."""

    def require_usable(self, communicator: Communicator, array: Any, *, writable: bool = False) -> None:
        """Check that a collective can read an array, and store a result there if ``writable``. Local.

        Raises:
            UnsupportedBufferError: of its layout or elements, or because this rank cannot use its device.
        """

    def without_graph(self, array: Any) -> Any:
        """Return an array of the same memory that no gradient flows through: itself if none does."""
        return array

    def empty_like(self, array: Any) -> Any:
        """Return an uninitialised array of the same shape, strides and dtype, in the same place."""

    def zeros_like(self, array: Any) -> Any:
        """Return zeros of the same shape and dtype, in the same place."""

    def scale(self, source: Any, factor: float, target: Any) -> None:
        """Store ``source`` times ``factor`` in ``target``, which may be ``source`` itself.

        Integers are multiplied in float64 and truncated toward zero. A factor of 1 copies. May be called on any thread.
        """

    def keep_in_place(self, arrays: Sequence[Any]) -> Callable[[], object]:
        """Forbid that arrays in host memory get other memory, as an operation uses it that nobody waits for.

        Returns:
            What ends that, once the operation has ended; calling it again does nothing. Where the memory of arrays
            never changes, neither does anything.
        """
        return lambda: None

    def changed(self, array: Any) -> Any:
        """Return an array that a collective has overwritten, after telling the framework so if it keeps versions."""
        return array

    def differentiable(
        self, run: ArrayFunction, rule: Callable[[], ArrayFunction], arrays: Sequence[Any]
    ) -> Sequence[Any]:
        """Return what ``run`` makes of arrays, so that gradients flow through it; for `Differentiable`.

        Args:
            run: takes the arrays `without_graph` and returns others.
            rule: returns a function that takes the gradients of the results and returns those of the arrays. Called
                once, before ``run``, if a gradient may be asked for; otherwise never.
            arrays: of any number.
        """
        return run(arrays)

    # What follows is for devices with streams.

    def device_of(self, arrays: Sequence[Any]) -> Any | None:
        """Return the device on which some of the arrays are; None: all are in host memory."""
        return None

    def place(self, array: Any) -> str:
        """Return the kind of device that an array is on, as mismatches say it: ``"cpu"`` or ``"cuda"``."""
        return "cpu"

    def on_host(self, arrays: Sequence[Any]) -> AbstractContextManager[Sequence[Any]]:
        """Return a context that lends the arrays in host memory: themselves, or copies that are copied back."""
        return nullcontext(arrays)

    def reduce_on_device(
        self, communicator: Communicator, op: ReduceOp, sources: Sequence[Any], targets: Sequence[Any]
    ) -> None:
        """Reduce arrays of which some are on a device, each into its target."""
        raise AssertionError("there is no device")

    def on_callers_stream(
        self, run: Callable[[Communicator], _Result], device: Any
    ) -> Callable[[Communicator], _Result]:
        """Return a function that calls ``run`` on the stream that is current now, from any thread.

        For operations that the caller waits for.
        """
        return run

    def beside_callers_stream(
        self, run: Callable[[Communicator], _Result], arrays: Sequence[Any]
    ) -> tuple[Callable[[Communicator], _Result], Callable[[object], object]]:
        """Return a function that calls ``run`` on another stream, after all that the caller has enqueued by now.

        Args:
            run: of an operation that the caller does not wait for.
            arrays: that it reads and writes.

        Returns:
            The function, and one that takes its result and makes the stream that is current then wait for it.
        """
        return run, lambda result: result


class Found:
    """What `Memory.found` returns. A sparse gradient is `SPARSE` plus the number of its sparse dimensions."""

    NO_GRADIENT = 0
    DENSE = 1
    SPARSE = 2
    UNSUPPORTED = 255


class Look:
    """What `Slot.look` returns.

    The gradient is in its place; it can be copied there without loss; there is none; the program holds the place, or a
    view of it, though it is not the gradient now; it cannot be copied without loss; the parameter has another shape,
    dtype or device than when the place was made.
    """

    IN_PLACE, MOVABLE, EMPTY, ALIASED, STUCK, STALE = range(6)


class Slot(Protocol):
    """A parameter, and the place in a bucket where its gradient is reduced.

    Attributes:
        parameter: whose gradient.
        place: a view of the bucket with the parameter's shape.
    """

    parameter: Any
    place: Any

    def look(self, gradient: Any) -> int:
        """Return a `Look`; `ALIASED` comes before `STUCK`, and `STALE` before all others."""


class Watcher(Protocol):
    """Hears from a framework what happens in a backward pass.

    Attributes:
        number: lower than those of watchers that were made later.
    """

    number: int

    def before_adding(self, record: Any) -> None:
        """Hear that a gradient is about to be added to, or may be."""

    def added(self, record: Any) -> None:
        """Hear that a gradient was added to."""

    def pass_ended(self, nested: bool = False) -> None:
        """Called at the end of a pass that called `added`; several watchers are called in the order of their numbers.

        Args:
            nested: whether the pass was made within another one, of which the end is not heard.
        """


class StreamSync(Protocol):
    """Orders the work on a bucket on a GPU: the backward pass fills it on one stream, and it is reduced on another."""

    def mark(self) -> None:
        """Remember the current stream, on which a gradient of the bucket is added to; `filling` waits for it."""

    def filling(self) -> AbstractContextManager[None]:
        """Return a context to fill the bucket in: it waits, on the device, until nobody works on the bucket."""

    def working(self) -> AbstractContextManager[None]:
        """Return a context to reduce the bucket in, on any thread."""

    def come_back(self) -> None:
        """Let what the caller enqueues from now on see the reduced bucket."""


class Removable(Protocol):
    """A hook that was set."""

    def remove(self) -> None:
        """Take it away."""


def remove_all(hooks: list[Any]) -> None:
    """Take hooks away, and empty the list."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


class Streams:
    """What a device with streams asks for. This one is of a framework in host memory: nothing."""

    def require_usable(self, parameters: Sequence[Any]) -> None:
        """Check that this process can use the devices on which parameters are. Local.

        Raises:
            UnsupportedBufferError: it cannot.
        """

    def is_on_host(self, array: Any) -> bool:
        """Return whether a parameter or a bucket is in host memory."""
        return True

    def on_host(self, flat: Any) -> AbstractContextManager[npt.NDArray[Any]]:
        """Lend a bucket as a NumPy array: itself, or a copy that is copied back in the end."""
        return nullcontext(flat)

    def sync(self, flat: Any) -> StreamSync | None:
        """Return what orders the work on a bucket between streams; None: nothing has to."""
        return None

    def around(self, arrays: Sequence[Any]) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return what makes a context in which to carry out an operation on these arrays, on any thread; None: in none.

        On a GPU the context is the stream on which the caller works now.
        """
        return None


class Advice(NamedTuple):
    """What helps against mistakes, in the words of a framework; and how its programs begin.

    Attributes:
        broadcast: what gives all ranks the weights of one: ``"call broadcast_parameters(...) ..."``.
        data: what gives each rank a part of the data: ``"data[rank()::size()], for example"``.
        first: the step, counted from 0, before which `Checks` compare weights: 1 where programs may broadcast after
            their first step. None: the reducer compares them with its first agreement.
        fewer: how a rank gets fewer samples.
        schedule: what a schedule of hyper-parameters that follows the loss does, so that all ranks change them alike.
    """

    broadcast: str
    data: str
    first: int | None = None
    fewer: str = "taking the part of all samples that share() returns, in each epoch"
    schedule: str = "takes the loss averaged with allreduce"


class Memory(Protocol):
    """The operations of one framework on gradients.

    Parameters are the framework's, or objects that describe gradients; they are compared by ``id``.
    Gradients are its arrays. A binding writes the first five methods, and overrides others where it can do more.

    Attributes:
        streams: the devices'.
        advice: for warnings.
    """

    streams: Streams = Streams()
    advice: Advice = Advice(
        "call ringreduce.broadcast(array, 0, out=array) for each of them before the first step",
        "data[ringreduce.rank()::ringreduce.size()], for example",
    )

    def kind(self, parameter: Any) -> tuple[Any, int]:
        """Return what parameters that share a bucket have in common (dtype, device), and the bytes of the gradient."""

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

    def pack(self, places: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Copy gradients to places of the same shapes, zeros where there is None."""

    def clone(self, array: Any) -> Any:
        """Return a copy in memory of its own."""

    def scale(self, array: Any, factor: float) -> None:
        """Multiply an array in place."""

    def found(self, gradients: list[Any]) -> bytes:
        """Return for each gradient `Found.NO_GRADIENT`, `DENSE`, `SPARSE` plus its sparse dimensions, or `UNSUPPORTED`.

        It may put others in their places: dense ones for sparse ones.
        """
        return bytes([each is not None for each in gradients])

    def is_trainable(self, parameter: Any) -> bool:
        """Return whether the parameter takes gradients now."""
        return True

    def shape_in_memory(self, place: Any) -> tuple[int, ...]:
        """Return the lengths of the dimensions, from the largest stride to the smallest."""
        return tuple(place.shape)

    # What the checks of the settings ask for; not of values alone.

    def checksum(self, parameters: Sequence[Any]) -> int:
        """Return a checksum of 32 bits of the parameters' values; 0 where only gradients are known.

        Args:
            parameters: or their values, where a `ringreduce.training.gradients.checks.CheckedModel` has them.
        """
        return 0

    def checksum_of_gradients(self, gradients: Sequence[Any]) -> int:
        """Return a checksum of 32 bits of gradients, and of which of them are None."""

    def is_finite(self, gradient: Any) -> bool:
        """Return whether all elements are numbers, neither NaN nor infinity."""


@runtime_checkable
class Sparse(Protocol):
    """Gradients of few rows, which are gathered in place of being summed up."""

    def rows(self, parameter: Any, gradient: Any, sparse_dims: int) -> tuple[Any, Any]:
        """Return a gradient as sparse rows: places, (count, sparse_dims) int64, and values, (count, elements of one).

        Args:
            parameter: whose gradient.
            gradient: None and dense ones count as well.
            sparse_dims: how many dimensions the places index.
        """

    def of_rows(self, parameter: Any, places: Any, values: Any, divisor: int) -> Any:
        """Return a sparse gradient of the rows of all ranks: their sum, divided by ``divisor``."""


@runtime_checkable
class InPlace(Protocol):
    """Parameters that are written in place, and can be put where all ranks of a node have them."""

    def view(self, parameter: Any, memory: Any) -> Any:
        """Return an array in some memory, of the parameter's shape and strides.

        Args:
            parameter: what it is like.
            memory: bytes, for it alone; it may be longer.
        """

    def move(self, parameters: Sequence[Any], views: Sequence[Any]) -> None:
        """Make views the memory of parameters."""

    def before_adding(self, parameter: Any, action: Callable[[], object]) -> Sequence[Removable]:
        """Call a function each time that the framework is about to add to a gradient."""
        return ()

    def keep_part(self, gradient: Any, part: slice, factor: float) -> None:
        """Multiply a part of a gradient in place, in the order that elements have in memory; the rest becomes zero."""


@runtime_checkable
class Hooks(Protocol):
    """Parameters that keep their gradients in an attribute ``grad``, None where there is none, and call hooks."""

    def watch(self, parameter: Any, watcher: Watcher, record: Any) -> Sequence[Removable]:
        """Call a watcher before and after each time that the framework adds to a gradient, with ``record``.

        The hooks that the parameter keeps must not keep the watcher alive.
        """

    def after_adding(self, parameter: Any, action: Callable[[], object]) -> Sequence[Removable]:
        """Call a function each time that the framework has added to a gradient; only speed depends on it."""
        return ()

    def version(self, gradient: Any) -> int:
        """Return a number that grows with every write to an array that the framework or the program makes."""
        return 0

    def is_zero(self, gradient: Any) -> bool:
        """Return whether all elements are zero."""
        return not gradient.any()
