"""Collectives on one node in which every rank loads what it needs from the inputs of the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Call, Operand, address_of, unowned
from ringreduce.collectives.call import Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.memory import Memory
from ringreduce.collectives.plan import Place, Plan
from ringreduce.collectives.rows import agreed_part, part_of, received_rows, rows_for
from ringreduce.collectives.two_shot import BINDINGS, NodeScratch, bind_on_node
from ringreduce.common.partition import Partition, Segment
from ringreduce.transport.shared.arena import MAILED, NOWHERE, Block
from ringreduce.transport.shared.board import MAILBOX_NBYTES, Arrival

__all__ = ["Loads"]

Array = npt.NDArray[Any]

#: Up to this size, a copy of the input into the mailbox costs less than the barrier that ends the loads of others. An
#: input in private memory is copied in any case, by the system at a price for each page: it is mailed if it fits.
_MAILED_NBYTES = 16 << 10


class _Layout(NamedTuple):
    """Where blocks are, once each rank knows how much the others give.

    Attributes:
        received: the rows that come from each rank; of a scatter, what `agreed_part` returns.
        own: what this rank copies from its input to its result: slices of both; None: nothing.
        mine: where blocks are in this rank's input, if they are reduced.
        result: where they are in its result.
        peers: by rank, (elements, blocks) of each input that this rank loads from.
    """

    received: list[int]
    own: tuple[slice, slice] | None
    mine: Segment
    result: Segment
    peers: Mapping[int, tuple[int, Segment]]


class _Bound(NamedTuple):
    """What a rank does once the ranks have met.

    Attributes:
        calls: what it does first.
        some_wait: whether a barrier follows: some rank must wait until the others have read its input where it is.
        after: what it does at the end.
    """

    calls: list[Call]
    some_wait: bool
    after: list[Call]


class Loads(Plan):
    """A collective for one array of this rank, and any result.

    Small inputs are in mailboxes; if all are, no rank has to wait until the others have read them.

    Args:
        context: the ranks.
        scratch: of the path.
        task: what to do.
        source: this rank's input; it is not kept.
        numbers: what this rank tells the others when they meet; empty: all ranks know all.
    """

    def __init__(
        self, context: Context, scratch: NodeScratch, task: Task, source: Operand, numbers: tuple[int, ...]
    ) -> None:
        self._context, self._scratch, self._task = context, scratch, task
        self._board, self._text = context.board, task.signature.text
        self._source = unowned(source.view, source.address)
        self._numbers, self._told = numbers, array("q", numbers)
        self._layouts: dict[tuple[int, ...], _Layout] = {}  # by what the others have told
        #: By the address of the result, the parity of the call, the places of the others and what they have told.
        self._bound: dict[tuple[int, ...], _Bound] = {}
        self._box: list[Array] = []
        place = MAILED
        if _is_read(task, context.rank):
            place = context.arena.place(source.address, source.nbytes)
            if source.nbytes <= (_MAILED_NBYTES if place >= 0 else MAILBOX_NBYTES):
                place = MAILED
                boxes = [self._board.mailboxes(parity, self._source.dtype, self._source.shape) for parity in (0, 1)]
                self._box = [each[self._board.index] for each in boxes]
        self._arrival = Arrival(self._text, task.signature.code, place)

    def run(self, source: Operand, place: Place) -> None:
        mine, copied = self._arrival, None
        if self._box:
            self._box[self._board.number + 1 & 1][...] = self._source
        elif mine.source == NOWHERE:
            copied = self._copied()
            mine = mine._replace(source=copied.location.packed)
        try:
            self._carry_out(place, mine)
        finally:
            if copied is not None:
                self._context.arena.release(copied)

    def _carry_out(self, place: Place, mine: Arrival) -> None:
        board, instruments, telling = self._board, self._context.instruments, self._told
        if telling:
            board.say(telling)
        others = board.arrive(mine)
        told = (*board.said(len(telling)),) if telling else ()
        layout = self._layouts.get(told)
        if layout is None:
            layout = self._lay_out(told)
        if instruments.observers:
            instruments.step("publish and meet")
        target = place(layout.received)
        key = (target.address, board.number & 1, *others, *told)
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bind(layout, key, target, mine.source)
        for call in bound.calls:
            call()
        if instruments.observers:
            instruments.step("load")
        if bound.some_wait:  # this rank waits only if others read its input where it is
            board.barrier(self._text, wait=mine.source != MAILED)
            if instruments.observers:
                instruments.step("barrier")
        for call in bound.after:
            call()

    def close(self) -> None:
        """Forget what was bound; to run it again binds again."""
        self._layouts.clear()
        self._bound.clear()

    def _lay_out(self, told: tuple[int, ...]) -> _Layout:
        """Return where blocks are, given what the others have told; remember it."""
        count = len(self._numbers)
        everyone: list[tuple[int, ...]] = []
        if count:
            everyone = [told[start : start + count] for start in range(0, len(told), count)]
            everyone.insert(self._context.rank, self._numbers)
        if len(self._layouts) >= BINDINGS:
            self._layouts.clear()
        lay_out = _LAYOUTS[self._task.problem.collective]
        self._layouts[told] = lay_out(self._task, self._context.rank, self._source.size, everyone)
        return self._layouts[told]

    def _copied(self) -> Block:
        arena = self._context.arena
        block = arena.allocate(self._source.nbytes)
        np.copyto(arena.view(block.location, self._source.dtype, self._source.size), self._source)
        return block

    def _bind(self, layout: _Layout, key: tuple[int, ...], target: Operand, published: int) -> _Bound:
        """Bind what loads into a target; remember it under ``key``."""
        context, board = self._context, self._board
        source, result = self._source, unowned(target.view, target.address)
        after: list[Call] = []
        own = None if layout.own is None else (source[layout.own[0]], result[layout.own[1]])
        in_its_place = own is not None and address_of(own[0]) == address_of(own[1])
        if own is not None and published != MAILED and not in_its_place and np.may_share_memory(source, result):
            # The others still read what this rank would overwrite.
            final, result = result, np.empty_like(result)
            after.append(partial(np.copyto, final, result))
            own = None if layout.own is None else (source[layout.own[0]], result[layout.own[1]])
        places = dict(zip(board.peers, key[2 : 2 + 2 * len(board.peers) : 2], strict=True))
        peers: dict[int, Any] = {}
        present: list[Call] = []
        for peer, (size, _) in layout.peers.items():
            if places[peer] == MAILED:
                peers[peer] = board.mailboxes(key[1], source.dtype, (size,))[board.members.index(peer)]
            else:
                peers[peer] = context.arena.at(peer, places[peer], source.dtype, size)
                if published == MAILED:  # no barrier shows that a peer has given up meanwhile
                    present.append(partial(board.require_present, board.peers.index(peer), self._text))
        calls: list[Call] = []
        if own is not None and own[0].size and not in_its_place:
            calls.append(partial(np.copyto, own[1], own[0]))
        memory = Memory(
            source,
            peers,
            {peer: [blocks] for peer, (_, blocks) in layout.peers.items()},
            result=result,
            result_segments=[layout.result],
            copies=self._scratch.copies,
        )
        algorithm = self._task.choice.algorithm
        calls += bind_on_node(context, self._scratch, self._task, algorithm, layout.mine, memory)
        if len(self._bound) >= BINDINGS:
            self._bound.clear()
        some_wait = any(place != MAILED for place in (published, *places.values()))
        bound = self._bound[key] = _Bound(calls + present, some_wait, after)
        return bound


def _is_read(task: Task, rank: int) -> bool:
    """Return whether other ranks load from this rank's input."""
    collective = task.problem.collective
    if collective in (Collective.BROADCAST, Collective.SCATTER):
        return rank == task.root
    return not collective.rooted or rank != task.root


