"""Plans that move data as messages: broadcast, allgather, gather, scatter and alltoall on several nodes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand, address_of, unowned
from ringreduce.collectives.call import Signature, Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.execution import STREAMS, BoundSchedule
from ringreduce.collectives.memory import Elements, Memory
from ringreduce.collectives.plan import Place, Plan
from ringreduce.collectives.rows import agreed_part, received_rows
from ringreduce.common.partition import Partition, segments_across_blocks, segments_of_blocks, segments_of_buffer

__all__ = ["TRANSFERS", "Transfer", "segment_limit"]

Array = npt.NDArray[Any]

#: Segments are at least the largest that the settings allow, divided by this: a message costs 10 us of Python.
_FEWER = 2


def segment_limit(context: Context, data: Elements, largest: int) -> int:
    """Return how many elements of a block travel at once: at most what the settings say, and at least half of it.

    Between these limits, so many that each stream of a schedule has two segments.

    Args:
        context: has the setting.
        data: the buffer.
        largest: elements of its largest block, the same on all ranks.
    """
    most = context.config.segment_nbytes // data.itemsize
    return max(1, min(most, max(most // _FEWER, -(-largest // (2 * STREAMS)))))


class Transfer(Plan):
    """A movement as messages.

    Args:
        context: the ranks.
        task: what to do.
        source: this rank's input, flat; it is not kept.
        numbers: what this rank tells the others about it; see `ringreduce.collectives.rows`.
    """

    def __init__(self, context: Context, task: Task, source: Operand, numbers: tuple[int, ...]) -> None:
        self._context, self._task, self._numbers = context, task, numbers
        self._source = unowned(source.view, source.address)
        self._where = source.address

    def run(self, source: Operand, place: Place) -> None:
        self._context.meet(self._task.signature)
        self._move(place)

    @abstractmethod
    def _move(self, place: Place) -> None:
        """Move the data, after the ranks have met."""

    def _told(self) -> list[list[int]]:
        """Return the numbers of all ranks, in rank order."""
        context, signature, count = self._context, self._task.signature, len(self._numbers)
        key = "numbers", signature.code, count
        return context.plans.get(key, lambda: _Exchange(context, signature, count)).run(self._numbers)

    def _run(self, bind: Callable[[], BoundSchedule], *where: int) -> None:
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

    def _bind(self, segments: Any, memory: Elements) -> BoundSchedule:
        task = self._task
        collective, algorithm = task.problem.collective, task.choice.algorithm
        return self._context.bind(collective, algorithm, segments, Memory(memory), None, task.signature, root=task.root)


class _Broadcast(Transfer):
    def _move(self, place: Place) -> None:
        context, task, source = self._context, self._task, self._source

        def bind() -> BoundSchedule:
            nblocks = context.schedule(Collective.BROADCAST, task.choice.algorithm, task.root).nblocks
            limit = segment_limit(context, source, source.size // nblocks)
            return self._bind(segments_of_buffer(source.size, nblocks, limit), source)

        self._run(bind, task.root, self._where)
        target = place(())
        if target.address != self._where:
            np.copyto(target.view, source)


class _Allgather(Transfer):
    def _move(self, place: Place) -> None:
        context, task = self._context, self._task
        rows = received_rows(task.signature.text, self._told(), context.rank)
        partition, target = Partition.of_sizes([each * task.row for each in rows]), place(rows)
        _copy(self._source, target.view[partition.segment[context.rank]])

        def bind() -> BoundSchedule:
            memory = unowned(target.view, target.address)
            limit = segment_limit(context, memory, max(rows) * task.row)
            return self._bind(segments_of_blocks(partition, limit), memory)

        self._run(bind, target.address, *rows)


class _Alltoall(Transfer):
    def _move(self, place: Place) -> None:
        context, task = self._context, self._task
        told = self._told()
        rows = received_rows(task.signature.text, told, context.rank)
        given = self._numbers[1:] if len(self._numbers) > 2 else self._numbers[1:] * context.topology.size
        sending, receiving = [each * task.row for each in given], [each * task.row for each in rows]
        target, rank = place(rows), context.rank
        own = Partition.of_sizes(receiving).segment[rank]
        np.copyto(target.view[own], self._source[Partition.of_sizes(sending).segment[rank]])

        def bind() -> BoundSchedule:
            largest = max(max(each[1:]) for each in told) * task.row
            memory = _Joined(self._source, unowned(target.view, target.address))
            both = Partition.of_sizes([*sending, *receiving])
            return self._bind(segments_of_blocks(both, segment_limit(context, target.view, largest), largest), memory)

        counts = {count for each in told for count in each[1:]}
        if len(counts) == 1:
            self._run(bind, self._where, target.address, *counts)
        else:
            self._run(bind)  # the numbers mostly differ from call to call


class _Gather(Transfer):
    def _move(self, place: Place) -> None:
        context, task, source = self._context, self._task, self._source
        rows = received_rows(task.signature.text, self._told(), task.root)
        partition = Partition.of_sizes([each * task.row for each in rows])
        own = partition.segment[context.rank]
        memory: Elements = _Part(source, own.start)
        where: tuple[int, ...] = (self._where, *rows)
        if context.rank == task.root:
            target = place(rows)
            _copy(source, target.view[own])
            memory, where = unowned(target.view, target.address), (target.address, *rows)
        elif _hands_on(context, task):
            work = np.empty(partition.bounds[-1], source.dtype)
            np.copyto(work[own], source)
            memory, where = work, ()
        self._run(lambda: self._bind(_across(context, partition, memory), memory), *where)


class _Scatter(Transfer):
    def _move(self, place: Place) -> None:
        context, task = self._context, self._task
        target = place(agreed_part(task.signature.text, self._told(), task.root))
        partition = Partition.of_sizes([target.count] * context.topology.size)
        own = partition.segment[context.rank]
        memory: Elements = _Part(unowned(target.view, target.address), own.start)
        where: tuple[int, ...] = (target.address, target.count)
        work: Array | None = None
        if context.rank == task.root:
            memory = work = self._source
            where = self._where, target.count
        elif _hands_on(context, task):
            memory = work = np.empty(partition.bounds[-1], self._source.dtype)
            where = ()
        self._run(lambda: self._bind(_across(context, partition, memory), memory), *where)
        if work is not None:
            _copy(work[own], target.view)


TRANSFERS: dict[Collective, type[Transfer]] = {
    Collective.BROADCAST: _Broadcast,
    Collective.ALLGATHER: _Allgather,
    Collective.ALLTOALL: _Alltoall,
    Collective.GATHER: _Gather,
    Collective.SCATTER: _Scatter,
}


class _Exchange:
    """Gives a few numbers of every rank to all; runs within a call, after the ranks have met."""

    reusable = True

    def __init__(self, context: Context, signature: Signature, count: int) -> None:
        size = context.topology.size
        self._everyone = np.empty((size, count), np.int64)
        self._mine = self._everyone[context.rank]
        memory, segments = Memory(self._everyone.reshape(-1)), [Partition.of_sizes([count] * size).segment]
        self._schedule = context.bind(Collective.ALLGATHER, "direct", segments, memory, None, signature)

    def run(self, numbers: tuple[int, ...]) -> list[list[int]]:
        self._mine[:] = numbers
        self._schedule.run()
        told: list[list[int]] = self._everyone.tolist()
        return told

    def close(self) -> None:
        self._schedule.close()


class _Part:
    """The part that this rank has of an array, addressed by positions in the whole; no other part is asked for.

    Args:
        part: its elements.
        start: of the first of them in the whole.
    """

    def __init__(self, part: Array, start: int) -> None:
        self._part, self._start = part, start
        self.dtype, self.itemsize = part.dtype, part.itemsize

    def __getitem__(self, part: slice) -> Array:
        return self._part[part.start - self._start : part.stop - self._start]


class _Joined:
    """Two arrays as one, without a copy: every part that is asked for is within one of them."""

    def __init__(self, first: Array, second: Array) -> None:
        self._first, self._second = first, second
        self.dtype, self.itemsize = first.dtype, first.itemsize

    def __getitem__(self, part: slice) -> Array:
        if part.stop <= self._first.size:
            return self._first[part]
        return self._second[part.start - self._first.size : part.stop - self._first.size]


def _across(context: Context, partition: Partition, memory: Elements) -> Any:
    return segments_across_blocks(partition, segment_limit(context, memory, partition.bounds[-1]))


def _hands_on(context: Context, task: Task) -> bool:
    """Return whether this rank receives blocks that it sends on."""
    steps = context.schedule(task.problem.collective, task.choice.algorithm, task.root).steps
    return any(step.sends for step in steps) and any(step.recvs for step in steps)


def _copy(source: Array, target: Array) -> None:
    if address_of(source) != address_of(target):
        np.copyto(target, source)
