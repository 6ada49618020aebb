"""The exception tree: as it is drawn, with its builtins, and through pickle."""

from __future__ import annotations

import pickle
import re

import pytest

from ringreduce.common import errors
from ringreduce.common.errors import MismatchError, PeerLostError

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]


def drawn(kind: type[Exception], prefix: str = "", below: str = "") -> list[str]:
    """Return the tree below an exception as the module's docstring draws it, without the remarks."""
    builtins = [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"]
    lines = [prefix + kind.__name__ + (f" ({', '.join(builtins)})" if builtins else "")]
    children = [child for child in kind.__subclasses__() if child in vars(errors).values()]
    for child in children:
        last = child is children[-1]
        lines += drawn(child, below + ("└── " if last else "├── "), below + ("    " if last else "│   "))
    return lines


def test_the_drawn_tree_is_the_real_one() -> None:
    """The drawing in the docstring has exactly the classes, parents and builtins that the code has, in its order."""
    tree = errors.__doc__.split("\n\n")[1].splitlines()
    assert [re.split(r"(?<=[\w)])  ", line[4:])[0] for line in tree] == drawn(errors.RingReduceError)


def test_every_public_error_is_in_the_tree() -> None:
    """One `except RingReduceError` catches all."""
    assert all(issubclass(kind, errors.RingReduceError) for kind in CLASSES)


@pytest.mark.parametrize(
    "error",
    [
        *(kind("what happened") for kind in CLASSES if kind not in (MismatchError, PeerLostError)),
        MismatchError({0: "a", 1: "b"}),
        PeerLostError(3, "gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickling(error: Exception) -> None:
    """An error that travels between processes arrives with its type, text and attributes."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__


def test_a_mismatch_groups_the_ranks() -> None:
    """Ranks that called the same stand in one line, runs of them as a range, in the order of the first of each."""
    error = MismatchError({5: "a", 0: "a", 2: "a", 1: "a", 3: "b"})
    assert str(error).splitlines() == ["the ranks disagree:", "  ranks 0-2, 5: a", "  rank 3: b"]
    assert error.values == {0: "a", 1: "a", 2: "a", 3: "b", 5: "a"}


def test_a_lost_peer_is_named() -> None:
    """The message and the attribute say which rank is gone."""
    error = PeerLostError(2, "its process has ended")
    assert (error.rank, str(error)) == (2, "rank 2 is lost: its process has ended")
