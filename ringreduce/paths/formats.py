"""The allreduce in a wire format: float32 in, fewer bytes between nodes, float32 sums, one rounding in each direction.

Between nodes it is the direct algorithm, whose every element is encoded twice, whatever the number of ranks: by those
who send it to the rank that sums it up, and by that one, who sends the sum to all (itself included, so that all have
the same bits). A ring would round at every hop. Within a node nothing is encoded: ranks first sum up what the node has,
each its lane, and copy the results from each other. Segments take turns, so that some are encoded or
summed up while others travel.

What rounding loses can be fed back: it is added to what is sent the next time (Seide et al., "1-bit stochastic gradient
descent", Interspeech 2014; both directions as in Tang et al., "DoubleSqueeze", ICML 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms.execute import STREAMS, Round, Runner
from ringreduce.buffers import Operand, kernels_for, narrow, widen
from ringreduce.buffers.dtypes import DType
from ringreduce.errors import ConfigError, UnsupportedBufferError
from ringreduce.partition import Partition, segments_of_buffer
from ringreduce.paths.context import Cache, Context, Signature
from ringreduce.paths.operands import same
from ringreduce.paths.shared import peer_views
from ringreduce.reduce_ops import ReduceOp
from ringreduce.transport.messages import Request
from ringreduce.transport.shared import Block
from ringreduce.wire import CODECS, Codec

__all__ = ["Feedback", "Formats", "codec_for"]

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_FLOAT = DType.of(np.dtype(np.float32))

#: Of an encoded message. Of 64 KiB, Open MPI over TCP asks the receiver before it sends, and meanwhile the link idles.
_MESSAGE_NBYTES = 32 << 10
_MANY = 1 << 20


class Feedback:
    """What rounding lost on this rank, for one array that is reduced again and again; and how much that was.

    Args:
        keep: whether it is added the next time; if not, it is only measured.

    Attributes:
        sent: lost of what was sent to the ranks that sum up; as long as the part of the array that this rank sends.
        summed: lost of the sums that this rank has sent out; as long as the part that it sums up. None like ``sent``
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
        """The relative error that rounding made on this rank in the last call: lost / meant, in the Euclidean norm."""
        return float(np.sqrt(self._lost / self._meant)) if self._meant else 0.0

    def begin(self, sent: int, summed: int) -> None:
        """Prepare for a call; for `Formats`. What was kept for another length is forgotten."""
        if self.sent is None or self.sent.size != sent:
            self.sent = np.zeros(sent, np.float32)
        if self.summed is None or self.summed.size != summed:
            self.summed = np.zeros(summed, np.float32)
        self._lost = self._meant = 0.0

    def correct(self, values: Floats, kept: Floats) -> None:
        """Add to ``values`` what was lost of them the last time."""
        if self.keep:
            np.add(values, kept, out=values)

    def note(self, meant: Floats, arrived: Floats, kept: Floats) -> None:
        """Take note of what was meant and what arrived."""
        np.subtract(meant, arrived, out=kept)
        self._meant += float(np.dot(meant, meant))
        lost = float(np.dot(kept, kept))
        if np.isfinite(lost):
            self._lost += lost
        else:  # a gradient that is not finite: it arrives as such, once
            kept.fill(0.0)


