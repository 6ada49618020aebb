"""Calls as values: `Call`, `Problem`, `Choice`, `CallKind`, `Task`.

A `Path` is how schedules are carried out. Whether a path takes a problem, and at what cost, depends on the problem
alone, so all ranks get the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from ringreduce.algorithms import Collective, find, schedule_for
from ringreduce.buffers import DTYPES, DType, wider
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.common.topology import Topology
from ringreduce.transport.shared.board import Signature
from ringreduce.transport.shared.board_memory import MAILED_NBYTES

#: The algorithm name that asks for sums in the order of ranks. Several algorithms add in this order; all give the same
#: bits, whatever the nodes of the ranks, the size, fusion and segments.
DETERMINISTIC = "deterministic"

#: The name under which the MPI library's own allreduce is one more algorithm.
VENDOR = "mpi"

#: The name under which NCCL is one more algorithm, for arrays in device memory.
NCCL = "nccl"

#: Schedules are examined node by node, up to so many ranks: the busiest ranks are among the first.
_RANKS_WALKED = 32


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
    weights: Any = ()


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
    """

    collective: Collective
    nbytes: int
    topology: Topology
    dtype: DType = DTYPES["float32"]
    op: ReduceOp | None = None
    library: Callable[[int, str, ReduceOp], bool] | None = None


class Work(NamedTuple):
    """What an allreduce costs: a factor for each parameter of `ringreduce.collectives.choice.tuning.CostModel`, in its
    order.

    Attributes:
        rounds: of messages that wait for each other.
        sent: bytes as messages: by the busiest rank of one node, or out of the busiest of several nodes.
        barriers: inside a node.
        touched: bytes that the busiest rank loads from and stores to other ranks' memory.
        reduced: bytes that the busiest rank combines with others.
        messages: that the busiest rank sends and receives.
    """

    rounds: float
    sent: float
    barriers: float
    touched: float
    reduced: float
    messages: float = 0.0


