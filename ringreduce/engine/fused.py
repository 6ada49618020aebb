"""What operations share when they run: arrays that are packed into one buffer, and the part of joined ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import (
    DType,
    Operand,
    divide,
    divide_toward_zero,
    divide_wrapped,
    narrow,
    operand_of,
    typed,
    widen,
)
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives import Feedback
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.reduce_ops import AVERAGE, BAND, BOR, BXOR, LAND, LOR, LXOR, MIN, PRODUCT, SUM, ReduceOp

_BUFFERS_NBYTES = 64 << 20  # communication buffers that are kept for the next time

#: What is packed, reduced and unpacked at once of a large group: it stays in the cache of a core meanwhile.
_PIECE_NBYTES = 1 << 20

# A bfloat16 is kept as its bits.
_BFLOAT16_ONE = 0x3F80
_BFLOAT16_INFINITY = 0x7F80
_BFLOAT16_SIGN = 0x8000

#: The memory of a source, and that of its target.
_Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class Travel(NamedTuple):
    """How arrays travel that are reduced where they are.

    Attributes:
        wire: the format in which they do; None: as they are.
        feedbacks: what rounding to that format keeps, for each array; none where nothing is kept.
        weights: as for `Communicator.allreduce`, where all ranks are active.
    """

    wire: str | None = None
    feedbacks: Sequence[Feedback] = ()
    weights: Sequence[float] = ()


AS_THEY_ARE = Travel()


class Executor:
    """Reduces arrays for operations that all ranks have submitted.

    Args:
        communicator: used by nobody else.

    Attributes:
        communicator: the argument.
        size: the number of ranks.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.size = communicator.size
        self._buffers: OrderedDict[tuple[str, tuple[tuple[int, ...], ...]], _Buffer] = OrderedDict()

    def reduce_in_place(self, op: ReduceOp, arrays: Sequence[Any], travel: Travel, active: int) -> None:
        """Reduce arrays one by one, each where it is; as many and of the same dtypes and lengths on all ranks.

        Args:
            op: how.
            arrays: contiguous.
            travel: how they travel.
            active: over so many ranks are averages.
        """
        divisor = self._divisor(op, active)
        for index, array in enumerate(arrays):
            how: dict[str, Any] = {
                "compression": travel.wire,
                "feedback": travel.feedbacks[index] if travel.feedbacks else None,
            }
            if active == self.size:
                self.communicator.allreduce(array, op, out=array, weights=travel.weights, **how)
                continue
            # Ranks that have joined have no array on a GPU to reduce with.
            with self._in_host_memory(array) as given:
                if not divisor:
                    self.communicator.allreduce(given, op, out=given, **how)
                elif travel.wire is None and (given.dtype.half or given.dtype.integral):  # the sum needs a wider dtype
                    flat = given.flat()
                    self._reduce_pairs(op, given.dtype, flat.size, pairs=[(flat, flat)], divisor=divisor)
                else:
                    self.communicator.allreduce(given, SUM, out=given, **how)
                    divide(given.flat(), divisor)

    def _in_host_memory(self, array: Any) -> AbstractContextManager[Operand]:
        """Give an array in host memory in place of one on a GPU, which has its content in the end."""
        operand = operand_of(array)
        if isinstance(operand, DeviceOperand):
            return self.communicator.gpu.on_host(operand, fetch=True, store=True)
        return nullcontext(operand)

    def reduce_packed(
        self, op: ReduceOp, totals: Mapping[str, int], operands: Sequence[tuple[Operand, Operand]], active: int
    ) -> None:
        """Reduce all arrays of one dtype together.

        Args:
            op: how.
            totals: how many elements there are of each dtype; the same on all ranks, in the same order.
            operands: each source with its target; none on a rank that has joined, which contributes neutral elements.
            active: over so many ranks are averages.
        """
        pairs: dict[str, list[_Pair]] = {}
        for source, target in operands:
            pairs.setdefault(source.dtype.name, []).append((source.view, target.view))
        divisor = self._divisor(op, active)
        for name, count in totals.items():
            self._reduce_pairs(op, DType.of(name), count, pairs=pairs.get(name, []), divisor=divisor)

    def _divisor(self, op: ReduceOp, active: int) -> int:
        """Return by which number a sum must be divided where the communicator's average is over too many ranks, or 0.

        That number does not depend on the ranks that have joined by Horovod's conventions.
        """
        if op is not AVERAGE or active == self.size:
            return 0
        divisor = self.communicator.config.conventions.averaged_over(active, self.size)
        return divisor if divisor < self.size else 0

    def _reduce_pairs(self, op: ReduceOp, dtype: DType, count: int, pairs: Sequence[_Pair], divisor: int) -> None:
        """Reduce sources into their targets, in pieces that follow from the number of elements alone."""
        longest = _PIECE_NBYTES // dtype.itemsize
        if count <= 2 * longest:
            self._reduce(op, dtype, count, pairs=pairs, divisor=divisor)
            return
        sources = [source.reshape(-1) for source, _ in pairs]
        targets = [
            target.reshape(-1) if target.flags.c_contiguous else np.empty_like(target).ravel() for _, target in pairs
        ]
        for piece in _pieces(tuple(map(len, sources)) or (count,), longest):
            mine = [(sources[number][part], targets[number][part]) for number, part in piece] if pairs else []
            self._reduce(op, dtype, sum(part.stop - part.start for _, part in piece), pairs=mine, divisor=divisor)
        for flat, (_, target) in zip(targets, pairs, strict=True):
            if not np.shares_memory(flat, target):
                np.copyto(target, flat.reshape(target.shape))

    def _reduce(self, op: ReduceOp, dtype: DType, count: int, pairs: Sequence[_Pair], divisor: int) -> None:
        """Reduce sources into their targets, through one buffer. With a divisor, the sum is divided by that."""
        communicator = self.communicator
        instruments = communicator.instruments
        shapes = tuple([source.shape for source, _ in pairs]) or ((count,),)
        buffer = self._buffer(dtype, count, shapes)
        for part, (source, _) in zip(buffer.parts, pairs, strict=False):
            np.copyto(part, source)
        if not pairs:
            buffer.parts[0][:] = _neutral(op, dtype)
        if instruments.observers:
            instruments.step(f"pack {len(pairs)} arrays")
        if divisor and dtype.is_long:
            self._average_long(buffer.flat, divisor)
        elif divisor:
            total = widen(buffer.flat, dtype) if dtype.half or dtype.integral else buffer.flat  # wide enough for a sum
            communicator.allreduce(total, SUM, out=total)
            (divide_toward_zero if total.dtype.kind in "iu" else divide)(total, divisor)
            narrow(total, dtype, buffer.flat)
        else:
            communicator.allreduce(buffer.array, op, out=buffer.array)
        for part, (_, target) in zip(buffer.parts, pairs, strict=False):
            np.copyto(target, part)
        if instruments.observers:
            instruments.step(f"unpack {len(pairs)} arrays")

    def _average_long(self, flat: npt.NDArray[Any], divisor: int) -> None:
        """Average 64-bit integers over the ranks, in place and exactly: their sums may wrap around. Collective."""
        both = np.concatenate([flat, flat // divisor])
        self.communicator.allreduce(both, SUM, out=both)
        sums = both[: len(flat)]
        quotients = both[len(flat) :]
        divide_wrapped(sums, quotients, divisor)
        np.copyto(flat, sums)

    def _buffer(self, dtype: DType, count: int, shapes: tuple[tuple[int, ...], ...]) -> _Buffer:
        """Return a communication buffer; the same one for equal arguments, since a repeated call is fastest then.

        Pieces of a large group share one, as each has other shapes.
        """
        nbytes = count * dtype.itemsize
        key = dtype.name, shapes if nbytes < _PIECE_NBYTES else ((count,),)
        made = self._buffers.get(key)
        if made is not None:
            self._buffers.move_to_end(key)
        else:
            memory = self.communicator.empty(nbytes, np.uint8)
            flat = memory.view(dtype.storage)
            made = self._buffers[key] = _Buffer(typed(memory, dtype), flat, _cut(flat, key[1]))
            while len(self._buffers) > 1 and sum(each.flat.nbytes for each in self._buffers.values()) > _BUFFERS_NBYTES:
                self._buffers.popitem(last=False)
        return made if key[1] == shapes else made._replace(parts=_cut(made.flat, shapes))


class _Buffer(NamedTuple):
    """A communication buffer.

    Attributes:
        array: all of it, for the communicator.
        flat: its storage.
        parts: the same, cut into the shapes of the arrays that are packed into it.
    """

    array: Any
    flat: npt.NDArray[Any]
    parts: list[npt.NDArray[Any]]


@lru_cache(maxsize=64)
def _pieces(lengths: Sequence[int], longest: int) -> list[list[tuple[int, slice]]]:
    """Cut arrays of these lengths, one after the other, into pieces; a piece says which parts of which arrays it is."""
    pieces: list[list[tuple[int, slice]]] = []
    room = 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room:
                pieces.append([])
                room = longest
            stop = min(start + room, length)
            pieces[-1].append((number, slice(start, stop)))
            room -= stop - start
            start = stop
    return pieces


def _cut(flat: npt.NDArray[Any], shapes: Sequence[tuple[int, ...]]) -> list[npt.NDArray[Any]]:
    """Return views of one-dimensional memory, one after the other, in these shapes."""
    parts = []
    start = 0
    for shape in shapes:
        end = start + prod(shape)
        parts.append(flat[start:end].reshape(shape))
        start = end
    return parts


def neutral_array(op: ReduceOp, dtype: DType, count: int) -> Any:
    """Return an array that changes nothing when it is reduced with others."""
    memory = np.empty(count * dtype.itemsize, np.uint8)
    memory.view(dtype.storage)[:] = _neutral(op, dtype)
    return typed(memory, dtype)


def _neutral(op: ReduceOp, dtype: DType) -> Any:
    """Return the neutral element of an op, in the storage type of a dtype."""
    if op in (SUM, AVERAGE, BOR, BXOR, LOR, LXOR):
        return 0
    if op in (PRODUCT, LAND):
        return _BFLOAT16_ONE if dtype.name == "bfloat16" else 1
    if op is BAND:
        return ~dtype.storage.type(0)
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
