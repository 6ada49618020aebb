"""The timeline: what this job's ranks did and when, as one trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Times are on one clock: that of rank 0, whose distance the ranks measure in `init`.
`ringreduce.observe.seen.trace_file` says how the ranks write one file.

The format is the JSON array of the Trace Event Format. Each rank is a process in it, with two rows of nested spans for
each process set: blocking collectives, and what the engine carries out. Collectives contain their steps. Asynchronous
operations have rows of their own: *queue* until the engine takes one in, *negotiate* until all ranks have submitted it,
*run*, with the parameters whose gradients it reduces, until it is done. Counters show the operations under way and the
bytes so far. The row of the *program* has its training steps, numbered, with forward and backward passes and steps of
optimizers; arrows lead from there, where an operation was submitted, to where it runs, and from a rank that others have
waited for to where it runs on those.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.instruments import Instrument
from ringreduce.common.sealed_files import PLAIN, KeyFile
from ringreduce.observe.seen.trace_file import TraceFile
from ringreduce.transport.messages import Messages, exchange_json

_log = logging.getLogger(__name__)

_ROUNDS = 8  # of messages to compare clocks; the best of them counts
_BUFFERED = 4096  # events that are written at once
_KEPT = 16 * _BUFFERED  # events that are kept while the disk is slow; they take about 10 MB
_PATIENCE_S = 5.0  # of the end of a trace, for what is being written

Event = dict[str, Any]
#: Takes down what the program does: a name, from one time of `perf_counter` to another, and more by name.
Program = Callable[..., None]


@dataclass(frozen=True, slots=True)
class JobClock:
    """The job's clock as a rank sees it.

    Attributes:
        job: identifies the job; the same on all ranks.
        zero_s: the time of this rank's `perf_counter` at which the job's clock was 0.
    """

    job: str
    zero_s: float

    @classmethod
    def agree(cls, messages: Messages) -> JobClock:
        """Compare this rank's clock with rank 0's. Collective.

        After F. Cristian, "Probabilistic clock synchronization", Distributed Computing 3 (1989): messages both ways
        bound the distance from both sides, and the fastest ones bound it best.
        """
        lower = []
        upper = []
        token = uuid.uuid4().hex
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
    low = max(lower)
    high = min(upper)
    return 0.0 if low <= 0.0 <= high else (low + high) / 2


class Timeline:
    """A trace that this rank takes part in. Thread-safe.

    Events are kept in memory until they are written, which is whenever there are many, or somebody calls `write`. No
    rank waits for another, and only the thread that has added many events for its disk; what comes while that is at
    work is kept, up to a limit.

    Args:
        path: the file; what it holds of an earlier trace goes.
        clock: the job's.
        number: which of the job's traces it is; the same on all ranks that write to the file.
        rank: this rank, in the world.
        host: where it runs.
        mark_batches: whether to mark the moments at which operations that travel together start.
        keys: seals the file.

    Attributes:
        path: of the file, from the root.

    Raises:
        ConfigError: the file cannot be written; or it is none of this user's plain files, a link, or holds something
            else than a trace of ours, and stays as it is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: JobClock,
        number: int,
        rank: int,
        host: str,
        *,
        mark_batches: bool,
        keys: KeyFile = PLAIN,
    ) -> None:
        self.mark_batches = mark_batches
        self.path = os.path.abspath(path)
        self._rank = rank
        self._zero = clock.zero_s
        # Without a lock, as signal handlers may interrupt a thread that adds an event.
        self._events: deque[Event] = deque()
        self._limit = _KEPT  # of these; 0 once writing was given up
        self._dropped = self._said_dropped = 0
        self._rows = itertools.count(1)
        self._operations = itertools.count(1)
        self._program: int | None = None  # the row of the program
        self._pid = os.getpid()  # one that is forked writes nothing
        self._turn = threading.RLock()  # Guards what follows: one thread at a time writes.
        self._writing = False  # whether it does, also as its own signal handler sees it
        self._stopped = False
        self._file = TraceFile(self.path, f"{clock.job} {number}", rank, keys)
        self._describe("process_name", name=f"rank {rank} ({host})")
        self._describe("process_sort_index", sort_index=rank)
        try:
            self._file.begin(self._encoded())
        except OSError as error:
            kind = ForeignFileError if isinstance(error, FileExistsError) else ConfigError
            raise kind(f"the timeline {os.fspath(path)!r} cannot be written: {error.strerror}") from None

    def track(self, name: str, place: str = "", member: int = 0, size: int = 1) -> Track:
        """Return an observer that writes to a row of its own.

        Args:
            name: of the row.
            place: the same for the rows of all ranks whose collectives belong together, and for no others.
            member: this rank among these.
            size: how many they are.
        """
        return Track(self, self._row(name, place), place=place, member=member, size=size)

    def program(self) -> Program:
        """Return what writes to the row of the program."""
        if self._program is None:
            self._program = self._row("program")
        return partial(self.span, track=self._program)

    def _row(self, name: str, place: str = "") -> int:
        number = next(self._rows)
        self._describe("thread_name", number, name=name, **({"place": place} if place else {}))
        return number

    def arrow(self, kind: str, id_: str, at_s: float, track: int | None) -> None:
        """Take down where an arrow begins (``"s"``) or ends (``"f"``): on a row; None: on that of the program."""
        row = self._program if track is None else track
        if row is not None:
            more = {"bp": "e"} if kind == "f" else {}
            self.add(kind, "operation", at_s=at_s, track=row, cat="arrow", id=id_, **more)

    def add(self, kind: str, name: str, at_s: float, track: int = 0, **more: Any) -> None:
        """Take an event down; ``at_s`` is a time of `perf_counter`."""
        if len(self._events) >= self._limit:
            self._dropped += 1
            return
        ts = round((at_s - self._zero) * 1e6, 3)
        self._events.append({"name": name, "ph": kind, "pid": self._rank, "tid": track, "ts": ts, **more})
        if len(self._events) >= _BUFFERED:
            self.write()

    def span(self, name: str, begin_s: float, end_s: float, track: int, **arguments: Any) -> None:
        """Take down that something lasted from one time to another."""
        self.add("X", name, at_s=begin_s, track=track, dur=round((end_s - begin_s) * 1e6, 3), args=arguments)

    def next_operation(self) -> str:
        """Return the entry of an operation in the trace."""
        return f"{self._rank}.{next(self._operations)}"

    def stop(self, ranks: int, *, at_once: bool = False) -> None:
        """End the trace, or let go of its parts if it has ended. Once all ranks have done so, the file has all events.

        Args:
            ranks: how many ranks write to the file at least; once they all have ended, nothing but the file is there.
            at_once: make the file now, of what all ranks have written so far, as some may never end it.
        """
        self._stopped = True
        if not self.write(_PATIENCE_S, lambda: self._file.finish(ranks, at_once=at_once)):
            _log.error("the timeline %r lacks events: %d", self.path, len(self._events))

    def write(self, patience_s: float = 0.0, finish: Callable[[], object] | None = None) -> bool:
        """Write what was taken down to this rank's part, unless it was stopped; an error is logged, once.

        Args:
            patience_s: how long to wait for a thread of this rank that writes; then it does nothing.
            finish: called after it was written, as it stops.

        Returns:
            Whether no other thread was writing for so long.
        """
        if not self._turn.acquire(timeout=patience_s):
            return False
        try:
            if self._writing:
                return False  # this thread, which a signal handler has interrupted, is at it
            self._writing = True
            try:
                if self._limit and os.getpid() == self._pid and (finish is not None or not self._stopped):
                    if text := self._encoded():
                        self._file.append(text)
                    if finish is not None:
                        finish()
            except OSError as error:
                self._limit = 0
                _log.error("the timeline %r cannot be written, and ends here: %s", self.path, error.strerror)
            finally:
                self._writing = False
            return True
        finally:
            self._turn.release()

    def _encoded(self) -> bytes:
        """Return what was taken down since the last time; and, behind it, how much was dropped."""
        dropped = self._dropped
        kept = len(self._events)
        events = [self._events.popleft() for _ in range(kept)]
        if dropped > self._said_dropped:
            events.append(self._about("dropped_events", count=dropped - self._said_dropped))
            self._said_dropped = dropped
        return b"".join(json.dumps(event, separators=(",", ":")).encode() + b",\n" for event in events)

    def _describe(self, what: str, track: int = 0, **arguments: Any) -> None:
        self._events.append(self._about(what, track, **arguments))

    def _about(self, what: str, track: int = 0, **arguments: Any) -> Event:
        return {"name": what, "ph": "M", "pid": self._rank, "tid": track, "args": arguments}


