"""The timeline: what this job's ranks did and when, as one trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Every rank appends what it sees to one file, in pieces, with the file locked; so the trace needs no collective call to
be merged, holds what happened up to a crash, and is complete JSON between any two writes. Where hosts share no file
system, each has a file with its own ranks. Times are on one clock: that of rank 0, whose distance the ranks measure in
`init`.

The file is private, so only processes of this user can hold it up. No rank waits for them: while the file is locked
it keeps what it sees, up to a limit, and tries again later. A piece first takes its space on the disk, as blanks behind
the closing bracket, and then fills it; so a full disk is noticed while the file is whole.

The format is the JSON array of the Trace Event Format. Each rank is a process in it, with two rows of nested spans for
each process set: blocking collectives, and what the engine carries out. Collectives contain their steps. Asynchronous
operations have rows of their own: *queue* until the engine takes one in, *negotiate* until all ranks have submitted it,
*run*, with the parameters whose gradients it reduces, until it is done. Counters show the operations under way and the
bytes so far. The row of the *program* has its training steps, numbered, with forward and backward passes and steps of
optimizers; arrows lead from there, where an operation was submitted, to where it runs, and from a rank that others have
waited for to where it runs on those.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import threading
import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.common.instruments import Instrument
from ringreduce.transport.messages import Messages, exchange_json

__all__ = ["Clock", "Program", "Timeline", "Track", "distance"]

_log = logging.getLogger(__name__)

_ROUNDS = 8  # of messages to compare clocks; the best of them counts
_BUFFERED = 4096  # events that are written at once
_KEPT = 16 * _BUFFERED  # events that are kept while the file cannot be had; they take about 10 MB
_WRITE_EVERY_S = 1.0
_TRY_EVERY_S = 0.2  # while others have the file
_POLL_S = 1e-3
_PATIENCE_S = 5.0  # for who begins or ends a trace; collectives have none
_OPENING = b'[\n{"name": "trace", "ph": "M", "pid": 0, "args": {"job": '
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
        patience_s: how long `write` and `flush` try to get the file, if others have it.

    Raises:
        ConfigError: the file cannot be written; or it is none of this user's plain files, a link, or holds something
            else than a trace of ours, and stays as it is.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: Clock,
        number: int,
        rank: int,
        host: str,
        *,
        mark_batches: bool,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self.mark_batches = mark_batches
        self._path = os.fspath(path)
        self._rank = rank
        self._zero = clock.zero_s
        self._head = _OPENING + json.dumps(f"{clock.job} {number}").encode() + b"}}"
        self._patience_s = patience_s
        # Guards what follows, and is held for moments. A signal handler may flush while its own thread holds it: then
        # the handler goes first, and the event that the thread is about to take down comes later or is lost.
        self._lock = threading.RLock()
        self._events: list[Event] = []
        self._dropped = 0  # since the last piece
        self._tracks = 0
        self._operations = 0
        self._program: int | None = None  # the row of the program
        self._turn = threading.Lock()  # Guards what follows: of the threads of this rank, one at a time writes.
        self._writer: int | None = None  # that thread
        self._pieces: list[bytes] = []  # which wait for the file
        self._waiting = 0  # events in them; others read it, to know when it is too many
        self._due_s = 0.0  # when to try next
        self._begun = False  # whether anything of this trace is in the file
        self._failed = False  # whether writing was given up
        self._is_due_to_write = False  # whether a thread will write what the program leaves
        self._describe("process_name", name=f"rank {rank} ({host})")
        self._describe("process_sort_index", sort_index=rank)
        try:
            self.write()
        except OSError as error:
            raise ConfigError(f"the timeline {self._path!r} cannot be written: {error.strerror}") from None

    def track(self, name: str, place: str = "", member: int = 0, size: int = 1) -> Track:
        """Return an observer that writes to a row of its own.

        Args:
            name: of the row.
            place: the same for the rows of all ranks whose collectives belong together, and for no others.
            member: this rank among these.
            size: how many they are.
        """
        return Track(self, self._row(name), place, member, size)

    def program(self) -> Program:
        """Return the row of the program."""
        with self._lock:
            if self._program is None:
                self._program = self._row("program")
        return Program(self, self._program)

    def _row(self, name: str) -> int:
        with self._lock:
            self._tracks += 1
            number = self._tracks
        self._describe("thread_name", number, name=name)
        return number

    def arrow(self, kind: str, id_: str, at_s: float, track: int | None) -> None:
        """Take down where an arrow begins (``"s"``) or ends (``"f"``): on a row; None: on that of the program."""
        row = self._program if track is None else track
        if row is not None:
            more = {"bp": "e"} if kind == "f" else {}
            self.add(kind, "operation", at_s, row, cat="arrow", id=id_, **more)

    def add(self, kind: str, name: str, at_s: float, track: int = 0, **more: Any) -> None:
        """Take an event down; ``at_s`` is a time of `perf_counter`."""
        ts = round((at_s - self._zero) * 1e6, 3)
        event = {"name": name, "ph": kind, "pid": self._rank, "tid": track, "ts": ts, **more}
        with self._lock:
            if len(self._events) + self._waiting < _KEPT:
                self._events.append(event)
            else:
                self._dropped += 1
        if len(self._events) >= _BUFFERED or perf_counter() > self._due_s:
            self._write_or_log(0.0)
        elif not self._is_due_to_write:
            self._write_later()

    def _write_later(self) -> None:
        """Write within a second, though no event follows: the program may wait, or be killed."""
        self._is_due_to_write = True
        timer = threading.Timer(_WRITE_EVERY_S, self._write_late)
        timer.name, timer.daemon = "ringreduce writes the timeline", True
        try:
            timer.start()
        except RuntimeError:  # no thread begins once the interpreter ends; what is left is flushed there
            self._is_due_to_write = False

    def _write_late(self) -> None:
        self._is_due_to_write = False
        if not self._write_or_log(0.0):
            self._write_later()

    def span(self, name: str, begin_s: float, end_s: float, track: int, **arguments: Any) -> None:
        """Take down that something lasted from one time to another."""
        self.add("X", name, begin_s, track, dur=round((end_s - begin_s) * 1e6, 3), args=arguments)

    def next_operation(self) -> str:
        """Return what stands for an operation in the trace."""
        with self._lock:
            self._operations += 1
            return f"{self._rank}.{self._operations}"

    def write(self) -> bool:
        """Append what was taken down to the file; return whether that could be had. If not, a later call does it.

        Raises:
            OSError: that does not work; what was taken down is lost, and so is what comes.
        """
        return self._write(self._patience_s)

    def flush(self) -> None:
        """Do what `write` does; an error is logged, once, as no collective shall fail for it."""
        if not self._write_or_log(self._patience_s):
            count = len(self._events) + self._waiting + self._dropped
            _log.error("the timeline %r is being written by others; events that it lacks: %d", self._path, count)

    def _write_or_log(self, patience_s: float) -> bool:
        try:
            return self._write(patience_s)
        except OSError as error:
            _log.error("the timeline %r cannot be written, and ends here: %s", self._path, error.strerror)
            return True

    def _write(self, patience_s: float) -> bool:
        if self._writer == threading.get_ident() or not self._turn.acquire(timeout=patience_s):
            return False  # another thread is at it; or this one, which a signal handler has interrupted
        done = False
        try:
            self._writer = threading.get_ident()
            with self._lock:
                events, self._events = self._events, []
            self._waiting += len(events)
            if events and not self._failed:
                self._pieces.append(b",\n".join(map(_encode, events)))
            done = not self._pieces or self._append(perf_counter() + patience_s)
        except OSError:
            self._failed = done = True
            raise
        finally:
            self._due_s = perf_counter() + (_WRITE_EVERY_S if done else _TRY_EVERY_S)
            if done:
                self._pieces.clear()
                self._waiting = 0
            self._writer = None
            self._turn.release()
        return done

    def _append(self, deadline_s: float) -> bool:
        """Put what waits before the closing bracket; begin the file anew if it holds another trace.

        Returns:
            Whether the file could be had in time.
        """
        descriptor = self._open()
        try:
            free = _lock(descriptor, deadline_s)
            head = os.pread(descriptor, len(self._head), 0)
            if head and not head.startswith(_OPENING):
                raise FileExistsError(errno.EEXIST, "it is no trace of ringreduce; remove it, or name another file")
            if not free:
                return False
            if head != self._head:
                if head and self._begun:
                    raise FileExistsError(errno.EEXIST, "another trace was begun in it")
                _begin(descriptor, self._head)
            with self._lock:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                self._pieces.append(_encode(self._about("dropped_events", count=dropped)))
            _extend(descriptor, b",\n".join(self._pieces), len(self._head))
            self._begun = True
            return True
        finally:
            # A process that was forked meanwhile has the descriptor too, and would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _open(self) -> int:
        """Open the file, which is made if need be; what is none of this user's plain files, or a link, is refused."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            descriptor = os.open(self._path, flags, 0o600)
        except OSError as error:
            if error.errno == errno.ELOOP and os.path.islink(self._path):
                raise OSError(errno.ELOOP, "it is a symbolic link; name the file itself") from None
            raise
        found = os.fstat(descriptor)
        complaint = ""
        if not stat.S_ISREG(found.st_mode):
            complaint = "it is no regular file"
        elif found.st_uid != os.geteuid():
            complaint = f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}"
        elif found.st_nlink > 1:
            complaint = f"it has {found.st_nlink} names (hard links)"
        if complaint:
            os.close(descriptor)
            raise FileExistsError(errno.EEXIST, f"{complaint}; name another file")
        return descriptor

    def _describe(self, what: str, track: int = 0, **arguments: Any) -> None:
        with self._lock:
            self._events.append(self._about(what, track, **arguments))

    def _about(self, what: str, track: int = 0, **arguments: Any) -> Event:
        return {"name": what, "ph": "M", "pid": self._rank, "tid": track, "args": arguments}


