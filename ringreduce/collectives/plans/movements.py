"""Plans that move data as messages: broadcast, allgather, gather, scatter and alltoall on several nodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import Array, Operand, address_of, unowned
from ringreduce.collectives.call import Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.plan import BoundCall, Place
from ringreduce.collectives.plans.bound import BlockMemory, BoundSchedule, Elements
from ringreduce.collectives.rows import agreed_part, received_rows
from ringreduce.common.partition import (
    Partition,
    Segment,
    segments_across_blocks,
    segments_of_blocks,
    segments_of_buffer,
)
from ringreduce.transport.shared.board import Signature


def plan_transfer(context: Context, task: Task, source: Operand, numbers: tuple[int, ...]) -> BoundCall:
    """Find or make the plan of a movement. It keeps the source not alive."""
    make = _TRANSFERS[task.kind.collective]
    key = "messages", task.signature.code, task.choice.algorithm, source.address, source.view.size, numbers
    return context.plans.get(key, lambda: make(context, task, source, numbers=numbers))


class _Movement(BoundCall):
    """A movement as messages.

    Args:
        context: the ranks.
        task: what to do.
        source: this rank's input, flat; it is not kept.
        numbers: what this rank sends the others about it; see `ringreduce.collectives.rows`.
    """

    def __init__(self, context: Context, task: Task, source: Operand, numbers: tuple[int, ...]) -> None:
        self._context = context
        self._task = task
        self._numbers = numbers
        self._source = unowned(source.view, source.address)
        self._where = source.address

    def run(self, source: Operand, place: Place) -> None:
        self._context.rendezvous(self._task.signature)
        self._move(place)

    @abstractmethod
    def _move(self, place: Place) -> None:
        """Move the data, after the rendezvous."""

    def _exchange(self) -> list[list[int]]:
        """Return the numbers of all ranks, in rank order."""
        context = self._context
        signature = self._task.signature
        count = len(self._numbers)
        key = "numbers", signature.code, count
        return context.plans.get(key, lambda: _NumbersExchange(context, signature, count)).run(self._numbers)

    def _run(self, bind: Callable[[], BoundSchedule], where: tuple[int, ...] = ()) -> None:
        """Run a schedule. ``where``: the addresses and numbers that it is bound to, to keep it; empty: it runs once."""
        if where:
            key = "schedule", self._task.signature.code, self._task.choice.algorithm, *where
            self._context.plans.get(key, bind).run()
            return
        schedule = bind()
        try:
            schedule.run()
        finally:
            schedule.close()

    def _bind(self, segments: Sequence[Segment], memory: Elements) -> BoundSchedule:
        return self._context.bind(self._task, segments, BlockMemory(memory))


class _Broadcast(_Movement):
    def _move(self, place: Place) -> None:
        context = self._context
        task = self._task
        source = self._source

        def bind() -> BoundSchedule:
            nblocks = context.steps(task).nblocks
            limit = context.segment_limit(source, source.size // nblocks)
            return self._bind(segments_of_buffer(source.size, nblocks, limit), source)

        self._run(bind, (task.kind.root, self._where))
        target = place(())
        if target.address != self._where:
            np.copyto(target.view, source)


class _Allgather(_Movement):
    def _move(self, place: Place) -> None:
        context = self._context
        task = self._task
        rows = received_rows(task.signature.text, self._exchange(), context.rank)
        partition = Partition.of_sizes([count * task.kind.row for count in rows])
        target = place(rows)
        _copy(self._source, target.view[partition.segment[context.rank]])

        def bind() -> BoundSchedule:
            memory = unowned(target.view, target.address)
            limit = context.segment_limit(memory, max(rows) * task.kind.row)
            return self._bind(segments_of_blocks(partition, limit), memory)

        self._run(bind, (target.address, *rows))


class _Alltoall(_Movement):
    def _move(self, place: Place) -> None:
        context = self._context
        task = self._task
        everyone = self._exchange()
        rows = received_rows(task.signature.text, everyone, context.rank)
        row_counts = self._numbers[1:] if len(self._numbers) > 2 else self._numbers[1:] * context.topology.size
        sending = [count * task.kind.row for count in row_counts]
        receiving = [count * task.kind.row for count in rows]
        target = place(rows)
        rank = context.rank
        own = Partition.of_sizes(receiving).segment[rank]
        np.copyto(target.view[own], self._source[Partition.of_sizes(sending).segment[rank]])

        def bind() -> BoundSchedule:
            largest = max(max(numbers[1:]) for numbers in everyone) * task.kind.row
            memory = _JoinedParts((0, self._source), (self._source.size, unowned(target.view, target.address)))
            both = Partition.of_sizes([*sending, *receiving])
            return self._bind(segments_of_blocks(both, context.segment_limit(target.view, largest), largest), memory)

        counts = {count for numbers in everyone for count in numbers[1:]}
        if len(counts) == 1:
            self._run(bind, (self._where, target.address, *counts))
        else:
            self._run(bind)  # Bound anew: the numbers mostly differ from call to call.


class _GatherRows(_Movement):
    def _move(self, place: Place) -> None:
        context = self._context
        task = self._task
        source = self._source
        rows = received_rows(task.signature.text, self._exchange(), task.kind.root)
        partition = Partition.of_sizes([count * task.kind.row for count in rows])
        own = partition.segment[context.rank]
        memory: Elements = _JoinedParts((own.start, source))
        where: tuple[int, ...] = (self._where, *rows)
        if context.rank == task.kind.root:
            target = place(rows)
            _copy(source, target.view[own])
            memory = unowned(target.view, target.address)
            where = (target.address, *rows)
        elif _hands_on(context, task):
            work = np.empty(partition.bounds[-1], source.dtype)
            np.copyto(work[own], source)
            memory = work
            where = ()
        self._run(lambda: self._bind(_across(context, partition, memory), memory), where)


class _Scatter(_Movement):
    def _move(self, place: Place) -> None:
        context = self._context
        task = self._task
        target = place(agreed_part(task.signature.text, self._exchange(), task.kind.root))
        partition = Partition.of_sizes([target.count] * context.topology.size)
        own = partition.segment[context.rank]
        memory: Elements = _JoinedParts((own.start, unowned(target.view, target.address)))
        where: tuple[int, ...] = (target.address, target.count)
        work: Array | None = None
        if context.rank == task.kind.root:
            memory = work = self._source
            where = self._where, target.count
        elif _hands_on(context, task):
            memory = work = np.empty(partition.bounds[-1], self._source.dtype)
            where = ()
        self._run(lambda: self._bind(_across(context, partition, memory), memory), where)
        if work is not None:
            _copy(work[own], target.view)


_TRANSFERS: dict[Collective, type[_Movement]] = {
    Collective.BROADCAST: _Broadcast,
    Collective.ALLGATHER: _Allgather,
    Collective.ALLTOALL: _Alltoall,
    Collective.GATHER: _GatherRows,
    Collective.SCATTER: _Scatter,
}


class _NumbersExchange:
    """Gives a few numbers of every rank to all; runs within a call, after the rendezvous."""

    reusable = True

    def __init__(self, context: Context, signature: Signature, count: int) -> None:
        size = context.topology.size
        self._everyone = np.empty((size, count), np.int64)
        self._mine = self._everyone[context.rank]
        memory = BlockMemory(self._everyone.reshape(-1))
        segments = [Partition.of_sizes([count] * size).segment]
        schedule = context.schedule(Collective.ALLGATHER, "direct")
        self._schedule = BoundSchedule(schedule, segments, memory, kernels=None, link=context.link(signature))

    def run(self, numbers: tuple[int, ...]) -> list[list[int]]:
        self._mine[:] = numbers
        self._schedule.run()
        everyone: list[list[int]] = self._everyone.tolist()
        return everyone

    def close(self) -> None:
        self._schedule.close()


class _JoinedParts:
    """Parts of a whole as one, without a copy: all that is asked for is within one of them.

    Args:
        parts: (its first position in the whole, its elements), in the order of positions; of one dtype.
    """

    def __init__(self, *parts: tuple[int, Array]) -> None:
        self._parts = parts[::-1]
        self.dtype = parts[0][1].dtype
        self.itemsize = parts[0][1].itemsize

    def __getitem__(self, part: slice) -> Array:
        start, elements = next(part_and_start for part_and_start in self._parts if part_and_start[0] <= part.start)
        return elements[part.start - start : part.stop - start]


def _across(context: Context, partition: Partition, memory: Elements) -> Any:
    return segments_across_blocks(partition, context.segment_limit(memory, partition.bounds[-1]))


def _hands_on(context: Context, task: Task) -> bool:
    """Return whether this rank receives blocks that it sends on."""
    steps = context.steps(task).steps
    return any(step.sends for step in steps) and any(step.recvs for step in steps)


def _copy(source: Array, target: Array) -> None:
    if address_of(source) != address_of(target):
        np.copyto(target, source)
