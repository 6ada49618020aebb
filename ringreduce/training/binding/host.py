"""What frameworks share whose arrays nobody may write to: NumPy views of them, and of their gradients."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from ringreduce.buffers import DType, Operand, typed
from ringreduce.collectives.communicator import Communicator
from ringreduce.training.binding.framework import Advice, Arrays, Look, Memory

#: Arrays share a communication buffer of up to so many bytes. One that the program keeps, keeps the others' memory.
_SHARED_NBYTES = 16 << 20
_ALIGNMENT = 64  # of arrays in a buffer: what frameworks want of memory that is not theirs


class HostArrays(Arrays):
    """NumPy arrays, as an `Arrays`."""

    expected = "a NumPy array"
    conversion = "np.asarray(...)"

    def is_array(self, value: object) -> bool:
        return isinstance(value, np.ndarray)

    def require_usable(self, communicator: Communicator, array: Any, *, writable: bool = False) -> None:
        operand = Operand.of(array)
        if writable:
            operand.require_writable()

    def empty_like(self, array: Any) -> Any:
        return np.empty_like(array)

    def zeros_like(self, array: Any) -> Any:
        return np.zeros(array.shape, array.dtype)

    def scale(self, source: Any, factor: float, target: Any) -> None:
        if factor == 1.0:
            np.copyto(target, source)
        elif (dtype := DType.of(source.dtype)).integral:
            np.copyto(target, source.astype(np.float64) * factor, casting="unsafe")
        elif dtype.half:  # in which the factor itself would be rounded
            np.multiply(source, np.float32(factor), out=target, dtype=np.float32, casting="unsafe")
        else:
            np.multiply(source, source.dtype.type(factor), out=target)


HOST = HostArrays()


def laid_out(communicator: Communicator, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return buffers for results, and for each of these NumPy arrays a part of one, of its shape and dtype.

    A buffer has arrays of one dtype, and zeros between them. It is a communication buffer within the limit on results;
    see `Communicator.empty_like`.
    """
    groups: dict[str, list[list[tuple[int, int, int]]]] = {}  # by dtype and buffer: number, start and end in bytes
    for number, each in enumerate(arrays):
        group = groups.setdefault(DType.of(each.dtype).name, [])
        start = -(-group[-1][-1][2] // _ALIGNMENT) * _ALIGNMENT if group else 0
        if not group or start + each.nbytes > _SHARED_NBYTES:
            group.append([])
            start = 0
        group[-1].append((number, start, start + each.nbytes))
    buffers = []
    parts: dict[int, Any] = {}
    for name, group in groups.items():
        dtype = DType.of(name)
        for members in group:
            nbytes = members[-1][2]
            memory = communicator.empty_like(np.empty(nbytes + _ALIGNMENT, np.uint8))
            first = -memory.ctypes.data % _ALIGNMENT  # private memory may begin anywhere
            memory = memory[first : first + nbytes]
            for (_, _, end), (_, start, _) in pairwise(members):
                memory[end:start] = 0
            buffers.append(typed(memory, dtype))
            for number, start, end in members:
                parts[number] = typed(memory[start:end], dtype).reshape(arrays[number].shape)
    return buffers, [parts[number] for number in range(len(arrays))]


class ArraySpec:
    """What is known of a gradient before there is one.

    Args:
        shape: its shape.
        dtype: NumPy's, or what NumPy takes for one.
    """

    def __init__(self, shape: Sequence[int], dtype: Any) -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.nbytes = prod(self.shape) * self.dtype.itemsize


class _HostSlot:
    """See `ringreduce.training.binding.framework.Slot`. What a step has returned stays as it is while somebody holds
    it.
    """

    __slots__ = ("_memory", "_unshared", "parameter", "place")

    def __init__(self, parameter: ArraySpec, memory: Any) -> None:
        self.parameter = parameter
        # Views keep the first array that NumPy has made of memory which is no array: this one, and no other place's.
        self._memory = np.asarray(memoryview(memory))
        self.place = typed(self._memory, DType.of(parameter.dtype)).reshape(parameter.shape)
        self._unshared = self._references()

    def look(self, gradient: Any) -> int:
        if gradient is self.place:
            return Look.IN_PLACE
        if self._references() > self._unshared:
            return Look.ALIASED
        if gradient is None:
            return Look.EMPTY
        return Look.MOVABLE if (gradient.dtype, gradient.shape) == (self.place.dtype, self.place.shape) else Look.STUCK

    def _references(self) -> int:
        return sys.getrefcount(self.place) + sys.getrefcount(self._memory)


class HostMemory(Memory):
    """Gradients in NumPy arrays, as a `Memory`; the results are places in buckets.

    Args:
        advice: of the framework whose gradients these are.
    """

    def __init__(self, advice: Advice = Memory.advice) -> None:
        self.advice = advice

    def kind(self, parameter: ArraySpec) -> tuple[str, int]:
        return parameter.dtype.name, parameter.nbytes

    def lay_out(
        self, communicator: Communicator, parameters: Sequence[ArraySpec], starts: Sequence[int]
    ) -> tuple[Any, list[_HostSlot]]:
        memory = communicator.empty(starts[-1], np.uint8)
        dtype = DType.of(parameters[0].dtype)
        memory[:] = 0
        slots = [
            _HostSlot(each, memory[start:][: each.nbytes]) for start, each in zip(starts, parameters, strict=False)
        ]
        return typed(memory, dtype), slots

    def pack(self, places: Sequence[Any], gradients: Sequence[Any]) -> None:
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is None:
                place[...] = 0
            else:
                np.copyto(place, gradient)

    def clone(self, array: Any) -> Any:
        return np.copy(array)

    def scale(self, array: Any, factor: float) -> None:
        HOST.scale(array, factor, array)

    def checksum(self, parameters: Sequence[Any]) -> int:
        checksum = 0
        for each in parameters:
            if isinstance(each, np.ndarray):
                checksum = zlib.crc32(each.tobytes(), checksum)
        return checksum

    def checksum_of_gradients(self, gradients: Sequence[Any]) -> int:
        return zlib.crc32(b"".join(b"none" if each is None else each.tobytes() for each in gradients))

    def is_finite(self, gradient: Any) -> bool:
        return bool(np.isfinite(gradient).all())
