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
from typing import Any, NamedTuple

from ringreduce.buffers import Array, Call, Operand, copying, unowned
from ringreduce.buffers.kernels import Kernels
from ringreduce.collectives.call import Path, Task
from ringreduce.collectives.context import LINE_NBYTES, Context, NodePlan
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.collectives.plans.bound import BlockMemory
from ringreduce.collectives.plans.compiled_mailed import CompiledMailed
from ringreduce.collectives.plans.through_board import OnArrays, Staged
from ringreduce.common.partition import Partition
from ringreduce.transport.shared.arena import NOWHERE
from ringreduce.transport.shared.board import Signature
from ringreduce.transport.shared.board_memory import MAILBOX_NBYTES, STAGE_NBYTES, TURNS
from ringreduce.transport.shared.compiled import TwoShotCall

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

    def compiled(plan: BoundCall) -> BoundCall:
        calls = context.compiled(task)
        if calls is None:
            return plan
        return CompiledMailed(context.instruments, plan, calls.mailed(context.board, task.signature, nbytes))

    if task.choice.path is Path.ONE_SHOT:

        def one_shot() -> BoundCall:
            plan = OneShot(context, task, count)
            return plan if context.node.library is None else compiled(plan)

        return plans.get(("one_shot", code), one_shot)

    is_pair = len(context.board.members) == 2

    def staged() -> _ThroughBoard:  # It is kept, so it refers to no operand.
        kind = MailedPair if is_pair and nbytes <= MAILBOX_NBYTES else StagedTwoShot
        return plans.get(("staged", code), lambda: kind(context, task, count))

    def staged_or_compiled() -> BoundCall:
        plan = staged()
        return plans.get(("mailed", code), lambda: compiled(plan)) if isinstance(plan, MailedPair) else plan

    through_board = staged if context.node.library is None else staged_or_compiled
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
            number = board.counters[0] + 1  # A property would be a call.
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
        boxes = self._board.memory.mailboxes(number, self._dtype, (self._count,))
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


class _ThroughBoard(BoundCall):
    """The allreduce of so many elements in any private memory, through memory of the board."""

    def __init__(self, context: Context, task: Task) -> None:
        self._board = context.board
        self._context = context
        self._instruments = context.instruments
        self._signature = task.signature
        self._kernels = context.kernels(task.dtype, task.op, task.kind.weights)

    @abstractmethod
    def bind(self, source: Array, target: Array) -> OnArrays:
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
            mailed.copy_in(board.counters[0] + 1)
            meet()
            mailed.reduce(target)

        self._last = run
        self._address = source.address
        return run

    def bind(self, source: Array, target: Array) -> OnArrays:
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
        terms = self._board.memory.mailboxes(number, self._source.dtype, self._source.shape)
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
        self._last: OnArrays | None = None  # Bound to the arrays at the last addresses.
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

    def run(self, source: Operand, place: Place) -> None:
        target = place(())
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

    def bind(self, source: Array, target: Array) -> OnArrays:
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
        staged: Callable[[], _ThroughBoard],
    ) -> None:
        super().__init__(context, task, source)
        self._find_staged = staged
        self._target = self._source if target.address == source.address else unowned(target.view, target.address)
        given, taken = places
        self._entry = Signature(self._text, task.signature.code, source=given, target=taken)
        self._compiled: TwoShotCall | None = None  # Bound for the others' places in the last call.
        self._others: list[int] = []  # Places of the others in the last call.
        self._last: list[Call] | OnArrays = []  # The steps that are bound to these.

    def run(self, source: Operand, place: Place) -> None:
        board = self._board
        observed = self._instruments.observers
        if self._compiled is None or observed:
            others = board.enter(self._entry)
        elif self._compiled.run():
            return
        else:
            others = board.others()
        if others != self._others:
            self._last = self._bind((*others,))
            self._others = others
            self._compiled = None if self._context.node.library is None else self._compile(others)
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

    def _bind(self, others: tuple[int, ...]) -> list[Call] | OnArrays:
        """Return what to do for arrays of the other ranks at these places."""
        steps: list[Call] | OnArrays | None = self._bound.get(others)
        if steps is None:
            staged = NOWHERE in others
            steps = self._find_staged().bind(self._source, self._target) if staged else self._bind_memory(others)
            self._keep(others, steps)
        return steps

    def _compile(self, others: list[int]) -> TwoShotCall | None:
        """Return a compiled call; None: there is none, or an array is in memory that not all ranks can touch."""
        calls = self._context.compiled(self._task)
        if calls is None or min(self._entry.source, self._entry.target, *others) < 0:
            return None
        sources, targets = self._arrays((*others,))
        return calls.two_shot(self._board, self._entry, sources, targets, others)

    def _arrays(self, others: tuple[int, ...]) -> list[dict[int, Any]]:
        """Return the inputs, and the results, of all ranks of the node."""
        target = self._target
        board = self._board
        arrays: list[dict[int, Any]] = [{self._context.rank: self._source}, {self._context.rank: target}]
        for number, peer in enumerate(board.peers):
            present = partial(board.require_present, number, self._text)
            for index, each in enumerate(arrays):
                place = others[2 * number + index]
                each[peer] = self._context.arena.at(peer, place, target.dtype, count=target.size, present=present)
        return arrays

    def _bind_memory(self, others: tuple[int, ...]) -> list[Call]:
        context = self._context
        source = self._source
        target = self._target
        sources, targets = self._arrays(others)
        for each in (sources, targets):
            del each[context.rank]
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
        self._compiled = None
