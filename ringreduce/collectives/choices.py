"""Which algorithm and path calls of a process set would take, and why: for programs, people and tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import DType
from ringreduce.collectives.call import NCCL, Choice, Problem
from ringreduce.collectives.choice.selection import choose, explain, forced, names, with_times
from ringreduce.collectives.choice.tuning import Table
from ringreduce.collectives.context import Context
from ringreduce.collectives.operands import Devices, ordinal
from ringreduce.common.arguments import whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM, ReduceOp


class Choices:
    """The part of a `Communicator` that says which algorithm and path calls take, and why."""

    def __init__(self, context: Context, gpu: Devices) -> None:
        self._context = context
        self.gpu = gpu
        self._table: Table | None = None

    def algorithms(
        self, collective: Collective | str = Collective.ALLREDUCE, *, device: str | None = None
    ) -> list[str]:
        """Return the names of the algorithms that can run ``collective`` here.

        Args:
            collective: which.
            device: where the arrays are, as for `Communicator.empty`. In device memory ``"nccl"`` can be asked for,
                too; where NCCL cannot run, the ranks use another path.
        """
        kind = _collective(collective)
        ours = names(kind, self._context.topology, vendor=self._context.messages.offers_allreduce is not None)
        on_device = device not in (None, "cpu") and kind is Collective.ALLREDUCE
        return [*ours, NCCL] if on_device else ours

    def use(self, table: Table | None) -> None:
        """Choose from a tuning table from now on, None: by the built-in rules. All ranks must use the same."""
        self._table = table
        self._context.plans.forget()

    def choose(
        self,
        collective: Collective | str,
        nbytes: int,
        dtype: Any = np.float32,
        algorithm: str | None = None,
        *,
        op: ReduceOp | str = SUM,
    ) -> Choice:
        """Return what would carry out ``collective`` on arrays in host memory, and why.

        Args:
            collective: which.
            nbytes: of the array of each rank; of the largest, where they differ.
            dtype: of its elements.
            algorithm: as for `Communicator.allreduce`.
            op: as for `Communicator.allreduce`; without effect where nothing is reduced.
        """
        problem = self._problem(collective, nbytes, dtype, op)
        return with_times(self._choice(problem, algorithm), problem, self._table)

    def _choice(self, problem: Problem, algorithm: str | None) -> Choice:
        return choose(problem, self._context.config, algorithm, self._table)

    def path_on_device(self, dtype: Any, op: ReduceOp | str = SUM, algorithm: str | None = None) -> Choice:
        """Return what carries out an allreduce of arrays in device memory, once there was one with this ``algorithm``.

        Args:
            dtype: of their elements.
            op: as for `Communicator.allreduce`.
            algorithm: as for `Communicator.allreduce`. One for host memory is named in the choice, with the transport
                ``"staged"``.
        """
        if self._context.topology.size == 1:
            return self.choose(Collective.ALLREDUCE, 0, dtype, op=op)
        return self.gpu.choice(DType.of(dtype), ReduceOp.parse(op), algorithm)

    def transport_name(self, algorithm: str, collective: Collective | str = Collective.ALLREDUCE) -> str:
        """Return what moves the bytes of ``algorithm`` here: ``"shared"``, ``"mpi"``, ``"shared+mpi"``, ...

        Args:
            algorithm: a name from `algorithms`; ``"messages"``: of `Communicator.send` and its kind.
            collective: of the algorithm.
        """
        if algorithm == "messages":
            return self._context.messages.name
        if algorithm == NCCL:
            return algorithm
        choice = forced(self._problem(collective, 1), algorithm)
        return choice.transport.replace("messages", self._context.messages.name)

    def explain(
        self,
        nbytes: int,
        dtype: Any = np.float32,
        collective: Collective | str = Collective.ALLREDUCE,
        *,
        op: ReduceOp | str = SUM,
        device: str | None = None,
    ) -> str:
        """Say in words what would carry out ``collective`` on ``nbytes`` bytes per rank, why, and what else could.

        Args:
            nbytes: of the array.
            dtype: of its elements.
            collective: which.
            op: as for `choose`.
            device: ``"cuda"`` for an array in device memory, whose path is known after the first call. None, or
                ``"cpu"``: for one in host memory; a second line is about device memory, if that was used.
        """
        problem = self._problem(collective, nbytes, dtype, op)
        if device not in (None, "cpu"):
            ordinal(device)
            where = f"in device memory on {problem.topology.describe()}"
            on_device = self.gpu.explain(problem.collective)
            return f"{problem.collective.value} of {problem.nbytes} bytes {where}: {on_device}"
        why = explain(problem, self._context.config, self._table)
        return why + self.gpu.remark(problem.collective)

    def _problem(
        self, collective: Collective | str, nbytes: int, dtype: Any = np.float32, op: ReduceOp | str = SUM
    ) -> Problem:
        kind = _collective(collective)
        count = whole_number("nbytes", nbytes, 0)
        return self._context.problem(kind, count, DType.of(dtype), ReduceOp.parse(op))


def _collective(name: Collective | str) -> Collective:
    try:
        return Collective(name)
    except ValueError:
        known = ", ".join(each.value for each in Collective)
        raise ConfigError(f"unknown collective {name!r}; choose one of {known}") from None
