"""The arrays of a call: they are checked, brought to flat host memory, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np

from ringreduce.buffers import DTYPES, DType, Operand, library_of, native, new, operand_of
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.devices import Devices
from ringreduce.collectives.rows import part_of
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.transport.shared.arena import Arena

__all__ = ["AnyOperand", "Maker", "Operands", "Result", "apart", "flat", "with_rows"]

#: Smaller results are in private memory: they go through mailboxes, or through a buffer of the plan.
_LEAST_SHARED_NBYTES = 16 << 10

#: Of an array in host memory or on a GPU.
AnyOperand = Operand | DeviceOperand

#: Makes an array of a shape and a dtype; returns it and its memory.
Maker = Callable[[tuple[int, ...], DType], tuple[Any, AnyOperand]]


class Operands:
    """Checks the arrays that a rank passes to its calls, and makes arrays for results.

    Args:
        gpu: this rank's device memory.
        arena: new results are allocated there.
        shares_results: whether they are; not where this rank is alone.
    """

    def __init__(self, gpu: Devices, arena: Arena, *, shares_results: bool) -> None:
        self._gpu = gpu
        self._arena = arena
        self._shares_results = shares_results

    def require_usable(self, operand: AnyOperand) -> None:
        """Raise, before the ranks meet, if this rank cannot use an array.

        Raises:
            UnsupportedBufferError: the array is on another GPU than this rank's.
        """
        if isinstance(operand, DeviceOperand):
            self._gpu.require_usable(operand.device)

    def result(self, array: Any, source: AnyOperand, shape: tuple[int, ...], out: Any) -> Result:
        """Return where a result of known shape goes: ``out``, which is checked, or a new array.

        Args:
            array: what the caller passed.
            source: its memory.
            shape: of the result.
            out: where the caller wants it, None for a new array.

        Raises:
            UnsupportedBufferError: it cannot go there.
        """
        if isinstance(source, DeviceOperand):
            self.require_usable(source)
        if out is None:
            result = Result(self, self.maker(array, source))
            result.make(shape, source.dtype)
            return result
        target = source if out is array else self.fitting(source, out)
        if target.shape != shape or target.dtype is not source.dtype:
            raise UnsupportedBufferError(
                f"out has shape {target.shape} and dtype {target.dtype.name}, "
                f"the result has shape {shape} and dtype {source.dtype.name}"
            )
        target.require_writable()
        return Result(self, out=out, operand=target)

    def rows(self, array: Any, source: AnyOperand, out: Any) -> Result:
        """Return where a result goes whose rows other ranks decide: ``out``, which is checked, or a new array.

        Args, Raises:
            as for `result`.
        """
        self.require_usable(source)
        row = source.shape[1:]
        if out is None:
            return Result(self, self.maker(array, source), row=row, dtype=source.dtype)
        target = self.fitting(source, out)
        if not target.shape or target.shape[1:] != row or target.dtype is not source.dtype:
            raise UnsupportedBufferError(
                f"out has shape {target.shape} and dtype {target.dtype.name}, "
                f"the result has rows of shape {row} and dtype {source.dtype.name}"
            )
        target.require_writable()
        return Result(self, out=out, operand=target)

    def maker(self, array: Any, source: AnyOperand | None = None) -> Maker:
        """Return what makes arrays of the library of ``array``, in the memory of ``source``; it keeps neither alive."""
        if isinstance(source, DeviceOperand):
            like = source.like

            def make_on_device(shape: tuple[int, ...], dtype: DType) -> tuple[Any, AnyOperand]:
                out = like(shape)
                return out, operand_of(out)

            return make_on_device
        library, arena, shared = library_of(array), self._arena, self._shares_results

        def make(shape: tuple[int, ...], dtype: DType) -> tuple[Any, Operand]:
            nbytes = prod(shape) * dtype.itemsize
            made = arena.result(shape, dtype.storage, nbytes) if shared and nbytes >= _LEAST_SHARED_NBYTES else None
            if made is None:
                out = new(shape, dtype, library)
                return out, Operand.of(out)
            return native(made[0], dtype, library), Operand(made[0], dtype, made[1])

        return make

    def fitting(self, source: AnyOperand, out: Any) -> AnyOperand:
        """Return the memory of ``out``, if it can take a result of this source.

        Raises:
            UnsupportedBufferError: it cannot be used, or one is in host memory and the other in device memory.
        """
        target = operand_of(out)
        self.require_usable(target)
        if type(target) is not type(source):
            raise UnsupportedBufferError("array and out must both be in host memory or both in device memory")
        return target

    @contextmanager
    def on_host(self, operand: AnyOperand, *, fetch: bool = True, store: bool = False) -> Iterator[Operand]:
        """Give host memory in place of an array for a while: its own if it is there, else a copy.

        Args:
            operand: of the array.
            fetch: whether the copy holds what the array does.
            store: whether it is copied back.
        """
        if isinstance(operand, Operand):
            yield operand
            return
        with self._gpu.lend(operand, operand, fetch=fetch, store=store) as (given, taken):
            yield taken if store else given


class Result:
    """Where the result of a call goes.

    Args:
        operands: copies it to device memory.
        maker: makes the array, where the caller has given none.
        row, dtype: shape of a row and dtype of such an array, where other ranks decide how many rows there are.
        out: the caller's array.
        operand: its memory.

    Attributes:
        out: the array, once there is one.
        operand: its memory.
        rows: what `place` was called with.
    """

    def __init__(
        self,
        operands: Operands,
        maker: Maker | None = None,
        *,
        row: tuple[int, ...] | None = None,
        dtype: DType | None = None,
        out: Any = None,
        operand: AnyOperand | None = None,
    ) -> None:
        self._operands = operands
        self._maker, self._row, self._dtype = maker, row, dtype
        self._flat: Operand | None = None
        self.out, self.operand = out, operand
        self.rows: Sequence[int] = ()

    @property
    def room(self) -> int:
        """The rows of the array; -1: it is made as large as is needed."""
        return -1 if self.operand is None else self.operand.shape[0]

    def make(self, shape: tuple[int, ...], dtype: DType) -> None:
        """Make a new array."""
        assert self._maker is not None
        self.out, self.operand = self._maker(shape, dtype)

    def flat(self) -> Operand:
        """Return contiguous host memory for the result, one-dimensional."""
        operand = self.operand
        assert operand is not None
        if self._flat is None:
            if isinstance(operand, Operand) and operand.contiguous:
                self._flat = flat(operand)
            else:
                self._flat = Operand(np.empty(prod(operand.shape), operand.dtype.storage), operand.dtype)
        return self._flat

    def place(self, rows: Sequence[int] = ()) -> Operand:
        """Return `flat`, for rows that come from each rank; a `ringreduce.collectives.plan.Place`."""
        self.rows = rows
        if self.operand is None:
            assert self._row is not None
            assert self._dtype is not None
            self.make((sum(rows), *self._row), self._dtype)
        return self.flat()

    def part(self, agreed: Sequence[int]) -> Operand:
        """Return `flat` as bytes, for the part of a scatter that `agreed_part` describes; a `Place`."""
        if self.operand is None:
            self.make(*part_of(agreed))
        whole = self.flat()
        return Operand(whole.view.view(np.uint8), DTYPES["uint8"], whole.address)

    def finish(self) -> Any:
        """Return the array, now that the result is in `flat`."""
        operand, done = self.operand, self._flat
        if done is not None and operand is not None and (isinstance(operand, DeviceOperand) or not operand.contiguous):
            with self._operands.on_host(operand, fetch=False, store=True) as taken:
                np.copyto(taken.view, done.view.reshape(taken.shape))
        return self.out


def flat(operand: Operand) -> Operand:
    """Return an operand with one dimension, in C order: the same memory if it is contiguous, else a copy."""
    view = operand.view
    if view.ndim == 1 and view.flags.c_contiguous:
        return operand
    if view.flags.c_contiguous:
        return Operand(view.reshape(-1), operand.dtype, operand.address)
    return Operand(operand.flat(), operand.dtype)


def with_rows(array: Any, what: str) -> AnyOperand:
    """Return the memory of an array that is cut along its first dimension.

    Raises:
        UnsupportedBufferError: it has none.
    """
    source = operand_of(array)
    if not source.shape:
        raise UnsupportedBufferError(f"{what} needs an array with at least one dimension, got a scalar")
    return source


def apart(source: Operand, target: Operand, start: int | None = 0) -> Operand:
    """Return a flat source, or a copy of it where storing the result would overwrite what others still read.

    Args:
        source: the input.
        target: the result, flat.
        start: the element of the target at which the source may begin without a copy; None: at none.
    """
    if not np.may_share_memory(source.view, target.view):
        return source
    if start is not None and source.address == target.address + start * source.dtype.itemsize:
        return source
    return Operand(source.view.copy(), source.dtype)
