"""What ringreduce asks of a GPU: memory, streams, events, copies and sums.

Everything above works on addresses and opaque handles and asks a `Driver`. There is one over CuPy, and one for tests
that does all of it in host memory and keeps a record (`tests/gpu_doubles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringreduce.buffers.dtypes import DType
from ringreduce.common.reduce_ops import ReduceOp

__all__ = ["Arithmetic", "Device", "Driver", "Event", "Stream"]

#: Opaque: what the driver made. Stream 0 is the legacy default stream.
Stream = int
Event = Any


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, as this process sees it.

    Attributes:
        number: the ordinal in this process.
        uuid: what names it in every process, on every machine.
        name: the product.
        capability: compute capability, 90 for 9.0.
        nbytes: its memory.
    """

    number: int
    uuid: str
    name: str
    capability: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What is done to how many elements.

    Attributes:
        dtype: of the arrays; 16-bit floats are accumulated in float32 and rounded once.
        op: how they are reduced; no average of integers or bools, no minimum or maximum of complex numbers.
        count: elements of each array.
    """

    dtype: DType
    op: ReduceOp
    count: int

    @property
    def nbytes(self) -> int:
        """Of each array."""
        return self.count * self.dtype.itemsize


class Driver(Protocol):
    """The GPU that this process works on.

    Calls return before what they enqueue is done, in the order of their stream, except where it says otherwise.
    Errors become `ringreduce.TransportError`; only a lack of device memory in `allocate` is a `MemoryError`.
    """

    device: Device

    # ---- memory ----

    def allocate(self, nbytes: int) -> int:
        """Return the address of new device memory, aligned to 256 bytes, from no pool."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; waits for the device."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that copies to and from it are asynchronous."""

    def unregister(self, address: int) -> None:
        """Take back what `register` did; nothing that is enqueued may still use it."""

    # ---- order ----

    def make_stream(self) -> Stream:
        """Return a new stream of high priority, which does not wait for the default stream."""

    def free_stream(self, stream: Stream) -> None: ...

    def make_event(self) -> Event:
        """Return a new event without timing; it is given back when nobody refers to it any more."""

    def record(self, event: Event, stream: Stream) -> None:
        """Let the event stand for all that has been enqueued on the stream."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what is enqueued on the stream from now on begin after the event, as it was recorded last."""

    def done(self, event: Event) -> bool:
        """Return whether what the event stands for is done."""

    def synchronize(self, event: Event) -> None:
        """Return when what the event stands for is done."""

    def synchronize_device(self) -> None:
        """Return when all that this process has enqueued on the GPU so far is done, on any stream and by anybody."""

    # ---- work ----

    def copy(self, target: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy between any two of device and host memory.

        If the host memory is not pinned, the call returns when the host may use it again: when the copy is done, or its
        bytes have at least left it for the device.
        """

    def combine(self, arithmetic: Arithmetic, sources: Sequence[int], target: int, size: int, stream: Stream) -> None:
        """Reduce arrays in device memory, in the order of ``sources``.

        Args:
            arithmetic: what is done.
            sources: the addresses of the arrays.
            target: where the result goes; it may be one of the sources.
            size: what an average is divided by.
            stream: on which the sources are ready.
        """
