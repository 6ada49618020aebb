"""What a path is, which carries the calls of a process set; and `Itself`, the path of a rank that is alone.

Each path answers three questions: can it take a call, what would that cost, and carry it out. The first two depend on
nothing but the call, so they are asked of the class, and every rank gets the same answers. The third takes an instance,
which holds what connects the ranks, and the plans that can be used again.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, DType, Operand, wider
from ringreduce.paths.context import Cache, Context, Signature
from ringreduce.reduce_ops import ReduceOp
from ringreduce.topology import Topology

__all__ = [
    "DETERMINISTIC",
    "NCCL",
    "VENDOR",
    "BoundCall",
    "Call",
    "Carrier",
    "Choice",
    "Chosen",
    "Itself",
    "Path",
    "Reduction",
    "Repetition",
    "Task",
    "Work",
    "work_of_one_byte",
]

Array = npt.NDArray[Any]
#: Repeats a call in place on the array that it is given. None: nothing is saved, each call looks everything up.
Repetition = Callable[[Any], object] | None

#: The name that asks for sums in the order of ranks: the same bits from every algorithm that it stands for, so that
#: they depend neither on the nodes of the ranks nor on size, fusion or segments.
DETERMINISTIC = "deterministic"

#: The name under which the MPI library's own allreduce is one more algorithm.
VENDOR = "mpi"

#: The name under which NCCL is one more algorithm, for arrays in device memory.
NCCL = "nccl"

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
        return self.op is ReduceOp.AVERAGE and self.dtype.kind in ("int", "uint", "bool")

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
        algorithm: a name from `ringreduce.selection.names`; of arrays in device memory also ``"nccl"``, ``"kernels"``,
            ``"staged"``.
        path: what runs it.
        reason: why, in words.
    """

    algorithm: str
    path: Carrier
    reason: str

    @property
    def transport(self) -> str:
        """What moves the bytes, for people: ``"shared"``, ``"shared+messages"``, ``"messages"`` or ``"self"``; of
        device memory ``"device"``, ``"device+messages"``, ``"nccl"``, or ``"staged"``: through host memory.
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


class Work(NamedTuple):
    """What an allreduce costs: the factors of the parameters of `ringreduce.autotune.Model`, in the same order.

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

    def repetition(self, array: Any, target: Operand) -> Repetition:
        """Return what reduces this array in place again, with everything looked up; it does not hold the array.

        Args:
            array: the caller's.
            target: its memory.
        """
        return None


class BoundCall:
    """An in-place call that was looked up once, for as long as its array lives.

    Attributes:
        array: a weak reference to it.
        op, algorithm: the arguments, as they were given.
        nbytes: of its array.
        still_there: returns whether an array, known to be that one, has the memory and layout that it had.
        run: repeats the call.
    """

    __slots__ = ("algorithm", "array", "nbytes", "op", "run", "still_there")

    def __init__(
        self,
        array: Any,
        target: Operand,
        op: ReduceOp | str,
        algorithm: str | None,
        run: Callable[[Any], object],
        forget: Callable[[object], object],
    ) -> None:
        self.array = weakref.ref(array, forget)
        self.op = op
        self.nbytes = target.nbytes
        self.algorithm = algorithm
        self.run = run
        self.still_there: Callable[[Any], bool]
        if isinstance(array, np.ndarray):  # it can be given another shape and dtype; a weak reference forbids `resize`
            shape, dtype = array.shape, array.dtype
            self.still_there = lambda same: same.shape == shape and same.dtype is dtype
        else:  # `set_`, `resize_`, ``data =`` and `t_` change a tensor
            address, shape, strides = target.address, target.shape, array.stride()
            self.still_there = lambda same: (
                same.data_ptr() == address and same.shape == shape and same.stride() == strides
            )


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
    run: Callable[..., object]
    reduction: Reduction | None = None


class Path(ABC):
    """Carries calls of a process set.

    Arrays are flat, C-contiguous and of storage types, except in allreduces.
    """

    transport: ClassVar[str]
    #: Whether 16-bit floats are reduced as they are, with one rounding; otherwise in float32, and rounded at the end.
    reduces_halves: ClassVar[bool] = False

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
        if call.averages_integers or (call.op is not None and call.dtype.half and not cls.reduces_halves):
            return call.widened()
        return call

    @abstractmethod
    def allreduce(self, task: Task, shape: tuple[int, ...]) -> Reduction:
        """Return what reduces arrays of this shape."""

    def broadcast(self, task: Task, data: Array, root: int) -> None:
        """Copy the root's ``data`` into everyone's."""
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def allgather(self, task: Task, mine: Array, counts: Sequence[int], out: Array) -> None:
        """Put rank q's ``counts[q]`` elements into ``out`` one after the other; ``mine`` holds this rank's."""
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], out: Array) -> None:
        """Cut every rank's ``source`` into blocks of ``counts`` elements; reduce this rank's block into ``out``."""
        raise NotImplementedError  # of a path that takes allreduces alone; nobody asks it

    def alltoall(self, task: Task, source: Array, counts: Array, out: Array) -> None:
        """Send block q of ``source`` to rank q; ``out`` is what the ranks sent here, in rank order.

        Args:
            task: how.
            source: the blocks for rank 0, 1, ... one after the other.
            counts: (size, size) elements: ``counts[i, j]`` is what rank i sends to rank j.
            out: takes ``counts[:, rank].sum()`` elements.
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

    def broadcast(self, task: Task, data: Array, root: int) -> None:
        pass

    def allgather(self, task: Task, mine: Array, counts: Sequence[int], out: Array) -> None:
        np.copyto(out, mine)

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], out: Array) -> None:
        np.copyto(out, source)

    def alltoall(self, task: Task, source: Array, counts: Array, out: Array) -> None:
        np.copyto(out, source)


class _Copy(Reduction):
    def run(self, source: Operand, target: Operand) -> None:
        np.copyto(target.view, source.view)


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
