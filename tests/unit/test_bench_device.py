"""``bench --device cuda`` as far as that goes without a GPU: on one that is in host memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver
from gpu_doubles.ranks import run_gpu_ranks

from ringreduce.bench import bench, peers
from ringreduce.bench.cases import COLLECTIVES, Case
from ringreduce.bench.devices import OnDevice
from ringreduce.bench.measure import Contender
from ringreduce.bench.results import Report, Settings
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.testing import run_ranks

FAST = {"min_nbytes": 64, "max_nbytes": 4096, "step_factor": 64, "iterations": 2, "warmup": 0, "device": "cuda"}


class FlatArray(HostArray):
    """A host array with what else benchmarks do with CuPy's: slices and views, which are the same memory."""

    def __getitem__(self, part: slice) -> FlatArray:
        start, stop, _ = part.indices(self.size)
        return self._at(self.address + start * self.dtype.itemsize, stop - start, self.dtype)

    def view(self, dtype: Any) -> FlatArray:
        return self._at(self.address, self.nbytes // np.dtype(dtype).itemsize, np.dtype(dtype))

    def fill(self, value: int) -> None:
        self.driver.view(self.address, self.nbytes).view(self.dtype)[:] = value

    def _at(self, address: int, count: int, dtype: np.dtype[Any]) -> FlatArray:
        return FlatArray(self.driver, address, (count,), dtype)


class HostTools:
    """What measuring takes, for a host driver."""

    def __init__(self, driver: HostDriver) -> None:
        self.driver = driver

    def empty(self, nbytes: int) -> FlatArray:
        return FlatArray(self.driver, self.driver.allocate(nbytes), (nbytes,), np.uint8)

    def ready(self) -> None:
        self.driver.synchronize_device()

    def time(self, call: Callable[[], object]) -> float:
        begin = time.perf_counter()
        call()
        self.ready()
        return time.perf_counter() - begin


class Device(OnDevice):
    """Arrays of a host driver, all of them private."""

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        return self._tools.empty(nbytes)


def on_gpu(size: int, work: Callable[[Any, Device], Any]) -> list[Any]:
    """Run ``work(world, device)`` on ranks that share a GPU in host memory; return what they return."""
    return run_gpu_ranks(size, lambda world, driver: work(world, Device(world, HostTools(driver))), nbytes=1 << 31)


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "broadcast"])
def test_results_are_verified_on_a_gpu(collective: str) -> None:
    """Collectives are right, and allreduces are measured against the copy within the GPU."""
    printed: list[str] = []

    def work(world: Any, device: Device) -> Report:
        settings = Settings(collective, types=("float", "bfloat16", "int32"), ops=("sum", "avg"), **FAST)
        return bench.run(world, settings, printed.append, device)

    found = on_gpu(3, work)[0]
    assert found.nwrong == 0
    assert "GPU in host memory, 3 ranks on a GPU" in "".join(printed)
    if collective == "allreduce":
        assert all(row.best.bound_share > 0 for row in found.rows)
        assert "copy 4 KiB within the GPU once for each of its ranks" in "".join(printed)


def test_the_bound_is_a_copy_for_each_rank_of_the_gpu() -> None:
    """One of the ranks that share a GPU copies, as often as there are such ranks; the others do nothing."""

    def work(world: Any, device: Device) -> int:
        (copy,) = device.bounds(4096)
        device.driver.log.clear()
        copy.call()
        return sum(line.startswith("copy 4096") for line in device.driver.log)

    assert on_gpu(3, work) == [3, 0, 0]


def test_mpi_by_hand_goes_down_and_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer copies down, runs the host's collective and copies up; what it pinned it unpins."""

    def contender(self: Any, case: Case, **options: Any) -> Contender:
        array = self._new(case.input_count, case.dtype)
        return Contender("mpi", array, lambda: np.multiply(array, 2, out=array))

    monkeypatch.setattr(peers.MpiPeer, "__init__", lambda self, world: None)
    monkeypatch.setattr(peers.MpiPeer, "contender", contender)
    monkeypatch.setattr(peers.MpiPeer, "close", lambda self: None)

    def work(world: Any, device: Device) -> list[str]:
        peer = peers.StagedMpi(world, device)
        found = peer.contender(Case(COLLECTIVES["allreduce"], "float", "sum", 0, 1, 5))
        assert found is not None
        device.store(found.source, lambda values: values.fill(3))
        assert device.fetch(found.call()).tolist() == [6] * 5
        peer.close()
        return [line.split()[0] for line in device.driver.log if "register" in line.split()[0]]

    assert on_gpu(1, work) == [["register", "unregister"]]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CuPy, arrays on a GPU are refused with what to install."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UnsupportedBufferError, match=r"pip install 'cupy-cuda12x\[ctk\]'"):
        run_ranks(1, lambda world: bench.run(world, Settings("allreduce", **FAST), print))
