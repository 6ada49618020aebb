"""Allreduces on one node: by mailboxes, by loads and stores in the memory of all ranks, or through staging areas.

`OneShot` is for small arrays: they lie in mailboxes beside the flags of one barrier, and every rank reduces all.
`TwoShot` works in the arrays of all ranks: those in the arena are touched directly, those in private memory are copied
by the system. `StagedTwoShot` is for small private arrays, and for all where the system forbids such copies: pieces
pass through areas of the board, copied in, reduced and copied out while they are in the cache, a barrier for each.
`MailedPair` takes its place on a node of two ranks, up to the size of a mailbox: to read the other's whole array takes
as many bytes between the cores as to read half of it and half of the result, and no barrier.

`verify` proves the schedules of `one_shot` and `two_shot`, which say who reads what.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from ringreduce.buffers import Array, Call, Operand, copying, unowned
from ringreduce.buffers.kernels import Kernels
from ringreduce.collectives.call import Path, Task
from ringreduce.collectives.context import LINE_NBYTES, Context, NodePlan
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.collectives.plans.bound import BlockMemory
from ringreduce.common.partition import Partition
from ringreduce.transport.shared.arena import NOWHERE
from ringreduce.transport.shared.board import MAILBOX_NBYTES, STAGE_NBYTES, TURNS, Signature

#: Up to this size, to copy private arrays to where the others read, and from there, costs less than system calls.
_STAGED_NBYTES = 256 << 10
#: The same for a pair, if either the source or the target is private.
_HALF_MAILED_NBYTES = 64 << 10
#: A piece of a private buffer. Smaller ones would stay in L2, but a piece costs a barrier and some 10 us of Python;
#: from 256 KiB to 4 MiB this was the quickest, at all sizes.
_PIECE_NBYTES = STAGE_NBYTES


def plan_allreduce(context: Context, task: Task, source: Operand, target: Operand) -> BoundCall:
    """Find or make the plan of an allreduce on one node. It keeps neither source nor target alive."""
    arena = context.arena
    plans = context.plans
    code = task.signature.code
    count = source.view.size
    nbytes = target.nbytes
    if task.choice.path is Path.ONE_SHOT:
        return plans.get(("one_shot", code), lambda: OneShot(context, task, count))

    is_pair = len(context.board.members) == 2

    def staged() -> _ThroughBoard:  # It is kept, so it refers to no operand.
        kind = MailedPair if is_pair and nbytes <= MAILBOX_NBYTES else StagedTwoShot
        return plans.get(("staged", code), lambda: kind(context, task, count))

    in_place = source.address == target.address
    if nbytes <= _STAGED_NBYTES:
        reads_private = arena.locate(source.address, nbytes) == NOWHERE
        stores_private = reads_private if in_place else arena.locate(target.address, nbytes) == NOWHERE
        if reads_private and stores_private:
            return staged()
        if is_pair and nbytes <= _HALF_MAILED_NBYTES and (reads_private or stores_private):
            return staged()

    def make() -> BoundCall:
        taken = arena.place(target.address, nbytes)
        source_place = taken if in_place else arena.place(source.address, nbytes)
        if NOWHERE in (source_place, taken):
            return staged()
        return TwoShot(context, task, source, target=target, places=(source_place, taken), staged=staged)

    return plans.get(("two_shot", code, source.address, target.address), make)


class OneShot(BoundCall):
    """The allreduce of so many elements, in memory of any kind: every rank reduces all mailboxes, in rank order."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        self._board = context.board
        self._instruments = context.instruments
        self._entry = task.signature
        self._kernels = context.kernels(task.dtype, task.op, task.kind.weights)
        self._dtype = task.dtype.storage
        self._count = count
        self._turns: list[tuple[Array, Callable[[Array], object]] | None] = [None] * TURNS

    def run(self, source: Operand, place: Place) -> None:
        self.into_any(source)(place(()).view)

    def into_any(self, source: Operand) -> Callable[[Array], object]:
        board = self._board
        entry = self._entry
        instruments = self._instruments
        turns = self._turns
        bind = self._bind
        view = source.view

        def run(target: Array) -> None:
            number = board.number + 1
            mine, reduce = turns[number % TURNS] or bind(number)
            mine[...] = view
            board.enter(entry)
            observed = instruments.observers
            if observed:
                instruments.step("copy in, rendezvous")
            reduce(target)
            if observed:
                instruments.step("reduce")

        return run

    def _bind(self, number: int) -> tuple[Array, Callable[[Array], object]]:
        """Return this rank's mailbox in the call of this number, and what reduces all."""
        boxes = self._board.mailboxes(number, self._dtype, (self._count,))
        turn = boxes[self._board.index], self._kernels.combine(boxes)
        self._turns[number % TURNS] = turn
        return turn


class _Piece(NamedTuple):
    """A piece of the array, cut into a slice for each rank.

    Attributes:
        mine: the slice that this rank reduces.
        terms: what the ranks have staged of it, in rank order; this rank's is not used.
        result: where its result goes, for the others to fetch.
        given: (slice, this rank's stage) of what others reduce.
        taken: (slice, its owner's result) of the same.
    """

    mine: slice
    terms: list[Array]
    result: Array
    given: list[tuple[slice, Array]]
    taken: list[tuple[slice, Array]]


