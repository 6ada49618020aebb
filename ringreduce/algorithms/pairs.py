"""All pairs of ranks exchange: at once (direct, one_shot), or one peer after the other (pairwise).

Literature: direct (linear, all-to-all) reduce-scatter and allgather, the two-shot of GPU libraries; allgather and local
    reduction, their one-shot; pairwise exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective
    communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
Restrictions: none, but each step of direct and one_shot posts P-1 messages per rank, which wants a network with full
    bisection, and in one_shot every rank receives (P-1) n bytes. Of alltoall blocks 0 .. P-1 are sent, blocks P .. 2P-1
    received; P + rank is the caller's to fill.
Non-power-of-two: nothing special; any P, and blocks may differ in size or be empty. In step s of pairwise a rank sends
    s places ahead and receives from s places behind.
Cost, with o the overhead of posting one message: reduce_scatter alpha + (P-1) o + n (P-1)/P (beta + gamma);
    allgather alpha + (P-1) o + n (P-1)/P beta; allreduce, the one after the other: 2 alpha + 2 (P-1) o
    + 2n (P-1)/P beta + n (P-1)/P gamma. one_shot alpha + n (P-1) (beta + gamma): the least latency there is. alltoall,
    with n the bytes to send, as allgather, and all P-1 messages of a rank are in flight together; pairwise
    (P-1) alpha + n (P-1)/P beta.
Bits: who reduces a block (in one_shot everybody, else its owner) adds in the order of ranks, 0 first (`Step.by_rank`):
    equal on all ranks, independent of how the buffer is cut, and equal to those of two_shot.

4 ranks:

    direct     step 1    block b of every rank  ->  rank b, which reduces
               step 2    block b of rank b      ->  every rank
    one_shot   step 1    r0 -> r1 r2 r3,  r1 -> r2 r3 r0,  r2 -> r3 r0 r1,  r3 -> r0 r1 r2,  all at once
    pairwise   step 1    r0 -> r1,  r1 -> r2,  r2 -> r3,  r3 -> r0
               step 2    r0 -> r2,  r1 -> r3,  r2 -> r0,  r3 -> r1
               step 3    r0 -> r3,  r1 -> r0,  r2 -> r1,  r3 -> r2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ringreduce.algorithms.patterns import block, moves, peers_after
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology


def _at_once(
    rank: int, topology: Topology, out: Callable[[int], int], into: Callable[[int], int], *, reduce: bool = False
) -> Step:
    """Send block ``out(peer)`` to each peer, and store or reduce what it sends in block ``into(peer)``."""
    peers = peers_after(rank, topology.order)
    return Step(
        sends=tuple(Transfer(peer, block(out(peer))) for peer in peers),
        recvs=tuple(Transfer(peer, block(into(peer)), reduce) for peer in (sorted(peers) if reduce else peers)),
        by_rank=reduce,
    )


def reduce_scatter(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    """Yield the one step in which each rank reduces its block."""
    yield _at_once(rank, topology, out=lambda peer: peer, into=lambda peer: rank, reduce=True)


def _allgather(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    yield _at_once(rank, topology, out=lambda peer: rank, into=lambda peer: peer)


def _allreduce(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    yield from reduce_scatter(rank, topology)
    yield from _allgather(rank, topology)


def _one_shot(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    yield _at_once(rank, topology, out=lambda peer: 0, into=lambda peer: 0, reduce=True)


def _alltoall(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    yield _at_once(rank, topology, out=lambda peer: peer, into=lambda peer: topology.size + peer)


def _pairwise(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    for step in _alltoall(rank, topology):
        for send, recv in zip(step.sends, reversed(step.recvs), strict=True):
            yield Step(sends=(send,), recvs=(recv,))


def one_step(topology: Topology) -> Cost:
    """Return the cost of a step in which the busiest rank sends all blocks but its own."""
    return Cost(steps=moves(topology), sent=(topology.size - 1) / topology.size)


ALLREDUCE = Algorithm(
    name="direct",
    collective=Collective.ALLREDUCE,
    summary="reduces block b on rank b, all pairs at once; wins for middle sizes on a good switch",
    steps=_allreduce,
    cost=lambda topology: Cost(steps=2 * moves(topology), sent=2 * (topology.size - 1) / topology.size),
)

ONE_SHOT = Algorithm(
    name="one_shot",
    collective=Collective.ALLREDUCE,
    summary="sends everything to everyone, everyone reduces; wins for tiny buffers on few ranks",
    steps=_one_shot,
    nblocks=lambda topology: 1,
    cost=lambda topology: Cost(steps=moves(topology), sent=topology.size - 1),
)

ALGORITHMS = (
    ALLREDUCE,
    Algorithm(
        name="direct",
        collective=Collective.REDUCE_SCATTER,
        summary="sends every block straight to its owner; wins for small and middle sizes",
        steps=reduce_scatter,
        cost=one_step,
    ),
    Algorithm(
        name="direct",
        collective=Collective.ALLGATHER,
        summary="sends every block straight to everyone; wins for small and middle sizes",
        steps=_allgather,
        cost=one_step,
    ),
    Algorithm(
        name="direct",
        collective=Collective.ALLTOALL,
        summary="exchanges with all peers at once; wins for small buffers",
        steps=_alltoall,
        nblocks=lambda topology: 2 * topology.size,
        cost=one_step,
    ),
    Algorithm(
        name="pairwise",
        collective=Collective.ALLTOALL,
        summary="exchanges with one peer after the other; wins for large buffers and busy networks",
        steps=_pairwise,
        nblocks=lambda topology: 2 * topology.size,
        cost=lambda topology: Cost(steps=topology.size - 1, sent=(topology.size - 1) / topology.size),
    ),
)
