"""What each part does on each of its ranks. Every one takes a function that notes a check."""

from __future__ import annotations

import platform
import secrets
import sys
from collections.abc import Callable

import numpy as np
from gpu import collectives, kernels, speed
from gpu.report import Check

import ringreduce
from ringreduce.buffers.cuda.measuring import cupy_tools
from ringreduce.cli.peers import mpi_library
from ringreduce.cli.places import OnDevice
from ringreduce.testing.device import check_driver

Note = Callable[[Check], None]


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
    return found if library is None else {**found, "MPI": library}


def check_kernels(note: Note) -> None:
    """Look at the driver, and at all families of kernels."""
    driver = cupy_tools().driver
    check_driver(driver)
    note(Check("the driver over CuPy does what any driver must", True, driver.device.name))
    for check in kernels.check_kernels(driver, _seed()):
        note(check)


def check_collectives(note: Note) -> None:
    """Look at all collectives on arrays of CuPy and of torch."""
    ringreduce.init()
    world = ringreduce.world()
    tools = cupy_tools(world.topology.local_rank(world.rank))
    place = OnDevice(world, tools)
    counter = collectives.Counter(world, place, int(world.broadcast(np.array([_seed()]))[0]))
    for check in collectives.check_results(counter):
        note(check)
    note(collectives.check_streams(counter, tools.on))
    if world.size > 1:
        for check in collectives.check_staging(counter):
            note(check)
    for check in collectives.check_torch(counter):
        note(check)
    print(f"rank {world.rank}: {world.gpu.way}", flush=True)
    ringreduce.shutdown()


def check_packing(note: Note) -> None:
    """Measure packing."""
    for check in speed.check_packing(cupy_tools()):
        note(check)


def check_leader(note: Note) -> None:
    """Measure the allreduce of ranks that share a GPU."""
    _measure(speed.check_leader, note)


def check_staged(note: Note) -> None:
    """Measure the allreduce through host memory."""
    _measure(speed.check_staged, note)


def _measure(work: Callable[..., object], note: Note) -> None:
    ringreduce.init()
    world = ringreduce.world()
    place = OnDevice(world)
    for check in list(work(world, place, lambda text: print(text, end="", flush=True))):  # type: ignore[call-overload]
        note(check)
    ringreduce.shutdown()


def _seed() -> int:
    seed = secrets.randbits(31)
    print(f"seed of rank {rank()}: {seed}", flush=True)
    return seed


#: Name of a worker -> what it does.
WORKERS: dict[str, Callable[[Note], None]] = {
    "kernels": check_kernels,
    "collectives": check_collectives,
    "pack": check_packing,
    "leader": check_leader,
    "staged": check_staged,
}
