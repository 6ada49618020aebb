"""What the kernels of the package compute, for the driver of `gpu_doubles.driver`, which runs them.

A family makes from the name of an instance what that does: with the ABI of the CUDA source, on what the driver lets its
rank touch, and waiting where the kernel would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DTYPES, DType, narrow, widen
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.kernels import FLAGS_NBYTES, MAX_BLOCKS, ONE_SHOT_NBYTES

__all__ = ["FAMILIES", "KernelCode", "View", "reduced"]

Array = npt.NDArray[Any]
#: Gives the memory at an address, so many bytes of it, as the kernel's rank may touch it.
View = Callable[[int, int], Array]
#: What a kernel does, given how it sees memory and the arguments. One that waits for other kernels yields wherever it
#: would spin.
KernelCode = Callable[[View, Sequence[object]], Iterator[None] | None]


def _combine_instance(name: str) -> KernelCode:
    """Return the code of an instance of the family ``reduce``: ``combine<dtype,op>``."""
    parsed = re.fullmatch(r"combine<(\w+),(\w+)>", name)
    assert parsed is not None, f"there is no kernel {name} in the family reduce"
    dtype, op = DTYPES[parsed[1]], ReduceOp(parsed[2])
    assert op is not ReduceOp.AVERAGE or dtype.kind in ("float", "complex"), f"{name}: integers are not averaged"

    def run(view: View, arguments: Sequence[object]) -> None:
        sources, nsources, targets, ntargets, count, size = _numbers(arguments, "QIQIQI")
        nbytes = count * dtype.itemsize
        given = [view(address, nbytes) for address in _addresses_at(view, sources, nsources)]
        into = [view(address, nbytes) for address in _addresses_at(view, targets, ntargets)]
        with np.errstate(all="ignore"):
            result = reduced([each.copy().view(dtype.storage) for each in given], dtype, op, size)
        for each in into:
            each[:] = result.view(np.uint8)

    return run


def _shots_instance(name: str) -> KernelCode:
    """Return the code of an instance of the family ``shots``: ``one_shot<dtype,op>`` or ``two_shot<dtype,op>``.

    All blocks of a kernel go through its barriers together, by the flags of the first one.
    """
    parsed = re.fullmatch(r"(one|two)_shot<(\w+),(\w+)>", name)
    assert parsed is not None, f"there is no kernel {name} in the family shots"
    dtype, op = DTYPES[parsed[2]], ReduceOp(parsed[3])
    run = _one_shot if parsed[1] == "one" else _two_shot
    return lambda view, arguments: run(view, dtype, op, arguments)


def _two_shot(view: View, dtype: DType, op: ReduceOp, arguments: Sequence[object]) -> Iterator[None]:
    sources, targets, flags, rank, nranks, count, size, _, error = _numbers(arguments, "QQQIIQIQQ")
    group = _Group(view, flags, rank, nranks, error)
    if group.failed():
        return
    yield from group.meet()
    part = -(-count // nranks)
    begin, end = min(count, rank * part), min(count, (rank + 1) * part)
    offset, nbytes = begin * dtype.itemsize, (end - begin) * dtype.itemsize
    if nbytes:
        parts = [view(address + offset, nbytes) for address in _addresses_at(view, sources, nranks)]
        with np.errstate(all="ignore"):
            result = reduced([each.copy().view(dtype.storage) for each in parts], dtype, op, size)
        for address in _addresses_at(view, targets, nranks):
            yield  # the peers do not get their parts at once
            view(address + offset, nbytes)[:] = result.view(np.uint8)
    yield from group.meet()


def _one_shot(view: View, dtype: DType, op: ReduceOp, arguments: Sequence[object]) -> Iterator[None]:
    source, target, scratch, flags, rank, nranks, count, size, _, error = _numbers(arguments, "QQQQIIQIQQ")
    group = _Group(view, flags, rank, nranks, error)
    if group.failed():
        return
    nbytes = count * dtype.itemsize
    place = group.round() % 2 * ONE_SHOT_NBYTES
    areas = [view(address + place, nbytes) for address in _addresses_at(view, scratch, nranks)]
    areas[rank][:] = view(source, nbytes)
    yield from group.meet()
    with np.errstate(all="ignore"):
        result = reduced([each.copy().view(dtype.storage) for each in areas], dtype, op, size)
    view(target, nbytes)[:] = result.view(np.uint8)


class _Group:
    """The barrier of kernels that meet, as their flags have it."""

    def __init__(self, view: View, flags: int, rank: int, nranks: int, error: int) -> None:
        areas = [view(address, FLAGS_NBYTES).view(np.uint32) for address in _addresses_at(view, flags, nranks)]
        self._mine, self._rank = areas[rank], rank
        self._arrived = [area[MAX_BLOCKS : MAX_BLOCKS + nranks] for area in areas]
        self._error = view(error, 4).view(np.uint32)

    def failed(self) -> bool:
        return bool(self._error[0])

    def round(self) -> int:
        """Return the number of the last barrier."""
        return int(self._mine[0])

    def meet(self) -> Iterator[None]:
        number = self._mine[0] = self._mine[0] + 1
        for area in self._arrived:
            area[self._rank] = number
            yield
        while (self._arrived[self._rank] < number).any():
            yield


def _numbers(arguments: Sequence[object], format: str) -> tuple[int, ...]:
    """Return the arguments of a kernel as integers, having looked that they have its ABI's sizes.

    Args:
        arguments: what was passed.
        format: a letter for each: Q for 64 bits (int or NumPy), I for 32 bits (NumPy only).
    """
    assert len(arguments) == len(format), f"{len(arguments)} arguments, {len(format)} expected"
    for each, letter in zip(arguments, format, strict=True):
        good = (np.uint32, np.int32) if letter == "I" else (int, np.uint64, np.int64)
        assert isinstance(each, good), f"{each!r} of type {type(each).__name__} where {letter} is expected"
    return tuple(int(each) for each in arguments)  # type: ignore[call-overload]


def _addresses_at(view: View, address: int, count: int) -> list[int]:
    """Return a table of addresses that lies in device memory."""
    return [int(each) for each in view(address, 8 * count).copy().view(np.uint64)]


def reduced(arrays: Sequence[Array], dtype: DType, op: ReduceOp, size: int) -> Array:
    """Return the reduction of arrays in ``dtype.storage``, one after the other; 16-bit floats in float32."""
    wide = [widen(each, dtype) if dtype.half else each for each in arrays]
    total: Array = wide[0].copy()
    ufunc: np.ufunc = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVERAGE: np.add,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.PRODUCT: np.multiply,
    }[op]
    for each in wide[1:]:
        ufunc(total, each, out=total)
    if op is ReduceOp.AVERAGE:
        total /= total.dtype.type(size)
    if not dtype.half:
        return total
    result = np.empty(total.shape, dtype.storage)
    narrow(total, dtype, result)
    return result


#: Kernel family -> what makes the code of an instance from its name.
FAMILIES: dict[str, Callable[[str], KernelCode]] = {"reduce": _combine_instance, "shots": _shots_instance}
