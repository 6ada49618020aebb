"""From one rank to all and back, by messages: binomial tree, chain and direct; in shared memory see two_shot and load.

Literature: binomial tree, and reduce-scatter followed by a gather: Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005),
    doi:10.1177/1094342005051521; pipelined chain (linear tree): Patarasuk, Yuan and Faraj, "Techniques for pipelined
    broadcast on Ethernet switched clusters", J. Parallel Distrib. Comput. 68 (2008).
Restrictions: none; any root. Ranks are counted along the nodes, from the root on. In the tree the longest distances
    come first, so that subtrees are neighbours and few messages leave a node; in the chain one enters and one leaves.
    The blocks of a subtree are a few runs of consecutive ranks, each a message.
Non-power-of-two: any P; peers beyond the last rank do not exist, and the last subtree may be smaller.
Cost, with o the overhead of posting one message: broadcast binomial ceil(lg P) (alpha + n beta), and the root sends to
    ceil(lg P) ranks; chain (P-1) (alpha + n beta) for one segment, but segments follow each other, so that S of them
    take (S + P-2) (alpha + n/S beta). Reduce the same with beta + gamma for beta, and direct 2 alpha + 2 (P-1) o
    + 2n (P-1)/P beta + n (P-1)/P gamma, as the root receives that much in each of its two steps. Gather and scatter
    direct alpha + (P-1) o + n (P-1)/P beta, binomial ceil(lg P) alpha + n (P-1)/P beta: either way all but one block
    crosses the link of the root, which bounds both.
Bits: only the root has the sum. In direct the owner of a block adds in the order of ranks, 0 first (`Step.by_rank`):
    the bits are those of direct, one_shot and two_shot of allreduce.

4 ranks, root 0, broadcast and scatter (reduce and gather are the same backwards):

    binomial                            chain
    r0 -- step 1 --> r2 -- step 2 --> r3    r0 -- step 1 --> r1 -- step 2 --> r2 -- step 3 --> r3
     '--- step 2 --> r1

    direct scatter: r0 -> r1[b1],  r0 -> r2[b2],  r0 -> r3[b3],  all at once
    direct reduce: block b of every rank  ->  rank b, which reduces;   block b of rank b  ->  r0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ringreduce.algorithms import pairs
from ringreduce.algorithms.patterns import block, ceil_log2, from_root, moves
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Steps, Transfer
from ringreduce.common.topology import Topology


def _binomial(rank: int, topology: Topology, root: int, *, whole: bool = True) -> Iterator[Step]:
    """Hand the whole buffer, or a subtree's blocks, down the tree."""
    order = from_root(topology, root)
    place = order.index(rank)
    for k in reversed(range(ceil_log2(topology.size))):
        distance = 1 << k
        if place % (2 * distance) == distance:
            yield Step(recvs=_subtree(order, place, distance, peer=order[place - distance], whole=whole))
        elif place % (2 * distance) == 0 and place + distance < topology.size:
            yield Step(sends=_subtree(order, place + distance, distance, peer=order[place + distance], whole=whole))


def _subtree(order: Sequence[int], place: int, count: int, peer: int, whole: bool) -> tuple[Transfer, ...]:
    """Return the transfers of the blocks of ``count`` ranks from a place on: one for each run of consecutive ranks."""
    if whole:
        return (Transfer(peer, block(0)),)
    ranks = sorted(order[place : place + count])
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    stops = [rank + 1 for rank in ranks if rank + 1 not in ranks]
    return tuple(Transfer(peer, range(start, stop)) for start, stop in zip(starts, stops, strict=True))


