"""Arrays in device memory of several libraries, and the driver over CuPy, with stand-ins for CuPy and torch's CUDA."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock, call

import ml_dtypes
import numpy as np
import pytest
import torch
from gpu_doubles.driver import HostArray, HostDriver
from gpu_doubles.ranks import run_gpu_ranks
from suites.conformance import assert_equal, expected, sample

import ringreduce as rr
from ringreduce.buffers import DTYPES, Operand, operand_of
from ringreduce.buffers.device_arrays import DeviceOperand, c_order, empty_on_device, is_c_order
from ringreduce.common.errors import ConfigError, MismatchError, TransportError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.cupy_driver import Arithmetic, cuda_driver, reduced
from ringreduce.testing import caught, run_ranks


class CupyArray(HostArray):
    """What CuPy's arrays do that the package asks of them, in the memory of the thread's `HostDriver`."""

    here: ClassVar[threading.local] = threading.local()  # driver and stream of the rank

    def __init__(
        self, shape: Sequence[int], dtype: Any, memptr: Any = None, strides: Sequence[int] | None = None
    ) -> None:
        self.owner = memptr.mem if memptr is not None else None
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = memptr.mem.ptr if memptr is not None else self.here.driver.allocate(nbytes)
        super().__init__(self.here.driver, address, tuple(shape), dtype)
        self.strides = c_order(self.shape, self.dtype.itemsize) if strides is None else tuple(strides)
        self.data = SimpleNamespace(ptr=address)
        self.device = _Device(self.driver.device.number)

    @property
    def T(self) -> CupyArray:
        return self._view(self.shape[::-1], self.strides[::-1])

    def _view(self, shape: Sequence[int], strides: Sequence[int], skip: int = 0) -> CupyArray:
        memory = SimpleNamespace(mem=SimpleNamespace(ptr=self.address + skip, base=self))
        return CupyArray(shape, self.dtype, memory, strides)

    def copy(self, order: str) -> CupyArray:
        assert order == "C"
        made = CupyArray(self.shape, self.dtype)
        made[...] = self
        return made

    def __setitem__(self, everything: object, source: CupyArray) -> None:
        for index in itertools.product(*map(range, self.shape)):
            target, given = (
                each.address + sum(i * stride for i, stride in zip(index, each.strides, strict=True))
                for each in (self, source)
            )
            self.driver.copy(target, given, self.dtype.itemsize, self.here.stream)

    def numpy(self) -> np.ndarray:
        """Return the content when the current stream is done, as NumPy knows it."""
        array = self if is_c_order(self.shape, self.strides, self.dtype.itemsize) else self.copy("C")
        return array.get(self.here.stream)


class _Device:
    def __init__(self, number: int) -> None:
        self.id = number

    def __enter__(self) -> None:
        assert self.id == CupyArray.here.driver.device.number

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module ``cupy`` that keeps its arrays in host memory."""
    module: Any = ModuleType("cupy")
    module.ndarray = CupyArray
    module.empty = CupyArray
    module.asarray = lambda array: array
    module.cuda = SimpleNamespace(
        Device=_Device,
        get_current_stream=lambda: SimpleNamespace(ptr=CupyArray.here.stream),
        UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(ptr=ptr, size=size, owner=owner),
        MemoryPointer=lambda mem, offset: SimpleNamespace(mem=mem, offset=offset),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def on_gpus(size: int, function: Callable[[rr.Communicator, HostDriver], object]) -> list[object]:
    """Run ``function(communicator, driver)`` on ranks whose CuPy works on a stream of theirs."""

    def run(communicator: rr.Communicator, driver: HostDriver) -> object:
        CupyArray.here.driver = driver
        CupyArray.here.stream = driver.make_stream()
        return function(communicator, driver)

    return run_gpu_ranks(size, run)


def to_gpu(values: np.ndarray) -> CupyArray:
    """Copy to the GPU, on the current stream."""
    made = CupyArray(values.shape, values.dtype)
    values = np.ascontiguousarray(values)
    made.driver.copy(made.address, values.__array_interface__["data"][0], values.nbytes, made.here.stream)
    return made


@pytest.fixture
def alone(cupy: ModuleType) -> HostDriver:
    """One GPU for this thread."""
    driver = CupyArray.here.driver = HostDriver()
    CupyArray.here.stream = driver.make_stream()
    return driver


# ---- what arrays look like ----


def test_a_cupy_array_is_taken_as_it_is(alone: HostDriver) -> None:
    """Its address, layout, device and current stream; nothing is copied."""
    array = to_gpu(np.ones((3, 5), np.float16))
    operand = operand_of(array)
    assert isinstance(operand, DeviceOperand)
    assert (operand.address, operand.shape, operand.strides) == (array.address, (3, 5), (10, 2))
    assert (operand.dtype.name, operand.device, operand.stream) == ("float16", 0, CupyArray.here.stream)
    assert (operand.count, operand.nbytes, operand.contiguous) == (15, 30, True)
    assert operand.scratch() is operand


def test_an_interface_is_taken_as_it_is() -> None:
    """Strides, the read-only flag and the stream are those of ``__cuda_array_interface__``, the device is unknown."""
    given = {"shape": (2, 3), "typestr": "<i4", "data": (4096, True), "strides": (4, 8), "stream": 7}
    operand = operand_of(interface(**given))
    assert isinstance(operand, DeviceOperand)
    assert (operand.address, operand.shape, operand.strides) == (4096, (2, 3), (4, 8))
    assert (operand.dtype.name, operand.device, operand.stream) == ("int32", None, 7)
    assert not operand.contiguous
    with pytest.raises(UnsupportedBufferError, match="read-only"):
        operand.require_writable()


def interface(**others: Any) -> Any:
    """Return an array that says no more of itself than its interface."""
    given = {"shape": (1,), "typestr": "|u1", "data": (64, False), "version": 3, **others}
    return SimpleNamespace(__cuda_array_interface__=given)


def test_what_an_interface_may_say() -> None:
    """Stream 1 is the legacy default stream, where arrays belong that name none; unknown elements are refused."""
    assert [DeviceOperand.of(interface(stream=each)).stream for each in (None, 1, 2, 9)] == [0, 0, 2, 9]
    assert operand_of(HostDriver().put(np.ones(3, ml_dtypes.bfloat16))).dtype.name == "bfloat16"  # by its own dtype
    for given, complaint in (({"typestr": "|V2"}, "not supported"), ({"mask": object()}, "masked")):
        with pytest.raises(UnsupportedBufferError, match=complaint):
            operand_of(interface(**given))


def test_host_arrays_are_no_device_arrays() -> None:
    """NumPy arrays and CPU tensors are looked at as ever; what is on a GPU is refused where it cannot be used."""
    for array in (np.ones(2), torch.ones(2)):
        assert isinstance(operand_of(array), Operand)
    device = HostDriver().put(np.ones(2))
    with pytest.raises(UnsupportedBufferError, match="device memory"):
        Operand.of(device)
    with pytest.raises(UnsupportedBufferError, match="expected a NumPy array"):
        operand_of([1.0])


# ---- torch ----


class CudaTensor(torch.Tensor):
    """A tensor that says it is on GPU 1."""

    is_cuda = True
    is_cpu = False
    device = SimpleNamespace(index=1, type="cuda")


def test_a_cuda_tensor_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Address, layout and dtype (bfloat16 too) are torch's, the stream is its current one for that GPU."""
    streams = {1: SimpleNamespace(cuda_stream=77)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device.index])
    plain = torch.zeros(3, 5, dtype=torch.bfloat16)
    operand = operand_of(plain.as_subclass(CudaTensor))
    assert isinstance(operand, DeviceOperand)
    assert (operand.address, operand.shape, operand.strides) == (plain.data_ptr(), (3, 5), (10, 2))
    assert (operand.dtype.name, operand.device, operand.stream) == ("bfloat16", 1, 77)
    assert not operand_of(plain.as_subclass(CudaTensor).t()).contiguous


