"""What ringreduce asks of a GPU: memory, streams, events, copies, kernels; and how it gets at one.

Everything above works on addresses and opaque handles and asks a `Driver`. There is one over CuPy, and one that does
all of it in host memory and keeps a record, for tests (`tests/gpu_doubles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Device", "Driver", "Event", "Kernel", "Stream"]

#: Opaque: what the driver made, and takes back. Stream 0 is the legacy default stream.
Stream = int
Event = int


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, as this process sees it.

    Attributes:
        number: the ordinal in this process.
        uuid: what names it in every process, on every machine.
        name: the product.
        capability: compute capability, 90 for 9.0.
        multiprocessors: how many there are; what a grid may hold at once is counted in these.
        nbytes: its memory.
    """

    number: int
    uuid: str
    name: str
    capability: int
    multiprocessors: int
    nbytes: int


class Kernel(Protocol):
    """A compiled kernel."""

    def launch(self, grid: int, block: int, arguments: Sequence[object], stream: Stream) -> None:
        """Enqueue it; arguments are addresses (int) and NumPy scalars, in the order and with the sizes of its own."""


class Driver(Protocol):
    """The GPU that this process works on.

    Calls return before what they enqueue is done, in the order of their stream, except where it says otherwise.
    Errors become `ringreduce.TransportError`; only a lack of device memory in `allocate` is a `MemoryError`.
    """

    @property
    def device(self) -> Device: ...

    # ---- memory ----

    def allocate(self, nbytes: int) -> int:
        """Return the address of new device memory, aligned to 256 bytes, that `export` can export."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; waits for the device."""

    def export(self, address: int) -> bytes:
        """Return the handle of the allocation that begins at ``address``, for `open` in other processes."""

    def open(self, handle: bytes) -> int:
        """Return where another process's allocation is in this one's addresses.

        Raises:
            TransportError: it cannot be reached from here; what else was opened stays.
        """

    def close(self, address: int) -> None:
        """Give back what `open` gave; before the owner frees it."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin host memory, so that copies to and from it are asynchronous."""

    def unregister(self, address: int) -> None:
        """Take back what `register` did; nothing that is enqueued may still use it."""

    # ---- order ----

    def make_stream(self) -> Stream:
        """Return a new stream of high priority, which does not wait for the default stream."""

    def free_stream(self, stream: Stream) -> None: ...

    def make_event(self, *, shared: bool = False) -> Event:
        """Return a new event without timing; a shared one can be exported."""

    def export_event(self, event: Event) -> bytes: ...

    def open_event(self, handle: bytes) -> Event: ...

    def free_event(self, event: Event) -> None: ...

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

    def kernel(self, family: str, name: str) -> Kernel:
        """Return a kernel: ``name`` is an instance in ``sources/<family>.cu``; compiled when it is first asked for."""
