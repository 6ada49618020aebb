"""Halving-doubling: halve the buffer while distances double, then gather it back in reverse.

Literature: Rabenseifner's allreduce (reduce-scatter by vector halving and distance doubling, then allgather):
    Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, doi:10.1007/978-3-540-24685-5_1.
Restrictions: none. Distances count along the nodes, so that the largest messages stay inside them.
Non-power-of-two: of 2**k + e ranks, e hand their buffer to a neighbour before and are given the result after
    (`patterns.folded`): two more steps. Blocks may differ in size or be empty.
Cost, with k = floor(lg P) and p = 2**k: 2k alpha + 2n (p-1)/p beta + n (p-1)/p gamma; not a power of two: + 2 alpha
    + 2n beta + n gamma, of which the busiest rank sends n.
Bits: each block is completed on one rank and then copied: equal on all ranks. Terms are added in the order of recursive
    doubling (lower rank's first) whatever the block, so nothing depends on how the buffer is cut.

4 ranks, the blocks that each still reduces:

    before    0123  0123  0123  0123
    step 1    01..  ..23  01..  ..23     with distance 1
    step 2    0...  ..2.  .1..  ...3     with distance 2; steps 3 and 4 undo this, complete blocks instead of partial
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ringreduce.algorithms.patterns import floor_log2, folded
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology


def _steps(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    return folded(topology.place_of(rank), topology.order, range(_nblocks(topology)), core_steps=_core_steps)


def _core_steps(place: int, size: int, rank_at: Callable[[int], int]) -> Iterator[Step]:
    mine = range(size)
    halvings: list[tuple[int, range, range]] = []
    for k in range(floor_log2(size)):
        halves = mine[: len(mine) // 2], mine[len(mine) // 2 :]
        upper = place >> k & 1
        mine = halves[upper]
        theirs = halves[1 - upper]
        halvings.append((rank_at(place ^ (1 << k)), mine, theirs))
    for peer, mine, theirs in halvings:
        yield Step(sends=(Transfer(peer, theirs),), recvs=(Transfer(peer, mine, reduce=True),), by_rank=True)
    for peer, mine, theirs in reversed(halvings):
        yield Step(sends=(Transfer(peer, mine),), recvs=(Transfer(peer, theirs),))


def _nblocks(topology: Topology) -> int:
    return 1 << floor_log2(topology.size)


def _cost(topology: Topology) -> Cost:
    core = _nblocks(topology)
    uneven = topology.size != core
    return Cost(steps=2 * floor_log2(core) + 2 * uneven, sent=2 * (core - 1) / core + uneven)


ALLREDUCE = Algorithm(
    name="halving_doubling",
    collective=Collective.ALLREDUCE,
    summary="halves the buffer while distances double, then gathers; wins for middle and large sizes on many ranks",
    steps=_steps,
    nblocks=_nblocks,
    cost=_cost,
)