def codec_for(wire: str, dtype: DType, op: ReduceOp, *, deterministic: bool) -> Codec:
    """Return the format in which an allreduce is to travel.

    Raises:
        ConfigError: there is none of this name, or nothing is to be rounded, or not with this op.
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


class Formats:
    """Carries out allreduces in wire formats on one process set that spans several nodes."""

    transport = "messages"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._exchanges: Cache[_Exchange] = Cache(32)
        self._blocks: Cache[_Staging] = Cache(4)

    def allreduce(
        self,
        op: ReduceOp,
        codec: Codec,
        signature: Signature,
        source: Operand,
        target: Operand,
        feedback: Feedback | None,
    ) -> None:
        """Reduce floats into ``target``: the same memory or apart from it.

        Raises:
            MismatchError, CollectiveTimeoutError, TransportError: see the communicator.
        """
        plain = source.dtype.name == "float32" and target.contiguous
        if source.dtype.half:
            work = widen(source.view, source.dtype).reshape(-1)
        elif plain:
            work = target.flat()
            if not same(source, target):
                np.copyto(work.reshape(source.shape), source.view)
        else:
            work = source.view.astype(np.float32, order="C").reshape(-1)
        self._run(work, op, codec, signature, feedback)
        if source.dtype.half:
            narrow(work.reshape(source.shape), target.dtype, target.view)
        elif not plain:
            np.copyto(target.view, work.reshape(target.shape), casting="same_kind")

    def _run(self, data: Floats, op: ReduceOp, codec: Codec, signature: Signature, feedback: Feedback | None) -> None:
        """Reduce ``data`` in place: one-dimensional, contiguous."""
        context = self._context
        node = context.topology.node_of(context.rank)
        if max(len(each) for each in context.topology.nodes) == 1:
            context.meet(signature)
            self._exchange(data, range(data.size), op, codec, signature, feedback)
            return
        lanes = Partition.even(data.size, min(len(each) for each in context.topology.nodes), codec.block).segment
        mine = node.index(context.rank)
        location = context.arena.locate(data.__array_interface__["data"][0], data.nbytes)
        if location is None:  # staged where the node can reach it
            staging = self._blocks.get(data.size, lambda: _Staging(context, data.size))
            np.copyto(staging.memory, data)
            work, location = staging.memory, staging.block.location
        else:
            work = data
        others = context.meet_at_board(signature, location)
        peers = peer_views(context, others, work.dtype, work.size)
        views = {**peers, context.rank: work}
        if mine < len(lanes):
            lane = lanes[mine]
            if peers:
                kernels = kernels_for(_FLOAT, ReduceOp.SUM, len(node))
                kernels.combine([views[rank][lane] for rank in node])(work[lane])
            self._exchange(work[lane], range(data.size)[lane], op, codec, signature, feedback)
        context.board.barrier(signature.text)
        for owner, lane in zip(node, lanes, strict=False):
            if owner != context.rank:
                np.copyto(work[lane], views[owner][lane])
        if work is not data:
            np.copyto(data, work)
        context.board.barrier(signature.text)  # nobody may write before all have read

    def close(self) -> None:
        self._exchanges.close()
        self._blocks.close()

    def _exchange(
        self,
        lane: Floats,
        where: range,
        op: ReduceOp,
        codec: Codec,
        signature: Signature,
        feedback: Feedback | None,
    ) -> None:
        key = signature.code, where
        exchange = self._exchanges.get(key, lambda: _Exchange(self._context, lane.size, codec, op, signature))
        exchange.run(lane, feedback)


class _Staging:
    """Memory of the arena for an array that lies elsewhere."""

    def __init__(self, context: Context, count: int) -> None:
        self._arena = context.arena
        self.block: Block = context.arena.allocate(4 * count)
        self.memory: Floats = context.arena.view(self.block.location, np.dtype(np.float32), count)

    def close(self) -> None:
        self._arena.release(self.block)


class _Exchange:
    """The direct allreduce of a lane among the ranks that have it, one on each node."""

    def __init__(self, context: Context, count: int, codec: Codec, op: ReduceOp, signature: Signature) -> None:
        self._codec = codec
        self._signature = signature
        self._context = context
        self._group = context.topology.cross_group(context.rank)
        self._me = self._group.index(context.rank)
        self._factor = 1.0 / context.topology.size if op is ReduceOp.AVERAGE else None
        self._data: Floats = np.empty(0, np.float32)
        self._feedback: Feedback | None = None
        limit = min(_MANY * _MESSAGE_NBYTES // codec.nbytes(_MANY), context.config.segment_nbytes // 4)
        limit = max(codec.block, limit // codec.block * codec.block)
        segments = segments_of_buffer(count, len(self._group), limit, codec.block)
        owned = [each[self._me] for each in segments]
        starts = np.cumsum([0, *(part.stop - part.start for part in owned)]).tolist()
        self._owned_count = starts[-1]
        nstreams = min(STREAMS, len(segments))
        streams: list[list[Round]] = [[] for _ in range(nstreams)]
        rooms = [
            _Room(codec, max(part.stop - part.start for each in segments for part in each), len(self._group))
            for _ in range(nstreams)
        ]
        tag = context.tag(signature)
        for index, segment in enumerate(segments):
            stream = index % nstreams
            kept = slice(starts[index], starts[index + 1])
            streams[stream] += self._bind(index, segment, kept, rooms[stream], tag + stream)
        self._runner = Runner(
            streams, context.messages, context.waiter, lambda: f"other nodes in {signature.text}", context.instruments
        )

    def run(self, data: Floats, feedback: Feedback | None) -> None:
        self._data, self._feedback = data, feedback
        if feedback is not None:
            feedback.begin(data.size, self._owned_count)
        try:
            self._runner.run()
        finally:
            self._data, self._feedback = np.empty(0, np.float32), None

    def close(self) -> None:
        self._runner.close()

    def _bind(self, index: int, segment: Sequence[slice], kept: slice, room: _Room, tag: int) -> list[Round]:
        messages, codec = self._context.messages, self._codec
        name = f"segment {index + 1}"
        encoding: list[Callable[[], object]] = []
        decoding: list[Callable[[], object]] = []
        first: list[Request] = []
        second: list[Request] = []
        mine = segment[self._me]
        owned = mine.stop - mine.start
        result = room.result[: codec.nbytes(owned)]
        arrived: list[tuple[int, Bytes]] = []
        for place, rank in enumerate(self._group):
            if place == self._me:
                continue
            part = segment[place]
            if part.stop > part.start:
                sent = room.sent[place][: codec.nbytes(part.stop - part.start)]
                encoding.append(partial(self._encode, part, sent, room))
                first.append(messages.send(sent, rank, tag))
                got = room.received[place][: sent.size]
                second.append(messages.recv(got, rank, tag))
                decoding.append(partial(self._decode, part, got))
            if owned:
                got = room.sums[place][: result.size]
                first.append(messages.recv(got, rank, tag))
                second.append(messages.send(result, rank, tag))
                arrived.append((place, got))
        summing: list[Callable[[], object]] = []
        if owned:
            summing.append(partial(self._sum, mine, kept, arrived, result, room))
        return [
            Round(f"{name}: encode", [], encoding, []),
            Round(f"{name}: to who sums it up", first, [], summing),
            Round(f"{name}: sums", second, [], decoding),
        ]

    def _encode(self, part: slice, target: Bytes, room: _Room) -> None:
        values, feedback = self._data[part], self._feedback
        if feedback is None:
            self._codec.encode(values, target)
            return
        assert feedback.sent is not None
        meant, arrived = room.meant[: values.size], room.arrived[: values.size]
        np.copyto(meant, values)
        feedback.correct(meant, feedback.sent[part])
        self._codec.encode(meant, target)
        self._codec.decode(target, arrived)
        feedback.note(meant, arrived, feedback.sent[part])

    def _sum(self, mine: slice, kept: slice, arrived: list[tuple[int, Bytes]], result: Bytes, room: _Room) -> None:
        """Sum up what the ranks sent, in rank order, and encode that."""
        own, feedback = self._data[mine], self._feedback
        total = room.total[: own.size]
        total.fill(0.0)
        for _, got in sorted([*arrived, (self._me, None)], key=lambda each: each[0]):
            if got is None:
                np.add(total, own, out=total)
            else:
                self._codec.decode_add(got, total)
        if self._factor is not None:
            np.multiply(total, np.float32(self._factor), out=total)
        if feedback is not None:
            assert feedback.summed is not None
            feedback.correct(total, feedback.summed[kept])
        self._codec.encode(total, result)
        self._codec.decode(result, own)
        if feedback is not None:
            assert feedback.summed is not None
            feedback.note(total, own, feedback.summed[kept])

    def _decode(self, part: slice, got: Bytes) -> None:
        self._codec.decode(got, self._data[part])


class _Room:
    """Where one stream encodes and decodes; each segment uses it from the start."""

    def __init__(self, codec: Codec, count: int, ranks: int) -> None:
        nbytes = codec.nbytes(count)
        self.sent = [np.empty(nbytes, np.uint8) for _ in range(ranks)]
        self.sums = [np.empty(nbytes, np.uint8) for _ in range(ranks)]
        self.received = [np.empty(nbytes, np.uint8) for _ in range(ranks)]
        self.result = np.empty(nbytes, np.uint8)
        self.total = np.empty(count, np.float32)
        self.meant = np.empty(count, np.float32)
        self.arrived = np.empty(count, np.float32)