class _OnArrays(Protocol):
    """An allreduce through memory of the board, bound to the arrays of this rank."""

    def copy_in(self, number: int) -> None:
        """Copy what the other ranks read first, in the call of this number; may come before the rendezvous."""

    def run(self) -> None:
        """Reduce, once every rank has called `copy_in`."""


class _ThroughBoard(BoundCall):
    """The allreduce of so many elements in any private memory, through memory of the board."""

    def __init__(self, context: Context, task: Task) -> None:
        self._board = context.board
        self._context = context
        self._instruments = context.instruments
        self._signature = task.signature
        self._kernels = context.kernels(task.dtype, task.op, task.kind.weights)

    @abstractmethod
    def bind(self, source: Array, target: Array) -> _OnArrays:
        """Bind the reduction of ``source`` into ``target``: flat arrays, the same memory or apart."""

    def _meet(self) -> None:
        """Enter the call, once the own array is copied in; return when all ranks have copied theirs."""
        board = self._board
        for other in board.enter(self._signature):
            if other != NOWHERE:  # That rank copies its input only after the rendezvous.
                board.barrier(self._signature.text)
                break
        if self._instruments.observers:
            self._instruments.step("rendezvous")


class MailedPair(_ThroughBoard):
    """On a node of two ranks: each copies its array into a mailbox, and reduces both arrays."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        super().__init__(context, task)
        self._address = -1
        self._last: Callable[[Array], object] | None = None  # The copy from the last array, if it was at this address.

    def run(self, source: Operand, place: Place) -> None:
        self.into_any(source)(place(()).view)

    def into_any(self, source: Operand) -> Callable[[Array], object]:
        if self._last is not None and self._address == source.address:
            return self._last
        board = self._board
        given = unowned(source.view, source.address)
        mailed = _Mailed(self._context, self._kernels, given, target=given)
        meet = self._meet

        def run(target: Array) -> None:
            mailed.copy_in(board.number + 1)
            meet()
            mailed.reduce(target)

        self._last = run
        self._address = source.address
        return run

    def bind(self, source: Array, target: Array) -> _OnArrays:
        return _Mailed(self._context, self._kernels, source, target=target)

    def close(self) -> None:
        self._last = None


class _Mailed:
    """A `MailedPair` that is bound; the mailboxes of a call are read until both ranks have entered the next one."""

    def __init__(self, context: Context, kernels: Kernels, source: Array, target: Array) -> None:
        self._board = context.board
        self._instruments = context.instruments
        self._kernels = kernels
        self._source = source
        self._target = target
        self._turns: list[tuple[Array, Callable[[Array], object]] | None] = [None] * TURNS

    def copy_in(self, number: int) -> None:
        box, self._reduce = self._turns[number % TURNS] or self._bind(number)
        box[...] = self._source

    def run(self) -> None:
        self.reduce(self._target)

    def reduce(self, target: Array) -> None:
        """Reduce into a flat array, once both ranks have called `copy_in`."""
        self._reduce(target)
        if self._instruments.observers:
            self._instruments.step("reduce")

    def _bind(self, number: int) -> tuple[Array, Callable[[Array], object]]:
        """Return this rank's mailbox in the call of this number, and what reduces its array and the other's mailbox."""
        terms = self._board.mailboxes(number, self._source.dtype, self._source.shape)
        index = self._board.index
        box = terms[index]
        terms[index] = self._source
        turn = box, self._kernels.combine(terms)
        self._turns[number % TURNS] = turn
        return turn


class StagedTwoShot(_ThroughBoard):
    """By the staging areas: each rank reduces a slice of each piece, and fetches the results of the others."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        super().__init__(context, task)
        self._where = -1, -1
        self._last: _OnArrays | None = None  # Bound to the arrays at the last addresses.
        board = context.board
        self._pieces = []
        dtype = task.dtype.storage
        me = board.index
        areas = board.stages(dtype)
        length = _PIECE_NBYTES // dtype.itemsize
        for number, start in enumerate(range(0, count, length)):
            incoming = areas[number % 2]
            results = areas[2 + number % 2]
            places = Partition.even(min(length, count - start), len(incoming), align=16).segment
            own = places[me]
            piece = _Piece(
                slice(start + own.start, start + own.stop), terms=[], result=results[me][own], given=[], taken=[]
            )
            for rank, place in enumerate(places):
                piece.terms.append(incoming[rank][own])
                if rank != me and place.start < place.stop:
                    part = slice(start + place.start, start + place.stop)
                    piece.given.append((part, incoming[me][place]))
                    piece.taken.append((part, results[rank][place]))
            self._pieces.append(piece)

    def run(self, source: Operand, place: Place) -> None:
        target = place(())
        last = self._last
        where = source.address, target.address
        if last is None or where != self._where:
            into = unowned(target.view, target.address)
            given = into if source.address == target.address else unowned(source.view, source.address)
            last = self._last = self.bind(given, into)
            self._where = where
        last.copy_in(self._board.number + 1)
        self._meet()
        last.run()

    def bind(self, source: Array, target: Array) -> _OnArrays:
        me = self._board.index
        stages: list[list[Call]] = []
        rounds: list[tuple[list[Call], list[Call]]] = []
        for piece in self._pieces:
            stages.append([copying(stage, source[part]) for part, stage in piece.given])
            reduces: list[Call] = []
            if piece.result.size:
                terms = piece.terms.copy()
                terms[me] = source[piece.mine]
                reduces = [partial(self._kernels.combine(terms), piece.result)]
                reduces.append(copying(target[piece.mine], piece.result))
            rounds.append((reduces, [copying(target[part], result) for part, result in piece.taken]))
        return _Staged(self._context, self._signature.text, stages, rounds=rounds)

    def close(self) -> None:
        self._last = None


