"""Allreduces on one node: by mailboxes, by loads and stores in the memory of all ranks, or through staging areas.

`Mailed` is for small arrays: they lie in mailboxes beside the flags of one barrier, and every rank reduces all.
`TwoShot` works in the arrays of all ranks: those in the arena are touched directly, those in private memory are copied
by the system. `StagedTwoShot` is for small private arrays, and for all where the system forbids such copies: pieces
pass through areas of the board, copied in, reduced and copied out while they are in the cache, a barrier for each.
On a node of two ranks `Mailed` takes its place, up to the size of a mailbox: to read the other's whole array takes as
many bytes between the cores as to read half of it and half of the result, and no barrier.

`verify` proves the schedules of `one_shot` and `two_shot`, which say who reads what.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from ringreduce.buffers import Array, Call, Operand, copying, unowned
from ringreduce.collectives.call import Path, Task
from ringreduce.collectives.context import LINE_NBYTES, Context, NodePlan
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.collectives.plans.bound import BlockMemory
from ringreduce.collectives.plans.through_board import OnArrays, Staged
from ringreduce.common.partition import Partition
from ringreduce.native.layout import FROM_SOURCE, FROM_TARGET, TURNS
from ringreduce.transport.shared.arena import NOWHERE
from ringreduce.transport.shared.board import Signature
from ringreduce.transport.shared.board_memory import MAILBOX_NBYTES, STAGE_NBYTES
from ringreduce.transport.shared.compiled import ENTER, CompiledCall, Step, expect

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
    is_pair = len(context.board.members) == 2
    is_mailed = task.choice.path is Path.ONE_SHOT or (is_pair and nbytes <= MAILBOX_NBYTES)

    def through_board() -> _ThroughBoard:  # It is kept, so it refers to no operand.
        kind = Mailed if is_mailed else StagedTwoShot
        return plans.get(("board", code), lambda: kind(context, task, count))

    if task.choice.path is Path.ONE_SHOT:
        return through_board()
    in_place = source.address == target.address
    if nbytes <= _STAGED_NBYTES:
        reads_private = arena.locate(source.address, nbytes) == NOWHERE
        stores_private = reads_private if in_place else arena.locate(target.address, nbytes) == NOWHERE
        if reads_private and stores_private:
            return through_board()
        if is_pair and nbytes <= _HALF_MAILED_NBYTES and (reads_private or stores_private):
            return through_board()

    def make() -> BoundCall:
        taken = arena.place(target.address, nbytes)
        source_place = taken if in_place else arena.place(source.address, nbytes)
        if NOWHERE in (source_place, taken):
            return through_board()
        places = source_place, taken
        return TwoShot(context, task, source, target=target, places=places, through_board=through_board)

    return plans.get(("two_shot", code, source.address, target.address), make)


class _ThroughBoard(BoundCall):
    """The allreduce of so many elements, in memory of any kind, through memory of the board."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        self._board = context.board
        self._context = context
        self._instruments = context.instruments
        self._signature = task.signature
        self._kernels = context.kernels(task.dtype, task.op, task.kind.weights)
        self._count = count
        self._dtype = task.dtype.storage

    def run(self, source: Operand, place: Place) -> None:
        compiled = self._compiled
        target = place(())
        if compiled is None or self._instruments.observers:
            self._run(source, target)
        else:
            compiled.bound(source.address, target.address)()

    def repeated(self, source: Operand, target: Operand) -> Callable[[], object]:
        compiled = self._compiled
        return super().repeated(source, target) if compiled is None else compiled.bound(source.address, target.address)

    def into_any(self, source: Operand) -> Callable[[Array], object] | None:
        compiled = self._compiled
        return self._into_any(source.view) if compiled is None else compiled.into_any(source.address)

    @cached_property
    def _compiled(self) -> CompiledCall | None:
        """The same, compiled; None: NumPy's path is to be used."""
        nbytes = self._count * self._dtype.itemsize
        source, target = (unowned(np.empty(self._count, self._dtype), base) for base in (FROM_SOURCE, FROM_TARGET))
        return self._context.compiled(self._signature, nbytes, lambda: self._programs(source, target))

    @abstractmethod
    def _run(self, source: Operand, target: Operand) -> None:
        """Carry the call out by NumPy."""

    def _into_any(self, source: Array) -> Callable[[Array], object] | None:
        """Return what carries the call out by NumPy into any array; None: it has to know which one."""
        return None

    @abstractmethod
    def _programs(self, source: Array, target: Array) -> list[list[Step]]:
        """Return the steps of each turn, or of all."""

    @abstractmethod
    def bind(self, source: Array, target: Array) -> OnArrays:
        """Bind the reduction of ``source`` into ``target``: flat arrays, the same memory or apart."""

    def _expected(self, turn: int) -> list[int]:
        """Return the step that finds out whether a rank copies its input only after the rendezvous."""
        return expect(self._board, turn, [NOWHERE] * (2 * len(self._board.peers)))

    def _meet(self) -> None:
        """Enter the call, once the own array is copied in; return when all ranks have copied theirs."""
        board = self._board
        for other in board.enter(self._signature):
            if other != NOWHERE:  # That rank copies its input only after the rendezvous.
                board.barrier(self._signature.text)
                break
        if self._instruments.observers:
            self._instruments.step("rendezvous")


