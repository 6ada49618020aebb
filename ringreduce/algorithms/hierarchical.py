"""Hierarchical: reduce inside each node in shared memory, between nodes one message lane per local rank.

To a root: the lanes reduce to its node, where they are stored into its memory.

Literature: multi-lane (two-level) allreduce: Träff and Hunold, "Decomposing MPI collectives for exploiting multi-lane
    communication", arXiv 1910.13373; Cho et al., "BlueConnect", MLSys 2019.
Restrictions: none; the ranks of a node must share memory. The buffer is cut into as many slices as there are lanes.
Uneven nodes: reductions to a root refuse them. Of an allreduce there are as many lanes, L, as the smallest node has
    ranks; lane l is made of the l-th rank of every node. Further ranks of larger nodes do nothing: the ranks with lanes
    load from and store to their memory.
Non-power-of-two: as the allreduce between the nodes: any number.
Cost, with N nodes, at most M ranks on a node, mu the time to load or store one byte of a peer's: hierarchical (a ring
    between nodes) 2 (N-1) alpha + 2 (n/L) (N-1)/N beta + 2 (n/L) (M-1) mu and two steps inside the node;
    hierarchical_doubling (recursive doubling between nodes) lg N alpha + (n/L) lg N beta, and hierarchical_halving
    (halving-doubling between nodes) 2 lg N alpha + 2 (n/L) (N-1)/N beta, and the same inside the node; for N not a
    power of two see these; hierarchical_direct (direct between nodes) 2 alpha + 2 (n/L) (N-1)/N beta and the same.
    To a root, as binomial or chain of reduce with n/L for n, and (n/L) M mu inside the node.
Bits: the ranks of a lane hold equal bits after the allreduce between the nodes, since that has the property, and stores
    copy: equal on all ranks. Inside a node terms are added in the order of ranks (`Step.by_rank`).
Races: slice l of every buffer of a node is touched by the node's rank in lane l and by nobody else: loads, messages and
    stores of the slice follow each other on that rank, and one barrier before and one after are enough.

2 nodes x 2 ranks: r0 r1 | r2 r3, slices s0 s1:

    step 1     r0 loads s0 of r1, r1 loads s1 of r0;   r2 loads s0 of r3, r3 loads s1 of r2
    then       r0 and r2 allreduce s0 by messages, r1 and r3 s1: the two lanes
    at last    r0 stores s0 to r1, r1 stores s1 to r0;   r2 stores s0 to r3, r3 stores s1 to r2
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from ringreduce.algorithms import halving_doubling, pairs, recursive_doubling, ring, rooted
from ringreduce.algorithms.patterns import peers_after, relabelled
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology


def _one_lane(topology: Topology) -> Topology:
    """Return the ranks of one lane, renumbered from 0: a node each."""
    return _single_ranks(len(topology.nodes))


@lru_cache(maxsize=64)
def _single_ranks(nnodes: int) -> Topology:
    return Topology.uniform(nnodes, 1)


def _make(name: str, across: Algorithm, summary: str) -> Algorithm:
    """Return the hierarchical algorithm that carries out ``across``, an allreduce or a reduce, in every lane."""
    to_all = across.collective is Collective.ALLREDUCE

    def nblocks(topology: Topology) -> int:
        return topology.lanes * across.nblocks(_one_lane(topology))

    def steps(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
        lane = topology.local_rank(rank)
        if lane >= topology.lanes:
            return
        width = across.nblocks(_one_lane(topology))
        mine = range(lane * width, (lane + 1) * width)
        peers = peers_after(rank, topology.node_of(rank))
        yield Step(loads=tuple(Transfer(peer, mine, reduce=True) for peer in sorted(peers)), by_rank=True)
        # Ascending, so that steps that combine by rank (recursive doubling) order their terms alike on all members.
        members = sorted(topology.cross_group(rank))
        lane_root = next((members.index(member) for member in topology.node_of(root) if member in members), 0)
        inner = across.steps(members.index(rank), _one_lane(topology), lane_root)
        yield from relabelled(inner, members, first_block=mine.start)
        yield Step(stores=tuple(Transfer(peer, mine) for peer in peers if to_all or peer == root))

    def cost(topology: Topology) -> Cost:
        largest = max(len(node) for node in topology.nodes)
        inner = across.cost(_one_lane(topology))
        lanes = topology.lanes
        touched = 2 * (largest - 1) / lanes if to_all else int(lanes > 1)
        return Cost(steps=inner.steps + 2 * (largest > 1), sent=inner.sent / lanes, touched=touched)

    def refuses(topology: Topology) -> str | None:
        same = to_all or topology.homogeneous
        return None if same else f"all nodes must have as many ranks, but these are {topology.describe()}"

    return Algorithm(name, across.collective, summary, steps=steps, cost=cost, nblocks=nblocks, refuses=refuses)


ALGORITHMS = (
    _make(
        "hierarchical",
        ring.ALLREDUCE,
        "reduces in shared memory, then one ring per local rank between nodes; wins for large buffers on many nodes",
    ),
    _make(
        "hierarchical_doubling",
        recursive_doubling.ALLREDUCE,
        "reduces in shared memory, then recursive doubling between nodes; wins for small buffers on several nodes",
    ),
    _make(
        "hierarchical_halving",
        halving_doubling.ALLREDUCE,
        "reduces in shared memory, then halving-doubling between nodes; wins for large buffers on 2^k nodes",
    ),
    _make(
        "hierarchical_direct",
        pairs.ALLREDUCE,
        "reduces in shared memory, then everyone with everyone between nodes; wins for large buffers on a few nodes",
    ),
    _make(
        "hierarchical_binomial",
        rooted.REDUCE_BINOMIAL,
        "reduces in shared memory, then up a tree of nodes; wins for small buffers on several nodes",
    ),
    _make(
        "hierarchical_chain",
        rooted.REDUCE_CHAIN,
        "reduces in shared memory, then from node to node; wins for large buffers on several nodes",
    ),
)
