"""All block arithmetic: how a buffer of ``count`` elements is cut into blocks and segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Where a schedule's blocks are when it runs over one part of the buffer: a slice of elements for each block.
Segment = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """A cut of ``[0, count)`` into consecutive blocks, some of which may be empty.

    Attributes:
        bounds: ``nblocks + 1`` ascending element offsets; block ``b`` is ``[bounds[b], bounds[b + 1])``.
    """

    bounds: tuple[int, ...]

    @classmethod
    def even(cls, count: int, nblocks: int, align: int = 1) -> Partition:
        """Cut ``count`` elements into ``nblocks`` blocks whose sizes differ by at most ``align``.

        Inner bounds are multiples of ``align`` elements (so that blocks can begin on cache lines).
        """
        units = -(-count // align)
        return cls((*[min(count, units * block // nblocks * align) for block in range(nblocks)], count))

    @classmethod
    def first_larger(cls, count: int, nblocks: int) -> Partition:
        """Cut like ``numpy.array_split``: the first ``count % nblocks`` blocks hold one element more."""
        small, extra = divmod(count, nblocks)
        return cls(tuple(small * b + min(b, extra) for b in range(nblocks + 1)))

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Partition:
        """Cut into blocks of the given sizes (elements)."""
        return cls(tuple(accumulate(sizes, initial=0)))

    @property
    def segment(self) -> Segment:
        """The whole partition as one segment."""
        return tuple(map(slice, self.bounds[:-1], self.bounds[1:]))


def pieces(start: int, stop: int, limit: int) -> Iterator[slice]:
    """Cut ``[start, stop)`` into slices of at most ``limit`` elements; nothing for an empty range."""
    for low in range(start, stop, limit):
        yield slice(low, min(stop, low + limit))


def segments_of_buffer(count: int, nblocks: int, limit: int, align: int = 1) -> list[Segment]:
    """Cut a buffer into segments whose blocks hold at most ``limit`` elements, each segment one contiguous range.

    A schedule moves every element by the same steps, so it may run over each segment by itself; that is all there is to
    pipelining. This cut is for collectives that leave the block boundaries open (allreduce, broadcast).

    Args:
        count: elements of the buffer.
        nblocks: blocks in each segment.
        limit: elements, a multiple of ``align``.
        align: inner bounds of segments and blocks are multiples of it, as in `Partition.even`.
    """
    assert limit % align == 0
    nsegments = max(1, -(-count // (limit * nblocks)))
    parts = Partition.even(count, nsegments, align).segment
    return [
        tuple(slice(part.start + block.start, part.start + block.stop) for block in blocks)
        for part in parts
        for blocks in [Partition.even(part.stop - part.start, nblocks, align).segment]
    ]


def segments_of_blocks(partition: Partition, limit: int, largest: int | None = None) -> list[Segment]:
    """Cut every block of ``partition`` into parts of at most ``limit`` elements; segment i has the i-th part of each.

    Args:
        partition: the blocks.
        limit: elements.
        largest: elements of the largest block on any rank, where the ranks' partitions differ; all ranks must make
            the same number of segments.
    """
    if largest is None:
        largest = max(block.stop - block.start for block in partition.segment)
    nsegments = max(1, -(-largest // limit))
    cut = [Partition.even(block.stop - block.start, nsegments).segment for block in partition.segment]
    return [
        tuple(
            slice(block.start + parts[i].start, block.start + parts[i].stop)
            for block, parts in zip(partition.segment, cut, strict=True)
        )
        for i in range(nsegments)
    ]


def segments_across_blocks(partition: Partition, limit: int) -> list[Segment]:
    """Cut the buffer of ``partition`` into parts of at most ``limit`` elements; each segment is one contiguous range.

    For schedules that move several blocks as one: in a segment, too, they lie one after the other; most are empty.
    """
    count = partition.bounds[-1]
    return [
        tuple(
            slice(*(min(max(bound, part.start), part.stop) for bound in (block.start, block.stop)))
            for block in partition.segment
        )
        for part in Partition.even(count, max(1, -(-count // limit))).segment
    ]
