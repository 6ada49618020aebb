"""The paths over messages: for calls on several nodes, and for algorithms with messages that were asked for by name.

An algorithm that also touches the memory of other ranks of the node works in the arena: all ranks meet at the board.

Plans of allreduces are kept for memory that is ours (the arena). A private array of moderate size travels through a
buffer of the plan; a large one gets a plan for the one call. Those of other collectives are bound to addresses; they
keep no array alive, and run only while the caller holds the arrays that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand, address_of, divide, kernels_for, unowned
from ringreduce.collectives.context import Context, Signature
from ringreduce.collectives.path import (
    VENDOR,
    Again,
    Call,
    Offer,
    Path,
    Reduction,
    Result,
    Task,
    part_agreed,
    rows_received,
)
from ringreduce.collectives.plan import STREAMS, Coding, Elements, Memory, Plan
from ringreduce.collectives.shared import locate, peer_views, touches_memory
from ringreduce.common.partition import (
    Partition,
    Segment,
    segments_across_blocks,
    segments_of_blocks,
    segments_of_buffer,
)
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.shared.arena import Location

__all__ = ["BoundPlan", "Hierarchy", "Library", "Messages"]

Array = npt.NDArray[Any]

#: A private array of up to this many bytes is copied into a plan's own buffer, so that the plan can be kept.
_OWN_BUFFER_NBYTES = 1 << 20
#: Segments are not smaller than the most that the settings allow by more than this: a message costs 10 us of Python.
_FEWER = 2


class Messages(Path):
    """Everything as messages between ranks."""

    transport: ClassVar[str] = "messages"
    #: Whether the ranks of a node touch each other's memory, too.
    shares_memory: ClassVar[bool] = False

    @classmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        return touches_memory(algorithm, call) == cls.shares_memory

    def allreduce(self, task: Task, shape: tuple[int, ...]) -> _Reduction:
        return _Reduction(self, task)

    def broadcast(self, task: Task, source: Array, target: Array, root: int) -> Again:
        context = self._context
        if context.rank == root and address_of(source) != address_of(target):
            np.copyto(target, source)
        context.meet(task.signature)

        def bind() -> Plan:
            nblocks = context.schedule(Collective.BROADCAST, task.algorithm, root).nblocks
            segments = segments_of_buffer(target.size, nblocks, _segment_limit(context, target, target.size // nblocks))
            memory = Memory(unowned(target))
            return context.plan(Collective.BROADCAST, task.algorithm, segments, memory, None, task.signature, root=root)

        self._plan(task, bind, root, address_of(target)).run()
        return None

    def allgather(self, task: Task, source: Array, offer: Offer, row: int, result: Result) -> Again:
        context = self._context
        rows = rows_received(task.signature.text, self._offers(task, offer), context.rank)
        partition, target = Partition.of_sizes([each * row for each in rows]), result(rows).flat()
        own = target[partition.segment[context.rank]]
        if address_of(own) != address_of(source):
            np.copyto(own, source)

        def bind() -> Plan:
            segments = segments_of_blocks(partition, _segment_limit(context, target, max(rows) * row))
            memory = Memory(unowned(target))
            return context.plan(Collective.ALLGATHER, task.algorithm, segments, memory, None, task.signature)

        self._plan(task, bind, address_of(target), *rows).run()
        return None

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], target: Array) -> Again:
        context, size = self._context, self._context.topology.size
        context.meet(task.signature)
        schedule = context.schedule(Collective.REDUCE_SCATTER, task.algorithm)
        if all(step.by_rank for step in schedule.steps):  # then nothing is summed up in the source
            plan = self._plan(
                task,
                lambda: self._scattering(task, counts, unowned(source), unowned(target)),
                address_of(source),
                address_of(target),
            )
            plan.run()
        else:
            work = source.copy()
            plan = self._scattering(task, counts, work)
            try:
                plan.run()
            finally:
                plan.close()
            np.copyto(target, work[Partition.of_sizes(counts).segment[context.rank]])
        if task.op is ReduceOp.AVERAGE:
            divide(target, size)
        return None

    def reduce(self, task: Task, source: Array, target: Array | None, root: int) -> Again:
        op = ReduceOp.SUM if task.op is ReduceOp.AVERAGE else task.op  # only the root's is complete in the end
        _Reduction(self, task._replace(op=op), Collective.REDUCE, root).run_to_root(source, target)
        if target is not None and task.op is ReduceOp.AVERAGE:
            divide(target, self._context.topology.size)
        return None

    def _scattering(self, task: Task, counts: Sequence[int], work: Array, target: Array | None = None) -> Plan:
        """Bind a reduce-scatter; into ``target``, if nothing is reduced in the array itself."""
        context, partition = self._context, Partition.of_sizes(counts)
        own = partition.segment[context.rank]
        segments = segments_of_blocks(partition, _segment_limit(context, work, max(counts)))
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
        return context.plan(Collective.REDUCE_SCATTER, task.algorithm, segments, memory, kernels, task.signature)

    def alltoall(self, task: Task, source: Array, offer: Offer, row: int, result: Result) -> Again:
        context = self._context
        offers = self._offers(task, offer)
        rows = rows_received(task.signature.text, offers, context.rank)
        sending, receiving = [each * row for each in offer.rows], [each * row for each in rows]
        target = result(rows).flat()
        own = Partition.of_sizes(receiving).segment[context.rank]
        np.copyto(target[own], source[Partition.of_sizes(sending).segment[context.rank]])

        def bind() -> Plan:
            both = Partition.of_sizes([*sending, *receiving])
            largest = max(max(each.rows) for each in offers) * row
            segments = segments_of_blocks(both, _segment_limit(context, target, largest), largest)
            memory = Memory(_Joined(unowned(source), unowned(target)))
            return context.plan(Collective.ALLTOALL, task.algorithm, segments, memory, None, task.signature)

        counts = {count for each in offers for count in each.rows}
        if len(counts) == 1:
            self._plan(task, bind, address_of(source), address_of(target), *counts).run()
            return None
        plan = bind()  # other numbers each time, mostly
        try:
            plan.run()
        finally:
            plan.close()
        return None

    def gather(self, task: Task, source: Array, offer: Offer, row: int, result: Result, root: int) -> Again:
        rank = self._context.rank
        rows = rows_received(task.signature.text, self._offers(task, offer), root)
        partition = Partition.of_sizes([each * row for each in rows])
        own = partition.segment[rank]
        memory: Elements = _Part(unowned(source), own.start)
        where, kept = address_of(source), True
        if rank == root:
            target = result(rows).flat()
            if address_of(target[own]) != address_of(source):
                np.copyto(target[own], source)
            memory, where = unowned(target), address_of(target)
        elif self._hands_on(Collective.GATHER, task, root):
            work = np.empty(partition.bounds[-1], source.dtype)
            np.copyto(work[own], source)
            memory, kept = work, False
        self._move(Collective.GATHER, task, partition, memory, root, (where, *rows) if kept else None)
        return None

    def scatter(self, task: Task, source: Array, offer: Offer, result: Result, root: int) -> Again:
        context, rank = self._context, self._context.rank
        part = part_agreed(task.signature.text, self._offers(task, offer), root)
        target = result(part).flat()
        partition = Partition.of_sizes([target.size] * context.topology.size)
        own = partition.segment[rank]
        memory: Elements = _Part(unowned(target), own.start)
        where, work = address_of(target), None
        if rank == root:
            memory, where, work = unowned(source), address_of(source), source
        elif self._hands_on(Collective.SCATTER, task, root):
            memory = work = np.empty(partition.bounds[-1], source.dtype)
        kept = (where, target.size) if rank == root or work is None else None
        self._move(Collective.SCATTER, task, partition, memory, root, kept)
        if work is not None and address_of(work[own]) != address_of(target):
            np.copyto(target, work[own])
        return None

    def _hands_on(self, collective: Collective, task: Task, root: int) -> bool:
        """Return whether this rank gets blocks of others, to hand them on."""
        steps = self._context.schedule(collective, task.algorithm, root).steps
        return any(step.sends for step in steps) and any(step.recvs for step in steps)

    def _move(
        self,
        collective: Collective,
        task: Task,
        partition: Partition,
        memory: Elements,
        root: int,
        where: tuple[int, ...] | None,
    ) -> None:
        """Carry out a gather or a scatter.

        Args:
            collective: which of them.
            task: how.
            partition: of all ranks' elements.
            memory: where those are that this rank touches.
            root: of the collective.
            where: what a plan depends on that is kept; None: it is for this call alone.
        """
        context = self._context

        def bind() -> Plan:
            segments = segments_across_blocks(partition, _segment_limit(context, memory, partition.bounds[-1]))
            return context.plan(collective, task.algorithm, segments, Memory(memory), None, task.signature, root=root)

        if where is not None:
            self._plan(task, bind, *where).run()
            return
        plan = bind()
        try:
            plan.run()
        finally:
            plan.close()

    def _offers(self, task: Task, offer: Offer) -> list[Offer]:
        """Meet the others in a call, and return the offers of all, in rank order."""
        context, saying = self._context, (offer.room, *offer.rows)
        context.meet(task.signature)
        exchange: _Exchange = self._plans.get(
            ("offers", task.signature.code), lambda: _Exchange(context, task.signature, len(saying))
        )
        return [Offer(room, tuple(rows)) for room, *rows in exchange.run(saying)]

    def _plan(self, task: Task, bind: Callable[[], Plan], *where: int) -> Plan:
        """Return a plan for memory at these addresses, and whatever else it depends on; bind it if there is none."""
        plan: Plan = self._plans.get((task.signature.code, task.algorithm, *where), bind)
        return plan


class _Exchange:
    """Gives a few numbers of every rank to all, in a call that the ranks have met in."""

    def __init__(self, context: Context, signature: Signature, count: int) -> None:
        size = context.topology.size
        self._everyone = np.empty((size, count), np.int64)
        self._mine = self._everyone[context.rank]
        memory, segments = Memory(self._everyone.reshape(-1)), [Partition.of_sizes([count] * size).segment]
        self._plan = context.plan(Collective.ALLGATHER, "direct", segments, memory, None, signature)

    def run(self, numbers: Sequence[int]) -> list[list[int]]:
        self._mine[:] = numbers
        self._plan.run()
        said: list[list[int]] = self._everyone.tolist()
        return said

    def close(self) -> None:
        self._plan.close()


class _Part:
    """A part of an array that this rank has, while it knows where in the whole it is: no other part is asked for.

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
    """Two arrays as one, of which every part that is asked for is in one of them: no copy is made."""

    def __init__(self, first: Array, second: Array) -> None:
        self._first, self._second = first, second
        self.dtype, self.itemsize = first.dtype, first.itemsize

    def __getitem__(self, part: slice) -> Array:
        if part.stop <= self._first.size:
            return self._first[part]
        return self._second[part.start - self._first.size : part.stop - self._first.size]


