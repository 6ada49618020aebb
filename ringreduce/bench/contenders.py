"""ringreduce as a contender; where arrays are, on the host or on a GPU; and what all contenders share.

That is operands in place, and the patterns of messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.bench.bounds import HostBounds
from ringreduce.bench.cases import Case
from ringreduce.bench.measure import CallStopwatch, Contender, Stopwatch
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.communicator import Communicator
from ringreduce.collectives.pickles import gather
from ringreduce.gpu.cupy_driver import CupyDriver, cupy_tools
from ringreduce.gpu.devices import STAGED

Array = npt.NDArray[Any]


class LibraryMessages(NamedTuple):
    """How a library sends arrays (of its own kind) to other ranks and receives them from there.

    Attributes:
        send: ``(array, rank)``; `recv` likewise.
        exchange: ``(sent, to, received, from)``.
        isend: as `send`, but may return before it is done something for `wait`; `irecv` likewise.
        wait: takes a list of what these have returned.
        answer: an array of one byte.
    """

    send: Callable[[Any, int], object]
    recv: Callable[[Any, int], object]
    exchange: Callable[[Any, int, Any, int], object]
    isend: Callable[[Any, int], Any]
    irecv: Callable[[Any, int], Any]
    wait: Callable[[list[Any]], object]
    answer: Any


def pattern(case: Case, rank: int, through: LibraryMessages, source: Any, new: Callable[[], Any]) -> Callable[[], Any]:
    """Return what sends and receives: in a ring, or between ranks 0 and 1; it returns what came, into ``new()``."""
    size = case.nranks
    peer = 1 - rank
    many = case.collective.messages
    send, recv, exchange, isend, irecv, wait, answer = through

    def ring() -> Any:
        got = new()
        exchange(source, (rank + 1) % size, got, (rank - 1) % size)
        return got

    def ping_pong() -> Any:
        got = new()
        if rank == 0:
            send(source, peer)
            recv(got, peer)
        else:
            recv(got, peer)
            send(source, peer)
        return got

    def one_way() -> Any:
        if rank == 0:
            wait([isend(source, peer) for _ in range(many)])
            recv(answer, peer)
            return None
        got = new()
        wait([irecv(got, peer) for _ in range(many)])
        send(answer, peer)
        return got

    if case.collective.of_two and rank > 1:
        return lambda: None
    return {"sendrecv": ring, "latency": ping_pong, "bandwidth": one_way}[case.collective.name]


def in_one(case: Case, larger: Array, rank: int) -> tuple[Array, Array]:
    """Return input and result of the form in place: the whole of an array twice, or that and this rank's part of it."""
    own = larger[rank * case.count :][: case.count] if case.collective.divided else larger
    return (own, larger) if case.input_count < case.output_count else (larger, own)


def giving(result: Any, call: Callable[..., object], *arguments: Any) -> Callable[[], Any]:
    """Let a call return its result."""

    def run() -> Any:
        call(*arguments)
        return result

    return run


