"""All-to-all: pairwise exchange, one peer after the other, or direct, all peers at once.

Literature: pairwise exchange: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
Restrictions: none. Blocks 0 .. P-1 are sent, blocks P .. 2P-1 received; P + rank is the caller's to fill.
Non-power-of-two: in step s a rank sends s places ahead and receives from s places behind, for any P.
Cost, with n the bytes to send and o the overhead of posting one message: pairwise (P-1) alpha + n (P-1)/P beta;
    direct alpha + (P-1) o + n (P-1)/P beta, but all P-1 messages of a rank are in flight together.

4 ranks, pairwise, whom r0 r1 r2 r3 send to:

    step 1   r1 r2 r3 r0
    step 2   r2 r3 r0 r1
    step 3   r3 r0 r1 r2
"""

from __future__ import annotations

from collections.abc import Iterator

from ringreduce.algorithms.patterns import block, node_order, peers_after
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology

__all__ = ["DIRECT", "PAIRWISE"]


def _exchanges(rank: int, topology: Topology) -> Iterator[tuple[Transfer, Transfer]]:
    """Yield what is sent 1, 2, ... places ahead and what is received from 1, 2, ... places behind."""
    ahead = peers_after(rank, node_order(topology))
    for target, source in zip(ahead, reversed(ahead), strict=True):
        yield Transfer(target, block(target)), Transfer(source, block(topology.size + source))


def _pairwise(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    for send, recv in _exchanges(rank, topology):
        yield Step(sends=(send,), recvs=(recv,))


def _direct(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    exchanges = tuple(_exchanges(rank, topology))
    yield Step(sends=tuple(send for send, _ in exchanges), recvs=tuple(recv for _, recv in exchanges))


PAIRWISE = Algorithm(
    name="pairwise",
    collective=Collective.ALLTOALL,
    summary="exchanges with one peer after the other; wins for large buffers and busy networks",
    steps=_pairwise,
    nblocks=lambda topology: 2 * topology.size,
    cost=lambda topology: Cost(steps=topology.size - 1, sent=(topology.size - 1) / topology.size),
)

DIRECT = Algorithm(
    name="direct",
    collective=Collective.ALLTOALL,
    summary="exchanges with all peers at once; wins for small buffers",
    steps=_direct,
    nblocks=lambda topology: 2 * topology.size,
    cost=lambda topology: Cost(steps=int(topology.size > 1), sent=(topology.size - 1) / topology.size),
)
