"""Peer and block arithmetic that several algorithms share; pure, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from ringreduce.algorithms.schedule import Step, Transfer
from ringreduce.common.topology import Topology


def block(index: int) -> range:
    """Return the range that holds just block ``index``."""
    return range(index, index + 1)


def floor_log2(number: int) -> int:
    """Return the largest k with ``2**k <= number``."""
    return number.bit_length() - 1


def ceil_log2(number: int) -> int:
    """Return the smallest k with ``2**k >= number``: the rounds of a binomial tree of so many ranks."""
    return (number - 1).bit_length()


def moves(topology: Topology) -> int:
    """Return 1 if anything has to move, and 0 for a rank that is alone."""
    return int(topology.size > 1)


def from_root(topology: Topology, root: int) -> tuple[int, ...]:
    """Return all ranks along the nodes, the root first."""
    start = topology.place_of(root)
    return (*topology.order[start:], *topology.order[:start])


def peers_after(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the others of ``ranks``, beginning after ``rank``: where all send at once, each begins elsewhere."""
    place = ranks.index(rank)
    return (*ranks[place + 1 :], *ranks[:place])


def one_node_only(topology: Topology) -> str | None:
    """Refuse (see `Algorithm.refuses`) where some ranks cannot touch each other's memory."""
    return None if topology.single_node else f"all ranks must share one node, but these are {topology.describe()}"


def folded(
    place: int,
    ranks: Sequence[int],
    blocks: range,
    core_steps: Callable[[int, int, Callable[[int], int]], Iterator[Step]],
) -> Iterator[Step]:
    """Carry an allreduce for a power of two of ranks to any number of them.

    With ``2**k + extra`` ranks the first ``2 * extra`` pair up. The second of each pair hands all its ``blocks`` to
    the first, sits out, and is given the result. The others, ``2**k`` of them in unchanged order, are the core.
    Adds two steps of all ``blocks`` where ``extra > 0``.

    Args:
        place: among ``ranks``, of the rank whose steps to return.
        ranks: all that take part, in the order that pairs them up.
        blocks: all blocks.
        core_steps: ``(place, size, rank_at) -> steps`` of the allreduce among the core: a place in it, how many ranks
            it has, and which rank is at a place.
    """
    size = 1 << floor_log2(len(ranks))
    extra = len(ranks) - size

    def rank_at(number: int) -> int:
        return ranks[2 * number if number < extra else number + extra]

    if place >= 2 * extra:
        yield from core_steps(place - extra, size, rank_at)
        return
    partner = ranks[place ^ 1]
    if place % 2:
        yield Step(sends=(Transfer(partner, blocks),))
        yield Step(recvs=(Transfer(partner, blocks),))
    else:
        yield Step(recvs=(Transfer(partner, blocks, reduce=True),), by_rank=True)
        yield from core_steps(place // 2, size, rank_at)
        yield Step(sends=(Transfer(partner, blocks),))


def relabelled(steps: Iterable[Step], ranks: Sequence[int], first_block: int) -> Iterator[Step]:
    """Carry steps over messages to a group of ranks and to a part of the buffer.

    Args:
        steps: steps of a schedule for ranks 0, 1, ... and blocks 0, 1, ...
        ranks: the rank that replaces each of these.
        first_block: the block that replaces block 0.
    """

    def carry(transfer: Transfer) -> Transfer:
        blocks = range(first_block + transfer.blocks.start, first_block + transfer.blocks.stop)
        return replace(transfer, peer=ranks[transfer.peer], blocks=blocks)

    for step in steps:
        assert not (step.loads or step.stores), "only messages can be carried to another group"
        yield replace(step, sends=tuple(map(carry, step.sends)), recvs=tuple(map(carry, step.recvs)))
