"""Where the arrays of a benchmark lie: in host memory, or in that of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.buffers.cuda.arrays import DeviceOperand
from ringreduce.buffers.cuda.driver import Driver
from ringreduce.buffers.cuda.measuring import cupy_tools
from ringreduce.cli.cases import Case
from ringreduce.cli.measure import Clock, Contender, Stopwatch, bound_contenders
from ringreduce.communicator import Communicator
from ringreduce.paths import STAGED

__all__ = ["OnDevice", "OnHost", "Place", "Tools"]

Array = npt.NDArray[Any]

_POISON = 0xFF  # a NaN in every float type, -1 or the largest number in the others


class Place(Protocol):
    """Kind of memory. Arrays are flat; values are given and taken as NumPy arrays.

    Attributes:
        watch: times the calls on such arrays.
    """

    watch: Stopwatch

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        """Return an uninitialised uint8 array; ``shared``: a communication buffer. Collective for the first one."""

    def store(self, array: Any, write: Callable[[Array], object]) -> None:
        """Let ``write`` fill an array: itself or, if that is out of its reach, a NumPy array that is copied there."""

    def fetch(self, array: Any) -> Array:
        """Return the content once all that was enqueued is done; maybe the array itself."""

    def poison(self, array: Any) -> None:
        """Make sure that what is not overwritten is seen to be wrong."""

    def bounds(self, nbytes: int) -> list[Contender]:
        """Return ways to read and write ``nbytes`` bytes per rank, of which the fastest is the bound. Collective."""

    def path(self, case: Case, algorithm: str, asked: str | None) -> tuple[str, str]:
        """Return what carries out a collective, and what moves its bytes; after it was run so.

        Args:
            case: the collective.
            algorithm: of arrays in host memory.
            asked: the algorithm that was asked for, None: it was left to us.
        """

    def describe(self) -> str | None:
        """Return what a reader should know of the device, None for host memory."""


class OnHost:
    """NumPy arrays."""

    def __init__(self, world: Communicator) -> None:
        self.watch: Stopwatch = Clock(time.perf_counter)
        self._world = world

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        return self._world.empty(nbytes, np.uint8) if shared else np.empty(nbytes, np.uint8)

    def store(self, array: Any, write: Callable[[Array], object]) -> None:
        write(array)

    def fetch(self, array: Any) -> Array:
        found: Array = array
        return found

    def poison(self, array: Any) -> None:
        pass  # inputs are new each time, so an old result is wrong

    def bounds(self, nbytes: int) -> list[Contender]:
        return bound_contenders(np.zeros(nbytes, np.uint8))

    def path(self, case: Case, algorithm: str, asked: str | None) -> tuple[str, str]:
        return algorithm, self._world.transport_name(algorithm, case.collective.name)

    def describe(self) -> str | None:
        return None


class Tools(Protocol):
    """What measuring on a GPU takes; see `ringreduce.buffers.cuda.measuring`."""

    driver: Driver

    def empty(self, nbytes: int) -> Any: ...

    def ready(self) -> None: ...

    def time(self, call: Callable[[], object]) -> float: ...


class OnDevice:
    """CuPy arrays on this rank's GPU.

    Args:
        world: the ranks; all make one of these together.
        tools: None: CuPy's.

    Attributes:
        driver: the GPU's.
        sharing: how many ranks use the GPU that most ranks use.
    """

    def __init__(self, world: Communicator, tools: Tools | None = None) -> None:
        self._tools = cupy_tools(world.topology.local_rank(world.rank)) if tools is None else tools
        self.watch: Stopwatch = self._tools
        self.driver = self._tools.driver
        self._world = world
        uuid = np.zeros((1, 128), np.uint8)
        name = self.driver.device.uuid.encode()[: uuid.size]
        uuid[0, : len(name)] = np.frombuffer(name, np.uint8)
        everyone = [bytes(each) for each in world.allgather(uuid)]
        self.sharing = max(everyone.count(each) for each in everyone)
        self._leads = everyone.index(bytes(uuid[0])) == world.rank

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        made = self._world.empty(nbytes, np.uint8, device=f"cuda:{self.driver.device.number}")
        return made if shared else self._tools.empty(nbytes)  # the first one is what tells the ranks about their GPUs

    def store(self, array: Any, write: Callable[[Array], object]) -> None:
        values = np.empty(array.shape, array.dtype)
        write(values)
        self.up(array, values)

    def fetch(self, array: Any) -> Array:
        values = np.empty(array.shape, array.dtype)
        self.down(values, array)
        return values

    def poison(self, array: Any) -> None:
        self.store(array, lambda values: values.view(np.uint8).fill(_POISON))

    def new(self, count: int, dtype: np.dtype[Any]) -> Any:
        """Return an uninitialised array that no peer can reach."""
        return self._tools.empty(count * dtype.itemsize).view(dtype)

    def down(self, target: Array, source: Any) -> None:
        """Copy to the host; returns when that is done."""
        operand = _operand(source)
        self.driver.copy(target.ctypes.data, operand.address, target.nbytes, operand.stream)
        self._wait(operand.stream)

    def up(self, target: Any, source: Array) -> None:
        """Copy from the host; returns when that is done."""
        operand = _operand(target)
        self.driver.copy(operand.address, source.ctypes.data, source.nbytes, operand.stream)
        self._wait(operand.stream)

    def copy(self, target: Any, source: Any, stream: int) -> None:
        """Enqueue a copy of as much as the target takes, on any stream."""
        into = _operand(target)
        self.driver.copy(into.address, _operand(source).address, into.nbytes, stream)

    def bounds(self, nbytes: int) -> list[Contender]:
        """Return the copy within the GPU: by one of its ranks, as often as there are ranks on it.

        Processes on one GPU run in turns, and events of one do not see the time that others take.
        """
        source, target = (_operand(self._tools.empty(nbytes)) for _ in range(2))

        def copy() -> Any:
            for _ in range(self.sharing if self._leads else 0):
                self.driver.copy(target.address, source.address, nbytes, target.stream)
            return target.array

        return [Contender("copy", source.array, copy)]

    def path(self, case: Case, algorithm: str, asked: str | None) -> tuple[str, str]:
        if case.collective.name != "allreduce":
            return algorithm, STAGED.transport
        way = self._world.path_on_device(case.dtype, case.op, asked)
        return way.algorithm, way.transport

    def describe(self) -> str | None:
        ranks = "one rank" if self.sharing == 1 else f"{self.sharing} ranks"
        return f"{self.driver.device.name}, {ranks} on a GPU; {self._world.gpu.way}"

    def _wait(self, stream: int) -> None:
        event = self.driver.make_event()
        self.driver.record(event, stream)
        self.driver.synchronize(event)
        self.driver.free_event(event)


def _operand(array: Any) -> DeviceOperand:
    operand = DeviceOperand.of(array)
    assert operand is not None
    return operand
