"""The GPU through CuPy: its runtime, and sums by its own kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from ringreduce.buffers import DType
from ringreduce.buffers.device_arrays import cupy_for
from ringreduce.common.errors import TransportError, UnsupportedBufferError
from ringreduce.common.libraries import INSTALL_CUPY
from ringreduce.common.reduce_ops import ReduceOp

# Values of the CUDA runtime's headers, some of which CuPy does not name in all its versions.
_SUCCESS = 0
_NO_MEMORY = 2
_NOT_READY = 600
_COPY_BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses say which memory is meant.
_REGISTERED = 1  # Pinned for all contexts of the process.
_NON_BLOCKING = 1  # A stream that does not wait for the legacy default stream.
_HIGHEST_PRIORITY = -100  # Lower numbers go first, and one out of range counts as the highest there is.
_UUID_NBYTES = 16

#: The functions of NumPy and CuPy that combine two arrays. Other operations go through the host.
FOLDS = {
    ReduceOp.SUM: "add",
    ReduceOp.AVERAGE: "add",
    ReduceOp.PRODUCT: "multiply",
    ReduceOp.MIN: "minimum",
    ReduceOp.MAX: "maximum",
}


#: Opaque: what the driver made. Stream 0 is the legacy default stream.
Stream = int
Event = Any


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, as this process sees it.

    Attributes:
        number: the ordinal in this process.
        uuid: what names it in every process, on every machine.
        name: the product.
        capability: compute capability, 90 for 9.0.
        nbytes: its memory.
    """

    number: int
    uuid: str
    name: str
    capability: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What is done to how many elements.

    Attributes:
        dtype: of the arrays; 16-bit floats are accumulated in float32 and rounded once.
        op: how they are reduced; no average of integers or bools, no minimum or maximum of complex numbers.
        count: elements of each array.
    """

    dtype: DType
    op: ReduceOp
    count: int

    @property
    def nbytes(self) -> int:
        """Of each array."""
        return self.count * self.dtype.itemsize


def cuda_driver(number: int | None = None) -> CupyDriver:
    """Return this process's driver of a GPU, the same each time.

    Args:
        number: which one, None for the current one of this thread.

    Raises:
        UnsupportedBufferError: CuPy is not installed, or finds no such GPU.
    """
    cupy = cupy_for("device memory")
    try:
        return _drivers(cupy, cupy.cuda.runtime.getDevice() if number is None else number)
    except (RuntimeError, TransportError) as error:
        raise UnsupportedBufferError(
            f"CuPy {cupy.__version__} cannot use {'a GPU' if number is None else f'GPU {number}'}: {error}. "
            f"It must be built for the CUDA of the installed driver (see nvidia-smi): {INSTALL_CUPY}"
        ) from error


class CupyDriver:
    """The GPU that this process works on, over CuPy 13 or 14: memory, streams, events, copies and sums.

    Everything above works on addresses and opaque handles, and asks this. Calls return before what they enqueue is
    done, in the order of their stream, except where it says otherwise. Errors become `ringreduce.TransportError`; only
    a lack of device memory in `allocate` is a `MemoryError`. Can be used from any thread, whatever GPU is the current
    one there. One for tests does all of it in host memory, and keeps a record (`tests/gpu_doubles`).

    Args:
        cupy: the module.
        number: the GPU's ordinal.

    Attributes:
        device: what it is.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._number = number
        self.device = self._describe()

    def _describe(self) -> Device:
        # Both take the ordinal. To make that GPU the current one would take memory of it for a context, on every GPU
        # that somebody only looks at.
        looks = self._translated(self._runtime.getDeviceProperties, self._number)
        address = self._translated(self._runtime.deviceGetPCIBusId, self._number)
        # CuPy takes the UUID for text, which ends at the first zero byte: it may be cut off, for which the address on
        # the bus makes up, or run on into what comes after it. The UUID tells the instances of a partitioned GPU (MIG)
        # apart, which share that address.
        return Device(
            number=self._number,
            uuid=f"{bytes(looks['uuid'])[:_UUID_NBYTES].hex()}@{address}",
            name=looks["name"].decode(),
            capability=10 * looks["major"] + looks["minor"],
            nbytes=looks["totalGlobalMem"],
        )

    # ---- memory ----

    def allocate(self, nbytes: int) -> int:
        """Return the address of new device memory, aligned to 256 bytes, from no pool."""
        try:
            return int(self._ask(self._runtime.malloc, max(1, nbytes)))
        except TransportError as error:
            if getattr(error.__cause__, "status", None) != _NO_MEMORY:
                raise
            raise MemoryError(f"GPU {self._number} has not that much free memory: {error.__cause__}") from error

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; waits for the device."""
        self._ask(self._runtime.deviceSynchronize)  # `cudaFree` may do this or not.
        self._ask(self._runtime.free, address)

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that copies to and from it are asynchronous."""
        self._ask(self._runtime.hostRegister, address, nbytes, _REGISTERED)

    def unregister(self, address: int) -> None:
        """Take back what `register` did; nothing that is enqueued may still use it."""
        self._ask(self._runtime.hostUnregister, address)

    # ---- order ----

    def make_stream(self) -> Stream:
        """Return a new stream of high priority, which does not wait for the default stream."""
        return int(self._ask(self._runtime.streamCreateWithPriority, _NON_BLOCKING, _HIGHEST_PRIORITY))

    def free_stream(self, stream: Stream) -> None:
        """Give a stream back; what is enqueued there is still done."""
        self._ask(self._runtime.streamDestroy, stream)

    def make_event(self) -> Event:
        """Return a new event without timing; it is given back when nobody refers to it any more."""
        return self._ask(partial(self._cupy.cuda.Event, disable_timing=True))

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event stand for all that has been enqueued on the stream."""
        self._ask(self._runtime.eventRecord, event.ptr, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is enqueued on the stream from now on begin after the event, as it was recorded last."""
        self._ask(self._runtime.streamWaitEvent, stream, event.ptr)

    def done(self, event: Event) -> bool:
        """Return whether the work before the event is done."""
        status = int(self._ask(self._runtime.eventQuery, event.ptr))
        if status == _SUCCESS:
            return True
        try:
            # This clears CUDA's last error, which "not ready" counts as: torch would find it after its next kernel.
            self._runtime.check_status(status)
        except RuntimeError as error:
            if status != _NOT_READY:
                raise TransportError(f"GPU {self._number}: {error}") from error
        return False

    def synchronize(self, event: Event) -> None:
        """Return when the work before the event is done."""
        self._ask(self._runtime.eventSynchronize, event.ptr)

    # ---- work ----

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy between any two of device and host memory.

        If the host memory is not pinned, the call returns when the host may use it again: when the copy is done, or its
        bytes have at least left it for the device.
        """
        if nbytes:
            self._ask(self._runtime.memcpyAsync, target, source, nbytes, _COPY_BY_ADDRESS, stream)

    def combine(self, arithmetic: Arithmetic, sources: Sequence[int], target: int, size: int, stream: Stream) -> None:
        """Reduce arrays in device memory, in the order of ``sources``.

        Args:
            arithmetic: what is done.
            sources: the addresses of the arrays.
            target: where the result goes; it may be one of the sources.
            size: what an average is divided by.
            stream: on which the sources are ready.
        """

        def enqueue() -> None:
            with on_stream(self._cupy, stream):
                result = reduced(
                    self._cupy,
                    [self._flat(address, arithmetic) for address in sources],
                    arithmetic=arithmetic,
                    size=size,
                )
                self._flat(target, arithmetic)[...] = result

        if arithmetic.count:
            self._ask(enqueue)

    def _flat(self, address: int, arithmetic: Arithmetic) -> Any:
        """Return device memory as a flat CuPy array, without a copy."""
        memory = self._cupy.cuda.UnownedMemory(address, arithmetic.nbytes, None, device_id=self._number)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return self._cupy.ndarray((arithmetic.count,), arithmetic.dtype.storage, memptr=pointer)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the runtime with this GPU as the current one, and translate its errors."""
        return self._translated(self._here, function, *arguments)

    def _here(self, function: Callable[..., Any], *arguments: Any) -> Any:
        runtime = self._runtime
        elsewhere = runtime.getDevice()
        if elsewhere == self._number:
            return function(*arguments)
        # A thread that never chose a GPU has the first one as its current one, but no context there. To go back to that
        # would make one, which takes memory of a GPU that may be another rank's.
        chosen = bool(self._cupy.cuda.driver.ctxGetCurrent())
        runtime.setDevice(self._number)
        try:
            return function(*arguments)
        finally:
            if chosen:
                runtime.setDevice(elsewhere)

    def _translated(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the runtime, and translate its errors."""
        try:
            return function(*arguments)
        except Exception as error:  # CuPy's errors have no common base
            raise TransportError(f"GPU {self._number}: {error}") from error


#: One of each GPU.
_drivers = cache(CupyDriver)


@dataclass(frozen=True, slots=True)
class _Foreign:
    """A stream by the protocol in which libraries hand each other theirs."""

    stream: Stream

    def __cuda_stream__(self) -> tuple[int, Stream]:
        return 0, self.stream  # The first number is the protocol's version.


def on_stream(cupy: Any, stream: Stream) -> AbstractContextManager[object]:
    """Make a stream CuPy's current one inside a ``with``."""
    # Since CuPy 14, which warns of the other one.
    convert = getattr(cupy.cuda.Stream, "from_external", None)
    taken: AbstractContextManager[object]
    taken = cupy.cuda.ExternalStream(stream) if convert is None else convert(_Foreign(stream))
    return taken


def reduced(xp: Any, arrays: Sequence[Any], arithmetic: Arithmetic, size: int) -> Any:
    """Return the reduction of flat arrays, one after the other; those of bfloat16 hold its bits.

    Args:
        xp: CuPy, or NumPy.
        arrays: the terms.
        arithmetic: what is done.
        size: what an average is divided by.
    """
    dtype = arithmetic.dtype
    fold = getattr(xp, FOLDS[arithmetic.op])
    total = _widened(xp, arrays[0], dtype, copy=True)
    for array in arrays[1:]:
        fold(total, _widened(xp, array, dtype), out=total)
    if arithmetic.op is ReduceOp.AVERAGE:
        parts = total.view(total.real.dtype)  # Both parts of complex numbers, as NumPy divides them.
        xp.true_divide(parts, parts.dtype.type(size), out=parts)
    return _narrowed(xp, total, dtype)


def _widened(xp: Any, array: Any, dtype: DType, *, copy: bool = False) -> Any:
    """Return 16-bit floats as float32, and others as they are."""
    if dtype.name == "bfloat16":
        return xp.left_shift(array.astype("uint32"), 16).view("float32")
    return array.astype("float32") if dtype.half else array.copy() if copy else array


def _narrowed(xp: Any, total: Any, dtype: DType) -> Any:
    """Round float32 to a 16-bit float, to nearest even; others are returned as they are."""
    if dtype.name != "bfloat16":
        return total.astype(dtype.storage, copy=False)
    bits = total.view("uint32")
    upper = xp.right_shift(bits, 16)
    # Rounding would carry the payload of a NaN into the exponent: a quiet NaN keeps its sign.
    return xp.where(xp.isnan(total), upper | 0x40, (bits + 0x7FFF + (upper & 1)) >> 16).astype("uint16")


# ---- what measuring takes besides ----


def cupy_tools(local_rank: int = 0) -> CupyTools:
    """Make a GPU this process's current one and return what measures on it.

    Args:
        local_rank: ranks of a node take its GPUs in turn.

    Raises:
        UnsupportedBufferError: CuPy is missing, or finds no GPU.
    """
    cuda_driver()  # Raises, and says what is missing.
    import cupy

    number = local_rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(number).use()
    return CupyTools(cupy, cuda_driver(number))


class CupyTools:
    """Plain arrays and a stopwatch on one GPU, which is the current one; all on CuPy's current stream.

    Attributes:
        driver: the GPU's.
    """

    def __init__(self, cupy: Any, driver: CupyDriver) -> None:
        self.driver = driver
        self._cupy = cupy
        self._begin = cupy.cuda.Event()
        self._end = cupy.cuda.Event()

    def empty(self, nbytes: int) -> Any:
        """Return an uninitialised uint8 array that no peer can reach."""
        return self._cupy.empty(nbytes, "uint8")

    def ready(self) -> None:
        """Return when the current stream is idle."""
        self._cupy.cuda.get_current_stream().synchronize()

    def time(self, call: Callable[[], object]) -> float:
        """Return the seconds between events before and after a call, for the GPU; waits until all of it is done."""
        self._begin.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._begin, self._end)) / 1e3
