"""Binomial tree: in every round each rank that has the data sends it to one that has not.

Literature: binomial-tree broadcast: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
Restrictions: none; any root. Distances count along the nodes from the root and the longest come first, so that
    subtrees are neighbours and few messages leave a node.
Non-power-of-two: any P; peers beyond the last rank do not exist.
Cost: ceil(lg P) (alpha + n beta); the root sends to ceil(lg P) ranks.

4 ranks, root 0:

    r0 -- step 1 --> r2 -- step 2 --> r3
     '--- step 2 --> r1
"""

from __future__ import annotations

from collections.abc import Iterator

from ringreduce.algorithms.patterns import block, node_order
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.topology import Topology

__all__ = ["BROADCAST"]


def _steps(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order = node_order(topology)
    start, size = order.index(root), topology.size
    order = (*order[start:], *order[:start])
    place = order.index(rank)
    for k in reversed(range(_rounds(topology))):
        distance = 1 << k
        if place % (2 * distance) == distance:
            yield Step(recvs=(Transfer(order[place - distance], block(0)),))
        elif place % (2 * distance) == 0 and place + distance < size:
            yield Step(sends=(Transfer(order[place + distance], block(0)),))


def _rounds(topology: Topology) -> int:
    """Return ceil(lg P)."""
    return (topology.size - 1).bit_length()


BROADCAST = Algorithm(
    name="binomial",
    collective=Collective.BROADCAST,
    summary="doubles the number of ranks that have the data in every step; wins across nodes",
    steps=_steps,
    nblocks=lambda topology: 1,
    cost=lambda topology: Cost(steps=_rounds(topology), sent=_rounds(topology)),
)