@dataclass(slots=True)
class _TracedOperation:
    """An asynchronous operation in the trace."""

    id: str
    phase: str
    submitted_s: float
    parts: Sequence[str] = ()


class Track(Instrument):
    """What happens on one communicator, and to the operations of its engine, as rows of a trace."""

    def __init__(self, timeline: Timeline, number: int, place: str, member: int, size: int) -> None:
        self._timeline = timeline
        self._number = number
        self._place = place
        self._member = member
        self._size = size
        self._late: tuple[int, int] | None = None  # the rank that the others wait for, and the batch that then starts
        self._began = 0.0  # when the last collective began
        self._last: float | None = None  # in a collective or batch: when its last step ended, or it began
        self._batch: float | None = None  # when the operations that run now were started
        self._moved_nbytes = 0
        self._lock = threading.RLock()  # Guards what follows, and is held for moments; handlers may submit as well.
        self._under_way = 0
        # By name, the operations under way in the order in which they were submitted, and so go through their phases.
        self._operations: defaultdict[str, list[_TracedOperation]] = defaultdict(list)

    # ---- collectives and their steps: one thread at a time ----

    def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
        self._began = self._last = perf_counter()

    def step_finished(self, step: str) -> None:
        if self._last is not None:  # else it is part of what prepares a collective
            begin = self._last
            self._last = perf_counter()
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
        late = self._late
        self._late = None
        for name in names:
            operation = self._enter("negotiate", "run", name=name, now=now)
            if operation is None:
                continue
            self._timeline.arrow("s", operation.id, operation.submitted_s, None)
            self._timeline.arrow("f", operation.id, now, self._number)
            if late is not None and late[0] == self._member:
                for other in range(self._size):
                    if other != self._member:
                        self._timeline.arrow("s", self._waiting(late, other), operation.submitted_s, None)
                late = None
        if late is not None and late[0] != self._member and names:
            self._timeline.arrow("f", self._waiting(late, self._member), now, self._number)

    def rank_was_late(self, rank: int, seconds: float, batch: int) -> None:
        self._late = rank, batch

    def _waiting(self, late: tuple[int, int], member: int) -> str:
        """Return the id of the arrow from the late rank to one that has waited."""
        return f"{self._place} {late[1]} {late[0]} {member}"

    def operations_finished(self, names: Sequence[str]) -> None:
        end = perf_counter()
        if self._batch is not None:
            title = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            self._timeline.span(title, self._batch, end, self._number, operations=list(names))
            self._last = self._batch = None
        for name in names:
            self._leave(name, end)
        with self._lock:
            self._under_way = under_way = max(0, self._under_way - len(names))
        self._count("operations under way", end, under_way)

    # ---- operations: submitted by any thread ----

    def operation_submitted(self, name: str) -> None:
        now = perf_counter()
        operation = _TracedOperation(self._timeline.next_operation(), "queue", now)
        with self._lock:
            self._under_way += 1
            under_way = self._under_way
        self._mark("b", name, operation=operation, now=now)
        self._mark("b", "queue", operation=operation, now=now)
        with self._lock:
            self._operations[name].append(operation)
        self._count("operations under way", now, under_way)

    def operation_described(self, name: str, parts: Sequence[str]) -> None:
        with self._lock:
            if self._operations.get(name):
                self._operations[name][-1].parts = parts

    def operation_announced(self, name: str) -> None:
        self._enter("queue", "negotiate", name=name, now=perf_counter())

    def _enter(self, phase: str, next_phase: str, name: str, now: float) -> _TracedOperation | None:
        """Let the oldest operation of a name go from one phase to the next; those from before the trace have none."""
        with self._lock:
            operation = next((each for each in self._operations.get(name, ()) if each.phase == phase), None)
            if operation is None:
                return None
            operation.phase = next_phase
        self._mark("e", phase, operation=operation, now=now)
        parts = {"args": {"parameters": list(operation.parts)}} if next_phase == "run" and operation.parts else {}
        self._mark("b", next_phase, operation=operation, now=now, **parts)
        return operation

    def _leave(self, name: str, now: float) -> None:
        """End the oldest operation of a name, in whatever phase it is."""
        with self._lock:
            if name not in self._operations:
                return
            operation = self._operations[name].pop(0)
            if not self._operations[name]:
                del self._operations[name]
        self._mark("e", operation.phase, operation=operation, now=now)
        self._mark("e", name, operation=operation, now=now)

    def _mark(self, kind: str, name: str, operation: _TracedOperation, now: float, **more: Any) -> None:
        self._timeline.add(kind, name, now, self._number, cat="operation", id=operation.id, **more)

    def _count(self, counter: str, now: float, value: int) -> None:
        self._timeline.add("C", f"{counter} ({self._number})", now, self._number, args={"value": value})
