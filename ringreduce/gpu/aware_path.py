"""The allreduce of device memory by an MPI library that takes its addresses, and our kernels.

The library moves bytes and nothing else: its own reductions may go through the host, and round in other places. The
schedule is `ringreduce.algorithms.direct`: one kernel adds up all ranks' parts of a block, in the order of ranks, so
bits are those of the other paths, and 16-bit floats are rounded once.

MPI knows of no streams: the host waits for the device before it starts messages, and for the kernels between the steps.
All of it happens in memory of this module's own. That costs two copies inside the device, which are quick beside any
message, and lets a plan be used for whatever array comes; and messages never begin in memory from pools, which not
every library can send from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.buffers import Call, address_of
from ringreduce.buffers.device_driver import Driver, Stream
from ringreduce.collectives.context import Context, Signature
from ringreduce.collectives.plan import Memory, Plan
from ringreduce.common.cleanup import close_all
from ringreduce.common.errors import TransportError
from ringreduce.common.partition import segments_of_buffer
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.awareness import CudaAwareness, cuda_awareness
from ringreduce.gpu.ipc import untouchable
from ringreduce.gpu.kernels import Arithmetic, Table, combine
from ringreduce.gpu.path import OnDevice

__all__ = ["AwareAllreduce", "awareness"]

Array = npt.NDArray[Any]

#: The most bytes of a block that travel at once: a message that long keeps a fast link busy for longer than it takes to
#: launch a kernel and wait for it.
_SEGMENT_NBYTES = 1 << 20
_GRAIN_NBYTES = 2 << 20


def awareness(context: Context, environ: Mapping[str, str]) -> str:
    """Return how it is known that this rank's MPI library takes addresses of GPU memory.

    Args:
        context: the ranks.
        environ: the switches of MPI libraries on this rank.

    Raises:
        TransportError: it does not take them.
    """
    told = context.config.cuda_aware
    if told is not None:
        found = CudaAwareness(told, f"RINGREDUCE_CUDA_AWARE is {int(told)}")
    elif context.messages.name != "mpi":
        found = CudaAwareness(False, "the ranks do not talk over MPI")
    else:
        try:
            found = cuda_awareness(environ)
        except (OSError, RuntimeError) as error:
            found = CudaAwareness(False, f"the library cannot be asked: {error}")
    if not found.aware:
        raise TransportError(found.reason)
    return found.reason


class AwareAllreduce(OnDevice):
    """Carries out allreduces of one process set by an MPI library that takes addresses of GPU memory, on all ranks.

    Args:
        context: the ranks.
        driver: this rank's GPU.
        reason: how it is known that the libraries take them.
    """

    transport = "device+messages"
    algorithm = "direct"
    reason = "MPI moves what is on the GPUs, kernels reduce it there"

    def __init__(self, context: Context, driver: Driver, reason: str) -> None:
        super().__init__(context, driver)
        self._stream = driver.make_stream()  # for kernels, which need not wait for the user's
        self._computed, self._ready = driver.make_event(), driver.make_event()
        self._memory: dict[tuple[int, int], int] = {}  # (which piece of a plan, its bytes) -> where it is
        self.description = f"CUDA-aware MPI moves it and kernels reduce it ({reason})"

    def run(self, source: int, target: int, reduction: Arithmetic, stream: Stream, signature: Signature) -> bool:
        """Reduce; see `OnDevice.run`. The host waits for what the stream holds and for the peers, not for the target.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError, TransportError: as for the collectives of the host.
        """
        driver, nbytes = self._driver, reduction.nbytes
        self._context.meet(signature)
        if reduction.count == 0:
            return True
        plan = self._plan(signature.code, lambda: self._bind(reduction, signature))
        if plan is None:
            return False
        driver.wait(stream, self._done)
        driver.copy(plan.address, source, nbytes, stream)
        driver.record(self._ready, stream)
        driver.synchronize(self._ready)
        plan.plan.run()
        driver.copy(target, plan.address, nbytes, stream)
        driver.record(self._done, stream)
        return True

    def close(self) -> None:
        driver = self._driver
        driver.synchronize(self._done)
        memory = (partial(driver.free, address) for address in self._memory.values())
        events = (partial(driver.free_event, each) for each in (self._computed, self._ready, self._done))
        close_all(self._plans.close, *memory, *events, partial(driver.free_stream, self._stream))

    def abandon(self) -> None:
        """Leave everything to the end of the process, as MPI may still use it; host memory is not touched here."""

    def _bind(self, reduction: Arithmetic, signature: Signature) -> _Plan:
        context, dtype, taken = self._context, reduction.dtype, itertools.count()

        def scratch(length: int) -> Array:
            return self._piece(next(taken), length * dtype.itemsize).view(dtype.storage)

        kernels = _Kernels(self._driver, reduction, context.topology.size, self._finish)
        mine = scratch(reduction.count)
        nblocks = context.schedule(Collective.ALLREDUCE, self.algorithm).nblocks
        segments = segments_of_buffer(reduction.count, nblocks, max(1, _SEGMENT_NBYTES // dtype.itemsize))
        memory = Memory(mine, make_scratch=scratch)
        plan = context.plan(Collective.ALLREDUCE, self.algorithm, segments, memory, kernels, signature)
        try:
            self._finish(kernels.upload)
        except (MemoryError, TransportError):
            plan.close()
            raise
        return _Plan(address_of(mine), plan, kernels)

    def _piece(self, number: int, nbytes: int) -> Array:
        """Return device memory for one piece of a plan. Plans share it, as one of them runs at a time.

        Raises:
            MemoryError: the GPU has no more.
        """
        # At most a quarter larger beyond a few megabytes, so that arrays of many sizes share pieces.
        unit = max(_GRAIN_NBYTES, 1 << nbytes.bit_length() >> 3)
        key = number, -(-nbytes // unit) * unit
        if key not in self._memory:
            self._memory[key] = self._driver.allocate(key[1])
        return untouchable(self._memory[key], nbytes)

    def _finish(self, enqueue: Callable[[Stream], object]) -> None:
        """Enqueue something and return when it is done: only then may a message take what it made."""
        enqueue(self._stream)
        self._driver.record(self._computed, self._stream)
        self._driver.synchronize(self._computed)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan on device memory, where that begins, and what reduces there."""

    address: int
    plan: Plan
    kernels: _Kernels

    def close(self) -> None:
        self.plan.close()
        self.kernels.close()


