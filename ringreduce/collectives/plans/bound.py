"""Runs schedules: one `BoundSchedule` for every algorithm, transport and dtype.

Binding a schedule to memory makes all views and all requests; running only starts them, waits and calls kernels. A
schedule treats all elements alike, so each segment of the buffer runs by itself. A few streams each carry one segment
at a time; while one waits for its messages, another reduces. That is all of segmentation and pipelining, for rings,
trees and hierarchies alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringreduce.algorithms.schedule import Schedule, Step, Transfer
from ringreduce.buffers import Array, Bytes, Call, Kernels
from ringreduce.common.errors import TransportError, during, name_ranks
from ringreduce.common.instruments import Instruments
from ringreduce.common.partition import Segment
from ringreduce.transport.messages import Messages, Prequest
from ringreduce.transport.shared.direct import INNER_NBYTES, load_and_store
from ringreduce.transport.shared.private import PrivateMemory
from ringreduce.transport.waiting import Waiter

#: Segments in flight at once: with four receives posted a link never idles while a segment is reduced.
STREAMS = 4
#: Segments are at least the largest that the settings allow, divided by this: a message costs 10 us of Python.
_FEWER = 2
#: So many messages of a stream may still be under way when it goes on, if nothing depends on them.
_LEFT_BEHIND = 1
#: While blocks of at least so many bytes travel, a rank may nap, as other streams keep the link busy.
_BULK_NBYTES = 64 << 10


def segment_limit(most: int, largest: int) -> int:
    """Return how many elements of a block travel at once: at most what the settings allow, and at least half of it.

    Between these limits, so many that each stream of a schedule has two segments.

    Args:
        most: elements that the settings allow.
        largest: elements of the largest block, the same on all ranks.
    """
    return max(1, min(most, max(most // _FEWER, -(-largest // (2 * STREAMS)))))


class Elements(Protocol):
    """What a schedule needs of a buffer: its contiguous parts."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def itemsize(self) -> int: ...
    def __getitem__(self, part: slice, /) -> Array: ...


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Where a schedule's blocks are.

    Attributes:
        mine: this rank's buffer, one-dimensional; where something is loaded or stored directly, an array.
        peers: the buffers of ranks whose memory can be touched, or copied at least, by rank.
        peer_segments: by rank, where the blocks of a peer are that are elsewhere than here, for a single segment.
        result: where loads and reductions put what they make, and from where it is stored to peers; also where steps
            with messages combine by rank. None: ``mine``.
        result_segments: where blocks are in the result; None: as in ``mine``.
        peer_results: what stores go to, by rank; None: ``peers``.
        copies: returns, for a peer, `INNER_NBYTES` bytes for copies of pieces of its private memory.
        make_scratch: returns memory of the same kind for so many elements, to receive messages in; None: NumPy's.
    """

    mine: Elements
    peers: Mapping[int, Array | PrivateMemory] = field(default_factory=dict)
    peer_segments: Mapping[int, Segment] = field(default_factory=dict)
    result: Array | None = None
    result_segments: list[Segment] | None = None
    peer_results: Mapping[int, Array | PrivateMemory] | None = None
    copies: Callable[[int], Bytes] = lambda peer: np.empty(INNER_NBYTES, np.uint8)
    make_scratch: Callable[[int], Array] | None = None


class Coding(Protocol):
    """How blocks are encoded in messages.

    A part is where blocks are in the buffer. All methods but `nbytes` return a function, which works on what is there
    when it is called.
    """

    def nbytes(self, part: slice) -> int:
        """Return the bytes that an encoded part takes."""

    def encode(self, part: slice, target: Bytes) -> Call:
        """Return what encodes a part."""

    def decode(self, source: Bytes, part: slice) -> Call:
        """Return what overwrites a part with what was received."""

    def combine(self, part: slice, arrived: Sequence[tuple[int, Bytes]], target: Bytes) -> Call:
        """Return what reduces a part with what other ranks sent of it, (rank, bytes), in the order of ranks.

        The part gets what the result decodes to, ``target`` the result, encoded.
        """


class Link(NamedTuple):
    """What a schedule has besides memory: how this rank sends, waits and reports.

    Attributes:
        rank: this rank.
        waiter: how it waits for messages.
        signature: what the user called, for error messages.
        messages: carries messages; None for a schedule without any.
        tag: the first of `STREAMS` tags that no other call in flight uses.
        instruments: the observers of steps; None: there are none.
        absent: returns which ranks have not come to the call, for error messages; empty where that is not known.
    """

    rank: int
    waiter: Waiter
    signature: str
    messages: Messages | None = None
    tag: int = 0
    instruments: Instruments | None = None
    absent: Callable[[], str] = str


@dataclass(slots=True)
class _BoundStep:
    """One step of one segment, bound.

    Attributes:
        name: for observers.
        requests: the messages to start, in this order.
        before: calls that need none of these messages.
        after: calls that need all of ``needed``.
        needed: the requests that the next step needs.
        kept: the other requests. No later step changes their memory, so only the end of the run waits for them.
    """

    name: str
    requests: list[Prequest] = field(default_factory=list)
    before: list[Call] = field(default_factory=list)
    after: list[Call] = field(default_factory=list)
    needed: list[Prequest] = field(default_factory=list)
    kept: list[Prequest] = field(default_factory=list)


class BoundSchedule:
    """A schedule bound to memory, run any number of times.

    Attributes:
        calls: what carries a schedule out that has no messages, in order.

    Args:
        schedule: the steps of this rank.
        segments: the parts of the buffer that the schedule runs over, one after another in each of a few streams.
        memory: the buffers.
        kernels: how blocks are reduced. In an allreduce, the rank that completes a block of an average divides it. With
            messages, a reduce-scatter and a reduction to a root take sums, and the caller divides.
        link: what else this rank has.
        coding: how blocks travel in messages, for a schedule that combines them by rank; None: as they are. Only direct
            accesses look at ``memory`` then.
    """

    reusable = True

    def __init__(
        self,
        schedule: Schedule,
        segments: Sequence[Segment],
        memory: BlockMemory,
        kernels: Kernels | None,
        link: Link,
        coding: Coding | None = None,
    ) -> None:
        self._schedule = schedule
        self._memory = memory
        self._kernels = kernels
        self._coding = coding
        self._last = schedule.last_reductions()
        self._kept_sends = schedule.kept_sends()
        self._rank = link.rank
        self._messages = link.messages
        self._waiter = link.waiter
        self._signature = link.signature
        self._instruments = link.instruments or Instruments()
        largest = max((block.stop - block.start for segment in segments for block in segment), default=0)
        self._bulk = coding is None and largest * memory.mine.itemsize >= _BULK_NBYTES  # Encoded messages are small.
        # Not a bound method: that cycle would keep the caller's memory alive until the garbage collector runs.
        self._waiting_for = partial(_waiting_for, schedule, link.signature, link.absent)
        nstreams = min(STREAMS, len(segments))
        self._streams: list[list[_BoundStep]] = [[] for _ in range(nstreams)]
        make = memory.make_scratch or partial(np.empty, dtype=memory.mine.dtype if coding is None else np.uint8)
        scratches = [(_Landing(make), _Landing(make)) for _ in range(nstreams)]
        self._requests: list[Prequest] = []
        try:
            for index, segment in enumerate(segments):
                stream = index % nstreams
                scratch, kept = scratches[stream]
                self._streams[stream] += self._bind(index, segment, link.tag + stream, scratch=scratch, kept=kept)
        except BaseException:
            self.close()
            raise
        self.calls = [call for stream in self._streams for step in stream for call in step.before]

    def run(self) -> None:
        """Carry the steps out, those with messages among them.

        Raises:
            CollectiveTimeoutError, TransportError: a peer or the transport failed; the buffer's content is undefined.
        """
        messages = self._messages
        started = list[Prequest]()
        assert messages is not None
        try:
            if len(self._streams) > 1:
                streams = [self._carry_out(rounds, messages, started) for rounds in self._streams]
                self._run_together(streams, messages)
            else:
                for needed, kept in self._carry_out(self._streams[0], messages, started):
                    requests = needed + kept
                    if not messages.test_all(requests):
                        self._waiter.until(partial(messages.test_all, requests), self._waiting_for)
        except BaseException as error:
            messages.give_up(started)
            if isinstance(error, TransportError):
                raise during(error, self._signature) from error.__cause__
            raise

    def close(self) -> None:
        """Give back the messages; this cannot run again."""
        if self._messages is not None:
            self._messages.free(self._requests)
        self._requests = []
        self._streams = []

    # ---- running ----

    def _carry_out(
        self, rounds: list[_BoundStep], messages: Messages, started: list[Prequest]
    ) -> Iterator[tuple[list[Prequest], list[Prequest]]]:
        """Run the rounds of a stream, and add all messages that start to a list.

        Yields:
            The messages that must be complete before it goes on, and those that may stay under way.
        """
        together = len(self._streams) > 1  # With several streams `_run_together` reports the waits.
        for step in rounds:
            if step.requests:
                started += step.requests
                messages.start(step.requests)
            for call in step.before:
                call()
            if step.requests:
                yield step.needed, step.kept
            if self._instruments.observers and not together:
                self._instruments.step(f"{step.name}: transfer")
            for call in step.after:
                call()
            if self._instruments.observers and (step.after or together):
                self._instruments.step(f"{step.name}: reduce")

    def _run_together(self, streams: list[Iterator[tuple[list[Prequest], list[Prequest]]]], messages: Messages) -> None:
        """Advance whichever stream has its messages; that order varies from run to run, the results do not.

        A stream goes on while a few of its messages, for which only the end has to wait, are under way.
        """
        under_way = [wait for stream in streams for wait in _next(stream)]
        while under_way:
            several = len({wait.stream for wait in under_way}) > 1
            done = self._wait_for_some(messages, [wait.request for wait in under_way], several=several)
            if self._instruments.observers:
                self._instruments.step("wait for messages")
            advanced = {under_way[position].stream for position in done}
            under_way = [wait for position, wait in enumerate(under_way) if position not in done]
            for stream in advanced:
                left = [wait.needed for wait in under_way if wait.stream is stream]
                if not any(left) and len(left) <= _LEFT_BEHIND:
                    under_way += _next(stream)

    def _wait_for_some(self, messages: Messages, requests: list[Prequest], *, several: bool) -> set[int]:
        """Return the positions of requests that are complete, at least one; ``several``: streams have some."""
        done: set[int] = set()

        def some() -> bool:
            done.update(messages.test_some(requests))
            return bool(done)

        if not some():
            wait = self._waiter.until_some if self._bulk and several else self._waiter.until
            wait(some, self._waiting_for)
        return done

    # ---- binding ----

    def _bind(self, index: int, segment: Segment, tag: int, scratch: _Landing, kept: _Landing) -> Iterator[_BoundStep]:
        kept.reset()
        coded: dict[range, Bytes] = {}  # Blocks that the step before has combined, and their encoding.
        for number, step in enumerate(self._schedule.steps):
            name = f"step {number + 1} of segment {index + 1}"
            scratch.reset()
            if step.sends or step.recvs:
                yield from self._bind_messages(
                    name, number=number, index=index, segment=segment, tag=tag, scratch=scratch, kept=kept, coded=coded
                )
            else:
                yield _BoundStep(
                    name, before=list(self._direct_calls(step, self._last[number], index, segment=segment))
                )
                coded.clear()

    def _bind_messages(
        self,
        name: str,
        number: int,
        index: int,
        segment: Segment,
        tag: int,
        scratch: _Landing,
        kept: _Landing,
        coded: dict[range, Bytes],
    ) -> Iterator[_BoundStep]:
        """Bind a step with messages; where they are encoded, a round before it encodes what it sends.

        Args:
            name: of the round.
            number, index: of the step and of the segment.
            segment, tag: where and how it travels.
            scratch: lasts for this step.
            kept: lasts for this segment.
            coded: blocks that the step before has combined -> their encoding; on return, those of this step.
        """
        step = self._schedule.steps[number]
        coding = self._coding
        memory = self._memory
        mine = self._memory.mine
        messages = self._messages
        kernels = self._kernels
        requests = self._requests
        first = len(self._requests)
        assert messages is not None
        assert coding is None or step.by_rank or not any(recv.reduce for recv in step.recvs)
        bound = _BoundStep(name)
        encoding = list[Call]()
        sent = dict(coded)
        coded.clear()
        for send, part in _parts(segment, step.sends):
            if coding is not None and send.blocks not in sent:
                sent[send.blocks] = scratch.take(coding.nbytes(part))
                encoding.append(coding.encode(part, sent[send.blocks]))
            data = mine[part] if coding is None else sent[send.blocks]
            stays = coding is None and send in self._kept_sends[number]
            requests.append(messages.send(data, send.peer, tag))
            (bound.kept if stays else bound.needed).append(requests[-1])
        terms: dict[range, list[tuple[int, Array]]] = {}
        for incoming, part in _parts(segment, step.recvs):
            if coding is not None:
                place: Array = scratch.take(coding.nbytes(part))
            else:
                place = scratch.take(part.stop - part.start) if incoming.reduce else mine[part]
            requests.append(messages.recv(place, incoming.peer, tag))
            bound.needed.append(requests[-1])
            if incoming.reduce:
                terms.setdefault(incoming.blocks, []).append((incoming.peer, place))
            elif coding is not None:
                bound.after.append(coding.decode(place, part))
        bound.requests += requests[first:]
        into = segment if memory.result_segments is None else memory.result_segments[index]
        for blocks, arrived in terms.items():
            part = _span(segment, blocks)
            if coding is not None:
                coded[blocks] = kept.take(coding.nbytes(part))
                bound.after.append(coding.combine(part, arrived, coded[blocks]))
                continue
            assert kernels is not None
            own = mine[part]
            complete = blocks.start in self._last[number]
            if step.by_rank:
                views = [view for _, view in sorted([*arrived, (self._rank, own)], key=itemgetter(0))]
                combine = kernels.combine(views, complete=complete)
                target = own if memory.result is None else memory.result[_span(into, blocks)]
                bound.after.append(partial(combine, target))
                continue
            for count, (_, place) in enumerate(arrived, start=1):
                combine = kernels.combine([own, place], complete=complete and count == len(arrived))
                bound.after.append(partial(combine, own))
        if encoding:
            yield _BoundStep(f"{name}: encode", before=encoding)
        yield bound

    def _direct_calls(self, step: Step, last: frozenset[int], index: int, segment: Segment) -> Iterator[Call]:
        assert all(load.reduce is step.by_rank for load in step.loads), "loads are reduced by rank, or not at all"
        memory = self._memory
        into = segment if memory.result_segments is None else memory.result_segments[index]
        stored_to = memory.peers if memory.peer_results is None else memory.peer_results
        in_place = memory.result is None and memory.peer_results is None
        for blocks in dict.fromkeys(move.blocks for move in step.loads + step.stores):
            result = (memory.mine if memory.result is None else memory.result)[_span(into, blocks)]
            loads: list[tuple[int, Any]] = [
                (load.peer, memory.peers[load.peer][_span(memory.peer_segments.get(load.peer, segment), load.remote)])
                for load in step.loads
                if load.blocks == blocks
            ]
            combine = None
            if step.by_rank:
                assert self._kernels is not None
                own = result if memory.result is None else memory.mine[_span(segment, blocks)]
                loads = sorted([*loads, (self._rank, own)], key=itemgetter(0))
                combine = partial(self._kernels.combine, complete=blocks.start in last)
            stores = [
                (store.peer, stored_to[store.peer][_span(segment, store.remote)])
                for store in step.stores
                if store.blocks == blocks
            ]
            yield from load_and_store(result, loads, stores, combine=combine, copies=memory.copies, in_place=in_place)


class _Landing:
    """Memory in which one stream receives what is to be reduced; each step uses all of it again."""

    def __init__(self, make: Callable[[int], Array]) -> None:
        self._make = make
        self._chunks: list[Array] = []
        self._taken = 0

    def reset(self) -> None:
        self._taken = 0

    def take(self, count: int) -> Array:
        """Return ``count`` elements that no other `take` since the last `reset` has returned."""
        if self._taken == len(self._chunks):
            self._chunks.append(self._make(count))
        elif self._chunks[self._taken].size < count:
            self._chunks[self._taken] = self._make(count)
        self._taken += 1
        return self._chunks[self._taken - 1][:count]


class _UnderWay(NamedTuple):
    """A message under way, its stream, and whether the stream needs it to go on."""

    stream: Iterator[tuple[list[Prequest], list[Prequest]]]
    request: Prequest
    needed: bool


def _next(stream: Iterator[tuple[list[Prequest], list[Prequest]]]) -> list[_UnderWay]:
    needed, kept = next(stream, ([], []))
    return [_UnderWay(stream, wait, True) for wait in needed] + [_UnderWay(stream, wait, False) for wait in kept]


def _waiting_for(schedule: Schedule, signature: str, absent: Callable[[], str]) -> str:
    if missing := absent():
        return missing
    peers = sorted({move.peer for step in schedule.steps for move in step.recvs + step.sends})
    return f"messages of {name_ranks(peers)} in {signature}"


def _parts(segment: Segment, transfers: Iterable[Transfer]) -> list[tuple[Transfer, slice]]:
    """Return the transfers that have something to move in a segment, and where in the buffer it is."""
    spans = ((move, _span(segment, move.blocks)) for move in transfers)
    return [(move, part) for move, part in spans if part.start < part.stop]


def _span(segment: Segment, blocks: range) -> slice:
    """Return where consecutive blocks of a segment are."""
    span = slice(segment[blocks.start].start, segment[blocks.stop - 1].stop)
    held = sum(segment[block].stop - segment[block].start for block in blocks)
    assert span.stop - span.start == held, f"blocks {blocks} are not contiguous in this segment"
    return span
