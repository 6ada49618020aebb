"""The path of small calls on one node: every rank puts its data beside its flag, and reads the others'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.algorithms.fused import Mailbox as Boxes
from ringreduce.buffers import Operand, kernels_for
from ringreduce.partition import Partition
from ringreduce.paths.context import Signature
from ringreduce.paths.path import Call, Path, Reduction, Repetition, Task, Work, work_of_one_byte
from ringreduce.transport.board import MAILBOX_NBYTES

__all__ = ["Mailbox"]

Array = npt.NDArray[Any]


class Mailbox(Path):
    """Small calls on one node, in one barrier."""

    transport = "shared"
    reduces_halves = True

    @staticmethod
    def holds(nbytes: int) -> bool:
        """Return whether so many bytes fit into a mailbox."""
        return nbytes <= MAILBOX_NBYTES

    @classmethod
    def takes(cls, algorithm: str, call: Call) -> bool:
        fitting = "one_shot" if call.collective is Collective.ALLREDUCE else "load"
        return algorithm == fitting and call.topology.single_node and cls.holds(cls.as_reduced(call).nbytes)

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

    def broadcast(self, task: Task, data: Array, root: int) -> None:
        am_root = self._context.rank == root
        boxes = self._swap(task.signature, data if am_root else data[:0], data.size)
        if not am_root:
            np.copyto(data, boxes[root])

    def allgather(self, task: Task, mine: Array, counts: Sequence[int], out: Array) -> None:
        boxes = self._swap(task.signature, mine, max(counts))
        for part, box in zip(Partition.of_sizes(counts).segment, boxes, strict=True):
            np.copyto(out[part], box[: part.stop - part.start])

    def reduce_scatter(self, task: Task, source: Array, counts: Sequence[int], out: Array) -> None:
        own = Partition.of_sizes(counts).segment[self._context.rank]
        boxes = self._swap(task.signature, source, source.size)
        kernels_for(task.dtype, task.op, self._context.topology.size).combine([box[own] for box in boxes])(out)

    def alltoall(self, task: Task, source: Array, counts: Array, out: Array) -> None:
        rank = self._context.rank
        boxes = self._swap(task.signature, source, int(counts.sum(axis=1).max()))
        receiving = Partition.of_sizes(counts[:, rank].tolist()).segment
        for peer, part in enumerate(receiving):
            sent = Partition.of_sizes(counts[peer].tolist()).segment[rank]
            np.copyto(out[part], boxes[peer][sent])

    def _swap(self, signature: Signature, source: Array, count: int) -> list[Array]:
        """Give this rank's elements to the others and return everyone's; ``count``: of the rank that gives most."""
        context, storage = self._context, source.dtype
        boxes: Boxes = self._plans.get(
            (signature.code, count),
            lambda: Boxes(context.board, context.instruments, signature.text, storage, (count,)),
        )
        return boxes.swap(source)


class _OneShot(Reduction):
    """The allreduce of arrays of one shape; it takes the arrays when it runs."""

    def __init__(self, plan: Boxes) -> None:
        self._run = plan.run

    def run(self, source: Operand, target: Operand) -> None:
        self._run(source.view, target.view)

    def repetition(self, array: Any, target: Operand) -> Repetition:
        run = self._run
        if array is target.view:
            return lambda same: run(same, same)
        if isinstance(array, np.ndarray):  # bfloat16: a view of it that is kept would keep the array
            return None
        view = target.view
        return lambda _: run(view, view)
