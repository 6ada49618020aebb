"""What is submitted to an engine, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringreduce.buffers import Operand
from ringreduce.calls import Stack, place_of, program_stack, refusal
from ringreduce.communicator import Communicator
from ringreduce.engine.orders import OFFER, REFUSED, Looks
from ringreduce.reduce_ops import ReduceOp

__all__ = [
    "PROCEDURE",
    "Call",
    "Join",
    "Operation",
    "Procedure",
    "Reduction",
    "Refusal",
    "Retirement",
    "is_unnamed",
    "parted",
    "unnamed",
]

#: What stands in place of a reduce op in the looks of a `Procedure`.
PROCEDURE = "procedure"

_PART = ", part "
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
    """

    __slots__ = ("_title", "done", "error", "looks", "name", "result", "stack")

    def __init__(self, name: str, looks: Looks, stack: Stack | None = None) -> None:
        self.name = name
        self.looks = looks
        self.stack = program_stack() if stack is None else stack
        self.done = False
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


class Procedure(Operation):
    """A function that all ranks have registered with `Engine.register`, those too that will have joined.

    Args:
        name: what `Engine.register` returned.
        text: all that must agree, in words.
        part: which part of what was registered; parts are matched and run one by one. They are offers: nobody waits for
            a rank that does not submit one, and what was not taken up can be withdrawn.
    """

    __slots__ = ()

    def __init__(self, name: str, text: str, part: str = "") -> None:
        super().__init__(f"{name}{_PART}{part}" if part else name, Looks(text, OFFER if part else PROCEDURE))


class Retirement:
    """Word that a procedure is not needed any more, once its parts that are under way have come to an end.

    Args:
        name: what `Engine.register` returned.
        parts: the parts, which are withdrawn.
    """

    __slots__ = ("name", "parts")

    def __init__(self, name: str, parts: Sequence[Operation]) -> None:
        self.name = name
        self.parts = parts


def parted(name: str) -> tuple[str, str]:
    """Return under which name a `Procedure` was registered, and its part."""
    registered, _, part = name.partition(_PART)
    return registered, part


def unnamed(kind: str) -> str:
    """Return the name that all operations of a kind share that the program gave none; their order matches them."""
    return kind + _UNNAMED


def is_unnamed(name: str) -> bool:
    """Return whether a name is one that `unnamed` gives."""
    return name.endswith(_UNNAMED)
