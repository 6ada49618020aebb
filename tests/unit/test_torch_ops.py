"""How tensors get to the communicator and back, and in what order of streams. Several ranks: tests/parallel."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_doubles.torch_streams import TorchStreams

import ringreduce as rr

torch = pytest.importorskip("torch")

import ringreduce.torch as hvd  # noqa: E402
from ringreduce.torch.tensors import streams  # noqa: E402

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8], ids=str)
def test_integers_are_scaled_exactly_and_truncated(dtype: Any) -> None:
    """Factors lose nothing that float64 holds, and fractions are cut off toward zero."""
    largest = min(2**52 + 1, torch.iinfo(dtype).max // 2)
    values = [largest, 7, 0, *([-7, -largest] if dtype.is_signed else [])]
    doubled = hvd.allreduce(torch.tensor(values, dtype=dtype), op=hvd.Sum, prescale_factor=2.0)
    assert doubled.tolist() == [2 * value for value in values]
    halves = hvd.allreduce_(torch.tensor(values, dtype=dtype), op=hvd.Sum, postscale_factor=0.5)
    assert halves.tolist() == [int(value / 2) for value in values]
    assert doubled.dtype == halves.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_other_numbers_are_scaled_in_their_dtype(dtype: Any) -> None:
    """A factor changes no dtype and no bits that the dtype's own product would not have."""
    values = torch.tensor([1.0, 3.0], dtype=dtype)
    assert hvd.allreduce(values, op=hvd.Sum, postscale_factor=0.1).equal(values * 0.1)


@pytest.mark.parametrize("operation", [hvd.allreduce_, lambda tensor: hvd.broadcast_(tensor, 0)], ids=["all", "root"])
def test_in_place_operations_pass_the_tensor_itself(operation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The communicator sees the same object in every call, unless autograd watches it."""
    seen: list[Any] = []

    def record(self: Any, array: Any, op: Any, *, out: Any) -> None:
        seen.append(out if out is array else None)

    monkeypatch.setattr(rr.Communicator, "allreduce", record)
    monkeypatch.setattr(rr.Communicator, "broadcast", record)
    plain, leaf = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert operation(plain) is plain
    assert operation(leaf) is leaf
    assert seen[0] is plain
    assert seen[1] is not leaf
    assert seen[1].data_ptr() == leaf.data_ptr()
    assert plain._version == leaf._version == 1


def test_in_place_operations_take_views_of_leaves() -> None:
    """A part of a parameter that was taken without a graph can be reduced and scaled in place."""
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        part = leaf[:1]
    hvd.allreduce_(part, prescale_factor=2.0, postscale_factor=3.0)
    assert leaf.tolist() == [6.0, 1.0]


# ---- what the library can do ----


def install_cupy(monkeypatch: pytest.MonkeyPatch, nccl: Any) -> None:
    """Put a CuPy in place that has this NCCL, and no GPU."""
    module: Any = ModuleType("cupy")
    module.__spec__ = ModuleSpec("cupy", None)
    module.cuda = SimpleNamespace(nccl=nccl)
    for name, each in (("cupy", module), ("cupy.cuda", module.cuda), ("cupy.cuda.nccl", nccl)):
        monkeypatch.setitem(sys.modules, name, each)


def test_nccl_is_what_cupy_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version; 0 without CuPy, without NCCL, and with one that cannot be asked."""

    def broken() -> int:
        raise RuntimeError("no driver")

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert hvd.nccl_built() == 0
    install_cupy(monkeypatch, SimpleNamespace(available=True, get_version=lambda: 22703))
    assert hvd.nccl_built() == 22703
    install_cupy(monkeypatch, SimpleNamespace(available=False))
    assert hvd.nccl_built() == 0
    install_cupy(monkeypatch, SimpleNamespace(available=True, get_version=broken))
    assert hvd.nccl_built() == 0


@pytest.mark.parametrize("cuda", [None, "12.9"])
@pytest.mark.parametrize("cupy", [False, True])
def test_cuda_takes_torch_and_cupy(monkeypatch: pytest.MonkeyPatch, cuda: str | None, cupy: bool) -> None:
    """CUDA tensors can be used where torch is built for CUDA and CuPy is installed; ROCm is not for us."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy", None)
    if cupy:
        install_cupy(monkeypatch, SimpleNamespace())
    assert hvd.cuda_built() == (cupy and cuda is not None)
    assert not hvd.rocm_built()


class World:
    """In place of a communicator, which the streams only tell from others, and buckets take memory from."""

    def empty(self, nbytes: int, dtype: Any) -> Any:
        return np.zeros(nbytes, dtype)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> TorchStreams:
    """Streams in place of torch's, for tensors that all seem to lie on a GPU."""
    double = TorchStreams()
    monkeypatch.setattr(streams, "cuda", double)
    monkeypatch.setattr(streams, "gpu_of", lambda tensors: torch.device("cuda", 0))
    return double


def on_another_thread(function: Any, *arguments: Any) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function, *arguments).result()


