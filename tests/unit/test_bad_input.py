"""Bad input that makes other libraries compute nonsense, hang or crash: here it is right, or one error on all ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.common.config import Config
from ringreduce.testing import caught, run_ranks

NODES = pytest.mark.parametrize("node_size", [None, 1, 2], ids=["one node", "messages", "hierarchy"])
COUNTS = (5, 50_000)


def mismatches(node_size: int | None, call: Callable[[rr.Communicator], object], size: int = 3) -> rr.MismatchError:
    """Return the error that all ranks get, once it is the same on all and the next collective has worked."""

    def check(communicator: rr.Communicator) -> rr.MismatchError:
        error = caught(call, communicator)
        assert isinstance(error, rr.MismatchError), error
        assert communicator.allreduce(np.arange(3)).tolist() == [0, size, 2 * size]
        return error

    errors = run_ranks(size, check, node_size=node_size, config=Config(timeout_s=20.0))
    assert [error.values for error in errors] == [errors[0].values] * size
    assert [str(error) for error in errors] == [str(errors[0])] * size
    assert sorted(errors[0].values) == list(range(size))
    return errors[0]


def last(communicator: rr.Communicator) -> bool:
    return communicator.rank == communicator.size - 1


# ---- ranks that disagree ----


@NODES
@pytest.mark.parametrize("other", ["broadcast", "allgather", "alltoall", "reduce_scatter", "barrier"])
def test_different_collectives_are_a_mismatch(node_size: int | None, other: str) -> None:
    """An allreduce does not meet a broadcast, an allgather or a barrier, also where one line calls either."""

    def call(communicator: rr.Communicator) -> object:
        name = other if last(communicator) else "allreduce"
        return getattr(communicator, name)(*[np.ones(6)] * (name != "barrier"))

    error = mismatches(node_size, call)
    assert error.values[0].startswith("allreduce(")
    assert error.values[2].startswith(other)


# ---- memory ----


@NODES
def test_the_same_array_as_input_and_output_is_in_place(node_size: int | None) -> None:
    """An alias, by the same or by another object on the same memory, is an in-place call."""

    def check(communicator: rr.Communicator) -> None:
        for count in COUNTS:
            array = np.ones(count)
            communicator.allreduce(array, out=array)
            communicator.allreduce(array, out=array[:])
            communicator.allreduce(array[:], out=array)
            assert (array == 27).all()

    run_ranks(3, check, node_size=node_size)


# ---- what is defined here and undefined elsewhere ----


@NODES
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.complex64])
def test_nan_in_max_and_min_wins(node_size: int | None, dtype: type) -> None:
    """A NaN on one rank is a NaN on all, wherever the rank stands and whatever the size."""

    def check(communicator: rr.Communicator) -> None:
        for count in COUNTS:
            for bad in range(communicator.size):
                array = np.full(count, communicator.rank, dtype)
                if communicator.rank == bad:
                    array[1] = np.nan
                for op in ("min", "max"):
                    assert np.flatnonzero(np.isnan(communicator.allreduce(array, op))).tolist() == [1]

    run_ranks(3, check, node_size=node_size)


@NODES
def test_an_absent_rank_is_named_within_the_time_limit(node_size: int | None) -> None:
    """One rank never calls: the others get an error that names it and what they called, and do not hang."""
    done = threading.Barrier(3)

    def check(communicator: rr.Communicator) -> Exception | None:
        error = None if last(communicator) else caught(communicator.allreduce, np.ones(4))
        done.wait(30.0)
        return error

    errors = run_ranks(3, check, node_size=node_size, config=Config(timeout_s=0.1))
    for error in errors[:2]:
        assert isinstance(error, rr.CollectiveTimeoutError)
        assert re.search(r"waited 0\.1 s for ranks? .*\b2\b.*allreduce\(sum, shape 4, float64\)", str(error))


@pytest.mark.parametrize("call", [lambda each: each.allreduce(np.ones(4)), lambda each: each.broadcast(np.ones(4))])
def test_a_rank_that_leaves_out_a_known_call_is_named(call: Callable[[rr.Communicator], object]) -> None:
    """Between nodes, who has waited for some time asks who has come; it names nobody who is only waited for, too."""
    done = threading.Barrier(3)

    def check(communicator: rr.Communicator) -> Exception | None:
        for _ in range(2):
            call(communicator)
        communicator._context.agreement.patience_s = 0.0
        error = None if last(communicator) else caught(call, communicator)
        done.wait(30.0)
        return error

    for error in run_ranks(3, check, node_size=1, config=Config(timeout_s=1.0))[:2]:
        assert isinstance(error, rr.CollectiveTimeoutError)
        assert "ranks [2] to call a collective; this rank called " in str(error)
