"""What is submitted to an engine, and what comes of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringreduce.buffers import DType
from ringreduce.communicator import Communicator
from ringreduce.engine.negotiation import Looks
from ringreduce.reduce_ops import ReduceOp

__all__ = ["PROCEDURE", "Call", "Operation", "Procedure", "Reduction", "call_site"]

#: What stands in place of a reduce op in the looks of a `Procedure`.
PROCEDURE = "procedure"

_PACKAGE = str(Path(__file__).parents[1]) + os.sep


class Operation:
    """A named operation on its way, and its handle: done at some time, with a result or an error.

    Args:
        name: what matches it with the other ranks' operations.
        looks: what must agree.

    Attributes:
        done: whether it has come to an end; everything else is settled before this becomes true.
        result: what `Engine.wait` returns.
        error: what it raises instead.
        site: where the user's program submitted it, ``file:line``.
    """

    __slots__ = ("done", "error", "looks", "name", "result", "site")

    def __init__(self, name: str, looks: Looks) -> None:
        self.name = name
        self.looks = looks
        self.site = call_site()
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None


class Reduction(Operation):
    """An allreduce of one or more arrays.

    Args:
        name: as for `Operation`.
        text: all that must agree, in words.
        op: how to reduce.
        sources: what this rank contributes.
        targets: where the results go; each of the shape and dtype of its source, and possibly the source itself.
        before: called just before the data is read: to scale it.
        after: called when the results are there; returns the result of the operation.
    """

    __slots__ = ("after", "before", "op", "sources", "targets")

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
        counts: dict[str, int] = {}
        for source in sources:
            dtype = DType.of(source.dtype).name
            counts[dtype] = counts.get(dtype, 0) + _count(source)
        super().__init__(name, Looks(text, op.value, tuple(counts.items())))
        self.op = op
        self.sources = sources
        self.targets = targets
        self.before = before
        self.after = after


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


class Procedure(Operation):
    """A function that all ranks have registered with `Engine.register`, those too that will have joined.

    Args:
        name: what `Engine.register` returned.
        text: all that must agree, in words.
    """

    __slots__ = ()

    def __init__(self, name: str, text: str) -> None:
        super().__init__(name, Looks(text, PROCEDURE))


def call_site() -> str:
    """Return where the code outside this package is that led here, as ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _count(array: Any) -> int:
    count = 1
    for length in array.shape:
        count *= int(length)
    return count
