"""The allreduce of device memory by an MPI library that takes its addresses, and CuPy's kernels.

This path has not run on a device: tests use drivers in host memory, and `scripts/gpu_check` has reported on no GPU.

The library moves bytes and nothing else: its own reductions may go through the host, and round in other places. In the
schedule, direct of `ringreduce.algorithms.pairs`, all terms of a block are added up in the order of ranks, and 16-bit
floats are rounded once.

MPI knows of no streams: the host waits for the device before it starts messages, and for the sums between the steps.
All of it happens in memory of this module's own. That costs two copies inside the device, which are quick beside any
message, and lets a plan be used for whatever array comes; and messages never begin in memory from pools, which not
every library can send from.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ringreduce.buffers import Array, DType, address_of
from ringreduce.collectives import Collective
from ringreduce.collectives.context import Context
from ringreduce.collectives.plans.bound import BlockMemory, BoundSchedule
from ringreduce.common.errors import TransportError
from ringreduce.common.lifetime import close_all
from ringreduce.common.partition import segments_of_buffer
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.awareness import CudaAwareness
from ringreduce.gpu.cupy_driver import FOLDS, Arithmetic, CupyDriver, Stream
from ringreduce.gpu.path import OnDevice
from ringreduce.transport.messages import StepFailedError, together
from ringreduce.transport.shared.board import Signature

_log = logging.getLogger(__name__)

#: The most bytes of a block that travel at once: a message that long keeps a fast link busy for longer than it takes to
#: launch a kernel and wait for it.
_SEGMENT_NBYTES = 1 << 20
_GRAIN_NBYTES = 2 << 20
_MOST_PLANS = 256

#: Where the device memory of a plan begins, and the plan.
_Plan = tuple[int, BoundSchedule]


class AwareAllreduce(OnDevice):
    """Carries out allreduces of one process set by MPI libraries that take addresses of GPU memory. See `of`."""

    transport = "device+messages"
    algorithm = "direct"

    def __init__(self, context: Context, driver: CupyDriver, reason: str) -> None:
        super().__init__(context, driver)
        self._stream = driver.make_stream()  # Sums need not wait for the user's stream.
        self._computed = driver.make_event()
        self._ready = driver.make_event()
        self._memory: dict[tuple[int, int], int] = {}  # (which piece of a plan, its bytes) -> where it is
        self._plans: dict[int, _Plan] = {}  # By signature; the same on all ranks, as they make plans together.
        self._broken = False
        self.description = f"CUDA-aware MPI, with CuPy's sums ({reason})"

    @classmethod
    def of(cls, context: Context, driver: CupyDriver, ask: Callable[[], CudaAwareness]) -> AwareAllreduce | str:
        """Return one if no rank's library denies it; on all ranks the reason in words otherwise. Collective.

        Args:
            context: the ranks.
            driver: this rank's GPU.
            ask: asks this rank's library. Where it does not say, the user's word counts, who asked for this path.
        """

        def look() -> str:
            answer = ask()
            if context.config.checksum:
                raise TransportError("RINGREDUCE_CHECKSUM has the host read what is sent")
            if context.config.key_file is not None:
                raise TransportError("RINGREDUCE_KEY_FILE has the host seal what is sent")
            if answer.aware is False:
                raise TransportError(answer.reason)
            return answer.reason

        try:
            return cls(context, driver, together(context.messages, look))
        except StepFailedError as error:
            return str(error)

    def supports(self, dtype: DType, op: ReduceOp) -> bool:
        # CuPy orders complex numbers in another way where one of them is NaN.
        ordered = dtype.kind != "complex" or op not in (ReduceOp.MIN, ReduceOp.MAX)
        return not self._broken and op in FOLDS and ordered and not (op is ReduceOp.AVERAGE and dtype.integral)

    def run(self, source: int, target: int, arithmetic: Arithmetic, stream: Stream, signature: Signature) -> bool:
        """Reduce; see `OnDevice.run`. The host waits for what the stream holds and for the peers, not for the target.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError, TransportError: as for the collectives of the host.
        """
        driver = self._driver
        nbytes = arithmetic.nbytes
        self._context.rendezvous(signature)
        if arithmetic.count == 0:
            return True
        try:
            address, plan = self._plans.get(signature.code) or self._make(arithmetic, signature)
        except StepFailedError as error:
            self._broken = True
            if self._context.rank == 0:
                _log.warning("arrays on GPUs go through host memory from now on: %s", error)
            return False
        driver.wait(stream, self._done)
        driver.copy(address, source, nbytes, stream)
        driver.record(self._ready, stream)
        driver.synchronize(self._ready)
        plan.run()
        driver.copy(target, address, nbytes, stream)
        driver.record(self._done, stream)
        return True

    def close(self) -> None:
        driver = self._driver
        driver.synchronize(self._done)
        memory = (partial(driver.free, address) for address in self._memory.values())
        close_all(*(plan.close for _, plan in self._plans.values()), *memory, partial(driver.free_stream, self._stream))

    def abandon(self) -> None:
        """Leave everything to the end of the process, as MPI may still use it; host memory is not touched here."""

    def _make(self, arithmetic: Arithmetic, signature: Signature) -> _Plan:
        """Make a plan on all ranks.

        Raises:
            StepFailedError: on all of them, if one has no memory.
        """
        made = together(self._context.messages, lambda: self._bind(arithmetic, signature), lambda plan: plan[1].close())
        if len(self._plans) >= _MOST_PLANS:
            self._plans.pop(next(iter(self._plans)))[1].close()
        self._plans[signature.code] = made
        return made

    def _bind(self, arithmetic: Arithmetic, signature: Signature) -> _Plan:
        context = self._context
        dtype = arithmetic.dtype
        taken = itertools.count()

        def scratch(length: int) -> Array:
            return self._piece(next(taken), length * dtype.itemsize).view(dtype.storage)

        sums = _Sums(self._driver, arithmetic, size=context.topology.size, finish=self._finish)
        mine = scratch(arithmetic.count)
        schedule = context.schedule(Collective.ALLREDUCE, self.algorithm)
        segments = segments_of_buffer(arithmetic.count, schedule.nblocks, max(1, _SEGMENT_NBYTES // dtype.itemsize))
        plan = BoundSchedule(
            schedule,
            segments,
            memory=BlockMemory(mine, make_scratch=scratch),
            kernels=sums,
            link=context.link(signature),
        )
        return address_of(mine), plan

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
class _Sums:
    """`ringreduce.buffers.Kernels` on arrays that stand for device memory; what they bind returns when it is done."""

    driver: CupyDriver
    arithmetic: Arithmetic
    size: int
    finish: Callable[[Callable[[Stream], object]], None]

    def combine(self, sources: Sequence[Array], *, complete: bool = True) -> Callable[[Array], object]:
        assert complete or self.arithmetic.op is not ReduceOp.AVERAGE
        arithmetic = replace(self.arithmetic, count=sources[0].size)
        addresses = [address_of(source) for source in sources]

        def run(target: Array) -> None:
            place = address_of(target)
            self.finish(lambda stream: self.driver.combine(arithmetic, addresses, place, self.size, stream))

        return run


def untouchable(address: int, nbytes: int) -> Array:
    """Return an array over device memory: it has an address and can be sliced; its elements must not be read."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
