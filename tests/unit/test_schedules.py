"""Every algorithm is proved on every kind of topology, and the simplest ones are written out in full."""

from __future__ import annotations

import pytest

from ringreduce.algorithms import ALGORITHMS, Algorithm, Collective, Step, Transfer, find, names, schedule_for
from ringreduce.algorithms.draw import draw
from ringreduce.algorithms.verify import Kind, Outcome, verify
from ringreduce.common.errors import ConfigError
from ringreduce.common.topology import Topology

ONE_NODE = [Topology.uniform(1, size) for size in range(1, 18)]
EVEN_NODES = [Topology.uniform(nnodes, local) for nnodes in range(2, 9) for local in range(1, 5)]
UNEVEN_NODES = [
    Topology.from_hosts(hosts)
    for hosts in ("aab", "aaab", "abbb", "aaabb", "abbccc", "aaaabbbbccccd", "aabbbccccdddeeeefgghhhh")
]
# Ranks that were dealt out to the nodes in turn, or in no order at all.
INTERLEAVED_NODES = [Topology.from_hosts(hosts) for hosts in ("abab", "abba", "abcabcab", "abcdbadc", "abcbacbbabca")]
TOPOLOGIES = {
    "one node": ONE_NODE,
    "even nodes": EVEN_NODES,
    "uneven nodes": UNEVEN_NODES,
    "interleaved nodes": INTERLEAVED_NODES,
}

each_algorithm = pytest.mark.parametrize(
    "algorithm", ALGORITHMS, ids=[f"{each.collective.value}-{each.name}" for each in ALGORITHMS]
)

ROOTED = [each for each in ALGORITHMS if each.collective.rooted]


def allreduce(name: str) -> Algorithm:
    return find(Collective.ALLREDUCE, name)


@each_algorithm
@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_every_algorithm_is_proved(algorithm: Algorithm, kind: str) -> None:
    """Schedules are right, end, have no race and cost what is stated, wherever the algorithm does not refuse to run."""
    for topology in TOPOLOGIES[kind]:
        if algorithm.refuses(topology) is None:
            verify(algorithm, topology)


@pytest.mark.parametrize("algorithm", ROOTED, ids=[f"{each.collective.value}-{each.name}" for each in ROOTED])
@pytest.mark.parametrize("topology", [*ONE_NODE[:9], ONE_NODE[12], *UNEVEN_NODES[:5], *INTERLEAVED_NODES], ids=str)
def test_every_rank_can_be_the_root(algorithm: Algorithm, topology: Topology) -> None:
    """Every rank can be the root, at the same cost."""
    if algorithm.refuses(topology) is None:
        for root in range(topology.size):
            verify(algorithm, topology, root)


@each_algorithm
def test_a_single_rank_has_nothing_to_do(algorithm: Algorithm) -> None:
    """A world of one rank moves nothing."""
    assert algorithm.schedule(0, Topology.uniform(1, 1)).steps == ()


@each_algorithm
def test_schedules_are_plain_values(algorithm: Algorithm) -> None:
    """The same question gets an equal, hashable answer, so that schedules can be cached and compared."""
    topology = Topology.uniform(1, 5)
    first, second = algorithm.schedule(3, topology, root=1), algorithm.schedule(3, topology, root=1)
    assert first == second
    assert hash(first) == hash(second)


# ---- written out in full ----


def test_ring_of_three_ranks() -> None:
    """Rank 1 of 3 passes on what it received in the step before, and ends the first half with block 1 complete."""
    steps = allreduce("ring").schedule(1, Topology.uniform(1, 3)).steps
    assert steps == (
        Step(sends=(Transfer(2, range(0, 1)),), recvs=(Transfer(0, range(2, 3), reduce=True),)),
        Step(sends=(Transfer(2, range(2, 3)),), recvs=(Transfer(0, range(1, 2), reduce=True),)),
        Step(sends=(Transfer(2, range(1, 2)),), recvs=(Transfer(0, range(0, 1)),)),
        Step(sends=(Transfer(2, range(0, 1)),), recvs=(Transfer(0, range(2, 3)),)),
    )