@dataclass(slots=True)
class _Operation:
    """An asynchronous operation in the trace."""

    id: str
    phase: str
    submitted_s: float
    parts: Sequence[str] = ()


class Program:
    """The row of a trace that shows what the program does."""

    def __init__(self, timeline: Timeline, number: int) -> None:
        self._timeline = timeline
        self._number = number

    def span(self, name: str, begin_s: float, end_s: float, **arguments: Any) -> None:
        """Take down that the program did something from one time of `perf_counter` to another."""
        self._timeline.span(name, begin_s, end_s, self._number, **arguments)


class Track(Instrument):
    """What happens on one communicator, and to the operations of its engine, as rows of a trace."""

    def __init__(self, timeline: Timeline, number: int, place: str, member: int, size: int) -> None:
        self._timeline = timeline
        self._number = number
        self._place, self._member, self._size = place, member, size
        self._late: tuple[int, int] | None = None  # who the others wait for, and the batch that then starts
        self._began = 0.0  # when the last collective began
        self._last: float | None = None  # in a collective or batch: when its last step ended, or it began
        self._batch: float | None = None  # when the operations that run now were started
        self._moved_nbytes = 0
        self._lock = threading.RLock()  # Guards what follows, and is held for moments; handlers may submit as well.
        self._under_way = 0
        # By name, the operations under way in the order in which they were submitted, and so go through their phases.
        self._operations: defaultdict[str, list[_Operation]] = defaultdict(list)

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
        late, self._late = self._late, None
        for name in names:
            operation = self._enter("negotiate", "run", name, now)
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
        """Return the id of the arrow from who was late to one that has waited."""
        return f"{self._place} {late[1]} {late[0]} {member}"

    def operations_finished(self, names: Sequence[str]) -> None:
        end = perf_counter()
        if self._batch is not None:
            self._timeline.span(_title(names), self._batch, end, self._number, operations=list(names))
            self._last = self._batch = None
        for name in names:
            self._leave(name, end)
        with self._lock:
            self._under_way = under_way = max(0, self._under_way - len(names))
        self._count("operations under way", end, under_way)

    # ---- operations: submitted by any thread ----

    def operation_submitted(self, name: str) -> None:
        now = perf_counter()
        operation = _Operation(self._timeline.next_operation(), "queue", now)
        with self._lock:
            self._under_way += 1
            under_way = self._under_way
        self._mark("b", name, operation, now)
        self._mark("b", "queue", operation, now)
        with self._lock:
            self._operations[name].append(operation)
        self._count("operations under way", now, under_way)

    def operation_described(self, name: str, parts: Sequence[str]) -> None:
        with self._lock:
            if self._operations.get(name):
                self._operations[name][-1].parts = parts

    def operation_announced(self, name: str) -> None:
        self._enter("queue", "negotiate", name, perf_counter())

    def _enter(self, phase: str, next_phase: str, name: str, now: float) -> _Operation | None:
        """Let the oldest operation of a name go from one phase to the next; those from before the trace have none."""
        with self._lock:
            operation = next((each for each in self._operations.get(name, ()) if each.phase == phase), None)
            if operation is None:
                return None
            operation.phase = next_phase
        self._mark("e", phase, operation, now)
        parts = {"args": {"parameters": list(operation.parts)}} if next_phase == "run" and operation.parts else {}
        self._mark("b", next_phase, operation, now, **parts)
        return operation

    def _leave(self, name: str, now: float) -> None:
        """End the oldest operation of a name, in whatever phase it is."""
        with self._lock:
            if name not in self._operations:
                return
            operation = self._operations[name].pop(0)
            if not self._operations[name]:
                del self._operations[name]
        self._mark("e", operation.phase, operation, now)
        self._mark("e", name, operation, now)

    def _mark(self, kind: str, name: str, operation: _Operation, now: float, **more: Any) -> None:
        self._timeline.add(kind, name, now, self._number, cat="operation", id=operation.id, **more)

    def _count(self, counter: str, now: float, value: int) -> None:
        self._timeline.add("C", f"{counter} ({self._number})", now, self._number, args={"value": value})


