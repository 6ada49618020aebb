"""The paths for arrays in host memory: which takes a call, and those of one process set."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand, divide_toward_zero, narrow, widen
from ringreduce.collectives.context import Context, Signature
from ringreduce.collectives.messages import Hierarchy, Library, Messages
from ringreduce.collectives.one_shot import Mailbox
from ringreduce.collectives.path import Again, Call, Choice, Itself, Path, Reduction, Task
from ringreduce.collectives.shared import SharedMemory
from ringreduce.common.cleanup import close_all
from ringreduce.common.reduce_ops import ReduceOp

__all__ = ["PATHS", "Paths", "path_for"]

Array = npt.NDArray[Any]

#: In the order in which they are asked.
PATHS: tuple[type[Path], ...] = (Itself, Library, Mailbox, SharedMemory, Hierarchy, Messages)


def path_for(algorithm: str, call: Call) -> type[Path]:
    """Return the path that carries out an algorithm in such a call; the same on all ranks.

    Raises:
        ConfigError: the collective has no such algorithm.
    """
    return next(path for path in PATHS if path.takes(algorithm, call))


class Paths:
    """The paths of one process set."""

    def __init__(self, context: Context) -> None:
        self._paths: dict[object, Path] = {path: path(context) for path in PATHS}

    def bind(self, call: Call, choice: Choice, signature: Signature) -> Callable[..., Again]:
        """Return what carries out calls other than allreduces: a method of the path, without its first arguments.

        Args:
            call: what was chosen for.
            choice: how.
            signature: what the user called.
        """
        path, reduced, task = self._task(call, choice, signature)
        run = partial(getattr(path, call.collective.value), task)
        if reduced is call:
            return run
        wide = _reduce_wide if call.collective is Collective.REDUCE else _reduce_scatter_wide
        return partial(wide, run, call, reduced)

    def reduction(self, call: Call, choice: Choice, shape: tuple[int, ...], signature: Signature) -> Reduction:
        """Return what carries out allreduces of arrays of a shape; arguments as for `bind`."""
        path, reduced, task = self._task(call, choice, signature)
        reduction = path.allreduce(task, shape)
        return reduction if reduced is call else _Wide(reduction, call, reduced)

    def _task(self, call: Call, choice: Choice, signature: Signature) -> tuple[Path, Call, Task]:
        path = self._paths[choice.path]
        reduced = path.as_reduced(call)
        return path, reduced, Task(choice.algorithm, reduced.dtype, reduced.op or ReduceOp.SUM, signature)

    def close(self) -> None:
        close_all(*(path.close for path in self._paths.values()))


class _Wide(Reduction):
    """An allreduce in a wider type: exact averages of integers, one rounding of 16-bit floats."""

    def __init__(self, reduction: Reduction, call: Call, reduced: Call) -> None:
        self._reduction = reduction
        self._call = call
        self._reduced = reduced

    def run(self, source: Operand, target: Operand) -> None:
        wide = widen(source.view, source.dtype)
        operand = Operand(wide, self._reduced.dtype)
        self._reduction.run(operand, operand)
        _narrow(wide, self._call, target.view)


def _reduce_scatter_wide(
    run: Callable[..., object], call: Call, reduced: Call, source: Array, counts: Sequence[int], target: Array
) -> Again:
    result = np.empty(target.size, reduced.dtype.storage)
    run(widen(source, call.dtype), counts, result)
    _narrow(result, call, target)
    return None


def _reduce_wide(
    run: Callable[..., object], call: Call, reduced: Call, source: Array, target: Array | None, root: int
) -> Again:
    wide = widen(source, call.dtype)
    run(wide, None if target is None else wide, root)
    if target is not None:
        _narrow(wide, call, target)
    return None


def _narrow(wide: Array, call: Call, target: Array) -> None:
    """Store results of the wider type in the narrow one; averages of integers come as sums, and are divided here."""
    if call.averages_integers:
        divide_toward_zero(wide, call.topology.size)
    narrow(wide, call.dtype, target)
