"""Reductions over the ranks up to each rank.

In round k each rank sends what it has to the rank 2^k after it, so that after ceil(log2 P) rounds each has the terms of
all before it (W. D. Hillis, G. L. Steele, "Data parallel algorithms", Communications of the ACM 29, 1986). A rank sends
as many bytes in a round as the array has. The order in which floats are added depends on the rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.buffers import as_given, kernels_for, like, operand_of, require_host, require_op
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import CheckingArguments
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import AVERAGE, ReduceOp
from ringreduce.transport.array_notes import LAST_TAG


def prefix(communicator: Communicator, array: Any, op: ReduceOp | str, out: Any, *, inclusive: bool) -> Any:
    """Reduce arrays over the ranks up to this one; see `ringreduce.scan` and `ringreduce.exscan`."""
    name = "scan" if inclusive else "exscan"
    with CheckingArguments(communicator, name):
        op = ReduceOp.parse(op)
        require_no_average(op, name)
        source = require_host(operand_of(array), name)
        require_op(op, source.dtype)
        result = like(array) if out is None else out
        target = require_host(operand_of(result), name)
        target.require_writable()
        if target.describe() != source.describe():
            raise UnsupportedBufferError(f"{name} of {source.describe()} into {target.describe()}")
    communicator.rendezvous(f"{name}({op.value}, {source.describe()})")
    # What this rank and those before it come to so far; what comes from a rank before; what those before come to.
    total, coming, before = (np.empty(source.count, source.dtype.storage) for _ in range(3))
    np.copyto(total.reshape(source.shape), source.view)
    add = kernels_for(source.dtype, op, 2)
    rank = communicator.rank
    has_any = False
    distance = 1
    while distance < communicator.size:
        _shift(communicator, total, coming, distance)
        if rank >= distance:
            if has_any:
                add.combine([coming, before])(before)
            else:
                np.copyto(before, coming)
                has_any = True
            add.combine([coming, total])(total)
        distance *= 2
    if inclusive or has_any:
        np.copyto(target.view, (total if inclusive else before).reshape(source.shape))
    return as_given(array, result) if out is None else out


def require_no_average(op: ReduceOp, name: str) -> None:
    """Raise `ConfigError` for an average."""
    if op is AVERAGE:
        raise ConfigError(f"{name} takes no average; divide a sum by the number of ranks")


def _shift(communicator: Communicator, sent: Any, received: Any, distance: int) -> None:
    """Send an array to the rank that comes so many after this one, and receive another from the one before it."""
    after = communicator.rank + distance
    before = communicator.rank - distance
    if after < communicator.size and before >= 0:
        communicator.sendrecv(sent, after, received, before, LAST_TAG)
    elif after < communicator.size:
        communicator.send(sent, after, LAST_TAG)
    elif before >= 0:
        communicator.recv(received, before, LAST_TAG)
