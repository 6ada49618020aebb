"""The arrays of a call: they are checked, brought to flat host memory, and back.

`Devices` is the interface between collectives and device memory; `ringreduce.gpu.devices.Gpu` is one that has some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, Array, DType, Operand, address_of, library_of, native, operand_of
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.call import CallKind, Choice, Task
from ringreduce.collectives.rows import part_of
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.shared.arena import Arena

#: Smaller results are in private memory: they go through mailboxes, or through a buffer of the plan.
LEAST_SHARED_NBYTES = 16 << 10

#: Of an array in host memory or on a GPU.
AnyOperand = Operand | DeviceOperand

#: Makes an array of a shape and a dtype; returns it and its memory.
Maker = Callable[[tuple[int, ...], DType], tuple[Any, AnyOperand]]

#: Returns the context in which an algorithm, by its name, carries out a call: it counts the call, and passes errors on.
Running = Callable[[str], AbstractContextManager[None]]


class HostReducer(Protocol):
    """Reduces arrays in host memory over all ranks, as parts of a call whose arrays are elsewhere."""

    def task(self, kind: CallKind) -> Task:
        """Return the task of a kind of call: algorithm, path, and what the ranks compare. Local.

        Raises:
            ConfigError: there is no such algorithm, or it cannot run here.
        """

    def reduce_in_place(self, task: Task, array: Operand) -> None:
        """Reduce a flat array, in place. Collective."""


class Devices:
    """The device memory of one rank, in one communicator. This rank has none: arrays in device memory are refused."""

    def __init__(self, context: Any = None, state: Any = None) -> None:
        pass

    def require_usable(self, number: int | None) -> object:
        """Refuse a device that this rank cannot use, by its ordinal; None: the current one. Local.

        Raises:
            UnsupportedBufferError: there is no such device, or this rank has used another one.
        """
        raise _refused()

    def empty(self, number: int | None, shape: Sequence[int], dtype: DType) -> Any:
        """Return an uninitialised array on a device, by its ordinal. Local.

        Raises:
            UnsupportedBufferError: as `require_usable` does.
        """
        raise _refused()

    def on_host(self, operand: DeviceOperand, *, fetch: bool, store: bool) -> AbstractContextManager[Operand]:
        """Give host memory in place of an array for a while; see `Operands.on_host`."""
        raise _refused()

    def allreduce(
        self, source: DeviceOperand, target: DeviceOperand, kind: CallKind, host: HostReducer, running: Running
    ) -> None:
        """Reduce arrays of equal shape and dtype. Collective.

        Args:
            source: the input, of any layout.
            target: the output, the same memory or other.
            kind: of the call.
            host: reduces what goes through host memory.
            running: returns the context in which an algorithm runs; called with its name.

        Raises:
            ConfigError: there is no such algorithm, or it cannot run here. Before any other rank knows of the call.
        """
        raise _refused()

    def choice(self, dtype: DType, op: ReduceOp, algorithm: str | None) -> Choice:
        """Return the choice for such arrays, where there are several ranks. Local."""
        raise _refused()

    def explain(self, collective: Collective) -> str:
        """Say how such arrays are reduced, why, and what else could do it. Local."""
        return "arrays in device memory are refused"

    def remark(self, collective: Collective) -> str:
        """Return a line to add to `Communicator.explain`; empty where no device memory was used. Local."""
        return ""

    def close(self) -> None:
        """Give everything back. On all ranks, in any order."""

    def abandon(self) -> None:
        """Give up after a failure, without waiting for other ranks or the device. Local."""


def _refused() -> UnsupportedBufferError:
    return UnsupportedBufferError("this communicator was made without devices; it takes arrays in host memory")


def ordinal(device: str) -> int | None:
    """Return the number in ``"cuda:1"``; None for ``"cuda"``, the current GPU.

    Raises:
        ConfigError: it is neither.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number.isdecimal() or device == "cuda"):
        raise ConfigError(f"there are buffers on 'cpu', 'cuda', 'cuda:0', ...; got device={device!r}")
    return int(number) if number else None


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

    def result(self, array: Any, source: AnyOperand, shape: tuple[Any, ...], out: Any) -> ResultArray:
        """Return where a result goes: ``out``, which is checked, or a new array.

        Args:
            array: what the caller passed.
            source: its memory.
            shape: of the result; with a star in place of the rows if other ranks decide how many there are.
            out: where the caller wants it, None for a new array.

        Raises:
            UnsupportedBufferError: it cannot go there, or this rank cannot use the arrays.
        """
        if isinstance(source, DeviceOperand):
            self._gpu.require_usable(source.device)
        by_rows = shape[:1] == ("*",)
        if out is None:
            result = ResultArray(self, self.maker(array, source), row=shape[1:], dtype=source.dtype)
            if not by_rows:
                result.make(shape, source.dtype)
            return result
        target = source if out is array else self._fitting(source, out)
        fits = target.shape[1:] == shape[1:] and bool(target.shape) if by_rows else target.shape == shape
        if not fits or target.dtype is not source.dtype:
            rows = shape[1:]
            had = target.dtype.name
            has = source.dtype.name
            raise UnsupportedBufferError(
                f"out has shape {target.shape} and dtype {had}, the result has rows of shape {rows} and dtype {has}"
                if by_rows
                else f"out has shape {target.shape} and dtype {had}, the result has shape {shape} and dtype {has}"
            )
        target.require_writable()
        return ResultArray(self, out=out, operand=target)

    def maker(self, array: Any, source: AnyOperand | None = None) -> Maker:
        """Return what makes arrays of the library of ``array``, in the memory of ``source``; it keeps neither alive."""
        if isinstance(source, DeviceOperand):
            like = source.like

            def make_on_device(shape: tuple[int, ...], dtype: DType) -> tuple[Any, AnyOperand]:
                out = like(shape)
                return out, operand_of(out)

            return make_on_device
        library = library_of(array)

        def make(shape: tuple[int, ...], dtype: DType) -> tuple[Any, Operand]:
            view, address = self.host_maker(shape, dtype)()
            return native(view, dtype, library), Operand(view, dtype, address)

        return make

    def host_maker(self, shape: tuple[int, ...], dtype: DType) -> Callable[[], tuple[Array, int]]:
        """Return what makes arrays of the storage type, and says their addresses.

        They are in the arena, unless they are small or there is no room.
        """
        storage = dtype.storage
        count = prod(shape)
        nbytes = count * storage.itemsize
        arena = self._arena if nbytes >= LEAST_SHARED_NBYTES and self._shares_results else None
        is_flat = len(shape) == 1

        def make() -> tuple[Array, int]:
            leased = None if arena is None else arena.result(storage, count, nbytes)
            if leased is None:
                view = np.empty(shape, storage)
                return view, address_of(view)
            return leased if is_flat else (leased[0].reshape(shape), leased[1])

        return make

    def reducer(
        self, source: DeviceOperand, result: ResultArray, kind: CallKind
    ) -> Callable[[HostReducer, Running], None]:
        """Return what carries out an allreduce of arrays that are not in host memory.

        Args:
            source: this rank's input.
            result: where the result goes.
            kind: of the call.
        """
        assert isinstance(result.operand, DeviceOperand)
        return partial(self._gpu.allreduce, source, result.operand, kind)

    def _fitting(self, source: AnyOperand, out: Any) -> AnyOperand:
        """Return the memory of ``out``, if it can take a result of this source.

        Raises:
            UnsupportedBufferError: it cannot be used, or one is in host memory and the other in device memory.
        """
        target = operand_of(out)
        if isinstance(target, DeviceOperand):
            self._gpu.require_usable(target.device)
        if type(target) is not type(source):
            raise UnsupportedBufferError("array and out must both be in host memory or both in device memory")
        return target

    def on_host(
        self, operand: AnyOperand, *, fetch: bool = True, store: bool = False
    ) -> AbstractContextManager[Operand]:
        """Give host memory in place of an array for a while: its own if it is there, else a copy.

        Args:
            operand: of the array.
            fetch: whether the copy holds what the array does.
            store: whether it is copied back.
        """
        return (
            nullcontext(operand)
            if isinstance(operand, Operand)
            else self._gpu.on_host(operand, fetch=fetch, store=store)
        )


