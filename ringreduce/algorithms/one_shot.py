"""One-shot: every rank sends its whole buffer to every other and reduces all of them itself.

Literature: allgather and local reduction; known as the one-shot of shared-memory and GPU libraries.
Restrictions: none, but every rank receives (P-1) n bytes.
Non-power-of-two: nothing special; any P.
Cost: alpha + n (P-1) (beta + gamma): the least latency there is.
Bits: every rank adds in the order of ranks, 0 first (`Step.by_rank`): equal on all ranks for every operation, and equal
    to those of direct and two_shot.

4 ranks: r0 -> r1 r2 r3,  r1 -> r2 r3 r0,  r2 -> r3 r0 r1,  r3 -> r0 r1 r2,  all at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringreduce.algorithms.patterns import block, node_order, peers_after
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology

__all__ = ["ALLREDUCE"]


def _steps(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    peers = peers_after(rank, node_order(topology))
    yield Step(
        sends=tuple(Transfer(peer, block(0)) for peer in peers),
        recvs=tuple(Transfer(peer, block(0), reduce=True) for peer in sorted(peers)),
        by_rank=True,
    )


ALLREDUCE = Algorithm(
    name="one_shot",
    collective=Collective.ALLREDUCE,
    summary="sends everything to everyone, everyone reduces; wins for tiny buffers on few ranks",
    steps=_steps,
    nblocks=lambda topology: 1,
    cost=lambda topology: Cost(steps=int(topology.size > 1), sent=topology.size - 1),
)
