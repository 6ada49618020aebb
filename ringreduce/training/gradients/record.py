"""What a rank says in the agreement before a step, as bytes whose maximum over the ranks tells all."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.engine import About, Context, Engine, Gather, InPlaceAllreduce, Operation

#: The status of a bucket that may be reduced before the step, given for each of its gradients; the greatest decides.
#: 0: it is reduced, or is not to be. Else: a pass has added to the gradient since; the program has written to it; the
#: step is to reduce it.
ADDED = 1
CHANGED = 2
WAITS = 3

_Bytes = npt.NDArray[np.uint8]

_NUMBER_NBYTES = 4
_COUNTS = "counted", "uncounted", "miscounted"
_LEFT = "uncleared", "overwritten"


class OptimizerRanks:
    """Collectives of one optimizer, as operations of an engine: ranks that have joined take part.

    Reducers of compressed buckets call those that a `Communicator` has, too.

    Args:
        engine: carries them out.
        name: the optimizer's.
        described: the optimizer, for errors.
        where: what errors call these operations: the step, or the backward pass.

    Attributes:
        engine, name, described: the arguments.
        about: what errors call these operations.
        seconds: spent in them so far, waiting for others included.
    """

    def __init__(self, engine: Engine, name: str, described: str, where: str) -> None:
        self.engine = engine
        self.name = name
        self.described = described
        self.about = About(f"the {where} of {described}")
        self.rank = engine.communicator.rank
        self.size = engine.communicator.size
        self.empty = engine.communicator.empty
        self.seconds = 0.0

    def allreduce(self, array: Any, op: ReduceOp, *, out: Any) -> None:
        """Reduce an array in place; see `InPlaceAllreduce`."""
        assert out is array, "buckets are reduced where they are"
        name = f"{self.name}, {len(array)}"
        self.run(InPlaceAllreduce(name, f"a part of {self.name}", op=op, arrays=[array], about=self.about))

    def allgather(self, rows: Any) -> Any:
        """Return the rows of all ranks, one after the other; see `Gather`."""
        (gathered,) = self.gather("rows", f"rows of {self.name}", [rows])
        return gathered

    def gather(self, what: str, text: str, arrays: Sequence[Any], within: Context = None) -> Any:
        """Return arrays with the rows of all ranks; ``what`` is a part of the name. See `Gather`."""
        return self.run(Gather(f"{self.name}, {what}", text, arrays, within, self.about.title))

    def run(self, operation: Operation) -> Any:
        """Carry out an operation and return its result."""
        started = perf_counter()
        try:
            return self.engine.run(operation)
        finally:
            self.seconds += perf_counter() - started

    def wait(self, operation: Operation) -> Any:
        """Return the result of an operation that was submitted, once it is done."""
        started = perf_counter()
        try:
            return self.engine.wait(operation)
        finally:
            self.seconds += perf_counter() - started


class Record:
    """What one rank says before a step; once it is reduced, the maximum over all ranks.

    Args:
        communicator: makes the memory.
        count: the number of parameters.
        overlaps: whether gradients may have been reduced before the step; equal on all ranks, as is ``count``.

    Attributes:
        memory: all of it.
        found: of each parameter, see `Memory.found`.
        status: of each parameter, if ``overlaps``: that of its bucket, see `ADDED`.
        cleared: likewise: whether the program has cleared a gradient that was reduced.
        kept: likewise: whether it has not.
        unlike: of one number: whether the step is unlike the last one.
        changed: likewise: whether the program has changed gradients by itself.
        again: likewise: whether a backward pass has added to sums over the ranks.
        slower: likewise: whether steps have taken longer with overlap.
        counted, uncounted, miscounted: likewise: whether ranks say of how many samples their gradients are means,
            whether ranks do not, and whether some rank says what is wrong.
        uncleared, overwritten: likewise, with shards: whether the program has left reduced gradients, and whether it
            has written into those of which a rank has its own part alone.
    """

    def __init__(self, communicator: Communicator, count: int, overlaps: bool) -> None:
        self.key = count, overlaps
        early = count if overlaps else 0
        one = ("u1", (1,))
        signed = ("u1", (2, _NUMBER_NBYTES))
        fields: list[Any] = [("found", "u1", (count,))]
        fields += [(name, "u1", (early,)) for name in ("status", "cleared", "kept")]
        fields += [(name, *one) for name in ("unlike", "changed", "again", "slower", *_COUNTS, *_LEFT)]
        fields += [(name, *signed) for name in ("weights", "settings", "data", "layout", "stepped", "scaled")]
        fields += [(name, *signed) for name in ("subset", "order", "stream")]
        layout = np.dtype(fields)
        self.memory: _Bytes = communicator.empty(layout.itemsize, np.uint8)
        self._fields = self.memory.view(layout).reshape(())
        self.found, self.status, self.cleared, self.kept = [self._fields[name] for name, *_ in fields[:4]]
        self.unlike, self.changed, self.again, self.slower = [self._fields[name] for name, *_ in fields[4:8]]
        self.counted, self.uncounted, self.miscounted = [self._fields[name] for name in _COUNTS]
        self.uncleared, self.overwritten = [self._fields[name] for name in _LEFT]

    def begin(self, found: bytes) -> None:
        """Say what was found, and nothing else yet."""
        self.memory[:] = 0
        self.found[:] = np.frombuffer(found, np.uint8)

    def sign(self, name: str, number: int) -> None:
        """Say a number of 32 bits that must be equal on all ranks that say one: ``weights``, ``settings``, and so on.

        Its complement goes with it: the largest bytes of all are complements only if all ranks have said the same.
        """
        said = np.frombuffer((number % 2**32).to_bytes(_NUMBER_NBYTES, "little"), np.uint8)
        self._fields[name][:] = said, 255 - said

    @property
    def is_again(self) -> bool:
        """Whether some rank has added to, or cleared, a gradient that was reduced before the step."""
        return bool((self.status == ADDED).any() or self.cleared.any())

    def forget_early(self) -> None:
        """Make as if nothing was reduced before the step."""
        for early in (self.status, self.cleared, self.kept):
            early[:] = 0

    def differs(self, name: str) -> bool:
        """Return whether ranks have signed different numbers."""
        said, complement = self._fields[name]
        return bool(((said ^ complement) != 255).any() and (said | complement).any())
