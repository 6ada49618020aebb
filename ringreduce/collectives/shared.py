"""The path through shared memory: each rank of a node loads from the others, or stores to them.

Every rank publishes where its input and its result are. Other ranks load from and store to the arena directly. They can
copy private memory, where the system allows that (`ringreduce.transport.shared.private`). Where it does not, inputs are
copied to the arena first, and large allreduces pass through the board's staging areas, piece by piece.

Plans are bound to addresses and keep no array alive: a plan runs only while the caller holds its arrays.
"""

from __future__ import annotations

from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand
from ringreduce.collectives.call import Problem, Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.loads import Loads
from ringreduce.collectives.path import Path, touches_memory
from ringreduce.collectives.plan import Plan
from ringreduce.collectives.two_shot import NodeScratch, ToRoot, plan_two_shot

__all__ = ["SharedMemoryPath"]


class SharedMemoryPath(Path):
    """Calls on one node by direct loads and stores."""

    transport = "shared"
    reduces_at_once = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._scratch = NodeScratch(context.topology.size)

    @classmethod
    def takes(cls, algorithm: str, problem: Problem) -> bool:
        return problem.topology.single_node and touches_memory(algorithm, problem)

    def reduction(self, task: Task, source: Operand, target: Operand | None) -> Plan:
        context, scratch = self._context, self._scratch
        if task.problem.collective is Collective.ALLREDUCE:
            assert target is not None
            return plan_two_shot(context, scratch, task, source, target)
        key = "shared", task.signature.code, source.address, -1 if target is None else target.address
        # On one node the hierarchical algorithms are the two-shot, too.
        if task.problem.collective is Collective.REDUCE and task.choice.algorithm != "load":
            return context.plans.get(key, lambda: ToRoot(context, scratch, task, source, target))
        return context.plans.get(key, lambda: Loads(context, scratch, task, source, ()))

    def movement(self, task: Task, source: Operand, numbers: tuple[int, ...]) -> Plan:
        context, scratch = self._context, self._scratch
        key = "shared", task.signature.code, source.address, source.view.size, numbers
        return context.plans.get(key, lambda: Loads(context, scratch, task, source, numbers))