class Ours:
    """The collectives of one communicator on two buffers, which all cases share.

    Memory is touched once, and what the communicator knows about an address stays true.
    """

    def __init__(
        self, world: Communicator, largest_nbytes: int, device: Device, *, shared: bool, new_results: bool = False
    ) -> None:
        """Allocate an input and an output of ``largest_nbytes`` bytes each.

        Args:
            world: the ranks.
            largest_nbytes: the size of the largest case.
            device: where they are.
            shared: take communication buffers, which peers of the node can reach, instead of private arrays.
            new_results: let calls that are not in place return new arrays, instead of the same one each time.
        """
        self._world = world
        self._new_results = new_results
        self._input, self._output = (device.empty(largest_nbytes, shared=shared) for _ in range(2))
        for memory in (self._input, self._output):
            memory.fill(0)

    def contender(self, case: Case, algorithm: str | None, *, in_place: bool) -> Contender:
        """Prepare one case; without ``in_place`` its input survives."""
        if in_place:
            source, out = in_one(case, _typed(self._input, case, case.buffer_count), self._world.rank)
            return Contender("ringreduce", source, self._call(case, algorithm, source=source, out=out))
        source = _typed(self._input, case, case.input_count)
        given = None if self._new_results else _typed(self._output, case, case.output_count)
        return Contender("ringreduce", source, call=self._call(case, algorithm, source=source, out=given), output=given)

    def _call(self, case: Case, algorithm: str | None, source: Array, out: Any) -> Callable[[], Any]:
        world = self._world
        if case.collective.point_to_point:
            through = LibraryMessages(
                *(world.send, world.recv, world.sendrecv, world.send, world.recv, lambda done: None),
                answer=np.zeros(1, np.uint8),
            )
            return pattern(case, world.rank, through=through, source=source, new=room(case, out))
        collective = getattr(world, case.collective.name)
        arguments: tuple[Any, ...] = (case.root,) if case.collective.rooted else ()
        arguments += (case.op,) if case.collective.reduces else ()
        options = {"out": out, "algorithm": algorithm}
        return lambda: collective(source, *arguments, **options)


def room(case: Case, out: Array | None) -> Callable[[], Array]:
    """Return what gives the same array each time, or a new one."""
    return (lambda: np.empty(case.output_count, case.dtype)) if out is None else lambda: out


def _typed(memory: Array, case: Case, count: int) -> Array:
    """Return the first ``count`` elements of ``memory`` in the type of the case."""
    return memory[: count * case.dtype.itemsize].view(case.dtype)


class OnHost:
    """NumPy arrays. Here and on GPUs they are flat, and values are given and taken as NumPy arrays.

    Attributes:
        watch: times the calls on such arrays.
    """

    def __init__(self, world: Communicator) -> None:
        self.watch: Stopwatch = CallStopwatch()
        self._world = world
        self._made: HostBounds | None = None  # nobody asks for bounds of messages

    @property
    def _bounds(self) -> HostBounds:
        if self._made is None:  # no cached_property: ranks that are threads would wait for each other's lock
            self._made = HostBounds(self._world)
        return self._made

    def empty(self, nbytes: int, *, shared: bool) -> Any:
        """Return an uninitialised uint8 array; ``shared``: a communication buffer."""
        return self._world.empty(nbytes, np.uint8) if shared else np.empty(nbytes, np.uint8)

    def store(self, array: Any, write: Callable[[Array], object]) -> None:
        """Let ``write`` fill an array: itself or, if that is out of its reach, a NumPy array that is copied there."""
        write(array)

    def fetch(self, array: Array) -> Array:
        """Return the content once all that was enqueued is done; maybe the array itself."""
        return array

    def bounds(self, case: Case) -> list[Contender]:
        """Return what a case has to do at least on its node; the fastest is the bound there. Collective."""
        return self._bounds.contenders(case)

    def between_nodes_us(self, case: Case) -> float:
        """Return the microseconds that the links between nodes take at least; 0.0 on one node."""
        return self._bounds.between_nodes_us(case)

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
    """What measuring on a GPU takes; see `ringreduce.gpu.cupy_driver`."""

    driver: CupyDriver

    def empty(self, nbytes: int) -> Any: ...


class OnGpu:
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

    def bounds(self, case: Case) -> list[Contender]:
        """Return the copy within the GPU: by one of its ranks, as often as there are ranks on it; of allreduces alone.

        Processes on one GPU run in turns, and events of one do not see the time that others take.
        """
        if case.collective.name != "allreduce":
            return []
        source, target = (device_operand(self._tools.empty(case.nbytes)) for _ in range(2))

        def copy() -> Any:
            for _ in range(self._copies):
                self.driver.copy(target.address, source.address, case.nbytes, target.stream)
            return target.array

        return [Contender("copy", source.array, copy)]

    def between_nodes_us(self, case: Case) -> float:
        return 0.0

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


Device = OnHost | OnGpu
