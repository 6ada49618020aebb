"""Reductions over messages: on several nodes, and by algorithms with messages that were asked for by name.

A reduction works in the memory of the result where it can, else in scratch, which all plans share. An algorithm that
also touches the memory of other ranks of the node works in the arena, and begins at the board. Plans are bound to
addresses and keep no array of the caller's alive: a plan runs only while the caller holds its arrays.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import Array, Operand, divide, divide_toward_zero, narrow, unowned, widen
from ringreduce.collectives.call import Path, Task
from ringreduce.collectives.compressed import Coded, Feedback
from ringreduce.collectives.context import Context, NodeSchedule
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.collectives.plans.bound import BlockMemory
from ringreduce.collectives.plans.integer_averages import LongAverage
from ringreduce.common.partition import Partition, segments_of_blocks, segments_of_buffer
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.shared.arena import NOWHERE

#: A private array of up to so many bytes is copied into scratch, so that one plan serves all of them.
_COPIED_NBYTES = 1 << 20
#: Larger scratch is given back after the call.
_KEPT_NBYTES = 64 << 20


def plan_reduction(
    context: Context, task: Task, source: Operand, target: Operand | None, feedback: Feedback | None = None
) -> BoundCall:
    """Find or make the plan of a reduction, with the feedback of its next run. It keeps source and target not alive."""
    plans = context.plans
    count = source.view.size
    if task.choice.path is Path.LIBRARY:
        return plans.get(("library", task.signature.code), lambda: _LibraryReduction(context, task))
    key = "messages", task.signature.code, task.choice.algorithm
    average = _long_average(context, task, count)
    if average is not None:
        count = sum(average.counts)
    if task.kind.collective is Collective.REDUCE_SCATTER:
        assert target is not None
        if task.is_wide or not all(step.by_rank for step in context.steps(task).steps):
            buffer = partial(np.empty, count, task.dtype.storage)
            return plans.get(key, lambda: _ReduceScatter(context, task, buffer(), target=None, average=average))
        where = (*key, source.address, target.address)
        work = source.view
        into = target.view
        return plans.get(where, lambda: _ReduceScatter(context, task, unowned(work), target=unowned(into)))
    memory = _memory(context, task, source, target=target)
    scratch = None
    if memory is None:
        scratch = context.scratch.shared(context.arena, count * task.dtype.itemsize, _KEPT_NBYTES)
        memory = Operand(scratch.view(task.dtype.storage), task.dtype)
    plan = plans.get(
        (*key, memory.address), lambda: _MessageReduction(context, task, memory, scratch=scratch, average=average)
    )
    if plan.coding is not None:
        plan.coding.feedback = feedback
    return plan


def _long_average(context: Context, task: Task, count: int) -> LongAverage | None:
    """Return what averages 64-bit integers; None: the task is another one, or there are none."""
    kind = task.kind
    size = context.topology.size
    if not (kind.dtype.is_long and kind.op is ReduceOp.AVERAGE and count):
        return None
    if kind.collective is Collective.REDUCE_SCATTER:
        return LongAverage(size, kind.counts, context.rank)
    if kind.collective is Collective.REDUCE:
        any_rank = partial(context.any_rank, task.signature)
        return LongAverage(size, [count], 0 if context.rank == kind.root else None, any_rank=any_rank)
    return LongAverage(size, [count], 0)


def _memory(context: Context, task: Task, source: Operand, target: Operand | None) -> Operand | None:
    """Return the caller's array, source or target, in which the reduction can work; None: it needs scratch."""
    there = target
    shares_memory = task.choice.path is Path.HIERARCHICAL
    if there is None and not shares_memory:
        # Without receives it is only sent.
        there = None if any(step.recvs for step in context.steps(task).steps) else source
    if there is None or task.is_wide:
        return None
    in_arena = context.arena.locate(there.address, there.nbytes) != NOWHERE
    large = there.nbytes > _COPIED_NBYTES and not shares_memory
    # To bind encoded messages, which are small and many, takes longer than the copies.
    return there if in_arena or (large and task.kind.codec is None) else None


class _LibraryReduction(BoundCall):
    """The allreduce of the MPI library. That compares no signatures, so the ranks do it before, in each call."""

    def __init__(self, context: Context, task: Task) -> None:
        self._context = context
        self._task = task

    def run(self, source: Operand, place: Place) -> None:
        context = self._context
        task = self._task
        average = _long_average(context, task, source.view.size)
        if average is not None:
            buffer = np.empty(sum(average.counts), task.dtype.storage)
            return average.run(source, place, buffer, reduce=lambda: self._reduce(buffer))
        target = place(())
        work = np.empty(source.view.size, task.dtype.storage) if task.is_wide else target.view
        _load(source, task, work)
        self._reduce(work)
        if task.op is ReduceOp.AVERAGE:
            divide(work, context.topology.size)
        _store(context, work, task, target=target)
        return None

    def _reduce(self, work: Array) -> None:
        context = self._context
        context.rendezvous(self._task.signature)
        context.messages.allreduce(work, self._task.op)
        if context.instruments.observers:
            context.instruments.step("the library's own allreduce")