def _encode(event: Event) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def _lock(descriptor: int, deadline_s: float) -> bool:
    """Get the lock of a file, within the time; return whether that went well.

    Not the locks of `fcntl.lockf`: for those, the threads of a process are one, and to close a file frees all of them.
    """
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if perf_counter() >= deadline_s:
                return False
            sleep(_POLL_S)


def _begin(descriptor: int, head: bytes) -> None:
    """Make a file an empty trace, readable by this user alone; one without anything if that fails."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) & 0o077:
        os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, 0)
    try:
        _fill(descriptor, head + _CLOSING, 0)
    except OSError:
        os.ftruncate(descriptor, 0)
        raise


def _extend(descriptor: int, events: bytes, begin: int) -> None:
    """Put events before the closing bracket of a trace, whose head ends at ``begin``; if that fails, it stays whole."""
    end = _find_end(descriptor, begin)
    text = b",\n" + events + _CLOSING
    size = os.fstat(descriptor).st_size
    try:
        _fill(descriptor, b" " * (end + len(text) - size), size)
        _fill(descriptor, text, end)
    except BaseException:
        with suppress(OSError):  # the first error is what is told
            _fill(descriptor, _CLOSING, end)
            os.ftruncate(descriptor, end + len(_CLOSING))
        raise


def _find_end(descriptor: int, begin: int) -> int:
    """Return where the events of a trace end and the closing bracket begins; put it there if a killed rank did not."""
    size, length, place = os.fstat(descriptor).st_size, 1 << 12, -1
    while True:
        start = max(begin, size - length)
        tail = os.pread(descriptor, size - start, start).rstrip()
        if tail.endswith(_CLOSING.rstrip()):
            return start + len(tail) - len(_CLOSING.rstrip())
        place = tail.rfind(b",\n")  # what follows may be half an event; no event has a newline in it
        if place >= 0 or start == begin:
            break
        length *= 16
    end = start + max(0, place)
    os.ftruncate(descriptor, end)
    _fill(descriptor, _CLOSING, end)
    return end


def _fill(descriptor: int, text: bytes, place: int) -> None:
    """Write all of a text; one that does not fit ends in an error after a part of it."""
    while text:
        written = os.pwrite(descriptor, text, place)
        text, place = text[written:], place + written


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
