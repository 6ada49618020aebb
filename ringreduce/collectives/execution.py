"""Runs schedules: one `BoundSchedule` for every algorithm, transport and dtype.

Binding a schedule to memory makes all views and all requests; running only starts them, waits and calls kernels. A
schedule treats all elements alike, so each segment of the buffer runs by itself. A few streams each carry one segment
at a time; while one waits for its messages, another reduces. That is all of segmentation and pipelining, for rings,
trees and hierarchies alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms.schedule import Schedule, Step, Transfer
from ringreduce.buffers import Call, Kernels, address_of
from ringreduce.collectives.memory import INNER_NBYTES, Coding, Memory, Scratch
from ringreduce.common.errors import name_ranks
from ringreduce.common.instruments import Instruments
from ringreduce.common.partition import Segment, pieces
from ringreduce.transport.messages import Messages, Request
from ringreduce.transport.shared.private import PrivateMemory
from ringreduce.transport.waiting import Waiter

__all__ = ["STREAMS", "BoundSchedule"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

#: Segments in flight at once: with four receives posted a link never idles while a segment is reduced.
STREAMS = 4
#: So many messages of a stream may still be under way when it goes on, if nothing depends on them.
_LEFT_BEHIND = 1
#: While blocks of at least so many bytes travel, a rank may nap, as other streams keep the link busy.
_BULK_NBYTES = 64 << 10


@dataclass(slots=True)
class _Round:
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
    requests: list[Request]
    before: list[Call]
    after: list[Call]
    needed: list[Request]
    kept: list[Request]


class BoundSchedule:
    """A schedule bound to memory, run any number of times.

    Attributes:
        calls: what a run does if the schedule has no messages: these calls, in order.

    Args:
        rank: this rank.
        schedule: its steps.
        segments: the parts of the buffer that the schedule runs over, one after another in each of a few streams.
        memory: the buffers.
        kernels: how blocks are reduced. In an allreduce, the rank that completes a block of an average divides it. With
            messages, a reduce-scatter and a reduction to a root take sums, and the caller divides.
        messages: what carries messages, None for a schedule without any.
        waiter: how to wait for them.
        signature: what the user called, for error messages.
        tag: the first of `STREAMS` tags that no other call in flight uses.
        instruments: the observers of steps; None: there are none.
        coding: how blocks travel in messages, for a schedule that combines them by rank; None: as they are. Only direct
            accesses look at ``memory`` then.
        absent: returns which ranks have not come to the call, for error messages; empty where that is not known.
    """

    reusable = True

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        segments: Sequence[Segment],
        memory: Memory,
        kernels: Kernels | None,
        messages: Messages | None,
        waiter: Waiter,
        signature: str,
        tag: int = 0,
        *,
        instruments: Instruments | None = None,
        coding: Coding | None = None,
        absent: Callable[[], str] = str,
    ) -> None:
        self._rank = rank
        self._schedule = schedule
        self._last = schedule.last_reductions()
        self._kept_sends = schedule.kept_sends()
        self._memory = memory
        self._kernels = kernels
        self._messages = messages
        largest = max((block.stop - block.start for segment in segments for block in segment), default=0)
        # Encoded blocks travel in small messages.
        self._bulk = coding is None and largest * memory.mine.itemsize >= _BULK_NBYTES
        self._waiter = waiter
        # Not a bound method: that cycle would keep the caller's memory alive until the garbage collector runs.
        self._waiting_for = partial(_waiting_for, schedule, signature, absent)
        self._instruments = Instruments() if instruments is None else instruments
        self._coding = coding
        nstreams = min(STREAMS, len(segments))
        self._streams: list[list[_Round]] = [[] for _ in range(nstreams)]
        make = memory.make_scratch or partial(np.empty, dtype=memory.mine.dtype if coding is None else np.uint8)
        scratches = [(Scratch(make), Scratch(make)) for _ in range(nstreams)]
        self._requests: list[Request] = []
        try:
            for index, segment in enumerate(segments):
                stream = index % nstreams
                self._streams[stream] += self._bind(index, segment, tag + stream, *scratches[stream])
        except BaseException:
            self.close()
            raise
        self.calls = [call for stream in self._streams for each in stream for call in each.before]

    def run(self) -> None:
        """Carry the steps out.

        Raises:
            CollectiveTimeoutError, TransportError: a peer or the transport failed; the buffer's content is undefined.
        """
        if self._messages is None:
            for call in self.calls:
                call()
            if self._instruments.observers:
                self._instruments.step("load and store")
            return
        started: list[Request] = []
        streams = [self._carry_out(rounds, self._messages, started) for rounds in self._streams]
        try:
            if len(streams) > 1:
                self._run_together(streams, self._messages)
            else:
                for needed, kept in streams[0]:
                    requests = needed + kept
                    if not self._messages.test_all(requests):
                        self._waiter.until(partial(self._messages.test_all, requests), self._waiting_for)
        except BaseException:
            self._messages.give_up(started)
            raise

    def close(self) -> None:
        """Give back the messages; this cannot run again."""
        if self._messages is not None:
            self._messages.free(self._requests)
        self._requests, self._streams = [], []

    # ---- running ----

    def _carry_out(
        self, rounds: list[_Round], messages: Messages, started: list[Request]
    ) -> Iterator[tuple[list[Request], list[Request]]]:
        """Run the rounds of a stream, and add all messages that start to a list.

        Yields:
            The messages that must be complete before it goes on, and those that may stay under way.
        """
        together = len(self._streams) > 1  # then `_run_together` reports the waits
        for each in rounds:
            if each.requests:
                started += each.requests
                messages.start(each.requests)
            for call in each.before:
                call()
            if each.requests:
                yield each.needed, each.kept
            if self._instruments.observers and not together:
                self._instruments.step(f"{each.name}: transfer")
            for call in each.after:
                call()
            if self._instruments.observers and (each.after or together):
                self._instruments.step(f"{each.name}: reduce")

    def _run_together(self, streams: list[Iterator[tuple[list[Request], list[Request]]]], messages: Messages) -> None:
        """Advance whichever stream has its messages; that order varies from run to run, the results do not.

        A stream goes on while a few of its messages, for which only the end has to wait, are under way.
        """
        under_way = [each for stream in streams for each in _next(stream)]
        while under_way:
            several = len({each.stream for each in under_way}) > 1
            done = self._wait_for_some(messages, [each.request for each in under_way], several=several)
            if self._instruments.observers:
                self._instruments.step("wait for messages")
            advanced = {under_way[position].stream for position in done}
            under_way = [each for position, each in enumerate(under_way) if position not in done]
            for stream in advanced:
                left = [each.needed for each in under_way if each.stream is stream]
                if not any(left) and len(left) <= _LEFT_BEHIND:
                    under_way += _next(stream)

    def _wait_for_some(self, messages: Messages, requests: list[Request], *, several: bool) -> set[int]:
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

    def _bind(self, index: int, segment: Segment, tag: int, scratch: Scratch, kept: Scratch) -> Iterator[_Round]:
        kept.reset()
        known: dict[range, Bytes] = {}  # blocks that the step before has combined -> their encoding
        for number, step in enumerate(self._schedule.steps, start=1):
            name, last = f"step {number} of segment {index + 1}", self._last[number - 1]
            scratch.reset()
            if not (step.sends or step.recvs):
                yield _Round(name, [], list(self._direct_calls(step, last, index, segment)), [], [], [])
                known.clear()
            elif self._coding is None:
                yield self._bind_plain(name, step, last, self._kept_sends[number - 1], index, segment, tag, scratch)
            else:
                yield from self._bind_coded(name, step, segment, tag, scratch, kept, known)

    def _bind_plain(
        self,
        name: str,
        step: Step,
        last: frozenset[int],
        kept_sends: frozenset[Transfer],
        index: int,
        segment: Segment,
        tag: int,
        scratch: Scratch,
    ) -> _Round:
        memory, kernels = self._memory, self._kernels
        mine, result = memory.mine, memory.mine if memory.result is None else memory.result
        into = segment if memory.result_segments is None else memory.result_segments[index]
        needed: list[Request] = []
        kept: list[Request] = []
        requests: list[Request] = []
        for each, part in _parts(segment, step.sends):
            requests.append(self._send(mine[part], each.peer, tag))
            (kept if each in kept_sends else needed).append(requests[-1])
        terms: dict[range, list[tuple[int, Array]]] = {}
        for each, part in _parts(segment, step.recvs):
            place = scratch.take(part.stop - part.start) if each.reduce else mine[part]
            requests.append(self._recv(place, each.peer, tag))
            needed.append(requests[-1])
            if each.reduce:
                terms.setdefault(each.blocks, []).append((each.peer, place))
        after: list[Call] = []
        for blocks, arrived in terms.items():
            assert kernels is not None
            target, complete = mine[_span(segment, blocks)], blocks.start in last
            if step.by_rank:
                after.append(self._combine(arrived, target, result[_span(into, blocks)], complete=complete))
                continue
            for number, (_, place) in enumerate(arrived, start=1):
                after.append(kernels.fold(target, place, complete=complete and number == len(arrived)))
        return _Round(name, requests, [], after, needed, kept)

    def _bind_coded(
        self,
        name: str,
        step: Step,
        segment: Segment,
        tag: int,
        scratch: Scratch,
        kept: Scratch,
        known: dict[range, Bytes],
    ) -> Iterator[_Round]:
        """Bind a step whose messages are encoded; a round before it encodes what it sends.

        Args:
            name, step, segment, tag: as for `_bind_plain`.
            scratch: lasts for this step.
            kept: lasts for this segment.
            known: blocks that the step before has combined -> their encoding; on return, those of this step.
        """
        coding = self._coding
        assert coding is not None
        assert step.by_rank or not any(each.reduce for each in step.recvs), "terms are combined in the order of ranks"
        encoding: list[Call] = []
        requests: list[Request] = []
        after: list[Call] = []
        sent = dict(known)
        known.clear()
        for each, part in _parts(segment, step.sends):
            if each.blocks not in sent:
                sent[each.blocks] = scratch.take(coding.nbytes(part))
                encoding.append(coding.encode(part, sent[each.blocks]))
            requests.append(self._send(sent[each.blocks], each.peer, tag))
        terms: dict[range, list[tuple[int, Bytes]]] = {}
        for each, part in _parts(segment, step.recvs):
            place = scratch.take(coding.nbytes(part))
            requests.append(self._recv(place, each.peer, tag))
            if each.reduce:
                terms.setdefault(each.blocks, []).append((each.peer, place))
            else:
                after.append(coding.decode(place, part))
        for blocks, arrived in terms.items():
            part = _span(segment, blocks)
            known[blocks] = kept.take(coding.nbytes(part))
            after.append(coding.combine(part, arrived, known[blocks]))
        if encoding:
            yield _Round(f"{name}: encode", [], encoding, [], [], [])
        yield _Round(name, requests, [], after, requests, [])

    def _send(self, data: Array, peer: int, tag: int) -> Request:
        assert self._messages is not None
        self._requests.append(self._messages.send(data, peer, tag))
        return self._requests[-1]

    def _recv(self, data: Array, peer: int, tag: int) -> Request:
        assert self._messages is not None
        self._requests.append(self._messages.recv(data, peer, tag))
        return self._requests[-1]

    def _direct_calls(self, step: Step, last: frozenset[int], index: int, segment: Segment) -> Iterator[Call]:
        """Load and store piece by piece, so that a piece is stored to the peers while it is in the cache."""
        memory = self._memory
        into = segment if memory.result_segments is None else memory.result_segments[index]
        touched = list(dict.fromkeys(each.blocks for each in step.loads + step.stores))
        for blocks in touched:
            loads = [(each, self._remote(index, segment, each)) for each in step.loads if each.blocks == blocks]
            stores = [(each.peer, self._stored(index, segment, each)) for each in step.stores if each.blocks == blocks]
            result = (memory.mine if memory.result is None else memory.result)[_span(into, blocks)]
            copies = [remote for each, remote in loads if not each.reduce]
            complete = blocks.start in last
            limit = INNER_NBYTES // result.itemsize if len(copies) < len(loads) or stores else result.size
            for piece in pieces(0, result.size, max(1, limit)):
                reducing = [(each.peer, remote[piece]) for each, remote in loads if each.reduce]
                if reducing:
                    mine = memory.mine[_span(segment, blocks)][piece]
                    everywhere = {peer for peer, _ in stores} == {peer for peer, _ in reducing}
                    touchable = all(isinstance(remote, np.ndarray) for _, remote in reducing)
                    in_place = memory.result is None and memory.peer_results is None
                    if len(reducing) > 1 and everywhere and touchable and in_place:
                        yield from self._combine_in_all(reducing, mine, complete=complete)
                        continue
                    # The same object, if it is the same memory: then NumPy need not find that out in each call.
                    target = mine if memory.result is None else result[piece]
                    yield from self._combine_here(reducing, mine, target, complete=complete)
                for remote in copies:
                    yield _copy(remote[piece], result[piece])
                for _, remote in stores:
                    if not _is_same(result[piece], remote[piece]):
                        yield _store(result[piece], remote[piece])

    def _combine(
        self, contributions: list[tuple[int, Array]], mine: Array, target: Array | None = None, *, complete: bool
    ) -> Call:
        """Bind a reduction of ``mine`` and the peers' views, in rank order on every rank, into a target or ``mine``."""
        assert self._kernels is not None
        ordered = sorted([*contributions, (self._rank, mine)], key=lambda each: each[0])
        combine = self._kernels.combine([view for _, view in ordered], complete=complete)
        return partial(combine, mine if target is None else target)

    def _combine_here(
        self, contributions: list[tuple[int, Array | PrivateMemory]], mine: Array, target: Array, *, complete: bool
    ) -> Iterator[Call]:
        """Reduce ``mine`` and the peers' views into a target; private memory is copied first."""
        terms: list[tuple[int, Array]] = []
        for peer, remote in contributions:
            if isinstance(remote, PrivateMemory):
                terms.append((peer, self._memory.copies(peer)[: mine.nbytes].view(mine.dtype)))
                yield remote.copy_to(terms[-1][1])
            else:
                terms.append((peer, remote))
        yield self._combine(terms, mine, target, complete=complete)

    def _combine_in_all(self, contributions: list[tuple[int, Any]], mine: Array, *, complete: bool) -> Iterator[Call]:
        """Reduce into the view of the lowest rank, where the sum begins, and copy to all others, ``mine`` among them.

        The result goes to all of them anyway, and a sum that grows in a source takes no scratch from the cache.
        """
        assert self._kernels is not None
        ordered = [view for _, view in sorted([*contributions, (self._rank, mine)], key=lambda each: each[0])]
        yield partial(self._kernels.combine(ordered, complete=complete), ordered[0])
        for view in ordered[1:]:
            yield partial(np.copyto, view, ordered[0])

    def _remote(self, index: int, segment: Segment, access: Transfer) -> Array | PrivateMemory:
        segments = self._memory.peer_segments.get(access.peer)
        return self._memory.peers[access.peer][_span(segment if segments is None else segments[index], access.remote)]

    def _stored(self, index: int, segment: Segment, access: Transfer) -> Array | PrivateMemory:
        results = self._memory.peer_results
        if results is None:
            return self._remote(index, segment, access)
        return results[access.peer][_span(segment, access.remote)]