def test_nothing_is_stored_in_lazy_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the memory of a conjugate holds is not what it stands for: it is read from a copy, and not written."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    plain = torch.tensor([1 + 2j])
    operand = operand_of(plain.as_subclass(CudaTensor).conj())
    assert isinstance(operand, DeviceOperand)
    assert operand.address != plain.data_ptr()
    assert operand.array.as_subclass(torch.Tensor).tolist() == [1 - 2j]
    with pytest.raises(UnsupportedBufferError, match="read-only"):
        operand.require_writable()


# ---- collectives ----


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_have_the_kind_of_the_input(cupy: ModuleType, size: int) -> None:
    """CuPy in, CuPy out, for every collective; the input stays as it was. Rows may differ between ranks."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        parts = [sample(rank, (12, 3), "float32") for rank in range(size)]
        total, own = expected(parts, rr.SUM), parts[communicator.rank]
        answers = {
            "allreduce": total,
            "reduce_scatter": np.array_split(total, size)[communicator.rank],
            "allgather": np.concatenate(parts),
            "broadcast": parts[0],
            "alltoall": np.concatenate([np.split(part, size)[communicator.rank] for part in parts]),
        }
        array = to_gpu(own)
        for name, answer in answers.items():
            result = getattr(communicator, name)(array)
            assert type(result) is CupyArray
            assert_equal(result.numpy(), answer)
        assert_equal(array.numpy(), own)
        rows = [sample(rank, (2 * rank, 3), "int64") for rank in range(size)]
        assert_equal(communicator.allgather(to_gpu(rows[communicator.rank])).numpy(), np.concatenate(rows))

    on_gpus(size, check)


def test_reduce_gather_and_scatter_take_arrays_in_host_memory(cupy: ModuleType) -> None:
    """Others are refused in words, as input and as output, and the ranks go on."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        for name in ("reduce", "gather", "scatter"):
            with pytest.raises(UnsupportedBufferError, match=f"{name} takes arrays in host memory"):
                getattr(communicator, name)(to_gpu(np.ones(4)))
            error = caught(getattr(communicator, name), np.ones(4), out=to_gpu(np.ones(4)))
            if communicator.rank == 0 or name == "scatter":
                assert isinstance(error, UnsupportedBufferError)
            else:
                assert isinstance(error, MismatchError)
        assert communicator.allreduce(np.ones(2)).tolist() == [2.0, 2.0]

    on_gpus(2, check)


