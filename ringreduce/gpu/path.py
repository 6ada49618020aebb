"""What the allreduces of device memory have in common that leave it there."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from ringreduce.buffers import DType
from ringreduce.buffers.device_driver import Driver, Stream
from ringreduce.collectives.context import Cache, Context, Signature
from ringreduce.collectives.path import Choice
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.kernels import Arithmetic
from ringreduce.transport.messages import StepFailedError, together

__all__ = ["OnDevice"]

_log = logging.getLogger(__name__)


class OnDevice(ABC):
    """Carries out allreduces of one process set on device memory; one at a time, from one thread.

    Args:
        context: the ranks.
        driver: this rank's GPU.

    Attributes:
        transport, algorithm, reason: of its `Choice`.
        description: how it is done, for `explain` and the log.
    """

    transport: ClassVar[str]
    algorithm: ClassVar[str]
    reason: ClassVar[str]
    description: str

    def __init__(self, context: Context, driver: Driver) -> None:
        self._context = context
        self._driver = driver
        self._done = driver.make_event()  # with the last call
        self._plans: Cache[Any] = Cache()
        self._broken = False

    @property
    def choice(self) -> Choice:
        return Choice(self.algorithm, type(self), self.reason)

    def supports(self, dtype: DType, op: ReduceOp) -> bool:
        """Return whether `run` takes such elements; the same on all ranks."""
        return not self._broken and not (op is ReduceOp.AVERAGE and dtype.integral)

    @abstractmethod
    def run(self, source: int, target: int, reduction: Arithmetic, stream: Stream, signature: Signature) -> bool:
        """Reduce C-contiguous arrays over all ranks. Collective; ordered on the stream as if all of it ran there.

        Args:
            source: the address of this rank's array, on its GPU.
            target: that of the result, which is the source or apart from it.
            reduction: what is done to how many elements; see `supports`.
            stream: the caller's.
            signature: of the call: says at least the reduction.

        Returns:
            False, on all ranks, if one of them has no memory or does not reach that of a peer: the sources are as they
            were, and the call has to be made on another path.

        Raises:
            MismatchError, CollectiveTimeoutError, PeerLostError, TransportError: as for the collectives of the host.
        """

    def idle(self) -> bool:
        """Return whether the GPU has done all that it was given."""
        return self._driver.done(self._done)

    @abstractmethod
    def close(self) -> None:
        """Give everything back, once `idle`."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up after a failure: wait for nothing, and let nothing wait or be used that others might have."""

    def _plan(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the plan of a key, None on all ranks if it cannot be made on one of them; nothing is tried again then.

        Keys are the same on all ranks, so all of them keep the same plans, and make one at the same call.
        """
        try:
            return self._plans.get(key, lambda: together(self._context.messages, make, lambda plan: plan.close()))
        except StepFailedError as error:
            self._broken = True
            if self._context.rank == 0:
                _log.warning("arrays on GPUs go through host memory from now on: %s", error)
            return None
