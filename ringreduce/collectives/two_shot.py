"""The two-shot in the memory of one node: every rank reduces a block, and stores it where the results are.

Results are those of all ranks (`plan_two_shot`), or of one (`ToRoot`). Private memory is copied by the system. Small
private arrays, and all where the system forbids that, pass through staging areas, or inputs are copied to the arena
first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Call, Kernels, Operand, kernels_for, unowned
from ringreduce.collectives.call import Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.execution import BoundSchedule
from ringreduce.collectives.memory import INNER_NBYTES, Memory
from ringreduce.collectives.plan import Place, Plan
from ringreduce.collectives.staged import Staged, Staging
from ringreduce.common.partition import Partition, Segment
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.shared.arena import NOWHERE, Block
from ringreduce.transport.shared.board import Arrival
from ringreduce.transport.shared.private import PrivateMemory

__all__ = ["BINDINGS", "NodeScratch", "StagedTwoShot", "ToRoot", "TwoShot", "bind_on_node", "plan_two_shot"]

Array = npt.NDArray[Any]

#: Blocks of the two-shot begin on cache lines: a line that two ranks write would travel between their cores.
_LINE_NBYTES = 64
#: Up to this size, to copy private arrays to where the others read, and from there, costs less than system calls.
_STAGED_NBYTES = 256 << 10
#: Places of the other ranks' arrays, and of results, that a plan is bound to at once.
BINDINGS = 64


class NodeScratch:
    """Memory that the calls on a node use one after the other: kernels with their scratch, copies of private memory.

    Args:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kernels: dict[tuple[str, ReduceOp], Kernels] = {}
        self._copies: dict[int, Array] = {}
        self._block = np.empty(0, np.uint8)

    def kernels(self, task: Task) -> Kernels:
        """Return what reduces the elements of a task."""
        key = task.dtype.name, task.op
        found = self._kernels.get(key)
        if found is None:
            found = self._kernels[key] = kernels_for(task.dtype, task.op, self._size)
        return found

    def copies(self, peer: int) -> Array:
        """Return where a piece of a peer's private memory is copied, to be reduced."""
        if peer not in self._copies:
            self._copies[peer] = np.empty(INNER_NBYTES, np.uint8)
        return self._copies[peer]

    def block(self, dtype: np.dtype[Any], count: int) -> Array:
        """Return memory in which a block is reduced before it is stored in a peer's private memory."""
        nbytes = count * dtype.itemsize
        if self._block.nbytes < nbytes:
            self._block = np.empty(nbytes, np.uint8)
        return self._block[:nbytes].view(dtype)


def bind_on_node(
    context: Context, scratch: NodeScratch, task: Task, algorithm: str, segment: Segment, memory: Memory
) -> list[Call]:
    """Bind this rank's direct loads and stores; return the calls that carry them out."""
    return BoundSchedule(
        rank=context.rank,
        schedule=context.schedule(task.problem.collective, algorithm, task.root),
        segments=[segment],
        memory=memory,
        kernels=scratch.kernels(task),
        messages=None,
        waiter=context.waiter,
        signature=task.signature.text,
        instruments=context.instruments,
    ).calls


class StagedTwoShot(Plan):
    """The allreduce of so many elements in any private memory, through staging areas."""

    def __init__(self, context: Context, staging: Staging, task: Task) -> None:
        self._board, self._instruments = context.board, context.instruments
        self._staging, self._text, self._arrival = staging, task.signature.text, task.signature.arrival
        self._where = -1, -1
        self._staged: Staged | None = None

    def run(self, source: Operand, place: Place) -> None:
        target, staged = place(()), self._staged
        where = source.address, target.address
        if staged is None or where != self._where:
            into = unowned(target.view, target.address)
            given = into if source.address == target.address else unowned(source.view, source.address)
            staged = self._staged = self._staging.bind(given, into)
            self._where = where
        staged.copy_in()  # before the ranks meet: if all ranks do so, no further barrier is needed
        for other in self._board.arrive(self._arrival):
            if other != NOWHERE:  # that rank stages its input only once the ranks have met
                self._board.barrier(self._text)
                break
        if self._instruments.observers:
            self._instruments.step("publish and meet")
        staged.run()

    def close(self) -> None:
        self._staged = None


