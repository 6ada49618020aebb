"""The interface between collectives and device memory, which `ringreduce.gpu` implements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ringreduce.algorithms import Collective
from ringreduce.buffers import DType, Operand
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.call import Choice, Signature
from ringreduce.collectives.context import Context
from ringreduce.collectives.state import CommState
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.reduce_ops import ReduceOp

__all__ = ["Devices", "DevicesOf", "NoDevices", "SegmentReducer", "ordinal"]


class SegmentReducer(NamedTuple):
    """Reduces segments of one length, in host memory.

    Attributes:
        choice: algorithm and path.
        signature: what the ranks compare.
        run: reduces one segment, in place.
    """

    choice: Choice
    signature: Signature
    run: Callable[[Operand], object]


class Devices(Protocol):
    """The device memory of one rank, in one communicator."""

    def require_usable(self, number: int | None) -> None:
        """Refuse a device that this rank cannot use, by its ordinal; None: the current one. Local.

        Raises:
            UnsupportedBufferError: there is no such device, or this rank has used another one.
        """

    def empty(self, number: int | None, shape: Sequence[int], dtype: DType) -> Any:
        """Return an uninitialised array on a device, by its ordinal. Local.

        Raises:
            UnsupportedBufferError: as `require_usable` does.
        """

    def lend(
        self, source: DeviceOperand, target: DeviceOperand, *, fetch: bool, store: bool
    ) -> AbstractContextManager[tuple[Operand, Operand]]:
        """Give host memory in place of two arrays; see `Operands.on_host`."""

    def allreduce(
        self,
        source: DeviceOperand,
        target: DeviceOperand,
        op: ReduceOp,
        algorithm: str | None,
        reducers: Callable[[Sequence[slice]], Mapping[int, SegmentReducer]],
        running: Callable[[str], AbstractContextManager[None]],
    ) -> Choice:
        """Reduce arrays, and return the choice that was made. Collective.

        Args:
            source: the input, of any layout.
            target: the output, the same memory or other.
            op: how.
            algorithm: the one that the caller asked for, None for any.
            reducers: returns what reduces segments in host memory, by their number of elements; called with the
                segments, if the array goes through host memory.
            running: returns the context in which an algorithm runs; called with its name.
        """

    def choice(self, dtype: DType, op: ReduceOp, algorithm: str | None) -> Choice:
        """Return the choice for such arrays, where there are several ranks. Local."""

    def explain(self, collective: Collective) -> str:
        """Say how such arrays are reduced, why, and what else could do it. Local."""

    def remark(self, collective: Collective) -> str:
        """Return a line to add to `Communicator.explain`; empty where no device memory was used. Local."""

    def close(self) -> None:
        """Give everything back. On all ranks, in any order."""

    def abandon(self) -> None:
        """Give up after a failure, without waiting for other ranks or the device. Local."""


#: Makes the devices of a communicator from its context and its state.
DevicesOf = Callable[[Context, CommState], Devices]


class NoDevices:
    """A rank without devices: arrays in device memory are refused."""

    def __init__(self, context: Context, state: CommState) -> None:
        pass

    def _refuse(self, *arguments: object, **options: object) -> Any:
        raise UnsupportedBufferError("this communicator was made without devices; it takes arrays in host memory")

    require_usable = empty = lend = allreduce = choice = _refuse

    def explain(self, collective: Collective) -> str:
        return "arrays in device memory are refused"

    def remark(self, collective: Collective) -> str:
        return ""

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


def ordinal(device: str) -> int | None:
    """Return the number in ``"cuda:1"``; None for ``"cuda"``, the current GPU.

    Raises:
        ConfigError: it is neither.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number.isdecimal() or device == "cuda"):
        raise ConfigError(f"there are buffers on 'cpu', 'cuda', 'cuda:0', ...; got device={device!r}")
    return int(number) if number else None
