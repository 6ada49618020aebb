"""The allreduce of device memory by NCCL.

The ranks meet on the host first, as a collective that not all of them call would never end on the GPU. The rest is
enqueued on the caller's stream. What NCCL cannot know about a peer that is lost, the meeting of the next call finds
out; kernels that wait for the peer are ended then.

The order of summation is NCCL's: all ranks get the same bits, which depend on the number of ranks and the size, and
16-bit floats may be rounded at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ringreduce.buffers import DType
from ringreduce.buffers.device_driver import Arithmetic, Driver, Stream
from ringreduce.collectives.call import NCCL, Signature
from ringreduce.collectives.context import Context
from ringreduce.common.errors import MismatchError, RingReduceError, TransportError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.nccl import Nccl, NcclRanks, code_of_dtype, code_of_op, join_nccl, version_text
from ringreduce.gpu.path import OnDevice

__all__ = ["NcclAllreduce"]


class NcclAllreduce(OnDevice):
    """Carries out allreduces of one process set by NCCL. See `of`."""

    transport = NCCL
    algorithm = NCCL

    def __init__(self, context: Context, driver: Driver, nccl: Nccl, ranks: NcclRanks) -> None:
        super().__init__(context, driver)
        self._version = nccl.version
        self._ranks: NcclRanks | None = ranks
        self.description = f"NCCL {version_text(nccl.version)}"

    @classmethod
    def of(
        cls, context: Context, driver: Driver, find: Callable[[int], Nccl], switches: Mapping[str, str]
    ) -> NcclAllreduce | str:
        """Return one if all ranks can have one; on all ranks the reason in words otherwise. Collective.

        Args:
            context: the ranks.
            driver: this rank's GPU.
            find: see `join_nccl`.
            switches: see `join_nccl`.
        """
        joined = join_nccl(context.messages, context.waiter, driver, find, switches)
        if isinstance(joined, str):
            return joined
        try:
            return cls(context, driver, *joined)
        except TransportError:
            joined[1].abort()  # or Python would destroy it, which waits for all ranks
            raise

    def supports(self, dtype: DType, op: ReduceOp) -> bool:
        return code_of_dtype(dtype, self._version) is not None and code_of_op(op, dtype, self._version) is not None

    def run(self, source: int, target: int, arithmetic: Arithmetic, stream: Stream, signature: Signature) -> bool:
        """Reduce; see `OnDevice.run`.

        Returns:
            True.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError: see `Context.meet`; between nodes, two calls that
                were both made before can be confused, and then NCCL waits, or mixes them up.
            TransportError: NCCL failed, in this call or an earlier one.
        """
        dtype = code_of_dtype(arithmetic.dtype, self._version)
        op = code_of_op(arithmetic.op, arithmetic.dtype, self._version)
        assert dtype is not None and op is not None, "see `supports`"
        try:
            ranks = self._working()
            self._context.meet(signature)
            if arithmetic.count == 0:
                return True
            # NCCL's calls have one order on all ranks, whatever streams they are on.
            self._driver.wait(stream, self._done)
            ranks.allreduce(source, target, arithmetic.count, dtype, op, stream)
            self._driver.record(self._done, stream)
        except MismatchError:
            raise  # nothing was enqueued, and all ranks know
        except RingReduceError:
            self.abandon()
            raise
        return True

    def close(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    def abandon(self) -> None:
        """End kernels that wait for what will not come: they would keep the GPU busy for good.

        NCCL itself would wait for it wherever Python drops the ranks.
        """
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.abort()

    def _working(self) -> NcclRanks:
        if self._ranks is None:
            raise TransportError("NCCL was given up after an error")
        problem = self._ranks.error()
        if problem is not None:
            raise TransportError(f"NCCL reports {problem}")
        return self._ranks
