"""A call that one rank cannot make, or makes differently, never makes ranks pair calls that do not belong together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ringreduce as rr
from ringreduce.common.config import Config
from ringreduce.testing import caught, run_ranks

NODES = pytest.mark.parametrize("node_size", [None, 1, 2], ids=["one node", "messages", "hierarchy"])
COUNTS = pytest.mark.parametrize("count", [0, 1, 5, 70_001], ids=["empty", "one", "small", "large"])
SIZE, STEPS, WRONG_STEP = 3, 6, 2

#: Makes the arguments of a call for an array: those by position, and those by name.
Arguments = Callable[[np.ndarray], tuple[list[Any], dict[str, Any]]]


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


#: What one rank passes to allreduce where the others pass an array, and a part of what these are told.
REFUSED: dict[str, tuple[Arguments, str]] = {
    "objects": (lambda array: ([array.astype(object)], {}), "object"),
    "sparse": (lambda array: ([torch.ones(4).to_sparse()], {}), "sparse"),
    "list": (lambda array: ([array.tolist()], {}), "list"),
    "out of another shape": (lambda array: ([array], {"out": np.ones(3)}), "out has shape"),
    "read-only out": (lambda array: ([array], {"out": read_only(array)}), "read-only"),
    "unknown op": (lambda array: ([array, "median"], {}), "median"),
    "unknown algorithm": (lambda array: ([array], {"algorithm": "quick"}), "quick"),
    "algorithms in a list": (lambda array: ([array], {"algorithm": ["ring"]}), "algorithm must be a name"),
    "unknown format": (lambda array: ([array], {"compression": "int3"}), "int3"),
    "formats in a list": (lambda array: ([array], {"compression": ["int8"]}), "unknown wire format"),
    "two algorithms": (lambda array: ([array], {"deterministic": True, "algorithm": "ring"}), "not both"),
}
#: For each collective: right arguments, what comes of a value on a rank, and arguments that are refused.
OTHERS: dict[str, tuple[Arguments, Callable[[np.ndarray, int], np.ndarray], Arguments]] = {
    "reduce_scatter": (
        lambda array: ([array], {}),
        lambda value, rank: np.array_split(SIZE * value, SIZE)[rank],
        lambda array: ([array.sum()], {}),
    ),
    "allgather": (
        lambda array: ([array], {}),
        lambda value, rank: np.concatenate([value] * SIZE),
        lambda array: ([array.astype("datetime64[s]")], {}),
    ),
    "broadcast": (
        lambda array: ([array, 1], {}),
        lambda value, rank: value,
        lambda array: ([array, 1], {"out": read_only(array)}),
    ),
    "reduce": (
        lambda array: ([array, 2], {}),
        lambda value, rank: SIZE * value if rank == 2 else None,
        lambda array: ([array, SIZE], {}),
    ),
    "gather": (
        lambda array: ([array, 1], {}),
        lambda value, rank: np.concatenate([value] * SIZE) if rank == 1 else None,
        lambda array: ([array.sum(), 1], {}),
    ),
    "scatter": (
        lambda array: ([np.concatenate([array] * SIZE), 1], {}),
        lambda value, rank: value,
        lambda array: ([array.tolist(), 1], {}),
    ),
    "alltoall": (
        lambda array: ([array, [len(array), 0, 0]], {}),
        lambda value, rank: np.concatenate([value] * SIZE) if rank == 0 else value[:0],
        lambda array: ([array, [1, 1, 1]], {}),
    ),
}


def run_steps(
    name: str,
    node_size: int | None,
    count: int,
    right: Arguments,
    expected: Callable[[np.ndarray, int], np.ndarray],
    wrong: Arguments,
) -> list[tuple[rr.RingReduceError, dict[int, str]]]:
    """Let rank 0 pass wrong arguments in one of several steps; return each rank's error, once all else was right."""

    def body(communicator: rr.Communicator) -> tuple[rr.RingReduceError, dict[int, str]]:
        failed: list[tuple[int, rr.RingReduceError]] = []
        for step in range(STEPS):
            make = wrong if (communicator.rank, step) == (0, WRONG_STEP) else right
            args, options = make(np.full(count, 10.0**step))
            try:
                result = getattr(communicator, name)(*args, **options)
            except rr.RingReduceError as error:
                failed.append((step, error))
            else:
                result = result[0] if isinstance(result, tuple) else result
                np.testing.assert_array_equal(result, expected(np.full(count, 10.0**step), communicator.rank))
        ((step, error),) = failed
        assert step == WRONG_STEP
        return error, getattr(error, "values", {})

    return run_ranks(SIZE, body, node_size=node_size, config=Config(timeout_s=10.0))


@NODES
@COUNTS
@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_allreduce_ends_for_all_ranks(node_size: int | None, count: int, why: str) -> None:
    """All ranks raise in that step, the others with rank and reason; the sums of all other steps are right."""
    wrong, reason = REFUSED[why]
    results = run_steps(
        "allreduce", node_size, count, lambda array: ([array], {}), lambda value, rank: SIZE * value, wrong
    )
    assert isinstance(results[0][0], (rr.UnsupportedBufferError, rr.ConfigError))
    for error, values in results[1:]:
        assert isinstance(error, rr.MismatchError)
        assert reason in values[0]
        assert values[0].startswith("allreduce(refused: ")
        assert values[1] == values[2] == f"allreduce(sum, shape {count}, float64)"


