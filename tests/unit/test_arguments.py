"""Arguments that are numbers, and how the other ranks hear of wrong ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch  # noqa: F401  # threads would import it at once

import ringreduce as rr
from ringreduce.common.arguments import CheckingArguments, real_number, whole_number
from ringreduce.common.config import Config
from ringreduce.testing import caught, run_ranks


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
        (lambda each: each.allreduce(np.ones(1), algorithm=3), "algorithm must be a name, got 3"),
        (lambda each: each.allreduce(np.ones(1), op=3), "unknown reduce operation 3"),
        (lambda each: each.alltoall(np.ones(1), [1.9]), "each of the splits must be a whole number, got 1.9"),
    ],
)
def test_other_arguments_that_are_no_whole_numbers(call: Callable[[rr.Communicator], Any], message: str) -> None:
    """A ConfigError that names the argument and says what was given."""
    (error,) = run_ranks(1, lambda communicator: caught(call, communicator))
    assert isinstance(error, rr.ConfigError)
    assert re.search(message, str(error))


def test_what_numbers_are() -> None:
    """Whole numbers come as Python's; others are floats, 1 if none is given."""
    assert type(whole_number("it", np.int8(3))) is int
    with pytest.raises(rr.ConfigError, match="it must be at least 1, got 0"):
        whole_number("it", 0, 1)
    assert [real_number("it", each) for each in (2, np.float32(0.5), None)] == [2.0, 0.5, 1.0]
    with pytest.raises(rr.ConfigError, match="it must be a number, got 'two'"):
        real_number("it", "two")


class Stubborn:
    """Raises when it is to be a number, and when it is to be printed."""

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __index__(self) -> int:
        raise RuntimeError("no index")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("2", "x must be a number, got '2'"),
        (b"2", "x must be a number, got b'2'"),
        (bytearray(b"2"), "x must be a number, got bytearray"),
        (np.str_("2"), "x must be a number, got"),
        (1j, "x must be a number, got 1j"),
        ([1.0], r"x must be a number, got \[1.0\]"),
        (10**400, "x must be a number that a float can hold, got 1000"),
        (10**5000, "x must be a number that a float can hold, got one of type int that cannot be printed"),
        (Stubborn(), "x must be a number, got one of type Stubborn that cannot be printed"),
    ],
    ids=["text", "bytes", "bytearray", "text of NumPy", "complex", "list", "large", "huge", "raises"],
)
def test_what_is_no_real_number(value: Any, message: str) -> None:
    """Text is none, though Python would read it; whatever a conversion raises becomes a ConfigError."""
    with pytest.raises(rr.ConfigError, match=message):
        real_number("x", value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Stubborn(), "x must be a whole number, got one of type Stubborn that cannot be printed"),
        (-(10**5000), "x must be at least 0, got one of type int that cannot be printed"),
    ],
    ids=["raises", "huge"],
)
def test_what_is_no_whole_number_and_cannot_be_printed(value: Any, message: str) -> None:
    """Saying so does not fail for the sake of what is said."""
    with pytest.raises(rr.ConfigError, match=message):
        whole_number("x", value, 0)


def test_what_fails_while_arguments_are_checked_is_refused_and_raised() -> None:
    """An error is told to the others, the end of all checks is where they meet; interrupts are nobody's mistake."""
    told: list[str] = []

    class Others:
        def refuse(self, name: str, error: Exception) -> None:
            told.append(f"{name} refused: {error}")

        def rendezvous(self, text: str) -> None:
            told.append(f"met in {text}")

    def checks(error: BaseException | None) -> None:
        with CheckingArguments(Others(), "save", "save(x)"):
            if error is not None:
                raise error

    checks(None)
    with pytest.raises(ValueError, match="wrong"):
        checks(ValueError("wrong"))
    with pytest.raises(KeyboardInterrupt):
        checks(KeyboardInterrupt())
    assert told == ["met in save(x)", "save refused: wrong"]
