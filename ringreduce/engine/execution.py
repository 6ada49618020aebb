"""Runs operations that all ranks have submitted, on the engine's own communicator."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DType, Operand, divide, divide_toward_zero, narrow, typed, widen
from ringreduce.collectives import Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.reduce_ops import AVERAGE, MIN, PRODUCT, SUM, ReduceOp
from ringreduce.engine.operations import BlockingCall, Gather, InPlace, Operation, Reduction
from ringreduce.engine.orders import Kind, OperationSignature, Run

__all__ = ["Executor", "RefusedError"]

_BUFFERS_NBYTES = 64 << 20  # communication buffers that are kept for the next time

# A bfloat16 is kept as its bits.
_BFLOAT16_ONE, _BFLOAT16_INFINITY, _BFLOAT16_SIGN = 0x3F80, 0x7F80, 0x8000


class RefusedError(Exception):
    """This rank has told the others in a collective that it cannot run an operation.

    Attributes:
        reason: why.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Executor:
    """Runs operations. Reductions that travel together are packed into one buffer, reduced and unpacked.

    Args:
        communicator: used by nobody else.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._size = communicator.size
        self._buffers: OrderedDict[tuple[str, int], tuple[Any, npt.NDArray[Any]]] = OrderedDict()

    def run(self, order: Run, operations: Sequence[Operation | None]) -> None:
        """Run the operations of an order, and set their results.

        Args:
            order: what all ranks run now.
            operations: this rank's own, in the order's order; None for each if this rank has joined.

        Raises:
            RefusedError: this rank could not begin; the others have been told why.
        """
        first = operations[0]
        signature = order.operations[0].signature
        if signature.kind is Kind.IN_PLACE:
            assert first is None or isinstance(first, InPlace)
            self._reduce_in_place(signature, first, order.active)
            return
        if signature.kind is Kind.GATHER:
            assert first is None or isinstance(first, Gather)
            self._gather(signature, first)
            return
        if isinstance(first, BlockingCall):
            first.result = first.run(self._communicator)
            return
        reductions = [each for each in operations if isinstance(each, Reduction)]
        try:
            for each in reductions:
                if each.before is not None:
                    each.before()
        except Exception as error:
            self._communicator.refuse("allreduce", error)
            raise RefusedError(error) from error
        everyone = order.active == self._size
        if everyone and len(reductions) == 1 and len(reductions[0].sources) == 1:
            (only,) = reductions
            source, target = only.sources[0], only.targets[0]
            if source is target:  # repeated with the same object, this is fastest
                self._communicator.allreduce(source, only.op, out=target)
            else:
                self._communicator.allreduce_operands(only.given[0], only.taken[0], only.op)
        else:
            self._reduce_packed(order, reductions)
        for each in reductions:
            _conclude(each)

    def _reduce_in_place(self, signature: OperationSignature, own: InPlace | None, active: int) -> None:
        """Reduce arrays one by one, this rank's or, after it has joined, neutral elements."""
        op = ReduceOp(signature.op)
        divisor = self._communicator.config.conventions.averaged_over(active, self._size) if op is AVERAGE else 0
        wire = signature.wire or None
        with nullcontext() if own is None or own.within is None else own.within():
            for index, (name, count) in enumerate(signature.counts):
                dtype = DType.of(name)
                array = self._neutral_array(op, dtype, count) if own is None else own.arrays[index]
                feedback = own.feedbacks[index] if own is not None and own.feedbacks else None
                if own is None and signature.feedback:
                    feedback = Feedback(keep=False)  # all ranks give one, or none does
                if 0 < divisor < self._size and wire is None:
                    view = Operand.of(array).flat()
                    self._average_over(divisor, dtype, count, [(view, view)])
                    continue
                kind = SUM if 0 < divisor < self._size else op
                self._communicator.allreduce(array, kind, out=array, wire=wire, feedback=feedback)
                if kind is not op:
                    divide(Operand.of(array).flat(), divisor)
        if own is not None:
            own.active = active

    def _gather(self, signature: OperationSignature, own: Gather | None) -> None:
        """Gather rows of all ranks, none of this one after it has joined."""
        with nullcontext() if own is None or own.within is None else own.within():
            if own is not None:
                own.result = [self._communicator.allgather(array) for array in own.arrays]
                return
            for name, length in signature.counts:
                dtype = DType.of(name)
                self._communicator.allgather(typed(np.empty(0, np.uint8), dtype).reshape(0, length))

    def _neutral_array(self, op: ReduceOp, dtype: DType, count: int) -> Any:
        memory = np.empty(count * dtype.itemsize, np.uint8)
        memory.view(dtype.storage)[:] = _neutral(op, dtype)
        return typed(memory, dtype)

    def _reduce_packed(self, order: Run, reductions: Sequence[Reduction]) -> None:
        op = ReduceOp(order.operations[0].signature.op)
        arrays: dict[str, list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]] = {}
        for reduction in reductions:
            for given, taken in zip(reduction.given, reduction.taken, strict=True):
                arrays.setdefault(given.dtype.name, []).append((given.view, taken.view))
        for dtype, count in order.totals.items():
            self._reduce(op, DType.of(dtype), count, arrays.get(dtype, []), order.active)

    def _reduce(
        self,
        op: ReduceOp,
        dtype: DType,
        count: int,
        arrays: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
        active: int,
    ) -> None:
        """Reduce arrays of one dtype together; a rank that has joined has none, and contributes neutral elements."""
        if op is AVERAGE:
            averaged_over = self._communicator.config.conventions.averaged_over(active, self._size)
            if averaged_over < self._size:
                self._average_over(averaged_over, dtype, count, arrays)
                return
        instruments = self._communicator.instruments
        buffer, flat = self._buffer(dtype, count)
        if arrays:
            _pack(flat, [source for source, _ in arrays])
        else:
            flat[:] = _neutral(op, dtype)
        if instruments.observers:
            instruments.step(f"pack {len(arrays)} arrays")
        self._communicator.allreduce(buffer, op, out=buffer)
        _unpack(flat, [target for _, target in arrays])
        if instruments.observers:
            instruments.step(f"unpack {len(arrays)} arrays")

    def _average_over(
        self, divisor: int, dtype: DType, count: int, arrays: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
    ) -> None:
        """Average over fewer ranks than there are: sum in a dtype wide enough, then divide by their number."""
        own: npt.NDArray[Any] = np.zeros(count, dtype.storage)
        _pack(own, [source for source, _ in arrays])
        exact = dtype.half or dtype.integral
        total = widen(own, dtype) if exact else own
        self._communicator.allreduce(total, SUM, out=total)
        if total.dtype.kind in "iu":
            divide_toward_zero(total, divisor)
        else:
            divide(total, divisor)
        narrow(total, dtype, own)
        _unpack(own, [target for _, target in arrays])

    def _buffer(self, dtype: DType, count: int) -> tuple[Any, npt.NDArray[Any]]:
        """Return a communication buffer: the array for the communicator, and a flat view of its storage.

        Equal arguments get the same buffer, since calls that are repeated with one object are fastest.
        """
        key = dtype.name, count
        found = self._buffers.pop(key, None)
        if found is None:
            memory = self._communicator.empty(count * dtype.itemsize, np.uint8)
            found = typed(memory, dtype), memory.view(dtype.storage)
        self._buffers[key] = found
        while len(self._buffers) > 1 and sum(flat.nbytes for _, flat in self._buffers.values()) > _BUFFERS_NBYTES:
            self._buffers.popitem(last=False)
        return found


