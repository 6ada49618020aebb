"""The path of small allreduces on one node: every rank puts its data beside its flag, and reads the others'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ringreduce.buffers import Operand, kernels_for
from ringreduce.collectives.fused import Mailbox as Boxes
from ringreduce.collectives.path import Call, Path, Reduction, Task, Work, work_of_one_byte
from ringreduce.transport.shared.board import MAILBOX_NBYTES

__all__ = ["Mailbox"]


class Mailbox(Path):
    """Small allreduces on one node, in one barrier."""

    transport = "shared"
    reduces_at_once = True

    @classmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        small = cls.as_reduced(call).nbytes <= MAILBOX_NBYTES
        return algorithm == "one_shot" and call.topology.single_node and small

    @classmethod
    def cost(cls, algorithm: str, call: Call) -> Work:
        share, nbytes = work_of_one_byte(algorithm, call.topology), call.nbytes
        # The data is beside the flags of one barrier, and every rank reads that of all others.
        return Work(0, 0, 1, share.sent * nbytes, share.reduced * nbytes)

    def allreduce(self, task: Task, shape: tuple[int, ...]) -> _OneShot:
        context = self._context
        kernels = kernels_for(task.dtype, task.op, context.topology.size)
        storage, text = task.dtype.storage, task.signature.text
        return _OneShot(Boxes(context.board, context.instruments, text, storage, shape, kernels))


class _OneShot(Reduction):
    """The allreduce of arrays of one shape; it takes the arrays when it runs."""

    def __init__(self, plan: Boxes) -> None:
        self._run = plan.run

    def run(self, source: Operand, target: Operand) -> None:
        self._run(source.view, target.view)

    def repetition(self, source: Operand, target: Operand) -> Callable[[], object]:
        return partial(self._run, source.view, target.view)
