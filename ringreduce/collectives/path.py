"""Paths: what carries out the calls of a process set. And `SelfPath`, the path of a rank that is alone.

The class says whether it takes a problem and what that costs. The answers depend on nothing but the problem, so every
rank gets the same ones. An instance makes plans: as a `Reducer`, as a `Mover`, or both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand
from ringreduce.collectives.call import Problem, Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.plan import Place, Plan
from ringreduce.collectives.rows import agreed_part, received_rows
from ringreduce.common.topology import Topology

__all__ = ["Mover", "Path", "Reducer", "SelfPath", "Work", "touches_memory", "work_of_one_byte"]

#: Schedules are examined node by node, up to so many ranks: the busiest ranks are among the first.
_RANKS_WALKED = 32


class Work(NamedTuple):
    """What an allreduce costs: a factor for each parameter of `ringreduce.collectives.tuning.Model`, in its order.

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


class Reducer(Protocol):
    """Carries out what reduces: allreduce, reduce, reduce_scatter."""

    def reduction(self, task: Task, source: Operand, target: Operand | None) -> Plan:
        """Find or make the plan of a reduction. Local.

        Args:
            task: what to do.
            source: this rank's input, flat.
            target: its result, flat: the same memory as ``source`` (for a reduce_scatter, as this rank's part of it) or
                apart from it; None on a rank that gets none.
        """


class Mover(Protocol):
    """Carries out what moves data: broadcast, allgather, gather, scatter, alltoall."""

    def movement(self, task: Task, source: Operand, numbers: tuple[int, ...]) -> Plan:
        """Find or make the plan of a movement. Local.

        `Plan.run` passes its ``place`` the rows that come from each rank; of a scatter, what `agreed_part` returns; of
        a broadcast, nothing.

        Args:
            task: what to do.
            source: what this rank gives, flat.
            numbers: what it tells the others about that; see `ringreduce.collectives.rows`. Empty in a broadcast.
        """


class Path(ABC):
    """Carries out calls of a process set.

    Attributes:
        transport: what moves the bytes, for people.
        reduces_at_once: whether one rank reduces all terms of an element at once. Otherwise 16-bit floats are reduced
            in float32 and rounded at the end, and averages of integers are summed in 64 bits and divided at the end.

    Args:
        context: the ranks.
    """

    transport: ClassVar[str]
    reduces_at_once: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self._context = context

    @classmethod
    @abstractmethod
    def takes(cls, algorithm: str, problem: Problem) -> bool:
        """Return whether this carries out the algorithm for a problem. The first of `PATHS` that does is taken."""

    @classmethod
    def cost(cls, algorithm: str, problem: Problem) -> Work:
        """Return what the algorithm costs in an allreduce on this path.

        Raises:
            ConfigError: there is no such algorithm of ours, or it cannot run there.
        """
        share, nbytes = work_of_one_byte(algorithm, problem.topology), problem.nbytes
        return Work(share.rounds, share.sent * nbytes, share.barriers, share.touched * nbytes, share.reduced * nbytes)

    @classmethod
    def as_reduced(cls, problem: Problem) -> Problem:
        """Return the problem as this path reduces it: in its own dtype, or in a wider one."""
        return problem.widened() if problem.wants_wider and not cls.reduces_at_once else problem


class SelfPath(Path):
    """One rank: its array is the result."""

    transport = "self"

    @classmethod
    def takes(cls, algorithm: str, problem: Problem) -> bool:
        return problem.topology.size == 1

    @classmethod
    def as_reduced(cls, problem: Problem) -> Problem:
        return problem

    def reduction(self, task: Task, source: Operand, target: Operand | None) -> Plan:
        return _Copy(task, ())

    def movement(self, task: Task, source: Operand, numbers: tuple[int, ...]) -> Plan:
        return _Copy(task, numbers)


class _Copy(Plan):
    """The copy of the input to the result."""

    reusable = False

    def __init__(self, task: Task, numbers: tuple[int, ...]) -> None:
        self._task, self._numbers = task, numbers

    def run(self, source: Operand, place: Place) -> None:
        task, told = self._task, [self._numbers]
        if task.problem.collective is Collective.SCATTER:
            given: Sequence[int] = agreed_part(task.signature.text, told, 0)
        else:
            given = received_rows(task.signature.text, told, 0) if self._numbers else ()
        target = place(given)
        if target.address != source.address:
            np.copyto(target.view, source.view)


def touches_memory(algorithm: str, problem: Problem) -> bool:
    """Return whether the algorithm loads from the memory of other ranks, or stores to it."""
    return algorithms.find(problem.collective, algorithm).cost(problem.topology).touched > 0


@lru_cache(maxsize=1024)
def work_of_one_byte(algorithm: str, topology: Topology) -> Work:
    """Return the work of an allreduce of one byte: all but rounds and barriers are multiplied by the size."""
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