def _conclude(reduction: Reduction) -> None:
    """Set the result; if `after` fails, the error is this rank's alone, and the ranks stay in step."""
    try:
        reduction.result = reduction.after() if reduction.after is not None else reduction.targets
    except Exception as error:
        reduction.error = error


def _pack(flat: npt.NDArray[Any], sources: Iterable[npt.NDArray[Any]]) -> None:
    start = 0
    for source in sources:
        np.copyto(flat[start : start + source.size].reshape(source.shape), source)
        start += source.size


def _unpack(flat: npt.NDArray[Any], targets: Iterable[npt.NDArray[Any]]) -> None:
    start = 0
    for target in targets:
        np.copyto(target, flat[start : start + target.size].reshape(target.shape))
        start += target.size


def _neutral(op: ReduceOp, dtype: DType) -> Any:
    """Return the neutral element of an op, in the storage type of a dtype."""
    if op in (SUM, AVERAGE):
        return 0
    if op is PRODUCT:
        return _BFLOAT16_ONE if dtype.name == "bfloat16" else 1
    largest = op is MIN
    if dtype.kind == "bool":
        return largest
    if dtype.kind in ("int", "uint"):
        limits = np.iinfo(dtype.storage)
        return limits.max if largest else limits.min
    if dtype.name == "bfloat16":
        return _BFLOAT16_INFINITY if largest else _BFLOAT16_INFINITY | _BFLOAT16_SIGN
    infinity = np.inf if largest else -np.inf
    return complex(infinity, infinity) if dtype.kind == "complex" else infinity
