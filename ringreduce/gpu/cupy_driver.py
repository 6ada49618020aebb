"""The GPU through CuPy: its runtime and its compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.buffers.device_arrays import INSTALL
from ringreduce.buffers.device_driver import Device, Driver, Event, Kernel, Stream
from ringreduce.common.errors import TransportError, UnsupportedBufferError

__all__ = ["CupyDriver", "cuda_driver"]

# Values of the CUDA runtime's headers, some of which CuPy does not name in all its versions.
_SUCCESS, _NO_MEMORY, _NOT_READY = 0, 2, 600
_COPY_BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses say which memory is meant
_REGISTERED = 1 | 2  # pinned for all contexts of the process; and mapped, as kernels write error words there
_NON_BLOCKING = 1  # a stream that does not wait for the legacy default stream
_HIGHEST_PRIORITY = -100  # lower numbers go first, and what is out of range counts as the highest there is
_EVENT_WITHOUT_TIMING, _EVENT_SHARED = 2, 4
_UUID_NBYTES = 16

#: Smaller allocations may share one block of memory with others', all of which an exported handle would open: they
#: could be opened but once per process, and peers would see more than they should.
_EXPORTED_NBYTES = 2 << 20


def cuda_driver(number: int | None = None) -> Driver:
    """Return this process's driver of a GPU, the same each time.

    Args:
        number: which one, None for the current one of this thread.

    Raises:
        UnsupportedBufferError: CuPy is not installed, or finds no such GPU.
    """
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedBufferError(f"device memory takes CuPy: {INSTALL} ({error})") from error
    try:
        return _driver(cupy.cuda.runtime.getDevice() if number is None else number)
    except (RuntimeError, TransportError) as error:
        raise UnsupportedBufferError(
            f"CuPy {cupy.__version__} cannot use {'a GPU' if number is None else f'GPU {number}'}: {error}. "
            f"It must be built for the CUDA of the installed driver (see nvidia-smi): {INSTALL}"
        ) from error


@functools.cache
def _driver(number: int) -> CupyDriver:
    import cupy

    return CupyDriver(cupy, number)


class CupyDriver:
    """A `ringreduce.buffers.device_driver.Driver` over CuPy 13 or 14.

    Can be used from any thread, whatever GPU is the current one there.

    Args:
        cupy: the module.
        number: the GPU's ordinal.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._number = number
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._device = self._describe()

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
            multiprocessors=looks["multiProcessorCount"],
            nbytes=looks["totalGlobalMem"],
        )

    @property
    def device(self) -> Device:
        return self._device

    # ---- memory ----

    def allocate(self, nbytes: int) -> int:
        rounded = max(1, -(-nbytes // _EXPORTED_NBYTES)) * _EXPORTED_NBYTES
        try:
            return int(self._ask(self._runtime.malloc, rounded))
        except TransportError as error:
            if getattr(error.__cause__, "status", None) != _NO_MEMORY:
                raise
            raise MemoryError(f"GPU {self._number} has not that much free memory: {error.__cause__}") from error

    def free(self, address: int) -> None:
        self.synchronize_device()  # which `cudaFree` may do or not
        self._ask(self._runtime.free, address)

    def export(self, address: int) -> bytes:
        return bytes(self._ask(self._runtime.ipcGetMemHandle, address))

    def open(self, handle: bytes) -> int:
        return int(self._ask(self._runtime.ipcOpenMemHandle, handle))

    def close(self, address: int) -> None:
        self._ask(self._runtime.ipcCloseMemHandle, address)

    def register(self, address: int, nbytes: int) -> None:
        self._ask(self._runtime.hostRegister, address, nbytes, _REGISTERED)

    def unregister(self, address: int) -> None:
        self._ask(self._runtime.hostUnregister, address)

    # ---- order ----

    def make_stream(self) -> Stream:
        return int(self._ask(self._runtime.streamCreateWithPriority, _NON_BLOCKING, _HIGHEST_PRIORITY))

    def free_stream(self, stream: Stream) -> None:
        self._ask(self._runtime.streamDestroy, stream)

    def make_event(self, *, shared: bool = False) -> Event:
        flags = _EVENT_WITHOUT_TIMING | (_EVENT_SHARED if shared else 0)
        return int(self._ask(self._runtime.eventCreateWithFlags, flags))

    def export_event(self, event: Event) -> bytes:
        return bytes(self._ask(self._runtime.ipcGetEventHandle, event))

    def open_event(self, handle: bytes) -> Event:
        return int(self._ask(self._runtime.ipcOpenEventHandle, handle))

    def free_event(self, event: Event) -> None:
        self._ask(self._runtime.eventDestroy, event)

    def record(self, event: Event, stream: Stream) -> None:
        self._ask(self._runtime.eventRecord, event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._ask(self._runtime.streamWaitEvent, stream, event)

    def done(self, event: Event) -> bool:
        status = int(self._ask(self._runtime.eventQuery, event))
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
        self._ask(self._runtime.eventSynchronize, event)

    def synchronize_device(self) -> None:
        self._ask(self._runtime.deviceSynchronize)

    # ---- work ----

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            self._ask(self._runtime.memcpyAsync, target, source, nbytes, _COPY_BY_ADDRESS, stream)

    def kernel(self, family: str, name: str) -> Kernel:
        found = self._kernels.get((family, name))
        if found is None:
            # Of two threads that compile it the second throws its own away: a module is unloaded with its functions,
            # and the first may be running already.
            found = self._kernels.setdefault((family, name), _CupyKernel(self, self._compile(family, name)))
        return found

    def _compile(self, family: str, name: str) -> Any:
        """Return the compiled function."""
        from ringreduce.gpu import kernels

        def make() -> Any:
            try:
                cuda.nvrtc.getVersion()  # which looks for the library, a package of its own since CuPy 14
            except Exception as error:
                raise RuntimeError(f"CuPy lacks NVRTC, which compiles kernels: {INSTALL} ({error})") from error
            # Not by RawModule, which adds `-ftz=true` behind these options and so flushes small floats to zero
            # (https://github.com/cupy/cupy/issues/9576).
            binary, names = cuda.compiler.compile_using_nvrtc(
                kernels.source(family), kernels.OPTIONS, None, f"{family}.cu", (expression,)
            )
            module = cuda.Module()
            module.load(binary)
            return module.get_function(names[expression])

        # One instance at a time: all those of a family would take a minute, and most are never used.
        cuda, expression = self._cupy.cuda, kernels.expression(family, name)
        return self._ask(make)

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


@dataclass(frozen=True, slots=True)
class _Stream:
    """A stream in the form in which CuPy's launches take it."""

    ptr: int


class _CupyKernel:
    def __init__(self, driver: CupyDriver, function: Any) -> None:
        self._driver = driver
        self._function = function

    def launch(self, grid: int, block: int, arguments: Sequence[object], stream: Stream) -> None:
        passed = tuple(np.uint64(each) if isinstance(each, int) else each for each in arguments)
        self._driver._ask(self._function, (grid,), (block,), passed, 0, _Stream(stream))
