"""The streams of torch around operations that another thread may carry out.

What torch enqueues goes to the current stream of the thread that calls it, and an operation runs on whatever thread
drives the engine. An operation that the caller waits for runs on the stream that was the caller's at its submission,
from wherever it is enqueued. One that the caller does not wait for runs on a stream of the ranks' own, after an event
on the caller's, and the caller's stream waits for another event when the caller asks for the result. Nobody waits for
the device here.

Nothing of this concerns tensors on the CPU: callers ask `gpu_of` first, and go on as ever if there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy.typing as npt
import torch
from torch import cuda

from ringreduce.buffers import Operand
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import TransportError
from ringreduce.training.binding.framework import Streams

_Result = TypeVar("_Result")

_own_streams: WeakKeyDictionary[Communicator, dict[torch.device | None, Any]] = WeakKeyDictionary()


def gpu_of(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Return the GPU on which some of the tensors are; None: all are on the CPU."""
    for tensor in tensors:
        if tensor.is_cuda:
            return tensor.device
    return None


def require_usable(communicator: Communicator, tensor: torch.Tensor, *, writable: bool = False) -> None:
    """Check at a call that a tensor can be used, as its operation may come later, and then for all ranks. Local.

    Args:
        communicator: what will carry the operation out.
        tensor: on any device.
        writable: whether a result will be stored in it.

    Raises:
        UnsupportedBufferError: of its layout or elements, or because this rank cannot use its GPU.
    """
    operand = DeviceOperand.of(tensor) if tensor.is_cuda else Operand.of(tensor)
    assert operand is not None
    if isinstance(operand, DeviceOperand):
        communicator.gpu.require_usable(operand.device)
    if writable:
        operand.require_writable()


def own_stream(communicator: Communicator, device: torch.device | None) -> Any:
    """Return the stream on which a communicator's operations run beside the program's own work.

    One for each communicator: operations of two process sets may begin in different orders on different ranks.
    """
    streams = _own_streams.setdefault(communicator, {})
    if device not in streams:
        streams[device] = cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return streams[device]


def on_this_stream(
    run: Callable[[Communicator], _Result], device: torch.device | None
) -> Callable[[Communicator], _Result]:
    """Return a function that does the same on the caller's current stream, on whichever thread it is called.

    For operations that the caller waits for.

    Args:
        run: of the operation.
        device: the GPU; None: the current one.
    """
    stream = cuda.current_stream(device)

    def run_there(communicator: Communicator) -> _Result:
        with cuda.stream(stream):
            return run(communicator)

    return run_there


def beside_this_stream(
    run: Callable[[Communicator], _Result], tensors: Sequence[torch.Tensor]
) -> tuple[Callable[[Communicator], _Result], Callable[[object], None]]:
    """Return a function that does the same on the ranks' own stream, after what the caller has enqueued so far.

    For operations that the caller does not wait for.

    Args:
        run: of the operation.
        tensors: what it reads and writes; one of them at least is on a GPU, and none on another GPU.

    Returns:
        The function, and one that takes its result and lets what the caller enqueues from then on come after it.
    """
    device = gpu_of(tensors)
    submitted = _event()
    done = _event()
    submitted.record(cuda.current_stream(device))

    def run_beside(communicator: Communicator) -> _Result:
        stream = own_stream(communicator, device)
        _keep_for(stream, tensors)
        stream.wait_event(submitted)
        try:
            with cuda.stream(stream):
                return run(communicator)
        finally:
            done.record(stream)

    def finish(result: object) -> None:
        stream = cuda.current_stream(device)
        stream.wait_event(done)
        _keep_for(stream, _tensors_in(result))

    return run_beside, finish