def test_a_result_may_overlap_the_input(cupy: ModuleType) -> None:
    """An allreduce into a shifted part of the same memory, or backwards, gives the sum of the arrays as they were."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> None:
        for given, taken, result in (
            ((0, 4), (4, 4), [0, *range(0, 16, 2)]),
            ((4, 4), (0, 4), [*range(2, 18, 2), 8]),
            ((0, 4), (28, -4), [*range(14, -2, -2), 8]),
        ):
            memory = to_gpu(np.arange(9, dtype=np.int32))
            source, target = (memory._view((8,), (stride,), skip) for skip, stride in (given, taken))
            communicator.allreduce(source, out=target)
            assert memory.numpy().tolist() == result

    on_gpus(2, check)


# ---- buffers ----


@pytest.mark.parametrize("size", [1, 2])
def test_buffers_in_device_memory(cupy: ModuleType, size: int) -> None:
    """They are CuPy arrays that live as long as any view of them, and longer than their communicator."""

    def check(communicator: rr.Communicator, driver: HostDriver) -> CupyArray:
        buffer = communicator.empty((5, 3), "float32", device="cuda")
        assert type(buffer) is CupyArray
        assert (buffer.shape, buffer.dtype) == ((5, 3), np.float32)
        buffer[...] = to_gpu(np.full((5, 3), communicator.rank + 1, np.float32))
        communicator.allreduce(buffer, out=buffer)
        assert buffer.numpy().tolist() == [[sum(range(size + 1))] * 3] * 5
        if communicator.rank == 0:  # each rank for itself
            assert communicator.empty(0, device="cuda:0").shape == (0,)
        assert isinstance(communicator.empty(3, device="cpu"), np.ndarray)
        view = buffer._view((2,), (4,))
        place = driver.place(buffer.address)
        del buffer
        assert f"free {place}" not in driver.log
        del view
        assert f"free {place}" in driver.log
        return communicator.empty(5, device="cuda")

    for buffer in on_gpus(size, check):
        assert isinstance(buffer, CupyArray)
        assert buffer.get().shape == (5,)  # a driver of the tests refuses to read memory that was freed


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "mps", ""])
def test_other_devices_are_refused(device: str) -> None:
    """The error names what there is."""
    with pytest.raises(ConfigError, match="cuda:0"):
        run_ranks(1, lambda communicator: communicator.empty(1, device=device))


def test_a_rank_works_on_one_gpu() -> None:
    """A second GPU is refused, with the remedy; a generic array is taken to lie on the first."""

    def check(communicator: rr.Communicator) -> None:
        driver = HostDriver(gpu=3)
        communicator.gpu.drivers = lambda number: driver
        communicator.allreduce(driver.put(np.ones(2)), out=driver.put(np.ones(2)))
        with pytest.raises(UnsupportedBufferError, match=r"GPU 1 .* GPU 3 .*set_device"):
            communicator.empty(2, device="cuda:1")

    run_ranks(1, check)


# ---- the driver over CuPy ----


#: One of CuPy's.
EVENT = SimpleNamespace(ptr=5)


class CudaError(RuntimeError):
    """What CuPy raises: with the status as a number."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"cudaError {status}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CUDA's runtime as a module ``cupy`` has it, which keeps what it is asked."""
    runtime = MagicMock()
    looks = {"uuid": bytes(range(1, 20)), "name": b"Card", "major": 9, "minor": 0, "totalGlobalMem": 1 << 37}
    runtime.getDeviceProperties.return_value, runtime.deviceGetPCIBusId.return_value = looks, "0000:1b:00.0"
    runtime.getDevice.return_value = 0
    module: Any = ModuleType("cupy")
    module.__version__, module.cuda = "14.0.0", MagicMock(runtime=runtime)
    module.cuda.driver.ctxGetCurrent.return_value = 4711
    monkeypatch.setitem(sys.modules, "cupy", module)
    return runtime