def _lay_out_broadcast(task: Task, rank: int, count: int, _: Sequence[tuple[int, ...]]) -> _Layout:
    whole, root = slice(0, count), task.root
    peers = {} if rank == root else {root: (count, (whole,))}
    return _Layout([], (whole, whole) if rank == root else None, (whole,), (whole,), peers)


def _lay_out_reduce(task: Task, rank: int, count: int, _: Sequence[tuple[int, ...]]) -> _Layout:
    whole, root = slice(0, count), task.root
    if rank != root:
        return _Layout([], None, (whole,), (slice(0, 0),), {})
    peers = {peer: (count, (whole,)) for peer in range(task.problem.topology.size) if peer != root}
    return _Layout([], None, (whole,), (whole,), peers)


def _lay_out_reduce_scatter(task: Task, rank: int, count: int, _: Sequence[tuple[int, ...]]) -> _Layout:
    blocks = Partition.of_sizes(task.counts).segment
    result = tuple(slice(0, each if block == rank else 0) for block, each in enumerate(task.counts))
    peers = {peer: (count, blocks) for peer in range(len(task.counts)) if peer != rank}
    return _Layout([], None, blocks, result, peers)


def _lay_out_allgather(task: Task, rank: int, _: int, told: Sequence[tuple[int, ...]]) -> _Layout:
    rows = received_rows(task.signature.text, told, rank)
    counts = [each * task.row for each in rows]
    result = Partition.of_sizes(counts).segment
    # A peer publishes its own block alone.
    peers = {peer: (count, (slice(0, count),) * len(counts)) for peer, count in enumerate(counts) if peer != rank}
    return _Layout(rows, (slice(0, counts[rank]), result[rank]), result, result, peers)


