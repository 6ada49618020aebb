"""The arrays of a call: checked against each other, and lent in host memory where they are in a GPU's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.buffers import Operand, like, operand_of
from ringreduce.buffers.cuda.arrays import DeviceOperand
from ringreduce.errors import UnsupportedBufferError
from ringreduce.paths.gpu import Gpu
from ringreduce.paths.standing import Standing

__all__ = ["AnyOperand", "Operands", "flat_target", "new_result", "same", "with_rows"]

#: Of an array in host memory or on a GPU.
AnyOperand = Operand | DeviceOperand


class Operands:
    """Checks the arrays that a rank passes to its calls, and lends them in host memory.

    Args:
        standing: says whether calls may be made.
        gpu: this rank's.
    """

    def __init__(self, standing: Standing, gpu: Gpu) -> None:
        self._standing = standing
        self._gpu = gpu

    def require_usable(self, operand: AnyOperand) -> None:
        """Refuse what cannot be used here, before the ranks meet.

        Raises:
            UnsupportedBufferError: it is on another GPU than this rank's.
            ConfigError, ShutdownError, TransportError: there are no calls any more.
        """
        self._standing.require_open()
        if isinstance(operand, DeviceOperand):
            self._gpu.staging(operand.device)

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
            return new_result(array, source, shape)
        target = source
        if out is not array:
            target = operand_of(out)
            self.require_usable(target)
        if type(target) is not type(source):
            raise UnsupportedBufferError("array and out must both be in host memory or both in device memory")
        if target.shape != shape or target.dtype != source.dtype:
            raise UnsupportedBufferError(
                f"out has shape {target.shape} and dtype {target.dtype.name}, "
                f"the result has shape {shape} and dtype {source.dtype.name}"
            )
        target.require_writable()
        return out, target

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
        return self._gpu.staging(source.device).lend(source, target, fetch=fetch, store=store)


def new_result(array: Any, source: AnyOperand, shape: tuple[int, ...]) -> tuple[Any, AnyOperand]:
    """Return a new array of the library and the dtype of ``array``, and its memory."""
    out = like(array, shape) if isinstance(source, Operand) else source.like(shape)
    return out, operand_of(out)


def with_rows(array: Any, what: str) -> AnyOperand:
    """Return the memory of an array that is cut along its first dimension.

    Raises:
        UnsupportedBufferError: it has none.
    """
    source = operand_of(array)
    if not source.shape:
        raise UnsupportedBufferError(f"{what} needs an array with at least one dimension, got a scalar")
    return source


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
