"""Who is where: plain values made from host lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
