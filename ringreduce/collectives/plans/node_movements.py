"""Collectives on one node, but for allreduces: every rank loads what it needs from the inputs of the others.

Reductions to a root that are large are shared out: every rank reduces a block, and stores it in the root's result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import Array, Call, Operand, address_of, copying, unowned
from ringreduce.collectives.call import Task
from ringreduce.collectives.context import BINDINGS, LINE_NBYTES, Context, NodePlan
from ringreduce.collectives.plan import BoundCall, Place, constant
from ringreduce.collectives.plans.bound import BlockMemory
from ringreduce.collectives.plans.layouts import LAYOUTS, Layout, is_read, parts_for_others
from ringreduce.common.partition import Partition
from ringreduce.transport.shared.arena import MAILED, NOWHERE, Block
from ringreduce.transport.shared.board import Signature
from ringreduce.transport.shared.board_memory import MAILED_NBYTES, TURNS, rooms_of
from ringreduce.transport.shared.compiled import (
    ARRIVE,
    BARRIER,
    ENTER,
    CompiledCall,
    Instruction,
    expect,
    of_any_target,
)
from ringreduce.transport.shared.private import PrivateMemory

#: Up to this size, a copy of the input into the mailbox costs less than the barrier that ends the loads of others. An
#: input in private memory is copied in any case, by the system at a price for each page: it is mailed if it fits.
_MAILED_NBYTES = 16 << 10


def plan_loads(
    context: Context, task: Task, source: Operand, target: Operand | None, numbers: tuple[int, ...]
) -> BoundCall:
    """Find or make the plan of a collective on one node. It keeps neither source nor target alive."""
    key = "loads", task.signature.code, source.address, source.view.size, numbers
    # On one node the hierarchical algorithms are the two-shot, too.
    if task.kind.collective is Collective.REDUCE and task.choice.algorithm != "load":
        to = -1 if target is None else target.address
        return context.plans.get((*key, to), lambda: _ToRoot(context, task, source, target=target))
    return context.plans.get(key, lambda: _Loads(context, task, source, numbers=numbers))


class _ToRoot(NodePlan):
    """The reduction of one array to a root.

    Each rank reduces its block into the root's result. Where that is private, the rank reduces into scratch and copies
    from there, piece by piece. Arrays that no other rank can copy go through the arena.
    """

    def __init__(self, context: Context, task: Task, source: Operand, target: Operand | None) -> None:
        arena = context.arena
        signature = task.signature
        where = NOWHERE if target is None else arena.place(target.address, target.nbytes)
        given = arena.place(source.address, source.nbytes)
        super().__init__(context, task, source, Signature(signature.text, signature.code, source=given, target=where))
        self._target = None if target is None else unowned(target.view, target.address)

    def run(self, source: Operand, place: Place) -> None:
        mine = self._entry
        room = self._target
        blocks: list[Block] = []
        if mine.source == NOWHERE:
            block, copy = self._block()
            np.copyto(copy, self._source)
            blocks = [block]
            mine = mine._replace(source=block.place)
        if room is not None and mine.target == NOWHERE:
            block, room = self._block()
            blocks = [*blocks, block]
            mine = mine._replace(target=block.place)
        others = self._board.enter(mine) if blocks else self._enter()
        if others is None:
            return
        if self._instruments.observers:
            self._instruments.step("rendezvous")
        key = (mine.source, mine.target, *others)
        calls = self._bound.get(key)
        if calls is None:
            calls = self._keep(key, self._bind(others, room))
        self._carry_out(others, calls, stays=not blocks)
        if self._target is not None and room is not None and room is not self._target:
            np.copyto(self._target, room)
        for block in blocks:  # After a failure they stay: a rank that is late may still store there.
            self._context.arena.release(block)

    def _bind(self, others: list[int], result: Array | None) -> list[Call]:
        context = self._context
        source = self._source
        root = self._task.kind.root
        peers = self._board.peers
        blocks = Partition.even(source.size, context.topology.size, LINE_NBYTES // source.itemsize).segment
        into = blocks
        stored = None
        if result is None:
            number = peers.index(root)
            present = partial(self._board.require_present, number, self._text)
            there = context.arena.at(root, others[2 * number + 1], source.dtype, count=source.size, present=present)
            stored = {root: there}
            if isinstance(there, PrivateMemory):
                own = blocks[context.rank]
                into = tuple(slice(0, own.stop - own.start if block is own else 0) for block in blocks)
                result = context.scratch.block(source.dtype, own.stop - own.start)
            else:
                result = there
        places = zip(peers, others[::2], strict=True)
        memory = BlockMemory(
            source,
            {peer: context.arena.at(peer, place, source.dtype, count=source.size) for peer, place in places},
            result=result,
            result_segments=[into],
            peer_results=stored,
            copies=context.scratch.copies,
        )
        return context.bind_on_node(self._task, "two_shot", blocks, memory=memory)


class _BoundLoads(NamedTuple):
    """What a rank does after the rendezvous.

    Attributes:
        calls: what it does first.
        some_wait: whether a barrier follows: some rank must wait until the others have read its input where it is.
        after: what it does at the end.
    """

    calls: list[Call]
    some_wait: bool
    after: list[Call]


class _LastLoads(NamedTuple):
    """What the last call of a turn has found: what the others have published, and the address of the result."""

    others: list[int]
    layout: Layout
    address: int
    bound: _BoundLoads


class _CompiledLoads(NamedTuple):
    """A compiled call, bound to what the others have published.

    Attributes:
        call: carries it out.
        layout: where blocks are.
        address: of the result; -1: of any that does not share memory with the input.
    """

    call: CompiledCall
    layout: Layout
    address: int


class _Loads(NodePlan):
    """A collective for one array of this rank, and any result.

    Small inputs are in mailboxes; if all are, no rank has to wait until the others have read them.

    Args:
        context: the ranks.
        task: what to do.
        source: this rank's input; it is not kept.
        numbers: what this rank sends the others when the call begins; empty: all ranks know all.
    """

    def __init__(self, context: Context, task: Task, source: Operand, numbers: tuple[int, ...]) -> None:
        self._stride = 2 + len(numbers)  # How many numbers each of the others publishes.
        self._layouts: dict[tuple[tuple[int, ...], ...], Layout] = {}  # Layouts by the numbers of the others.
        self._last: dict[int, _LastLoads] = {}  # By turn.
        self._mailed: list[slice] = []
        self._ready: _CompiledLoads | None = None
        self._start = source.address
        place = MAILED
        if is_read(task, context.rank):
            place = context.arena.place(source.address, source.nbytes)
            if source.nbytes <= (_MAILED_NBYTES if place >= 0 else MAILED_NBYTES):
                place = MAILED
                self._mailed = parts_for_others(
                    task, context.rank, source.view.size, numbers=numbers, size=context.topology.size
                )
        self._copies: dict[int, list[Call]] = {}  # By turn, to the mailbox.
        entry = Signature(task.signature.text, task.signature.code, place, numbers=numbers)
        super().__init__(context, task, source, entry)

    def run(self, source: Operand, place: Place) -> None:
        ready = self._ready
        if ready is None or self._instruments.observers:
            self._run(place)
            return
        target = place(ready.layout.received)
        if ready.address == self._address(target):
            if not ready.call.run(target=target.address):
                self._load_elsewhere(place)
            return
        self._ready = None
        self._tried = False
        self._run(place)

    def repeated(self, source: Operand, target: Operand) -> Callable[[], object]:
        place = partial(constant, target)
        address = self._address(target)

        def run() -> None:
            ready = self._ready
            if ready is None or ready.address != address:
                self.run(source, place)
            elif not ready.call.run(target=target.address):
                self._load_elsewhere(place)

        return run

    def _address(self, target: Operand) -> int:
        """Return where a result is, if it shares memory with the input; else -1."""
        start = self._start
        end = start + self._source.nbytes
        overlap = min(end, target.address + target.nbytes) - max(start, target.address)
        return target.address if overlap > 0 else -1

    def _load_elsewhere(self, place: Place) -> None:
        """Go on after the rendezvous of a compiled call, as the others have published something else than before."""
        self._ready = None
        others = self._board.memory.published(self._board.number & 1, self._stride - 2)
        self._load(others, place, self._entry)

    def _run(self, place: Place) -> None:
        mine = self._entry
        block = None
        if self._mailed:
            for copy in self._mail((self._board.number + 1) % TURNS):
                copy()
        elif mine.source == NOWHERE:
            block, copied = self._block()
            np.copyto(copied, self._source)
            mine = mine._replace(source=block.place)
        try:
            self._load(self._board.enter(mine), place, mine)
        finally:
            if block is not None:
                self._context.arena.release(block)

    def _mail(self, turn: int) -> list[Call]:
        """Return what copies what others load from the input to this rank's mailbox; -1: of any turn, to compile."""
        copies = self._copies.get(turn)
        if copies is None:
            box = self._board.memory.mailboxes(turn, self._source.dtype, self._source.size)[self._board.index]
            copies = self._copies[turn] = [copying(box[part], self._source[part]) for part in self._mailed]
        return copies

    def _load(self, others: list[int], place: Place, mine: Signature) -> None:
        """Do what follows the rendezvous, given what the others have published there."""
        board = self._board
        instruments = self._instruments
        turn = board.number % TURNS if MAILED in (mine.source, *others[:: self._stride]) else 0
        last = self._last.get(turn)
        if last is None or last.others != others:
            last = None
            layout = self._lay_out(others)
        else:
            layout = last.layout
        if instruments.observers:
            instruments.step("rendezvous")
        target = place(layout.received)
        if others != self._others:
            self._others = others
            self._tried = False
        elif mine is self._entry and not self._tried:  # It may come a third time.
            self._tried = True
            self._ready = self._compile(layout, others, target)
        if last is None or last.address != target.address:
            key = (target.address, turn, *others)
            bound = self._bound.get(key)
            if bound is None:
                result = unowned(target.view, target.address)
                bound = self._keep(key, self._bind(layout, others, result, published=mine.source, turn=turn))
            last = self._last[turn] = _LastLoads(others, layout, target.address, bound)
        bound = last.bound
        for call in bound.calls:
            call()
        if instruments.observers:
            instruments.step("load")
        if bound.some_wait:  # This rank waits only if others read its input where it is.
            board.barrier(self._text, wait=mine.source != MAILED)
            if instruments.observers:
                instruments.step("barrier")
        for call in bound.after:
            call()

    def _compile(self, layout: Layout, others: list[int], target: Operand) -> _CompiledLoads | None:
        """Return the same, compiled; None: NumPy's path is to be used."""
        address = self._address(target)
        result = of_any_target(target.view) if address < 0 else unowned(target.view, address)
        if address >= 0 and layout.own is not None:
            given, taken = layout.own
            if address_of(self._source[given]) != address_of(result[taken]):
                return None  # Compiled copies are of memory that does not overlap.
        place = self._entry.source
        places = dict(zip(self._board.peers, others[:: self._stride], strict=True))
        mailed = [count for peer, (count, _) in layout.peers.items() if places[peer] == MAILED]
        if self._mailed:
            mailed.append(self._source.size)
        rooms = {rooms_of(count * result.itemsize) for count in mailed}
        if len(rooms) > 1:
            return None  # They are in different parts of the mailboxes.

        def instructions() -> list[Instruction]:
            copies = self._mail(-1) if self._mailed else []
            loads = self._bind(layout, others, result, published=place, turn=-1)
            barrier = [] if not loads.some_wait else [ARRIVE] if place == MAILED else [BARRIER]
            return [*copies, ENTER, expect(self._board, others), *loads.calls, *barrier, *loads.after]

        nbytes = max(self._source.nbytes, target.nbytes)
        call = self._context.compiled(self._entry, nbytes, instructions, max(mailed, default=0) * result.itemsize)
        return None if call is None else _CompiledLoads(call, layout, address)

    def close(self) -> None:
        super().close()
        self._layouts.clear()
        self._last.clear()
        self._ready = None

    def _lay_out(self, others: list[int]) -> Layout:
        """Return where blocks are, given what the other ranks have published; remember it."""
        theirs = tuple([(*others[start + 2 : start + self._stride],) for start in range(0, len(others), self._stride)])
        layout = self._layouts.get(theirs)
        if layout is None:
            rank = self._context.rank
            everyone = [*theirs[:rank], self._entry.numbers, *theirs[rank:]]
            if len(self._layouts) >= BINDINGS:
                self._layouts.clear()
            lay_out = LAYOUTS[self._task.kind.collective]
            layout = self._layouts[theirs] = lay_out(self._task, rank, self._source.size, everyone)
        return layout

    def _bind(self, layout: Layout, others: list[int], result: Array, published: int, turn: int) -> _BoundLoads:
        """Bind what loads into a result.

        Args:
            layout: where blocks are.
            others: what they have published.
            result: flat.
            published: the place of this rank's input.
            turn: of the call; -1: any.
        """
        context = self._context
        board = self._board
        source = self._source
        own = layout.own
        after = list[Call]()
        in_its_place = own is not None and address_of(source[own[0]]) == address_of(result[own[1]])
        if own is not None and published != MAILED and not in_its_place and np.may_share_memory(source, result):
            # The others still read what this rank would overwrite.
            final = result
            result = np.empty_like(result)
            after.append(copying(final, result))
        calls: list[Call] = []
        if own is not None and not in_its_place and source[own[0]].size:
            calls.append(copying(result[own[1]], source[own[0]]))
        peers: dict[int, Any] = {}
        present: list[Call] = []
        for position, peer in enumerate(board.peers):
            if peer in layout.peers:
                size = layout.peers[peer][0]
                place = others[self._stride * position]
                if place == MAILED:
                    boxes = board.memory.mailboxes(turn, source.dtype, size)
                    peers[peer] = boxes[board.members.index(peer)]
                else:
                    peers[peer] = context.arena.at(peer, place, source.dtype, count=size)
                    if published == MAILED:  # No barrier shows that a peer has given up meanwhile.
                        present.append(partial(board.require_present, position, self._text))
        memory = BlockMemory(
            source,
            peers,
            {peer: blocks for peer, (_, blocks) in layout.peers.items()},
            result=result,
            result_segments=[layout.result],
            copies=context.scratch.copies,
        )
        calls += context.bind_on_node(self._task, self._task.choice.algorithm, layout.mine, memory=memory)
        some_wait = any(place != MAILED for place in (published, *others[:: self._stride]))
        return _BoundLoads(calls + present, some_wait, after)