class TwoShot(Plan):
    """The allreduce of one array into one result, both flat.

    Each rank stores its block to all results. Where some rank publishes `NOWHERE`, as its array or its result is
    private and small or cannot be copied by others, all go through staging areas.
    """

    def __init__(
        self,
        context: Context,
        scratch: NodeScratch,
        task: Task,
        source: Operand,
        target: Operand,
        places: tuple[int, int],
        staging: Callable[[], Staging],
    ) -> None:
        self._context, self._scratch, self._task, self._staging = context, scratch, task, staging
        self._board, self._instruments, self._text = context.board, context.instruments, task.signature.text
        self._target = unowned(target.view, target.address)
        in_place = target.address == source.address
        self._source = self._target if in_place else unowned(source.view, source.address)
        self._places = places
        self._arrival = Arrival(self._text, task.signature.code, *places)
        #: By the places of the others: what to do, in their memory or through staging areas.
        self._bound: dict[tuple[int, ...], list[Call] | Staged] = {}
        self._others: list[int] = []  # in the last call
        self._last: list[Call] | Staged = []  # bound for these

    def run(self, source: Operand, place: Place) -> None:
        board, observed = self._board, self._instruments.observers
        others = board.arrive(self._arrival)
        if others != self._others:
            self._last, self._others = self._bind((*others,)), others
        if observed:
            self._instruments.step("publish and meet")
        if isinstance(self._last, Staged):
            self._last.copy_in()
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

    def _bind(self, others: tuple[int, ...]) -> list[Call] | Staged:
        """Return what to do for arrays of the other ranks at these places."""
        found = self._bound.get(others)
        if found is None:
            if len(self._bound) >= BINDINGS:
                self._bound.clear()
            if NOWHERE in others:
                found = self._staging().bind(self._source, self._target)
            else:
                found = self._bind_memory(_pairs(others))
            self._bound[others] = found
        return found

    def _bind_memory(self, pairs: list[tuple[int, ...]]) -> list[Call]:
        context, source, target, board = self._context, self._source, self._target, self._board
        sources, targets = (
            {
                peer: context.arena.at(
                    *(peer, pairs[number][index], target.dtype, target.size),
                    partial(board.require_present, number, self._text),
                )
                for number, peer in enumerate(board.peers)
            }
            for index in (0, 1)
        )
        in_place = all(given == taken for given, taken in (self._places, *pairs))
        memory = Memory(
            source,
            sources,
            result=None if source is target else target,
            peer_results=None if in_place else targets,
            copies=self._scratch.copies,
        )
        segment = Partition.even(target.size, context.topology.size, _LINE_NBYTES // target.itemsize).segment
        # On one node the hierarchical algorithms are the two-shot, too.
        return bind_on_node(context, self._scratch, self._task, "two_shot", segment, memory)

    def close(self) -> None:
        """Forget what was bound; to run it again binds again."""
        self._bound.clear()
        self._others = []


def plan_two_shot(context: Context, scratch: NodeScratch, task: Task, source: Operand, target: Operand) -> Plan:
    """Find or make the plan of an allreduce on one node."""
    arena, plans, code, nbytes, count = (
        context.arena,
        context.plans,
        task.signature.code,
        target.nbytes,
        source.view.size,
    )

    def staging() -> Staging:  # plans keep this function, so it must keep no array alive
        kernels, text = scratch.kernels(task), task.signature.text
        make = partial(Staging, context.board, context.instruments, text, task.dtype.storage, count, kernels)
        return plans.get(("staging", code), make)

    def staged() -> Plan:
        return StagedTwoShot(context, staging(), task)

    def is_private(operand: Operand) -> bool:
        return arena.locate(operand.address, nbytes) is None

    in_place = source.address == target.address
    if nbytes <= _STAGED_NBYTES and is_private(target) and (in_place or is_private(source)):
        return plans.get(("staged", code), staged)

    def make() -> Plan:
        taken = arena.place(target.address, nbytes)
        given = taken if in_place else arena.place(source.address, nbytes)
        if NOWHERE in (given, taken):
            return staged()
        return TwoShot(context, scratch, task, source, target, (given, taken), staging)

    return plans.get(("two_shot", code, source.address, target.address), make)


class ToRoot(Plan):
    """The reduction of one array to a root.

    Each rank reduces its block into the root's result. Where that is private, the rank reduces into scratch and copies
    from there, piece by piece. Arrays that no other rank can copy go through the arena.
    """

    def __init__(
        self, context: Context, scratch: NodeScratch, task: Task, source: Operand, target: Operand | None
    ) -> None:
        arena, signature = context.arena, task.signature
        self._context, self._scratch, self._task = context, scratch, task
        self._board, self._instruments, self._text = context.board, context.instruments, signature.text
        self._source = unowned(source.view, source.address)
        self._target = None if target is None else unowned(target.view, target.address)
        where = NOWHERE if target is None else arena.place(target.address, target.nbytes)
        self._arrival = Arrival(signature.text, signature.code, arena.place(source.address, source.nbytes), where)
        #: By the places of this rank and of the others.
        self._bound: dict[tuple[int, ...], list[Call]] = {}

    def run(self, source: Operand, place: Place) -> None:
        mine, room = self._arrival, self._target
        blocks: list[Block] = []
        if mine.source == NOWHERE:
            blocks.append(self._block())
            np.copyto(self._view(blocks[0]), self._source)
            mine = mine._replace(source=blocks[0].location.packed)
        if room is not None and mine.target == NOWHERE:
            blocks.append(self._block())
            room, mine = self._view(blocks[-1]), mine._replace(target=blocks[-1].location.packed)
        self._carry_out(mine, room)
        if self._target is not None and room is not None and room is not self._target:
            np.copyto(self._target, room)
        for block in blocks:  # after a failure they stay: a rank that is late may still store there
            self._context.arena.release(block)

    def _block(self) -> Block:
        return self._context.arena.allocate(self._source.nbytes)

    def _view(self, block: Block) -> Array:
        return self._context.arena.view(block.location, self._source.dtype, self._source.size)

    def _carry_out(self, mine: Arrival, result: Array | None) -> None:
        board, observed = self._board, self._instruments.observers
        others = board.arrive(mine)
        if observed:
            self._instruments.step("publish and meet")
        key = (mine.source, mine.target, *others)
        calls = self._bound.get(key)
        if calls is None:
            if len(self._bound) >= BINDINGS:
                self._bound.clear()
            calls = self._bound[key] = self._bind(dict(zip(board.peers, _pairs(others), strict=True)), result)
        for call in calls:
            call()
        if observed:
            self._instruments.step("load and store")
        board.barrier(self._text)
        if observed:
            self._instruments.step("barrier")

    def _bind(self, places: dict[int, tuple[int, ...]], result: Array | None) -> list[Call]:
        context, source, root = self._context, self._source, self._task.root
        blocks = Partition.even(source.size, context.topology.size, _LINE_NBYTES // source.itemsize).segment
        into, stored = blocks, None
        if result is None:
            present = partial(self._board.require_present, self._board.peers.index(root), self._text)
            there = context.arena.at(root, places[root][1], source.dtype, source.size, present)
            stored = {root: there}
            if isinstance(there, PrivateMemory):
                own = blocks[context.rank]
                into = tuple(slice(0, own.stop - own.start if each is own else 0) for each in blocks)
                result = self._scratch.block(source.dtype, own.stop - own.start)
            else:
                result = there
        memory = Memory(
            source,
            {peer: context.arena.at(peer, place[0], source.dtype, source.size) for peer, place in places.items()},
            result=result,
            result_segments=[into],
            peer_results=stored,
            copies=self._scratch.copies,
        )
        return bind_on_node(context, self._scratch, self._task, "two_shot", blocks, memory)

    def close(self) -> None:
        """Forget what was bound; to run it again binds again."""
        self._bound.clear()


def _pairs(places: Sequence[int]) -> list[tuple[int, ...]]:
    """Return (source, target) of each of the other ranks."""
    return list(zip(places[::2], places[1::2], strict=True))
