"""What the allreduces of device memory have in common that leave it there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from ringreduce.buffers import DType
from ringreduce.collectives.call import Choice
from ringreduce.collectives.context import Context
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.gpu.cupy_driver import Arithmetic, CupyDriver, Stream
from ringreduce.transport.shared.board import Signature


class OnDevice(ABC):
    """Carries out allreduces of one process set on device memory; one at a time, from one thread.

    Args:
        context: the ranks.
        driver: this rank's GPU.

    Attributes:
        transport, algorithm: of its `Choice`.
        description: what does it, for `explain` and the log.
    """

    transport: ClassVar[str]
    algorithm: ClassVar[str]
    description: str

    def __init__(self, context: Context, driver: CupyDriver) -> None:
        self._context = context
        self._driver = driver
        self._done = driver.make_event()  # Recorded at the end of the last call.

    @property
    def choice(self) -> Choice:
        return Choice(self.algorithm, type(self), "asked for by name")

    @abstractmethod
    def supports(self, dtype: DType, op: ReduceOp) -> bool:
        """Return whether `run` takes such elements; the same on all ranks."""

    @abstractmethod
    def run(self, source: int, target: int, arithmetic: Arithmetic, stream: Stream, signature: Signature) -> bool:
        """Reduce C-contiguous arrays over all ranks. Collective; ordered on the stream as if all of it ran there.

        Args:
            source: the address of this rank's array, on its GPU.
            target: that of the result, which is the source or apart from it.
            arithmetic: what is done to how many elements; see `supports`.
            stream: the caller's.
            signature: of the call: says at least what is reduced, and how.

        Returns:
            False, on all ranks, if one of them has no memory: the sources are as they were, and the call has to be made
            on another path.

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
        """Give up after a failure, without waiting for the other ranks or the GPU."""