class Path(Enum):
    """How the calls of a process set are carried out.

    Attributes:
        transport: what moves the bytes, for people.
        reduces_at_once: whether one rank reduces all terms of an element at once. Otherwise 16-bit floats are reduced
            in float32 and rounded at the end, and averages of integers are summed in 64 bits and divided at the end;
            `ringreduce.collectives.plans.integer_averages` has those whose sums could wrap around.
    """

    transport: str
    reduces_at_once: bool

    #: The array of a rank that is alone is its result.
    ALONE = 1, "self", True
    #: Allreduces by the MPI library.
    LIBRARY = 2, "messages", False
    #: Small allreduces on one node, in one barrier.
    ONE_SHOT = 3, "shared", True
    #: Calls on one node by direct loads and stores.
    SHARED = 4, "shared", True
    #: Reductions in shared memory within the nodes, and as messages between them.
    HIERARCHICAL = 5, "shared+messages", False
    #: Everything as messages between ranks.
    MESSAGES = 6, "messages", False

    def __init__(self, _: int, transport: str, reduces_at_once: bool) -> None:
        self.transport = transport
        self.reduces_at_once = reduces_at_once

    def cost(self, algorithm: str, problem: Problem) -> Work:
        """Return what the algorithm costs in an allreduce.

        Raises:
            ConfigError: there is no such algorithm of ours, or it cannot run there.
        """
        share = _work_of_one_byte(algorithm, problem.topology)
        nbytes = problem.nbytes
        if self is Path.ONE_SHOT:  # The data is beside the flags of one barrier; every rank reads that of all others.
            return Work(rounds=0, sent=0, barriers=1, touched=share.sent * nbytes, reduced=share.reduced * nbytes)
        sent = share.sent * nbytes
        touched = share.touched * nbytes
        reduced = share.reduced * nbytes
        return share._replace(sent=sent, touched=touched, reduced=reduced)

    def as_reduced(self, problem: Problem) -> Problem:
        """Return the problem as this path reduces it: in its own dtype, or in a wider one."""
        dtype = problem.dtype
        op = problem.op
        averages_integers = op is ReduceOp.AVERAGE and dtype.integral
        if self.reduces_at_once or not (averages_integers or (op is not None and dtype.half)):
            return problem
        wide = wider(dtype)
        nbytes = -(-problem.nbytes * wide.itemsize // dtype.itemsize)
        return replace(problem, nbytes=nbytes, dtype=wide, op=ReduceOp.SUM if averages_integers else op)


def path_for(algorithm: str, problem: Problem) -> Path:
    """Return the path that carries out an algorithm for a problem.

    Raises:
        ConfigError: the collective has no such algorithm.
    """
    topology = problem.topology
    if topology.size == 1:
        return Path.ALONE
    if algorithm == VENDOR and is_in_library(problem):
        return Path.LIBRARY
    if algorithm == "one_shot" and topology.single_node and problem.nbytes <= MAILED_NBYTES:
        return Path.ONE_SHOT
    if find(problem.collective, algorithm).cost(topology).touched == 0:
        return Path.MESSAGES
    return Path.SHARED if topology.single_node else Path.HIERARCHICAL


def is_in_library(problem: Problem) -> bool:
    """Return whether the MPI library's own allreduce takes a problem."""
    reduced = Path.LIBRARY.as_reduced(problem)
    if problem.library is None or reduced.op is None:
        return False
    return problem.library(reduced.nbytes // reduced.dtype.itemsize, reduced.dtype.name, reduced.op)


@lru_cache(maxsize=1024)
def _work_of_one_byte(algorithm: str, topology: Topology) -> Work:
    """Return the work of an allreduce of one byte: all but rounds and barriers are multiplied by the size."""
    cost = find(Collective.ALLREDUCE, algorithm).cost(topology)
    reduced = direct_steps = leaving = messages = 0.0
    for number, node in enumerate(topology.nodes):
        if node[0] >= _RANKS_WALKED:
            break
        out = 0.0
        for rank in node:
            schedule = schedule_for(Collective.ALLREDUCE, algorithm, rank, topology=topology)
            block = 1 / schedule.nblocks
            own = 0.0
            for step in schedule.steps:
                own += block * sum(len(move.blocks) for move in (*step.recvs, *step.loads) if move.reduce)
                out += block * sum(len(move.blocks) for move in step.sends if topology.home_of(move.peer) != number)
            reduced = max(reduced, own)
            messages = max(messages, sum(len(step.sends) + len(step.recvs) for step in schedule.steps))
            direct_steps = max(direct_steps, sum(bool(step.loads or step.stores) for step in schedule.steps))
        leaving = max(leaving, out)
    sent = cost.sent if topology.single_node else leaving
    return Work(
        rounds=cost.steps - direct_steps,
        sent=sent,
        barriers=2.0 * (cost.touched > 0),
        touched=cost.touched,
        reduced=reduced,
        messages=messages,
    )


class _Carrier(Protocol):
    """What moves the bytes of a call: a `Path`, or one of those for device memory; ``transport``: its name."""

    @property
    def transport(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm and the path for a call, and why these.

    Attributes:
        algorithm: a name from `ringreduce.collectives.choice.selection.names`; of arrays in device memory also
            ``"nccl"``, ``"staged"``.
        path: what carries it out.
        reason: why, for people.
    """

    algorithm: str
    path: _Carrier
    reason: str

    @property
    def transport(self) -> str:
        """What moves the bytes, for people: ``"shared"``, ``"shared+messages"``, ``"messages"`` or ``"self"``; of
        device memory ``"device+messages"``, ``"nccl"``, or ``"staged"``: through host memory.
        """
        return self.path.transport


class CallKind(NamedTuple):
    """All of a call that decides its task, which calls of the same kind share.

    Attributes:
        collective: which.
        shape: as the signature has it, with a star where ranks may differ; None: not all ranks know shape and dtype.
        argument: what else the signature says.
        dtype: of the elements that are reduced or moved.
        algorithm: what the program asks for.
        op: how they are reduced; without a meaning where nothing is.
        root: of the collective, 0 where there is none.
        nbytes: of the array; 0 where ranks may have arrays of different sizes.
        counts: of a reduce-scatter, the elements for each rank.
        row: elements in a row, where ranks exchange rows.
        codec: the name of the format in which floats travel between nodes; None: as they are.
        weights: of an average that is weighted, in the order of ranks.
    """

    collective: Collective
    shape: tuple[Any, ...] | None
    argument: str
    dtype: DType
    algorithm: str | None
    op: ReduceOp = SUM
    root: int = 0
    nbytes: int = 0
    counts: tuple[int, ...] = ()
    row: int = 1
    codec: str | None = None
    weights: tuple[float, ...] = ()


class Task(NamedTuple):
    """What a path is asked to carry out: all calls of one kind, with the choice that was made for them.

    Attributes:
        kind: of these calls.
        choice: by which algorithm, on which path.
        signature: what the ranks compare.
        dtype: of the elements that are reduced or moved: those of the arrays, or wider ones.
        op: how they are reduced; without a meaning where nothing is.
        is_wide: whether the path reduces in another type than that of the arrays, or divides at the end.
    """

    kind: CallKind
    choice: Choice
    signature: Signature
    dtype: DType
    op: ReduceOp
    is_wide: bool = False
