"""What a path is, which carries the calls of a process set; and `Itself`, the path of a rank that is alone.

Each path answers three questions: can it take a call, what would that cost, and carry it out. The first two depend on
nothing but the call, so they are asked of the class, and every rank gets the same answers. The third takes an instance,
which holds what connects the ranks, and the plans that can be used again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, DType, Operand, wider
from ringreduce.collectives.context import Cache, Context, Signature
from ringreduce.common.arguments import shape_text
from ringreduce.common.errors import MismatchError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.common.topology import Topology

__all__ = [
    "DETERMINISTIC",
    "NCCL",
    "VENDOR",
    "Again",
    "Call",
    "Carrier",
    "Choice",
    "Chosen",
    "Itself",
    "Offer",
    "Path",
    "Reduction",
    "Result",
    "Task",
    "Work",
    "part_agreed",
    "part_offer",
    "part_told",
    "rows_received",
    "work_of_one_byte",
]

Array = npt.NDArray[Any]
#: Returns where a result goes, contiguous memory, once it is known how many rows come from each rank.
Result = Callable[[list[int]], Operand]
#: Repeats a call on the same input; None: nothing is saved, each call looks everything up.
Again = Callable[[Result], object] | None

#: The name that asks for sums in the order of ranks: the same bits from every algorithm that it stands for, so that
#: they depend neither on the nodes of the ranks nor on size, fusion or segments.
DETERMINISTIC = "deterministic"

#: The name under which the MPI library's own allreduce is one more algorithm.
VENDOR = "mpi"

#: The name under which NCCL is one more algorithm, for arrays in device memory.
NCCL = "nccl"

#: A rank tells the others of so many dimensions of its part of a scatter, and names its dtype by its place here.
_MOST_DIMENSIONS = 32
_DTYPE_NAMES = tuple(DTYPES)

#: Schedules are examined node by node, up to so many ranks: the busiest ranks are among the first.
_RANKS_WALKED = 32


@dataclass(frozen=True, slots=True)
class Call:
    """All of a call that decides which path carries it; the same on all ranks.

    Attributes:
        collective: which.
        nbytes: of what a rank puts in; where ranks differ, of the rank that puts in most.
        dtype: of the elements.
        op: how they are reduced; None where nothing is.
        topology: of the ranks.
        library: says of (elements, name of the dtype, op) whether the MPI library's own allreduce takes them; None
            where there is none.
    """

    collective: Collective
    nbytes: int
    topology: Topology
    dtype: DType = DTYPES["float32"]
    op: ReduceOp | None = None
    library: Callable[[int, str, ReduceOp], bool] | None = None

    @property
    def averages_integers(self) -> bool:
        """Whether an average is exact only if it is summed in a wider type and divided at the end."""
        return self.op is ReduceOp.AVERAGE and self.dtype.integral

    def widened(self) -> Call:
        """Return the same call on elements of the wider type (see `ringreduce.buffers.wider`)."""
        wide = wider(self.dtype)
        op = ReduceOp.SUM if self.averages_integers else self.op
        return replace(self, nbytes=-(-self.nbytes * wide.itemsize // self.dtype.itemsize), dtype=wide, op=op)


class Carrier(Protocol):
    """What moves the bytes of a call: a `Path`, or one of those for device memory.

    Attributes:
        transport: its name, for people.
    """

    @property
    def transport(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """What carries out a call, and the reason for it.

    Attributes:
        algorithm: a name from `ringreduce.collectives.selection.names`; of arrays in device memory also ``"nccl"``,
            ``"direct"``, ``"staged"``.
        path: what runs it.
        reason: why, in words.
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


class Task(NamedTuple):
    """What a path is told of a call that it took.

    Attributes:
        algorithm: by which to carry it out.
        dtype: of the elements in which it is reduced.
        op: how; without a meaning where nothing is.
        signature: what the user called.
    """

    algorithm: str
    dtype: DType
    op: ReduceOp
    signature: Signature


class Offer(NamedTuple):
    """What a rank tells the others in a collective in which ranks may give any number of rows.

    Attributes:
        room: the rows of the array for this rank's result; -1: it is made as large as is wanted.
        rows: how many it gives: one number for all ranks, or one for each.
    """

    room: int
    rows: tuple[int, ...]

    def rows_for(self, rank: int) -> int:
        return self.rows[rank] if len(self.rows) > 1 else self.rows[0]


class Work(NamedTuple):
    """What an allreduce costs: the factors of the parameters of `ringreduce.collectives.tuning.Model`, in its order.

    Attributes:
        rounds: of messages that wait for each other.
        sent: bytes as messages: by the busiest rank of one node, or out of the busiest of several nodes.
        barriers: inside a node.
        touched: bytes that the busiest rank loads from and stores to other ranks' memory.
        reduced: bytes that the busiest rank combines with others.
    """

    rounds: float
    sent: float
    barriers: float
    touched: float
    reduced: float


