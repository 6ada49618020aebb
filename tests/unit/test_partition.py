"""Block arithmetic: every element is covered exactly once, whatever the sizes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.common.partition import (
    Partition,
    pieces,
    segments_across_blocks,
    segments_of_blocks,
    segments_of_buffer,
)

COUNTS = st.integers(0, 5000)
BLOCKS = st.integers(1, 40)
LIMITS = st.integers(1, 700)


def lengths(slices) -> list[int]:
    return [each.stop - each.start for each in slices]


def assert_covers(slices, start: int, stop: int) -> None:
    """The slices, in their order, hold every element of the range once."""
    held = [index for each in slices for index in range(each.start, each.stop)]
    assert held == list(range(start, stop))


@given(COUNTS, BLOCKS, st.sampled_from([1, 2, 16, 64]))
def test_even_blocks_cover_the_buffer_and_are_aligned(count: int, nblocks: int, align: int) -> None:
    """Even blocks cover all elements once, begin at multiples of the alignment, and differ by at most that."""
    partition = Partition.even(count, nblocks, align)
    assert (len(partition.segment), partition.bounds[-1]) == (nblocks, count)
    assert_covers(partition.segment, 0, count)
    assert all(bound % align == 0 or bound == count for bound in partition.bounds)
    sizes = lengths(partition.segment)
    assert max(sizes) - min(sizes) <= align


@given(COUNTS, BLOCKS)
def test_first_larger_cuts_like_array_split(count: int, nblocks: int) -> None:
    """The sizes are those of numpy.array_split, which users know."""
    wanted = [len(part) for part in np.array_split(np.empty(count, np.int8), nblocks)]
    assert lengths(Partition.first_larger(count, nblocks).segment) == wanted


@given(st.lists(st.integers(0, 50), max_size=20))
def test_blocks_have_the_sizes_that_are_given(sizes: list[int]) -> None:
    """Blocks of given sizes follow one another without gaps; no blocks at all make an empty partition."""
    partition = Partition.of_sizes(sizes)
    assert lengths(partition.segment) == sizes
    assert_covers(partition.segment, 0, sum(sizes))


@given(st.integers(0, 100), COUNTS, LIMITS)
def test_pieces_cover_a_range(start: int, length: int, limit: int) -> None:
    """Pieces cover the range once, none is empty or above the limit, and only the last is below it."""
    cut = list(pieces(start, start + length, limit))
    assert_covers(cut, start, start + length)
    sizes = lengths(cut)
    assert all(size == limit for size in sizes[:-1])
    assert all(0 < size <= limit for size in sizes)


@given(COUNTS, BLOCKS, LIMITS)
def test_segments_of_a_buffer_are_consecutive_ranges(count: int, nblocks: int, limit: int) -> None:
    """There is a segment at least; they follow one another, and each is one range of blocks of at most the limit."""
    segments = segments_of_buffer(count, nblocks, limit)
    assert segments
    assert_covers([block for segment in segments for block in segment], 0, count)
    for segment in segments:
        assert len(segment) == nblocks
        assert max(lengths(segment)) <= limit
        assert all(left.stop == right.start for left, right in pairwise(segment))


@given(COUNTS, BLOCKS, st.integers(1, 9), st.sampled_from([2, 7, 64]))
def test_segments_of_a_buffer_may_be_aligned(count: int, nblocks: int, units: int, align: int) -> None:
    """All blocks but the last that is not empty begin and end at multiples; the limit holds as without."""
    blocks = [block for segment in segments_of_buffer(count, nblocks, units * align, align) for block in segment]
    assert_covers(blocks, 0, count)
    assert max(lengths(blocks)) <= units * align
    assert all(bound % align == 0 for block in blocks for bound in (block.start, block.stop) if bound != count)


@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), LIMITS)
def test_segments_of_blocks_cover_every_block(sizes: list[int], limit: int) -> None:
    """Segment after segment, each block's parts cover it once, and none is above the limit."""
    partition = Partition.of_sizes(sizes)
    segments = segments_of_blocks(partition, limit)
    for index, block in enumerate(partition.segment):
        assert_covers([segment[index] for segment in segments], block.start, block.stop)
    assert all(max(lengths(segment)) <= limit for segment in segments)


@given(st.lists(st.lists(st.integers(0, 300), min_size=3, max_size=3), min_size=2, max_size=4), LIMITS)
def test_ranks_with_different_blocks_make_equally_many_segments(ranks: list[list[int]], limit: int) -> None:
    """Given the largest block of any rank, all ranks cut as many segments, though their own blocks differ."""
    largest = max(max(sizes) for sizes in ranks)
    assert len({len(segments_of_blocks(Partition.of_sizes(sizes), limit, largest)) for sizes in ranks}) == 1


@given(st.lists(st.integers(0, 900), min_size=1, max_size=12), LIMITS)
def test_segments_across_blocks_are_consecutive_ranges(sizes: list[int], limit: int) -> None:
    """Each is one range of at most the limit, they follow one another, and cover every block once."""
    partition = Partition.of_sizes(sizes)
    segments = segments_across_blocks(partition, limit)
    assert segments
    assert_covers([slice(segment[0].start, segment[-1].stop) for segment in segments], 0, sum(sizes))
    for segment in segments:
        assert sum(lengths(segment)) <= limit
        assert all(left.stop == right.start for left, right in pairwise(segment))
    for index, block in enumerate(partition.segment):
        assert sum(segment[index].stop - segment[index].start for segment in segments) == block.stop - block.start
