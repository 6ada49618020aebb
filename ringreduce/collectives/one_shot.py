"""The path of small allreduces on one node: every rank puts its data beside its flag, and reads the others'.

`verify` proves the schedule of `one_shot`, which says who reads what. This path carries it out in one barrier, with the
data next to the flag, which `BoundSchedule` cannot.
"""

from __future__ import annotations

from ringreduce.buffers import Operand, kernels_for
from ringreduce.collectives.call import Problem, Task
from ringreduce.collectives.context import Context
from ringreduce.collectives.path import Path, Work, work_of_one_byte
from ringreduce.collectives.plan import Place, Plan
from ringreduce.transport.shared.board import MAILBOX_NBYTES

__all__ = ["OneShotPath"]


class OneShotPath(Path):
    """Small allreduces on one node, in one barrier."""

    transport = "shared"
    reduces_at_once = True

    @classmethod
    def takes(cls, algorithm: str, problem: Problem) -> bool:
        small = cls.as_reduced(problem).nbytes <= MAILBOX_NBYTES
        return algorithm == "one_shot" and problem.topology.single_node and small

    @classmethod
    def cost(cls, algorithm: str, problem: Problem) -> Work:
        share, nbytes = work_of_one_byte(algorithm, problem.topology), problem.nbytes
        # The data is beside the flags of one barrier; every rank reads the data of all others.
        return Work(0, 0, 1, share.sent * nbytes, share.reduced * nbytes)

    def reduction(self, task: Task, source: Operand, target: Operand | None) -> Plan:
        context = self._context
        return context.plans.get(("one_shot", task.signature.code), lambda: _OneShot(context, task, source.view.size))


class _OneShot(Plan):
    """The allreduce of so many elements, in memory of any kind: every rank reduces all mailboxes, in rank order."""

    def __init__(self, context: Context, task: Task, count: int) -> None:
        board = self._board = context.board
        self._instruments = context.instruments
        self._arrival = task.signature.arrival
        mailboxes = [board.mailboxes(parity, task.dtype.storage, (count,)) for parity in (0, 1)]
        kernels = kernels_for(task.dtype, task.op, context.topology.size)
        self._mine = [each[board.index] for each in mailboxes]
        self._reduce = [kernels.combine(each) for each in mailboxes]

    def run(self, source: Operand, place: Place) -> None:
        board = self._board
        parity = board.number + 1 & 1
        self._mine[parity][...] = source.view
        board.arrive(self._arrival)
        observed = self._instruments.observers
        if observed:
            self._instruments.step("post and meet")
        self._reduce[parity](place(()).view)
        if observed:
            self._instruments.step("reduce")
