"""Averages of integers are exact on every path, whatever the sum; tests/parallel has those of 64 bits."""

from __future__ import annotations

import numpy as np
import pytest
from whole_numbers import averages, check_averages, terms

import ringreduce as rr
from ringreduce.buffers import DTYPES
from ringreduce.testing import run_ranks

INTEGERS = [name for name, row in DTYPES.items() if row.kind in ("int", "uint")]


@pytest.mark.parametrize("node_size", [None, 1, 2])
@pytest.mark.parametrize("dtype", sorted({*INTEGERS} - {"int64", "uint64"}))
def test_averages_of_short_integers(dtype: str, node_size: int | None) -> None:
    """Narrower ones are summed in wider types, which hold all sums."""
    run_ranks(3, lambda communicator: check_averages(communicator, dtype, algorithms=False), node_size=node_size)


@pytest.mark.parametrize("node_size", [None, 1, 2])
def test_a_repeated_call_looks_at_the_numbers_of_each_run(node_size: int | None) -> None:
    """Arrays that are averaged again have small numbers in one run and large ones in the next; so have plans."""

    def body(communicator: rr.Communicator) -> None:
        rank, size = communicator.rank, communicator.size
        array, out = np.empty(97, np.int64), np.empty(97, np.int64)
        for large in (False, True, True, False):
            arrays = [terms(each, 97, "int64", large=large) for each in range(size)]
            array[:] = arrays[rank]
            communicator.allreduce(array, "average", out=out)
            np.testing.assert_array_equal(out, averages(arrays))
            communicator.allreduce(array, "average", out=array)
            np.testing.assert_array_equal(array, averages(arrays))

    run_ranks(3, body, node_size=node_size)