def test_recursive_doubling_of_five_ranks() -> None:
    """Rank 1 hands its buffer to rank 0; ranks 0, 2, 3, 4 double; rank 1 is given the result."""
    topology, whole = Topology.uniform(1, 5), range(0, 1)
    steps = [allreduce("recursive_doubling").schedule(rank, topology).steps for rank in range(5)]

    def exchange(peer: int) -> Step:
        return Step(sends=(Transfer(peer, whole),), recvs=(Transfer(peer, whole, reduce=True),), by_rank=True)

    assert steps == [
        (
            Step(recvs=(Transfer(1, whole, reduce=True),), by_rank=True),
            exchange(2),
            exchange(3),
            Step(sends=(Transfer(1, whole),)),
        ),
        (Step(sends=(Transfer(0, whole),)), Step(recvs=(Transfer(0, whole),))),
        (exchange(0), exchange(4)),
        (exchange(4), exchange(0)),
        (exchange(3), exchange(2)),
    ]


def test_two_shot_of_two_ranks() -> None:
    """Each rank loads the peer's term of its own block and stores the result there."""
    one = range(1, 2)
    assert allreduce("two_shot").schedule(1, Topology.uniform(1, 2)).steps == (
        Step(loads=(Transfer(0, one, reduce=True),), stores=(Transfer(0, one),), by_rank=True),
    )


# ---- cost: closed forms, written down independently of the code ----


@pytest.mark.parametrize(
    ("collective", "name", "topology", "steps", "sent", "touched"),
    [
        (Collective.ALLREDUCE, "one_shot", Topology.uniform(1, 6), 1, 5, 0),
        (Collective.ALLREDUCE, "two_shot", Topology.uniform(1, 8), 1, 0, 1.75),
        (Collective.ALLREDUCE, "ring", Topology.uniform(1, 8), 14, 1.75, 0),
        (Collective.ALLREDUCE, "direct", Topology.uniform(1, 8), 2, 1.75, 0),
        (Collective.ALLREDUCE, "recursive_doubling", Topology.uniform(1, 16), 4, 4, 0),
        (Collective.ALLREDUCE, "recursive_doubling", Topology.uniform(1, 13), 5, 4, 0),
        (Collective.ALLREDUCE, "halving_doubling", Topology.uniform(1, 16), 8, 1.875, 0),
        (Collective.ALLREDUCE, "halving_doubling", Topology.uniform(1, 6), 6, 2.5, 0),
        (Collective.ALLREDUCE, "double_tree", Topology.uniform(1, 17), 8, 2, 0),
        (Collective.ALLREDUCE, "hierarchical", Topology.uniform(8, 4), 16, 0.4375, 1.5),
        (Collective.ALLREDUCE, "hierarchical", Topology.from_hosts("aabbb"), 4, 0.5, 2),
        (Collective.ALLREDUCE, "hierarchical_doubling", Topology.uniform(8, 4), 5, 0.75, 1.5),
        (Collective.REDUCE_SCATTER, "ring", Topology.uniform(1, 4), 3, 0.75, 0),
        (Collective.ALLGATHER, "ring", Topology.uniform(1, 4), 3, 0.75, 0),
        (Collective.ALLGATHER, "load", Topology.uniform(1, 4), 1, 0, 0.75),
        (Collective.BROADCAST, "binomial", Topology.uniform(1, 9), 4, 4, 0),
        (Collective.BROADCAST, "chain", Topology.uniform(1, 9), 8, 1, 0),
        (Collective.BROADCAST, "load", Topology.uniform(1, 9), 1, 0, 1),
        (Collective.ALLTOALL, "pairwise", Topology.uniform(1, 5), 4, 0.8, 0),
        (Collective.ALLTOALL, "direct", Topology.uniform(1, 5), 1, 0.8, 0),
        (Collective.REDUCE, "load", Topology.uniform(1, 5), 1, 0, 4),
        (Collective.REDUCE, "two_shot", Topology.uniform(1, 5), 1, 0, 1),
        (Collective.REDUCE, "binomial", Topology.uniform(1, 9), 4, 1, 0),
        (Collective.REDUCE, "chain", Topology.uniform(1, 9), 8, 1, 0),
        (Collective.REDUCE, "direct", Topology.uniform(1, 9), 2, 1, 0),
        (Collective.REDUCE, "hierarchical_chain", Topology.uniform(8, 4), 9, 0.25, 1),
        (Collective.GATHER, "load", Topology.uniform(1, 5), 1, 0, 0.8),
        (Collective.GATHER, "direct", Topology.uniform(1, 5), 1, 0.2, 0),
        (Collective.GATHER, "binomial", Topology.uniform(1, 7), 3, 3 / 7, 0),
        (Collective.SCATTER, "load", Topology.uniform(1, 5), 1, 0, 0.2),
        (Collective.SCATTER, "direct", Topology.uniform(1, 5), 1, 0.8, 0),
        (Collective.SCATTER, "binomial", Topology.uniform(1, 7), 3, 6 / 7, 0),
    ],
)
def test_costs(collective: Collective, name: str, topology: Topology, steps: int, sent: float, touched: float) -> None:
    """Stated costs are those of the literature (that schedules have the stated cost is part of the proof)."""
    cost = find(collective, name).cost(topology)
    assert (cost.steps, cost.sent, cost.touched) == (steps, pytest.approx(sent), pytest.approx(touched))


