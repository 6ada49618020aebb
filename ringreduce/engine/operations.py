"""What is submitted to an engine, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ringreduce.buffers import DType, Operand, operand_of
from ringreduce.calls import Stack, place_of, program_stack, refusal
from ringreduce.communicator import Communicator
from ringreduce.engine.orders import GATHER, REFUSED, Looks
from ringreduce.errors import RingReduceError
from ringreduce.reduce_ops import ReduceOp

__all__ = [
    "Call",
    "Gather",
    "InPlace",
    "Join",
    "Operation",
    "Reduction",
    "Refusal",
    "Withdrawal",
    "WithdrawnError",
    "is_unnamed",
    "unnamed",
]

_UNNAMED = " without a name"


class Operation:
    """A named operation on its way, and its handle: done at some time, with a result or an error.

    Args:
        name: what matches it with the other ranks' operations.
        looks: what must agree.
        stack: where the program made it; None: it makes it now.

    Attributes:
        done: whether it has come to an end; everything else is settled before this becomes true.
        result: what `Engine.wait` returns.
        error: what it raises instead.
        withdrawn: whether it has ended because this rank has withdrawn it.
    """

    __slots__ = ("_title", "done", "error", "looks", "name", "result", "stack", "withdrawn")

    def __init__(self, name: str, looks: Looks, stack: Stack | None = None) -> None:
        self.name = name
        self.looks = looks
        self.stack = program_stack() if stack is None else stack
        self.done = self.withdrawn = False
        self.result: Any = None
        self.error: BaseException | None = None

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
        super().__init__(name, Looks(text, op.value, _counted(self.given)))
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


class Call(Operation):
    """Any other collective: a function that makes blocking calls, the same on all ranks.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        run: makes the calls on the engine's communicator and returns the result.
    """

    __slots__ = ("run",)

    def __init__(self, name: str, text: str, run: Callable[[Communicator], Any]) -> None:
        super().__init__(name, Looks(text))
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
        super().__init__(name, Looks(refusal(kind, error), REFUSED), stack)


class Join(Operation):
    """The end of a rank's data, done when all ranks have come to theirs; see `Engine.join`."""

    __slots__ = ()


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

    __slots__ = ("active", "arrays", "feedbacks", "op", "wire", "within")

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
        super().__init__(name, Looks(text, op.value, parts, wire or "as they are", speculative))
        self.op, self.arrays, self.wire, self.feedbacks, self.within = op, arrays, wire, feedbacks, within
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
        super().__init__(name, Looks(text, GATHER, parts))
        self.arrays, self.within = arrays, within


class WithdrawnError(RingReduceError):
    """What ends an operation that this rank has withdrawn; no program sees it."""


class Withdrawal:
    """Word that operations which are speculative are not to run any more."""

    __slots__ = ("operations",)

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = operations


def _elements(array: Any) -> tuple[DType, int]:
    """Return the dtype and the number of elements of an array, wherever it is."""
    operand = operand_of(array)
    return operand.dtype, operand.count


def unnamed(kind: str) -> str:
    """Return the name that all operations of a kind share that the program gave none; their order matches them."""
    return kind + _UNNAMED


def is_unnamed(name: str) -> bool:
    """Return whether a name is one that `unnamed` gives."""
    return name.endswith(_UNNAMED)
