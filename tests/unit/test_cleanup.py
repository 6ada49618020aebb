"""What has several parts is closed as a whole, whatever one of them raises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ringreduce.common.errors import TransportError
from ringreduce.common.lifetime import close_all
from ringreduce.runtime.process_sets import Membership
from ringreduce.testing import caught


def test_every_part_is_closed() -> None:
    """The first error is raised, when all parts have been asked."""
    called: list[int] = []

    def part(number: int) -> None:
        called.append(number)
        if number:
            raise TransportError(str(number))

    error = caught(close_all, *(lambda number=number: part(number) for number in range(3)))
    assert str(error) == "1"
    assert called == [0, 1, 2]


def test_all_of_a_process_set_is_closed() -> None:
    """Whatever the first part raises, the second is closed, too."""
    closed: list[str] = []

    def fail() -> None:
        raise TransportError("a kernel of the user's")

    engine: Any = SimpleNamespace(close=fail)
    communicator: Any = SimpleNamespace(close=lambda: closed.append("communicator"))
    assert isinstance(caught(Membership(communicator, engine).close), TransportError)
    assert closed == ["communicator"]