# ---- properties that the proof does not cover ----


@pytest.mark.parametrize("size", range(1, 34))
def test_no_rank_is_inner_in_both_trees(size: int) -> None:
    """Whoever has children in one tree is a leaf in the other, and nobody has more than two."""
    topology = Topology.uniform(1, size)
    for rank in range(size):
        children = [0, 0]
        for step in allreduce("double_tree").schedule(rank, topology).steps:
            for recv in step.recvs:
                children[recv.blocks.start] += recv.reduce
        assert min(children) == 0
        assert max(children) <= 2


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcabcabc", "aaabcc"])
def test_the_ring_enters_each_node_once(hosts: str) -> None:
    """However ranks are placed, one message enters and one leaves each node in every step."""
    topology = Topology.from_hosts(hosts)
    for moves in verify(allreduce("ring"), topology).rounds:
        crossing = [move for move in moves if topology.node_of(move.source) != topology.node_of(move.target)]
        assert len(crossing) == len(topology.nodes)


def between_nodes(outcome: Outcome, topology: Topology) -> int:
    """Count the blocks that leave a node."""
    moves = (move for moves in outcome.rounds for move in moves)
    return sum(len(m.blocks) for m in moves if topology.node_of(m.source) != topology.node_of(m.target))


@pytest.mark.parametrize("hosts", ["aaaabbbb", "aabbccdd", "abababab"])
def test_a_hierarchy_sends_least_between_nodes(hosts: str) -> None:
    """Each node sends 2 (N-1)/N buffers in all, whatever its number of ranks."""
    topology = Topology.from_hosts(hosts)
    algorithm = allreduce("hierarchical")
    buffers = between_nodes(verify(algorithm, topology), topology) / algorithm.nblocks(topology)
    assert buffers == pytest.approx(2 * (len(topology.nodes) - 1))


def test_ranks_without_a_lane_do_nothing() -> None:
    """On nodes of 1 and 3 ranks there is one lane: the first rank of the large node acts for the other two."""
    topology = Topology.from_hosts("abbb")
    moves = [move for moves in verify(allreduce("hierarchical"), topology).rounds for move in moves]
    assert [len(allreduce("hierarchical").schedule(rank, topology).steps) for rank in range(4)] == [2, 4, 0, 0]
    assert {(m.source, m.target) for m in moves if m.kind is Kind.LOAD} == {(2, 1), (3, 1)}
    assert {(m.source, m.target) for m in moves if m.kind is Kind.STORE} == {(1, 2), (1, 3)}