@NODES
@COUNTS
@pytest.mark.parametrize("name", OTHERS)
def test_so_it_is_with_every_collective(node_size: int | None, count: int, name: str) -> None:
    """Whatever is refused, the ranks are in step again."""
    results = run_steps(name, node_size, count, *OTHERS[name])
    assert not isinstance(results[0][0], rr.MismatchError)
    for error, values in results[1:]:
        assert isinstance(error, rr.MismatchError)
        assert values[0].startswith(f"{name}(refused: ")


@NODES
def test_ranks_that_refuse_for_reasons_of_their_own(node_size: int | None) -> None:
    """Each raises its own error, also if all refuse, and they are in step."""

    def body(communicator: rr.Communicator) -> list[float]:
        array, wrong = np.ones(4), [np.ones(4, object), "text", np.float64(3.0).astype("datetime64[s]")]
        with pytest.raises(rr.UnsupportedBufferError):
            communicator.allreduce(wrong[communicator.rank])
        with pytest.raises(rr.UnsupportedBufferError):
            communicator.allreduce([1, 2, 3])
        return communicator.allreduce(array).tolist()

    assert run_ranks(SIZE, body, node_size=node_size, config=Config(timeout_s=10.0)) == [[3.0] * 4] * SIZE


@NODES
def test_a_refused_call_that_nobody_else_makes_waits_no_longer_than_the_time_limit(node_size: int | None) -> None:
    """It raises its own error then, and says that nobody came."""
    waited = threading.Event()

    def body(communicator: rr.Communicator) -> None:
        if communicator.rank == 1:
            assert waited.wait(30)
            return
        with pytest.raises(rr.UnsupportedBufferError) as caught:
            communicator.allreduce([1.0])
        assert isinstance(caught.value.__cause__, rr.CollectiveTimeoutError)
        with pytest.raises(rr.TransportError, match="an earlier collective failed"):
            communicator.allreduce(np.ones(3))
        waited.set()

    run_ranks(2, body, node_size=node_size, config=Config(timeout_s=0.2))


@NODES
def test_a_call_that_one_rank_left_out_closes_the_communicator(node_size: int | None) -> None:
    """Calls from different lines that differ: all ranks hear of it and of the lines, and nothing is accepted after."""

    def body(communicator: rr.Communicator) -> tuple[str, str]:
        first, second = np.ones(3), np.ones(4)
        error = later = None
        if communicator.rank != 1:
            error = caught(communicator.allreduce, first)
        error = error or caught(communicator.allreduce, second)
        later = caught(communicator.allreduce, second)
        assert isinstance(error, rr.MismatchError)
        assert not error.in_step
        assert isinstance(later, rr.TransportError)
        return str(error), str(later)

    errors = run_ranks(SIZE, body, node_size=node_size, config=Config(timeout_s=10.0))
    assert len(set(errors)) == 1
    text, later = errors[0]
    assert "from different lines of the program" in text
    assert text.count("test_refused_calls.py:") == 2
    assert "the ranks are out of step" in later


@NODES
def test_a_refused_call_in_place_of_another_closes_it_too(node_size: int | None) -> None:
    """What one rank refuses while the others are somewhere else may be any call."""

    def body(communicator: rr.Communicator) -> None:
        if communicator.rank == 0:
            with pytest.raises(rr.UnsupportedBufferError):
                communicator.allreduce([1.0])
        else:
            with pytest.raises(rr.MismatchError):
                communicator.allreduce(np.ones(4))
        with pytest.raises(rr.TransportError, match="out of step"):
            communicator.allreduce(np.ones(4))

    run_ranks(SIZE, body, node_size=node_size, config=Config(timeout_s=10.0))


@pytest.mark.parametrize("depth", [0, 5, 100])
def test_a_refused_call_is_the_same_call_however_deep_the_program_is(depth: int) -> None:
    """The ranks are in step after it."""

    def call(communicator: rr.Communicator, left: int) -> Exception | None:
        if left:
            return call(communicator, left - 1)
        array = np.ones(4)
        return caught(communicator.allreduce, array.tolist() if communicator.rank == 0 else array)

    def body(communicator: rr.Communicator) -> None:
        error = call(communicator, depth)
        assert isinstance(error, rr.UnsupportedBufferError if communicator.rank == 0 else rr.MismatchError)
        assert (communicator.allreduce(np.ones(4)) == SIZE).all()

    run_ranks(SIZE, body)


def test_what_other_ranks_hear_of_a_refused_call_is_short() -> None:
    """Wrong arguments may be large."""

    def body(communicator: rr.Communicator) -> None:
        wrong = ["x"] * (100_000 if communicator.rank == 0 else 2)
        error = caught(communicator.alltoall, np.ones(3), wrong)
        assert isinstance(error, rr.ConfigError)
        error = caught(communicator.alltoall, np.ones(3), wrong if communicator.rank == 0 else None)
        if communicator.rank:
            assert isinstance(error, rr.MismatchError)
            assert len(str(error)) < 5000

    run_ranks(SIZE, body, node_size=1)
