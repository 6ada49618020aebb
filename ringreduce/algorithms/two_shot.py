"""Two-shot over shared memory, and the other collectives that need no more than loads from peers' memory.

Literature: zero-copy two-shot, in place; the shared-memory relative of direct reduce-scatter and allgather. Every
    byte of every buffer is read once and written once, which is the least that any allreduce can do.
Restrictions: all ranks on one node, in buffers that all of them have mapped.
Non-power-of-two: nothing special; any P, and blocks may differ in size or be empty.
Cost, with sigma a barrier and mu the time to read or write one byte: two_shot 2 sigma + 2n mu + n (P-1)/P gamma, and of
    these 2n bytes 2n (P-1)/P are peers'; load: reduce_scatter 2 sigma + n mu + n (P-1)/P gamma, allgather, broadcast
    and alltoall 2 sigma + 2n mu. To a root: two_shot reduce 2 sigma + n (1 + 1/P) mu + n (P-1)/P gamma, load reduce
    2 sigma + n P mu + n (P-1) gamma on the root alone, gather 2 sigma + 2n mu, scatter 2 sigma + 2n/P mu.
Bits: one rank reduces each block, adding in the order of ranks, 0 first (`Step.by_rank`): equal on all ranks,
    independent of how the buffer is cut, and equal to those of one_shot and direct.
Races: block b of every buffer is touched by rank b and by nobody else, so one barrier before and one after are enough.
    (In load of gather and reduce the root touches all of them, and nobody else does.)

4 ranks, who touches what in two_shot (all columns at once):

    buffer of    b0   b1   b2   b3
          r0     r0   r1   r2   r3     rank b loads block b of all four buffers,
          r1     r0   r1   r2   r3     reduces, and stores the result into all four
          r2     r0   r1   r2   r3
          r3     r0   r1   r2   r3
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ringreduce.algorithms.patterns import block, moves, one_node_only, peers_after
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Step, Transfer
from ringreduce.common.topology import Topology


def _load_own(rank: int, topology: Topology, stores: tuple[Transfer, ...] = (), own: int | None = None) -> Step:
    """Reduce this rank's block, or block ``own``, out of the memory of all."""
    mine = block(rank if own is None else own)
    loads = tuple(Transfer(peer, mine, reduce=True) for peer in sorted(peers_after(rank, topology.order)))
    return Step(loads=loads, stores=stores, by_rank=True)


def _allreduce(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    peers = peers_after(rank, topology.order)
    yield _load_own(rank, topology, tuple(Transfer(peer, block(rank)) for peer in peers))


def _reduce_scatter(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    yield _load_own(rank, topology)


def _allgather(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    peers = peers_after(rank, topology.order)
    yield Step(loads=tuple(Transfer(peer, block(peer)) for peer in peers))


def _broadcast(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    if rank != root:
        yield Step(loads=(Transfer(root, block(0)),))


def _alltoall(rank: int, topology: Topology, root: int = 0) -> Iterator[Step]:
    peers = peers_after(rank, topology.order)
    loads = (Transfer(peer, block(topology.size + peer), peer_blocks=block(rank)) for peer in peers)
    yield Step(loads=tuple(loads))


def _reduce(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    yield _load_own(rank, topology, () if rank == root else (Transfer(root, block(rank)),))


def _reduce_by_root(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    if rank == root:
        yield _load_own(rank, topology, own=0)


def _gather(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    if rank == root:
        yield from _allgather(rank, topology)


def _scatter(rank: int, topology: Topology, root: int) -> Iterator[Step]:
    if rank != root:
        yield Step(loads=(Transfer(root, block(rank)),))


_two_shot = partial(Algorithm, name="two_shot", refuses=one_node_only)

_load = partial(
    Algorithm,
    name="load",
    cost=lambda topology: Cost(steps=moves(topology), touched=(topology.size - 1) / topology.size),
    refuses=one_node_only,
)

ALGORITHMS = (
    _two_shot(
        collective=Collective.ALLREDUCE,
        summary="reduces block b on rank b in peers' memory, without a copy; wins on one node from some KiB up",
        steps=_allreduce,
        cost=lambda topology: Cost(steps=moves(topology), touched=2 * (topology.size - 1) / topology.size),
    ),
    _load(
        collective=Collective.REDUCE_SCATTER,
        summary="loads and reduces one's own block from peers' memory; wins on one node",
        steps=_reduce_scatter,
    ),
    _load(
        collective=Collective.ALLGATHER,
        summary="loads every block from its owner's memory; wins on one node",
        steps=_allgather,
    ),
    _load(
        collective=Collective.BROADCAST,
        summary="loads everything from the root's memory; wins on one node",
        steps=_broadcast,
        nblocks=lambda topology: 1,
        cost=lambda topology: Cost(steps=moves(topology), touched=moves(topology)),
    ),
    _load(
        collective=Collective.ALLTOALL,
        summary="loads one's block from every peer's memory; wins on one node",
        steps=_alltoall,
        nblocks=lambda topology: 2 * topology.size,
    ),
    _load(
        collective=Collective.REDUCE,
        summary="the root loads and reduces everything from peers' memory; wins on one node for small buffers",
        steps=_reduce_by_root,
        nblocks=lambda topology: 1,
        cost=lambda topology: Cost(steps=moves(topology), touched=topology.size - 1),
    ),
    _two_shot(
        collective=Collective.REDUCE,
        summary="reduces block b on rank b, right into the root's memory; wins on one node from some KiB up",
        steps=_reduce,
        cost=lambda topology: Cost(steps=moves(topology), touched=moves(topology)),
    ),
    _load(
        collective=Collective.GATHER,
        summary="the root loads every block from its owner's memory; wins on one node",
        steps=_gather,
    ),
    _load(
        collective=Collective.SCATTER,
        summary="loads one's own block from the root's memory; wins on one node",
        steps=_scatter,
        cost=lambda topology: Cost(steps=moves(topology), touched=moves(topology) / topology.size),
    ),
)
