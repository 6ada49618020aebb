"""Ranks that are threads of one process, with GPUs in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from gpu_doubles.driver import HostDriver, HostMachine
from ringreduce.collectives.communicator import Communicator
from ringreduce.gpu.devices import Gpu
from ringreduce.testing import run_ranks

__all__ = ["run_gpu_ranks"]

T = TypeVar("T")


def run_gpu_ranks(
    size: int,
    function: Callable[[Communicator, HostDriver], T],
    *,
    gpu: Callable[[int], int] = lambda rank: 0,
    seed: int = 0,
    nbytes: int = 1 << 30,
    **options: Any,
) -> list[T]:
    """Call ``function(communicator, driver)`` on ``size`` ranks with GPUs in host memory; otherwise as `run_ranks`.

    All drivers exist before any rank does something, so that rank r's is named "rank r" and who shares a GPU is known
    from the start. Each has made stream 1, for nobody to use: in an array's interface 1 means the default stream.

    Args:
        size, function: as for `run_ranks`.
        gpu: rank -> its GPU.
        seed, nbytes: of the `HostMachine`.
        options: as for `run_ranks`.
    """
    machine = HostMachine(seed, nbytes)
    drivers = [machine.driver(gpu(rank)) for rank in range(size)]
    for driver in drivers:
        driver.make_stream()

    def run(communicator: Communicator) -> T:
        driver = drivers[communicator.rank]
        assert isinstance(communicator.gpu, Gpu)
        communicator.gpu.drivers = lambda number: driver
        return function(communicator, driver)

    return run_ranks(size, run, **options)