class _UnderWay(NamedTuple):
    """A message under way, its stream, and whether the stream needs it to go on."""

    stream: Iterator[tuple[list[Request], list[Request]]]
    request: Request
    needed: bool


def _next(stream: Iterator[tuple[list[Request], list[Request]]]) -> list[_UnderWay]:
    needed, kept = next(stream, ([], []))
    return [_UnderWay(stream, each, True) for each in needed] + [_UnderWay(stream, each, False) for each in kept]


def _copy(source: Array | PrivateMemory, target: Array) -> Call:
    return source.copy_to(target) if isinstance(source, PrivateMemory) else partial(np.copyto, target, source)


def _store(source: Array, target: Array | PrivateMemory) -> Call:
    return target.copy_from(source) if isinstance(target, PrivateMemory) else partial(np.copyto, target, source)


def _is_same(source: Array, target: Array | PrivateMemory) -> bool:
    """Return whether source and target are the same memory, so that nothing has to be stored."""
    return isinstance(target, np.ndarray) and address_of(source) == address_of(target)


def _waiting_for(schedule: Schedule, signature: str, absent: Callable[[], str]) -> str:
    if missing := absent():
        return missing
    peers = sorted({each.peer for step in schedule.steps for each in step.recvs + step.sends})
    return f"messages of {name_ranks(peers)} in {signature}"


def _parts(segment: Segment, transfers: Iterable[Transfer]) -> list[tuple[Transfer, slice]]:
    """Return the transfers that have something to move in a segment, and where in the buffer it is."""
    spans = ((each, _span(segment, each.blocks)) for each in transfers)
    return [(each, part) for each, part in spans if part.start < part.stop]


def _span(segment: Segment, blocks: range) -> slice:
    """Return where consecutive blocks of a segment are."""
    span = slice(segment[blocks.start].start, segment[blocks.stop - 1].stop)
    held = sum(segment[block].stop - segment[block].start for block in blocks)
    assert span.stop - span.start == held, f"blocks {blocks} are not contiguous in this segment"
    return span
