"""Calls that were looked up once: what makes the same small allreduce quick the second time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.buffers import Operand
from ringreduce.reduce_ops import ReduceOp

__all__ = ["BoundCall"]


class BoundCall:
    """An in-place call that was looked up once, for as long as its array lives.

    Attributes:
        array: a weak reference to it.
        op, algorithm: the arguments, as they were given.
        nbytes: of its array.
        still_there: returns whether an array, known to be that one, has the memory and layout that it had.
        run: repeats the call.
    """

    __slots__ = ("algorithm", "array", "nbytes", "op", "run", "still_there")

    def __init__(
        self,
        array: Any,
        target: Operand,
        op: ReduceOp | str,
        algorithm: str | None,
        run: Callable[[Any], object],
        forget: Callable[[object], object],
    ) -> None:
        self.array = weakref.ref(array, forget)
        self.op = op
        self.nbytes = target.nbytes
        self.algorithm = algorithm
        self.run = run
        self.still_there: Callable[[Any], bool]
        if isinstance(array, np.ndarray):  # it can be given another shape and dtype; a weak reference forbids `resize`
            shape, dtype = array.shape, array.dtype
            self.still_there = lambda same: same.shape == shape and same.dtype is dtype
        else:  # `set_`, `resize_`, ``data =`` and `t_` change a tensor
            address, shape, strides = target.address, target.shape, array.stride()
            self.still_there = lambda same: (
                same.data_ptr() == address and same.shape == shape and same.stride() == strides
            )
