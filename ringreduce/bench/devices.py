"""Where the arrays of a benchmark are: in host memory, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.bench.cases import Case
from ringreduce.bench.measure import Clock, Contender, Stopwatch, bound_contenders
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.communicator import Communicator
from ringreduce.gpu.cupy_driver import Driver
from ringreduce.gpu.devices import STAGED
from ringreduce.gpu.measuring import cupy_tools
from ringreduce.training.objects import gather

__all__ = ["Device", "OnDevice", "OnHost", "Tools", "device_operand"]

Array = npt.NDArray[Any]


class OnHost:
    """NumPy arrays. Here and on GPUs they are flat, and values are given and taken as NumPy arrays.

    Attributes:
        watch: times the calls on such arrays.
    """

    def __init__(self, world: Communicator) -> None:
        self.watch: Stopwatch = Clock()
        self._world = world

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        """Return an uninitialised uint8 array; ``shared``: a communication buffer."""
        return self._world.empty(nbytes, np.uint8) if shared else np.empty(nbytes, np.uint8)

    def store(self, array: Any, write: Callable[[Array], object]) -> None:
        """Let ``write`` fill an array: itself or, if that is out of its reach, a NumPy array that is copied there."""
        write(array)

    def fetch(self, array: Any) -> Array:
        """Return the content once all that was enqueued is done; maybe the array itself."""
        found: Array = array
        return found

    def bounds(self, nbytes: int) -> list[Contender]:
        """Return what reads and writes ``nbytes`` bytes per rank; the fastest is the bound. Collective."""
        return bound_contenders(np.zeros(nbytes, np.uint8))

    def path(self, case: Case, algorithm: str, asked: str | None) -> tuple[str, str]:
        """Return what carries out a collective, and what moves its bytes; after it was run so.

        Args:
            case: the collective.
            algorithm: of arrays in host memory.
            asked: the algorithm that was asked for, None: it was left to us.
        """
        return algorithm, self._world.transport_name(algorithm, case.collective.name)

    def describe(self) -> str | None:
        """Return what a reader should know of the device, None for host memory."""
        return None


class Tools(Stopwatch, Protocol):
    """What measuring on a GPU takes; see `ringreduce.gpu.measuring`."""

    driver: Driver

    def empty(self, nbytes: int) -> Any: ...


class OnDevice:
    """CuPy arrays on this rank's GPU; methods that say nothing do what those of `OnHost` say.

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
        uuids = gather(world, self.driver.device.uuid)
        self.sharing = max(map(uuids.count, uuids))
        self._copies = self.sharing if uuids.index(self.driver.device.uuid) == world.rank else 0

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        if shared:
            return self._world.empty(nbytes, np.uint8, device=f"cuda:{self.driver.device.number}")
        return self._tools.empty(nbytes)

    def store(self, array: Any, write: Callable[[Array], object]) -> None:
        values = np.empty(array.shape, array.dtype)
        write(values)
        self.up(array, values)

    def fetch(self, array: Any) -> Array:
        values = np.empty(array.shape, array.dtype)
        self.down(values, array)
        return values

    def down(self, target: Array, source: Any) -> None:
        """Copy to the host; returns when that is done."""
        operand = device_operand(source)
        self.driver.copy(target.ctypes.data, operand.address, target.nbytes, operand.stream)
        self.wait(operand.stream)

    def up(self, target: Any, source: Array) -> None:
        """Copy from the host; returns when that is done."""
        operand = device_operand(target)
        self.driver.copy(operand.address, source.ctypes.data, source.nbytes, operand.stream)
        self.wait(operand.stream)

    def bounds(self, nbytes: int) -> list[Contender]:
        """Return the copy within the GPU: by one of its ranks, as often as there are ranks on it.

        Processes on one GPU run in turns, and events of one do not see the time that others take.
        """
        source, target = (device_operand(self._tools.empty(nbytes)) for _ in range(2))

        def copy() -> Any:
            for _ in range(self._copies):
                self.driver.copy(target.address, source.address, nbytes, target.stream)
            return target.array

        return [Contender("copy", source.array, copy)]

    def path(self, case: Case, algorithm: str, asked: str | None) -> tuple[str, str]:
        if case.collective.name != "allreduce":
            return algorithm, STAGED.transport
        choice = self._world.path_on_device(case.dtype, case.op, asked)
        return choice.algorithm, choice.transport

    def describe(self) -> str | None:
        ranks = "one rank" if self.sharing == 1 else f"{self.sharing} ranks"
        return f"{self.driver.device.name}, {ranks} on a GPU; {self._world.gpu.explain(Collective.ALLREDUCE)}"

    def wait(self, stream: int) -> None:
        """Return when all that was enqueued on a stream is done."""
        event = self.driver.make_event()
        self.driver.record(event, stream)
        self.driver.synchronize(event)


def device_operand(array: Any) -> DeviceOperand:
    """Return the memory of an array on a GPU, and the stream that it is used on."""
    operand = DeviceOperand.of(array)
    assert operand is not None
    return operand


Device = OnHost | OnDevice
