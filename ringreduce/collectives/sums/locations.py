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
        mine = require_host(operand_of(np.asarray(array)), name).view
        where = np.asarray(communicator.rank if locations is None else locations)
        if where.dtype.kind not in "iu" or where.shape not in ((), mine.shape):
            raise UnsupportedBufferError(
                f"{name} takes a whole number as the location of each element: one for all, or an array of the shape "
                f"{mine.shape}; got {where.dtype} of the shape {where.shape}"
            )
    extreme = communicator.allreduce(mine, op)
    has_it = (mine == extreme) | ((mine != mine) & (extreme != extreme))  # The second are NaN.
    return extreme, communicator.allreduce(np.where(has_it, where, _BEHIND_ALL).astype(np.int64), MIN)
