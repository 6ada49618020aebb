"""Where the largest or smallest elements are: what MPI calls MAXLOC and MINLOC."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.buffers import operand_of, require_host
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.reduce_ops import MIN, ReduceOp

_BEHIND_ALL = np.iinfo(np.int64).max


def located(communicator: Communicator, array: Any, locations: Any, op: ReduceOp, name: str) -> tuple[Any, Any]:
    """Return extreme elements and where they are; see `ringreduce.maxloc`."""
    with CheckingArguments(communicator, name):
        try:
            mine = require_host(operand_of(np.asarray(array)), name).view
        except ValueError as error:  # Of rows of unequal lengths.
            raise UnsupportedBufferError(f"{name} takes an array of numbers: {error}") from error
        if mine.dtype.kind == "c":
            raise UnsupportedBufferError(f"{name} takes real numbers, got {mine.dtype}")
        given = np.asarray(locations)
        where = given.astype(np.int64) if given.dtype.kind in "iu" else given
        if where.dtype != np.int64 or where.shape not in ((), mine.shape) or np.any(where != given):
            raise UnsupportedBufferError(
                f"{name} takes a whole number below 2^63 as the location of each element: one for all, or an array of "
                f"the shape {mine.shape}; got {given.dtype} of the shape {given.shape}"
            )
    extreme = communicator.allreduce(mine, op)
    has_it = (mine == extreme) | ((mine != mine) & (extreme != extreme))  # The second are NaN.
    return extreme, communicator.allreduce(np.where(has_it, where, _BEHIND_ALL), MIN)
