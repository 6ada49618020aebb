"""Numbers in place of arrays: what collectives make of scalars, and of what is no array and no number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch  # noqa: F401  # threads would import it at once

import ringreduce as rr
from ringreduce.testing import caught, run_ranks

NODES = pytest.mark.parametrize("node_size", [None, 1], ids=["one node", "messages"])


@NODES
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (np.float32, 3.75),
        (np.float64, 3.75),
        (np.float16, 3.75),
        (ml_dtypes.bfloat16, 3.75),
        (np.complex64, 3.75 + 0j),
        (float, 3.75),
        (complex, 3.75 + 0j),
        (lambda value: np.ones(4, np.float32).mean() * value, 3.75),
    ],
)
def test_numbers_are_summed_and_stay_what_they_are(
    make: Callable[[float], Any], expected: Any, node_size: int | None
) -> None:
    """A scalar of NumPy, or a number of Python, comes back as one of the same type: it can be printed and compared."""

    def check(communicator: rr.Communicator) -> None:
        mine = make(0.25 + communicator.rank)
        total = communicator.allreduce(mine)
        assert type(total) is type(mine)
        assert total == expected
        f"{total:.3f}"
        assert communicator.broadcast(mine, 1) == make(1.25)
        assert type(communicator.broadcast(mine, 1)) is type(mine)

    run_ranks(3, check, node_size=node_size)


def test_whole_numbers_and_truth_values() -> None:
    """Integers add up as int64, averages go toward zero, and truth values mean any and all."""

    def check(communicator: rr.Communicator) -> None:
        rank = communicator.rank
        for kind in (int, np.int64, np.int8):
            total = communicator.allreduce(kind(rank + 1))
            assert (type(total), total) == (kind, 6)
        assert communicator.allreduce(rank - 4, "average") == -3
        assert communicator.allreduce(rank - 3, "average") == -2
        assert communicator.allreduce(-(2**40), "min") == -(2**40)
        assert communicator.allreduce(rank == 1) is True
        assert communicator.allreduce(rank == 1, "average") is False
        assert communicator.allreduce(np.bool_(rank == 1))
        assert rr.reproducible_allreduce(communicator, 0.5) == 1.5
        assert type(rr.reproducible_allreduce(communicator, np.float32(0.5))) is np.float32

    run_ranks(3, check)


def test_no_result_goes_into_a_number() -> None:
    """``out=`` takes an array of no dimension, not the number itself."""

    def check(communicator: rr.Communicator) -> None:
        value, room = np.float32(2.0), np.empty((), np.float32)
        assert isinstance(
            caught(lambda each: each.allreduce(value, out=value), communicator), rr.UnsupportedBufferError
        )
        assert communicator.allreduce(value, out=room) is room
        assert room == 4.0

    run_ranks(2, check)
