"""Recursive doubling: in round k ranks at distance 2**k exchange all they have and both reduce it.

Literature: recursive doubling: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
    MPICH", Int. J. High Perform. Comput. Appl. 19 (2005), doi:10.1177/1094342005051521.
Restrictions: none. Distances count in ranks, also where nodes interleave: partners must order their terms alike.
Non-power-of-two: of 2**k + e ranks, e hand their buffer to a neighbour before and are given the result after
    (`patterns.folded`): two more steps.
Cost, with k = floor(lg P): k (alpha + n beta + n gamma); not a power of two: + 2 alpha + 2n beta + n gamma, of which
    the busiest rank sends n.
Bits: partners combine the same two partial sums, the lower rank's first (`Step.by_rank`): equal on all ranks for every
    operation, and equal to those of halving-doubling where nodes do not interleave.

4 ranks, what each holds (01 = sum over ranks 0 and 1):

    before     0     1     2     3
               |  x  |     |  x  |      round 1: distance 1
              01    01    23    23
               |_____ x ___|            round 2: distance 2 (0 with 2, 1 with 3)
             0123  0123  0123  0123
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ringreduce.algorithms.patterns import block, floor_log2, folded
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology

_WHOLE = block(0)


def _steps(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    return folded(rank, range(topology.size), _WHOLE, core_steps=_core_steps)


def _core_steps(place: int, size: int, rank_at: Callable[[int], int]) -> Iterator[Step]:
    for k in range(floor_log2(size)):
        peer = rank_at(place ^ (1 << k))
        yield Step(sends=(Transfer(peer, _WHOLE),), recvs=(Transfer(peer, _WHOLE, reduce=True),), by_rank=True)


def _cost(topology: Topology) -> Cost:
    k = floor_log2(topology.size)
    uneven = topology.size != 1 << k
    return Cost(steps=k + 2 * uneven, sent=k + uneven)


ALLREDUCE = Algorithm(
    name="recursive_doubling",
    collective=Collective.ALLREDUCE,
    summary="exchanges whole buffers at distances 1, 2, 4, ...; wins for small buffers",
    steps=_steps,
    nblocks=lambda topology: 1,
    cost=_cost,
)