def test_an_operation_that_is_waited_for_runs_on_its_callers_stream(cuda: TorchStreams) -> None:
    """Whichever thread carries it out: it comes after the caller's work, and needs no event."""
    cuda.main.enqueue("input")
    mine = cuda.Stream()
    with cuda.stream(mine):
        mine.enqueue("more input")
        run = streams.on_this_stream(lambda world: cuda.current_stream().enqueue("operation"), torch.device("cuda", 0))
    assert on_another_thread(run, World()) == {"more input"}
    assert "operation" in mine.before
    assert cuda.current_stream() is cuda.main
    assert cuda.record == []


def test_an_operation_beside_the_program_comes_after_its_input_and_before_its_result(cuda: TorchStreams) -> None:
    """It starts after what was enqueued at submission, not after what came later; only `finish` waits for it."""
    cuda.main.enqueue("input")
    run, finish = streams.beside_this_stream(lambda world: cuda.current_stream().enqueue("operation"), [torch.zeros(3)])
    cuda.main.enqueue("what came later")
    assert on_another_thread(run, World()) == {"input"}
    assert "operation" not in cuda.main.before
    finish(torch.zeros(3))
    assert "operation" in cuda.main.before
    assert cuda.record == ["event 1 on main", "own 1 waits for event 1", "event 2 on own 1", "main waits for event 2"]


def test_each_communicator_has_its_own_stream(cuda: TorchStreams) -> None:
    """The same one each time; sets of ranks that begin in different orders do not wait for each other."""
    first, second = World(), World()
    device = torch.device("cuda", 0)
    assert streams.own_stream(first, device) is streams.own_stream(first, device)
    assert streams.own_stream(first, device) is not streams.own_stream(second, device)


def test_a_handover_orders_filling_working_and_coming_back(cuda: TorchStreams) -> None:
    """A buffer is filled after all streams that contribute, worked on when filled, filled again when worked on."""
    sync = streams.CudaStreamSync(torch.device("cuda", 0), World())
    other = cuda.Stream()
    other.enqueue("gradient of another stream")
    with cuda.stream(other):
        sync.mark()
    sync.mark()
    with sync.filling():
        assert "gradient of another stream" in cuda.main.enqueue("first filling")
    with sync.working():
        assert "first filling" in cuda.current_stream().enqueue("first work")
    assert "first work" not in cuda.main.before
    with sync.filling():
        assert "first work" in cuda.main.enqueue("second filling")
    with sync.working():
        cuda.current_stream().enqueue("second work")
    sync.come_back()
    assert "second work" in cuda.main.before


def test_work_that_fails_is_over_as_well(cuda: TorchStreams) -> None:
    """The next filling comes after what it has enqueued."""
    sync = streams.CudaStreamSync(torch.device("cuda", 0), World())
    with sync.filling():
        pass

    def fail() -> None:
        with sync.working():
            cuda.current_stream().enqueue("half of the work")
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    with sync.filling():
        assert "half of the work" in cuda.main.enqueue("second filling")
