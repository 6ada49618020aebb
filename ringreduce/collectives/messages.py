"""Reductions over messages: on several nodes, and by algorithms with messages that were asked for by name.

A reduction works in the memory of the result where it can, else in a buffer of the plan. An algorithm that also touches
the memory of other ranks of the node works in the arena, and begins at the board. Plans are bound to addresses and keep
no array alive: a plan runs only while the caller holds its arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand, divide, divide_toward_zero, narrow, unowned, widen
from ringreduce.collectives.call import Path, Task
from ringreduce.collectives.context import Context, NodeSchedule
from ringreduce.collectives.execution import Memory
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.common.partition import Partition, segments_of_blocks, segments_of_buffer
from ringreduce.common.reduce_ops import ReduceOp

Array = npt.NDArray[Any]

#: A private array of up to so many bytes is copied into a buffer of the plan, so that one plan serves all of them.
_OWN_BUFFER_NBYTES = 1 << 20


def plan_reduction(context: Context, task: Task, source: Operand, target: Operand | None) -> BoundCall:
    """Find or make the plan of a reduction. It keeps neither source nor target alive."""
    plans, count = context.plans, source.view.size
    if task.choice.path is Path.LIBRARY:
        return plans.get(("library", task.signature.code), lambda: _LibraryReduction(context, task))
    key = "messages", task.signature.code, task.choice.algorithm
    if task.kind.collective is Collective.REDUCE_SCATTER:
        assert target is not None
        if task.is_wide or not all(step.by_rank for step in context.steps(task).steps):
            return plans.get(key, lambda: _ReduceScatter(context, task, np.empty(count, task.dtype.storage), None))
        where, work, into = (*key, source.address, target.address), source.view, target.view
        return plans.get(where, lambda: _ReduceScatter(context, task, unowned(work), unowned(into)))
    memory = _memory(context, task, source, target)
    address = None if memory is None else memory.address
    return plans.get((*key, address), lambda: _Reduction(context, task, count, memory))


def _memory(context: Context, task: Task, source: Operand, target: Operand | None) -> Operand | None:
    """Return the caller's array, source or target, in which the reduction can work; None: it needs a buffer."""
    there, shares_memory = target, task.choice.path is Path.HIERARCHICAL
    if there is None and not shares_memory:
        there = None if any(step.recvs for step in context.steps(task).steps) else source  # it is only sent
    if there is None or task.is_wide:
        return None
    in_arena = context.arena.locate(there.address, there.nbytes) is not None
    large = there.nbytes > _OWN_BUFFER_NBYTES and not shares_memory
    return there if in_arena or large else None


class _LibraryReduction(BoundCall):
    """The allreduce of the MPI library. That compares no signatures, so the ranks do it before, in each call."""

    def __init__(self, context: Context, task: Task) -> None:
        self._context, self._task = context, task

    def run(self, source: Operand, place: Place) -> None:
        context, task, target = self._context, self._task, place(())
        context.rendezvous(task.signature)
        work = np.empty(source.view.size, task.dtype.storage) if task.is_wide else target.view
        _load(source, task, work)
        context.messages.allreduce(work, task.op)
        if context.instruments.observers:
            context.instruments.step("the library's own allreduce")
        if task.op is ReduceOp.AVERAGE:
            divide(work, context.topology.size)
        _store(context, work, task, target)


