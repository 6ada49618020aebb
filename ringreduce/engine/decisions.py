"""What ranks send each other about operations: signatures and notes; and what the coordinator decides."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from ringreduce.common.call_sites import AbortReason

#: What participants and the coordinator send each other: a list of plain values, its kind first.
Note = list[Any]


class OperationKind(IntEnum):
    """What an operation is, as far as the negotiation must know."""

    CALL = 0  # a collective that needs all ranks
    REDUCTION = 1  # an allreduce; ranks that have joined contribute neutral elements
    IN_PLACE = 2  # an allreduce of arrays one by one; likewise
    GATHER = 3  # an allgather of rows; ranks that have joined contribute none
    REFUSAL = 4  # a call that this rank cannot make


class OperationSignature(NamedTuple):
    """What must agree between the ranks that submit one name.

    Attributes:
        text: all of it, for people.
        kind: what the operation is.
        op: how a reduction reduces, as `ReduceOp` spells it.
        counts: what a joined rank has to know: (dtype, number of elements), of a reduction for each dtype, of one in
            place for each array; of an allgather (dtype, elements of a row) for each array.
        wire: the format in which arrays that are reduced in place travel; empty: as they are.
        feedback: whether what rounding to that loses is kept.
        speculative: whether other ranks may leave the operation out. Nobody waits for it, and it can be withdrawn.
    """

    text: str
    kind: OperationKind = OperationKind.CALL
    op: str = ""
    counts: tuple[tuple[str, int], ...] = ()
    wire: str = ""
    feedback: bool = False
    speculative: bool = False

    def encode(self) -> tuple[Any, ...]:
        """Return plain values, as notes carry them."""
        return (self.text, int(self.kind), *self[2:])

    @classmethod
    def decode(cls, said: tuple[Any, ...]) -> OperationSignature:
        """Return the signature that `encode` turned into plain values."""
        text, kind, *more = said
        return cls(text, OperationKind(kind), *more)

    @property
    def in_full(self) -> str:
        """The text, and what else must agree, for ranks of which the texts are equal."""
        counts = ", ".join(f"{count} {dtype}" for dtype, count in self.counts)
        details = {"of": counts, "by": self.op, "travelling as": self.wire}
        return " ".join([self.text, *(f"{how} {what}" for how, what in details.items() if what)])

    @property
    def fusible(self) -> bool:
        """Whether the operation may travel with others: it reduces elements of one dtype."""
        return self.kind is OperationKind.REDUCTION and len(self.counts) == 1


class Named(NamedTuple):
    """An operation as the ranks know it."""

    name: str
    signature: OperationSignature


class Run:
    """These operations run now, as one.

    Attributes:
        operations: those that travel together.
        names: theirs.
        active: how many ranks submitted them; the others have joined.
        totals: of allreduces, how many elements of each dtype travel; the same on all ranks, in the same order.
    """

    __slots__ = ("active", "names", "operations", "totals")

    def __init__(self, operations: tuple[Named, ...], active: int) -> None:
        self.operations = operations
        self.names = [name for name, _ in operations]
        self.active = active
        self.totals: dict[str, int] = {}
        for _, signature in operations:
            for dtype, count in signature.counts:
                self.totals[dtype] = self.totals.get(dtype, 0) + count


class Refuse(NamedTuple):
    """An operation does not run: what the ranks submitted differs, or some rank cannot do it, or it follows a join.

    Attributes:
        name: which.
        values: what each rank submitted, in words.
        submitted: the ranks that did; the others have joined.
    """

    name: str
    values: dict[int, str]
    submitted: tuple[int, ...]


class Joined(NamedTuple):
    """All ranks have joined; ``last`` was the last."""

    last: int


class Late(NamedTuple):
    """``rank`` submitted an operation last, ``seconds`` after the first rank."""

    rank: int
    seconds: float


class Paced(NamedTuple):
    """How the ranks have gone through some more steps: for each, the arguments of a `Pace`."""

    paces: list[list[Any]]


class Stalled(NamedTuple):
    """An operation, or a join, has waited for ``missing`` for ``seconds``; ``first`` is the lowest rank that waits."""

    name: str
    missing: tuple[int, ...]
    seconds: float
    first: int
    is_join: bool = False


class Expired(NamedTuple):
    """Everything ends: ``present`` waited ``seconds``, in vain, for ``missing`` to submit an operation, or to join.

    Some of those that are missing wait for another operation ``instead``, by rank.
    """

    name: str
    present: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float
    is_join: bool = False
    instead: Mapping[int, str] = {}


class Crossed(NamedTuple):
    """Operations end: each rank waits for one of them, which a rank that waits itself has not submitted.

    Attributes:
        names: of the operations.
        values: what each rank waits for, in words.
        places: the line of its program.
    """

    names: tuple[str, ...]
    values: dict[int, str]
    places: dict[int, str]


class Withdrawn(NamedTuple):
    """``rank`` has withdrawn its speculative operation of this name; that did not run and will not."""

    rank: int
    name: str


class Detached(NamedTuple):
    """A rank takes part in no further operation, so nothing can run."""

    rank: int
    why: AbortReason


Decision = Run | Refuse | Crossed | Joined | Late | Paced | Stalled | Expired | Withdrawn | Detached


class Waiting(NamedTuple):
    """An operation that not all ranks have submitted, or a join.

    Attributes:
        name: which.
        since: the coordinator's clock when the first rank submitted it; of a join, when anything was last submitted.
        present: the ranks that have.
        missing: the ranks that have not.
        is_join: whether it is a join.
    """

    name: str
    since: float
    present: tuple[int, ...]
    missing: tuple[int, ...]
    is_join: bool = False
