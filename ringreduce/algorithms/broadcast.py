"""Broadcasts by messages: a binomial tree, in the fewest rounds, and a chain, which fills every link.

Literature: binomial tree: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521; pipelined chain (linear tree):
    Patarasuk, Yuan and Faraj, "Techniques for pipelined broadcast on Ethernet switched clusters", J. Parallel Distrib.
    Comput. 68 (2008).
Restrictions: none; any root. Ranks are counted along the nodes, from the root on. In the tree the longest distances
    come first, so that subtrees are neighbours and few messages leave a node; in the chain one enters and one leaves.
Non-power-of-two: any P; peers beyond the last rank do not exist.
Cost: binomial ceil(lg P) (alpha + n beta), and the root sends to ceil(lg P) ranks; chain (P-1) (alpha + n beta) for one
    segment, but segments follow each other, so that S of them take (S + P-2) (alpha + n/S beta).

4 ranks, root 0:

    binomial                            chain
    r0 -- step 1 --> r2 -- step 2 --> r3    r0 -- step 1 --> r1 -- step 2 --> r2 -- step 3 --> r3
     '--- step 2 --> r1
"""

from __future__ import annotations

from collections.abc import Iterator

from ringreduce.algorithms.patterns import block, ceil_log2, from_root
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology

__all__ = ["BINOMIAL", "CHAIN"]


def _chain(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order = from_root(topology, root)
    place = order.index(rank)
    if place > 0:
        yield Step(recvs=(Transfer(order[place - 1], block(0)),))
    if place + 1 < topology.size:
        yield Step(sends=(Transfer(order[place + 1], block(0)),))


def _binomial(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order, size = from_root(topology, root), topology.size
    place = order.index(rank)
    for k in reversed(range(ceil_log2(topology.size))):
        distance = 1 << k
        if place % (2 * distance) == distance:
            yield Step(recvs=(Transfer(order[place - distance], block(0)),))
        elif place % (2 * distance) == 0 and place + distance < size:
            yield Step(sends=(Transfer(order[place + distance], block(0)),))


BINOMIAL = Algorithm(
    name="binomial",
    collective=Collective.BROADCAST,
    summary="doubles the number of ranks that have the data in every step; wins across nodes for small buffers",
    steps=_binomial,
    nblocks=lambda topology: 1,
    cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=ceil_log2(topology.size)),
)

CHAIN = Algorithm(
    name="chain",
    collective=Collective.BROADCAST,
    summary="hands everything on from rank to rank, segment by segment; wins across nodes for large buffers",
    steps=_chain,
    nblocks=lambda topology: 1,
    cost=lambda topology: Cost(steps=topology.size - 1, sent=int(topology.size > 1)),
)
