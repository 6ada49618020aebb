"""The engine: named operations from any thread, in any order, run in one order on all ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import CollectiveError, ConfigError, RingReduceError
from ringreduce.engine.driver import Driver
from ringreduce.engine.exchange import Exchange
from ringreduce.engine.operations import Operation, Refusal, Withdrawal, WithdrawnError
from ringreduce.engine.pacemaker import Pacemaker
from ringreduce.engine.pending import PendingOperations
from ringreduce.engine.progress import Progress
from ringreduce.transport.control import ControlChannel


class Engine:
    """Asynchronous operations on one process set. Thread-safe.

    Args:
        communicator: carries the operations out; used by nobody else. Closed with the engine.
        channel: carries what the ranks say to each other about them; used by nobody else. Closed with the engine.
        find_failed: returns the error about a rank that has failed, given what this one does; None if none has.
        threads: whether a progress thread may run operations. If not, they run only while the program waits for one.
        clock: in seconds; it does not go back.

    Attributes:
        communicator: the argument.
        tally: what the engine has done so far.
        threaded: whether operations go on while nobody waits for them.
        pacemaker: measures the steps of training.
        attached: what training and bindings know of these ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        channel: ControlChannel,
        *,
        find_failed: Callable[[str], CollectiveError | None] = lambda doing: None,
        threads: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.communicator = communicator
        self.threaded = threads
        self._guard = ReentrancyGuard()
        self._pending = PendingOperations(communicator.instruments, communicator.lifetime.child())
        self.tally = self._pending.tally
        exchange = Exchange(channel, communicator.rank, communicator.size, config=communicator.config, clock=clock)
        self._progress = Progress(communicator, exchange, self._pending, find_failed=find_failed, clock=clock)
        self._driver = Driver(
            self._progress,
            self._pending,
            self._guard,
            followers=bool(exchange.followers),
            threads=threads,
            clock=clock,
        )
        self._pending.lifetime.listen_while_held("forked", self._forked)
        communicator.wait_patiently(self._driver.is_patient)
        self._names: Counter[str] = Counter()  # by kind
        self.attached = Attached()
        cores = sorted(os.sched_getaffinity(0))
        waited_s = partial(getattr, self._driver, "ended_waits_s")
        self.pacemaker = Pacemaker(communicator.size, waited_s, self._pending.inbox.append, cores=cores)

    @property
    def joins(self) -> int:
        """How often all ranks have joined; the same on all ranks once a join has returned."""
        return self._progress.outcomes.joins

    @property
    def mismatches(self) -> int:
        """How often the ranks have disagreed; the same on all ranks once the error of an operation was raised."""
        return self._progress.outcomes.mismatches

    @property
    def waited_s(self) -> float:
        """How long the program has waited for operations, in a wait that goes on, too."""
        return self._driver.waited_s

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
        with self._guard:
            with self._pending.lock:
                error = self._pending.add(operation, unique=unique)
                self._driver.submitted()
            if error is not None:
                raise error

    def refuse(self, refusal: Refusal) -> None:
        """Notify the other ranks of a call that this one cannot make; returns at once.

        It is submitted like the call, so that the next call of this name belongs to the others' next one. Where nothing
        can be submitted any more it does nothing.
        """
        with suppress(RingReduceError):
            self.submit(refusal, unique=False)

    def run(self, operation: Operation, *, unique: bool = True) -> Any:
        """Start an operation and return its result, on this thread unless another one drives.

        Raises:
            what `submit` and `wait` raise.
        """
        with self._guard:
            pending = self._pending
            with pending.lock:
                error = pending.add(operation, unique=unique)
                if error is not None:
                    self._driver.wake()
                    raise error
                pending.waiters += 1
            pending.inbox.append(None)  # it waits
            self._driver.wait(operation)
        if operation.error is not None:
            raise operation.error
        return operation.result

    def withdraw(self, operations: Sequence[Operation]) -> None:
        """Withdraw speculative operations; returns at once, and takes no lock, for finalizers.

        Those that all ranks have submitted when the coordinator gets the note still run. Once an operation is
        done, `Operation.withdrawn` says whether it was withdrawn.
        """
        self._pending.inbox.append(Withdrawal(operations))

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

    def expect_any_order(self) -> None:
        """Say that several threads of this rank wait for operations, in orders that may differ between ranks. Local.

        What they wait for then ends only by the time limit, if the ranks wait for different operations for good.
        """
        self._pending.crowded = True

    def new_name(self, kind: str) -> str:
        """Return a name that begins with a kind and is new; the same on ranks that ask for names in the same order."""
        self._names[kind] += 1
        return f"{kind} {self._names[kind]}"

    def join(self) -> Operation:
        """Say that this rank submits nothing more until all ranks have joined; done then.

        Returns:
            The operation to wait for; its result is the rank that joined last.

        Raises:
            what `submit` raises.
        """
        with self._guard, self._pending.lock:
            join = self._pending.add_join()
            self._driver.submitted()
        return join

    def poll(self, operation: Operation) -> bool:
        """Return whether an operation is done. It may take a step of progress, and waits for other ranks only there."""
        self._pending.add_wait()
        if not operation.done:
            with self._guard:
                self._driver.try_step()
        return operation.done

    def wait(self, operation: Operation) -> Any:
        """Return the result of an operation, once it is done.

        Raises:
            MismatchError: the ranks submitted different operations under its name.
            CollectiveTimeoutError: a rank did not submit it within the time limit. Everything ends then.
            PeerLostError: a rank that it needs has shut down or died.
            ShutdownError: this rank has shut down.
        """
        pending = self._pending
        driver = self._driver
        pending.add_wait()
        driver.observe_wait()
        if not operation.done:
            with self._guard:
                with pending.lock:
                    pending.waiters += 1
                driver.wait(operation)
        if operation.error is not None:
            raise operation.error
        return operation.result

    def fail(self, error: BaseException) -> None:
        """End everything that is under way with an error, on the other ranks too; nothing is submitted from here on."""
        with self._guard:
            self._driver.fail(error)

    def close(self) -> None:
        """Stop. What is under way ends in a `ShutdownError`; safe to call twice.

        Raises:
            ConfigError: the thread that calls this is in the engine already.
        """
        self.attached.clear()
        with self._guard:
            self._driver.close()

    def _forked(self) -> None:
        # There is no thread here that makes progress, and locks may be held by threads that are not here.
        self._guard = ReentrancyGuard()
        self._pending.forked()


class Attached(dict[type, Any]):
    """One object of each class that was asked for, made then."""

    def __missing__(self, kind: type) -> Any:
        made = self[kind] = kind()
        return made


class ReentrancyGuard:
    """Lets no thread in a second time while it is inside: it would wait for itself.

    Raises:
        ConfigError: from ``with``: this thread is inside.
    """

    __slots__ = ("_inside",)

    def __init__(self) -> None:
        self._inside: dict[int, FrameType] = {}  # by thread, what has entered

    def __enter__(self) -> None:
        thread = threading.get_ident()
        frame = sys._getframe(1)
        if (entered := self._inside.get(thread)) is not None and _is_below(entered, frame):
            raise ConfigError(
                "this thread is in an operation of ringreduce already: a signal handler has interrupted it, or the "
                "operation has called back; a handler sets a flag that the program looks at between its steps"
            )
        self._inside[thread] = frame

    def __exit__(self, *_: object) -> None:
        self._inside.pop(threading.get_ident(), None)


def _is_below(frame: FrameType, top: FrameType | None) -> bool:
    """Return whether a frame still runs. One that has begun and not ended was ended by a signal handler's error."""
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False
