"""Allreduces on one node: through mailboxes, or by loads and stores in the memory of all ranks.

`Mailed` is for small arrays: each rank copies its own into its mailbox, beside the flags of one barrier, and reduces
all. `StagedTwoShot` is for private arrays: pieces pass through mailboxes, copied in, reduced by one rank each and
copied out, a barrier for each. On a node of two ranks it begins later: to read the other's whole array takes as many
bytes between the cores as to read half of it and half of the result. `TwoShot` works in the arrays of all ranks: those
in the arena are touched directly, those in private memory are copied by the system.

`verify` proves the schedules of `one_shot` and `two_shot`, which say who reads what.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np

from ringreduce.buffers import Array, Call, Operand, address_of, copying, unowned
from ringreduce.collectives.call import Path, Task
from ringreduce.collectives.context import LINE_NBYTES, Context, NodePlan
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.collectives.plans.bound import BlockMemory
from ringreduce.collectives.plans.staged import Staged
from ringreduce.common.partition import Partition
from ringreduce.transport.shared.arena import NOWHERE
from ringreduce.transport.shared.board import Signature
from ringreduce.transport.shared.board_memory import MAILED_NBYTES, TURNS, rooms_of
from ringreduce.transport.shared.compiled import (
    ENTER,
    CompiledCall,
    CompiledKernels,
    Instruction,
    expect,
    of_any_source,
    of_any_target,
)

#: Up to this size, to copy private arrays to where the others read, and from there, takes less than copies by the
#: system: by NumPy; where one of two arrays of a pair is private; and compiled. Beyond, each piece would be one more
#: barrier, for which a rank waits long where others compute.
_STAGED_NBYTES = 256 << 10
_HALF_STAGED_NBYTES = 64 << 10
_COMPILED_STAGED_NBYTES = 4 << 20
#: Slices that ranks reduce begin at multiples of so many elements.
_ALIGNED = 16
#: Up to this size a pair's arrays are mailed whole, by compiled loops.
_PAIR_NBYTES = 32 << 10
#: Of a private array at a time. Smaller pieces would stay in the second-level cache, but each costs a barrier.
_PIECE_NBYTES = 512 << 10


def plan_allreduce(context: Context, task: Task, source: Operand, target: Operand) -> BoundCall:
    """Find or make the plan of an allreduce on one node. It keeps neither source nor target alive."""
    arena = context.arena
    plans = context.plans
    code = task.signature.code
    count = source.view.size
    nbytes = target.nbytes
    if task.choice.path is Path.ONE_SHOT:
        return plans.get(("mailed", code), partial(Mailed, context, task, count))
    compiled = isinstance(context.kernels(task.dtype, task.op, task.kind.weights), CompiledKernels)
    is_pair = len(context.board.members) == 2
    kind = Mailed if is_pair and nbytes <= (_PAIR_NBYTES if compiled else MAILED_NBYTES) else StagedTwoShot

    def through_board() -> _ThroughBoard:  # It is kept, so it refers to no operand.
        return plans.get(("board", code), partial(kind, context, task, count))

    in_place = source.address == target.address
    reads_private = arena.locate(source.address, nbytes) == NOWHERE
    stores_private = reads_private if in_place else arena.locate(target.address, nbytes) == NOWHERE
    both = reads_private and stores_private
    staged_nbytes = _STAGED_NBYTES if both else _HALF_STAGED_NBYTES if is_pair else -1
    if compiled:
        staged_nbytes = _COMPILED_STAGED_NBYTES
    if (reads_private or stores_private) and nbytes <= staged_nbytes:
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
        self._mailed_nbytes = count * self._dtype.itemsize  # of a rank
        self.settled = not isinstance(self._kernels, CompiledKernels)
        self._runs = 0
        self._turns: dict[int, tuple[Array, Callable[[Array], object]]] = {}  # Of `Mailed`.

    def run(self, source: Operand, place: Place) -> None:
        self._runs += 1
        self.settled = self.settled or self._runs > 1  # It may come a third time.
        compiled = self._compiled if self._runs > 2 else None
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
        if not isinstance(self._kernels, CompiledKernels):
            return None
        nbytes = self._count * self._dtype.itemsize
        like = np.broadcast_to(np.empty(1, self._dtype), self._count)
        source, target = of_any_source(like), of_any_target(like)
        return self._context.compiled(
            self._signature, nbytes, lambda: self._instructions(source, target), self._mailed_nbytes
        )

    @abstractmethod
    def _run(self, source: Operand, target: Operand) -> None:
        """Carry the call out by NumPy."""

    def _into_any(self, source: Array) -> Callable[[Array], object] | None:
        """Return what carries the call out by NumPy into any array; None: it has to know which one."""
        return None

    @abstractmethod
    def _instructions(self, source: Array, target: Array) -> list[Instruction]:
        """Return the instructions of the call."""

    @abstractmethod
    def bound(self, number: int, source: Array, target: Array) -> tuple[Call, Call]:
        """Return the allreduce of ``source`` into ``target``, flat arrays, the same memory or apart, in a call.

        Returns:
            What copies in what the others read first, which may come before the rendezvous; and what reduces, once
            every rank has done that.
        """

    def _expected(self) -> list[int]:
        """Return the instruction that finds out whether a rank copies its input only after the rendezvous."""
        return expect(self._board, [NOWHERE] * (2 * len(self._board.peers)))

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

    def _run(self, source: Operand, target: Operand) -> None:
        self._into_any(source.view)(target.view)

    def _into_any(self, source: Array) -> Callable[[Array], object]:
        board = self._board
        turns = self._turns
        _, rooms = rooms_of(self._mailed_nbytes)
        last = 2 * rooms - 1
        turn = self._turn
        meet = self._meet
        instruments = self._instruments

        def run(target: Array) -> None:
            number = board.counters[0] + 1  # A property would be a call.
            box, reduce = turns.get(number & last) or turn(number & last)
            box[...] = source
            meet()
            reduce(target if target.ndim == 1 else target.reshape(-1))
            if instruments.observers:
                instruments.step("reduce")

        return run

    def _turn(self, turn: int) -> tuple[Array, Callable[[Array], object]]:
        """Bind this rank's mailbox in calls of a turn, and what reduces all."""
        boxes = self._board.memory.mailboxes(turn, self._dtype, self._count)
        bound = self._turns[turn] = boxes[self._board.index], self._kernels.combine(boxes)
        return bound

    def _instructions(self, source: Array, target: Array) -> list[Instruction]:
        terms = self._board.memory.mailboxes(-1, self._dtype, self._count)
        box = terms[self._board.index]
        terms[self._board.index] = source
        return [copying(box, source), ENTER, self._expected(), partial(self._kernels.combine(terms), target)]

    def bound(self, number: int, source: Array, target: Array) -> tuple[Call, Call]:
        _, rooms = rooms_of(self._mailed_nbytes)
        turn = number & (2 * rooms - 1)
        box, reduce = self._turns.get(turn) or self._turn(turn)
        return copying(box, source), partial(reduce, target)