class Mailed(_ThroughBoard):
    """By mailboxes: each rank copies its array into its own, and reduces all, in rank order.

    There is no barrier: the mailboxes of a call are read until all ranks have entered the next one.
    """

    def __init__(self, context: Context, task: Task, count: int) -> None:
        super().__init__(context, task, count)
        self._turns: list[tuple[Array, Callable[[Array], object]] | None] = [None] * TURNS

    def _run(self, source: Operand, target: Operand) -> None:
        self._into_any(source.view)(target.view)

    def _into_any(self, source: Array) -> Callable[[Array], object]:
        board = self._board
        turns = self._turns
        turn = self.turn
        meet = self._meet
        instruments = self._instruments

        def run(target: Array) -> None:
            number = board.counters[0] + 1  # A property would be a call.
            box, reduce = turns[number % TURNS] or turn(number)
            box[...] = source
            meet()
            reduce(target)
            if instruments.observers:
                instruments.step("reduce")

        return run

    def turn(self, number: int) -> tuple[Array, Callable[[Array], object]]:
        """Return this rank's mailbox in the call of a number, and what reduces all."""
        turn = self._turns[number % TURNS]
        if turn is None:
            boxes = self._board.memory.mailboxes(number, self._dtype, (self._count,))
            turn = self._turns[number % TURNS] = boxes[self._board.index], self._kernels.combine(boxes)
        return turn

    def _programs(self, source: Array, target: Array) -> list[list[Step]]:
        programs: list[list[Step]] = []
        for number in range(TURNS):
            box, reduce = self.turn(number)
            programs.append([copying(box, source), ENTER, self._expected(number), partial(reduce, target)])
        return programs

    def bind(self, source: Array, target: Array) -> OnArrays:
        return _MailedArrays(self, source, target)


class _MailedArrays:
    """A `Mailed` that is bound to arrays."""

    def __init__(self, mailed: Mailed, source: Array, target: Array) -> None:
        self._mailed = mailed
        self._source = source
        self._target = target

    def copy_in(self, number: int) -> None:
        box, self._reduce = self._mailed.turn(number)
        box[...] = self._source

    def run(self) -> None:
        self._reduce(self._target)


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


class StagedTwoShot(_ThroughBoard):
    """By the staging areas: each rank reduces a slice of each piece, and fetches the results of the others."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        super().__init__(context, task, count)
        self._where = -1, -1
        self._last: Staged | None = None  # Bound to the arrays at the last addresses.
        board = context.board
        self._pieces = []
        dtype = task.dtype.storage
        me = board.index
        areas = board.memory.stages(dtype)
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

    def _run(self, source: Operand, target: Operand) -> None:
        last = self._last
        where = source.address, target.address
        if last is None or where != self._where:
            into = unowned(target.view, target.address)
            given = into if source.address == target.address else unowned(source.view, source.address)
            last = self._last = self.bind(given, into)
            self._where = where
        last.copy_in(self._board.counters[0] + 1)
        self._meet()
        last.run()

    def _programs(self, source: Array, target: Array) -> list[list[Step]]:
        first, *others = self.bind(source, target).steps()
        return [[*first, ENTER, self._expected(turn), *chain.from_iterable(others)] for turn in (0, 1)]

    def bind(self, source: Array, target: Array) -> Staged:
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
        return Staged(self._board, self._instruments, self._signature.text, stages=stages, rounds=rounds)

    def close(self) -> None:
        self._last = None


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
        through_board: Callable[[], _ThroughBoard],
    ) -> None:
        given, taken = places
        super().__init__(
            context, task, source, Signature(task.signature.text, task.signature.code, source=given, target=taken)
        )
        self._find_through_board = through_board
        self._target = self._source if target.address == source.address else unowned(target.view, target.address)

    def run(self, source: Operand, place: Place) -> None:
        others = self._enter()
        if others is None:
            return
        if self._instruments.observers:
            self._instruments.step("rendezvous")
        bound = self._bind((*others,))
        if isinstance(bound, list):
            self._carry_out(others, bound)
            return
        self._compiled = None
        bound.copy_in(self._board.number)
        self._board.barrier(self._text)
        bound.run()

    def _bind(self, others: tuple[int, ...]) -> list[Call] | OnArrays:
        """Return what to do for arrays of the other ranks at these places."""
        steps: list[Call] | OnArrays | None = self._bound.get(others)
        if steps is None:
            if NOWHERE in others:
                steps = self._find_through_board().bind(self._source, self._target)
            else:
                steps = self._bind_memory(others)
            self._keep(others, steps)
        return steps

    def _bind_memory(self, others: tuple[int, ...]) -> list[Call]:
        context = self._context
        source = self._source
        target = self._target
        sources: dict[int, Any] = {}
        targets: dict[int, Any] = {}
        for number, peer in enumerate(self._board.peers):
            present = partial(self._board.require_present, number, self._text)
            for index, arrays in enumerate((sources, targets)):
                place = others[2 * number + index]
                arrays[peer] = context.arena.at(peer, place, target.dtype, count=target.size, present=present)
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