class _Kernels:
    """`ringreduce.buffers.Kernels` on arrays that stand for device memory; what they bind returns when it is done.

    The addresses of all that is bound go into one table, so a plan has to `upload` it before it runs.
    """

    def __init__(
        self,
        driver: Driver,
        reduction: Arithmetic,
        size: int,
        finish: Callable[[Callable[[Stream], object]], None],
    ) -> None:
        self._driver = driver
        self._reduction, self._size = reduction, size
        self._finish = finish
        self._addresses: list[int] = []
        self._table: Table | None = None
        reduction.compile(driver, "reduce", "combine")  # now, if it has to be

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        assert complete or self._reduction.op is not ReduceOp.AVERAGE
        first = len(self._addresses)
        self._addresses += map(address_of, sources)
        return partial(self._run, first, len(sources), replace(self._reduction, count=sources[0].size))

    def fold(self, target: Array, source: Array, *, complete: bool = True) -> Call:
        return partial(self.combine([target, source], complete=complete), target)

    def upload(self, stream: Stream) -> None:
        """Bring the addresses to the device; after the last binding."""
        assert self._table is None
        if self._addresses:
            self._table = Table(self._driver, self._addresses, stream)

    def close(self) -> None:
        if self._table is not None:
            self._table.close()

    def _run(self, first: int, nsources: int, reduction: Arithmetic, target: Array) -> None:
        assert self._table is not None
        sources = self._table.part(first, nsources)
        # The target is one of the sources, so its address is in the table.
        targets = self._table.part(self._addresses.index(address_of(target), first, first + nsources), 1)
        self._finish(lambda stream: combine(self._driver, reduction, sources, targets, self._size, stream))
