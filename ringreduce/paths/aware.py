"""The allreduce of device memory by an MPI library that takes its addresses, and our kernels.

The library moves bytes and nothing else: its own reductions may go through the host, and round in other places. The
schedule is `ringreduce.algorithms.direct`: one kernel adds up all ranks' parts of a block, in the order of ranks, so
bits are those of the other ways, and 16-bit floats are rounded once.

MPI knows of no streams: the host waits for the device before it starts messages, and for the kernels between the steps.
All of it happens in memory of this module's own. That costs two copies inside the device, which are quick beside any
message, and lets a plan be used for whatever array comes; and messages never begin in memory from pools, which not
every library can send from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from ringreduce.algorithms import Collective
from ringreduce.algorithms.execute import Memory, Plan
from ringreduce.buffers import Call, DType
from ringreduce.buffers.cuda.driver import Driver, Stream
from ringreduce.buffers.cuda.kernels import Rows, Table, combine
from ringreduce.errors import TransportError
from ringreduce.partition import segments_of_buffer
from ringreduce.paths.cleanup import close_all
from ringreduce.paths.context import Cache, Context, Signature
from ringreduce.paths.path import Choice
from ringreduce.reduce_ops import ReduceOp
from ringreduce.transport.cuda_awareness import CudaAwareness, cuda_awareness
from ringreduce.transport.device import address_of, untouchable
from ringreduce.transport.messages import StepFailedError, together

__all__ = ["AwareAllreduce", "agree_on_awareness"]

Array = npt.NDArray[Any]

_log = logging.getLogger(__name__)

#: The most bytes of a block that travel at once: a message that long keeps a fast link busy for longer than it takes to
#: launch a kernel and wait for it.
_SEGMENT_NBYTES = 1 << 20
_GRAIN_NBYTES = 2 << 20


def agree_on_awareness(context: Context, environ: Mapping[str, str]) -> str:
    """Return how it is known that the ranks' MPI libraries all take addresses of GPU memory. Collective.

    Args:
        context: the ranks.
        environ: the switches of MPI libraries on this rank.

    Raises:
        StepFailedError: on all ranks, if a library does not take them.
    """
    return together(context.messages, lambda: _awareness(context, environ))


def _awareness(context: Context, environ: Mapping[str, str]) -> str:
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


class AwareAllreduce:
    """Carries out allreduces of one process set on device memory; one at a time, from one thread.

    Args:
        context: the ranks, whose MPI libraries take addresses of GPU memory, all of them.
        driver: this rank's GPU.
        reason: how that is known.

    Attributes:
        transport, choice: what it is called.
        description: how it is done, for `explain` and the log.
    """

    transport = "device+messages"

    def __init__(self, context: Context, driver: Driver, reason: str) -> None:
        self._context = context
        self._driver = driver
        self._stream = driver.make_stream()  # for kernels, which need not wait for the user's
        self._computed = driver.make_event()
        self._ready = driver.make_event()
        self._done = driver.make_event()  # with the last call
        self._plans: Cache[_Plan] = Cache()
        self._rooms = _Rooms(driver)
        self._broken = False
        self.description = f"CUDA-aware MPI moves it and kernels reduce it ({reason})"

    @property
    def choice(self) -> Choice:
        return Choice("direct", type(self), "MPI moves what lies on the GPUs, kernels reduce it there")

    def supports(self, dtype: DType, op: ReduceOp) -> bool:
        """Return whether `run` takes such elements; the same on all ranks."""
        return not self._broken and not (op is ReduceOp.AVERAGE and dtype.kind in ("int", "uint", "bool"))

    def run(
        self, source: int, target: int, count: int, dtype: DType, op: ReduceOp, stream: Stream, signature: Signature
    ) -> bool:
        """Reduce C-contiguous arrays over all ranks; arguments and result as for `DeviceAllreduce.run`. Collective.

        The host waits for what the stream holds and for the peers, not for the copy into the target.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError, TransportError: as for the collectives of the host.
        """
        driver, nbytes = self._driver, count * dtype.itemsize
        self._context.meet(signature)
        if count == 0:
            return True
        try:
            plan = self._plans.get(signature.code, lambda: self._make(count, dtype, op, signature))
        except StepFailedError:
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
        """Give everything back."""
        self._driver.synchronize(self._done)
        events = (partial(self._driver.free_event, each) for each in (self._computed, self._ready, self._done))
        close_all(self._plans.close, self._rooms.close, *events, partial(self._driver.free_stream, self._stream))

    def idle(self) -> bool:
        """Return whether the GPU has done all that it was given."""
        return self._driver.done(self._done)

    def abandon(self) -> None:
        """Leave everything to the end of the process, as MPI may still use it; host memory is not touched here."""

    def _make(self, count: int, dtype: DType, op: ReduceOp, signature: Signature) -> _Plan:
        """Return a new plan. Collective: a signature is new to all ranks at once.

        Raises:
            StepFailedError: on all ranks, if one has no memory for it; nothing is tried again.
        """
        make = partial(self._bind, count, dtype, op, signature)
        try:
            return together(self._context.messages, make, _Plan.close)
        except StepFailedError as error:
            self._broken = True
            if self._context.rank == 0:
                _log.warning("arrays on GPUs go through host memory from now on: %s", error)
            raise

    def _bind(self, count: int, dtype: DType, op: ReduceOp, signature: Signature) -> _Plan:
        context, driver = self._context, self._driver
        rooms = self._rooms.taken_anew()

        def room(length: int) -> Array:
            return rooms.take(length * dtype.itemsize).view(dtype.storage)

        kernels = _Kernels(driver, dtype, op, context.topology.size, self._finish)
        mine = room(count)
        schedule = context.schedule(Collective.ALLREDUCE, self.choice.algorithm)
        limit = max(1, _SEGMENT_NBYTES // dtype.itemsize)
        plan = Plan(
            context.rank,
            schedule,
            segments_of_buffer(count, schedule.nblocks, limit),
            Memory(mine, scratch=room),
            kernels,
            context.messages,
            context.waiter,
            signature.text,
            context.tag(signature),
            instruments=context.instruments,
        )
        try:
            self._finish(kernels.upload)
        except (MemoryError, TransportError):
            plan.close()
            raise
        return _Plan(address_of(mine), plan, kernels)

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
        dtype: DType,
        op: ReduceOp,
        size: int,
        finish: Callable[[Callable[[Stream], object]], None],
    ) -> None:
        self._driver = driver
        self._dtype, self._op, self._size = dtype, op, size
        self._finish = finish
        self._addresses: list[int] = []
        self._table: Table | None = None
        driver.kernel("reduce", f"combine<{dtype.name},{op.value}>")  # compiled now, if it has to be

    def combine(self, sources: Sequence[Array]) -> Callable[[Array], object]:
        first = len(self._addresses)
        self._addresses += map(address_of, sources)
        return partial(self._run, first, len(sources), sources[0].size)

    def fold(self, target: Array, source: Array) -> Call:
        assert self._op is not ReduceOp.AVERAGE
        return partial(self.combine([target, source]), target)

    def upload(self, stream: Stream) -> None:
        """Bring the addresses to the device; after the last binding."""
        assert self._table is None
        if self._addresses:
            self._table = Table(self._driver, self._addresses, stream)

    def close(self) -> None:
        if self._table is not None:
            self._table.close()

    def _run(self, first: int, nsources: int, count: int, target: Array) -> None:
        assert self._table is not None
        sources = Rows.of(self._table, first, nsources)
        # The target is one of the sources, so its address is in the table.
        place = self._addresses.index(address_of(target), first, first + nsources)
        targets = Rows.of(self._table, place, 1)
        self._finish(
            lambda stream: combine(self._driver, self._dtype, self._op, sources, targets, count, self._size, stream)
        )


class _Rooms:
    """Device memory that plans share, as one of them runs at a time: the first piece of each, the second, ..."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._rooms: dict[tuple[int, int], int] = {}  # (which piece, its bytes) -> where it is
        self._taken = 0

    def taken_anew(self) -> _Rooms:
        """Return this, for another plan."""
        self._taken = 0
        return self

    def take(self, nbytes: int) -> Array:
        """Return a piece of ``nbytes`` bytes that no other of the same plan has.

        Raises:
            MemoryError: the GPU has no more.
        """
        key = self._taken, _roomy(nbytes)
        if key not in self._rooms:
            self._rooms[key] = self._driver.allocate(key[1])
        self._taken += 1
        return untouchable(self._rooms[key], nbytes)

    def close(self) -> None:
        """Free it all."""
        for address in self._rooms.values():
            self._driver.free(address)
        self._rooms.clear()


def _roomy(nbytes: int) -> int:
    """Return a size, at most a quarter larger beyond a few megabytes, so that arrays of many sizes share pieces."""
    unit = max(_GRAIN_NBYTES, 1 << nbytes.bit_length() >> 3)
    return -(-nbytes // unit) * unit
