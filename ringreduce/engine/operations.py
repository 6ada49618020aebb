"""Operations: a program submits them to an engine, and they get a result or an error."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, NamedTuple

from ringreduce.buffers import DType, Operand, operand_of
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import Stack, place_of, program_stack, refusal
from ringreduce.common.errors import ConfigError, RingReduceError, ShutdownError, since
from ringreduce.common.instruments import Instruments
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.engine.orders import Kind, OperationSignature

__all__ = [
    "BlockingCall",
    "Gather",
    "InPlace",
    "Join",
    "Operation",
    "Reduction",
    "Refusal",
    "UnderWay",
    "Withdrawal",
    "WithdrawnError",
    "is_unnamed",
    "unnamed",
]

_UNNAMED = " without a name"


class Operation:
    """A named operation; once it is done it has a result or an error.

    Args:
        name: what matches it with the other ranks' operations.
        signature: what must agree.
        stack: where the program made it; None: it makes it now.

    Attributes:
        done: whether it has ended; the result or the error is set before this becomes true.
        result: what `Engine.wait` returns.
        error: what it raises instead.
        withdrawn: whether it has ended because this rank has withdrawn it.
        record: of `Instruments.operations`.
        parts: returns the names of what it is over, for observers; None: its own name says all.
    """

    __slots__ = ("_title", "done", "error", "name", "parts", "record", "result", "signature", "stack", "withdrawn")

    def __init__(self, name: str, signature: OperationSignature, stack: Stack | None = None) -> None:
        self.name = name
        self.signature = signature
        self.stack = program_stack() if stack is None else stack
        self.done = self.withdrawn = False
        self.parts: Callable[[], Sequence[str]] | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.record = [0.0, 0.0, 0.0, name, signature.text, self.stack, None]

    @property
    def site(self) -> str:
        """Where the user's program submitted it, ``file:line``."""
        return place_of(self.stack)

    @property
    def title(self) -> str:
        """What errors call it: by its name, unless this is set."""
        return getattr(self, "_title", None) or repr(self.name)

    @title.setter
    def title(self, title: str) -> None:
        self._title = title


class Reduction(Operation):
    """An allreduce of one or more arrays.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        op: how to reduce.
        sources: what this rank contributes.
        targets: where the results go, as many as there are sources and each of the shape and dtype of its own; possibly
            ``sources`` itself.
        before: called just before the data is read: to scale it.
        after: called when the results are there; returns the result of the operation.

    Attributes:
        given: the sources' memory.
        taken: the targets'.

    Raises:
        UnsupportedBufferError: an array cannot be used.
    """

    __slots__ = ("after", "before", "given", "op", "sources", "taken", "targets")

    def __init__(
        self,
        name: str,
        text: str,
        op: ReduceOp,
        sources: Sequence[Any],
        targets: Sequence[Any],
        *,
        before: Callable[[], object] | None = None,
        after: Callable[[], Any] | None = None,
    ) -> None:
        self.given = [Operand.of(source) for source in sources]
        self.taken = self.given if targets is sources else [Operand.of(target) for target in targets]
        for taken in self.taken:
            taken.require_writable()
        super().__init__(name, OperationSignature(text, Kind.REDUCTION, op.value, _counted(self.given)))
        self.op = op
        self.sources = sources
        self.targets = targets
        self.before = before
        self.after = after


def _counted(operands: Sequence[Operand]) -> tuple[tuple[str, int], ...]:
    """Return how many elements of each dtype there are."""
    if len(operands) == 1:  # the usual case, a microsecond faster
        (only,) = operands
        return ((only.dtype.name, only.view.size),)
    counts: dict[str, int] = {}
    for operand in operands:
        counts[operand.dtype.name] = counts.get(operand.dtype.name, 0) + operand.view.size
    return tuple(counts.items())


class BlockingCall(Operation):
    """Any other collective: a function that makes blocking calls, the same on all ranks.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        run: makes the calls on the engine's communicator and returns the result.
    """

    __slots__ = ("run",)

    def __init__(self, name: str, text: str, run: Callable[[Communicator], Any]) -> None:
        super().__init__(name, OperationSignature(text))
        self.run = run


class Refusal(Operation):
    """A call that this rank cannot make: it ends the call on the other ranks as well, with the reason.

    Args:
        name: as for `Operation`: that of the call.
        kind: of the call.
        error: why.
        stack: where the program made it; None: it makes it now.
    """

    __slots__ = ()

    def __init__(self, name: str, kind: str, error: BaseException, stack: Stack | None = None) -> None:
        super().__init__(name, OperationSignature(refusal(kind, error), Kind.REFUSAL), stack)


