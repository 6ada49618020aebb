"""Double binary tree: two trees reduce and spread half of the buffer each; inner ranks of one are leaves in the other.

Literature: two-tree algorithm: Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", Parallel Computing 35 (2009), doi:10.1016/j.parco.2009.09.001.
Restrictions: none. The trees are laid along the nodes, so that most edges stay inside them.
Non-power-of-two: any P: a child that would be beyond the last place is replaced by the first of its left descendants
    that does not. The second tree is the first one mirrored (even P) or moved on by one place (odd P): nobody is
    inner in both.
Cost, with H = floor(lg P): 2H alpha + 2 H n beta + H n gamma, as two children deliver or are sent n/2 each; over many
    small buffers that follow each other through the trees 2n beta remain: the busiest rank sends 2n (P >= 4) in all.
Bits: the root of each tree completes its half and hands it out: equal on all ranks.

7 ranks; with 4 ranks only places 0 to 3 exist, and 3 is the root:

            3              level 2
        1       5          level 1
      0   2   4   6        level 0     a rank of level k sends up in round k, and is sent to in round 2H - 1 - k
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringreduce.algorithms.patterns import block, floor_log2, node_order
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology


def _steps(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    order = node_order(topology)
    size = len(order)
    second = order[::-1] if size % 2 == 0 else (*order[1:], order[0])
    rounds = 2 * floor_log2(size)
    sends: list[list[Transfer]] = [[] for _ in range(rounds)]
    recvs: list[list[Transfer]] = [[] for _ in range(rounds)]
    for tree, places in enumerate((order, second)):
        for child, parent, level in _edges(places, rank):
            up, down = level, rounds - 1 - level
            if rank == child:
                sends[up].append(Transfer(parent, block(tree)))
                recvs[down].append(Transfer(parent, block(tree)))
            else:
                recvs[up].append(Transfer(child, block(tree), reduce=True))
                sends[down].append(Transfer(child, block(tree)))
    for outgoing, incoming in zip(sends, recvs, strict=True):
        yield Step(sends=tuple(outgoing), recvs=tuple(incoming))


def _edges(places: Sequence[int], rank: int) -> Iterator[tuple[int, int, int]]:
    """Yield ``(child, parent, level of the child)`` for the edges of the tree over ``places`` that end at ``rank``."""
    for place, child in enumerate(places):
        above = _parent(place, len(places))
        if above is not None and rank in (child, places[above]):
            yield child, places[above], _level(place)


def _level(place: int) -> int:
    """Return the height of ``place`` in the tree that is numbered from left to right: every other place is a leaf."""
    number = place + 1
    return floor_log2(number & -number)


def _parent(place: int, size: int) -> int | None:
    """Return the place above, None for the root: one level up, or further where that is beyond the last place."""
    for level in range(_level(place), floor_log2(size)):
        above = (place + 1 >> level + 1 | 1) << level + 1
        if above <= size:
            return above - 1
    return None


def _cost(topology: Topology) -> Cost:
    # From 4 ranks on some rank is inner in one tree and not its root: it sends its half up and down to two children,
    # and its half of the other tree up. The root alone (3 ranks) does not send up, with 2 ranks it has one child.
    sent = {1: 0.0, 2: 1.0, 3: 1.5}.get(topology.size, 2.0)
    return Cost(steps=2 * floor_log2(topology.size), sent=sent)


ALLREDUCE = Algorithm(
    name="double_tree",
    collective=Collective.ALLREDUCE,
    summary="reduces one half of the buffer over each of two trees; wins for small and middle sizes on many ranks",
    steps=_steps,
    nblocks=lambda topology: 2,
    cost=_cost,
)
