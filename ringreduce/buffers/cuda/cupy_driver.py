"""The GPU through CuPy: its runtime, its compiler and its cache of compiled kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringreduce.buffers.cuda.arrays import INSTALL
from ringreduce.buffers.cuda.driver import Device, Driver, Event, Kernel, Stream
from ringreduce.errors import TransportError, UnsupportedBufferError

__all__ = ["CupyDriver", "cuda_driver"]

# Values of the CUDA runtime's headers, some of which CuPy does not name in all its versions.
_SUCCESS, _NO_MEMORY, _NOT_READY = 0, 2, 600
_COPY_BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses say which memory is meant
_REGISTER_PORTABLE = 1  # pinned for all contexts of the process
_NON_BLOCKING = 1  # a stream that does not wait for the legacy default stream
_HIGHEST_PRIORITY = -100  # lower numbers go first, and what is out of range counts as the highest there is
_EVENT_WITHOUT_TIMING, _EVENT_SHARED = 2, 4

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
    """A `ringreduce.buffers.cuda.driver.Driver` over CuPy 13 or 14.

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
        looks = self._ask(self._runtime.getDeviceProperties, self._number)
        # CuPy cuts the UUID off at its first zero byte, which is rare; the address on the bus makes up for it. The
        # UUID tells the instances of a partitioned GPU (MIG) apart, which share that address.
        address = self._ask(self._runtime.deviceGetPCIBusId, self._number)
        return Device(
            number=self._number,
            uuid=f"{bytes(looks['uuid']).hex()}@{address}",
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
        room = max(1, -(-nbytes // _EXPORTED_NBYTES)) * _EXPORTED_NBYTES
        address: int = self._ask(self._runtime.malloc, room)
        return address

    def free(self, address: int) -> None:
        self._ask(self._runtime.free, address)

    def export(self, address: int) -> bytes:
        return bytes(self._ask(self._runtime.ipcGetMemHandle, address))

    def open(self, handle: bytes) -> int:
        address: int = self._ask(self._runtime.ipcOpenMemHandle, handle)
        return address

    def close(self, address: int) -> None:
        self._ask(self._runtime.ipcCloseMemHandle, address)

    def register(self, address: int, nbytes: int) -> None:
        self._ask(self._runtime.hostRegister, address, nbytes, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        self._ask(self._runtime.hostUnregister, address)

    # ---- order ----

    def make_stream(self) -> Stream:
        stream: int = self._ask(self._runtime.streamCreateWithPriority, _NON_BLOCKING, _HIGHEST_PRIORITY)
        return stream

    def free_stream(self, stream: Stream) -> None:
        self._ask(self._runtime.streamDestroy, stream)

    def make_event(self, *, shared: bool = False) -> Event:
        flags = _EVENT_WITHOUT_TIMING | (_EVENT_SHARED if shared else 0)
        event: int = self._ask(self._runtime.eventCreateWithFlags, flags)
        return event

    def export_event(self, event: Event) -> bytes:
        return bytes(self._ask(self._runtime.ipcGetEventHandle, event))

    def open_event(self, handle: bytes) -> Event:
        event: int = self._ask(self._runtime.ipcOpenEventHandle, handle)
        return event

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

    # ---- work ----

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        if nbytes:
            self._ask(self._runtime.memcpyAsync, target, source, nbytes, _COPY_BY_ADDRESS, stream)

    def kernel(self, family: str, name: str) -> Kernel:
        found = self._kernels.get((family, name))
        if found is None:
            found = self._kernels[family, name] = _CupyKernel(self, self._compile(family, name))
        return found

    def _compile(self, family: str, name: str) -> Any:
        """Return the compiled function; CuPy keeps the binary in its cache directory, for other processes too."""
        from ringreduce.buffers.cuda import kernels

        # One instance at a time: all those of a family would take a minute, and most are never used.
        expression = kernels.expression(family, name)
        module = self._cupy.RawModule(
            code=kernels.source(family), options=kernels.OPTIONS, name_expressions=(expression,)
        )
        return self._ask(lambda: module.get_function(expression).kernel)

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the runtime with this GPU as the current one, and translate its errors."""
        runtime = self._runtime
        try:
            elsewhere = runtime.getDevice()
            if elsewhere == self._number:
                return function(*arguments)
            runtime.setDevice(self._number)
            try:
                return function(*arguments)
            finally:
                runtime.setDevice(elsewhere)
        except (
            Exception
        ) as error:  # CuPy's errors have no common base but RuntimeError, and its compiler's not even that
            if getattr(error, "status", None) == _NO_MEMORY:
                raise MemoryError(f"GPU {self._number} has not that much free memory: {error}") from error
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
