"""The paths over messages: for calls on several nodes, and for algorithms with messages that were asked for by name.

A reduction works in the memory of the result where it can, else in a buffer of the plan. An algorithm that also touches
the memory of other ranks of the node works in the arena, and begins at the board. Plans are bound to addresses and keep
no array alive: a plan runs only while the caller holds its arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand, divide, divide_toward_zero, kernels_for, narrow, unowned, widen
from ringreduce.collectives.call import VENDOR, Problem, Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.execution import BoundSchedule
from ringreduce.collectives.memory import Coding, Memory
from ringreduce.collectives.path import Path, touches_memory
from ringreduce.collectives.plan import Place, Plan
from ringreduce.collectives.transfers import TRANSFERS, segment_limit
from ringreduce.common.partition import Partition, Segment, segments_of_blocks, segments_of_buffer
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.shared.arena import Location

__all__ = ["HierarchicalPath", "MessagePath", "NodeSchedule", "VendorPath"]

Array = npt.NDArray[Any]

#: A private array of up to so many bytes is copied into a buffer of the plan, so that one plan serves all of them.
_OWN_BUFFER_NBYTES = 1 << 20


class MessagePath(Path):
    """Everything as messages between ranks."""

    transport: ClassVar[str] = "messages"
    #: Whether the ranks of a node touch each other's memory, too.
    shares_memory: ClassVar[bool] = False

    @classmethod
    def takes(cls, algorithm: str, problem: Problem) -> bool:
        return touches_memory(algorithm, problem) == cls.shares_memory

    def reduction(self, task: Task, source: Operand, target: Operand | None) -> Plan:
        context, plans = self._context, self._context.plans
        key = "messages", task.signature.code, task.choice.algorithm
        if task.problem.collective is Collective.REDUCE_SCATTER:
            assert target is not None
            if task.is_wide or not _reduces_by_rank(context, task):
                return plans.get(key, lambda: _ReduceScatterInBuffer(context, task, source.view.size))
            where = source.address, target.address
            return plans.get((*key, *where), lambda: _ReduceScatter(context, task, source, target))
        memory = self._memory(task, source, target)
        make = partial(_Reduction, context, task, source.view.size, memory, self.shares_memory)
        return plans.get((*key, None if memory is None else memory.address), make)

    def movement(self, task: Task, source: Operand, numbers: tuple[int, ...]) -> Plan:
        make = TRANSFERS[task.problem.collective]
        key = "messages", task.signature.code, task.choice.algorithm, source.address, source.view.size, numbers
        return self._context.plans.get(key, lambda: make(self._context, task, source, numbers))

    def _memory(self, task: Task, source: Operand, target: Operand | None) -> Operand | None:
        """Return the caller's array, source or target, in which the reduction can work; None: it needs a buffer."""
        there = target
        if there is None and not self.shares_memory:
            steps = self._context.schedule(task.problem.collective, task.choice.algorithm, task.root).steps
            there = None if any(step.recvs for step in steps) else source  # it is only sent
        if there is None or task.is_wide:
            return None
        in_arena = self._context.arena.locate(there.address, there.nbytes) is not None
        large = there.nbytes > _OWN_BUFFER_NBYTES and not self.shares_memory
        return there if in_arena or large else None


class HierarchicalPath(MessagePath):
    """Reductions in shared memory within the nodes, and as messages between them."""

    transport = "shared+messages"
    shares_memory = True


