"""A rank's GPU as a communicator uses it: found when it is first needed, and shared with the others where it can be."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from ringreduce.buffers import DType
from ringreduce.buffers.cuda.arrays import empty_on_device
from ringreduce.buffers.cuda.driver import Driver
from ringreduce.errors import ConfigError, UnsupportedBufferError
from ringreduce.placement.context import Context, Signature
from ringreduce.placement.device import DeviceAllreduce
from ringreduce.placement.staged import Staging
from ringreduce.transport.device import DeviceNode, join_devices

__all__ = ["Gpu", "ordinal"]

_log = logging.getLogger(__name__)

#: What the ranks meet under to find out about each other's device memory.
_FIRST_USE = Signature.of("the first use of device memory: an allreduce of arrays there, or empty(device=...)")
_THROUGH_HOST = "arrays go through host memory, in segments"


class Gpu:
    """The GPU of this rank in one process set.

    Args:
        context: the ranks.
        drivers: returns the driver of a GPU by its ordinal, of the current one for None.

    Attributes:
        drivers: the same.
        kernels: what reduces device memory where it lies; None where that cannot be, and before `join`.
        way: how arrays on it are reduced, in words; None before `join`.
    """

    def __init__(self, context: Context, drivers: Callable[[int | None], Driver]) -> None:
        self._context = context
        self.drivers = drivers
        self._staging: Staging | None = None
        self._joined = False
        self._devices: DeviceNode | None = None
        self.kernels: DeviceAllreduce | None = None
        self.way: str | None = None

    def staging(self, number: int | None = None) -> Staging:
        """Return the way of arrays between the GPU and this rank's host memory. Local.

        Args:
            number: the GPU's ordinal, None for the current one. The first that is asked for is this rank's for good.

        Raises:
            UnsupportedBufferError: there is no such GPU, or another one was this rank's before.
        """
        if self._staging is None:
            self._staging = Staging(self.drivers(number), self._context.arena)
        own = self._staging.driver.device.number
        if number not in (None, own):
            raise UnsupportedBufferError(
                f"GPU {number} is asked for, and this rank has worked on GPU {own} so far; a process works on one: "
                "call torch.cuda.set_device or cupy.cuda.Device(...).use() once, at its start"
            )
        return self._staging

    def join(self) -> None:
        """Find out what the ranks share of their device memory; nothing to do the second time. Collective.

        Raises:
            MismatchError: not all ranks call this for the first time.
            UnsupportedBufferError: as `staging` does.
        """
        if self._joined:
            return
        context, driver = self._context, self.staging().driver
        self.way = _THROUGH_HOST
        if context.topology.size == 1:
            self.way = "there is one rank"
        elif context.topology.single_node:
            context.meet(_FIRST_USE)
            self._devices = join_devices(context.messages, context.node, lambda: driver)
            self.kernels = DeviceAllreduce.of(context, self._devices)
            if self.kernels is not None:
                self.way = self.kernels.description
        self._joined = True
        if context.rank == 0:
            _log.info("allreduce of arrays in device memory: %s", self.way)

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        """Return an uninitialised CuPy array, in memory that the ranks share where they can; after `join`. Local.

        Raises:
            UnsupportedBufferError: CuPy is missing, or has no such elements.
            MemoryError: the GPU has no more.
        """
        assert self._joined
        driver, nbytes = self.staging().driver, prod(shape) * dtype.itemsize
        block = _Allocation(driver, nbytes) if self._devices is None else self._devices.arena.allocate(nbytes)
        return empty_on_device(block.address, max(1, nbytes), shape, dtype, driver.device.number, block)

    def close(self) -> None:
        """Give everything back. On all ranks, in any order, after which they call nothing here."""
        if self._staging is not None:
            self._staging.close()
        if self.kernels is not None:
            self.kernels.close()
        if self._devices is not None:
            self._devices.close(self._context.waiter)
        self._staging, self.kernels, self._devices = None, None, None


class _Allocation:
    """Device memory that nobody else reaches, for as long as this object lives."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.address = driver.allocate(nbytes)
        weakref.finalize(self, driver.free, self.address).atexit = False


def ordinal(device: str) -> int | None:
    """Return the number in ``"cuda:1"``; None for ``"cuda"``, the current GPU.

    Raises:
        ConfigError: it is neither.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number.isdecimal() or device == "cuda"):
        raise ConfigError(f"there are buffers on 'cpu', 'cuda', 'cuda:0', ...; got device={device!r}")
    return int(number) if number else None
