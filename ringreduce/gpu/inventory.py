"""What there is of NVIDIA on this machine: driver, CuPy, GPUs, NCCL. Any of it may be missing; nothing fails."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from ringreduce.gpu.cupy_driver import Device, cuda_driver

_PROC = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Inventory:
    """What was found; numbers of versions are 0 and texts empty where nothing was.

    Attributes:
        driver: the version of the kernel's driver, e.g. ``580.82.07``.
        driver_cuda: the newest CUDA that the driver runs, as CUDA counts: 13000 is 13.0.
        packages: the installed packages that bring a ``cupy``, with their versions; two of them spoil each other.
        cupy_cuda: the CUDA that CuPy works with.
        nccl: the version of NCCL that CuPy has found, e.g. 22703 for 2.27.3.
        devices: the GPUs that this process sees.
        problem: what CuPy said when it was imported or asked for GPUs.
    """

    driver: str = ""
    driver_cuda: int = 0
    packages: tuple[str, ...] = ()
    cupy_cuda: int = 0
    nccl: int = 0
    devices: tuple[Device, ...] = ()
    problem: str = ""


def take_inventory() -> Inventory:
    """Look around. Local; initialises CUDA in this process where CuPy and a driver are."""
    driver = _driver()
    driver_cuda = _driver_cuda()
    if importlib.util.find_spec("cupy") is None:
        return Inventory(driver, driver_cuda)
    packages = _cupy_packages()
    try:
        import cupy

        runtime = cupy.cuda.runtime
        cupy_cuda = int(runtime.runtimeGetVersion())
        devices = tuple(cuda_driver(number).device for number in range(runtime.getDeviceCount()))
        return Inventory(
            driver, driver_cuda, packages=packages, cupy_cuda=cupy_cuda, nccl=nccl_version(), devices=devices
        )
    except Exception as error:  # A broken installation fails in many ways, and this is where one looks for why.
        problem = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        return Inventory(driver, driver_cuda, packages, problem=problem)


def _driver() -> str:
    try:
        text = _PROC.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return version.group() if version else "unknown version"


def _driver_cuda() -> int:
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else version.value


def _cupy_packages() -> tuple[str, ...]:
    names = importlib.metadata.packages_distributions().get("cupy", [])
    return tuple(f"{name} {importlib.metadata.version(name)}" for name in sorted(set(names))) or ("cupy",)


def nccl_version() -> int:
    """Return the version of the NCCL that CuPy finds, 22703 for 2.27.3; 0 without CuPy or NCCL. Uses no GPU."""
    try:
        import cupy.cuda.nccl as library  # CuPy 14 has no such attribute before this import.

        return int(library.get_version()) if library.available else 0
    except Exception:  # CuPy comes without one, or with one that does not load
        return 0
