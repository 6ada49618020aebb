"""scripts/gpu_check and ``bench --device cuda`` as far as that goes without a GPU: on one that is in host memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_check
import ml_dtypes
import numpy as np
import pytest
from gpu_doubles.driver import HostArray, HostDriver
from gpu_doubles.ranks import run_gpu_ranks

import ringreduce as rr
from ringreduce.bench import bench
from ringreduce.bench.contenders import OnGpu
from ringreduce.bench.results import Report, Settings
from ringreduce.gpu import aware_path, staging
from ringreduce.gpu.inventory import Inventory

with contextlib.suppress(ImportError):
    import torch  # noqa: F401  # here, since threads that import it at once see half of it

ROOT = Path(__file__).parents[2]


# ---- the benchmark on a GPU ----


class FlatArray(HostArray):
    """A host array with what else benchmarks do with CuPy's: slices and views, which are the same memory."""

    def __getitem__(self, part: slice) -> FlatArray:
        start, stop, _ = part.indices(self.size)
        return FlatArray(self.driver, self.address + start * self.dtype.itemsize, (stop - start,), self.dtype)

    def view(self, dtype: Any) -> FlatArray:
        return FlatArray(self.driver, self.address, (self.nbytes // np.dtype(dtype).itemsize,), dtype)

    def fill(self, value: int) -> None:
        self.driver.view(self.address, self.nbytes).view(self.dtype)[:] = value


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


class HostPlace(OnGpu):
    """Arrays of a host driver, shared ones too."""

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        return self._tools.empty(nbytes)


@pytest.mark.parametrize(
    ("collective", "path", "algorithm", "ran"),
    [
        ("allreduce", "staged", "auto", ("staged", "staged")),
        ("allreduce", "staged", "ring", ("ring", "staged")),
        ("allreduce", "nccl", "auto", ("nccl", "nccl")),
        ("allreduce", "mpi", "auto", ("direct", "device+messages")),
        ("reduce_scatter", "nccl", "auto", (None, "staged")),
        ("broadcast", "mpi", "auto", (None, "staged")),
    ],
)
def test_the_benchmark_verifies_results_on_a_gpu(
    collective: str, path: str, algorithm: str, ran: tuple[str | None, str]
) -> None:
    """Collectives are right, named by what ran, and measured against the copy within the GPU."""
    printed: list[str] = []

    def work(world: rr.Communicator, driver: HostDriver) -> Report:
        fast = {"min_nbytes": 64, "max_nbytes": 4096, "step_factor": 64, "iterations": 2, "warmup": 0}
        kinds = {"types": ("float", "bfloat16"), "ops": ("sum", "avg"), "device": "cuda"}
        wanted = Settings(collective, algorithm=algorithm, **fast, **kinds)
        return bench.run(world, wanted, printed.append, HostPlace(world, HostTools(driver)))

    found = run_gpu_ranks(3, work, path=path)[0]
    assert found.nwrong == 0
    assert {each.transport for each in found.results} == {ran[1]}
    assert ran[0] is None or {each.algorithm for each in found.results} == {ran[0]}
    assert collective != "allreduce" or all(row.in_place.bound_share > 0 for row in found.rows)
    assert "GPU in host memory, " in "".join(printed)


# ---- the checks ----


def checked(path: str, asked: str, broken: bool = False, size: int = 2, **options: Any) -> list[Any]:
    """Return what the check of a path finds on ranks where another may be asked for, and sums may go wrong."""

    def work(world: rr.Communicator, driver: HostDriver) -> list[Any]:
        if broken and world.rank == 1:
            driver.combine = lambda *arguments: None  # type: ignore[method-assign]

        def put(values: Any, dtype: str) -> HostArray:
            return driver.put_late(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))

        return list(gpu_check.check_allreduce(world, path, put, lambda array: array.get(array.stream)))

    return run_gpu_ranks(size, work, path=asked, **options)[1]


@pytest.mark.parametrize("path", gpu_check.PATHS)
@pytest.mark.parametrize(("size", "node_size"), [(2, None), (3, 1), (4, 2)])
def test_results_are_right_by_every_path(path: str, size: int, node_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every dtype and operation, in place and out of place, of no element, one, and several segments."""
    monkeypatch.setattr(gpu_check, "COUNTS", (0, 1, size - 1, 2049))
    for module in (staging, aware_path):
        monkeypatch.setattr(module, "_SEGMENT_NBYTES", 4096)
    assert [each.seen for each in checked(path, path, size=size, node_size=node_size) if not each.passed] == []


def test_the_check_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that is wrong is named with its operation, and so is a path that does not run."""
    monkeypatch.setattr(gpu_check, "COUNTS", (0, 1, 1001))
    found = checked("mpi", "mpi", broken=True)
    failed = [each.name for each in found if not each.passed]
    assert failed == [each.name for each in found if each.name.startswith("allreduce") and each.seen] != []
    assert "sum of 1001" in next(each.seen for each in found if each.name == "allreduce of float32")
    assert [each.name for each in checked("nccl", "staged") if not each.passed] == ["carried by nccl"]


def test_the_page_says_what_failed_and_what_was_not_run() -> None:
    """Verdicts, figures and reasons, path by path."""
    device = HostDriver().device
    checks = [
        gpu_check.Check("a", True),
        gpu_check.Check("b", False, "sum of 1"),
        gpu_check.Check("4 KiB", None, "9 us"),
    ]
    results = {("staged", 2): checks[::2], ("staged", 4): checks}
    page = gpu_check.page(Inventory("580", devices=(device,)), results, {"staged": "", "nccl": "one GPU"})
    assert "## staged, 2 ranks: passed" in page
    assert "## staged, 4 ranks: FAILED" in page
    assert "- FAILED: b: sum of 1\n" in page
    assert page.endswith("| 4 KiB | 9 us |\n\nNot run: nccl (one GPU).\n")


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """Exit status 2, one line, and no report."""
    command = [str(ROOT / "scripts" / "gpu_check"), "--results", str(tmp_path)]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no GPU can be used here, so nothing was checked" in done.stderr
    assert list(tmp_path.iterdir()) == []
