"""The timeline: what this job's ranks did and when, as one trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Every rank appends what it sees to one file, in pieces, with the file locked; so the trace needs no collective call to
be merged, holds what happened up to a crash, and is complete JSON at any time. Where hosts share no file system, each
has a file with its own ranks. Times are on one clock: that of rank 0, whose distance the ranks measure in `init`.

The format is the JSON array of the Trace Event Format. Each rank is a process in it, with two rows of nested spans for
each process set: blocking collectives, and what the engine carries out. Collectives contain their steps. Asynchronous
operations have rows of their own: *queue* until the engine takes one in, *negotiate* until all ranks have submitted it,
*run* until it is done. Counters show the operations under way and the bytes so far.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ringreduce.errors import ConfigError
from ringreduce.instruments import Instrument
from ringreduce.transport.messages import Messages, exchange_json

__all__ = ["Clock", "Timeline", "Track", "distance"]

_log = logging.getLogger(__name__)

_ROUNDS = 8  # of messages to compare clocks; the best of them counts
_BUFFERED = 4096  # events that are written at once
_WRITE_EVERY_S = 1.0
_CLOSING = b"\n]\n"

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Clock:
    """The job's clock as a rank sees it.

    Attributes:
        job: stands for the job; the same on all ranks.
        zero_s: the time of this rank's `perf_counter` at which the job's clock was 0.
    """

    job: str
    zero_s: float

    @classmethod
    def agree(cls, messages: Messages) -> Clock:
        """Compare this rank's clock with rank 0's. Collective.

        After F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989): messages both ways
        bound the distance from both sides, and the fastest ones bound it best.
        """
        lower, upper, token = [], [], uuid.uuid4().hex
        for _ in range(_ROUNDS if messages.size > 1 else 1):
            sent = perf_counter()
            said = exchange_json(messages, [token, sent])
            received = perf_counter()
            replies = exchange_json(messages, received)
            lower.append(said[0][1] - received)
            upper.append(replies[0] - sent)
            job, zero = said[0]
        return cls(job, zero - distance(lower, upper))


def distance(lower: Iterable[float], upper: Iterable[float]) -> float:
    """Return how far another clock is ahead, given what it cannot be below and cannot be above (all in seconds).

    0 where that is possible: clocks of one machine are the same.
    """
    low, high = max(lower), min(upper)
    return 0.0 if low <= 0.0 <= high else (low + high) / 2


class Timeline:
    """A trace that this rank takes part in. Thread-safe.

    Args:
        path: the file; what it holds of an earlier trace goes.
        clock: the job's.
        number: which of the job's traces it is; the same on all ranks that write to the file.
        rank: this rank, in the world.
        host: where it runs.
        mark_batches: whether to mark the moments at which operations that travel together start.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], clock: Clock, number: int, rank: int, host: str, *, mark_batches: bool
    ) -> None:
        self.mark_batches = mark_batches
        self._path = os.fspath(path)
        self._rank = rank
        self._zero = clock.zero_s
        self._head = {"name": "trace", "ph": "M", "pid": 0, "args": {"job": f"{clock.job} {number}"}}
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._written_s = perf_counter()
        self._tracks = 0
        self._operations = 0
        self._describe("process_name", f"rank {rank} ({host})")
        self._describe("process_sort_index", rank, key="sort_index")
        try:
            self.write()
        except OSError as error:
            raise ConfigError(f"the timeline {self._path!r} cannot be written: {error.strerror}") from None

    def track(self, name: str) -> Track:
        """Return an observer that writes to a row of its own."""
        with self._lock:
            self._tracks += 1
            number = self._tracks
        self._describe("thread_name", name, number)
        return Track(self, number)

    def add(self, kind: str, name: str, at_s: float, track: int = 0, **more: Any) -> None:
        """Take an event down; ``at_s`` is a time of `perf_counter`."""
        event = {"name": name, "ph": kind, "pid": self._rank, "tid": track, "ts": self._microseconds(at_s), **more}
        with self._lock:
            self._events.append(event)
        if len(self._events) >= _BUFFERED or perf_counter() - self._written_s > _WRITE_EVERY_S:
            self.flush()

    def span(self, name: str, begin_s: float, end_s: float, track: int, **arguments: Any) -> None:
        """Take down that something lasted from one time to another."""
        self.add("X", name, begin_s, track, dur=round((end_s - begin_s) * 1e6, 3), args=arguments)

    def next_operation(self) -> str:
        """Return what stands for an operation in the trace."""
        with self._lock:
            self._operations += 1
            return f"{self._rank}.{self._operations}"

    def write(self) -> None:
        """Append what was taken down to the file.

        Raises:
            OSError: that does not work; what was taken down is lost.
        """
        with self._lock:
            events, self._events = self._events, []
            self._written_s = perf_counter()
            if events:
                self._append(",\n".join(json.dumps(each, separators=(",", ":")) for each in events).encode())

    def flush(self) -> None:
        """Do what `write` does; an error is logged, as no collective shall fail for it."""
        try:
            self.write()
        except OSError as error:
            _log.error("the timeline %r cannot be written: %s", self._path, error.strerror)

    def _append(self, events: bytes) -> None:
        """Put events before the closing bracket; begin the file anew if it holds another trace."""
        head = b"[\n" + json.dumps(self._head).encode()
        with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if file.read(len(head)) == head:
                file.seek(-len(_CLOSING), os.SEEK_END)
            else:
                file.seek(0)
                file.truncate()
                file.write(head)
            file.write(b",\n" + events + _CLOSING)

    def _describe(self, what: str, value: Any, track: int = 0, key: str = "name") -> None:
        self._events.append({"name": what, "ph": "M", "pid": self._rank, "tid": track, "args": {key: value}})

    def _microseconds(self, at_s: float) -> float:
        return round((at_s - self._zero) * 1e6, 3)


