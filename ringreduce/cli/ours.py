"""ringreduce itself as a contender: its collectives on private or communication buffers."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from ringreduce.cli.cases import Case
from ringreduce.cli.measure import Contender
from ringreduce.cli.places import Place
from ringreduce.communicator import Communicator

__all__ = ["Ours"]

Array = npt.NDArray[Any]


class Ours:
    """The collectives of one communicator on two buffers, which all cases share.

    Memory is touched once, and what the communicator knows about an address stays true.
    """

    def __init__(self, world: Communicator, largest_nbytes: int, place: Place, *, shared: bool) -> None:
        """Allocate an input and an output of ``largest_nbytes`` bytes each.

        Args:
            world: the ranks.
            largest_nbytes: the size of the largest case.
            place: where they lie.
            shared: take communication buffers, which peers of the node can reach, instead of private arrays.
        """
        self._world = world
        self._input, self._output = (place.empty(largest_nbytes, shared=shared) for _ in range(2))
        for memory in (self._input, self._output):
            memory.fill(0)

    def out_of_place(self, case: Case, algorithm: str | None) -> Contender:
        """Prepare a case whose input survives; allgather and alltoall allocate their result, as they always do."""
        world, source = self._world, _typed(self._input, case, case.input_count)
        out, op, root = _typed(self._output, case, case.output_count), case.op, case.root

        def allreduce() -> Array:
            result: Array = world.allreduce(source, op, out=out, algorithm=algorithm)
            return result

        def reduce_scatter() -> Array:
            result: Array = world.reduce_scatter(source, op, out=out, algorithm=algorithm)
            return result

        def allgather() -> Array:
            result: Array = world.allgather(source, algorithm=algorithm)
            return result

        def broadcast() -> Array:
            result: Array = world.broadcast(source, root, out=out, algorithm=algorithm)
            return result

        def alltoall() -> Array:
            result: Array = world.alltoall(source, algorithm=algorithm)
            return result

        calls = {each.__name__: each for each in (allreduce, reduce_scatter, allgather, broadcast, alltoall)}
        name = case.collective.name
        return Contender("ringreduce", source, calls[name], None if name in ("allgather", "alltoall") else out)

    def in_place(self, case: Case, algorithm: str | None) -> Contender:
        """Prepare an allreduce or a broadcast whose result overwrites the input."""
        world, array = self._world, _typed(self._input, case, case.input_count)
        op, root = case.op, case.root

        def allreduce() -> Array:
            result: Array = world.allreduce(array, op, out=array, algorithm=algorithm)
            return result

        def broadcast() -> Array:
            result: Array = world.broadcast(array, root, out=array, algorithm=algorithm)
            return result

        calls = {each.__name__: each for each in (allreduce, broadcast)}
        return Contender("ringreduce", array, calls[case.collective.name])


def _typed(memory: Array, case: Case, count: int) -> Array:
    """Return the first ``count`` elements of ``memory`` in the type of the case."""
    return memory[: count * case.dtype.itemsize].view(case.dtype)
