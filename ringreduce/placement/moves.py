"""The other collectives: from flat operands to mailboxes, direct loads or messages.

On one node every rank publishes where its input lies (a copy of it, unless it lies in the arena already) and loads what
it needs from the others. Between nodes the blocks go as messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.algorithms.execute import Memory, Plan
from ringreduce.algorithms.fused import Mailbox
from ringreduce.buffers import DType, Kernels, divide, divide_toward_zero, kernels_for, narrow, widen, wider
from ringreduce.partition import Partition, Segment, segments_of_blocks, segments_of_buffer
from ringreduce.placement.allreduce import peer_views
from ringreduce.placement.context import Cache, Context, Signature
from ringreduce.reduce_ops import ReduceOp
from ringreduce.selection import Choice
from ringreduce.transport.board import MAILBOX_NBYTES
from ringreduce.transport.shared import Location

__all__ = ["Moves"]

Array = npt.NDArray[Any]


class Moves:
    """Carries out everything but allreduces on one process set; flat C-contiguous arrays of storage types come in."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._mailboxes: Cache[Mailbox] = Cache()

    def close(self) -> None:
        self._mailboxes.close()

    def broadcast(self, data: Array, root: int, choice: Choice, signature: Signature) -> None:
        """Copy the root's ``data`` into everyone's."""
        context = self._context
        am_root = context.rank == root
        if choice.transport == "self":
            return
        if choice.transport == "shared" and data.nbytes <= MAILBOX_NBYTES:
            boxes = self._mailbox(signature, data.dtype, data.size).swap(data if am_root else data[:0])
            if not am_root:
                np.copyto(data, boxes[root])
        elif choice.transport == "shared":
            with self._published(data if am_root else None) as location:
                others = context.meet_at_board(signature, location)
                peers = {} if am_root else {root: self._root_view(others, root, data)}
                self._load(Collective.BROADCAST, choice, Memory(data, peers), (slice(0, data.size),), signature, root)
        else:
            context.meet(signature)
            schedule = context.schedule(Collective.BROADCAST, choice.algorithm, root)
            segments = segments_of_buffer(data.size, schedule.nblocks, self._limit(data))
            self._send(Collective.BROADCAST, choice, Memory(data), segments, None, signature, root)

    def _root_view(self, others: list[int], root: int, data: Array) -> Array:
        place = others[self._context.board.peers.index(root)]
        return self._context.arena.peer_view(root, Location.unpack(place), data.dtype, data.size)

    def allgather(self, mine: Array, counts: Sequence[int], out: Array, choice: Choice, signature: Signature) -> None:
        """Put rank q's ``counts[q]`` elements into ``out`` one after the other; ``mine`` holds this rank's."""
        context = self._context
        partition = Partition.of_sizes(counts)
        own = partition.segment[context.rank]
        if choice.transport == "shared" and max(counts) * mine.itemsize <= MAILBOX_NBYTES:
            boxes = self._mailbox(signature, mine.dtype, max(counts)).swap(mine)
            for part, box in zip(partition.segment, boxes, strict=True):
                np.copyto(out[part], box[: part.stop - part.start])
            return
        np.copyto(out[own], mine)
        if choice.transport == "shared":
            with self._published(mine) as location:
                others = context.meet_at_board(signature, location)
                peers: dict[int, Array] = {}
                places: dict[int, list[Segment]] = {}
                for peer, place in zip(context.board.peers, others, strict=True):
                    peers[peer] = context.arena.peer_view(peer, Location.unpack(place), mine.dtype, counts[peer])
                    places[peer] = [(slice(0, counts[peer]),) * len(counts)]  # a peer publishes its own block alone
                memory = Memory(out, peers, places)
                self._load(Collective.ALLGATHER, choice, memory, partition.segment, signature)
        elif choice.transport != "self":
            context.meet(signature)
            segments = segments_of_blocks(partition, self._limit(out))
            self._send(Collective.ALLGATHER, choice, Memory(out), segments, None, signature)

    def reduce_scatter(
        self,
        source: Array,
        dtype: DType,
        counts: Sequence[int],
        out: Array,
        op: ReduceOp,
        choice: Choice,
        signature: Signature,
    ) -> None:
        """Cut every rank's ``source`` into blocks of ``counts`` elements; reduce this rank's block into ``out``."""
        context = self._context
        size = context.topology.size
        exact = op is not ReduceOp.AVERAGE or dtype.kind in ("float", "complex")
        if choice.transport == "self":
            np.copyto(out, source)
        elif not exact or (dtype.half and choice.transport != "shared"):
            wide, result = widen(source, dtype), np.empty(out.size, wider(dtype).storage)
            inner = op if exact else ReduceOp.SUM
            self.reduce_scatter(wide, wider(dtype), counts, result, inner, choice, signature)
            if not exact:
                divide_toward_zero(result, size)
            narrow(result, dtype, out)
        else:
            partition = Partition.of_sizes(counts)
            own = partition.segment[context.rank]
            if choice.transport == "shared" and source.nbytes <= MAILBOX_NBYTES:
                boxes = self._mailbox(signature, source.dtype, source.size).swap(source)
                kernels_for(dtype, op, size).combine([box[own] for box in boxes])(out)
            elif choice.transport == "shared":
                self._reduce_scatter_by_loads(source, dtype, partition, out, op, choice, signature)
            else:
                context.meet(signature)
                summing = ReduceOp.SUM if op is ReduceOp.AVERAGE else op
                work = source.copy()
                segments = segments_of_blocks(partition, self._limit(work))
                kernels = kernels_for(dtype, summing, size)
                self._send(Collective.REDUCE_SCATTER, choice, Memory(work), segments, kernels, signature)
                np.copyto(out, work[own])
                if op is ReduceOp.AVERAGE:
                    divide(out, size)

    def _reduce_scatter_by_loads(
        self,
        source: Array,
        dtype: DType,
        partition: Partition,
        out: Array,
        op: ReduceOp,
        choice: Choice,
        signature: Signature,
    ) -> None:
        context = self._context
        with self._published(source, copy=True) as location:  # the own block is reduced in place
            assert location is not None
            others = context.meet_at_board(signature, location)
            work = context.arena.view(location, source.dtype, source.size)
            memory = Memory(work, peer_views(context, others, source.dtype, source.size))
            kernels = kernels_for(dtype, op, context.topology.size)
            self._load(Collective.REDUCE_SCATTER, choice, memory, partition.segment, signature, kernels=kernels)
            np.copyto(out, work[partition.segment[context.rank]])

    def alltoall(self, source: Array, counts: Array, out: Array, choice: Choice, signature: Signature) -> None:
        """Send block q of ``source`` to rank q; ``out`` is what the ranks sent here, in rank order.

        Args:
            source: the blocks for rank 0, 1, ... one after the other.
            counts: (size, size) elements: ``counts[i, j]`` is what rank i sends to rank j.
            out: room for ``counts[:, rank].sum()`` elements.
            choice: how.
            signature: what the user called.
        """
        context, rank = self._context, self._context.rank
        sending = [Partition.of_sizes(row.tolist()).segment for row in counts]
        receiving = Partition.of_sizes(counts[:, rank].tolist()).segment
        np.copyto(out[receiving[rank]], source[sending[rank][rank]])
        if choice.transport == "self":
            return
        nothing = (slice(0, 0),) * len(receiving)
        largest = int(counts.sum(axis=1).max())
        if choice.transport == "shared" and largest * source.itemsize <= MAILBOX_NBYTES:
            boxes = self._mailbox(signature, source.dtype, largest).swap(source)
            for peer, part in enumerate(receiving):
                np.copyto(out[part], boxes[peer][sending[peer][rank]])
        elif choice.transport == "shared":
            with self._published(source) as location:
                others = context.meet_at_board(signature, location)
                places = dict(zip(context.board.peers, others, strict=True))
                peers = {
                    peer: context.arena.peer_view(peer, Location.unpack(place), source.dtype, int(counts[peer].sum()))
                    for peer, place in places.items()
                }
                memory = Memory(out, peers, {peer: [sending[peer] + nothing] for peer in places})
                self._load(Collective.ALLTOALL, choice, memory, nothing + receiving, signature)
        else:
            context.meet(signature)
            work = np.concatenate([source, out])
            both = Partition.of_sizes([*counts[rank].tolist(), *counts[:, rank].tolist()])
            segments = segments_of_blocks(both, self._limit(work), int(counts.max()))
            self._send(Collective.ALLTOALL, choice, Memory(work), segments, None, signature)
            np.copyto(out, work[source.size :])

    # ---- shared by all ----

    def _mailbox(self, signature: Signature, storage: np.dtype[Any], count: int) -> Mailbox:
        context = self._context
        return self._mailboxes.get(
            (signature.code, count),
            lambda: Mailbox(context.board, context.instruments, signature.text, storage, (count,)),
        )

    @contextmanager
    def _published(self, data: Array | None, *, copy: bool = False) -> Iterator[Location | None]:
        """Make ``data`` reachable for the node's other ranks until the block ends, which all ranks do together."""
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
        choice: Choice,
        memory: Memory,
        segment: Segment,
        signature: Signature,
        root: int = 0,
        kernels: Kernels | None = None,
    ) -> None:
        context = self._context
        schedule = context.schedule(collective, choice.algorithm, root)
        instruments, waiter, text = context.instruments, context.waiter, signature.text
        if instruments.observers:
            instruments.step("publish and meet")
        plan = Plan(context.rank, schedule, [segment], memory, kernels, None, waiter, text, instruments=instruments)
        plan.run()
        context.board.barrier(text)
        if instruments.observers:
            instruments.step("barrier")

    def _send(
        self,
        collective: Collective,
        choice: Choice,
        memory: Memory,
        segments: Sequence[Segment],
        kernels: Kernels | None,
        signature: Signature,
        root: int = 0,
    ) -> None:
        context = self._context
        schedule = context.schedule(collective, choice.algorithm, root)
        tag = context.tag(signature)
        plan = Plan(
            context.rank,
            schedule,
            segments,
            memory,
            kernels,
            context.messages,
            context.waiter,
            signature.text,
            tag,
            instruments=context.instruments,
        )
        try:
            plan.run()
        finally:
            plan.close()

    def _limit(self, data: Array) -> int:
        return max(1, self._context.config.segment_nbytes // data.itemsize)
