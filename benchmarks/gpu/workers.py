"""What each part does on each of its ranks. Every one takes a function that records a check, and how many there are."""

from __future__ import annotations

import functools
import os
import platform
import secrets
import sys
from collections.abc import Callable, Iterable

import numpy as np
from gpu import collectives, kernels, speed
from gpu.report import Check

import ringreduce
from ringreduce import Communicator
from ringreduce.bench.peers import mpi_library
from ringreduce.bench.places import OnDevice
from ringreduce.gpu.awareness import cuda_awareness
from ringreduce.gpu.measuring import cupy_tools

Record = Callable[[Check], None]


def rank() -> int:
    """Return this rank, 0 where there is no world."""
    return ringreduce.rank() if ringreduce.is_initialized() else 0


def versions() -> dict[str, str]:
    """Return the versions of what has been imported."""
    found = {"ringreduce": ringreduce.__version__, "Python": platform.python_version(), "NumPy": np.__version__}
    for name in ("cupy", "torch", "mpi4py"):
        if name in sys.modules:
            found[name] = str(sys.modules[name].__version__)
    library = mpi_library()
    return found if library is None else {**found, "MPI": library, "CUDA-aware MPI": _awareness()}


def way() -> str:
    """Return how this rank's world reduces arrays on the GPU, as far as that is known."""
    return (ringreduce.world().gpu.description or "") if ringreduce.is_initialized() else ""


def _awareness() -> str:
    try:
        return cuda_awareness(os.environ).reason
    except (OSError, RuntimeError) as error:
        return f"cannot be asked: {error}"


def check_kernels(record: Record, nranks: int) -> None:
    """Look at the driver, and at all families of kernels."""
    driver = cupy_tools().driver
    record(kernels.check_contract(driver))
    for check in kernels.check_kernels(driver, _seed()):
        record(check)


def check_collectives(record: Record, nranks: int) -> None:
    """Look at all collectives on arrays of CuPy and of torch."""
    world = _begin(record, nranks)
    tools = cupy_tools(world.topology.local_rank(world.rank))
    place = OnDevice(world, tools)
    counter = collectives.Counter(world, place, int(world.broadcast(np.array([_seed()]))[0]))
    stages: dict[str, Callable[[], Iterable[Check]]] = {
        "which way before": lambda: [collectives.check_way(counter, "before")],
        "results": lambda: collectives.check_results(counter),
        "streams": lambda: [collectives.check_streams(counter, tools.on)],
        "staging": lambda: collectives.check_staging(counter) if world.size > 1 else (),
        "torch": lambda: collectives.check_torch(counter),
        "which way after": lambda: [collectives.check_way(counter, "after")],
        "NCCL": lambda: [collectives.check_nccl(counter)] if world.size > 1 else (),
    }
    for name, stage in stages.items():
        _, error = collectives.attempt(counter, functools.partial(_record_all, record, stage))
        if error is not None:
            record(Check(f"{name}: to its end", False, f"{type(error).__name__}: {error}"))
    print(f"rank {world.rank}: {world.gpu.description}", flush=True)
    ringreduce.shutdown()


def check_one_kernel(record: Record, nranks: int) -> None:
    """Measure the allreduce of ranks that share a GPU."""
    _measure(speed.check_one_kernel, record, nranks)


def check_staged(record: Record, nranks: int) -> None:
    """Measure the allreduce through host memory."""
    _measure(speed.check_staged, record, nranks)


def _measure(work: Callable[..., Iterable[Check]], record: Record, nranks: int) -> None:
    world = _begin(record, nranks)
    for check in work(world, OnDevice(world), lambda text: print(text, end="", flush=True)):
        record(check)
    ringreduce.shutdown()


def _begin(record: Record, nranks: int) -> Communicator:
    """Start the world, and look at it as `expect_ranks` does."""
    ringreduce.init()
    world = ringreduce.world()
    expect_ranks(record, world, nranks)
    return world


def expect_ranks(record: Record, world: Communicator, nranks: int) -> None:
    """Record whether all ranks that were started are in one world.

    Raises:
        RuntimeError: they are not: the launcher and mpi4py are of different libraries, maybe.
    """
    record(Check(f"ranks, {nranks} of them in one world", world.size == nranks, f"{world.size}"))
    if world.size != nranks:
        raise RuntimeError(f"{nranks} ranks were started, and the world has {world.size}")


def _record_all(record: Record, stage: Callable[[], Iterable[Check]]) -> None:
    for check in stage():
        record(check)


def _seed() -> int:
    seed = secrets.randbits(31)
    print(f"seed of rank {rank()}: {seed}", flush=True)
    return seed


#: Name of a worker -> what it does.
WORKERS: dict[str, Callable[[Record, int], None]] = {
    "kernels": check_kernels,
    "collectives": check_collectives,
    "one-kernel": check_one_kernel,
    "staged": check_staged,
}
