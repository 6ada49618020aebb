"""The time of an allreduce: its rounds on links with queues, and processors that add up work.

A message that is ready waits until the link out of its node is free, goes through that and the link into the other node
at the same time, and arrives a latency later. The segments of a buffer go through the rounds in a few streams, as in
`ringreduce.collectives.plans.bound`, and share the links. While a stream waits, the processor works for another one, so
it has no clock: a stream is held up by its own work alone, but no rank ends before its processor has done all work.

The terms are those of `ringreduce.collectives.choice.tuning.CostModel`. Both say the same where one segment goes
through nodes of one rank which send and receive one message at a time; otherwise the model is a sum of what can overlap
here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ringreduce.collectives.choice.tuning import CostModel
from ringreduce.collectives.plans.bound import STREAMS, segment_limit
from ringreduce.common.config import Config
from ringreduce.simulate.rounds import Floats, Numbers, Round
from ringreduce.simulate.traffic import Traffic

_SEGMENT_NBYTES = Config().segment_nbytes
#: Segments go through the rounds in waves, one in each stream. After twice so many, all take what the last ones took.
_WAVES = 8
_SAME = 1e-9  # relative: clocks that have advanced by the same time


@dataclass(frozen=True)
class Links:
    """What a cluster is made of.

    Attributes:
        between: terms of nodes and of messages between them.
        alpha, beta: of messages between ranks of a node.
        slow: node -> how many times as long its link takes per byte.
        burst: bytes that a link lets through at once after a rest, as a token bucket does.
        wire: bytes that travel between nodes for each byte of the buffer.
    """

    between: CostModel
    alpha: float
    beta: float
    slow: dict[int, float] = field(default_factory=dict)
    burst: float = 0.0
    wire: float = 1.0


def ends_of(traffic: Traffic, nbytes: int, links: Links, starts: Floats) -> Floats:
    """Return when each rank ends an allreduce, in seconds.

    Args:
        traffic: of the algorithm.
        nbytes: of the buffer of each rank.
        links: of the cluster.
        starts: when each rank of ``traffic`` begins.
    """
    sync = links.between.sync
    meet = _meeting(traffic) if traffic.direct else None
    begun = starts.astype(np.float64) if meet is None else meet(starts) + sync
    limit = segment_limit(_SEGMENT_NBYTES, -(-nbytes // traffic.nblocks))
    nsegments = max(1, -(-nbytes // (limit * traffic.nblocks)))
    call = _CallUnderWay(
        traffic, nbytes / nsegments / traffic.nblocks, links=links, begun=begun, nstreams=min(STREAMS, nsegments)
    )
    call.run(nsegments)
    ends = np.maximum(np.max(call.clocks, axis=0), begun + nsegments * call.busy())
    return ends if meet is None else meet(ends) + sync


def _meeting(traffic: Traffic) -> Callable[[Floats], Floats]:
    """Return what gives all ranks of a node the time of the last one."""
    first = np.flatnonzero(np.diff(traffic.nodes, prepend=-1))
    sizes = np.diff(first, append=len(traffic.nodes))
    return lambda times: np.repeat(np.maximum.reduceat(times, first), sizes)


class _Timed:
    """A round whose blocks have a size, on links."""

    def __init__(self, each: Round, nodes: Numbers, piece: float, links: Links) -> None:
        self.round = each
        between = links.between
        started = each.started
        outside = each.outside
        self.posted = started.number * between.message
        slow = np.ones(int(nodes.max()) + 1)
        slow[list(links.slow)] = list(links.slow.values())
        per_byte = started.nblocks[outside] * (piece * between.beta * links.wire)
        self.leave = per_byte * slow[nodes[started.source[outside]]]
        self.enter = per_byte * slow[nodes[started.target[outside]]]
        self.sending = each.sent * between.message
        self.working = each.received * between.message
        self.working += each.reduced * (piece * between.gamma) + each.touched * (piece * between.copy)
        self.working += each.copied * (piece * links.beta)


class _CallUnderWay:
    """One allreduce under way.

    Attributes:
        clocks: of each stream, the time of each rank.
    """

    def __init__(self, traffic: Traffic, piece: float, links: Links, begun: Floats, nstreams: int) -> None:
        self._links = links
        made = {each: _Timed(each, traffic.nodes, piece=piece, links=links) for each, _ in traffic.rounds}
        self._rounds = [(made[each], times) for each, times in traffic.rounds]
        self.clocks = np.array([begun] * nstreams)
        self._under_way = [np.empty(0)] * nstreams
        nnodes = int(traffic.nodes.max()) + 1
        self._out = np.zeros(nnodes)
        self._into = np.zeros(nnodes)
        self._state = self.clocks, self._out, self._into

    def busy(self) -> Floats:
        """Return how long each processor works for a segment."""
        work = [(each.sending + each.working) * times for each, times in self._rounds]
        return np.sum(work, axis=0) if work else np.zeros(self.clocks.shape[1])

    def run(self, nsegments: int) -> None:
        """Let so many segments go through all rounds."""
        nstreams = len(self.clocks)
        waves = nsegments // nstreams
        self._repeat(partial(self._wave, nstreams), min(waves, _WAVES))
        if waves > _WAVES:
            now = [each.copy() for each in self._state]
            self._repeat(partial(self._wave, nstreams), min(waves - _WAVES, _WAVES))
            for clock, then in zip(self._state, now, strict=True):
                clock += (clock - then) * max(0.0, waves / _WAVES - 2)
        if nsegments % nstreams:
            self._wave(nsegments % nstreams)

    def _wave(self, nstreams: int) -> None:
        for each, times in self._rounds:
            self._repeat(partial(self._round, each, nstreams), times)

    def _repeat(self, act: Callable[[], None], times: int) -> None:
        """Do something so many times. Once all clocks have advanced by the same time, they do so for ever."""
        for left in reversed(range(times)):
            before = [each.copy() for each in self._state]
            act()
            moved = [now - then for now, then in zip(self._state, before, strict=True)]
            by = moved[0][0, 0]
            if all(np.abs(each[each != 0] - by).max(initial=0) <= _SAME * by for each in moved) and moved[0].all():
                for clock, each in zip(self._state, moved, strict=True):
                    clock += each * left
                return

    def _round(self, timed: _Timed, nstreams: int) -> None:
        for stream in range(nstreams):
            self._advance(timed, stream)

    def _advance(self, timed: _Timed, stream: int) -> None:
        """Let one stream go through a round."""
        each = timed.round
        clock = self.clocks[stream]
        begun = clock[each.started.source]
        arrived = begun + timed.posted
        ready = arrived[each.outside]
        arrived += self._links.alpha
        if len(each.outside):
            arrived[each.outside] = self._cross(timed, ready)
        clock += timed.sending
        if len(self._under_way[stream]):
            arrived = np.concatenate([self._under_way[stream], arrived])
        if len(each.waiting):
            last = np.maximum.reduceat(arrived[each.waited], each.first)
            clock[each.waiting] = np.maximum(clock[each.waiting], last)
        clock += timed.working
        self._under_way[stream] = arrived[each.under_way]

    def _cross(self, timed: _Timed, ready: Floats) -> Floats:
        """Return when messages between nodes arrive, which were ready then."""
        each = timed.round
        links = self._links
        credit = links.burst * links.between.beta
        left = each.leaving.serve(ready, timed.leave, self._out)
        begun = left - timed.leave
        left = np.maximum(ready, left - credit)
        entered = each.entering.serve(np.maximum(begun - credit, ready), timed.enter, self._into)
        return np.maximum(left, entered - credit) + links.between.alpha