class ResultArray:
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
        rows: what `place` or `part` was called with.
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
        self._maker = maker
        self._row = row
        self._dtype = dtype
        self._flat: Operand | None = None
        self.out = out
        self.operand = operand
        self.rows: Sequence[int] = ()

    @property
    def room(self) -> int:
        """The rows of the array; -1: it is made as large as is needed."""
        return -1 if self.operand is None else self.operand.shape[0]

    def make(self, shape: tuple[int, ...], dtype: DType) -> None:
        """Make a new array."""
        assert self._maker is not None
        self._flat = None
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
        if self.operand is None or (self.rows and rows != self.rows and self._row is not None):
            assert self._row is not None
            assert self._dtype is not None
            self.make((sum(rows), *self._row), self._dtype)
        self.rows = rows
        return self.flat()

    def part(self, agreed: Sequence[int]) -> Operand:
        """Return `flat` as bytes, for the part of a scatter that `agreed_part` describes; a `Place`."""
        if self.operand is None or (self._maker is not None and agreed != self.rows):
            shape, dtype = part_of(agreed)
            self.make(shape, dtype)
        self.rows = agreed
        whole = self.flat()
        return Operand(whole.view.view(np.uint8), DTYPES["uint8"], whole.address)

    def finish(self) -> Any:
        """Return the array, now that the result is in `flat`."""
        operand = self.operand
        done = self._flat
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
