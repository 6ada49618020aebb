"""The two-shot in the memory of one node: every rank reduces a block, and stores it where the results are.

Results are those of all ranks (`TwoShotReduction`), or of one (`ToRoot`). Private memory is copied by the system.
Small private arrays, and all where the system forbids that, pass through staging areas, or inputs are copied to the
arena first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Kernels, Operand, address_of, kernels_for, unowned
from ringreduce.collectives.context import Cache, Context
from ringreduce.collectives.fused import Staged
from ringreduce.collectives.path import Reduction, Result, Task
from ringreduce.collectives.plan import INNER_NBYTES, Memory, Plan
from ringreduce.common.partition import Partition
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.shared.arena import NOWHERE, Block
from ringreduce.transport.shared.board import Arrival

__all__ = ["Scratch", "ToRoot", "TwoShotReduction"]

Array = npt.NDArray[Any]

#: Blocks of the two-shot begin on cache lines: a line that two ranks write would travel between their cores.
_LINE_NBYTES = 64
#: Up to this size, to copy private arrays to where the others read, and from there, costs less than system calls.
_STAGED_NBYTES = 256 << 10
#: Results, or offers of the others, that a plan is bound to at once.
_BOUND = 64


class Scratch:
    """Memory that the calls of a path use one after the other: what kernels need, and copies of private memory.

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
        if key not in self._kernels:
            self._kernels[key] = kernels_for(task.dtype, task.op, self._size)
        return self._kernels[key]

    def copies(self, peer: int) -> Array:
        """Return where a piece of a peer's private memory is copied, to be reduced."""
        if peer not in self._copies:
            self._copies[peer] = np.empty(INNER_NBYTES, np.uint8)
        return self._copies[peer]

    def block(self, dtype: np.dtype[Any], count: int) -> Array:
        """Return where a block is reduced that is stored in a peer's private memory then."""
        nbytes = count * dtype.itemsize
        if self._block.nbytes < nbytes:
            self._block = np.empty(nbytes, np.uint8)
        return self._block[:nbytes].view(dtype)


class TwoShotReduction(Reduction):
    """The allreduce of arrays of one shape, wherever they are."""

    def __init__(self, context: Context, plans: Cache[_TwoShot], scratch: Scratch, task: Task) -> None:
        self._context = context
        self._plans = plans
        self._scratch = scratch
        self._task = task

    def run(self, source: Operand, target: Operand) -> None:
        if not target.contiguous:
            result = np.empty(target.shape, target.view.dtype)
            self.run(source, Operand(result, target.dtype))
            np.copyto(target.view, result)
            return
        if not source.contiguous:
            np.copyto(target.view, source.view)
            source = target
        self._plan(source, target).run()

    def repetition(self, source: Operand, target: Operand) -> Callable[[], object]:
        return self._plan(source, target).run

    def _plan(self, source: Operand, target: Operand) -> _TwoShot:
        key = self._task.signature.code, source.address, target.address
        return self._plans.get(
            key, lambda: _TwoShot(self._context, self._scratch, self._task, source.flat(), target.flat())
        )


