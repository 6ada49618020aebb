"""Direct: all pairs at once; rank b reduces block b and sends the result to everyone (the two-shot, as messages).

Literature: direct (linear, all-to-all) reduce-scatter and allgather; the two-shot of GPU libraries.
Restrictions: none, but each step posts P-1 messages per rank, which wants a network with full bisection.
Non-power-of-two: nothing special; any P, and blocks may differ in size or be empty.
Cost, with o the overhead of posting one message: reduce_scatter alpha + (P-1) o + n (P-1)/P (beta + gamma);
    allgather alpha + (P-1) o + n (P-1)/P beta; allreduce, the one after the other: 2 alpha + 2 (P-1) o
    + 2n (P-1)/P beta + n (P-1)/P gamma.
Bits: the owner of a block adds in the order of ranks, 0 first (`Step.by_rank`), and nobody else does: equal on all
    ranks, independent of how the buffer is cut, and equal to those of one_shot and two_shot.

4 ranks:
    step 1    block b of every rank  ->  rank b, which reduces
    step 2    block b of rank b      ->  every rank
"""

from __future__ import annotations

from collections.abc import Iterator

from ringreduce.algorithms.patterns import block, node_order, peers_after
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology

__all__ = ["ALLGATHER", "ALLREDUCE", "REDUCE_SCATTER"]


def _reduce_scatter(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    peers = peers_after(rank, node_order(topology))
    yield Step(
        sends=tuple(Transfer(peer, block(peer)) for peer in peers),
        recvs=tuple(Transfer(peer, block(rank), reduce=True) for peer in sorted(peers)),
        by_rank=True,
    )


def _allgather(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    peers = peers_after(rank, node_order(topology))
    yield Step(
        sends=tuple(Transfer(peer, block(rank)) for peer in peers),
        recvs=tuple(Transfer(peer, block(peer)) for peer in peers),
    )


def _allreduce(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    yield from _reduce_scatter(rank, topology)
    yield from _allgather(rank, topology)


def _one_step(topology: Topology) -> Cost:
    return Cost(steps=int(topology.size > 1), sent=(topology.size - 1) / topology.size)


def _two_steps(topology: Topology) -> Cost:
    return Cost(steps=2 * (topology.size > 1), sent=2 * (topology.size - 1) / topology.size)


ALLREDUCE = Algorithm(
    name="direct",
    collective=Collective.ALLREDUCE,
    summary="reduces block b on rank b, all pairs at once; wins for middle sizes on a good switch",
    steps=_allreduce,
    cost=_two_steps,
)

REDUCE_SCATTER = Algorithm(
    name="direct",
    collective=Collective.REDUCE_SCATTER,
    summary="sends every block straight to its owner; wins for small and middle sizes",
    steps=_reduce_scatter,
    cost=_one_step,
)

ALLGATHER = Algorithm(
    name="direct",
    collective=Collective.ALLGATHER,
    summary="sends every block straight to everyone; wins for small and middle sizes",
    steps=_allgather,
    cost=_one_step,
)
