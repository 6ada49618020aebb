"""The operations of a rank that have not ended, shared by the program's threads and the one that drives the engine."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from ringreduce.common.errors import ConfigError, TransportError
from ringreduce.common.instruments import EngineTally, Instruments
from ringreduce.common.lifetime import Lifetime
from ringreduce.engine.decisions import Note
from ringreduce.engine.operations import Join, Operation, Refusal, Withdrawal


class PendingOperations:
    """Adds, finds and ends the operations of a rank.

    Args:
        instruments: the observers, which are notified of each operation.
        lifetime: of the engine.

    Attributes:
        lifetime: the argument; closed, or failed, while the lock is held.
        inbox: what the program did, in order, until the thread that drives reads it. None: it waited; a list: a note
            for the coordinator.
        queues: the operations that were read, by name, in the order of submission; for the thread that drives.
        lock: guards what follows; held for moments.
        count: how many operations have not ended.
        waiters: how many threads wait for one.
        awaited: what the last of them has begun to wait for; None: nobody waits.
        crowded: whether several have waited at the same time, or may: then others may go on while one waits.
        join: the join that has not ended.
        tally: what was done so far.
        overlaps: whether the program does something else while a thread drives.
    """

    def __init__(self, instruments: Instruments, lifetime: Lifetime) -> None:
        self.lifetime = lifetime
        self.inbox: deque[Operation | Withdrawal | Note | None] = deque()
        self.queues: defaultdict[str, deque[Operation]] = defaultdict(deque)
        self.count = 0
        self.waiters = 0
        self.awaited: Operation | None = None
        self.crowded = False
        self._sleepers = 0  # those of them that do not drive
        self.join: Operation | None = None
        self.tally = EngineTally()
        self.overlaps = False
        self._instruments = instruments
        self._unique: dict[str, Operation] = {}  # by name, operations of which there must be one at a time
        self.renew_locks()

    def renew_locks(self) -> None:
        """Make new locks: in a forked process, threads that do not exist there may hold the old ones."""
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)  # to enter it takes four times as long as to enter the lock

    # ---- threads of the program ----

    def add(self, operation: Operation, *, unique: bool = False) -> ConfigError | None:
        """Count an operation and put it into the inbox; the caller holds the lock.

        Args:
            operation: a new one.
            unique: whether no other operation of its name may be pending. If one is, a refusal takes its place.

        Returns:
            The error that the caller then raises.

        Raises:
            ConfigError, ShutdownError, TransportError: as from `Engine.submit`.
        """
        if self.join is not None or not self.lifetime.open:
            self._raise_why_not()
        error = None
        if unique:
            if operation.name in self._unique:
                error = ConfigError(
                    f"an operation with the name {operation.name!r} is under way on this rank; "
                    "synchronize it first, or choose another name"
                )
                kind = operation.signature.text.partition("(")[0]
                operation = Refusal(operation.name, kind, error, stack=operation.stack)
            else:
                self._unique[operation.name] = operation
        self.count += 1
        operation.record[0] = perf_counter()
        self._instruments.operations.append(operation.record)
        if self._instruments.observers:
            self._instruments.notify("operation_submitted", operation.name)
            if (parts := operation.about.parts) is not None:
                self._instruments.notify("operation_described", operation.name, parts())
        self.inbox.append(operation)
        return error

    def add_join(self) -> Operation:
        """Count a join and put it into the inbox; the caller holds the lock. Raises as `add`."""
        if self.join is not None or not self.lifetime.open:
            self._raise_why_not()
        self.join = Join()
        self.count += 1
        self.inbox.append(self.join)
        return self.join

    def add_wait(self) -> None:
        """Record a wait, also for an operation that has ended: what is fused must not depend on timing."""
        try:
            if self.inbox[-1] is None:  # nothing was submitted since; a loop of polls must not fill the inbox
                return
        except IndexError:  # the thread that drives has read everything
            pass
        self.inbox.append(None)

    def sleep(self, seconds: float) -> None:
        """Wait until an operation has ended or nobody drives any more, at most so long; the caller holds the lock."""
        self._sleepers += 1
        try:
            self._changed.wait(seconds)
        finally:
            self._sleepers -= 1

    def wake_sleepers(self) -> None:
        """Let threads that wait look again; the caller holds the lock."""
        if self._sleepers:
            self._changed.notify_all()

    def _raise_why_not(self) -> None:
        self.lifetime.require_open("operation")
        raise ConfigError("this rank has joined: it can submit nothing more until all ranks have")

    # ---- the thread that drives ----

    def take(self, names: Iterable[str]) -> list[Operation]:
        """Take the oldest operation of each name; there is none if this rank, which has joined, has submitted none."""
        taken = []
        for name in names:
            queue = self.queues.get(name)
            if queue:
                taken.append(queue.popleft())
                if not queue:
                    del self.queues[name]
        return taken

    @property
    def sole_wait(self) -> Operation | None:
        """The operation without whose end the program does not go on; None: it does not wait, or may go on."""
        awaited = self.awaited
        goes_on = awaited is None or awaited.done or self.crowded or isinstance(awaited, Join)
        return None if goes_on else awaited

    def waits_for(self) -> str:
        """Return what this rank waits for, in words."""
        operations = [queue[0].title for queue in self.queues.values()]
        more = f" and {len(operations) - 1} more" * (len(operations) > 1)
        return f"this rank waits for {operations[0] if operations else 'a join'}{more}"

    def take_all(self) -> list[Operation]:
        """Take all operations that were read from the inbox and have not ended."""
        operations = [operation for queue in self.queues.values() for operation in queue]
        self.queues.clear()
        return operations if self.join is None else [*operations, self.join]

    @contextmanager
    def beside_program(self) -> Iterator[None]:
        """Return a context in which the program does something else."""
        self.overlaps = True
        yield
        self.overlaps = False

    def end(
        self, operations: Sequence[Operation], error: BaseException | None = None, *, refused: bool = False
    ) -> None:
        """End operations, with their results or an error, and wake the threads that wait; ``refused``: see them."""
        if error is not None and not isinstance(error, Exception):
            error = TransportError(f"interrupted: {error!r}")
        if self._instruments.observers:
            self._instruments.notify("operations_finished", [operation.name for operation in operations])
        self.tally.operations += len(operations)
        ended = perf_counter()
        with self.lock:
            for operation in operations:
                operation.end(error, ended, refused=refused)
                if self._unique.get(operation.name) is operation:
                    del self._unique[operation.name]
                if operation is self.join:
                    self.join = None
            self.count -= len(operations)
            if self._sleepers:
                self._changed.notify_all()

    def forked(self) -> None:
        """End everything in a `ConfigError`: this process was forked by the rank.

        Threads of the rank do not exist here, and may hold the locks.
        """
        self.renew_locks()
        submitted = [each for each in self.inbox if isinstance(each, Operation)]
        self.inbox.clear()
        for operation in [*self.take_all(), *submitted]:
            operation.end(ConfigError(self.lifetime.forked), perf_counter())
