"""Gather and scatter by messages: direct, all at once, and a binomial tree in the fewest rounds.

Literature: binomial tree: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
Restrictions: none; any root. Ranks are counted along the nodes, from the root on, as in broadcast; the blocks of a
    subtree are a few runs of consecutive ranks, each a message.
Non-power-of-two: any P; peers beyond the last rank do not exist, and the last subtree may be smaller.
Cost, with o the overhead of posting one message: direct alpha + (P-1) o + n (P-1)/P beta; binomial
    ceil(lg P) alpha + n (P-1)/P beta. Either way all but one block crosses the link of the root, which bounds both.

4 ranks, root 0, gather (scatter is the same backwards):

    direct     r1[b1] -> r0,  r2[b2] -> r0,  r3[b3] -> r0,  all at once
    binomial   step 1   r1[b1] -> r0,  r3[b3] -> r2
               step 2   r2[b2-3] -> r0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringreduce.algorithms.patterns import block, ceil_log2, from_root
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology

__all__ = ["GATHER_BINOMIAL", "GATHER_DIRECT", "SCATTER_BINOMIAL", "SCATTER_DIRECT"]


def _gather_direct(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    if rank == root:
        yield Step(recvs=tuple(Transfer(peer, block(peer)) for peer in from_root(topology, root)[1:]))
    else:
        yield Step(sends=(Transfer(root, block(rank)),))


def _scatter_direct(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    if rank == root:
        yield Step(sends=tuple(Transfer(peer, block(peer)) for peer in from_root(topology, root)[1:]))
    else:
        yield Step(recvs=(Transfer(root, block(rank)),))


def _gather_binomial(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order, size = from_root(topology, root), topology.size
    place = order.index(rank)
    for k in range(ceil_log2(size)):
        distance = 1 << k
        if place % (2 * distance) == distance:
            yield Step(sends=_subtree(order, place, distance, order[place - distance]))
        elif place % (2 * distance) == 0 and place + distance < size:
            yield Step(recvs=_subtree(order, place + distance, distance, order[place + distance]))


def _scatter_binomial(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order, size = from_root(topology, root), topology.size
    place = order.index(rank)
    for k in reversed(range(ceil_log2(size))):
        distance = 1 << k
        if place % (2 * distance) == distance:
            yield Step(recvs=_subtree(order, place, distance, order[place - distance]))
        elif place % (2 * distance) == 0 and place + distance < size:
            yield Step(sends=_subtree(order, place + distance, distance, order[place + distance]))


def _subtree(order: Sequence[int], place: int, count: int, peer: int) -> tuple[Transfer, ...]:
    """Return the transfers of the blocks of ``count`` ranks from a place on: one for each run of consecutive ranks."""
    ranks = sorted(order[place : place + count])
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    stops = [rank + 1 for rank in ranks if rank + 1 not in ranks]
    return tuple(Transfer(peer, range(start, stop)) for start, stop in zip(starts, stops, strict=True))


def _largest_subtree(topology: Topology) -> int:
    """Return how many blocks the rank hands on that hands on most, but for the root."""
    size, half = topology.size, (1 << ceil_log2(topology.size)) // 2
    return max(size - half, half // 2) if size > 1 else 0


GATHER_DIRECT = Algorithm(
    name="direct",
    collective=Collective.GATHER,
    summary="sends every block straight to the root; wins on up to some ten nodes",
    steps=_gather_direct,
    cost=lambda topology: Cost(steps=int(topology.size > 1), sent=(topology.size > 1) / topology.size),
)

GATHER_BINOMIAL = Algorithm(
    name="binomial",
    collective=Collective.GATHER,
    summary="hands blocks on up a tree; wins on many nodes",
    steps=_gather_binomial,
    cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=_largest_subtree(topology) / topology.size),
)

SCATTER_DIRECT = Algorithm(
    name="direct",
    collective=Collective.SCATTER,
    summary="sends every block straight from the root; wins on up to some ten nodes",
    steps=_scatter_direct,
    cost=lambda topology: Cost(steps=int(topology.size > 1), sent=(topology.size - 1) / topology.size),
)

SCATTER_BINOMIAL = Algorithm(
    name="binomial",
    collective=Collective.SCATTER,
    summary="hands blocks on down a tree; wins on many nodes",
    steps=_scatter_binomial,
    cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=(topology.size - 1) / topology.size),
)
