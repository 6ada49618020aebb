"""Signatures of operations, and the coordinator's decisions about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringreduce.calls import GivenUp

__all__ = [
    "GATHER",
    "REFUSED",
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

#: What stands in place of a reduce op in the looks of an allgather that ranks may miss which have joined.
GATHER = "gather"
#: What stands there in the looks of a call that a rank cannot make, for its arguments.
REFUSED = "refused"


class Looks(NamedTuple):
    """What must agree between the ranks that submit one name.

    Attributes:
        text: all of it, for people.
        op: the reduce op of an allreduce, `GATHER`, `REFUSED`, or empty for other collectives.
        parts: what a joined rank has to know: (dtype, number of elements), of an allreduce one for each dtype, of
            arrays that are reduced where they are one for each, of an allgather (dtype, elements of a row).
        wire: the format in which arrays travel that are reduced where they are, ``"as they are"`` if in none; empty
            for all else, which may travel with others.
        speculative: whether other ranks may submit it or not: nobody is waited for, and it can be withdrawn.
    """

    text: str
    op: str = ""
    parts: tuple[tuple[str, int], ...] = ()
    wire: str = ""
    speculative: bool = False

    @classmethod
    def decode(cls, said: Sequence[Any]) -> Looks:
        text, op, parts, wire, speculative = said
        return cls(text, op, tuple((dtype, count) for dtype, count in parts), wire, speculative)

    @property
    def fusible(self) -> bool:
        return len(self.parts) == 1 and not self.wire and self.op != GATHER


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
    """An operation does not run: what the ranks submitted differs, or some rank cannot do it, or it follows a join.

    Attributes:
        name: which.
        values: what each rank submitted, in words.
        submitted: the ranks that did; the others have joined.
        refused: whether one of them cannot make the call.
    """

    name: str
    values: dict[int, str]
    submitted: tuple[int, ...]
    refused: bool


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
    """An operation, or a join, waits for long for ``missing``; ``first`` is the lowest rank that waits."""

    name: str
    missing: tuple[int, ...]
    seconds: float
    first: int
    is_join: bool = False


@dataclass(frozen=True, slots=True)
class Expired:
    """Everything ends: ``present`` waited in vain for ``missing`` to submit an operation, or to join."""

    name: str
    present: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float
    is_join: bool = False


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """``rank`` has withdrawn what it submitted speculatively under this name; it did not run and will not."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank takes part in nothing any more, so nothing can run."""

    rank: int
    why: GivenUp


Order = Run | Refuse | Joined | Late | Stalled | Expired | Withdrawn | Lost


class Waiting(NamedTuple):
    """An operation that not all ranks have submitted, or a join.

    Attributes:
        name: which.
        since: the leader's clock when the first rank submitted it; of a join, when anything was last submitted.
        present: the ranks that have.
        missing: the ranks that have not.
        is_join: whether it is a join.
    """

    name: str
    since: float
    present: tuple[int, ...]
    missing: tuple[int, ...]
    is_join: bool = False
