"""Who is where: plain values made from host lists; and block arithmetic, in which every element is covered once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.common.partition import (
    Partition,
    pieces,
    segments_across_blocks,
    segments_of_blocks,
    segments_of_buffer,
)
from ringreduce.common.topology import Topology

HOSTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


@given(HOSTS)
def test_ranks_are_grouped_by_host(hosts: list[str]) -> None:
    """Two ranks share a node exactly if they run on one host; nodes and ranks within them ascend."""
    topology = Topology.from_hosts(hosts)
    assert topology.size == len(hosts)
    for rank, host in enumerate(hosts):
        assert topology.node_of(rank) == tuple(peer for peer, other in enumerate(hosts) if other == host)
        assert topology.node_of(rank)[topology.local_rank(rank)] == rank
    firsts = [node[0] for node in topology.nodes]
    assert firsts == sorted(firsts)


@given(HOSTS)
def test_cross_groups_hold_one_rank_of_each_node(hosts: list[str]) -> None:
    """A cross group has every node's rank of that local rank, of all nodes that have so many."""
    topology = Topology.from_hosts(hosts)
    for rank in range(topology.size):
        group = topology.cross_group(rank)
        assert rank in group
        assert {topology.local_rank(peer) for peer in group} == {topology.local_rank(rank)}
        assert len(group) == sum(len(node) > topology.local_rank(rank) for node in topology.nodes)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("a", "1 rank on 1 node"),
        ("aaaa", "4 ranks on 1 node"),
        ("aaaabbbb", "8 ranks on 2 nodes x 4"),
        ("aabab", "5 ranks on nodes of 3, 2"),
        ("abc", "3 ranks on 3 nodes x 1"),
    ],
)
def test_a_topology_describes_itself(hosts: str, words: str) -> None:
    """The description says how many ranks there are, and how many on which nodes."""
    assert Topology.from_hosts(hosts).describe() == words


def test_uniform_nodes_hold_consecutive_ranks() -> None:
    """A regular topology gives each node so many consecutive ranks; it is homogeneous, and one node is single."""
    regular = Topology.uniform(3, 4)
    assert regular.nodes == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert regular.homogeneous
    assert not regular.single_node
    assert Topology.uniform(1, 4).single_node
    assert not Topology.from_hosts("aab").homogeneous


def test_equal_topologies_are_equal_values() -> None:
    """Host names do not matter, only who shares one; equal topologies hash alike, so that schedules can be cached."""
    one, other = Topology.from_hosts("xxy"), Topology.from_hosts([5, 5, 7])
    assert one == other
    assert hash(one) == hash(other)


@pytest.mark.parametrize("nodes", [((0, 2),), ((0,), ()), ((0, 1), (1,))])
def test_what_is_no_topology_is_refused(nodes: tuple[tuple[int, ...], ...]) -> None:
    """Missing ranks, empty nodes and ranks on two nodes are broken invariants."""
    with pytest.raises(AssertionError, match="not a topology"):
        Topology(nodes)


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
