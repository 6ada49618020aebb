"""Averages of 64-bit integers where no rank has all terms of an element: sums that may wrap around, and what follows.

Each rank says whether terms of its own are so large that a sum could wrap around. If any does, all ranks reduce once
more: the quotients of their terms, from which, and from the sums, the averages follow (`ringreduce.buffers.integers`).
What the ranks say is added up with the data, in one more element of each block that a rank gets. A reduction to a root,
which gives the other ranks nothing, is followed by an allreduce of one byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ringreduce.buffers import Array, Operand, divide_toward_zero, divide_wrapped, sums_fit
from ringreduce.collectives.plan import Place

#: So many elements are read, checked and copied at a time: they stay in a core's second-level cache.
_IN_CACHE = 32 << 10


class LongAverage:
    """The average of 64-bit integers over ranks. It is computed in a buffer.

    Args:
        size: of how many ranks.
        counts: the elements of each block that some rank gets.
        own: the number of the block that this rank gets; None: it gets nothing.
        any_rank: returns whether its argument is true on any rank, collective; None: this is said in the blocks.

    Attributes:
        counts: the elements of each block in the buffer.
    """

    def __init__(
        self, size: int, counts: Sequence[int], own: int | None, any_rank: Callable[[bool], bool] | None = None
    ) -> None:
        self._size = size
        self._own = own
        self._any_rank = any_rank
        self.counts = [count if any_rank is not None else count + 1 for count in counts]
        self._parts: list[tuple[slice, slice]] = []  # Slices of the source, and of the buffer.
        self._flags: list[int] = []  # Elements of the buffer.
        self._result = slice(0, 0)  # A slice of the buffer.
        self._pieces: list[slice] = []  # Slices of the result.
        read = written = 0
        for number, (count, taken) in enumerate(zip(counts, self.counts, strict=True)):
            self._parts += [
                (slice(read + part.start, read + part.stop), slice(written + part.start, written + part.stop))
                for part in _pieces(count)
            ]
            if number == own:
                self._result = slice(written, written + count)
                self._pieces = _pieces(count)
            read = read + count
            written = written + taken
            self._flags.append(written - 1)

    def run(self, source: Operand, place: Place, buffer: Array, reduce: Callable[[], object]) -> None:
        """Average a source. Collective.

        Args:
            source: flat.
            place: called where this rank gets something, returns the memory for it.
            buffer: of as many elements as ``counts``.
            reduce: reduces it by sums.
        """
        large = self._load(source.view, buffer)
        reduce()
        if self._any_rank is not None:
            large = self._any_rank(large)
        elif self._own is not None:
            large = bool(buffer[self._flags[self._own]])
        if not large:
            if self._own is not None:
                self._store(buffer[self._result], place(()).view)
            return
        sums = buffer[self._result].copy()
        for read, written in self._parts:
            np.floor_divide(source.view[read], self._size, out=buffer[written])
        reduce()
        if self._own is not None:
            divide_wrapped(sums, buffer[self._result], self._size)
            np.copyto(place(()).view, sums)

    def _load(self, source: Array, buffer: Array) -> bool:
        """Copy the source; return whether it has numbers so large that a sum could wrap around."""
        large = False
        for read, written in self._parts:
            piece = buffer[written]
            np.copyto(piece, source[read])
            large = large or not sums_fit([piece], self._size)
        if self._any_rank is None:
            for flag in self._flags:
                buffer[flag] = large
        return large

    def _store(self, sums: Array, target: Array) -> None:
        """Divide sums that are right."""
        scratch = np.empty(min(len(sums), _IN_CACHE), sums.dtype)
        for piece in self._pieces:
            divide_toward_zero(sums[piece], self._size, scratch[: piece.stop - piece.start], out=target[piece])


def _pieces(count: int) -> list[slice]:
    """Cut so many elements into what stays in the cache."""
    return [slice(start, min(count, start + _IN_CACHE)) for start in range(0, count, _IN_CACHE)]