class _Staged:
    """The two-shot through staging areas, bound to the arrays of this rank.

    In turn k every rank reduces its slice of piece k from all staging areas, and copies what the others own of piece
    k + 1 into its own; then, after the barrier, it copies the others' results for piece k out. Two areas for each
    direction are enough: nobody is more than one barrier ahead.

    Args:
        context: the ranks.
        text: of the signature.
        stages: by piece, what copies in what the other ranks own.
        rounds: by piece, what reduces this rank's slice, and what fetches the others'.
    """

    def __init__(
        self, context: Context, text: str, stages: list[list[Call]], rounds: list[tuple[list[Call], list[Call]]]
    ) -> None:
        self._board = context.board
        self._instruments = context.instruments
        self._text = text
        self._rounds = rounds
        self._first = stages[0] if stages else []
        self._later = [*stages[1:], []]

    def copy_in(self, number: int) -> None:
        for call in self._first:
            call()

    def run(self) -> None:
        observed = self._instruments.observers
        for number, (reduces, fetches) in enumerate(self._rounds):
            for call in reduces:
                call()
            for call in self._later[number]:
                call()
            if observed:
                self._instruments.step(f"reduce piece {number + 1}, stage the next")
            self._board.barrier(self._text)
            if observed:
                self._instruments.step("barrier")
            for call in fetches:
                call()
            if observed:
                self._instruments.step(f"fetch piece {number + 1}")


class TwoShot(NodePlan):
    """The allreduce of one array into one result, both flat.

    Each rank stores its block to all results. Where some rank publishes `NOWHERE`, as its array or its result is
    private and small or cannot be copied by others, all go through staging areas.
    """

    def __init__(
        self,
        context: Context,
        task: Task,
        source: Operand,
        target: Operand,
        places: tuple[int, int],
        staged: Callable[[], _ThroughBoard],
    ) -> None:
        super().__init__(context, task, source)
        self._find_staged = staged
        self._target = self._source if target.address == source.address else unowned(target.view, target.address)
        given, taken = places
        self._entry = Signature(self._text, task.signature.code, source=given, target=taken)
        self._others: list[int] = []  # Places of the others in the last call.
        self._last: list[Call] | _OnArrays = []  # The steps that are bound to these.

    def run(self, source: Operand, place: Place) -> None:
        board = self._board
        observed = self._instruments.observers
        others = board.enter(self._entry)
        if others != self._others:
            self._last = self._bind((*others,))
            self._others = others
        if observed:
            self._instruments.step("rendezvous")
        if not isinstance(self._last, list):
            self._last.copy_in(board.number)
            board.barrier(self._text)
            self._last.run()
            return
        for call in self._last:
            call()
        if observed:
            self._instruments.step("load and store")
        board.barrier(self._text)
        if observed:
            self._instruments.step("barrier")

    def _bind(self, others: tuple[int, ...]) -> list[Call] | _OnArrays:
        """Return what to do for arrays of the other ranks at these places."""
        steps: list[Call] | _OnArrays | None = self._bound.get(others)
        if steps is None:
            staged = NOWHERE in others
            steps = self._find_staged().bind(self._source, self._target) if staged else self._bind_memory(others)
            self._keep(others, steps)
        return steps

    def _bind_memory(self, others: tuple[int, ...]) -> list[Call]:
        context = self._context
        source = self._source
        target = self._target
        board = self._board
        sources, targets = (
            {
                peer: context.arena.at(
                    peer,
                    others[2 * number + index],
                    target.dtype,
                    count=target.size,
                    present=partial(board.require_present, number, self._text),
                )
                for number, peer in enumerate(board.peers)
            }
            for index in (0, 1)
        )
        in_place = self._entry.source == self._entry.target and others[::2] == others[1::2]
        memory = BlockMemory(
            source,
            sources,
            result=None if source is target else target,
            peer_results=None if in_place else targets,
            copies=context.scratch.copies,
        )
        segment = Partition.even(target.size, context.topology.size, LINE_NBYTES // target.itemsize).segment
        # On one node the hierarchical algorithms are the two-shot, too.
        return context.bind_on_node(self._task, "two_shot", segment, memory=memory)

    def close(self) -> None:
        super().close()
        self._others = []