class Track(Instrument):
    """What happens on one communicator, and to the operations of its engine, as rows of a trace."""

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self._number = number
        self._began = 0.0  # when the last collective began
        self._last: float | None = None  # in a collective or batch: when its last step ended, or it began
        self._batch: float | None = None  # when the operations that run now were started
        self._moved_nbytes = 0
        self._lock = threading.Lock()
        self._under_way = 0
        # By name, the operations in each phase, in the order in which they were submitted.
        self._submitted: defaultdict[str, deque[str]] = defaultdict(deque)
        self._announced: defaultdict[str, deque[str]] = defaultdict(deque)
        self._running: defaultdict[str, deque[str]] = defaultdict(deque)

    # ---- collectives and their steps: one thread at a time ----

    def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
        self._began = self._last = perf_counter()

    def step_finished(self, step: str) -> None:
        if self._last is not None:  # else it is part of what prepares a collective
            begin, self._last = self._last, perf_counter()
            self._timeline.span(step, begin, self._last, self._number)

    def collective_finished(self, collective: str, algorithm: str, nbytes: int, duration_s: float) -> None:
        end = perf_counter()
        self._last = None if self._batch is None else end
        self._timeline.span(collective, self._began, end, self._number, algorithm=algorithm, nbytes=nbytes)
        self._moved_nbytes += nbytes
        self._count("bytes", end, self._moved_nbytes)

    def operations_started(self, names: Sequence[str]) -> None:
        now = self._last = self._batch = perf_counter()
        if self._timeline.mark_batches:
            self._timeline.add("i", f"batch of {len(names)}", now, self._number, s="p")
        for name in names:
            self._enter("negotiate", self._announced, "run", self._running, name, now)

    def operations_finished(self, names: Sequence[str]) -> None:
        end = perf_counter()
        if self._batch is not None:
            self._timeline.span(_title(names), self._batch, end, self._number, operations=list(names))
            self._last = self._batch = None
        for name in names:
            self._leave(name, end)
        with self._lock:
            self._under_way = max(0, self._under_way - len(names))
        self._count("operations under way", end, self._under_way)

    # ---- operations: submitted by any thread ----

    def operation_submitted(self, name: str) -> None:
        now = perf_counter()
        operation = self._timeline.next_operation()
        with self._lock:
            self._under_way += 1
        self._mark("b", name, operation, now)
        self._mark("b", "queue", operation, now)
        self._submitted[name].append(operation)
        self._count("operations under way", now, self._under_way)

    def operation_announced(self, name: str) -> None:
        self._enter("queue", self._submitted, "negotiate", self._announced, name, perf_counter())

    def _enter(
        self,
        phase: str,
        places: dict[str, deque[str]],
        next_phase: str,
        next_places: defaultdict[str, deque[str]],
        name: str,
        now: float,
    ) -> None:
        """Let the oldest operation of a name go from one phase to the next; those from before the trace have none."""
        operation = _take(places, name)
        if operation is not None:
            self._mark("e", phase, operation, now)
            self._mark("b", next_phase, operation, now)
            next_places[name].append(operation)

    def _leave(self, name: str, now: float) -> None:
        """End the oldest operation of a name, in whatever phase it is."""
        for phase, places in (("run", self._running), ("negotiate", self._announced), ("queue", self._submitted)):
            operation = _take(places, name)
            if operation is not None:
                self._mark("e", phase, operation, now)
                self._mark("e", name, operation, now)
                return

    def _mark(self, kind: str, name: str, operation: str, now: float) -> None:
        self._timeline.add(kind, name, now, self._number, cat="operation", id=operation)

    def _count(self, counter: str, now: float, value: int) -> None:
        self._timeline.add("C", f"{counter} ({self._number})", now, self._number, args={"value": value})


def _take(places: dict[str, deque[str]], name: str) -> str | None:
    queue = places.get(name)
    if not queue:
        return None
    operation = queue.popleft()
    if not queue:
        del places[name]
    return operation


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