# ---- the table ----


def test_what_is_kept_while_it_travels() -> None:
    """A message is kept if its blocks stay as they are: in an allgather and along a chain, not in a reduction."""
    topology = Topology.uniform(4, 1)

    def kept(collective: Collective, name: str) -> list[int]:
        return [len(each) for each in schedule_for(collective, name, 1, topology).kept_sends()]

    assert kept(Collective.ALLREDUCE, "recursive_doubling") == [0, 0]
    assert kept(Collective.ALLREDUCE, "ring") == [0, 0, 0, 1, 1, 1]
    assert kept(Collective.ALLREDUCE, "direct") == [0, 3]
    assert kept(Collective.ALLGATHER, "ring") == [1, 1, 1]
    assert kept(Collective.BROADCAST, "chain") == [0, 1]
    assert kept(Collective.ALLTOALL, "direct") == [3]


def test_names_are_unique() -> None:
    """A collective and a name mean one algorithm."""
    keys = [(algorithm.collective, algorithm.name) for algorithm in ALGORITHMS]
    assert len(set(keys)) == len(keys)
    assert all(find(*key) is algorithm for key, algorithm in zip(keys, ALGORITHMS, strict=True))


def test_shared_memory_algorithms_are_not_offered_across_nodes() -> None:
    """What needs all ranks on one node refuses several, says why, and is not among the names."""
    nodes = Topology.uniform(2, 2)
    assert "two_shot" in names(Collective.ALLREDUCE)
    assert "two_shot" in names(Collective.ALLREDUCE, Topology.uniform(1, 4))
    assert "two_shot" not in names(Collective.ALLREDUCE, nodes)
    assert "ring" in names(Collective.ALLREDUCE, nodes)
    assert "2 nodes x 2" in str(allreduce("two_shot").refuses(nodes))
    with pytest.raises(ConfigError, match="cannot run here: all ranks must share one node"):
        schedule_for(Collective.ALLREDUCE, "two_shot", 0, nodes)


def test_schedules_are_computed_once() -> None:
    """Asking again returns the same object."""
    topology = Topology.uniform(1, 4)
    first = schedule_for(Collective.ALLREDUCE, "ring", 2, topology)
    assert schedule_for(Collective.ALLREDUCE, "ring", 2, Topology.uniform(1, 4)) is first
    assert first == allreduce("ring").schedule(2, topology)


# ---- drawings ----


def test_a_drawing_shows_messages_and_reductions() -> None:
    """A line per round; a plus where what arrives is combined."""
    assert draw(allreduce("ring"), Topology.uniform(1, 2)).splitlines() == [
        "ring allreduce, 2 ranks on 1 node, 2 blocks",
        "step 1  r0->r1[b1+]  r1->r0[b0+]",
        "step 2  r0->r1[b0]  r1->r0[b1]",
    ]


def test_a_drawing_shows_loads_before_stores() -> None:
    """Arrows of direct accesses point away from the rank that acts; the loads of a step come first."""
    assert draw(allreduce("two_shot"), Topology.uniform(1, 2)).splitlines()[1:] == [
        "step 1  r0<=r1[b0+]  r1<=r0[b1+]  r0=>r1[b0]  r1=>r0[b1]"
    ]


@each_algorithm
def test_drawings_of_sixteen_ranks_keep_to_the_width(algorithm: Algorithm) -> None:
    """No line is longer than asked for, and no arrow is cut in two."""
    drawing = draw(algorithm, Topology.uniform(1, 16), width=80)
    assert max(map(len, drawing.splitlines()[1:])) <= 80
    assert drawing.count("[") == drawing.count("]") == sum(line.count("[b") for line in drawing.splitlines())
