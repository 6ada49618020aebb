"""Reductions to one rank by messages: a binomial tree, a chain, and direct; in shared memory see two_shot and load.

Literature: binomial tree, and reduce-scatter followed by a gather: Thakur, Rabenseifner and Gropp, "Optimization of
    collective communication operations in MPICH", Int. J. High Perform. Comput. Appl. 19 (2005),
    doi:10.1177/1094342005051521; the chain is the pipelined one of broadcast, run backwards.
Restrictions: none; any root. Ranks are counted along the nodes, from the root on, as in broadcast.
Non-power-of-two: any P; peers beyond the last rank do not exist.
Cost, with o the overhead of posting one message: binomial ceil(lg P) (alpha + n (beta + gamma)); chain
    (P-1) (alpha + n (beta + gamma)) for one segment, but segments follow each other, so that S of them take
    (S + P-2) (alpha + n/S (beta + gamma)); direct 2 alpha + 2 (P-1) o + 2n (P-1)/P beta + n (P-1)/P gamma, as the root
    receives that much in each of its two steps.
Bits: only the root has the result. In direct the owner of a block adds in the order of ranks, 0 first
    (`Step.by_rank`): the bits are those of direct, one_shot and two_shot of allreduce.

4 ranks, root 0:

    binomial                                chain
    r3 -- step 1 --> r2 -- step 2 --> r0    r3 -- step 1 --> r2 -- step 2 --> r1 -- step 3 --> r0
    r1 -- step 1 ---------------------^

    direct: block b of every rank  ->  rank b, which reduces;   block b of rank b  ->  r0
"""

from __future__ import annotations

from collections.abc import Iterator

from ringreduce.algorithms import direct
from ringreduce.algorithms.patterns import block, ceil_log2, from_root
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology

__all__ = ["BINOMIAL", "CHAIN", "DIRECT"]


def _binomial(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order, size = from_root(topology, root), topology.size
    place = order.index(rank)
    for k in range(ceil_log2(size)):
        distance = 1 << k
        if place % (2 * distance) == distance:
            yield Step(sends=(Transfer(order[place - distance], block(0)),))
        elif place % (2 * distance) == 0 and place + distance < size:
            yield Step(recvs=(Transfer(order[place + distance], block(0), reduce=True),))


def _chain(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    order = from_root(topology, root)
    place = order.index(rank)
    if place + 1 < topology.size:
        yield Step(recvs=(Transfer(order[place + 1], block(0), reduce=True),))
    if place > 0:
        yield Step(sends=(Transfer(order[place - 1], block(0)),))


def _direct(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    yield from direct.REDUCE_SCATTER.steps(rank, topology, root)
    if rank == root:
        peers = from_root(topology, root)[1:]
        yield Step(recvs=tuple(Transfer(peer, block(peer)) for peer in peers))
    else:
        yield Step(sends=(Transfer(root, block(rank)),))


BINOMIAL = Algorithm(
    name="binomial",
    collective=Collective.REDUCE,
    summary="halves the number of ranks that have partial sums in every step; wins across nodes for small buffers",
    steps=_binomial,
    nblocks=lambda topology: 1,
    cost=lambda topology: Cost(steps=ceil_log2(topology.size), sent=int(topology.size > 1)),
)

CHAIN = Algorithm(
    name="chain",
    collective=Collective.REDUCE,
    summary="adds up from rank to rank, segment by segment; wins across nodes for large buffers",
    steps=_chain,
    nblocks=lambda topology: 1,
    cost=lambda topology: Cost(steps=topology.size - 1, sent=int(topology.size > 1)),
)

DIRECT = Algorithm(
    name="direct",
    collective=Collective.REDUCE,
    summary="reduces block b on rank b, all pairs at once, then sends to the root; wins where bits must not vary",
    steps=_direct,
    cost=lambda topology: Cost(steps=2 * (topology.size > 1), sent=int(topology.size > 1)),
)
