"""The arrays of a call: checked against each other, and lent in host memory where they are in a GPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import DTYPES, DType, Operand, address_of, library_of, native, new, operand_of
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.devices import Devices
from ringreduce.collectives.path import part_told
from ringreduce.collectives.state import Standing
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.transport.shared.arena import Arena

__all__ = [
    "AnyOperand",
    "Maker",
    "Operands",
    "PartReceived",
    "RowsReceived",
    "apart",
    "can_be_watched",
    "flat_target",
    "is_memory_of",
    "same",
    "with_rows",
]

#: Smaller results are private: they go through mailboxes, or through a plan's own memory.
_LEAST_SHARED_NBYTES = 16 << 10

#: Of an array in host memory or on a GPU.
AnyOperand = Operand | DeviceOperand

#: Makes an array of a shape and a dtype; returns it and its memory.
Maker = Callable[[tuple[int, ...], DType], tuple[Any, Operand]]


class Operands:
    """Checks the arrays that a rank passes to its calls, and lends them in host memory.

    Args:
        standing: says whether calls may be made.
        gpu: this rank's.
        arena: where results may lie.
        shares_results: whether anybody gains by that.
    """

    def __init__(self, standing: Standing, gpu: Devices, arena: Arena, *, shares_results: bool) -> None:
        self._standing = standing
        self._gpu = gpu
        self._arena = arena
        self._shares_results = shares_results

    def require_usable(self, operand: AnyOperand) -> None:
        """Refuse what cannot be used here, before the ranks meet.

        Raises:
            UnsupportedBufferError: it is on another GPU than this rank's.
            ConfigError, ShutdownError, TransportError: there are no calls any more.
        """
        self._standing.require_open()
        if isinstance(operand, DeviceOperand):
            self._gpu.require_usable(operand.device)

    def result(self, array: Any, source: AnyOperand, shape: tuple[int, ...], out: Any) -> tuple[Any, AnyOperand]:
        """Return where the result goes: ``out`` once it is checked, or a new array; and its memory.

        Args:
            array: what the caller passed.
            source: its memory.
            shape: of the result.
            out: where the caller wants it, None for a new array.

        Raises:
            UnsupportedBufferError: it cannot go there.
        """
        self.require_usable(source)
        if out is None:
            return self.new(array, source, shape)
        target = source if out is array else self.fitting(source, out)
        if target.shape != shape or target.dtype != source.dtype:
            raise UnsupportedBufferError(
                f"out has shape {target.shape} and dtype {target.dtype.name}, "
                f"the result has shape {shape} and dtype {source.dtype.name}"
            )
        target.require_writable()
        return out, target

    def new(self, array: Any, source: AnyOperand, shape: tuple[int, ...]) -> tuple[Any, AnyOperand]:
        """Return a new array of the library and the dtype of ``array``, and its memory."""
        if isinstance(source, Operand):
            return self.maker(array)(shape, source.dtype)
        out = source.like(shape)
        return out, operand_of(out)

    def maker(self, array: Any) -> Maker:
        """Return what makes arrays in host memory of the library of ``array``, which it does not keep."""
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
        """Return the memory of an ``out`` that may be used with a source.

        Raises:
            UnsupportedBufferError: it cannot be used, or is in the other kind of memory.
        """
        target = operand_of(out)
        self.require_usable(target)
        if type(target) is not type(source):
            raise UnsupportedBufferError("array and out must both be in host memory or both in device memory")
        return target

    def on_host(
        self, source: AnyOperand, target: AnyOperand, *, fetch: bool = True, store: bool = True
    ) -> AbstractContextManager[tuple[Operand, Operand]]:
        """Lend two arrays that `result` checked, in host memory: themselves if they are there, else copies.

        Args:
            source: what goes into the collective.
            target: what comes out of it.
            fetch: whether this rank's input is wanted.
            store: whether the result is new to this rank.
        """
        if isinstance(source, Operand):
            assert isinstance(target, Operand)
            return nullcontext((source, target))
        assert isinstance(target, DeviceOperand)
        return self._gpu.lend(source, target, fetch=fetch, store=store)


class RowsReceived:
    """The result of a collective in which ranks may give any number of rows: known when the ranks have met.

    Args:
        operands: checks and lends.
        array: this rank's input, as the caller passed it.
        source: its memory.
        out: where the caller wants the result, None for a new array.

    Attributes:
        out: the result, once this was called.
        target: its memory, once that is known.
        room: the rows of ``out``; -1: it is made as large as is wanted.
        rows: those that came from each rank, once this was called.

    Raises:
        UnsupportedBufferError: the result cannot go to ``out``.
    """

    def __init__(self, operands: Operands, array: Any, source: AnyOperand, out: Any) -> None:
        self._operands = operands
        self._array, self._source = array, source
        self._flat: npt.NDArray[Any] | None = None
        self.out, self.room = out, -1
        self.target: AnyOperand | None = None
        self.rows: list[int] = []
        if out is not None:
            self.target = operands.fitting(source, out)
            shape, row = self.target.shape, source.shape[1:]
            if not shape or shape[1:] != row or self.target.dtype != source.dtype:
                raise UnsupportedBufferError(
                    f"out has shape {shape} and dtype {self.target.dtype.name}, "
                    f"the result has rows of shape {row} and dtype {source.dtype.name}"
                )
            self.target.require_writable()
            self.room = shape[0]

    def __call__(self, rows: list[int]) -> Operand:
        """Return where the rows that come from each rank go: contiguous, in host memory."""
        self.rows = rows
        if self.target is None:
            self.out, self.target = self._operands.new(self._array, self._source, (sum(rows), *self._source.shape[1:]))
        target = self.target
        if isinstance(target, Operand) and target.contiguous:
            return target
        self._flat = np.empty(prod(target.shape), target.dtype.storage)
        return Operand(self._flat, target.dtype)

    def store(self) -> Any:
        """Return the result, now that all rows are there."""
        if self._flat is not None:
            assert self.target is not None
            with self._operands.on_host(self.target, self.target, fetch=False) as (_, taken):
                np.copyto(taken.view, self._flat.reshape(taken.shape))
        return self.out


class PartReceived:
    """The result of a scatter, of which a rank may know nothing before the ranks have met.

    Args:
        make: makes a new result.
        target: where the caller wants the result, once it is checked; None: a new array.
        out: the array of the caller's that this is.

    Attributes:
        out: the result, once this was called.
        target: its memory, once that is known.
        flat: the part as contiguous bytes, once this was called.
    """

    def __init__(self, make: Maker, target: Operand | None = None, out: Any = None) -> None:
        self._make = make
        self.out = out
        self.target = target
        self.flat: Operand | None = None

    def __call__(self, part: list[int]) -> Operand:
        """Return where the part that `part_agreed` describes goes, as contiguous bytes."""
        if self.target is None:
            self.out, self.target = self._make(*part_told(part))
        self.flat = Operand(self.target.flat().view(np.uint8), DTYPES["uint8"])
        return self.flat

    def store(self) -> Any:
        """Return the result, now that the part is there."""
        assert self.target is not None
        assert self.flat is not None
        if not self.target.contiguous:
            np.copyto(self.target.view, self.flat.view.view(self.target.view.dtype).reshape(self.target.shape))
        return self.out


def with_rows(array: Any, what: str) -> AnyOperand:
    """Return the memory of an array that is cut along its first dimension.

    Raises:
        UnsupportedBufferError: it has none.
    """
    source = operand_of(array)
    if not source.shape:
        raise UnsupportedBufferError(f"{what} needs an array with at least one dimension, got a scalar")
    return source


def can_be_watched(array: Any) -> bool:
    """Return whether an array can be recognized when it is passed again: one of NumPy or torch, and no number."""
    return isinstance(array, np.ndarray) or hasattr(array, "data_ptr")


def is_memory_of(array: Any, operand: AnyOperand) -> bool:
    """Return whether an operand in host memory is an array's own memory, all of it and contiguous: no copy."""
    if not (isinstance(operand, Operand) and operand.contiguous and operand.count and can_be_watched(array)):
        return False
    address = address_of(array) if isinstance(array, np.ndarray) else array.data_ptr()
    return bool(address == operand.address)


def apart(source: npt.NDArray[Any], target: npt.NDArray[Any], start: int | None = None) -> npt.NDArray[Any]:
    """Return a source, or a copy of it if a result would overwrite what others still read.

    Args:
        source: flat.
        target: where the result goes.
        start: the element of the target at which the source may begin, as it belongs there.
    """
    if not np.may_share_memory(source, target):
        return source
    where = address_of(target) + (start or 0) * source.itemsize
    stays = start is not None and target.flags.c_contiguous and address_of(source) == where
    return source if stays else source.copy()


def same(source: Operand, target: Operand) -> bool:
    """Return whether two operands of one shape are the same elements."""
    return source.address == target.address and source.view.strides == target.view.strides


@contextmanager
def flat_target(target: Operand) -> Iterator[npt.NDArray[Any]]:
    """Lend the target as a flat array: itself, or, where it is not contiguous, a copy that is copied back."""
    flat = target.flat()
    yield flat
    if not target.contiguous:
        np.copyto(target.view, flat.reshape(target.shape))
