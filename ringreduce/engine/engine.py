"""The engine: named operations from any thread, in any order, run in one order on all ranks.

Whoever waits for an operation drives the engine: it reads what the ranks say to each other and runs what is ready, on
its own thread. A progress thread does the same while nobody waits. It sleeps on a condition while this rank has nothing
under way, so an idle rank costs nothing; its leader looks once a second whether others wait for it.
"""

from __future__ import annotations

import logging
import marshal
import os
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import numpy as np

from ringreduce.calls import Called, GivenUp, disagreement
from ringreduce.communicator import Communicator
from ringreduce.engine.execution import Executor, RefusedError
from ringreduce.engine.negotiation import Leader, Member
from ringreduce.engine.operations import Join, Operation, Refusal, Withdrawal, WithdrawnError, is_unnamed
from ringreduce.engine.orders import (
    Expired,
    Joined,
    Late,
    Looks,
    Lost,
    Order,
    Refuse,
    Run,
    Stalled,
    Withdrawn,
)
from ringreduce.engine.stall import StallWatch
from ringreduce.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    MismatchError,
    PeerLostError,
    RingReduceError,
    ShutdownError,
    TransportError,
    UnsupportedBufferError,
    name_ranks,
)
from ringreduce.transport.notes import Notes

__all__ = ["Engine", "EngineTally", "Entrance"]

_log = logging.getLogger(__name__)

_TRIES = 16
_CHECK_S = 0.1
_YIELD_S = 0.002  # after this long nothing is about to happen: nap
_NAP_S = 50e-6
_LONG_NAP_S = 1e-3  # after a second without news
_DOZE_S = 1e-3, 8e-3  # how long the progress thread sleeps at a time, first and when that was needless, while
_LINGER_S = 20e-3  # the last news is not older than this
_PROMPT = 2  # so often in a row the program waited at once
_IDLE_S = 1.0  # how often the leader of idle ranks looks up
_GRACE_S = 10.0  # how long after the time limit a rank waits for the leader to say so


class EngineTally:
    """What an engine has done.

    Attributes:
        operations: how many have come to an end, well or not.
        batches: in how many pieces they ran; operations that travel together are one piece.
        seconds: how long those took.
        overlapped_s: how much of it while the program did something else.
        late: of the rank for which others last had to wait: since when that is known, which rank it was, and how long
            it took (seconds); None: there was none.
    """

    __slots__ = ("batches", "late", "operations", "overlapped_s", "seconds")

    def __init__(self) -> None:
        self.operations = 0
        self.batches = 0
        self.seconds = 0.0
        self.overlapped_s = 0.0
        self.late: tuple[float, int, float] | None = None


