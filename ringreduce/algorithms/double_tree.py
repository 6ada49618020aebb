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

from collections.abc import Iterator

from ringreduce.algorithms.patterns import block, floor_log2
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology


def _steps(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    order = topology.order
    size = topology.size
    place = topology.place_of(rank)
    rounds = 2 * floor_log2(size)
    sends: list[list[Transfer]] = [[] for _ in range(rounds)]
    recvs: list[list[Transfer]] = [[] for _ in range(rounds)]
    for tree in (0, 1):
        own = _in_tree(tree, place, size)
        above = _parent(own, size)
        if above is not None:
            parent = order[_in_tree(tree, above, size, back=True)]
            up = _level(own)
            sends[up].append(Transfer(parent, block(tree)))
            recvs[rounds - 1 - up].append(Transfer(parent, block(tree)))
        for below in _children(own, size):
            child = order[_in_tree(tree, below, size, back=True)]
            up = _level(below)
            recvs[up].append(Transfer(child, block(tree), reduce=True))
            sends[rounds - 1 - up].append(Transfer(child, block(tree)))
    for outgoing, incoming in zip(sends, recvs, strict=True):
        yield Step(sends=tuple(outgoing), recvs=tuple(incoming))


def _in_tree(tree: int, place: int, size: int, *, back: bool = False) -> int:
    """Return the place in a tree of what is at ``place`` along the nodes; ``back``: the inverse."""
    if tree == 0:
        return place
    return size - 1 - place if size % 2 == 0 else (place + (1 if back else -1)) % size


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


def _children(place: int, size: int) -> Iterator[int]:
    """Yield the places below, from left to right: those whose `_parent` this is."""
    number = place + 1
    level = _level(place)
    if level:
        yield place - (1 << level - 1)
    right = next((k for k in reversed(range(level)) if number + (1 << k) <= size), None)
    if right is not None:
        yield place + (1 << right)


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
