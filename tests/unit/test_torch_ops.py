"""How tensors get to the communicator and back. What several ranks compute: tests/parallel."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ringreduce as rr

torch = pytest.importorskip("torch")
import ringreduce.torch as hvd  # noqa: E402


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


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
