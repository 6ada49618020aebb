"""The path through memory that the ranks of one node share: each loads from the others, or stores to them.

Every rank publishes where its input is in the arena, or, if it is elsewhere, where it has put a copy. Large private
arrays of an allreduce pass through the board's staging areas, piece by piece.

Plans are kept for memory that is ours (the arena), never for the caller's: a kept plan would keep the array alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.algorithms.execute import Memory, Plan
from ringreduce.algorithms.fused import Staged
from ringreduce.buffers import Kernels, Operand, kernels_for
from ringreduce.partition import Partition, Segment
from ringreduce.paths.context import Cache, Context
from ringreduce.paths.path import Call, Path, Reduction, Repetition, Task
from ringreduce.transport.board import NOWHERE
from ringreduce.transport.shared import Location

__all__ = ["SharedMemory", "locate", "peer_views", "touches_memory"]

Array = npt.NDArray[Any]

#: Blocks of the two-shot begin on cache lines: a line that two ranks write would travel between their cores.
_LINE_NBYTES = 64


class SharedMemory(Path):
    """Calls on one node by direct loads and stores."""

    transport = "shared"
    reduces_halves = True

    @classmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        return call.topology.single_node and touches_memory(algorithm, call)

    def allreduce(self, task: Task, shape: tuple[int, ...]) -> _Reduction:
        # On one node the hierarchical algorithms are the two-shot, too.
        return _Reduction(self._context, self._plans, task)

    def broadcast(self, task: Task, data: Array, root: int) -> None:
        context = self._context
        am_root = context.rank == root
        with self._published(data if am_root else None) as location:
            others = context.meet_at_board(task.signature, location)
            peers = {}
            if not am_root:
                place = others[context.board.peers.index(root)]
                peers[root] = context.arena.peer_view(root, Location.unpack(place), data.dtype, data.size)
            memory = Memory(data, peers)
            self._load(Collective.BROADCAST, task, memory, (slice(0, data.size),), root)

    def allgather(self, task: Task, mine: Array, counts: Sequence[int], out: Array) -> None:
        context = self._context
        partition = Partition.of_sizes(counts)
        np.copyto(out[partition.segment[context.rank]], mine)
        with self._published(mine) as location:
            others = context.meet_at_board(task.signature, location)
            peers = peer_views(context, others, mine.dtype, counts)
            # A peer publishes its own block alone.
            places = {peer: [(slice(0, counts[peer]),) * len(counts)] for peer in peers}
            self._load(Collective.ALLGATHER, task, Memory(out, peers, places), partition.segment)

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], out: Array) -> None:
        context, segment = self._context, Partition.of_sizes(counts).segment
        with self._published(source, copy=True) as location:  # the own block is reduced in place
            assert location is not None
            others = context.meet_at_board(task.signature, location)
            work = context.arena.view(location, source.dtype, source.size)
            memory = Memory(work, peer_views(context, others, source.dtype, [source.size] * context.topology.size))
            kernels = kernels_for(task.dtype, task.op, context.topology.size)
            self._load(Collective.REDUCE_SCATTER, task, memory, segment, kernels=kernels)
            np.copyto(out, work[segment[context.rank]])

    def alltoall(self, task: Task, source: Array, counts: Array, out: Array) -> None:
        context, rank = self._context, self._context.rank
        sending = [Partition.of_sizes(row.tolist()).segment for row in counts]
        receiving = Partition.of_sizes(counts[:, rank].tolist()).segment
        np.copyto(out[receiving[rank]], source[sending[rank][rank]])
        nothing = (slice(0, 0),) * len(receiving)
        with self._published(source) as location:
            others = context.meet_at_board(task.signature, location)
            peers = peer_views(context, others, source.dtype, counts.sum(axis=1).tolist())
            memory = Memory(out, peers, {peer: [sending[peer] + nothing] for peer in peers})
            self._load(Collective.ALLTOALL, task, memory, nothing + receiving)

    @contextmanager
    def _published(self, data: Array | None, *, copy: bool = False) -> Iterator[Location | None]:
        """Make ``data`` reachable for the node's other ranks until the context ends, on all ranks together."""
        arena = self._context.arena
        if data is None:
            yield None
            return
        location = None if copy else arena.locate(data.__array_interface__["data"][0], data.nbytes)
        if location is not None:
            yield location
            return
        block = arena.allocate(data.nbytes)
        try:
            np.copyto(arena.view(block.location, data.dtype, data.size), data)
            yield block.location
        finally:
            arena.release(block)

    def _load(
        self,
        collective: Collective,
        task: Task,
        memory: Memory,
        segment: Segment,
        root: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        context = self._context
        schedule = context.schedule(collective, task.algorithm, root)
        instruments, waiter, text = context.instruments, context.waiter, task.signature.text
        if instruments.observers:
            instruments.step("publish and meet")
        plan = Plan(context.rank, schedule, [segment], memory, kernels, None, waiter, text, instruments=instruments)
        plan.run()
        context.board.barrier(text)
        if instruments.observers:
            instruments.step("barrier")


class _Reduction(Reduction):
    """The allreduce of arrays of one shape: in place where every rank's can be reached, else staged."""

    def __init__(self, context: Context, plans: Cache[_TwoShot], task: Task) -> None:
        self._context = context
        self._plans = plans
        self._task = task

    def run(self, source: Operand, target: Operand) -> None:
        location = locate(self._context, target)
        plan = self._plan(source.count, location)
        if location is not None:
            if source.address != target.address:
                np.copyto(target.view, source.view)
            plan.run_located()
            return
        flat = source.flat()
        if source.dtype.half and not flat.flags.writeable:
            flat = flat.copy()  # torch, which has the fast kernels, knows no read-only memory
        result = target.flat() if target.contiguous else np.empty_like(flat)
        plan.run_private(flat, result)
        if not target.contiguous:
            np.copyto(target.view, result.reshape(target.shape))

    def repetition(self, array: Any, target: Operand) -> Repetition:
        location = locate(self._context, target)
        plan = self._plan(target.count, location)
        if location is not None:
            return plan.run_located
        if array is target.view and target.contiguous:

            def run(same: npt.NDArray[Any]) -> None:
                flat = same.reshape(-1)
                plan.run_private(flat, flat)

            return run
        return None

    def _plan(self, count: int, location: Location | None) -> _TwoShot:
        """Return the plan for this location of the arena, or (None) for any private memory."""
        key = self._task.signature.code, location
        return self._plans.get(key, lambda: _TwoShot(self._context, self._task, count, location))


class _TwoShot:
    """The two-shot on one node: in place where all ranks' buffers are in the arena, else through the staging areas.

    Bound to this rank's location; bound again when a peer's buffer is elsewhere than in the last call.
    """

    def __init__(self, context: Context, task: Task, count: int, location: Location | None) -> None:
        storage, signature = task.dtype.storage, task.signature
        self._context = context
        self._board = context.board
        self._location = NOWHERE if location is None else location.packed
        self._text, self._code = signature.text, signature.code
        self._kernels = kernels_for(task.dtype, task.op, context.topology.size)
        self._instruments = context.instruments
        self._staged = cache(
            lambda: Staged(context.board, context.instruments, signature.text, storage, count, self._kernels)
        )
        self._mine = None if location is None else context.arena.view(location, storage, count)
        self._others: list[int] = []
        self._calls: list[Callable[[], object]] | None = None

    def run_located(self, _: object = None) -> None:
        """Reduce the buffer at the location, in place."""
        board = self._board
        others = board.arrive(self._text, self._code, self._location)
        if others != self._others:
            self._bind(others)
        instruments = self._instruments
        if instruments.observers:
            instruments.step("meet")
        if self._calls is None:
            self._run_mixed()
            return
        for call in self._calls:
            call()
        if instruments.observers:
            instruments.step("reduce and store")
        board.barrier(self._text)
        if instruments.observers:
            instruments.step("barrier")

    def run_private(self, source: Array, target: Array) -> None:
        """Reduce the flat ``source`` into the flat ``target``, which peers cannot reach."""
        board, staged = self._board, self._staged()
        staged.copy_in(source)
        others = board.arrive(self._text, self._code)
        if max(others) != NOWHERE:
            board.barrier(self._text)  # a rank whose buffer is located stages only now
        if self._instruments.observers:
            self._instruments.step("stage and meet")
        staged.run(source, target)

    def _run_mixed(self) -> None:
        """Stage the buffer at the location, as the peers do whose buffers are private."""
        assert self._mine is not None
        staged = self._staged()
        staged.copy_in(self._mine)
        self._board.barrier(self._text)
        staged.run(self._mine, self._mine)

    def _bind(self, others: list[int]) -> None:
        context, mine = self._context, self._mine
        assert mine is not None
        self._others = others
        self._calls = None
        if min(others) == NOWHERE:
            return
        schedule = context.schedule(Collective.ALLREDUCE, "two_shot")
        plan = Plan(
            rank=context.rank,
            schedule=schedule,
            segments=[Partition.even(mine.size, schedule.nblocks, _LINE_NBYTES // mine.itemsize).segment],
            memory=Memory(mine, peer_views(context, others, mine.dtype, [mine.size] * context.topology.size)),
            kernels=self._kernels,
            messages=None,
            waiter=context.waiter,
            signature=self._text,
            instruments=context.instruments,
        )
        self._calls = plan.calls

    def close(self) -> None:
        """Forget the views; a caller who still holds the plan makes it bind again."""
        self._calls, self._others = None, []


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