class Join(Operation):
    """The end of this rank's data; done when all ranks have joined. See `Engine.join`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__("join", OperationSignature("join"))


class InPlace(Operation):
    """An allreduce of one or more arrays, each of them where it is: they travel neither together nor with others.

    Ranks that have joined take part with neutral elements.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        op: how to reduce; averages are over the ranks that have not joined, or as `Conventions` say.
        arrays: contiguous, in host memory or all on this rank's GPU; of equal dtypes and lengths on all ranks.
        wire: the format in which they travel; None: as they are.
        feedbacks: what rounding to that format keeps, for each array.
        speculative: whether other ranks may leave it out; see `Engine.withdraw`.
        within: returns a context to carry it out in, on whichever thread; None: in none.

    Attributes:
        active: how many ranks contributed, once it is done.
    """

    __slots__ = ("active", "arrays", "feedbacks", "within")

    def __init__(
        self,
        name: str,
        text: str,
        op: ReduceOp,
        arrays: Sequence[Any],
        *,
        wire: str | None = None,
        feedbacks: Sequence[Any] = (),
        speculative: bool = False,
        within: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        parts = tuple((dtype.name, count) for dtype, count in map(_elements, arrays))
        super().__init__(
            name,
            OperationSignature(text, Kind.IN_PLACE, op.value, parts, wire or "", bool(feedbacks), speculative),
        )
        self.arrays, self.feedbacks, self.within = arrays, feedbacks, within
        self.active = 0


class Gather(Operation):
    """An allgather of rows, to which ranks that have joined contribute none; its result is a list of arrays.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        arrays: two-dimensional; the ranks may have different numbers of rows.
        within: as for `InPlace`.
    """

    __slots__ = ("arrays", "within")

    def __init__(
        self,
        name: str,
        text: str,
        arrays: Sequence[Any],
        within: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> None:
        parts = tuple((_elements(array)[0].name, array.shape[1]) for array in arrays)
        super().__init__(name, OperationSignature(text, Kind.GATHER, counts=parts))
        self.arrays, self.within = arrays, within


class WithdrawnError(RingReduceError):
    """What ends an operation that this rank has withdrawn; no program sees it."""


class Withdrawal(NamedTuple):
    """Asks the engine to withdraw speculative operations of this rank."""

    operations: Sequence[Operation]


class UnderWay:
    """The operations of a rank that are not done, and who waits for them: shared by all threads of an engine.

    Args:
        instruments: who is told.

    Attributes:
        inbox: what the program did, in order, as far as whoever drives has not read it; None: it waited.
        lock: guards what follows; held for moments. Entering ``changed``, which wraps it, takes four times as long.
        changed: notified when an operation is done, or nobody drives any more.
        count: how many operations are not done.
        waiters: how many threads wait for one.
        join: the join that is not done.
        closed: whether the engine was closed.
        barred: why this process may not use the engine; empty: it may.
        failure: what has ended everything.
    """

    def __init__(self, instruments: Instruments) -> None:
        self.inbox: deque[Operation | Withdrawal | None] = deque()
        self.count = 0
        self.waiters = 0
        self.join: Operation | None = None
        self.closed = False
        self.barred = ""
        self.failure: BaseException | None = None
        self._instruments = instruments
        self._names: dict[str, Operation] = {}  # of operations that must be the only ones
        self.renew_locks()

    def renew_locks(self) -> None:
        """Make new locks, in a forked process, where threads that are not there may hold these."""
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)

    def add(self, operation: Operation, *, unique: bool = False) -> ConfigError | None:
        """Count an operation and put it into the inbox; the lock is held.

        Args:
            operation: not done.
            unique: whether its name must not be under way already. If it is, a refusal takes the operation's place.

        Returns:
            What the caller then raises.

        Raises:
            ConfigError, ShutdownError, TransportError: as from `Engine.submit`.
        """
        self._require_open()
        error = None
        if unique:
            if operation.name in self._names:
                error = ConfigError(
                    f"an operation with the name {operation.name!r} is under way on this rank; "
                    "synchronize it first, or choose another name"
                )
                kind = operation.signature.text.partition("(")[0]
                operation = Refusal(operation.name, kind, error, operation.stack)
            else:
                self._names[operation.name] = operation
        self.count += 1
        operation.record[0] = perf_counter()
        self._instruments.operations.append(operation.record)
        if self._instruments.observers:
            self._instruments.tell("operation_submitted", operation.name)
            if operation.parts is not None:
                self._instruments.tell("operation_described", operation.name, operation.parts())
        self.inbox.append(operation)
        return error

    def add_join(self) -> Operation:
        """Count a join and put it into the inbox; the lock is held. Raises as `add`."""
        self._require_open()
        self.join = Join()
        self.count += 1
        self.inbox.append(self.join)
        return self.join

    def add_wait(self) -> None:
        """Record every wait, even for finished operations: the plan must not depend on timing."""
        try:
            if self.inbox[-1] is None:  # nothing was submitted since; a loop of polls must not fill the inbox
                return
        except IndexError:  # somebody has read everything
            pass
        self.inbox.append(None)

    def end(self, operations: Sequence[Operation]) -> None:
        """Make operations done, and wake the threads that wait."""
        ended = perf_counter()
        with self.lock:
            for operation in operations:
                operation.record[2] = ended
                if operation.error is not None:
                    operation.record[6] = repr(operation.error)
                operation.done = True
                if self._names.get(operation.name) is operation:
                    del self._names[operation.name]
                if operation is self.join:
                    self.join = None
            self.count -= len(operations)
            if self.waiters:
                self.changed.notify_all()

    def wake_waiters(self) -> None:
        """Let threads that wait see whether they can drive."""
        with self.lock:
            if self.waiters:
                self.changed.notify_all()

    def _require_open(self) -> None:
        if self.barred:
            raise ConfigError(self.barred)
        if self.closed:
            raise ShutdownError("ringreduce was shut down; call init() to start a new world")
        if self.failure is not None:
            raise since(self.failure, "operation")
        if self.join is not None:
            raise ConfigError("this rank has joined: it can submit nothing more until all ranks have")


def _elements(array: Any) -> tuple[DType, int]:
    """Return the dtype and the number of elements of an array, wherever it is."""
    operand = operand_of(array)
    return operand.dtype, operand.count


def unnamed(kind: str) -> str:
    """Return the name that all operations of a kind share to which the program gave none; they match in order."""
    return kind + _UNNAMED


def is_unnamed(name: str) -> bool:
    """Return whether a name is one that `unnamed` gives."""
    return name.endswith(_UNNAMED)
