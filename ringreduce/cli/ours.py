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
        name, options = case.collective.name, {"out": out, "algorithm": algorithm}
        collective = getattr(self._world, name)
        arguments = (case.root,) if name == "broadcast" else (case.op,) if case.collective.reduces else ()

        def call() -> Array:
            result: Array = collective(source, *arguments, **options)
            return result

        return Contender("ringreduce", source, call, poisoned)


def _typed(memory: Array, case: Case, count: int) -> Array:
    """Return the first ``count`` elements of ``memory`` in the type of the case."""
    return memory[: count * case.dtype.itemsize].view(case.dtype)