class _MessageReduction(BoundCall):
    """An allreduce, or a reduction to a root.

    Args:
        context: the ranks.
        task: what to do.
        memory: in which it works: the caller's array, or scratch.
        scratch: that, to keep it; None: ``memory`` is the caller's.
        average: of 64-bit integers, for which there is scratch; None: this is another reduction.

    Attributes:
        coding: how elements travel in a wire format; None: as they are.
    """

    def __init__(
        self, context: Context, task: Task, memory: Operand, scratch: Array | None, average: LongAverage | None
    ) -> None:
        self._average = average
        self._context = context
        self._task = task
        self._shares_memory = task.choice.path is Path.HIERARCHICAL
        self._scratch = scratch
        self._address = memory.address
        count = memory.count
        self.reusable = scratch is None or scratch.nbytes <= _KEPT_NBYTES
        place = context.arena.locate(memory.address, memory.nbytes)
        self._signature = task.signature._replace(source=place)
        if place == NOWHERE:
            self._work = unowned(memory.view, memory.address)
        else:
            self._work = context.arena.view(place, task.dtype.storage, count)
        collective = task.kind.collective
        self._wants_result = collective is Collective.ALLREDUCE or context.rank == task.kind.root
        # Otherwise the schedule divides.
        self._divides = collective is Collective.REDUCE and task.op is ReduceOp.AVERAGE
        self.coding: Coded | None = None
        if task.kind.codec is None:
            nblocks = context.steps(task).nblocks
            segments = segments_of_buffer(count, nblocks, context.segment_limit(self._work, count // nblocks))
        else:
            self.coding = Coded(
                context.topology,
                context.rank,
                context.config.segment_nbytes,
                task=task,
                data=self._work,
                library=context.node.loops.library,
            )
            segments = self.coding.segments
        self._schedule = NodeSchedule(context, task, self._work, segments=segments, coding=self.coding)

    def run(self, source: Operand, place: Place) -> None:
        work = self._work
        if self._average is not None:
            return self._average.run(source, place, work, reduce=self._reduce)
        if source.address != self._address:
            _load(source, self._task, work)
        if self.coding is not None:
            self.coding.begin()
        self._reduce()
        if self._wants_result:
            if self._divides:
                divide(work, self._context.topology.size)
            target = place(())
            if target.address != self._address:
                _store(self._context, work, self._task, target=target)
        return None

    def _reduce(self) -> None:
        context = self._context
        signature = self._signature
        if self._shares_memory:
            self._schedule.run(context.rendezvous_at_board(signature))
            context.board.barrier(signature.text)
        else:
            context.rendezvous(signature)
            self._schedule.run([])

    def close(self) -> None:
        self._schedule.close()
        self._scratch = None


class _ReduceScatter(BoundCall):
    """A reduce-scatter. Where a rank adds up all terms of its part at once, from the source into the result.

    Args:
        context: the ranks.
        task: what to do.
        work: the source; or a buffer of the plan, for partial sums or a wider type.
        target: the result; None: it is copied from the buffer.
        average: of 64-bit integers, for which there is a buffer; None: this is another reduction.
    """

    def __init__(
        self, context: Context, task: Task, work: Array, target: Array | None, average: LongAverage | None = None
    ) -> None:
        self._context = context
        self._task = task
        self._work = work
        self._target = target
        self._average = average
        self.reusable = target is not None or work.nbytes <= _COPIED_NBYTES
        counts = task.kind.counts if average is None else average.counts
        partition = Partition.of_sizes(counts)
        own = partition.segment[context.rank]
        segments = segments_of_blocks(partition, context.segment_limit(work, max(counts)))
        results = [
            tuple(
                slice(part.start - own.start, part.stop - own.start) if rank == context.rank else slice(0, 0)
                for rank, part in enumerate(segment)
            )
            for segment in segments
        ]
        memory = BlockMemory(work) if target is None else BlockMemory(work, result=target, result_segments=results)
        op = ReduceOp.SUM if task.op is ReduceOp.AVERAGE else task.op  # Only the own block is complete in the end.
        self._schedule = context.bind(task, segments, memory, kernels=context.kernels(task.dtype, op))
        self._own = work[own] if target is None else target

    def run(self, source: Operand, place: Place) -> None:
        if self._average is not None:
            return self._average.run(source, place, self._work, reduce=self._reduce)
        if self._target is None:
            _load(source, self._task, self._work)
        self._reduce()
        if self._task.op is ReduceOp.AVERAGE:
            divide(self._own, self._context.topology.size)
        if self._target is None:
            _store(self._context, self._own, self._task, target=place(()))
        return None

    def _reduce(self) -> None:
        self._context.rendezvous(self._task.signature)
        self._schedule.run()

    def close(self) -> None:
        self._schedule.close()


def _load(source: Operand, task: Task, work: Array) -> None:
    """Copy an input to where it is reduced."""
    if task.is_wide:
        widen(source.view, source.dtype, work)
    elif source.view is not work:
        np.copyto(work, source.view)


def _store(context: Context, work: Array, task: Task, target: Operand) -> None:
    """Copy a result to its array; averages of integers of up to 32 bits are still sums, and are divided here."""
    if task.is_wide:
        if task.op is not task.kind.op:
            divide_toward_zero(work, context.topology.size)
        narrow(work, target.dtype, target.view)
    elif work is not target.view:
        np.copyto(target.view, work)