class Engine:
    """Asynchronous operations on one process set. Thread-safe.

    Args:
        communicator: carries the operations out; used by nobody else. Closed with the engine.
        notes: carries what the ranks say to each other about them; used by nobody else. Closed with the engine.
        find_lost: returns what to raise about a rank that is gone, given what this one does; None if none is.
        threads: whether operations may run on another thread than that which submits them. If not, they run only
            while somebody waits.

    Attributes:
        tally: what it has done so far.
        joins: how often all ranks have joined; the same on all ranks when a join has returned.
    """

    LEADER = 0

    def __init__(
        self,
        communicator: Communicator,
        notes: Notes,
        *,
        find_lost: Callable[[str], CollectiveError | None] = lambda doing: None,
        threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = EngineTally()
        self.joins = 0
        self._communicator = communicator
        self._instruments = communicator.instruments
        self._messages = notes
        self._find_lost = find_lost
        self._clock = clock
        self._executor = Executor(communicator)
        config = communicator.config
        leads = communicator.rank == self.LEADER
        self._member = Member(communicator.size, plans=leads)
        self._followers = range(1, communicator.size) if leads else range(0)
        self._leader = Leader(communicator.size, config.fusion_nbytes) if leads else None
        self._stall = StallWatch(config.stall_warning_s, config.timeout_s)
        self._driver = threading.Lock()  # who holds it may touch everything above
        self._lock = (
            threading.Lock()
        )  # held for what follows, by its own name as a condition's takes four times as long
        self._changed = threading.Condition(self._lock)  # an operation is done, or nobody drives
        self._entrance = Entrance()
        self._bell = threading.Lock()  # released to wake the progress thread: many times cheaper than a condition
        self._bell.acquire()
        self._inbox: deque[Operation | Withdrawal | None] = deque()  # what the program did, in order; None: it waited
        self._pending: defaultdict[str, deque[Operation]] = defaultdict(deque)
        self._names: dict[str, Operation] = {}  # that are under way, of operations that must be the only ones
        self._join: Operation | None = None  # while it is under way
        self._under_way = 0  # operations that are not done
        self._waiters = 0
        self._asleep = False
        self._dozing = False  # asleep, and will look by itself in a moment
        self._prompt = 0  # how often in a row the program waited before anybody had taken in what it submitted
        self._overlapping = False  # whether the progress thread drives, so that the program need not
        self._lost: Lost | None = None  # a rank that takes part in nothing any more: nothing can run then
        self._closed = False
        self._disowned = ""
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._threads = threads
        self._checked = self._news = clock()
        self._named_kinds: Counter[str] = Counter()
        if leads and communicator.size > 1:
            self._start()  # others may wait for this rank before it has submitted anything

    @property
    def communicator(self) -> Communicator:
        return self._communicator

    @property
    def threaded(self) -> bool:
        """Whether operations go on while nobody waits for them."""
        return self._threads

    # ---- what programs call, from any thread ----

    def submit(self, operation: Operation, *, unique: bool = True) -> None:
        """Start an operation; returns at once.

        Args:
            operation: its arrays belong to the engine until it is done.
            unique: whether its name must not be under way already.

        Raises:
            ConfigError: its name is under way, this rank has joined and others have not, or the thread that calls this
                is in the engine already: a signal handler interrupts it there, or this is called back from there.
            ShutdownError: the engine was closed.
            TransportError: an earlier operation failed in a way that ended all.
        """
        with self._entrance, self._lock:
            self._enter(operation, unique)
            self._wake()

    def refuse(self, refusal: Refusal) -> None:
        """Let the other ranks hear of a call that this one cannot make; returns at once.

        It is submitted like the call, so that the next one of its name meets the others' next one. Where nothing can be
        submitted any more there is nobody to tell.
        """
        with suppress(RingReduceError):
            self.submit(refusal, unique=False)

    def run(self, operation: Operation, *, unique: bool = True) -> Any:
        """Start an operation and wait for it: without the help of another thread, if none is at work.

        Raises:
            what `submit` and `wait` raise.
        """
        with self._entrance:
            with self._lock:
                self._enter(operation, unique)
                self._waiters += 1
            self._take_note_of_wait()
            return self._await(operation)

    def withdraw(self, operations: Sequence[Operation]) -> None:
        """Let operations that are speculative not run; returns at once, and takes no lock, for finalizers.

        Those that have run or are about to run on all ranks do so. What becomes of each is known when it is done.
        """
        self._inbox.append(Withdrawal(operations))

    def settle(self, operation: Operation) -> bool:
        """Withdraw an operation that is speculative; return whether it has run after all, once that is known.

        Raises:
            what `wait` raises.
        """
        if not operation.done:
            self.withdraw([operation])
            with suppress(WithdrawnError):
                self.wait(operation)
        return not operation.withdrawn

    def new_name(self, kind: str) -> str:
        """Return a name that begins with a kind and is new; the same on ranks that ask for names in the same order."""
        self._named_kinds[kind] += 1
        return f"{kind} {self._named_kinds[kind]}"

    def join(self) -> Operation:
        """Say that this rank submits nothing more until all ranks have joined; done then.

        Returns:
            The operation to wait for; its result is the rank that joined last.

        Raises:
            what `submit` raises.
        """
        operation = Join("join", Looks("join"))
        with self._entrance, self._lock:
            self._require_open()
            self._join = operation
            self._under_way += 1
            self._inbox.append(operation)
            self._wake()
        return operation

    def poll(self, operation: Operation) -> bool:
        """Return whether an operation has come to an end; never blocks for another rank's sake but to carry one out."""
        self._take_note_of_wait()
        if not operation.done:
            with self._entrance:
                if self._driver.acquire(blocking=False):
                    try:
                        self._step()
                    finally:
                        self._driver.release()
                    self._let_waiters_drive()
        return operation.done

    def wait(self, operation: Operation) -> Any:
        """Return the result of an operation, once it has come to an end.

        Raises:
            MismatchError: the ranks submitted different operations under its name.
            CollectiveTimeoutError: a rank did not submit it within the time limit. Everything ends then.
            PeerLostError: a rank that it needs has shut down or died.
            ShutdownError: this rank has shut down.
        """
        prompt = bool(self._inbox)
        self._take_note_of_wait()
        if operation.done:
            return _outcome(operation)
        with self._entrance:
            with self._lock:
                self._waiters += 1
                self._prompt = self._prompt + 1 if prompt else 0
            return self._await(operation)

    def close(self) -> None:
        """Stop. What is under way ends in a `ShutdownError`; safe to call twice.

        Raises:
            ConfigError: the thread that calls this is in the engine already.
        """
        with self._entrance:
            with self._lock:
                if self._closed or self._disowned:
                    return
                self._closed = True
                self._changed.notify_all()
                self._ring()
            failed = True
            try:
                with self._driver:
                    failed = self._failure is not None
                    ended = self._end_all(ShutdownError("ringreduce was shut down while the operation was under way"))
                    if not failed:
                        refused = (each.looks.text for each in ended if isinstance(each, Refusal))
                        self._take_leave(GivenUp(next(refused, "")))  # the others may wait for that call
            finally:
                if self._thread is not None:
                    self._thread.join()
                if not failed:
                    self._messages.close()

    def disown(self, reason: str) -> None:
        """Refuse everything: this process was forked by the rank whose engine this is.

        There is no thread here that makes progress, and locks may be held by threads that are not here.

        Args:
            reason: what the `ConfigError` of later calls says, and of waits for what the rank has under way.
        """
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._driver = threading.Lock()
        self._entrance = Entrance()
        self._disowned, self._thread = reason, None
        while self._inbox:
            if isinstance(operation := self._inbox.popleft(), Operation):
                self._pending[operation.name].append(operation)
        for operation in self._take_all():
            operation.error, operation.done = ConfigError(reason), True

    # ---- who drives ----

    def _enter(self, operation: Operation, unique: bool) -> None:
        """Take in an operation; the lock is held."""
        self._require_open()
        if unique:
            if operation.name in self._names:
                error = ConfigError(
                    f"an operation with the name {operation.name!r} is under way on this rank; "
                    "synchronize it first, or choose another name"
                )
                kind = operation.looks.text.partition("(")[0]
                self._enter(Refusal(operation.name, kind, error, operation.stack), unique=False)
                self._wake()
                raise error
            self._names[operation.name] = operation
        self._under_way += 1
        if self._instruments.observers:
            self._instruments.tell("operation_submitted", operation.name)
        self._inbox.append(operation)

    def _await(self, operation: Operation) -> Any:
        """Wait for an operation as one of the waiters, of whom one drives."""
        try:
            while self._drives_for(operation):
                try:
                    self._drive(lambda: operation.done, hurried=True)
                finally:
                    self._driver.release()
        finally:
            with self._lock:
                self._waiters -= 1
                if self._waiters:
                    self._changed.notify_all()
                elif self._under_way:
                    self._wake()
        return _outcome(operation)

    def _take_note_of_wait(self) -> None:
        """Let the plan know that the program waits, also for what is done: timing must not make a difference."""
        try:
            if self._inbox[-1] is None:  # nothing was submitted since; a loop of polls must not fill the inbox
                return
        except IndexError:  # somebody has taken in everything
            pass
        self._inbox.append(None)

    def _drives_for(self, operation: Operation) -> bool:
        """Wait until this thread holds the driver's lock, or, if that is not to be, the operation is done."""
        # Tried with the lock held, for whoever stops driving tells the waiters so with it held.
        with self._lock:
            while not operation.done:
                if not self._closed and self._driver.acquire(blocking=False):
                    return True
                self._changed.wait(_IDLE_S)
        return False

    def _wake(self) -> None:
        """Let the progress thread know that there is something to do, if nobody drives; the lock is held.

        To wake it takes 15 us of this thread's time, as it wants the interpreter's lock at once. A program that has
        lately waited for what it submitted will do so again, and carry it out itself; if not, a thread that dozes sees
        it soon.
        """
        if self._waiters:
            return
        if self._asleep:
            if self._dozing and self._prompt >= _PROMPT:
                return
            self._asleep = False
            self._ring()
        elif self._thread is None:
            self._start()

    def _ring(self) -> None:
        if self._bell.locked():
            self._bell.release()

    def _start(self) -> None:
        if self._threads:
            self._thread = threading.Thread(target=self._run_thread, name="ringreduce", daemon=True)
            self._thread.start()

    def _run_thread(self) -> None:
        with self._entrance:  # for good: what it calls back must not wait for it
            self._make_progress()

    def _make_progress(self) -> None:
        doze_s = _DOZE_S[0]
        while not self._closed:
            with self._lock:
                self._asleep = self._may_sleep()
                self._dozing = self._clock() - self._news < _LINGER_S
            if self._asleep:
                until_s = doze_s if self._dozing else _IDLE_S if self._leader is not None else -1
                self._bell.acquire(timeout=until_s)
                self._asleep = False
            if self._waiters or (self._dozing and not self._under_way):
                doze_s = min(2 * doze_s, _DOZE_S[1])
                continue
            doze_s = _DOZE_S[0]
            if self._inbox:
                self._prompt = 0
            with self._driver:
                self._overlapping = True
                self._drive(lambda: bool(self._waiters) or not self._under_way, hurried=False)
                self._overlapping = False
            self._let_waiters_drive()

    def _let_waiters_drive(self) -> None:
        with self._lock:
            if self._waiters:
                self._changed.notify_all()

    def _may_sleep(self) -> bool:
        return not self._closed and (self._waiters > 0 or not self._under_way)

    # ---- driving; the driver's lock is held ----

    def _drive(self, finished: Callable[[], bool], *, hurried: bool) -> None:
        """Make progress until ``finished()``; hurried if somebody waits for it and has nothing else to do."""
        tries = 0
        while not self._closed and self._failure is None:
            moved = self._step()
            if finished():
                return
            tries += 1
            if moved:
                tries = 0
            elif hurried and tries < _TRIES:
                os.sched_yield()
            else:
                tries = 0
                quiet_s = self._clock() - self._news
                if quiet_s > _YIELD_S or not hurried:
                    # MPI has nothing to sleep on; to spin would take the core from ranks that share it.
                    time.sleep(_NAP_S if quiet_s < 1.0 else _LONG_NAP_S)

    def _step(self) -> bool:
        """Do what can be done now; return whether there was anything. If it fails, everything ends."""
        try:
            moved = self._progress()
            now = self._clock()
            if moved:
                self._news = now
            if now - self._checked >= _CHECK_S:
                self._checked = now
                self._look_around(now)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
            return True
        return moved

    def _progress(self) -> bool:
        """Take in what the program did and what other ranks say; return whether there was anything."""
        moved = False
        outgoing: list[list[Any]] = []
        for _ in range(len(self._inbox)):  # not until it is empty, for other threads go on filling it
            moved = True
            outgoing += self._take_in(self._inbox.popleft())
        if self._lost is not None:
            self._end_lost(self._lost)
        elif outgoing:
            self._send(_joined_up(outgoing) if len(outgoing) > 1 else outgoing)
        arrived = self._messages.poll()  # one at a time: whoever drives may have what it waits for then
        if arrived is not None:
            moved = True
            rank, data = arrived
            for note in marshal.loads(data):
                if self._leader is not None:
                    self._tell(self._leader.hear(rank, note, self._clock()))
                else:
                    self._obey(self._member.hear(note))
        return moved

    def _send(self, notes: list[list[Any]]) -> None:
        """Let the leader hear what this rank has to say."""
        if self._leader is None:
            self._messages.post(_encode(notes), self.LEADER)
            return
        for note in notes:
            self._tell(self._leader.hear(self.LEADER, note, self._clock()))

    def _tell(self, notes: list[list[Any]]) -> None:
        """Let all ranks hear what the leader has decided, then do it here."""
        if not notes:
            return
        if self._followers:
            data = _encode(notes)
            for rank in self._followers:
                self._messages.post(data, rank)
        for note in notes:
            self._obey(self._member.hear(note))

    def _take_in(self, operation: Operation | Withdrawal | None) -> list[list[Any]]:
        if operation is None:
            return self._member.wait()
        if isinstance(operation, Withdrawal):
            return [note for each in operation.operations if not each.done for note in self._member.withdraw(each.name)]
        if isinstance(operation, Join):
            return self._member.join()
        self._pending[operation.name].append(operation)
        if self._instruments.observers:
            self._instruments.tell("operation_announced", operation.name)
        return self._member.submit(operation.name, operation.looks)

    # ---- orders ----

    def _obey(self, order: Order | None) -> None:
        if order is None:
            return
        if isinstance(order, Run):
            operations = [self._next(named.name) for named in order.operations]
            own = [operation for operation in operations if operation is not None]
            try:
                self._carry_out(order, operations)
            except RefusedError as refused:
                self._end_with(own, refused.reason)
            except (ConfigError, MismatchError, UnsupportedBufferError) as error:
                self._end_with(own, error)  # on all ranks, or the communicator has let them know
            except BaseException as error:
                self._end_with(own, error)
                raise
            else:
                self._finish(own)
        elif isinstance(order, Refuse):
            self._end_refused(order)
        elif isinstance(order, Joined):
            self.joins += 1
            if self._join is not None:
                self._join.result = order.last
                self._finish([self._join])
        elif isinstance(order, Withdrawn):
            if order.rank == self._communicator.rank and (operation := self._next(order.name)) is not None:
                operation.withdrawn = True
                self._end_with([operation], WithdrawnError(f"{operation.title} was withdrawn"))
        elif isinstance(order, Late):
            self.tally.late = self._clock(), order.rank, order.seconds
        elif isinstance(order, Lost):
            self._lost = order
            self._end_lost(order)
        elif isinstance(order, Expired):
            raise self._expired(order)
        else:
            self._warn(order)

    def _end_refused(self, order: Refuse) -> None:
        """End an operation that differs between the ranks; end all if one of them may have left out an earlier one.

        A name says what belongs together, but not to what a call belongs that a rank could not make: that may be one
        that the others do not make. Then, and without a name, it is the order of the program, which is right if they
        all submitted theirs from the same lines.
        """
        title = "" if is_unnamed(order.name) else f"{order.name}: "
        texts = {rank: title + text for rank, text in order.values.items()}
        if title and not order.refused:
            self._end(order.name, MismatchError(texts))
            return
        queue = self._pending.get(order.name)  # it stays there, to be ended with all others if this fails
        mine = Called.at("", queue[0].stack).to_json() if queue else b""
        places = self._communicator.allgather(np.array([[len(mine)]], np.int64))[:-1, 0].cumsum()
        everyone = np.split(self._communicator.allgather(np.frombuffer(mine, np.uint8)), places)
        error = disagreement({rank: Called.from_json(everyone[rank].tobytes()) for rank in order.submitted}, texts)
        self._end(order.name, error)
        if not error.in_step:
            raise error

    def _expired(self, order: Expired) -> CollectiveTimeoutError:
        missing, present = name_ranks(list(order.missing)), name_ranks(list(order.present))
        waited = f"waited {order.seconds:.3g} s"
        mine = self._pending.get(order.name)
        title = mine[0].title if mine else repr(order.name)
        if self._communicator.rank not in order.present:
            what = "join or submit anything" if order.is_join else f"submit {title}"
            return CollectiveTimeoutError(f"{present} {waited} for this rank to {what}")
        if order.is_join:
            return CollectiveTimeoutError(f"{waited} since {missing} last submitted anything, and has not joined")
        hint = "; if it has no more data, it must call join()"
        return CollectiveTimeoutError(f"{waited} for {missing} to submit {title}{hint}")

    def _carry_out(self, order: Run, operations: list[Operation | None]) -> None:
        if self._instruments.observers:
            self._instruments.tell("operations_started", [operation.name for operation in operations if operation])
        started = time.perf_counter()
        try:
            self._executor.run(order, operations)
        finally:
            seconds = time.perf_counter() - started
            self.tally.batches += 1
            self.tally.seconds += seconds
            if self._overlapping:
                self.tally.overlapped_s += seconds

    def _warn(self, order: Stalled) -> None:
        if order.first != self._communicator.rank:
            return
        missing = name_ranks(list(order.missing))
        if order.is_join:
            _log.warning("stalled: join has waited for %.0f s since %s last submitted anything", order.seconds, missing)
        elif self._pending.get(order.name):
            operation = self._pending[order.name][0]
            _log.warning(
                "stalled: %s has waited for %.0f s; missing: %s. Submitted at %s",
                operation.title,
                order.seconds,
                missing,
                operation.site,
            )

    def _next(self, name: str) -> Operation | None:
        """Take the oldest operation of a name, None if this rank has submitted none: after it has joined."""
        queue = self._pending.get(name)
        if not queue:
            return None
        operation = queue.popleft()
        if not queue:
            del self._pending[name]
        return operation

    def _end(self, name: str, error: Exception) -> None:
        operation = self._next(name)
        if operation is not None:
            self._end_with([operation], error)

    def _end_with(self, operations: list[Operation], error: BaseException) -> None:
        for operation in operations:
            operation.error = error if isinstance(error, Exception) else TransportError(f"interrupted: {error!r}")
        self._finish(operations)

    def _finish(self, operations: list[Operation]) -> None:
        if self._instruments.observers:
            self._instruments.tell("operations_finished", [operation.name for operation in operations])
        self.tally.operations += len(operations)
        with self._lock:
            for operation in operations:
                operation.done = True
                if self._names.get(operation.name) is operation:
                    del self._names[operation.name]
                if operation is self._join:
                    self._join = None
            self._under_way -= len(operations)
            if self._waiters:
                self._changed.notify_all()

    def _end_lost(self, lost: Lost) -> None:
        hint = " (a rank that has no more data calls join(), and the others go on without it)" * (not lost.why.reason)
        for operation in self._take_all():
            self._end_with([operation], lost.why.error(lost.rank, f"this rank waits for {operation.title}{hint}"))

    def _end_all(self, error: BaseException) -> list[Operation]:
        """End everything that is under way and return it; nothing is taken in from here on."""
        with self._lock:
            self._failure = self._failure or error
        while self._inbox:
            self._take_in(self._inbox.popleft())
        operations = self._take_all()
        self._end_with(operations, error)
        return operations

    def _take_all(self) -> list[Operation]:
        """Take all operations that the program has submitted and that are not done."""
        operations = [operation for queue in self._pending.values() for operation in queue]
        self._pending.clear()
        return operations if self._join is None else [*operations, self._join]

    def _fail(self, error: BaseException) -> None:
        """End everything, here and on the other ranks: what the ranks have under way is no longer known."""
        if self._failure is None:
            self._end_all(error)
            self._communicator.give_up(error)
            with suppress(Exception):  # what fails may be the way to them; they will notice by their time limit
                self._take_leave(GivenUp.after(error))

    def _take_leave(self, why: GivenUp) -> None:
        """Let the others know that this rank takes part in nothing any more, those too that wait for its data."""
        try:
            self._send(self._member.leave(why))
        finally:
            self._communicator.close()

    # ---- the clock ----

    def _look_around(self, now: float) -> None:
        """Look for operations that do not come to an end."""
        if self._under_way and (lost := self._find_lost(self._waits_for())) is not None:
            raise lost
        if self._leader is not None:
            late, expired = self._stall.check(self._leader.waiting(), now)
            self._tell([self._leader.stalled(each, now) for each in late])
            self._tell([self._leader.expire(each, now) for each in expired[:1]])  # which ends everything
        elif now - self._news > self._communicator.config.timeout_s + _GRACE_S and self._awaits_word():
            raise PeerLostError(self.LEADER, f"it has said nothing for {now - self._news:.0f} s")

    def _waits_for(self) -> str:
        operations = [queue[0].title for queue in self._pending.values()]
        more = f" and {len(operations) - 1} more" * (len(operations) > 1)
        return f"this rank waits for {operations[0] if operations else 'a join'}{more}"

    def _awaits_word(self) -> bool:
        """Return whether the leader has to say something; of what is speculative, and nobody else submits, it says nothing."""
        return any(not queue[0].looks.speculative for queue in self._pending.values())

    def _require_open(self) -> None:
        if self._disowned:
            raise ConfigError(self._disowned)
        if self._closed:
            raise ShutdownError("ringreduce was shut down; call init() to start a new world")
        if self._failure is not None:
            raise TransportError(f"an earlier operation failed, so the ranks are out of step: {self._failure!r}")
        if self._join is not None:
            raise ConfigError("this rank has joined: it can submit nothing more until all ranks have")


class Entrance:
    """Notes the threads that are inside, and lets none of them in a second time, as it would wait for itself.

    Raises:
        ConfigError: from ``with``: this thread is inside.
    """

    __slots__ = ("_inside",)

    def __init__(self) -> None:
        self._inside: dict[int, FrameType] = {}  # by thread, what has entered

    def __enter__(self) -> None:
        thread, frame = threading.get_ident(), sys._getframe(1)
        if (entered := self._inside.get(thread)) is not None and _is_below(entered, frame):
            raise ConfigError(
                "this thread is in an operation of ringreduce already: a signal handler has interrupted it, or the "
                "operation has called back; a handler sets a flag that the program looks at between its steps"
            )
        self._inside[thread] = frame

    def __exit__(self, *_: object) -> None:
        self._inside.pop(threading.get_ident(), None)


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    """Return whether a frame has not ended: if it has entered without leaving, a signal handler's error ended it."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


def _encode(notes: list[list[Any]]) -> bytes:
    # Many times faster than JSON, for lists, numbers and strings; this version of the format is that of every Python.
    return marshal.dumps(notes, 2)


def _outcome(operation: Operation) -> Any:
    if operation.error is not None:
        raise operation.error
    return operation.result


def _joined_up(notes: list[list[Any]]) -> list[list[Any]]:
    """Make one note of several in a row that say the same of different operations."""
    joined: list[list[Any]] = []
    for note in notes:
        if note[0] == "known" and joined and joined[-1][0] == "known":
            joined[-1] = joined[-1] + note[1:]
        else:
            joined.append(note)
    return joined