def _lay_out_gather(task: Task, rank: int, count: int, told: Sequence[tuple[int, ...]]) -> _Layout:
    if rank == task.root:
        return _lay_out_allgather(task, rank, count, told)
    nothing = (slice(0, 0),) * len(told)
    return _Layout(received_rows(task.signature.text, told, task.root), None, nothing, nothing, {})


def _lay_out_scatter(task: Task, rank: int, _: int, told: Sequence[tuple[int, ...]]) -> _Layout:
    """Return where parts are, in bytes."""
    part = agreed_part(task.signature.text, told, task.root)
    shape, dtype = part_of(part)
    nbytes = prod(shape) * dtype.itemsize
    blocks = Partition.of_sizes([nbytes] * len(told)).segment
    result = tuple(slice(0, nbytes if block == rank else 0) for block in range(len(told)))
    if rank == task.root:
        return _Layout(part, (blocks[rank], slice(0, nbytes)), blocks, result, {})
    return _Layout(part, None, result, result, {task.root: (nbytes * len(told), blocks)})


def _lay_out_alltoall(task: Task, rank: int, _: int, told: Sequence[tuple[int, ...]]) -> _Layout:
    rows, ranks = received_rows(task.signature.text, told, rank), range(len(told))
    sending = [Partition.of_sizes([rows_for(each, to) * task.row for to in ranks]) for each in told]
    receiving = Partition.of_sizes([each * task.row for each in rows]).segment
    nothing = (slice(0, 0),) * len(told)
    peers = {peer: (sending[peer].bounds[-1], sending[peer].segment + nothing) for peer in ranks if peer != rank}
    own = sending[rank].segment[rank], receiving[rank]
    return _Layout(rows, own, nothing + receiving, nothing + receiving, peers)


_LAYOUTS: dict[Collective, Callable[[Task, int, int, Sequence[tuple[int, ...]]], _Layout]] = {
    Collective.BROADCAST: _lay_out_broadcast,
    Collective.REDUCE: _lay_out_reduce,
    Collective.REDUCE_SCATTER: _lay_out_reduce_scatter,
    Collective.ALLGATHER: _lay_out_allgather,
    Collective.GATHER: _lay_out_gather,
    Collective.SCATTER: _lay_out_scatter,
    Collective.ALLTOALL: _lay_out_alltoall,
}
