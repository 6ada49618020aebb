"""ringreduce itself as a contender: its collectives on private or communication buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.bench.cases import Case
from ringreduce.bench.measure import Contender
from ringreduce.bench.places import Place
from ringreduce.collectives.communicator import Communicator

__all__ = ["Ours"]

Array = npt.NDArray[Any]


class Ours:
    """The collectives of one communicator on two buffers, which all cases share.

    Memory is touched once, and what the communicator knows about an address stays true.
    """

    def __init__(
        self, world: Communicator, largest_nbytes: int, place: Place, *, shared: bool, new_results: bool = False
    ) -> None:
        """Allocate an input and an output of ``largest_nbytes`` bytes each.

        Args:
            world: the ranks.
            largest_nbytes: the size of the largest case.
            place: where they are.
            shared: take communication buffers, which peers of the node can reach, instead of private arrays.
            new_results: let calls that are not in place return new arrays, instead of the same one each time.
        """
        self._world = world
        self._new_results = new_results
        self._input, self._output = (place.empty(largest_nbytes, shared=shared) for _ in range(2))
        for memory in (self._input, self._output):
            memory.fill(0)

    def out_of_place(self, case: Case, algorithm: str | None) -> Contender:
        """Prepare a case whose input survives."""
        source = _typed(self._input, case, case.input_count)
        out = None if self._new_results else _typed(self._output, case, case.output_count)
        return self._contender(case, algorithm, source, out, out)

    def in_place(self, case: Case, algorithm: str | None) -> Contender:
        """Prepare a case whose result overwrites the input, or of which one is a part of the other."""
        larger = _typed(self._input, case, case.buffer_count)
        own = larger[self._world.rank * case.count :][: case.count] if case.collective.divided else larger
        source, out = (own, larger) if case.input_count < case.output_count else (larger, own)
        return self._contender(case, algorithm, source, out, None)

    def _contender(self, case: Case, algorithm: str | None, source: Array, out: Any, poisoned: Any) -> Contender:
        if case.collective.point_to_point:
            return Contender("ringreduce", source, self._messages(case, source, out), poisoned)
        name, options = case.collective.name, {"out": out, "algorithm": algorithm}
        collective = getattr(self._world, name)
        arguments: tuple[Any, ...] = (case.root,) if case.collective.rooted else ()
        arguments += (case.op,) if case.collective.reduces else ()

        def call() -> Array:
            result: Array = collective(source, *arguments, **options)
            return result

        return Contender("ringreduce", source, call, poisoned)

    def _messages(self, case: Case, source: Array, out: Array | None) -> Callable[[], Any]:
        """Return what sends and receives: in a ring, or between ranks 0 and 1."""
        world, rank, size = self._world, self._world.rank, self._world.size
        peer, answer = 1 - rank, np.zeros(1, np.uint8)

        def result() -> Array:
            return np.empty(case.output_count, case.dtype) if out is None else out

        def ring() -> Any:
            return world.sendrecv(source, (rank + 1) % size, result(), (rank - 1) % size)

        def ping_pong() -> Any:
            got = result()
            if rank == 0:
                world.send(source, peer)
                world.recv(got, peer)
            else:
                world.recv(got, peer)
                world.send(source, peer)
            return got

        def one_way() -> Any:
            if rank == 0:
                for _ in range(case.collective.messages):
                    world.send(source, peer)
                world.recv(answer, peer)
                return None
            got = result()
            for _ in range(case.collective.messages):
                world.recv(got, peer)
            world.send(answer, peer)
            return got

        if case.collective.of_two and rank > 1:
            return lambda: None
        return {"sendrecv": ring, "latency": ping_pong, "bandwidth": one_way}[case.collective.name]


def _typed(memory: Array, case: Case, count: int) -> Array:
    """Return the first ``count`` elements of ``memory`` in the type of the case."""
    return memory[: count * case.dtype.itemsize].view(case.dtype)