def asked(runtime: Any) -> list[Any]:
    """Return what the runtime was asked, but for which GPU is the current one."""
    return [each for each in runtime.mock_calls if each != call.getDevice()]


def test_looking_at_a_gpu_leaves_it_alone(runtime: Any) -> None:
    """A context on each GPU that is only described would take memory of all of them; UUIDs have 16 bytes.

    CuPy takes a UUID for text, which may run on into what comes after it and differs between processes.
    """
    device = cuda_driver(2).device
    assert (device.name, device.capability) == ("Card", 90)
    assert device.uuid == f"{bytes(range(1, 17)).hex()}@0000:1b:00.0"
    assert runtime.mock_calls == [call.getDeviceProperties(2), call.deviceGetPCIBusId(2)]


@pytest.mark.parametrize("chosen", [True, False])
def test_the_current_gpu_of_the_caller_stays(runtime: Any, chosen: bool) -> None:
    """A driver of another GPU makes that one current for its calls, and puts back what was, after errors too.

    But for a thread that never chose a GPU: to put back GPU 0 would make a context there.
    """
    driver = cuda_driver(2)
    sys.modules["cupy"].cuda.driver.ctxGetCurrent.return_value = 4711 if chosen else 0
    runtime.reset_mock()
    runtime.malloc.side_effect = CudaError(1)
    with pytest.raises(TransportError):
        driver.allocate(1)
    assert asked(runtime) == [call.setDevice(2), call.malloc(1)] + [call.setDevice(0)] * chosen


@pytest.mark.parametrize(("status", "done"), [(0, True), (600, False)])
def test_events_are_done_or_not(runtime: Any, status: int, done: bool) -> None:
    """CUDA answers a question about an event with a status, of which two are no errors; one is kept, and is cleared."""
    driver = cuda_driver(0)
    runtime.eventQuery.return_value, runtime.check_status.side_effect = status, CudaError(status)
    runtime.reset_mock()
    assert driver.done(EVENT) is done
    assert asked(runtime) == [call.eventQuery(5)] + [call.check_status(status)] * (not done)


def test_errors_of_cuda_are_translated(runtime: Any) -> None:
    """A lack of device memory is a MemoryError, everything else a TransportError; both keep CuPy's words.

    CUDA says "out of memory" of pinned memory too, and callers of that know no MemoryError.
    """
    driver = cuda_driver(0)
    runtime.malloc.side_effect = runtime.hostRegister.side_effect = CudaError(2)
    with pytest.raises(TransportError, match="GPU 0: cudaError 2"):
        driver.register(0, 1)
    with pytest.raises(MemoryError, match="cudaError 2"):
        driver.allocate(1)
    runtime.eventQuery.return_value, runtime.check_status.side_effect = 700, CudaError(700)
    with pytest.raises(TransportError, match="700"):
        driver.done(EVENT)
    runtime.getDeviceProperties.side_effect = CudaError(35)
    with pytest.raises(UnsupportedBufferError, match=r"CuPy 14.0.0 cannot use GPU 1: .*cudaError 35.*cuda13x"):
        cuda_driver(1)