class VendorPath(Path):
    """Allreduces by the MPI library."""

    transport = "messages"

    @classmethod
    def takes(cls, algorithm: str, problem: Problem) -> bool:
        if algorithm != VENDOR or problem.library is None:
            return False
        reduced = cls.as_reduced(problem)
        assert reduced.op is not None
        return problem.library(reduced.nbytes // reduced.dtype.itemsize, reduced.dtype.name, reduced.op)

    def reduction(self, task: Task, source: Operand, target: Operand | None) -> Plan:
        return self._context.plans.get(("mpi", task.signature.code), lambda: _VendorReduction(self._context, task))


class _VendorReduction(Plan):
    """The allreduce of the MPI library. That compares no signatures, so the ranks do it before, in each call."""

    def __init__(self, context: Context, task: Task) -> None:
        self._context, self._task = context, task

    def run(self, source: Operand, place: Place) -> None:
        context, task, target = self._context, self._task, place(())
        context.meet(task.signature)
        work = np.empty(source.view.size, task.dtype.storage) if task.is_wide else target.view
        _load(source, task, work)
        context.messages.allreduce(work, task.op)
        if context.instruments.observers:
            context.instruments.step("the library's own allreduce")
        if task.op is ReduceOp.AVERAGE:
            divide(work, context.topology.size)
        _store(work, task, target)


class _Reduction(Plan):
    """An allreduce, or a reduction to a root, of so many elements.

    Args:
        context: the ranks.
        task: what to do.
        count: elements.
        memory: the caller's array in which it works; None: it works in a buffer of its own, for arrays anywhere.
        shares_memory: whether other ranks of the node touch that memory.
    """

    def __init__(self, context: Context, task: Task, count: int, memory: Operand | None, shares_memory: bool) -> None:
        self._context, self._task, self._shares_memory = context, task, shares_memory
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
        collective = task.problem.collective
        self._wants_result = collective is Collective.ALLREDUCE or context.rank == task.root
        self._divides = collective is Collective.REDUCE and task.op is ReduceOp.AVERAGE  # else the schedule does
        nblocks = context.schedule(collective, task.choice.algorithm, task.root).nblocks
        limit = segment_limit(context, self._work, count // nblocks)
        self._schedule = NodeSchedule(context, task, self._work, segments_of_buffer(count, nblocks, limit))

    def run(self, source: Operand, place: Place) -> None:
        context, signature, work = self._context, self._task.signature, self._work
        if source.address != self._address:
            _load(source, self._task, work)
        if self._shares_memory:
            self._schedule.run(context.meet_at_board(signature, self._location))
            context.board.barrier(signature.text)
        else:
            context.meet(signature)
            self._schedule.run([])
        if self._wants_result:
            if self._divides:
                divide(work, context.topology.size)
            if self._own is not None:
                _store(work, self._task, place(()))

    def close(self) -> None:
        self._schedule.close()
        if self._own is not None:
            self._context.arena.release(self._own)
            self._own = None


class NodeSchedule:
    """A schedule on a buffer of this rank; bound again when a peer's buffer has moved since the last call.

    Args:
        context: the ranks.
        task: what to do.
        memory: this rank's buffer. It is kept, so it must not keep an array of the caller's alive.
        segments: of the buffer.
        coding: how blocks travel, see `BoundSchedule`; it divides averages itself.
    """

    def __init__(
        self, context: Context, task: Task, memory: Array, segments: Sequence[Segment], coding: Coding | None = None
    ) -> None:
        self._context, self._task, self._memory = context, task, memory
        self._segments, self._coding = segments, coding
        self._others: list[int] = []
        self._bound: BoundSchedule | None = None

    def run(self, others: list[int]) -> None:
        """Run it. ``others``: where the buffers of the node's other ranks are, packed; empty if none is touched."""
        if self._bound is None or others != self._others:
            self.close()
            self._bound, self._others = self._bind(others), others
        self._bound.run()

    def close(self) -> None:
        """Give back the messages."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None

    def _bind(self, others: list[int]) -> BoundSchedule:
        context, task, memory = self._context, self._task, self._memory
        at_root = task.op is ReduceOp.AVERAGE and task.problem.collective is Collective.REDUCE
        op = ReduceOp.SUM if at_root or self._coding is not None else task.op
        peers = {
            peer: context.arena.peer_view(peer, Location.unpack(place), memory.dtype, memory.size)
            for peer, place in zip(context.board.peers, others, strict=False)
        }
        return context.bind(
            task.problem.collective,
            task.choice.algorithm,
            self._segments,
            Memory(memory, peers),
            kernels_for(task.dtype, op, context.topology.size),
            task.signature,
            root=task.root,
            coding=self._coding,
        )


class _ReduceScatter(Plan):
    """A reduce-scatter in which a rank adds up all terms of its part at once, from the source into the result."""

    def __init__(self, context: Context, task: Task, source: Operand, target: Operand) -> None:
        self._context, self._task = context, task
        self._target = unowned(target.view, target.address)
        self._schedule = _bind_reduce_scatter(context, task, unowned(source.view, source.address), self._target)

    def run(self, source: Operand, place: Place) -> None:
        self._context.meet(self._task.signature)
        self._schedule.run()
        if self._task.op is ReduceOp.AVERAGE:
            divide(self._target, self._context.topology.size)

    def close(self) -> None:
        self._schedule.close()


class _ReduceScatterInBuffer(Plan):
    """A reduce-scatter with partial sums, or in a wider type: in a buffer of its own."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        self._context, self._task = context, task
        self._work = np.empty(count, task.dtype.storage)
        self.reusable = self._work.nbytes <= _OWN_BUFFER_NBYTES
        self._schedule = _bind_reduce_scatter(context, task, self._work)

    def run(self, source: Operand, place: Place) -> None:
        context, task = self._context, self._task
        context.meet(task.signature)
        _load(source, task, self._work)
        self._schedule.run()
        own = self._work[Partition.of_sizes(task.counts).segment[context.rank]]
        if task.op is ReduceOp.AVERAGE:
            divide(own, context.topology.size)
        _store(own, task, place(()))

    def close(self) -> None:
        self._schedule.close()


def _bind_reduce_scatter(context: Context, task: Task, work: Array, target: Array | None = None) -> BoundSchedule:
    """Bind a reduce-scatter in ``work``; into ``target``, where all terms are added up at once."""
    partition = Partition.of_sizes(task.counts)
    own = partition.segment[context.rank]
    segments = segments_of_blocks(partition, segment_limit(context, work, max(task.counts)))
    results = [
        tuple(
            slice(part.start - own.start, part.stop - own.start) if rank == context.rank else slice(0, 0)
            for rank, part in enumerate(segment)
        )
        for segment in segments
    ]
    memory = Memory(work) if target is None else Memory(work, result=target, result_segments=results)
    op = ReduceOp.SUM if task.op is ReduceOp.AVERAGE else task.op  # only the own block is complete in the end
    kernels = kernels_for(task.dtype, op, context.topology.size)
    return context.bind(Collective.REDUCE_SCATTER, task.choice.algorithm, segments, memory, kernels, task.signature)


def _reduces_by_rank(context: Context, task: Task) -> bool:
    """Return whether every reduction of the schedule has all terms at once, so that no partial sum is in the source."""
    return all(step.by_rank for step in context.schedule(Collective.REDUCE_SCATTER, task.choice.algorithm).steps)


def _load(source: Operand, task: Task, work: Array) -> None:
    """Copy an input to where it is reduced."""
    if task.is_wide:
        widen(source.view, source.dtype, work)
    elif source.view is not work:
        np.copyto(work, source.view)


def _store(work: Array, task: Task, target: Operand) -> None:
    """Copy a result to its array; averages of integers are still sums, and are divided here."""
    if task.is_wide:
        if task.problem.averages_integers:
            divide_toward_zero(work, task.problem.topology.size)
        narrow(work, target.dtype, target.view)
    elif work is not target.view:
        np.copyto(target.view, work)