class CudaStreamSync:
    """The order around a buffer that the program fills, again and again, and that is worked on beside the program.

    Args:
        device: the GPU where it is.
        communicator: whose own stream the work is on.
    """

    def __init__(self, device: torch.device, communicator: Communicator) -> None:
        self._device = device
        self._communicator = communicator
        self._contributors: set[Any] = set()
        self._filled = _event()
        self._worked_on = _event()
        self._joined = _event()

    def mark(self) -> None:
        """Let the next filling come after what the current stream holds then; autograd may use several."""
        self._contributors.add(cuda.current_stream(self._device))

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Fill the buffer on the current stream, once nobody works on it any more."""
        stream = cuda.current_stream(self._device)
        stream.wait_event(self._worked_on)
        for other in self._contributors - {stream}:
            self._joined.record(other)
            stream.wait_event(self._joined)
        self._contributors.clear()
        yield
        self._filled.record(stream)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on the buffer on the communicator's own stream, once it is filled."""
        stream = own_stream(self._communicator, self._device)
        stream.wait_event(self._filled)
        try:
            with cuda.stream(stream):
                yield
        finally:
            self._worked_on.record(stream)

    def come_back(self) -> None:
        """Let what is enqueued on the current stream from now on come after that work."""
        cuda.current_stream(self._device).wait_event(self._worked_on)


@contextmanager
def on_host(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Lend the tensors as they are on the CPU: themselves, or copies that are copied back at the end.

    For what is computed on the host. The host waits for the current stream.
    """
    host = [each.cpu() for each in tensors]  # itself, if it is there
    yield host
    for tensor, values in zip(tensors, host, strict=True):
        if values is not tensor:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(values)


class TorchStreams(Streams):
    """The GPU of torch's parameters.

    Args:
        communicator: knows which one this process can use.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def require_usable(self, parameters: Sequence[torch.Tensor]) -> None:
        for number in {parameter.device.index for parameter in parameters if parameter.is_cuda}:
            self._communicator.gpu.require_usable(number)

    def is_on_host(self, array: torch.Tensor) -> bool:
        return array.is_cpu

    @contextmanager
    def on_host(self, flat: torch.Tensor) -> Iterator[npt.NDArray[Any]]:
        with on_host([flat]) as (host,):
            yield host.numpy()

    def sync(self, flat: torch.Tensor) -> CudaStreamSync | None:
        device = gpu_of([flat])
        return None if device is None else CudaStreamSync(device, self._communicator)

    def around(self, arrays: Sequence[torch.Tensor]) -> Callable[[], AbstractContextManager[Any]] | None:
        device = gpu_of(arrays)
        return None if device is None else partial(cuda.stream, cuda.current_stream(device))


def _event() -> Any:
    return cuda.Event()  # type: ignore[no-untyped-call]


def _keep_for(stream: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Let memory that is freed while a stream still works on it not be used for anything else before."""
    for tensor in tensors:
        if not tensor.is_cuda:
            continue
        try:
            tensor.record_stream(stream)
        except RuntimeError:
            # Places in buckets are no memory of torch's, and stay as long as the bucket. One of its allocators minds.
            if torch.cuda.memory.get_allocator_backend() != "cudaMallocAsync":
                raise


def _tensors_in(result: object) -> Iterator[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield from (result.indices(), result.values()) if result.is_sparse else (result,)  # sparse ones are coalesced
    elif isinstance(result, (list, tuple)):
        for each in result:
            yield from _tensors_in(each)


def tensor_like(parameter: torch.Tensor, memory: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a parameter's shape and strides in some memory, an array of bytes on its device.

    It is not a view in autograd's sense: that could not be detached in place, and all would share a version counter.
    Its storage is its own, so that uses of it are distinct from uses of its neighbours. Without elements it is not in
    the memory: `torch.save` refuses two storages of different dtypes at one address.
    """
    made = torch.empty(0, dtype=dtype, device=parameter.device)
    strides = torch.empty_like(parameter, device="meta").stride()
    if not parameter.numel():
        return made.as_strided(parameter.shape, strides)
    return made.set_(as_tensor(memory, parameter).untyped_storage(), 0, parameter.shape, strides)


def as_tensor(memory: Any, parameter: torch.Tensor) -> torch.Tensor:
    """Return communication memory where a parameter is, an array of bytes, as a tensor that keeps it."""
    if not parameter.is_cuda:
        return torch.from_numpy(memory)
    if not memory.size:
        return torch.empty(0, dtype=torch.uint8, device=parameter.device)
    made = torch.as_tensor(memory, device=parameter.device)
    if made.data_ptr() != memory.__cuda_array_interface__["data"][0]:
        raise TransportError("torch has copied communication memory in place of using it; gradients would stay behind")
    return made