class Reduction(ABC):
    """An allreduce of one kind of array that was looked up, to be run any number of times."""

    @abstractmethod
    def run(self, source: Operand, target: Operand) -> object:
        """Reduce ``source`` over all ranks into ``target``: the same memory or apart from it. Collective.

        Raises:
            MismatchError, CollectiveTimeoutError, TransportError: see the communicator.
        """

    def repetition(self, source: Operand, target: Operand) -> Callable[[], object]:
        """Return what reduces the same memory again, with everything looked up.

        Args:
            source, target: as for `run`; contiguous.
        """
        return partial(self.run, source, target)


class Chosen(NamedTuple):
    """A kind of call that was looked up.

    Attributes:
        choice: how it is carried out.
        signature: what must agree in it.
        run: carries it out; takes the arrays, as the methods of a `Path` do.
        reduction: whose ``run`` this is, of an allreduce; else None.
    """

    choice: Choice
    signature: Signature
    run: Callable[..., Any]
    reduction: Reduction | None = None


class Path(ABC):
    """Carries calls of a process set.

    Arrays are flat, C-contiguous and of storage types, except in allreduces.
    """

    transport: ClassVar[str]
    #: Whether one rank reduces all terms of an element at once. Otherwise 16-bit floats are reduced in float32 and
    #: rounded at the end, and averages of integers are summed in 64 bits and divided at the end.
    reduces_at_once: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plans: Cache[Any] = Cache()

    @classmethod
    @abstractmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        """Return whether this carries out the algorithm for such a call. The first of `PATHS` that does is taken."""

    @classmethod
    def cost(cls, algorithm: str, call: Call) -> Work:
        """Return what the algorithm costs in an allreduce on this path.

        Raises:
            ConfigError: there is no such algorithm of ours, or it cannot run there.
        """
        share, nbytes = work_of_one_byte(algorithm, call.topology), call.nbytes
        return Work(share.rounds, share.sent * nbytes, share.barriers, share.touched * nbytes, share.reduced * nbytes)

    @classmethod
    def as_reduced(cls, call: Call) -> Call:
        """Return the call on the elements in which this path reduces: its own, or wider ones.

        Averages of integers are sums in 64 bits; a 16-bit float is to be rounded once.
        """
        wants_wider = call.averages_integers or (call.op is not None and call.dtype.half)
        return call.widened() if wants_wider and not cls.reduces_at_once else call

    @abstractmethod
    def allreduce(self, task: Task, shape: tuple[int, ...]) -> Reduction:
        """Return what reduces arrays of this shape."""

    def broadcast(self, task: Task, source: Array, target: Array, root: int) -> Again:
        """Copy the root's ``source`` into everyone's ``target``: the same memory or apart from it."""
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def allgather(self, task: Task, source: Array, offer: Offer, row: int, result: Result) -> Again:
        """Put every rank's rows into a result, one after the other.

        Args:
            task: how.
            source: this rank's rows.
            offer: what this rank tells the others.
            row: elements in a row.
            result: makes or returns that array.

        Raises:
            MismatchError: on all ranks: on some, the result does not fit.
        """
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def reduce(self, task: Task, source: Array, target: Array | None, root: int) -> Again:
        """Reduce all ``source`` into the root's ``target``: the same memory or apart from it; None on the others."""
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], target: Array) -> Again:
        """Cut every rank's ``source`` into blocks of ``counts`` elements; reduce this rank's block into ``target``."""
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def gather(self, task: Task, source: Array, offer: Offer, row: int, result: Result, root: int) -> Again:
        """Put every rank's rows into a result of the root, one after the other; arguments as for `allgather`.

        Args:
            root: who gets them; on the others nobody asks for a result.

        Raises:
            MismatchError: on all ranks: the result does not fit.
        """
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def scatter(self, task: Task, source: Array, offer: Offer, result: Result, root: int) -> Again:
        """Give every rank its part of the root's ``source``.

        Args:
            task: how; its dtype has no meaning.
            source: at the root, the parts one after the other, as bytes; elsewhere nothing.
            offer: of `part_offer`.
            result: returns where the part goes, as bytes, once it is known what that is: what `part_agreed` returns.
            root: whose array it is.

        Raises:
            MismatchError: on all ranks: some expect another part than the root gives.
        """
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def alltoall(self, task: Task, source: Array, offer: Offer, row: int, result: Result) -> Again:
        """Send rows to every rank; the result is what the ranks sent here, in rank order.

        Args:
            task, offer, row, result: as for `allgather`.
            source: the rows for rank 0, 1, ... one after the other.

        Raises:
            MismatchError: as for `allgather`.
        """
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def close(self) -> None:
        """Give the plans back."""
        self._plans.close()