class _TwoShot:
    """The two-shot on one node, for one array of this rank and one result.

    Each rank stores its block to all results, wherever they are. Where a rank says of its array or result that it is
    nowhere, for it is private and small, or cannot be copied, all goes through staging areas.
    """

    def __init__(self, context: Context, scratch: Scratch, task: Task, source: Array, target: Array) -> None:
        signature, arena = task.signature, context.arena
        self._context = context
        self._scratch = scratch
        self._board = context.board
        self._text = signature.text
        self._kernels = scratch.kernels(task)
        self._instruments = context.instruments
        self._target = unowned(target)
        in_place = address_of(source) == address_of(target)
        self._source = self._target if in_place else unowned(source)
        place = arena.place(address_of(target), target.nbytes)
        self._places = place if in_place else arena.place(address_of(source), source.nbytes), place
        if max(self._places) < 0 and target.nbytes <= _STAGED_NBYTES:
            self._places = NOWHERE, NOWHERE
        self._staged: Staged | None = None  # made when it is needed
        self._arrival = Arrival(signature.text, signature.code, *self._places)
        self._hidden = NOWHERE in self._places  # from the others
        #: By the places of the others; None: through staging areas.
        self._bound: dict[tuple[int, ...], list[Callable[[], object]] | None] = {}
        self._others: list[int] = []  # in the last call
        self._calls: list[Callable[[], object]] | None = None  # bound for these

    def run(self) -> None:
        """Reduce."""
        board, instruments = self._board, self._instruments
        if self._hidden:
            self._staging().copy_in(self._source)  # saves a barrier, if all do
        others = board.arrive(self._arrival)
        if others != self._others:
            key = (*others,)
            if key not in self._bound:
                self._bind(key)
            self._others, self._calls = others, self._bound[key]
        calls = self._calls
        if instruments.observers:
            instruments.step("publish and meet")
        if calls is None:
            self._run_staged(others)
            return
        for call in calls:
            call()
        if instruments.observers:
            instruments.step("load and store")
        board.barrier(self._text)
        if instruments.observers:
            instruments.step("barrier")

    def _staging(self) -> Staged:
        if self._staged is None:
            target = self._target
            self._staged = Staged(self._board, self._instruments, self._text, target.dtype, target.size, self._kernels)
        return self._staged

    def _run_staged(self, others: list[int]) -> None:
        staged = self._staging()
        if not self._hidden:
            staged.copy_in(self._source)
        if any(NOWHERE not in each for each in (self._places, *_pairs(others))):
            self._board.barrier(self._text)  # some rank has staged its input only now
        staged.run(self._source, self._target)

    def _bind(self, others: tuple[int, ...]) -> None:
        if len(self._bound) >= _BOUND:
            self._bound.clear()
        context, source, target = self._context, self._source, self._target
        pairs = dict(zip(self._board.peers, _pairs(others), strict=True))
        everyone = (self._places, *pairs.values())
        if any(NOWHERE in each for each in everyone):
            self._bound[others] = None
            return
        sources, targets = (
            {
                peer: context.arena.at(
                    *(peer, pairs[peer][index], target.dtype, target.size),
                    partial(self._board.require_present, number, self._text),
                )
                for number, peer in enumerate(pairs)
            }
            for index in (0, 1)
        )
        in_place = all(given == taken for given, taken in everyone)
        schedule = context.schedule(Collective.ALLREDUCE, "two_shot")
        self._bound[others] = Plan(
            rank=context.rank,
            schedule=schedule,
            segments=[Partition.even(target.size, schedule.nblocks, _LINE_NBYTES // target.itemsize).segment],
            memory=Memory(
                source,
                sources,
                result=None if source is target else target,
                peer_results=None if in_place else targets,
                copies=self._scratch.copies,
            ),
            kernels=self._kernels,
            messages=None,
            waiter=context.waiter,
            signature=self._text,
            instruments=context.instruments,
        ).calls

    def close(self) -> None:
        """Forget what was bound; a caller who still holds this binds again."""
        self._bound.clear()
        self._others = []


class ToRoot:
    """A reduction to one rank on one node, for one array of this rank.

    Each rank reduces its block right into the root's result. Where that is private, the rank reduces into scratch and
    copies from there, piece by piece; what no other rank can copy goes through the arena.

    Args:
        context: the ranks.
        scratch: of the path.
        task: how.
        source: this rank's input; it is not kept.
        root: who gets the result.
    """

    def __init__(self, context: Context, scratch: Scratch, task: Task, source: Array, root: int) -> None:
        self._context = context
        self._scratch = scratch
        self._board = context.board
        self._task = task
        self._text = task.signature.text
        self._root = root
        self._source = unowned(source)
        place = context.arena.place(address_of(source), source.nbytes)
        self._arrival = Arrival(task.signature.text, task.signature.code, place)
        #: On the root, by the address of the result: that, not kept, and what is said of it.
        self._results: dict[int, tuple[Array, Arrival]] = {}
        #: By the places of this rank and of the others.
        self._bound: dict[tuple[int, ...], list[Callable[[], object]]] = {}

    def run(self, result: Result) -> None:
        """Reduce; the root alone is asked for a result."""
        arena, mine, blocks = self._context.arena, self._arrival, []
        target: Array | None = None
        if self._root == self._context.rank:
            target, mine = self._known(result([]))
        if mine.source == NOWHERE:
            blocks.append(arena.allocate(self._source.nbytes))
            np.copyto(self._view(blocks[0]), self._source)
            mine = mine._replace(source=blocks[0].location.packed)
        room = target
        if room is not None and mine.target == NOWHERE:
            blocks.append(arena.allocate(room.nbytes))
            room, mine = self._view(blocks[-1]), mine._replace(target=blocks[-1].location.packed)
        self._carry_out(mine, room)
        if target is not None and room is not None and room is not target:
            np.copyto(target, room)
        for block in blocks:  # after a failure they stay: a rank that is late may still store there
            arena.release(block)

    def _known(self, target: Operand) -> tuple[Array, Arrival]:
        found = self._results.get(target.address)
        if found is None:
            if len(self._results) >= _BOUND:
                self._results.clear()
            place = self._context.arena.place(target.address, target.nbytes)
            found = unowned(target.flat()), self._arrival._replace(target=place)
            self._results[target.address] = found
        return found

    def close(self) -> None:
        """Forget what was bound; a caller who still holds this binds again."""
        self._bound.clear()
        self._results.clear()

    def _view(self, block: Block) -> Array:
        return self._context.arena.view(block.location, self._source.dtype, self._source.size)

    def _carry_out(self, mine: Arrival, result: Array | None) -> None:
        board, instruments = self._board, self._context.instruments
        others = board.arrive(mine)
        if instruments.observers:
            instruments.step("publish and meet")
        key = (mine.source, mine.target, *others)
        calls = self._bound.get(key)
        if calls is None:
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            calls = self._bound[key] = self._bind(dict(zip(board.peers, _pairs(others), strict=True)), result)
        for call in calls:
            call()
        if instruments.observers:
            instruments.step("load and store")
        board.barrier(self._text)
        if instruments.observers:
            instruments.step("barrier")

    def _bind(self, places: dict[int, tuple[int, ...]], result: Array | None) -> list[Callable[[], object]]:
        context, source, root, size = self._context, self._source, self._root, self._context.topology.size
        blocks = Partition.even(source.size, size, _LINE_NBYTES // source.itemsize).segment
        into, stored = blocks, None
        if result is None:
            present = partial(self._board.require_present, self._board.peers.index(root), self._text)
            there = context.arena.at(root, places[root][1], source.dtype, source.size, present)
            stored = {root: there}
            if isinstance(there, np.ndarray):
                result = there
            else:
                own = blocks[context.rank]
                into = tuple(slice(0, own.stop - own.start if each is own else 0) for each in blocks)
                result = self._scratch.block(source.dtype, own.stop - own.start)
        return Plan(
            rank=context.rank,
            schedule=context.schedule(Collective.REDUCE, "two_shot", root),
            segments=[blocks],
            memory=Memory(
                source,
                {peer: context.arena.at(peer, place[0], source.dtype, source.size) for peer, place in places.items()},
                result=result,
                result_segments=[into],
                peer_results=stored,
                copies=self._scratch.copies,
            ),
            kernels=self._scratch.kernels(self._task),
            messages=None,
            waiter=context.waiter,
            signature=self._text,
            instruments=context.instruments,
        ).calls


def _pairs(places: Sequence[int]) -> list[tuple[int, ...]]:
    """Return (source, target) of each of the other ranks."""
    return list(zip(places[::2], places[1::2], strict=True))
