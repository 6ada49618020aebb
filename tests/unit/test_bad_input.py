"""Bad input that makes other libraries compute nonsense, hang or crash: here it is right, or one error on all ranks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
import torch

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


@NODES
@pytest.mark.parametrize("name", ["allgather", "alltoall"])
def test_rows_may_differ_but_not_what_they_are(node_size: int | None, name: str) -> None:
    """The first dimension is each rank's own; the others and the dtype must agree."""
    error = mismatches(node_size, lambda each: getattr(each, name)(np.ones((3, 4 if last(each) else 2))))
    assert re.search(r"shape \*x2.*\n.*shape \*x4", str(error))
    mismatches(node_size, lambda each: getattr(each, name)(np.ones(3, np.int32 if last(each) else np.float32)))


# ---- memory ----


@NODES
def test_expanded_tensors_are_read_but_not_written(node_size: int | None) -> None:
    """A stride of 0 is fine as input; as output it is rejected on the rank that has it, before anything moves."""

    def check(communicator: rr.Communicator) -> None:
        expanded = torch.ones(1).expand(4)
        assert communicator.allreduce(expanded).tolist() == [3.0] * 4
        with pytest.raises(rr.UnsupportedBufferError, match="share memory"):
            communicator.allreduce(expanded, out=expanded)
        assert communicator.allreduce(np.ones(2)).tolist() == [3.0] * 2

    run_ranks(3, check, node_size=node_size)


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


@pytest.mark.parametrize("dtype", [">f4", "longdouble", "M8[s]", object], ids=str)
def test_foreign_elements_are_a_type_error(dtype: object) -> None:
    """Big-endian, extended, date and object elements are named and refused, as input and as output."""

    def check(communicator: rr.Communicator) -> None:
        array = np.zeros(3, dtype)
        for call in (
            lambda: communicator.allreduce(array),
            lambda: communicator.allreduce(np.zeros(3), out=array),
            lambda: communicator.broadcast(array),
            lambda: communicator.allgather(array),
        ):
            with pytest.raises(TypeError, match="not supported"):
                call()
        communicator.barrier()

    run_ranks(2, check)


def test_fp8_is_a_clear_type_error() -> None:
    """Eight-bit floats are refused by name, from torch and from ml_dtypes."""
    for array in (torch.zeros(3, dtype=torch.float8_e4m3fn), np.zeros(3, ml_dtypes.float8_e4m3fn)):
        error = run_ranks(1, lambda each, array=array: caught(each.allreduce, array))[0]
        assert isinstance(error, rr.UnsupportedBufferError)
        assert "float8_e4m3fn are not supported; choose one of float16, " in str(error)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_tensors_are_refused() -> None:
    """A sparse tensor is no dense array; the error says what to pass instead."""
    error = run_ranks(1, lambda each: caught(each.allreduce, torch.eye(2).to_sparse()))[0]
    assert isinstance(error, rr.UnsupportedBufferError)
    assert "pass a dense one" in str(error)


@pytest.mark.parametrize(
    "array", [[1.0, 2.0], (1, 2), None, "text", memoryview(b"abcd")], ids=lambda array: type(array).__name__
)
def test_what_is_no_array_is_a_type_error(array: object) -> None:
    """Lists and bare memory are not converted behind the caller's back."""
    error = run_ranks(1, lambda each: caught(each.allreduce, array))[0]
    assert isinstance(error, TypeError)
    assert f"got {type(array).__name__}" in str(error)


# ---- what is defined here and undefined elsewhere ----


@NODES
def test_averages_of_integers_go_toward_zero(node_size: int | None) -> None:
    """The exact sum over the number of ranks without its fraction, and no overflow on the way in small types."""

    def check(communicator: rr.Communicator) -> None:
        values = ((7, -7, 127, -128), (0, 0, 127, -128), (1, -1, 127, -128))[communicator.rank]
        for repeats in (1, 20_000):
            array = np.array(values * repeats, np.int8)
            assert communicator.allreduce(array, "average").tolist() == [2, -2, 127, -128] * repeats
            assert communicator.allreduce(array.view(np.uint8)[2::4], "average").tolist() == [127] * repeats

    run_ranks(3, check, node_size=node_size)


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