class Itself(Path):
    """One rank: its array is the result."""

    transport = "self"

    @classmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        return call.topology.size == 1

    @classmethod
    def as_reduced(cls, call: Call) -> Call:
        return call

    def allreduce(self, task: Task, shape: tuple[int, ...]) -> Reduction:
        return _Copy()

    def broadcast(self, task: Task, source: Array, target: Array, root: int) -> Again:
        np.copyto(target, source)
        return None

    def allgather(self, task: Task, source: Array, offer: Offer, row: int, result: Result) -> Again:
        np.copyto(result(rows_received(task.signature.text, [offer], 0)).flat(), source)
        return None

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], target: Array) -> Again:
        np.copyto(target, source)
        return None

    alltoall = allgather

    def gather(self, task: Task, source: Array, offer: Offer, row: int, result: Result, root: int) -> Again:
        return self.allgather(task, source, offer, row, result)

    def scatter(self, task: Task, source: Array, offer: Offer, result: Result, root: int) -> Again:
        np.copyto(result(part_agreed(task.signature.text, [offer], root)).flat(), source)
        return None

    def reduce(self, task: Task, source: Array, target: Array | None, root: int) -> Again:
        assert target is not None
        np.copyto(target, source)
        return None


class _Copy(Reduction):
    def run(self, source: Operand, target: Operand) -> None:
        np.copyto(target.view, source.view)


def rows_received(signature: str, offers: Sequence[Offer], rank: int) -> list[int]:
    """Return how many rows a rank gets from each.

    Args:
        signature: of the call.
        offers: of all ranks, in rank order.
        rank: who gets them.

    Raises:
        MismatchError: on all ranks: on some, the array for the result is too small or too large.
    """
    received = [[each.rows_for(rank) for each in offers] for rank in range(len(offers))]
    if all(each.room in (-1, sum(rows)) for each, rows in zip(offers, received, strict=True)):
        return received[rank]
    texts = {}
    for number, (each, rows) in enumerate(zip(offers, received, strict=True)):
        wrong = each.room not in (-1, sum(rows))
        texts[number] = f"{signature}, out has {each.room} rows, and the result {sum(rows)}" if wrong else signature
    raise MismatchError(texts)


def part_offer(part: tuple[tuple[int, ...], DType] | None) -> Offer:
    """Return what a rank tells the others in a scatter: shape and dtype of its part; None: it takes what the root has.

    Raises:
        UnsupportedBufferError: the part has more dimensions than can be told.
    """
    shape, kind = ((), -1) if part is None else (part[0], _DTYPE_NAMES.index(part[1].name))
    if len(shape) > _MOST_DIMENSIONS:
        raise UnsupportedBufferError(f"scatter takes arrays of at most {_MOST_DIMENSIONS} dimensions, got {len(shape)}")
    return Offer(kind, (len(shape), *shape, *[0] * (_MOST_DIMENSIONS - len(shape))))


def part_agreed(signature: str, offers: Sequence[Offer], root: int) -> list[int]:
    """Return what every rank gets in a scatter: the number of the dtype, then the shape; see `part_told`.

    Args:
        signature: of the call.
        offers: of all ranks, in rank order.
        root: which of them gives the parts.

    Raises:
        MismatchError: on all ranks: some expect other parts than the root gives.
    """
    if any(each not in (offers[root], _ANY_PART) for each in offers):
        texts = {}
        for rank, each in enumerate(offers):
            shape, dtype = part_told([each.room, *each.rows[1 : each.rows[0] + 1]])
            told = "" if each == _ANY_PART else f", parts of shape {shape_text(shape)}, {dtype.name}"
            texts[rank] = f"{signature[:-1]}{told})"
        raise MismatchError(texts)
    given = offers[root]
    return [given.room, *given.rows[1 : given.rows[0] + 1]]


def part_told(part: Sequence[int]) -> tuple[tuple[int, ...], DType]:
    """Return shape and dtype of what `part_agreed` returned."""
    return tuple(part[1:]), DTYPES[_DTYPE_NAMES[part[0]]]


#: Of a scatter: a rank that takes whatever the root gives.
_ANY_PART = part_offer(None)


@lru_cache(maxsize=1024)
def work_of_one_byte(algorithm: str, topology: Topology) -> Work:
    """Return the work of the schedules of an allreduce on one byte: all but rounds and barriers grow with the size."""
    cost = algorithms.find(Collective.ALLREDUCE, algorithm).cost(topology)
    home = {rank: number for number, node in enumerate(topology.nodes) for rank in node}
    reduced = direct_steps = leaving = 0.0
    for node in topology.nodes:
        if node[0] >= _RANKS_WALKED:
            break
        out = 0.0
        for rank in node:
            schedule = algorithms.schedule_for(Collective.ALLREDUCE, algorithm, rank, topology)
            block = 1 / schedule.nblocks
            own = 0.0
            for step in schedule.steps:
                own += block * sum(len(each.blocks) for each in (*step.recvs, *step.loads) if each.reduce)
                out += block * sum(len(each.blocks) for each in step.sends if home[each.peer] != home[rank])
            reduced = max(reduced, own)
            direct_steps = max(direct_steps, sum(bool(step.loads or step.stores) for step in schedule.steps))
        leaving = max(leaving, out)
    sent = cost.sent if topology.single_node else leaving
    return Work(cost.steps - direct_steps, sent, 2.0 * (cost.touched > 0), cost.touched, reduced)