class Hierarchy(Messages):
    """Allreduces in shared memory within the nodes, and as messages between them."""

    transport = "shared+messages"
    shares_memory = True


class Library(Path):
    """Allreduces by the MPI library."""

    transport = "messages"

    @classmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        if algorithm != VENDOR or call.library is None:
            return False
        reduced = cls.as_reduced(call)
        assert reduced.op is not None
        return call.library(reduced.nbytes // reduced.dtype.itemsize, reduced.dtype.name, reduced.op)

    def allreduce(self, task: Task, shape: tuple[int, ...]) -> _LibraryReduction:
        return _LibraryReduction(self._context, task)


class _LibraryReduction(Reduction):
    """The allreduce of the MPI library. It compares no signatures, so the ranks do, in each call."""

    def __init__(self, context: Context, task: Task) -> None:
        self._context = context
        self._task = task

    def run(self, source: Operand, target: Operand) -> None:
        context, dtype, op = self._context, self._task.dtype, self._task.op
        context.meet(self._task.signature)
        flat = target.flat() if target.contiguous else np.empty(target.count, dtype.storage)
        if source.address != target.address or not target.contiguous:
            np.copyto(flat.reshape(source.shape), source.view)
        context.messages.allreduce(flat, op)
        if context.instruments.observers:
            context.instruments.step("the library's own allreduce")
        if op is ReduceOp.AVERAGE:
            divide(flat, context.topology.size)
        if not target.contiguous:
            np.copyto(target.view, flat.reshape(target.shape))


class _Reduction(Reduction):
    """The reduction of arrays of one shape, in whatever memory; finds or makes its plan in each call.

    Args:
        path: which carries it out.
        task: how.
        collective: an allreduce, or a reduction to a root.
        root: of that.
    """

    def __init__(
        self, path: Messages, task: Task, collective: Collective = Collective.ALLREDUCE, root: int = 0
    ) -> None:
        self._path = path
        self._context = path._context
        self._task = task
        self._collective = collective
        self._root = root

    def run(self, source: Operand, target: Operand) -> None:
        location = locate(self._context, target)
        if location is None:
            self._run(None, target.count, source.view, target.view)
        else:
            self._run(location, target.count, None if source.address == target.address else source.view, None)

    def run_to_root(self, source: Array, target: Array | None) -> None:
        """Reduce flat arrays into the root's ``target``, which is the same memory or apart from it; None elsewhere."""
        arena, shares = self._context.arena, self._path.shares_memory
        if target is not None:
            location = arena.locate(address_of(target), target.nbytes)
            in_place = location is not None and address_of(source) == address_of(target)
            self._run(location, source.size, None if in_place else source, target if location is None else None)
            return
        schedule = self._context.schedule(self._collective, self._task.algorithm, self._root)
        only_sent = not shares and not any(step.recvs for step in schedule.steps)
        location = arena.locate(address_of(source), source.nbytes) if only_sent else None
        self._run(location, source.size, source if location is None else None, None)

    def _run(self, location: Location | None, count: int, source: Array | None, target: Array | None) -> None:
        """Reduce in the target's own memory, at a location of the arena, or in a buffer of the plan.

        ``source`` is copied in first and the result copied to ``target``, unless these are None.
        """
        if not self._path.shares_memory:
            self._context.meet(self._task.signature)  # otherwise at the board of the node, with the location
        kept = location is not None or count * self._task.dtype.itemsize <= _OWN_BUFFER_NBYTES
        if kept:
            key = self._task.signature.code, self._task.algorithm, location
            plan = self._path._plans.get(key, partial(self._plan, count, location))
        else:
            plan = self._plan(count, location)
        try:
            if source is not None:
                np.copyto(plan.memory.reshape(source.shape), source)
            plan.run()
            if target is not None:
                np.copyto(target, plan.memory.reshape(target.shape))
        finally:
            if not kept:
                plan.close()

    def _plan(self, count: int, location: Location | None) -> _Plan:
        return _Plan(self._path, self._task, count, location, self._collective, self._root)


class _Plan:
    """A reduction with messages, on a location of the arena or in a buffer of its own."""

    def __init__(
        self, path: Messages, task: Task, count: int, location: Location | None, collective: Collective, root: int
    ) -> None:
        context = self._context = path._context
        self._shares_memory = path.shares_memory
        self._task = task
        self._own = context.arena.allocate(count * task.dtype.itemsize) if location is None else None
        self._location = self._own.location if self._own is not None else location
        assert self._location is not None
        self.memory = context.arena.view(self._location, task.dtype.storage, count)
        nblocks = context.schedule(collective, task.algorithm, root).nblocks
        segments = segments_of_buffer(count, nblocks, _segment_limit(context, self.memory, count // nblocks))
        self._bound = BoundPlan(context, task, self.memory, segments, collective=collective, root=root)

    def run(self) -> None:
        context, others = self._context, []
        if self._shares_memory:
            others = context.meet_at_board(self._task.signature, self._location)
        self._bound.run(others)
        if self._shares_memory:
            context.board.barrier(self._task.signature.text)

    def close(self) -> None:
        self._bound.close()
        if self._own is not None:
            self._context.arena.release(self._own)
            self._own = None


class BoundPlan:
    """The plan of a reduction; it is bound again when a peer's buffer is elsewhere than in the last call.

    Args:
        context: the ranks.
        task: what to do.
        memory: this rank's buffer, which must not be the caller's: it is kept.
        segments: of the buffer.
        coding: how blocks travel, see `Plan`; it divides averages itself.
        collective: an allreduce, or a reduction to a root.
        root: of that.
    """

    def __init__(
        self,
        context: Context,
        task: Task,
        memory: Array,
        segments: Sequence[Segment],
        coding: Coding | None = None,
        *,
        collective: Collective = Collective.ALLREDUCE,
        root: int = 0,
    ) -> None:
        self._context = context
        self._task = task
        self._collective = collective
        self._root = root
        self._memory = memory
        self._segments = segments
        self._coding = coding
        self._others: list[int] = []
        self._plan: Plan | None = None

    def run(self, others: list[int]) -> None:
        """Carry it out; ``others``: where the buffers of the node's other ranks are, packed, if they are touched."""
        if self._plan is None or others != self._others:
            self.close()
            self._plan, self._others = self._bind(others), others
        self._plan.run()

    def close(self) -> None:
        """Give back the messages."""
        if self._plan is not None:
            self._plan.close()
            self._plan = None

    def _bind(self, others: list[int]) -> Plan:
        context, task, memory = self._context, self._task, self._memory
        return context.plan(
            self._collective,
            task.algorithm,
            self._segments,
            Memory(memory, peer_views(context, others, memory.dtype, [memory.size] * context.topology.size)),
            kernels_for(task.dtype, task.op if self._coding is None else ReduceOp.SUM, context.topology.size),
            task.signature,
            root=self._root,
            coding=self._coding,
        )


def _segment_limit(context: Context, data: Elements, largest: int) -> int:
    """Return how many elements of a block travel at once: at most what the settings say, and at least half of it.

    Between these, so many that each stream of a plan has two segments.

    Args:
        context: has the setting.
        data: the buffer.
        largest: elements of its largest block, the same on all ranks.
    """
    most = context.config.segment_nbytes // data.itemsize
    return max(1, min(most, max(most // _FEWER, -(-largest // (2 * STREAMS)))))
