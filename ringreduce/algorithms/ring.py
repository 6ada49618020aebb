"""Ring: every block goes once around the ranks to be reduced and once more to be handed out.

Literature: ring allreduce, bandwidth-optimal: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
    of workstations", J. Parallel Distrib. Comput. 69 (2009), doi:10.1016/j.jpdc.2008.09.002.
Restrictions: none. The ring visits node after node, so that one link in and one link out of each node are used.
Non-power-of-two: nothing special; any P, and blocks may differ in size or be empty.
Cost: reduce_scatter (P-1) alpha + n (P-1)/P (beta + gamma);  allgather (P-1) alpha + n (P-1)/P beta;
    allreduce, the one after the other: 2 (P-1) alpha + 2n (P-1)/P beta + n (P-1)/P gamma.
Bits: each block is summed along the ring, on one rank at a time, and then copied: equal on all ranks.

Where the partial sum of each block is, 4 ranks (block b ends up on rank b):

    before step    r0  r1  r2  r3
              1    b3  b0  b1  b2   sends it to the next rank, which adds its own term
              2    b2  b3  b0  b1
              3    b1  b2  b3  b0
     afterwards    b0  b1  b2  b3   complete; three more steps pass the complete blocks on
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ringreduce.algorithms.patterns import block
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology


def _reduce_scatter(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    return _rounds(rank, topology, lead=1, reduce=True)


def _allgather(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    return _rounds(rank, topology, lead=0, reduce=False)


def _allreduce(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    yield from _reduce_scatter(rank, topology)
    yield from _allgather(rank, topology)


def _rounds(rank: int, topology: Topology, lead: int, reduce: bool) -> Iterator[Step]:
    """Pass blocks on P - 1 times; the first that a rank sends is that of the rank ``lead`` places before it."""
    order = topology.order
    size = topology.size
    place = topology.place_of(rank)
    after = order[(place + 1) % size]
    before = order[place - 1]
    for turn in range(size - 1):
        outgoing = block(order[(place - lead - turn) % size])
        incoming = block(order[(place - lead - turn - 1) % size])
        yield Step(sends=(Transfer(after, outgoing),), recvs=(Transfer(before, incoming, reduce),))


ALLREDUCE = Algorithm(
    name="ring",
    collective=Collective.ALLREDUCE,
    summary="passes blocks around a ring, twice; wins for large buffers on few or moderately many ranks",
    steps=_allreduce,
    cost=lambda topology: Cost(steps=2 * (topology.size - 1), sent=2 * (topology.size - 1) / topology.size),
)

_once = partial(
    Algorithm,
    name="ring",
    cost=lambda topology: Cost(steps=topology.size - 1, sent=(topology.size - 1) / topology.size),
)

ALGORITHMS = (
    ALLREDUCE,
    _once(
        collective=Collective.REDUCE_SCATTER,
        summary="passes partial sums around a ring; wins for large buffers",
        steps=_reduce_scatter,
    ),
    _once(
        collective=Collective.ALLGATHER,
        summary="passes blocks around a ring; wins for large buffers",
        steps=_allgather,
    ),
)
