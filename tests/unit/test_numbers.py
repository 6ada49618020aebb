"""Numbers as arguments: those that are reduced, and those that must be whole."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch  # noqa: F401  # threads would import it at once

import ringreduce as rr
from ringreduce.arguments import real_number, whole_number
from ringreduce.config import Config
from ringreduce.testing import caught, run_ranks

NODES = pytest.mark.parametrize("node_size", [None, 1], ids=["one node", "messages"])


def assert_usable(communicator: rr.Communicator) -> None:
    assert communicator.allreduce(np.arange(3)).tolist() == [0, communicator.size, 2 * communicator.size]


# ---- numbers that are reduced ----


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


@pytest.mark.parametrize(
    ("collective", "wrong", "message"),
    [
        ("allreduce", [1.0, 2.0], r"got list; pass np.asarray\(...\)"),
        ("broadcast", (1.0, 2.0), r"got tuple; pass np.asarray\(...\)"),
        ("allreduce", None, "got NoneType"),
        ("allreduce", 2**70, "not supported"),
        ("broadcast", "1", "got str"),
        ("allgather", 1.0, "at least one dimension, got a scalar"),
        ("alltoall", 1.0, "at least one dimension, got a scalar"),
        ("reduce_scatter", np.float32(1.0), "at least one dimension, got a scalar"),
    ],
)
def test_what_is_no_array_and_no_number_is_refused(collective: str, wrong: Any, message: str) -> None:
    """The rank that has it is told what to do, the other why it got nothing, and both go on."""

    def check(communicator: rr.Communicator) -> None:
        mine = wrong if communicator.rank == 0 else np.ones(2)
        error = caught(lambda each: getattr(each, collective)(mine), communicator)
        assert isinstance(error, rr.MismatchError if communicator.rank else rr.UnsupportedBufferError)
        assert re.search(message, str(error))
        assert_usable(communicator)

    run_ranks(2, check, config=Config(timeout_s=20.0))


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


def test_numbers_of_different_types_are_a_mismatch() -> None:
    """An int on one rank and a float on another: what would come out is nobody's guess."""

    def check(communicator: rr.Communicator) -> None:
        error = caught(lambda each: each.allreduce(1 if each.rank else 1.0), communicator)
        assert isinstance(error, rr.MismatchError)
        assert "float64" in str(error)
        assert "int64" in str(error)
        assert_usable(communicator)

    run_ranks(2, check, config=Config(timeout_s=20.0))


# ---- numbers that must be whole ----


@pytest.mark.parametrize("root", [1.0, np.float64(1.0), "1", None, [1]], ids=repr)
def test_a_root_is_a_whole_number(root: Any) -> None:
    """1.0 is none: a root that was computed and not rounded would be a mistake that works by chance."""

    def check(communicator: rr.Communicator) -> None:
        wrong = communicator.rank == 0
        error = caught(lambda each: each.broadcast(np.ones(2), root if wrong else 1), communicator)
        assert isinstance(error, rr.ConfigError if wrong else rr.MismatchError)
        assert "root must be a whole number, got" in str(error)
        assert communicator.broadcast(np.ones(2), np.int64(1)).tolist() == [1.0, 1.0]

    run_ranks(2, check, config=Config(timeout_s=20.0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda each: each.empty(2.0), "shape must be made of whole numbers, got 2.0"),
        (lambda each: each.empty((2, 3.0)), r"shape must be made of whole numbers, got \(2, 3.0\)"),
        (lambda each: each.explain(1e6), "nbytes must be a whole number, got 1000000.0"),
        (lambda each: each.explain("8M"), "nbytes must be a whole number, got '8M'"),
        (lambda each: each.choose("allreduce", -1), "nbytes must be at least 0, got -1"),
        (lambda each: rr.ProcessSet([0, 1.0]), r"a rank of a process set must be a whole number, got 1.0"),
        (lambda each: rr.ProcessSet(["0"]), "a rank of a process set must be a whole number, got '0'"),
        (lambda each: rr.ProcessSet(3), "a process set is made of a list of ranks, got 3"),
        (lambda each: each.allreduce(np.ones(1), algorithm=3), "unknown allreduce algorithm 3"),
        (lambda each: each.allreduce(np.ones(1), op=3), "unknown reduce operation 3"),
        (lambda each: each.alltoall(np.ones(1), [1.9]), "splits must be 1 whole numbers"),
    ],
)
def test_other_arguments_that_are_no_whole_numbers(call: Callable[[rr.Communicator], Any], message: str) -> None:
    """A ConfigError that names the argument and says what was given."""
    (error,) = run_ranks(1, lambda communicator: caught(call, communicator))
    assert isinstance(error, rr.ConfigError)
    assert re.search(message, str(error))


def test_shapes_may_be_numbers_of_any_library() -> None:
    """What counts as an index counts as a length."""
    assert run_ranks(1, lambda each: each.empty((np.int64(2), np.uint8(3))).shape) == [(2, 3)]
    assert run_ranks(1, lambda each: each.empty(np.int64(2)).shape) == [(2,)]


def test_what_numbers_are() -> None:
    """Whole numbers come as Python's; others are floats, 1 if none is given."""
    assert type(whole_number("it", np.int8(3))) is int
    with pytest.raises(rr.ConfigError, match="it must be at least 1, got 0"):
        whole_number("it", 0, 1)
    assert [real_number("it", each) for each in (2, np.float32(0.5), "2", None)] == [2.0, 0.5, 2.0, 1.0]
    with pytest.raises(rr.ConfigError, match="it must be a number, got 'two'"):
        real_number("it", "two")
