"""ringreduce as a contender, and what all contenders share: operands in place, and the patterns of messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.bench.cases import Case
from ringreduce.bench.devices import Device
from ringreduce.bench.measure import Contender
from ringreduce.collectives.communicator import Communicator

__all__ = ["Messages", "Ours", "giving", "in_one", "pattern", "room"]

Array = npt.NDArray[Any]


class Messages(NamedTuple):
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


def pattern(case: Case, rank: int, through: Messages, source: Any, new: Callable[[], Any]) -> Callable[[], Any]:
    """Return what sends and receives: in a ring, or between ranks 0 and 1; it returns what came, into ``new()``."""
    size, peer, many = case.nranks, 1 - rank, case.collective.messages
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
            return Contender("ringreduce", source, self._call(case, algorithm, source, out))
        source = _typed(self._input, case, case.input_count)
        given = None if self._new_results else _typed(self._output, case, case.output_count)
        return Contender("ringreduce", source, self._call(case, algorithm, source, given), given)

    def _call(self, case: Case, algorithm: str | None, source: Array, out: Any) -> Callable[[], Any]:
        world = self._world
        if case.collective.point_to_point:
            through = Messages(
                *(world.send, world.recv, world.sendrecv, world.send, world.recv, lambda done: None),
                answer=np.zeros(1, np.uint8),
            )
            return pattern(case, world.rank, through, source, room(case, out))
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