def _scatter_binomial(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    return _binomial(rank, topology, root, whole=False)


def _chain(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order = from_root(topology, root)
    place = order.index(rank)
    if place > 0:
        yield Step(recvs=(Transfer(order[place - 1], block(0)),))
    if place + 1 < topology.size:
        yield Step(sends=(Transfer(order[place + 1], block(0)),))


def _scatter_direct(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    if rank == root:
        yield Step(sends=tuple(Transfer(peer, block(peer)) for peer in from_root(topology, root)[1:]))
    else:
        yield Step(recvs=(Transfer(root, block(rank)),))


def _backwards(forwards: Steps, *, reduce: bool = False) -> Steps:
    """Return the steps that bring to the root what others bring from it, reduced on the way or not."""

    def steps(rank: int, topology: Topology, root: int) -> Iterator[Step]:
        for step in reversed(tuple(forwards(rank, topology, root))):
            yield Step(sends=step.recvs, recvs=tuple(replace(transfer, reduce=reduce) for transfer in step.sends))

    return steps


_gather_direct = _backwards(_scatter_direct)


def _reduce_direct(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    yield from pairs.reduce_scatter(rank, topology, root)
    yield from _gather_direct(rank, topology, root)


def _one_block(topology: Topology) -> int:
    return 1


def _largest_subtree(topology: Topology) -> int:
    """Return how many blocks the rank hands on that hands on most, but for the root."""
    size = topology.size
    half = (1 << ceil_log2(topology.size)) // 2
    return max(size - half, half // 2) if size > 1 else 0


REDUCE_BINOMIAL = Algorithm(
    name="binomial",
    collective=Collective.REDUCE,
    summary="halves the number of ranks that have partial sums in every step; wins across nodes for small buffers",
    steps=_backwards(_binomial, reduce=True),
    nblocks=_one_block,
    cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=moves(topology)),
)

REDUCE_CHAIN = Algorithm(
    name="chain",
    collective=Collective.REDUCE,
    summary="adds up from rank to rank, segment by segment; wins across nodes for large buffers",
    steps=_backwards(_chain, reduce=True),
    nblocks=_one_block,
    cost=lambda topology: Cost(steps=topology.size - 1, sent=moves(topology)),
)

ALGORITHMS = (
    Algorithm(
        name="binomial",
        collective=Collective.BROADCAST,
        summary="doubles the number of ranks that have the data in every step; wins across nodes for small buffers",
        steps=_binomial,
        nblocks=_one_block,
        cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=ceil_log2(topology.size)),
    ),
    Algorithm(
        name="chain",
        collective=Collective.BROADCAST,
        summary="hands everything on from rank to rank, segment by segment; wins across nodes for large buffers",
        steps=_chain,
        nblocks=_one_block,
        cost=lambda topology: Cost(steps=topology.size - 1, sent=moves(topology)),
    ),
    REDUCE_BINOMIAL,
    REDUCE_CHAIN,
    Algorithm(
        name="direct",
        collective=Collective.REDUCE,
        summary="reduces block b on rank b, all pairs at once, then sends to the root; wins where bits must not vary",
        steps=_reduce_direct,
        cost=lambda topology: Cost(steps=2 * moves(topology), sent=moves(topology)),
    ),
    Algorithm(
        name="direct",
        collective=Collective.GATHER,
        summary="sends every block straight to the root; wins on up to some ten nodes",
        steps=_gather_direct,
        cost=lambda topology: Cost(steps=moves(topology), sent=moves(topology) / topology.size),
    ),
    Algorithm(
        name="binomial",
        collective=Collective.GATHER,
        summary="hands blocks on up a tree; wins on many nodes",
        steps=_backwards(_scatter_binomial),
        cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=_largest_subtree(topology) / topology.size),
    ),
    Algorithm(
        name="direct",
        collective=Collective.SCATTER,
        summary="sends every block straight from the root; wins on up to some ten nodes",
        steps=_scatter_direct,
        cost=pairs.one_step,
    ),
    Algorithm(
        name="binomial",
        collective=Collective.SCATTER,
        summary="hands blocks on down a tree; wins on many nodes",
        steps=_scatter_binomial,
        cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=(topology.size - 1) / topology.size),
    ),
)
