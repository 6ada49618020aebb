"""The allreduce in a wire format: fewer bytes between nodes, sums in float32, one rounding in each direction.

The schedule is `hierarchical_direct`: ranks first sum up what the node has, each its lane; nothing is encoded there.
Between nodes every element is encoded twice, whatever the number of ranks: by the ranks that send it to the one that
sums it up, and by that one, which sends the sum to all (and uses what it has sent, so that all have the same bits). A
ring would round at every hop.

What rounding loses can be fed back: it is added to what is sent the next time (Seide et al., "1-bit stochastic gradient
descent", Interspeech 2014; both directions as in Tang et al., "DoubleSqueeze", ICML 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise, zip_longest

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Call, Operand, address_of, narrow, widen
from ringreduce.buffers.codecs import CODECS, Codec
from ringreduce.buffers.dtypes import DType
from ringreduce.collectives.call import Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.messages import NodeSchedule
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.partition import Partition, Segment, segments_of_buffer
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.shared.arena import Location

__all__ = ["CompressedAllreduce", "Feedback", "codec_for"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_NOTHING: Floats = np.empty(0, np.float32)

#: The largest encoded message. From 64 KiB on, Open MPI over TCP asks the receiver first, while the link idles.
_MESSAGE_NBYTES = 32 << 10
_MANY = 1 << 20


class Feedback:
    """Rounding errors of this rank, for one array that is reduced again and again.

    Args:
        keep: whether they are added to what is sent the next time; if not, they are only measured.

    Attributes:
        sent: errors of the values that this rank has sent to the ranks that sum up; as long as the part of the array
            that it sends.
        summed: errors of the sums that this rank has sent out; as long as the part that it sums up. Both are None
            before the first call, and on a rank without a lane; empty where nothing is encoded.
    """

    def __init__(self, *, keep: bool = True) -> None:
        self.keep = keep
        self.sent: Floats | None = None
        self.summed: Floats | None = None
        self._lost = 0.0
        self._meant = 0.0

    @property
    def error(self) -> float:
        """The relative rounding error of this rank in the last call: |error| / |values|, in the Euclidean norm."""
        return float(np.sqrt(self._lost / self._meant)) if self._meant else 0.0

    def begin(self, sent: int, summed: int) -> None:
        """Prepare for a call; for `CompressedAllreduce`. Errors of another length are forgotten."""
        if self.sent is None or self.sent.size != sent:
            self.sent = np.zeros(sent, np.float32)
        if self.summed is None or self.summed.size != summed:
            self.summed = np.zeros(summed, np.float32)
        self._lost = self._meant = 0.0

    def correct(self, values: Floats, kept: Floats) -> None:
        """Add the errors of the last time to ``values``."""
        if self.keep:
            np.add(values, kept, out=values)

    def measure(self, meant: Floats, arrived: Floats, kept: Floats) -> None:
        """Keep and measure the difference between the values meant and the values that arrived."""
        np.subtract(meant, arrived, out=kept)
        self._meant += float(np.dot(meant, meant))
        lost = float(np.dot(kept, kept))
        if np.isfinite(lost):
            self._lost += lost
        else:  # a value that is not finite arrives as such, and must not come again
            kept.fill(0.0)


def codec_for(wire: str, dtype: DType, op: ReduceOp, *, deterministic: bool) -> Codec:
    """Return the format in which an allreduce is to travel.

    Raises:
        ConfigError: no format has this name, or settings forbid rounding, or the op does not allow it.
        UnsupportedBufferError: the elements are no floats.
    """
    codec = CODECS.get(wire)
    if codec is None:
        raise ConfigError(f"unknown wire format {wire!r}; choose one of {', '.join(CODECS)}")
    if deterministic:
        raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so wire={wire!r} cannot be asked for")
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ConfigError(f"{op.value} of rounded values makes no sense; wire formats are for sums and averages")
    if dtype.kind != "float":
        raise UnsupportedBufferError(f"wire formats are for floats, got {dtype.name}")
    return codec


class CompressedAllreduce:
    """Carries out allreduces in wire formats on one process set that spans several nodes."""

    transport = "messages"
    #: It encodes every element twice, whatever the number of ranks.
    algorithm = "hierarchical_direct"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._shares_memory = max(len(each) for each in context.topology.nodes) > 1
        self._staging: Floats = _NOTHING  # in the arena

    def allreduce(self, codec: Codec, task: Task, source: Operand, target: Operand, feedback: Feedback | None) -> None:
        """Reduce floats into ``target``, both flat: the same memory or apart from it.

        Raises:
            MismatchError, CollectiveTimeoutError, TransportError: see the communicator.
        """
        plain = source.dtype.name == "float32"
        if source.dtype.half:
            work = widen(source.view, source.dtype)
        elif plain:
            work = target.view
            if source.address != target.address:
                np.copyto(work, source.view)
        else:
            work = source.view.astype(np.float32)
        self._run(codec, task, work, feedback)
        if source.dtype.half:
            narrow(work, target.dtype, target.view)
        elif not plain:
            np.copyto(target.view, work, casting="same_kind")

    def _run(self, codec: Codec, task: Task, data: Floats, feedback: Feedback | None) -> None:
        """Reduce ``data`` in place: one-dimensional, contiguous."""
        context = self._context
        if not self._shares_memory:
            context.meet(task.signature)
            self._plan(codec, task, data.size, None).run(data, [], feedback)
            return
        work, location = data, context.arena.locate(address_of(data), data.nbytes)
        if location is None:  # staged where the node can reach it
            if self._staging.size < max(1, data.size):
                self._staging = context.arena.array(max(4, data.nbytes)).view(np.float32)
            work = self._staging[: data.size]
            location = context.arena.locate(address_of(work), work.nbytes)
            np.copyto(work, data)
        others = context.meet_at_board(task.signature, location)
        self._plan(codec, task, data.size, location).run(work, others, feedback)
        context.board.barrier(task.signature.text)  # all have stored
        if work is not data:
            np.copyto(data, work)

    def _plan(self, codec: Codec, task: Task, count: int, location: Location | None) -> _Coded:
        """Return the plan for this location of the arena, or (None) for any memory, which no other rank touches."""
        key = "compressed", task.signature.code, location
        return self._context.plans.get(key, lambda: _Coded(self._context, codec, task, count, location))


class _Coded:
    """The allreduce of arrays of one length."""

    reusable = True

    def __init__(self, context: Context, codec: Codec, task: Task, count: int, location: Location | None) -> None:
        topology, rank = context.topology, context.rank
        nlanes, nnodes = min(len(node) for node in topology.nodes), len(topology.nodes)
        limit = min(_MANY * _MESSAGE_NBYTES // codec.nbytes(_MANY), context.config.segment_nbytes // 4)
        limit = max(codec.block, limit // codec.block * codec.block)
        lanes = Partition.even(count, nlanes, codec.block).segment
        segments = _segments(lanes, nnodes, limit, codec.block)
        self._coding: _Coding | None = None
        local = topology.local_rank(rank)
        if local < nlanes:
            own = local * nnodes + sorted(topology.cross_group(rank)).index(rank)
            owned = [segment[own] for segment in segments]
            largest = max(part.stop - part.start for segment in segments for part in segment)
            factor = 1.0 / topology.size if task.op is ReduceOp.AVERAGE else None
            self._coding = _Coding(codec, rank, lanes[local], owned, largest, factor)
        memory = _NOTHING if location is None else context.arena.view(location, _NOTHING.dtype, count)
        task = task._replace(choice=replace(task.choice, algorithm=CompressedAllreduce.algorithm))
        self._schedule = NodeSchedule(context, task, memory, segments, self._coding)

    def run(self, data: Floats, others: list[int], feedback: Feedback | None) -> None:
        """Reduce in place.

        Args:
            data: the array at the location; without a location, any array of this length.
            others: where the arrays of the node's other ranks are, packed.
            feedback: of this array.
        """
        if self._coding is not None:
            self._coding.begin(data, feedback)
        try:
            self._schedule.run(others)
        finally:
            if self._coding is not None:
                self._coding.end()

    def close(self) -> None:
        self._schedule.close()


def _segments(lanes: Segment, nnodes: int, limit: int, align: int) -> list[Segment]:
    """Cut each lane into segments of ``nnodes`` blocks; a segment of the array holds one of each lane."""
    cuts = [
        [
            tuple(slice(lane.start + block.start, lane.start + block.stop) for block in segment)
            for segment in segments_of_buffer(lane.stop - lane.start, nnodes, limit, align)
        ]
        for lane in lanes
    ]
    return [tuple(chain.from_iterable(each)) for each in zip_longest(*cuts, fillvalue=(slice(0, 0),) * nnodes)]


class _Coding:
    """What a rank encodes, sums up and decodes of its lane.

    Args:
        codec: the format.
        rank: this rank.
        lane: the part of the array that this rank sends.
        owned: the parts that it sums up, one in each segment.
        largest: elements of the largest part that is encoded at once.
        factor: what sums are multiplied by; None: nothing.
    """

    def __init__(
        self, codec: Codec, rank: int, lane: slice, owned: Sequence[slice], largest: int, factor: float | None
    ) -> None:
        self._codec = codec
        self._rank = rank
        self._lane = lane
        self._factor = None if factor is None else np.float32(factor)
        starts = np.cumsum([0, *(part.stop - part.start for part in owned)]).tolist()
        places = zip(owned, pairwise(starts), strict=True)
        self._kept = {part.start: slice(*place) for part, place in places if part.start < part.stop}
        self._owned_count = starts[-1]
        self._data = _NOTHING
        self._feedback: Feedback | None = None
        self._total, self._meant, self._arrived = (np.empty(largest, np.float32) for _ in range(3))

    def begin(self, data: Floats, feedback: Feedback | None) -> None:
        """Set the array to work on, until `end`."""
        self._data, self._feedback = data, feedback
        if feedback is not None:
            feedback.begin(self._lane.stop - self._lane.start, self._owned_count)

    def end(self) -> None:
        """Drop the array."""
        self._data, self._feedback = _NOTHING, None

    def nbytes(self, part: slice) -> int:
        return self._codec.nbytes(part.stop - part.start)

    def encode(self, part: slice, target: Bytes) -> Call:
        return partial(self._encode, part, target)

    def decode(self, source: Bytes, part: slice) -> Call:
        return lambda: self._codec.decode(source, self._data[part])

    def combine(self, part: slice, arrived: Sequence[tuple[int, Bytes]], target: Bytes) -> Call:
        before = [got for rank, got in arrived if rank < self._rank]
        after = [got for rank, got in arrived if rank > self._rank]
        return partial(self._sum, part, before, after, target)

    def _encode(self, part: slice, target: Bytes) -> None:
        values, feedback = self._data[part], self._feedback
        if feedback is None:
            self._codec.encode(values, target)
            return
        assert feedback.sent is not None
        kept = feedback.sent[part.start - self._lane.start : part.stop - self._lane.start]
        meant, arrived = self._meant[: values.size], self._arrived[: values.size]
        np.copyto(meant, values)
        feedback.correct(meant, kept)
        self._codec.encode(meant, target)
        self._codec.decode(target, arrived)
        feedback.measure(meant, arrived, kept)

    def _sum(self, part: slice, before: Sequence[Bytes], after: Sequence[Bytes], target: Bytes) -> None:
        own, feedback = self._data[part], self._feedback
        total = self._total[: own.size]
        total.fill(0.0)
        for got in before:
            self._codec.decode_add(got, total)
        np.add(total, own, out=total)
        for got in after:
            self._codec.decode_add(got, total)
        if self._factor is not None:
            np.multiply(total, self._factor, out=total)
        if feedback is not None:
            assert feedback.summed is not None
            feedback.correct(total, feedback.summed[self._kept[part.start]])
        self._codec.encode(total, target)
        self._codec.decode(target, own)
        if feedback is not None:
            assert feedback.summed is not None
            feedback.measure(total, own, feedback.summed[self._kept[part.start]])