@pytest.mark.parametrize("newer", [False, True])
def test_sums_are_done_on_the_stream(runtime: Any, newer: bool) -> None:
    """Of arrays where they are, without a copy; CuPy 14 takes streams by their protocol, CuPy 13 by address."""
    memory = {address: np.full(3, value, np.float32) for address, value in ((64, 1), (128, 2), (192, 0))}
    cupy: Any = sys.modules["cupy"]
    cupy.cuda.Stream = MagicMock() if newer else SimpleNamespace()
    cupy.cuda.UnownedMemory = lambda address, nbytes, owner, device_id: (address, nbytes, device_id)
    cupy.cuda.MemoryPointer = lambda mem, offset: mem
    cupy.ndarray = lambda shape, dtype, memptr: memory[memptr[0]].view(dtype).reshape(shape)
    cupy.add = np.add
    driver = cuda_driver(0)
    driver.combine(Arithmetic(DTYPES["float32"], ReduceOp.SUM, 3), [64, 128], 192, 2, 77)
    driver.combine(Arithmetic(DTYPES["float32"], ReduceOp.SUM, 0), [64, 128], 192, 2, 77)
    assert memory[192].tolist() == [3, 3, 3]
    if newer:
        (stream,) = cupy.cuda.Stream.from_external.call_args.args
        assert stream.__cuda_stream__() == (0, 77)
    else:
        cupy.cuda.ExternalStream.assert_called_once_with(77)


def test_sums_of_bfloat16_keep_what_is_no_number() -> None:
    """They are rounded to nearest even; an overflow is infinite, and a NaN stays one."""
    bits = np.array([0x7F7F, 0x7FC0, 0xFF80, 0x3F81], np.uint16)  # the largest, NaN, -infinity, 1 + 2**-7
    with np.errstate(all="ignore"):
        found = reduced(np, [bits, bits], Arithmetic(DTYPES["bfloat16"], ReduceOp.SUM, 4), 2)
    assert [hex(each) for each in found] == ["0x7f80", "0x7fc0", "0xff80", "0x4001"]


def test_a_machine_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, from the driver and from a buffer that is asked for."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedBufferError, match=r"pip install 'cupy-cuda12x\[ctk\]'.*'cupy-cuda13x\[ctk\]'"):
        cuda_driver()
    with pytest.raises(UnsupportedBufferError, match="takes CuPy"):
        run_ranks(1, lambda communicator: communicator.empty(1, device="cuda"))
    with pytest.raises(UnsupportedBufferError, match="takes CuPy"):
        empty_on_device(0, 1, (1,), DTYPES["uint8"], 0, None)


class Foreign:
    """An array that only says where it lies and which stream it belongs to, as Numba's do."""

    def __init__(self, inner: CupyArray, stream: int) -> None:
        place = {"data": (inner.address, False), "strides": inner.strides, "stream": stream}
        said = interface(shape=inner.shape, typestr=inner.dtype.str, **place)
        self.inner, self.__cuda_array_interface__ = inner, said.__cuda_array_interface__


@pytest.mark.parametrize("seed", range(15))
def test_arrays_with_a_stream_of_their_own(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """What their stream held comes before the copies that CuPy makes of them on its own stream, what follows after."""
    monkeypatch.setattr(cupy, "asarray", lambda array: getattr(array, "inner", array))

    def run(communicator: rr.Communicator, driver: HostDriver) -> None:
        CupyArray.here.driver = driver
        CupyArray.here.stream, theirs = driver.make_stream(), driver.make_stream()
        parts = [sample(rank, (4, 3), "float64") for rank in range(2)]
        memory, result, seen = (CupyArray((3, 4), np.float64) for _ in range(3))

        def put(values: np.ndarray, target: CupyArray) -> None:
            given = driver.put(values, theirs)
            driver.copy(target.address, given.address, given.nbytes, theirs)

        calls = {"allreduce": (expected(parts, rr.SUM), ()), "broadcast": (parts[1], (1,))}
        for name, (answer, arguments) in calls.items():
            put(np.ascontiguousarray(parts[communicator.rank].T), memory)
            put(np.zeros((3, 4)), result)
            getattr(communicator, name)(Foreign(memory.T, theirs), *arguments, out=Foreign(result.T, theirs))
            put(np.zeros((3, 4)), memory)
            driver.copy(seen.address, result.address, result.nbytes, theirs)
            assert_equal(seen.get(theirs).T, answer)

    run_gpu_ranks(2, run, seed=seed)
