"""Calls as values: what a program asks for, the problem that this is, the choice for it, and what the ranks compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, DType, wider
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.common.topology import Topology
from ringreduce.transport.shared.board import Arrival, signature_hash

__all__ = ["DETERMINISTIC", "NCCL", "VENDOR", "Call", "Carrier", "Choice", "Problem", "Signature", "Task"]

#: The algorithm name that asks for sums in the order of ranks. Several algorithms add in this order; all give the same
#: bits, whatever the nodes of the ranks, the size, fusion and segments.
DETERMINISTIC = "deterministic"

#: The name under which the MPI library's own allreduce is one more algorithm.
VENDOR = "mpi"

#: The name under which NCCL is one more algorithm, for arrays in device memory.
NCCL = "nccl"


class Call(NamedTuple):
    """What the program asks for: collective, arrays and options, as passed; see the methods of `Communicator`."""

    collective: Collective
    array: Any
    out: Any = None
    op: Any = SUM
    root: int = 0
    splits: Any = None
    algorithm: str | None = None
    deterministic: bool = False
    compression: str | None = None
    feedback: Any = None


@dataclass(frozen=True, slots=True)
class Problem:
    """All of a call that decides its algorithm and path; equal on all ranks.

    Attributes:
        collective: which.
        nbytes: the input of a rank; where ranks differ, the largest.
        topology: of the ranks.
        dtype: of the elements.
        op: how they are reduced; None where nothing is.
        library: called with (elements, name of the dtype, op), returns whether the MPI library's own allreduce takes
            them; None where there is no library.
        averages_integers: whether this is an average of integers: summed in a wider type, and divided at the end.
        wants_wider: whether it must be reduced in a wider type where several ranks reduce, one after the other.
    """

    collective: Collective
    nbytes: int
    topology: Topology
    dtype: DType = DTYPES["float32"]
    op: ReduceOp | None = None
    library: Callable[[int, str, ReduceOp], bool] | None = None
    averages_integers: bool = field(init=False)
    wants_wider: bool = field(init=False)

    def __post_init__(self) -> None:
        averages = self.op is ReduceOp.AVERAGE and self.dtype.integral
        object.__setattr__(self, "averages_integers", averages)
        object.__setattr__(self, "wants_wider", averages or (self.op is not None and self.dtype.half))

    def widened(self) -> Problem:
        """Return the same problem on elements of the wider type (see `ringreduce.buffers.wider`)."""
        wide = wider(self.dtype)
        op = ReduceOp.SUM if self.averages_integers else self.op
        return replace(self, nbytes=-(-self.nbytes * wide.itemsize // self.dtype.itemsize), dtype=wide, op=op)


class Carrier(Protocol):
    """What moves the bytes of a call: a path, or one of those for device memory.

    Attributes:
        transport: its name, for people.
    """

    @property
    def transport(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm and the path for a call, and why these.

    Attributes:
        algorithm: a name from `ringreduce.collectives.selection.names`; of arrays in device memory also ``"nccl"``,
            ``"staged"``.
        path: what carries it out.
        reason: why, for people.
    """

    algorithm: str
    path: Carrier
    reason: str

    @property
    def transport(self) -> str:
        """What moves the bytes, for people: ``"shared"``, ``"shared+messages"``, ``"messages"`` or ``"self"``; of
        device memory ``"device+messages"``, ``"nccl"``, or ``"staged"``: through host memory.
        """
        return self.path.transport


@dataclass(frozen=True, slots=True)
class Signature:
    """What must agree between the ranks in a call.

    Attributes:
        text: for people.
        code: a hash of the text, for flags and tags.
        arrival: the same as a board takes it, where no rank touches the memory of others.
        waits: whether no rank can end the call before all have begun it. Then ranks of several nodes need not compare a
            call that all have made before: if the calls differ, their messages do not match, and no rank ends.
    """

    text: str
    code: int
    arrival: Arrival
    waits: bool

    @classmethod
    def of(cls, text: str, *, waits: bool = True) -> Signature:
        code = signature_hash(text)
        return cls(text, code, Arrival(text, code), waits)


class Task(NamedTuple):
    """What a path is asked to carry out: all calls of one kind, with the choice that was made for them.

    Attributes:
        choice: by which algorithm, on which path.
        signature: what the ranks compare.
        problem: what was chosen for.
        dtype: of the elements that are reduced or moved: those of the arrays, or wider ones.
        op: how they are reduced; without a meaning where nothing is.
        root: of the collective, 0 where there is none.
        counts: of a reduce-scatter, the elements that each rank gets.
        row: elements in a row, where ranks exchange rows.
        is_wide: whether the path reduces in another type than that of the arrays, or divides at the end.
    """

    choice: Choice
    signature: Signature
    problem: Problem
    dtype: DType
    op: ReduceOp
    root: int = 0
    counts: tuple[int, ...] = ()
    row: int = 1
    is_wide: bool = False
