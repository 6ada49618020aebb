"""A rank's GPU as a communicator uses it: found when it is first needed, and used through what the user asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

from ringreduce.buffers import DType, Operand
from ringreduce.buffers.device_arrays import DeviceOperand, empty_on_device
from ringreduce.collectives import Collective
from ringreduce.collectives.call import DETERMINISTIC, NCCL, CallKind, Choice, Task
from ringreduce.collectives.comm_state import CommState
from ringreduce.collectives.context import Context
from ringreduce.collectives.operands import Devices, HostReducer, Running
from ringreduce.common.config import gpu_switches
from ringreduce.common.errors import (
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    TransportError,
    UnsupportedBufferError,
)
from ringreduce.common.finalizers import when_ended
from ringreduce.common.lifetime import close_all
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.aware_path import AwareAllreduce
from ringreduce.gpu.awareness import CudaAwareness, cuda_awareness
from ringreduce.gpu.cupy_driver import Arithmetic, CupyDriver, cuda_driver
from ringreduce.gpu.nccl import Nccl, NcclAllreduce, cupy_nccl
from ringreduce.gpu.path import OnDevice
from ringreduce.gpu.staging import Staging
from ringreduce.transport.shared.board import Signature

_log = logging.getLogger(__name__)

_THROUGH_HOST = "arrays go through host memory, in segments"
_WHOLE = "arrays go through host memory, whole"

#: What carries out an allreduce of arrays in device memory unless the user asks for something else.
STAGED = Choice("staged", Staging, _THROUGH_HOST)

#: What can be asked for besides, as values of RINGREDUCE_GPU -> in words, and the text of the rendezvous to set it up.
_NAMES = {NCCL: "NCCL", "mpi": "CUDA-aware MPI"}
_FIRST_USE = {
    asked: Signature.of(f"the first use of {name}: an allreduce of arrays in device memory")
    for asked, name in _NAMES.items()
}


class Gpu(Devices):
    """The GPU of this rank in one process set.

    Args:
        context: the ranks.
        state: gets the errors of setting up NCCL or CUDA-aware MPI.

    Attributes:
        drivers: returns the driver of a GPU by its ordinal, of the current one for None.
        libraries: returns NCCL on a GPU by its ordinal.
        awareness: asks the MPI library whether it takes addresses of GPU memory.
    """

    def __init__(self, context: Context, state: CommState) -> None:
        self._context = context
        self._state = state
        self.drivers: Callable[[int | None], CupyDriver] = cuda_driver
        self.libraries: Callable[[int], Nccl] = cupy_nccl
        self.awareness: Callable[[], CudaAwareness] = partial(_awareness, context)
        self._staging: Staging | None = None
        #: What has been asked for -> what does it; the reason in words if nothing can.
        self._paths: dict[str, OnDevice | str] = {}

    def require_usable(self, number: int | None) -> Staging:
        """Return what carries arrays between a GPU and this rank's host memory; refuse one that it cannot use. Local.

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

    def empty(self, number: int | None, shape: Sequence[int], dtype: DType) -> Any:
        """Return an uninitialised CuPy array. Local.

        Raises:
            UnsupportedBufferError: CuPy is missing, or has no such elements; or as `require_usable` does.
            MemoryError: the GPU has no more.
        """
        driver = self.require_usable(number).driver
        nbytes = prod(shape) * dtype.itemsize
        block = _DeviceMemory(driver, nbytes)
        return empty_on_device(
            block.address, max(1, nbytes), shape=shape, dtype=dtype, device=driver.device.number, owner=block
        )

    def on_host(self, operand: DeviceOperand, *, fetch: bool, store: bool) -> AbstractContextManager[Operand]:
        return self.require_usable(operand.device).on_host(operand, fetch=fetch, store=store)

    def allreduce(
        self, source: DeviceOperand, target: DeviceOperand, kind: CallKind, host: HostReducer, running: Running
    ) -> None:
        """Reduce arrays of any layout by what is asked for, else through host memory; see `Devices`."""
        staging = self.require_usable(source.device)
        tasks = self._tasks(kind, staging.segments(source), host)
        whole = next(iter(tasks.values()))

        def reduce(segment: Operand) -> None:
            host.reduce_in_place(tasks[segment.count], segment)

        ordered = staging.in_c_order(source)
        taken = target.scratch()
        if ordered.may_overlap(taken) and not ordered.same_memory(taken):
            ordered = staging.in_c_order(ordered, copy=True)
        if self._context.topology.size == 1:
            with running(whole.choice.algorithm):
                staging.copy(ordered, taken)
        else:
            asked = self._asked(kind.algorithm)
            self._set_up(asked)
            path = self._path(asked, ordered.dtype, whole.kind.op)
            arithmetic = Arithmetic(ordered.dtype, whole.kind.op, ordered.count)
            with running((path or STAGED).algorithm), staging.in_order(ordered, taken) as stream:
                addresses = ordered.address, taken.address
                if path is None or not path.run(*addresses, arithmetic, stream, whole.signature):
                    staging.allreduce(ordered, taken, reduce)
        staging.store(target, taken)

    def _tasks(self, kind: CallKind, segments: Sequence[slice], host: HostReducer) -> dict[int, Task]:
        """Return, by their number of elements, the tasks in host memory of the segments of an array.

        The signatures say all that must agree about the whole array, so that a mismatch is seen at the first segment. A
        shorter last segment has a signature of its own, as plans are found by signatures.

        Args:
            kind: of the call.
            segments: at least one; all but the last have the same length.
            host: makes the tasks.

        Raises:
            ConfigError: there is no such algorithm, or it cannot run here.
        """
        by_nccl = kind.algorithm == NCCL
        if by_nccl and self._context.config.deterministic:
            raise ConfigError("RINGREDUCE_DETERMINISTIC is set, so algorithm='nccl' cannot be asked for")
        argument = f"{kind.op.value} in device memory{' by nccl' if by_nccl else ''}"
        usual, last = (part.stop - part.start for part in (segments[0], segments[-1]))
        return {
            count: host.task(
                kind._replace(
                    argument=argument if count == usual else f"{argument}, its last {count} elements",
                    algorithm=None if by_nccl else kind.algorithm,
                    nbytes=count * kind.dtype.itemsize,
                )
            )
            for count in dict.fromkeys((usual, last))
        }

    # ---- what is asked for ----

    def _wanted(self, algorithm: str | None = None) -> str:
        """Return the algorithm that is asked for, by a call or for all of them; ``"auto"`` for none."""
        config = self._context.config
        return DETERMINISTIC if config.deterministic else algorithm or config.algorithm or "auto"

    def _asked(self, algorithm: str | None = None) -> str:
        """Return what allreduces are to be carried out by: ``"staged"``, ``"nccl"`` or ``"mpi"``."""
        wanted = self._wanted(algorithm)
        if wanted == NCCL:
            return NCCL
        return self._context.config.gpu if wanted == "auto" else STAGED.algorithm

    def _set_up(self, asked: str) -> None:
        """Set up what is asked for, unless that was done; collective then.

        Raises:
            MismatchError: not all ranks call this for the first time.
        """
        if asked == STAGED.algorithm or asked in self._paths:
            return
        context = self._context
        driver = self.require_usable(None).driver
        try:
            context.rendezvous(_FIRST_USE[asked])
            path: OnDevice | str
            if asked == NCCL:
                path = NcclAllreduce.of(context, driver, find=self.libraries, switches=gpu_switches())
            else:
                path = AwareAllreduce.of(context, driver, self.awareness)
        except BaseException as error:
            self._state.break_off(error)
            raise
        self._paths[asked] = path
        if context.rank:
            return
        if isinstance(path, str):
            _log.warning("%s is not used, though asked for: %s", _NAMES[asked], path)
        else:
            _log.info("allreduce of arrays in device memory: %s", path.description)
            if asked != NCCL:
                _warn_of_no_report(_NAMES[asked])

    def _path(self, asked: str, dtype: DType, op: ReduceOp) -> OnDevice | None:
        """Return what reduces such elements on the GPUs; None if nothing does. Local; the same on all ranks."""
        path = self._paths.get(asked)
        return path if isinstance(path, OnDevice) and path.supports(dtype, op) else None

    def choice(self, dtype: DType, op: ReduceOp, algorithm: str | None) -> Choice:
        """Return what carries out an allreduce, where there are several ranks; see `Communicator.path_on_device`."""
        wanted = self._wanted(algorithm)
        path = self._path(self._asked(algorithm), dtype, op)
        if path is not None:
            return path.choice
        return STAGED if wanted in ("auto", DETERMINISTIC, NCCL) else replace(STAGED, algorithm=wanted)

    def explain(self, collective: Collective) -> str:
        """Say how arrays are reduced, why, and what else could be asked for. Local."""
        if collective is not Collective.ALLREDUCE:
            return _WHOLE
        if self._context.topology.size == 1:
            return "there is one rank"
        wanted = self._wanted()
        asked = self._asked()
        path = self._paths.get(asked)
        if isinstance(path, OnDevice):
            return f"{path.description}, as asked for; what it lacks goes through host memory"
        if isinstance(path, str):
            return f"{_THROUGH_HOST}, as {_NAMES[asked]} cannot be used: {path}"
        if asked in _NAMES:
            return f"{_NAMES[asked]} is asked for; whether the ranks can use it is known after the first allreduce"
        why = f", as {wanted} is asked for by name" if wanted != "auto" else ""
        return f"{_THROUGH_HOST}{why}; also possible, where RINGREDUCE_GPU asks for it: nccl, mpi"

    def remark(self, collective: Collective) -> str:
        """Return a line to add to what is said of arrays in host memory; nothing where device memory was not used."""
        used = collective is Collective.ALLREDUCE and self._staging is not None
        return f"\nin device memory: {self.explain(collective)}" if used else ""

    # ---- the end ----

    def close(self) -> None:
        """Give everything back. On all ranks, in any order, after which they call nothing here.

        What the GPU was given is waited for, but not for ever: it may wait for a rank that has failed.

        Raises:
            TransportError: the GPU has failed.
        """
        used = self._parts()
        try:
            self._context.waiter.until(lambda: all(part.idle() for part in used), lambda: "the GPU to end its work")
        except (CollectiveTimeoutError, PeerLostError) as error:
            _log.warning("memory of the GPU stays as it is until the process ends: %s", error)
            self.abandon()
            return
        except TransportError:
            self.abandon()
            raise
        self._staging = None
        self._paths = {}
        close_all(*(part.close for part in used))

    def abandon(self) -> None:
        """Give up after a failure. Local: waits neither for the other ranks nor for the GPU, which may wait for them.

        Host memory that the GPU may use stays until the process ends.
        """
        parts = self._parts()[::-1]
        self._staging = None
        self._paths = {}
        for part in parts:
            try:
                part.abandon()
            except Exception as error:  # An error of the device follows from the failure.
                _log.debug("in giving up the GPU: %s", error)

    def _parts(self) -> list[Staging | OnDevice]:
        paths = (path for path in self._paths.values() if isinstance(path, OnDevice))
        return [*([] if self._staging is None else [self._staging]), *paths]


class _DeviceMemory:
    """Device memory, for as long as this object lives."""

    def __init__(self, driver: CupyDriver, nbytes: int) -> None:
        self.address = driver.allocate(nbytes)
        when_ended(self, driver.free, self.address)


def _awareness(context: Context) -> CudaAwareness:
    """Ask the MPI library of this rank, if that is what the ranks talk over."""
    if context.messages.name != "mpi":
        return CudaAwareness(False, "the ranks do not talk over MPI")
    try:
        return cuda_awareness(gpu_switches())
    except (OSError, RuntimeError) as error:
        return CudaAwareness(False, f"the library cannot be asked: {error}")


@cache  # Once in a process, however many process sets use it.
def _warn_of_no_report(name: str) -> None:
    _log.warning(
        "%s reduces arrays on GPUs, as asked for, and no report of scripts/gpu_check has been committed for it: check "
        "the results; RINGREDUCE_GPU=staged does without it",
        name,
    )
