"""Ranks that are threads of one process, with GPUs in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gpu_doubles.driver import Array, HostDriver, HostMachine
from gpu_doubles.nccl import HostNccl
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.config import Config
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.awareness import CudaAwareness
from ringreduce.gpu.devices import Gpu
from ringreduce.testing import run_ranks

T = TypeVar("T")


def reduced(
    communicator: Communicator, driver: HostDriver, values: Array, op: ReduceOp = ReduceOp.SUM, **how: Any
) -> Array:
    """Return what an allreduce in place makes of an array in device memory that holds ``values``."""
    array = driver.put_late(values)
    communicator.allreduce(array, op, out=array, **how)
    return array.get(array.stream)


def run_gpu_ranks(
    size: int,
    function: Callable[[Communicator, HostDriver], T],
    *,
    path: str = "staged",
    gpu: Callable[[int], int] | None = None,
    aware: bool | None = True,
    seed: int = 0,
    **options: Any,
) -> list[T]:
    """Call ``function(communicator, driver)`` on ``size`` ranks with GPUs in host memory; otherwise as `run_ranks`.

    All drivers exist before any rank does something, so that rank r's is named "rank r" and who shares a GPU is known
    from the start. Each has made stream 1, for nobody to use: in an array's interface 1 means the default stream.

    Args:
        size, function: as for `run_ranks`.
        path: what RINGREDUCE_GPU asks for, unless a ``config`` is given.
        gpu: rank -> its GPU; None: one for all if the path is ``"staged"``, else one for each.
        aware: what MPI is found to be.
        seed: of the `HostMachine`.
        options: as for `run_ranks`.
    """
    machine, groups = HostMachine(seed), dict[bytes, Any]()
    place = gpu or (lambda rank: 0 if path == "staged" else rank)
    drivers = [HostDriver(machine, place(rank)) for rank in range(size)]
    for driver in drivers:
        driver.make_stream()

    def run(communicator: Communicator) -> T:
        driver = drivers[communicator.rank]
        nccl = HostNccl(driver, groups)
        assert isinstance(communicator.gpu, Gpu)
        communicator.gpu.drivers = lambda number: driver
        communicator.gpu.libraries = lambda number: nccl
        communicator.gpu.awareness = lambda: CudaAwareness(aware, "it says so")
        return function(communicator, driver)

    return run_ranks(size, run, **{"config": Config(timeout_s=20.0, gpu=path), **options})