class _Reduction(BoundCall):
    """An allreduce, or a reduction to a root, of so many elements.

    Args:
        context: the ranks.
        task: what to do.
        count: elements.
        memory: the caller's array in which it works; None: it works in a buffer of its own, for arrays anywhere.
    """

    def __init__(self, context: Context, task: Task, count: int, memory: Operand | None) -> None:
        self._context, self._task, self._shares_memory = context, task, task.choice.path is Path.HIERARCHICAL
        nbytes, arena = count * task.dtype.itemsize, context.arena
        self.reusable = memory is not None or nbytes <= _OWN_BUFFER_NBYTES
        self._own = arena.allocate(nbytes) if memory is None else None
        self._address = -1 if memory is None else memory.address
        self._location = self._own.location if self._own is not None else arena.locate(self._address, nbytes)
        if memory is not None and self._location is None:
            self._work = unowned(memory.view, memory.address)
        else:
            assert self._location is not None
            self._work = arena.view(self._location, task.dtype.storage, count)
        collective = task.kind.collective
        self._wants_result = collective is Collective.ALLREDUCE or context.rank == task.kind.root
        self._divides = collective is Collective.REDUCE and task.op is ReduceOp.AVERAGE  # else the schedule does
        nblocks = context.steps(task).nblocks
        limit = context.segment_limit(self._work, count // nblocks)
        self._schedule = NodeSchedule(context, task, self._work, segments_of_buffer(count, nblocks, limit))

    def run(self, source: Operand, place: Place) -> None:
        context, signature, work = self._context, self._task.signature, self._work
        if source.address != self._address:
            _load(source, self._task, work)
        if self._shares_memory:
            self._schedule.run(context.rendezvous_at_board(signature, self._location))
            context.board.barrier(signature.text)
        else:
            context.rendezvous(signature)
            self._schedule.run([])
        if self._wants_result:
            if self._divides:
                divide(work, context.topology.size)
            if self._own is not None:
                _store(context, work, self._task, place(()))

    def close(self) -> None:
        self._schedule.close()
        if self._own is not None:
            self._context.arena.release(self._own)
            self._own = None


class _ReduceScatter(BoundCall):
    """A reduce-scatter. Where a rank adds up all terms of its part at once, from the source into the result.

    Args:
        context: the ranks.
        task: what to do.
        work: the source; or a buffer of the plan, for partial sums or a wider type.
        target: the result; None: it is copied from the buffer.
    """

    def __init__(self, context: Context, task: Task, work: Array, target: Array | None) -> None:
        self._context, self._task, self._work, self._target = context, task, work, target
        self.reusable = target is not None or work.nbytes <= _OWN_BUFFER_NBYTES
        partition = Partition.of_sizes(task.kind.counts)
        own = partition.segment[context.rank]
        segments = segments_of_blocks(partition, context.segment_limit(work, max(task.kind.counts)))
        results = [
            tuple(
                slice(part.start - own.start, part.stop - own.start) if rank == context.rank else slice(0, 0)
                for rank, part in enumerate(segment)
            )
            for segment in segments
        ]
        memory = Memory(work) if target is None else Memory(work, result=target, result_segments=results)
        op = ReduceOp.SUM if task.op is ReduceOp.AVERAGE else task.op  # only the own block is complete in the end
        self._schedule = context.bind(task, segments, memory, context.kernels(task.dtype, op))
        self._own = work[own] if target is None else target

    def run(self, source: Operand, place: Place) -> None:
        self._context.rendezvous(self._task.signature)
        if self._target is None:
            _load(source, self._task, self._work)
        self._schedule.run()
        if self._task.op is ReduceOp.AVERAGE:
            divide(self._own, self._context.topology.size)
        if self._target is None:
            _store(self._context, self._own, self._task, place(()))

    def close(self) -> None:
        self._schedule.close()


def _load(source: Operand, task: Task, work: Array) -> None:
    """Copy an input to where it is reduced."""
    if task.is_wide:
        widen(source.view, source.dtype, work)
    elif source.view is not work:
        np.copyto(work, source.view)


def _store(context: Context, work: Array, task: Task, target: Operand) -> None:
    """Copy a result to its array; averages of integers are still sums, and are divided here."""
    if task.is_wide:
        if task.op is not task.kind.op:
            divide_toward_zero(work, context.topology.size)
        narrow(work, target.dtype, target.view)
    elif work is not target.view:
        np.copyto(target.view, work)
