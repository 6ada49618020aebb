"""What the ranks say of operations: how one looks, and what is to happen with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = [
    "OFFER",
    "Expired",
    "Joined",
    "Late",
    "Looks",
    "Lost",
    "Named",
    "Order",
    "Refuse",
    "Run",
    "Stalled",
    "Waiting",
    "Withdrawn",
]

#: What stands in place of a reduce op in the looks of what is offered: other ranks may submit it or not.
OFFER = "offer"


class Looks(NamedTuple):
    """What must agree between the ranks that submit one name.

    Attributes:
        text: all of it, for people.
        op: the reduce op of an allreduce, empty for other collectives.
        parts: of an allreduce, (dtype, number of elements), one for each dtype: what a joined rank has to know.
    """

    text: str
    op: str = ""
    parts: tuple[tuple[str, int], ...] = ()

    @classmethod
    def decode(cls, said: Sequence[Any]) -> Looks:
        text, op, parts = said
        return cls(text, op, tuple((dtype, count) for dtype, count in parts))

    @property
    def fusible(self) -> bool:
        return len(self.parts) == 1


class Named(NamedTuple):
    """An operation as the ranks know it."""

    name: str
    looks: Looks


class Run:
    """These operations run now, as one.

    Attributes:
        operations: those that travel together.
        active: how many ranks submitted them; the others have joined.
        totals: of allreduces, how many elements of each dtype travel; the same on all ranks, in the same order.
    """

    __slots__ = ("active", "operations", "totals")

    def __init__(self, operations: tuple[Named, ...], active: int) -> None:
        self.operations = operations
        self.active = active
        self.totals: dict[str, int] = {}
        for _, looks in operations:
            for dtype, count in looks.parts:
                self.totals[dtype] = self.totals.get(dtype, 0) + count


@dataclass(frozen=True, slots=True)
class Refuse:
    """An operation does not run: what the ranks submitted under its name differs, or it cannot run after a join."""

    name: str
    values: dict[int, str]


@dataclass(frozen=True, slots=True)
class Joined:
    """All ranks have joined; ``last`` was the last."""

    last: int


@dataclass(frozen=True, slots=True)
class Late:
    """``rank`` was the last to submit an operation that others had waited for, so many seconds after the first."""

    rank: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Stalled:
    """An operation waits for long for ``missing``; ``first`` is the lowest rank that submitted it."""

    name: str
    missing: tuple[int, ...]
    seconds: float
    first: int


@dataclass(frozen=True, slots=True)
class Expired:
    """An operation is given up where it was submitted: ``missing`` did not submit it within the time limit."""

    name: str
    present: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """``rank`` has withdrawn what it offered under this name; it did not run and will not."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank takes part in nothing any more, so nothing can run."""

    rank: int


Order = Run | Refuse | Joined | Late | Stalled | Expired | Withdrawn | Lost


@dataclass(frozen=True, slots=True)
class Waiting:
    """An operation that not all ranks have submitted.

    Attributes:
        name: which.
        since: the leader's clock when the first rank submitted it.
        present: the ranks that have.
        missing: the ranks that have not.
    """

    name: str
    since: float
    present: tuple[int, ...]
    missing: tuple[int, ...]
