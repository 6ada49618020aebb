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
from functools import partial
from itertools import chain, pairwise, zip_longest

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Bytes, Call
from ringreduce.buffers.codecs import CODECS, Codec, CompiledCodec
from ringreduce.collectives.call import Task
from ringreduce.common.partition import Partition, Segment, segments_of_buffer
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.common.topology import Topology
from ringreduce.native.library import Library

Floats = npt.NDArray[np.float32]

#: The algorithm.
CODED = "hierarchical_direct"
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

    def load(self, sent: Floats | None, summed: Floats | None) -> None:
        """Go on from errors of an earlier call, which are copied; None: from none."""
        self.sent = None if sent is None else sent.copy()
        self.summed = None if summed is None else summed.copy()

    def begin(self, sent: int, summed: int) -> None:
        """Prepare for a call; for `Coded`. Errors of another length are forgotten."""
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
        else:  # A value that is not finite arrives as such, and must not come again.
            kept.fill(0.0)


class Coded:
    """What a rank encodes, sums up and decodes of its lane: the `Coding` of an allreduce.

    Args:
        topology: of the ranks.
        rank: this one.
        segment_nbytes: the most bytes of a block that travel at once.
        task: what to do.
        data: this rank's buffer.
        library: compiled loops; None: there are none.

    Attributes:
        segments: of the buffer.
        feedback: for the next call; None: rounding errors are dropped.
    """

    def __init__(
        self,
        topology: Topology,
        rank: int,
        segment_nbytes: int,
        *,
        task: Task,
        data: Floats,
        library: Library | None,
    ) -> None:
        codec = self._codec = best_codec(task.kind.codec or "", library)
        nlanes = topology.lanes
        nnodes = len(topology.nodes)
        limit = min(_MANY * _MESSAGE_NBYTES // codec.nbytes(_MANY), segment_nbytes // 4)
        limit = max(codec.block, limit // codec.block * codec.block)
        lanes = Partition.even(data.size, nlanes, codec.block).segment
        self.segments = _segments(lanes, nnodes, limit, align=codec.block)
        self.feedback: Feedback | None = None
        self._rank = rank
        self._data = data
        self._factor = np.float32(1.0 / topology.size) if task.op is ReduceOp.AVERAGE else None
        local = topology.local_rank(rank)
        owned = list[slice]()
        largest = 0
        self._lane: slice | None = None
        if local < nlanes:
            self._lane = lanes[local]
            own = local * nnodes + sorted(topology.cross_group(rank)).index(rank)
            owned = [segment[own] for segment in self.segments]  # The parts that this rank sums up.
            largest = max(part.stop - part.start for segment in self.segments for part in segment)
        self._total, self._meant, self._arrived = (np.empty(largest, np.float32) for _ in range(3))
        starts = np.cumsum([0, *(part.stop - part.start for part in owned)]).tolist()
        places = zip(owned, pairwise(starts), strict=True)
        self._kept = {part.start: slice(low, high) for part, (low, high) in places if part.start < part.stop}
        self._owned_count = starts[-1]

    def begin(self) -> None:
        """Prepare the feedback for a call."""
        if self.feedback is not None and self._lane is not None:
            self.feedback.begin(self._lane.stop - self._lane.start, self._owned_count)

    def nbytes(self, part: slice) -> int:
        return self._codec.nbytes(part.stop - part.start)

    def encode(self, part: slice, target: Bytes) -> Call:
        return partial(self._encode, part, target)

    def decode(self, source: Bytes, part: slice) -> Call:
        return lambda: self._codec.decode(source, self._data[part])

    def combine(self, part: slice, arrived: Sequence[tuple[int, Bytes]], target: Bytes) -> Call:
        before = [got for rank, got in arrived if rank < self._rank]
        after = [got for rank, got in arrived if rank > self._rank]
        return partial(self._sum, part, before, after, target=target)

    def _encode(self, part: slice, target: Bytes) -> None:
        values = self._data[part]
        feedback = self.feedback
        if feedback is None:
            self._codec.encode(values, target)
            return
        assert feedback.sent is not None
        assert self._lane is not None
        kept = feedback.sent[part.start - self._lane.start : part.stop - self._lane.start]
        meant = self._meant[: values.size]
        arrived = self._arrived[: values.size]
        np.copyto(meant, values)
        feedback.correct(meant, kept)
        self._codec.encode(meant, target)
        self._codec.decode(target, arrived)
        feedback.measure(meant, arrived, kept)

    def _sum(self, part: slice, before: Sequence[Bytes], after: Sequence[Bytes], target: Bytes) -> None:
        own = self._data[part]
        feedback = self.feedback
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


def best_codec(name: str, library: Library | None) -> Codec:
    """Return the codec of this name, with compiled loops if the library has them."""
    codec = CODECS[name]
    return codec if library is None or name not in library.codecs else CompiledCodec(codec, *library.codecs[name])


def _segments(lanes: Segment, nnodes: int, limit: int, align: int) -> list[Segment]:
    """Cut each lane into segments of ``nnodes`` blocks; a segment of the array holds one of each lane."""
    cuts = [
        [
            tuple(slice(lane.start + block.start, lane.start + block.stop) for block in segment)
            for segment in segments_of_buffer(lane.stop - lane.start, nnodes, limit, align=align)
        ]
        for lane in lanes
    ]
    return [tuple(chain.from_iterable(slices)) for slices in zip_longest(*cuts, fillvalue=(slice(0, 0),) * nnodes)]
