"""The path through memory of the ranks of one node: each loads from the others, or stores to them.

Every rank publishes where its input and its result are. What is in the arena can be loaded from and stored to; what is
elsewhere can be copied, where the system allows that (`ringreduce.transport.shared.private`). Where it does not, inputs
are copied to the arena first, and large allreduces pass through the board's staging areas, piece by piece.

Plans are bound to addresses and keep no array alive: a plan runs only while the caller holds the arrays that are there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce import algorithms
from ringreduce.algorithms import Collective, Schedule
from ringreduce.buffers import Operand, address_of, unowned
from ringreduce.collectives.context import Context
from ringreduce.collectives.path import Again, Call, Offer, Path, Result, Task, part_agreed, part_told, rows_received
from ringreduce.collectives.plan import Memory, Plan
from ringreduce.collectives.two_shot import Scratch, ToRoot, TwoShotReduction
from ringreduce.common.partition import Partition, Segment
from ringreduce.transport.shared.arena import MAILED, NOWHERE, Block, Location
from ringreduce.transport.shared.board import MAILBOX_NBYTES, Arrival

__all__ = ["SharedMemory", "locate", "peer_views", "touches_memory"]

Array = npt.NDArray[Any]

#: Up to this size, to copy an input into the mailbox costs less than the barrier after which it may change again. What
#: lies in private memory is copied in any case, by the system at a price for each page: it is mailed if it fits.
_MAILED_NBYTES = 16 << 10
#: What a rank that only loads puts in.
_NOTHING = np.empty(0, np.uint8)
#: Results, or offers of the others, that a plan is bound to at once.
_BOUND = 64


class SharedMemory(Path):
    """Calls on one node by direct loads and stores."""

    transport = "shared"
    reduces_at_once = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._scratch = Scratch(context.topology.size)

    @classmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        return call.topology.single_node and touches_memory(algorithm, call)

    def allreduce(self, task: Task, shape: tuple[int, ...]) -> TwoShotReduction:
        # On one node the hierarchical algorithms are the two-shot, too.
        return TwoShotReduction(self._context, self._plans, self._scratch, task)

    def broadcast(self, task: Task, source: Array, target: Array, root: int) -> Again:
        rank, count = self._context.rank, source.size
        lay_out = partial(_broadcast_layout, rank, root, count)
        into = Operand(target, task.dtype)
        return self._run(
            Collective.BROADCAST, task, source, None, lay_out, lambda _: into, root=root, read=rank == root
        )

    def allgather(self, task: Task, source: Array, offer: Offer, row: int, result: Result) -> Again:
        lay_out = partial(_allgather_layout, task.signature.text, self._context.rank, row)
        return self._run(Collective.ALLGATHER, task, source, offer, lay_out, result)

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], target: Array) -> Again:
        lay_out = partial(_reduce_scatter_layout, self._context.rank, counts)
        return self._run(Collective.REDUCE_SCATTER, task, source, None, lay_out, lambda _: Operand(target, task.dtype))

    def reduce(self, task: Task, source: Array, target: Array | None, root: int) -> Again:
        context, count = self._context, source.size
        into = Operand(np.empty(0, source.dtype) if target is None else target, task.dtype)
        if task.algorithm != "load":  # on one node the hierarchical algorithms are the two-shot, too
            key = task.signature.code, address_of(source)
            to_root: ToRoot = self._plans.get(key, lambda: ToRoot(context, self._scratch, task, source, root))
            to_root.run(lambda _: into)
            return to_root.run
        lay_out = partial(_reduce_layout, context.rank, root, context.topology.size, count)
        return self._run(
            *(Collective.REDUCE, task, source, None, lay_out, lambda _: into), root=root, read=context.rank != root
        )

    def gather(self, task: Task, source: Array, offer: Offer, row: int, result: Result, root: int) -> Again:
        am_root, nothing = self._context.rank == root, Operand(np.empty(0, source.dtype), task.dtype)
        lay_out = partial(_gather_layout, task.signature.text, self._context.rank, root, row)
        into = result if am_root else lambda _: nothing
        return self._run(Collective.GATHER, task, source, offer, lay_out, into, root=root, read=not am_root)

    def scatter(self, task: Task, source: Array, offer: Offer, result: Result, root: int) -> Again:
        am_root = self._context.rank == root
        lay_out = partial(_scatter_layout, task.signature.text, self._context.rank, root)
        given = source if am_root else _NOTHING
        return self._run(Collective.SCATTER, task, given, offer, lay_out, result, root=root, read=am_root)

    def alltoall(self, task: Task, source: Array, offer: Offer, row: int, result: Result) -> Again:
        lay_out = partial(_alltoall_layout, task.signature.text, self._context.rank, row)
        return self._run(Collective.ALLTOALL, task, source, offer, lay_out, result)

    def _run(
        self,
        collective: Collective,
        task: Task,
        source: Array,
        offer: Offer | None,
        lay_out: Callable[[list[Offer]], _Layout],
        result: Result,
        *,
        root: int = 0,
        read: bool = True,
    ) -> Again:
        key = task.signature.code, address_of(source), source.size, offer
        schedule = self._context.schedule(collective, task.algorithm, root)
        loads: _Loads = self._plans.get(
            key, lambda: _Loads(self._context, self._scratch, schedule, task, source, offer, lay_out, read=read)
        )
        loads.run(result)
        return loads.run


class _Layout(NamedTuple):
    """Where blocks are, once the ranks know of each other how much there is.

    Attributes:
        received: the rows that come from each rank; of a scatter, what the part is.
        own: what this rank copies to its result by itself: slices of its input and of its result; None: nothing.
        mine: where blocks are in this rank's input, where some of them are reduced.
        result: where they are in its result.
        peers: (elements, blocks) of the inputs of the others that are loaded from.
        calls: what was bound: by the address of the result, whether the call is odd, and the places of the others.
    """

    received: list[int]
    own: tuple[slice, slice] | None
    mine: Segment
    result: Segment
    peers: Mapping[int, tuple[int, Segment]]
    calls: dict[tuple[int, ...], _Bound]


class _Bound(NamedTuple):
    """What a rank does once the ranks have met.

    Attributes:
        calls: what it does first.
        some_wait: whether some rank has to wait then until the others are done, as they read its input where it is.
        after: what it does in the end.
    """

    calls: list[Callable[[], object]]
    some_wait: bool
    after: list[Callable[[], object]]


class _Loads:
    """A collective in which every rank loads what it needs from the others' inputs, for one array of this rank.

    Small inputs are in mailboxes; if all are, nobody has to wait until the others have read them.

    Args:
        context: the ranks.
        scratch: of the path.
        schedule: this rank's.
        task: how.
        source: this rank's input; it is not kept.
        offer: what this rank tells the others when they meet; None: all ranks know all.
        lay_out: takes the offers of all ranks, in rank order, and returns where blocks are.
        read: whether other ranks load from this rank's input.
    """

    def __init__(
        self,
        context: Context,
        scratch: Scratch,
        schedule: Schedule,
        task: Task,
        source: Array,
        offer: Offer | None,
        lay_out: Callable[[list[Offer]], _Layout],
        *,
        read: bool,
    ) -> None:
        self._context = context
        self._scratch = scratch
        self._board = context.board
        self._task = task
        self._schedule = schedule
        self._text = task.signature.text
        self._source = unowned(source)
        self._offer = offer
        self._said = array("q", () if offer is None else (offer.room, *offer.rows))
        self._lay_out = lay_out
        self._layouts: dict[tuple[int, ...], _Layout] = {}  # by what the others have said
        self._box: tuple[Array, ...] | None = None
        place = MAILED
        if read:
            place = context.arena.place(address_of(source), source.nbytes)
            if source.nbytes <= (_MAILED_NBYTES if place >= 0 else MAILBOX_NBYTES):
                place = MAILED
                boxes = (self._board.mailboxes(parity, source.dtype, source.shape) for parity in (0, 1))
                self._box = tuple(each[self._board.index] for each in boxes)
        self._arrival = Arrival(task.signature.text, task.signature.code, place)

    def run(self, result: Result) -> None:
        """Carry it out."""
        mine, copied = self._arrival, None
        if self._box is not None:
            np.copyto(self._box[self._board.number + 1 & 1], self._source)
        elif mine.source == NOWHERE:
            copied = self._copied()
            mine = mine._replace(source=copied.location.packed)
        try:
            self._carry_out(result, mine)
        finally:
            if copied is not None:
                self._context.arena.release(copied)

    def _carry_out(self, result: Result, mine: Arrival) -> None:
        board, instruments, saying = self._board, self._context.instruments, self._said
        if saying:
            board.say(saying)
        others = board.arrive(mine)
        said = (*board.said(len(saying)),) if saying else ()
        layout = self._layouts.get(said)
        if layout is None:
            layout = self._layout(said)
        if instruments.observers:
            instruments.step("publish and meet")
        target = result(layout.received)
        key = (target.address, board.number & 1, *others)
        bound = layout.calls.get(key)
        if bound is None:
            bound = self._bind(layout, key, target.flat(), mine.source)
        for call in bound.calls:
            call()
        if instruments.observers:
            instruments.step("load")
        if bound.some_wait:  # this one, if others have read its input where it is
            board.barrier(self._text, wait=mine.source != MAILED)
            if instruments.observers:
                instruments.step("barrier")
        for call in bound.after:
            call()

    def close(self) -> None:
        """Forget what was bound; a caller who still holds this binds again."""
        self._layouts.clear()

    def _layout(self, said: tuple[int, ...]) -> _Layout:
        """Return where blocks are, after what the others have said; remember it."""
        offers: list[Offer] = []
        if self._offer is not None:
            count = len(self._said)
            offers = [Offer(said[start], said[start + 1 : start + count]) for start in range(0, len(said), count)]
            offers.insert(self._context.rank, self._offer)
        if len(self._layouts) >= _BOUND:
            self._layouts.clear()
        self._layouts[said] = self._lay_out(offers)
        return self._layouts[said]

    def _copied(self) -> Block:
        arena = self._context.arena
        block = arena.allocate(self._source.nbytes)
        np.copyto(arena.view(block.location, self._source.dtype, self._source.size), self._source)
        return block

    def _bind(self, layout: _Layout, key: tuple[int, ...], target: Array, published: int) -> _Bound:
        """Bind what loads into a target."""
        context, board, task = self._context, self._board, self._task
        source, result = self._source, unowned(target)
        after: list[Callable[[], object]] = []
        own = None if layout.own is None else (source[layout.own[0]], result[layout.own[1]])
        in_its_place = own is not None and address_of(own[0]) == address_of(own[1])
        if own is not None and published != MAILED and not in_its_place and np.may_share_memory(source, result):
            # The others still read what this rank would overwrite.
            final, result = result, np.empty_like(result)
            after.append(partial(np.copyto, final, result))
            own = None if layout.own is None else (source[layout.own[0]], result[layout.own[1]])
        places = dict(zip(board.peers, key[2::2], strict=True))
        peers: dict[int, Any] = {}
        present: list[Callable[[], object]] = []
        for peer, (size, _) in layout.peers.items():
            if places[peer] == MAILED:
                peers[peer] = board.mailboxes(key[1], source.dtype, (size,))[board.members.index(peer)]
            else:
                peers[peer] = context.arena.at(peer, places[peer], source.dtype, size)
                if published == MAILED:  # no barrier will show that one has left, and overwritten what was loaded
                    present.append(partial(board.require_present, board.peers.index(peer), self._text))
        calls: list[Callable[[], object]] = []
        if own is not None and own[0].size and not in_its_place:
            calls.append(partial(np.copyto, own[1], own[0]))
        calls += Plan(
            rank=context.rank,
            schedule=self._schedule,
            segments=[layout.mine],
            memory=Memory(
                source,
                peers,
                {peer: [blocks] for peer, (_, blocks) in layout.peers.items()},
                result=result,
                result_segments=[layout.result],
                copies=self._scratch.copies,
            ),
            kernels=self._scratch.kernels(task),
            messages=None,
            waiter=context.waiter,
            signature=self._text,
            instruments=context.instruments,
        ).calls
        if len(layout.calls) >= _BOUND:
            layout.calls.clear()
        some_wait = any(place != MAILED for place in (published, *places.values()))
        bound = layout.calls[key] = _Bound(calls + present, some_wait, after)
        return bound


def _broadcast_layout(rank: int, root: int, count: int, _: list[Offer]) -> _Layout:
    whole = slice(0, count)
    peers = {} if rank == root else {root: (count, (whole,))}
    return _Layout([], (whole, whole) if rank == root else None, (whole,), (whole,), peers, {})


def _reduce_scatter_layout(rank: int, counts: Sequence[int], _: list[Offer]) -> _Layout:
    blocks = Partition.of_sizes(counts).segment
    result = tuple(slice(0, count if block == rank else 0) for block, count in enumerate(counts))
    peers = {peer: (sum(counts), blocks) for peer in range(len(counts)) if peer != rank}
    return _Layout([], None, blocks, result, peers, {})


def _allgather_layout(signature: str, rank: int, row: int, offers: list[Offer]) -> _Layout:
    rows = rows_received(signature, offers, rank)
    counts = [each * row for each in rows]
    result = Partition.of_sizes(counts).segment
    # A peer publishes its own block alone.
    peers = {peer: (count, (slice(0, count),) * len(counts)) for peer, count in enumerate(counts) if peer != rank}
    return _Layout(rows, (slice(0, counts[rank]), result[rank]), result, result, peers, {})


def _gather_layout(signature: str, rank: int, root: int, row: int, offers: list[Offer]) -> _Layout:
    if rank == root:
        return _allgather_layout(signature, rank, row, offers)
    nothing = (slice(0, 0),) * len(offers)
    return _Layout(rows_received(signature, offers, root), None, nothing, nothing, {}, {})


def _scatter_layout(signature: str, rank: int, root: int, offers: list[Offer]) -> _Layout:
    """Return where parts are, in bytes."""
    part = part_agreed(signature, offers, root)
    shape, dtype = part_told(part)
    nbytes = prod(shape) * dtype.itemsize
    blocks = Partition.of_sizes([nbytes] * len(offers)).segment
    result = tuple(slice(0, nbytes if block == rank else 0) for block in range(len(offers)))
    if rank == root:
        return _Layout(part, (blocks[rank], slice(0, nbytes)), blocks, result, {}, {})
    return _Layout(part, None, result, result, {root: (nbytes * len(offers), blocks)}, {})


def _alltoall_layout(signature: str, rank: int, row: int, offers: list[Offer]) -> _Layout:
    rows = rows_received(signature, offers, rank)
    ranks = range(len(offers))
    sending = [Partition.of_sizes([each.rows_for(to) * row for to in ranks]) for each in offers]
    receiving = Partition.of_sizes([each * row for each in rows]).segment
    nothing = (slice(0, 0),) * len(offers)
    peers = {peer: (sending[peer].bounds[-1], sending[peer].segment + nothing) for peer in ranks if peer != rank}
    own = sending[rank].segment[rank], receiving[rank]
    return _Layout(rows, own, nothing + receiving, nothing + receiving, peers, {})


def _reduce_layout(rank: int, root: int, size: int, count: int, _: list[Offer]) -> _Layout:
    whole = slice(0, count)
    if rank != root:
        return _Layout([], None, (whole,), (slice(0, 0),), {}, {})
    return _Layout([], None, (whole,), (whole,), {peer: (count, (whole,)) for peer in range(size) if peer != root}, {})


def touches_memory(algorithm: str, call: Call) -> bool:
    """Return whether the algorithm loads from the memory of other ranks, or stores to it."""
    return algorithms.find(call.collective, algorithm).cost(call.topology).touched > 0


def locate(context: Context, operand: Operand) -> Location | None:
    """Return where the operand is in the arena, None if peers cannot reach it."""
    return context.arena.locate(operand.address, operand.nbytes) if operand.contiguous else None


def peer_views(context: Context, others: list[int], storage: np.dtype[Any], counts: Sequence[int]) -> dict[int, Array]:
    """Return the buffers of the other ranks of the node, by rank; ``counts``: the elements of every rank's."""
    return {
        peer: context.arena.peer_view(peer, Location.unpack(place), storage, counts[peer])
        for peer, place in zip(context.board.peers, others, strict=False)
    }