class StagedTwoShot(_ThroughBoard):
    """By mailboxes: each rank reduces a slice of each piece, and fetches the results of the others."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        super().__init__(context, task, count)
        self._length = max(1, min(count, _PIECE_NBYTES // self._dtype.itemsize))
        # Of each rank: inputs and results of one piece, or of two.
        self._areas = 2 if self._length >= count else 4
        self._room = self._areas * -(-self._length // _ALIGNED) * _ALIGNED
        self._mailed_nbytes = self._room * self._dtype.itemsize
        self._where = -1, -1
        self._last: dict[int, Staged] = {}  # By turn, bound to the arrays at the last addresses.

    def _run(self, source: Operand, target: Operand) -> None:
        copy_in, reduce = self.bound(self._board.counters[0] + 1, source.view, target.view)
        copy_in()
        self._meet()
        reduce()

    def bound(self, number: int, source: Array, target: Array) -> tuple[Call, Call]:
        where = address_of(source), address_of(target)
        if where != self._where:
            self._last.clear()
            self._where = where
        turn = number % TURNS
        if turn not in self._last:
            into = unowned(target, where[1])
            given = into if where[0] == where[1] else unowned(source, where[0])
            self._last[turn] = self._bind(turn, given, into)
        return self._last[turn].copy_in, self._last[turn].run

    def _instructions(self, source: Array, target: Array) -> list[Instruction]:
        first, *others = self._bind(-1, source, target).instructions()
        return [*first, ENTER, self._expected(), *chain.from_iterable(others)]

    def _bind(self, turn: int, source: Array, target: Array) -> Staged:
        boxes = self._board.memory.mailboxes(turn, self._dtype, self._room)
        me = self._board.index
        half = self._areas // 2
        area = self._room // self._areas
        stages: list[list[Call]] = []
        rounds: list[tuple[list[Call], list[Call]]] = []
        for number, start in enumerate(range(0, self._count, self._length)):
            given = number % half * area  # where inputs of this piece are in a mailbox, and then where results are
            made = given + half * area
            bounds = Partition.even(min(self._length, self._count - start), len(boxes), align=_ALIGNED).bounds
            terms: list[Array] = []
            stage: list[Call] = []
            fetch: list[Call] = []
            low, high = bounds[me : me + 2]
            for rank, box in enumerate(boxes):
                terms.append(source[start + low : start + high] if rank == me else box[given + low : given + high])
                first, last = bounds[rank : rank + 2]
                if rank != me and first < last:
                    stage.append(copying(boxes[me][given + first : given + last], source[start + first : start + last]))
                    fetch.append(copying(target[start + first : start + last], box[made + first : made + last]))
            stages.append(stage)
            result = target[start + low : start + high]
            reduces: list[Call] = []
            if low < high:
                reduces = [partial(self._kernels.combine(terms), result)]
                reduces.append(copying(boxes[me][made + low : made + high], result))
            rounds.append((reduces, fetch))
        return Staged(self._board, self._instruments, self._signature.text, stages=stages, rounds=rounds)

    def close(self) -> None:
        self._last.clear()


class TwoShot(NodePlan):
    """The allreduce of one array into one result, both flat.

    Each rank stores its block to all results. Where some rank publishes `NOWHERE`, as its array or its result is
    private and small or cannot be copied by others, all go through mailboxes.
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
        if NOWHERE not in others:
            self._carry_out(others, self._bind((*others,)))
            return
        self._others = []
        self._compiled = None
        copy_in, reduce = self._find_through_board().bound(self._board.number, self._source, self._target)
        copy_in()
        self._board.barrier(self._text)
        reduce()

    def _bind(self, others: tuple[int, ...]) -> list[Call]:
        """Return what to do for arrays of the other ranks at these places."""
        calls: list[Call] | None = self._bound.get(others)
        if calls is None:
            calls = self._bind_memory(others)
            self._keep(others, calls)
        return calls

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
