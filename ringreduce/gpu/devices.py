"""A rank's GPU as a communicator uses it: found when it is first needed, and shared with the others where it can be."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ringreduce.algorithms import Collective
from ringreduce.buffers import DType, Operand
from ringreduce.buffers.device_arrays import DeviceOperand, empty_on_device
from ringreduce.buffers.device_driver import Driver
from ringreduce.collectives.context import Context, Signature
from ringreduce.collectives.path import DETERMINISTIC, NCCL, Choice, Chosen
from ringreduce.collectives.state import Standing
from ringreduce.common.cleanup import close_all
from ringreduce.common.config import gpu_switches
from ringreduce.common.errors import (
    CollectiveTimeoutError,
    PeerLostError,
    TransportError,
    UnsupportedBufferError,
)
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.aware_path import AwareAllreduce, awareness
from ringreduce.gpu.cupy_driver import cuda_driver
from ringreduce.gpu.ipc import DeviceNode, join_devices
from ringreduce.gpu.kernels import Arithmetic
from ringreduce.gpu.nccl import Nccl, cupy_nccl
from ringreduce.gpu.nccl_path import NcclAllreduce
from ringreduce.gpu.path import OnDevice
from ringreduce.gpu.peer_path import DeviceAllreduce
from ringreduce.gpu.staging import Staging
from ringreduce.transport.messages import StepFailedError, together

__all__ = ["STAGED", "Gpu"]

_log = logging.getLogger(__name__)

_THROUGH_HOST = "arrays go through host memory, in segments"
_WHOLE = "arrays go through host memory, whole"

#: What carries out an allreduce of arrays in device memory where nothing on the GPUs does; not to be asked for by name.
STAGED = Choice("staged", Staging, _THROUGH_HOST)

#: What the ranks meet under to find out about each other's device memory.
_FIRST_USE = Signature.of("the first use of device memory: an allreduce of arrays there, or empty(device=...)")
_FIRST_NCCL = Signature.of("the first use of NCCL: an allreduce of arrays in device memory with algorithm 'nccl'")


class Gpu:
    """The GPU of this rank in one process set; the `Devices` of a communicator.

    Args:
        context: the ranks.
        standing: hears of what fails while they find out about each other's GPUs.
        drivers: returns the driver of a GPU by its ordinal, of the current one for None.
        libraries: returns NCCL on a GPU by its ordinal.

    Attributes:
        drivers, libraries: the same.
        kernels: what reduces device memory without the host's; None where that cannot be, and before `use`.
        nccl: what does so if NCCL is asked for; None where that cannot be, and before `use` with NCCL.
        description: how arrays on it are reduced, in words; None before `use`.
    """

    def __init__(
        self,
        context: Context,
        standing: Standing,
        drivers: Callable[[int | None], Driver] = cuda_driver,
        libraries: Callable[[int], Nccl] = cupy_nccl,
    ) -> None:
        self._context = context
        self._standing = standing
        self.drivers = drivers
        self.libraries = libraries
        self._staging: Staging | None = None
        self._joined_nccl = False
        self._devices: DeviceNode | None = None
        self.kernels: OnDevice | None = None
        self.nccl: OnDevice | None = None
        self.description: str | None = None

    def staging(self, number: int | None = None) -> Staging:
        """Return what carries arrays between the GPU and this rank's host memory. Local.

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

    def require_usable(self, number: int | None) -> None:
        """Refuse a GPU that this rank cannot use, as `staging` does. Local."""
        self.staging(number)

    def lend(
        self, source: DeviceOperand, target: DeviceOperand, *, fetch: bool, store: bool
    ) -> AbstractContextManager[tuple[Operand, Operand]]:
        """Lend host memory in place of two arrays; see `Staging.lend`."""
        return self.staging(source.device).lend(source, target, fetch=fetch, store=store)

    def use(self, number: int | None, *, nccl: bool = False) -> None:
        """Find out what the ranks share of device memory, and of NCCL, if nobody did; collective then.

        Args:
            number: the GPU's ordinal, None for the current one.
            nccl: whether it is asked for.

        Raises:
            UnsupportedBufferError: as `staging` does.
            MismatchError: not all ranks call this for the first time.
        """
        self.staging(number)  # which may be refused, and that is this rank's affair
        try:
            if self.description is None:
                self._join()
            if nccl and not self._joined_nccl:
                self._join_nccl()
        except BaseException as error:
            self._standing.break_off(error)
            raise

    def _join(self) -> None:
        context, description = self._context, "there is one rank"
        if context.topology.size > 1:
            context.meet(_FIRST_USE)
            description = self._find_kernels(self.staging().driver)
        self.description = description
        if context.rank == 0:
            _log.info("allreduce of arrays in device memory: %s", description)

    def _find_kernels(self, driver: Driver) -> str:
        """Find what reduces device memory without the host's, if anything does; return how it is done, in words."""
        context = self._context
        if context.topology.single_node:
            self._devices = join_devices(context.messages, context.node, lambda: driver)
            if self._devices is not None:
                self.kernels = DeviceAllreduce(context, self._devices)
                return self.kernels.description
        try:
            reason = together(context.messages, lambda: awareness(context, gpu_switches()))
        except StepFailedError as error:
            return f"{_THROUGH_HOST} (MPI does not take it from the GPU: {error})"
        if not context.topology.single_node and any(len(node) > 1 for node in context.topology.nodes):
            # Every rank would send every block to other nodes; through the host, each node sends each block once.
            why_not = "MPI could take it from the GPU, but several ranks of each node would send the same blocks"
            return f"{_THROUGH_HOST} ({why_not})"
        self.kernels = AwareAllreduce(context, driver, reason)
        return self.kernels.description

    def _join_nccl(self) -> None:
        context = self._context
        if context.topology.size > 1:
            context.meet(_FIRST_NCCL)
            self.nccl = NcclAllreduce.of(context, self.staging().driver, self.libraries, gpu_switches())
        self._joined_nccl = True

    def segments(self, source: DeviceOperand) -> list[slice]:
        """Return the segments in which such an array goes through host memory; see `Staging.segments`."""
        return self.staging(source.device).segments(source)

    @contextmanager
    def in_c_order(self, source: DeviceOperand, target: DeviceOperand) -> Iterator[tuple[DeviceOperand, DeviceOperand]]:
        """Lend operands for `allreduce` in place of arrays of any layout: themselves, or copies."""
        staging = self.staging(source.device)
        given, taken = staging.in_c_order(source), target.scratch()
        if given.may_overlap(taken) and not given.same_memory(taken):
            given = staging.in_c_order(given, copy=True)
        yield given, taken
        staging.store(target, taken)

    def allreduce(
        self,
        source: DeviceOperand,
        target: DeviceOperand,
        op: ReduceOp,
        algorithm: str | None,
        reducers: Mapping[int, Chosen],
        running: Callable[[str], AbstractContextManager[None]],
    ) -> Choice:
        """Reduce arrays in C order by kernels where the ranks share device memory, else through host memory.

        Kernels add in the order of ranks, so they may take the place of the deterministic algorithm.

        Args:
            source: what goes in.
            target: what comes out, the same memory or apart from it.
            op: how.
            algorithm: what was asked for, None for nothing.
            reducers: for segments in host memory, by their elements.
            running: returns the context in which an algorithm runs.

        Returns:
            What carried it out.
        """
        staging = self.staging(source.device)
        parts = staging.segments(source)
        whole = reducers[parts[0].stop - parts[0].start]
        if self._context.topology.size == 1:
            with running(whole.choice.algorithm):
                staging.copy(source, target)
            return whole.choice
        wanted = self._wanted(algorithm)
        if self.takes(wanted):
            self.use(source.device, nccl=wanted == NCCL)
        kernels = self.find(source.dtype, op, wanted)

        def reduce(segment: Operand) -> None:
            reducers[segment.count].run(segment, segment)

        choice = STAGED if kernels is None else kernels.choice
        reduction = Arithmetic(source.dtype, op, source.count)
        with running(choice.algorithm), staging.in_order(source, target) as stream:
            addresses = source.address, target.address
            if kernels is None or not kernels.run(*addresses, reduction, stream, whole.signature):
                choice = STAGED
                staging.allreduce(source, target, parts, reduce)
        return choice

    @staticmethod
    def takes(wanted: str | None) -> bool:
        """Return whether arrays may be reduced on the GPUs, or have to go through host memory.

        Args:
            wanted: the algorithm that was asked for by name, None for none: most are those of the CPU.
        """
        return wanted in (None, "auto", DETERMINISTIC, NCCL)

    def find(self, dtype: DType, op: ReduceOp, wanted: str | None) -> OnDevice | None:
        """Return what reduces such elements without host memory; None if nothing does. Local; the same on all ranks.

        After `use`, with NCCL where that is wanted.

        Args:
            dtype: of the elements.
            op: how they are reduced.
            wanted: as for `takes`.
        """
        if not self.takes(wanted):
            return None
        paths = (self.nccl if wanted == NCCL else None, self.kernels)
        return next((path for path in paths if path is not None and path.supports(dtype, op)), None)

    def choice(self, dtype: DType, op: ReduceOp, algorithm: str | None) -> Choice:
        """Return what carries out an allreduce, where there are several ranks; see `Communicator.path_on_device`."""
        wanted = self._wanted(algorithm)
        if wanted is not None and not self.takes(wanted):
            return replace(STAGED, algorithm=wanted)
        path = self.find(dtype, op, wanted)
        return STAGED if path is None else path.choice

    def _wanted(self, algorithm: str | None = None) -> str | None:
        """Return the name of what is asked for, of a call or of all."""
        config = self._context.config
        return DETERMINISTIC if config.deterministic else algorithm or config.algorithm

    def explain(self, collective: Collective) -> str:
        """Say how arrays are reduced, why, and what else could be asked for. Local."""
        if collective is not Collective.ALLREDUCE:
            return _WHOLE
        wanted = self._wanted()
        if self._context.topology.size > 1 and not self.takes(wanted):
            also = "" if self.kernels is None else f"; also possible: {self.description}"
            return f"{_THROUGH_HOST}, as {wanted} is asked for by name{also}"
        if self.description is None:
            return (
                "not known before the first use, which is an allreduce of arrays there or empty(device='cuda') on all "
                "ranks: kernels on the GPUs if the ranks reach each other's memory, else CUDA-aware MPI, else through "
                "host memory"
            )
        if self._context.topology.size == 1:
            return self.description
        if wanted == NCCL and self.nccl is not None:
            return f"{self.nccl.description}, asked for by name; also possible: {self.description}"
        others = [] if self.kernels is None else [_THROUGH_HOST + ", by the name of an algorithm"]
        if not self._joined_nccl:
            others.append("NCCL, if it is there, by the name nccl")
        elif self.nccl is not None:
            others.append("NCCL, by its name")
        return f"{self.description}; also possible: {'; '.join(others) or 'nothing else'}"

    def remark(self, collective: Collective) -> str:
        """Return a line to add to what is said of arrays in host memory; nothing where device memory was not used."""
        if collective is not Collective.ALLREDUCE or self.description is None:
            return ""
        return f"\nin device memory: {self.description if self.takes(self._wanted()) else _THROUGH_HOST}"

    def empty(self, shape: Sequence[int], dtype: DType) -> Any:
        """Return an uninitialised CuPy array, in memory that the ranks share where they can; after `use`. Local.

        Raises:
            UnsupportedBufferError: CuPy is missing, or has no such elements.
            MemoryError: the GPU has no more.
        """
        assert self.description is not None
        driver, nbytes = self.staging().driver, prod(shape) * dtype.itemsize
        block = _Allocation(driver, nbytes) if self._devices is None else self._devices.arena.allocate(nbytes)
        return empty_on_device(block.address, max(1, nbytes), shape, dtype, driver.device.number, block)

    def close(self) -> None:
        """Give everything back. On all ranks, in any order, after which they call nothing here.

        What the GPU was given is waited for, but not for ever: it may wait for a rank that is lost, and events of a
        process that has ended never come.

        Raises:
            TransportError: the GPU has failed.
        """
        used = [part for part in (self._staging, self.nccl, self.kernels) if part is not None]
        try:
            self._context.waiter.until(lambda: all(part.idle() for part in used), lambda: "the GPU to end its work")
        except (CollectiveTimeoutError, PeerLostError) as error:
            _log.warning("memory of the GPU stays as it is until the process ends: %s", error)
            self.abandon()
            return
        except TransportError:
            self.abandon()
            raise
        parts = [part.close for part in used]
        if self._devices is not None:
            parts.append(partial(self._devices.close, self._context.waiter))
        self._staging, self.kernels, self.nccl, self._devices = None, None, None, None
        close_all(*parts)

    def abandon(self) -> None:
        """Give up after a failure. Local: waits neither for the other ranks nor for the GPU, which may wait for them.

        Memory of the GPU that peers may have open stays until the process ends; so does host memory that it may use.
        """
        parts = [part for part in (self.nccl, self.kernels, self._staging) if part is not None]
        self._staging, self.kernels, self.nccl, self._devices = None, None, None, None
        for part in parts:
            try:
                part.abandon()
            except Exception as error:  # of the device, which follows from the failure
                _log.debug("in giving up the GPU: %s", error)


class _Allocation:
    """Device memory that nobody else reaches, for as long as this object lives."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.address = driver.allocate(nbytes)
        weakref.finalize(self, driver.free, self.address).atexit = False
