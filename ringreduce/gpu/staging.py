"""Arrays in device memory through host memory: down from the GPU, a collective of the host, up again.

The host memory is of the arena, so what a copy engine puts there can be reached by the other ranks of the node as it
is, and it is pinned once. The allreduce goes in segments: while the ranks reduce one, the next ones come down and the
last ones go up. All other collectives wait for all of their input.

The order is that of streams. What the caller enqueued on its stream is done before an array is read; what it enqueues
after the call begins when the result has arrived. The host itself waits for the input, that is, for what the caller
has enqueued before it, and for the other ranks; not for the last copy up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod

from ringreduce.buffers import Array, DType, Operand, address_of
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.common.errors import TransportError
from ringreduce.common.lifetime import close_all
from ringreduce.common.partition import pieces
from ringreduce.gpu.cupy_driver import CupyDriver, Stream
from ringreduce.transport.shared.arena import Arena

_log = logging.getLogger(__name__)

#: A segment takes a copy engine about 80 us, which covers what Python adds to each; four of them, since one comes down,
#: one is reduced, one goes up, and one more lets these three be of different speed.
_SEGMENT_NBYTES = 4 << 20
_SLOTS = 4
#: Pinned memory for whole arrays is kept up to this size. Larger arrays travel through memory that is not pinned:
#: pinning takes longer than one slow copy, and pinned memory is not available to other programs.
_KEPT_NBYTES = 64 << 20
#: Up to this size there are two pieces of pinned memory that calls take in turn, so that a call need not wait for the
#: last one's copy up: of the many arrays of a model, most are smaller.
_ALTERNATING_NBYTES = 4 << 20

#: Pinned memory that a copy may still use: nobody waits for a device after a failure. If it were unmapped, the device
#: would go on to write into pages that the system has given to others, and addresses that are mapped again would count
#: as pinned. It stays until the process ends.
_kept_mapped: list[object] = []


class Staging:
    """Takes one GPU's arrays through this rank's host memory. Local: what the ranks do together is the caller's.

    Operands are of this driver's GPU, and in C order unless it says otherwise. Not thread-safe.

    Args:
        driver: of the GPU.
        arena: where host memory comes from.
    """

    transport = "staged"

    def __init__(self, driver: CupyDriver, arena: Arena) -> None:
        self.driver = driver
        self._arena = arena
        self._down = driver.make_stream()
        self._up = driver.make_stream()
        self._called = driver.make_event()
        self._slots: list[_HostBlock] = []
        self._kept: dict[int, _HostBlock] = {}
        self._turn = 0

    def copy(self, source: DeviceOperand, target: DeviceOperand) -> None:
        """Copy within the GPU; the host does not wait."""
        with self.in_order(source, target) as stream:
            if target.address != source.address:
                self.driver.copy(target.address, source.address, source.nbytes, stream)

    @contextmanager
    def in_order(self, source: DeviceOperand, target: DeviceOperand) -> Iterator[Stream]:
        """Give a stream that comes after the streams of both operands; they come after what is enqueued there."""
        others = {source.stream} - {target.stream}
        for stream in others:
            self.driver.record(self._called, stream)
            self.driver.wait(target.stream, self._called)
        yield target.stream
        for stream in others:
            self.driver.record(self._called, target.stream)
            self.driver.wait(stream, self._called)

    def in_c_order(self, source: DeviceOperand, *, copy: bool = False) -> DeviceOperand:
        """Return an operand as it is if it is in C order, else (or with ``copy``) a copy that is."""
        copied = source.scratch(new=copy)
        if copied is not source:
            with self.in_order(source, copied):
                copied.assign(source)
        return copied

    def store(self, target: DeviceOperand, scratch: DeviceOperand) -> None:
        """Copy from what ``target.scratch()`` gave, unless that is the target."""
        if scratch is not target:
            with self.in_order(target, scratch):
                target.assign(scratch)

    def segments(self, source: DeviceOperand) -> list[slice]:
        """Return the segments of an allreduce: one at least, maybe empty; all but the last have the same length."""
        limit = max(1, _SEGMENT_NBYTES // source.dtype.itemsize)
        return list(pieces(0, source.count, limit)) or [slice(0, 0)]

    def allreduce(self, source: DeviceOperand, target: DeviceOperand, reduce: Callable[[Operand], object]) -> None:
        """Reduce ``source`` into ``target``, which is the same memory or apart from it, segment after segment.

        The host waits until the last segment has come down and been reduced, not until it has gone up.

        Args:
            source: read on the GPU after what its stream holds now.
            target: written before what its stream will hold.
            reduce: reduces one of the `segments`, flat and in the arena, in place over all ranks.
        """
        driver = self.driver
        itemsize = source.dtype.itemsize
        parts = self.segments(source)
        self._order_after(source.stream, target.stream)
        for number, part in enumerate(parts[:_SLOTS]):
            self._fetch_segment(source, number, part)
        for number, part in enumerate(parts):
            slot = self._slots[number % _SLOTS]
            driver.synchronize(slot.arrived)
            reduce(Operand(slot.view(source.dtype, (part.stop - part.start,)), source.dtype))
            # The host has seen that the caller's stream reached the call, so this need not wait for it.
            nbytes = (part.stop - part.start) * itemsize
            slot.send(target.address + part.start * itemsize, nbytes, self._up)
            if number + _SLOTS < len(parts):
                self._fetch_segment(source, number + _SLOTS, parts[number + _SLOTS])
        driver.wait(target.stream, slot.sent)

    def _fetch_segment(self, source: DeviceOperand, number: int, part: slice) -> None:
        if number % _SLOTS == len(self._slots):
            self._slots.append(_HostBlock(self.driver, self._arena, _SEGMENT_NBYTES))
        itemsize = source.dtype.itemsize
        address = source.address + part.start * itemsize
        nbytes = (part.stop - part.start) * itemsize
        self._slots[number % _SLOTS].fetch(address, nbytes, self._down)

    @contextmanager
    def on_host(self, operand: DeviceOperand, *, fetch: bool = True, store: bool = True) -> Iterator[Operand]:
        """Give host memory in place of an array of any layout.

        The host waits for the array to come down, not for it to go up (unless it has more than 64 MiB).

        Args:
            operand: read after what its stream holds now; written before what its stream will hold.
            fetch: whether its content is wanted.
            store: whether it gets what is there at the end; it does not after an error.
        """
        driver = self.driver
        there = self.in_c_order(operand) if fetch else operand.scratch()
        self._turn = 1 - self._turn
        block = self._block(there.nbytes)
        try:
            block.wait_until_sent()
            if fetch:
                self._order_after(there.stream)
                block.fetch(there.address, there.nbytes, self._down)
                driver.synchronize(block.arrived)
            yield Operand(block.view(there.dtype, there.shape), there.dtype)
            if store:
                driver.record(self._called, there.stream)
                driver.wait(self._up, self._called)
                block.send(there.address, there.nbytes, self._up)
                driver.wait(there.stream, block.sent)
        finally:
            if block not in self._kept.values():
                block.close()
        if store:
            self.store(operand, there)

    def close(self) -> None:
        """Give everything back; waits for the copies that are under way."""
        blocks = (block.close for block in self._blocks())
        streams = (partial(self.driver.free_stream, stream) for stream in (self._down, self._up))
        close_all(*blocks, *streams)

    def idle(self) -> bool:
        """Return whether no copy is under way."""
        return all(block.idle() for block in (*self._slots, *self._kept.values()))

    def abandon(self) -> None:
        """Leave everything as it is until the process ends. Even to unpin memory may wait for the device."""
        for block in self._blocks():
            _kept_mapped.append(block)

    def _blocks(self) -> list[_HostBlock]:
        """Return all host memory, of which this knows no longer."""
        blocks = [*self._slots, *self._kept.values()]
        self._slots.clear()
        self._kept.clear()
        return blocks

    def _order_after(self, *streams: Stream) -> None:
        """Let what comes down from now on wait for what these streams hold."""
        for stream in dict.fromkeys(streams):
            self.driver.record(self._called, stream)
            self.driver.wait(self._down, self._called)

    def _block(self, nbytes: int) -> _HostBlock:
        """Return host memory for a whole array."""
        if nbytes > _KEPT_NBYTES:
            return _HostBlock(self.driver, self._arena, nbytes, pinned=False)
        turn = self._turn if nbytes <= _ALTERNATING_NBYTES else 0
        block = self._kept.get(turn)
        if block is None or block.nbytes < nbytes:
            if block is not None:
                block.close()
            block = self._kept[turn] = _HostBlock(self.driver, self._arena, 1 << max(16, (nbytes - 1).bit_length()))
        return block


class _HostBlock:
    """A block of the arena on which a GPU's copies begin and end.

    Attributes:
        nbytes: its size.
        arrived: the last copy into it.
        sent: the last copy out of it.
    """

    def __init__(self, driver: CupyDriver, arena: Arena, nbytes: int, *, pinned: bool = True) -> None:
        self._driver = driver
        self._arena = arena
        self._block = arena.allocate(nbytes)
        self._address: int = address_of(self._block.memory)
        self._in_use = False
        self.nbytes = self._block.memory.nbytes
        self._pinned = pinned and self._pin()
        self.arrived = driver.make_event()
        self.sent = driver.make_event()

    def _pin(self) -> bool:
        try:
            self._driver.register(self._address, self.nbytes)
        except TransportError as error:  # Nothing is wrong without, only slow.
            _log.warning("copies to and from the GPU will be slow, as host memory cannot be pinned: %s", error)
            return False
        return True

    def view(self, dtype: DType, shape: Sequence[int]) -> Array:
        """Return its first bytes as an array in C order."""
        flat: Array = self._arena.view(self._block.place, dtype.storage, prod(shape))
        return flat.reshape(shape)

    def fetch(self, source: int, nbytes: int, stream: Stream) -> None:
        """Copy from the GPU once the sends from here are complete."""
        if self._in_use:
            self._driver.wait(stream, self.sent)
        self._driver.copy(self._address, source, nbytes, stream)
        self._driver.record(self.arrived, stream)

    def send(self, target: int, nbytes: int, stream: Stream) -> None:
        """Copy to the GPU."""
        self._driver.copy(target, self._address, nbytes, stream)
        self._driver.record(self.sent, stream)
        self._in_use = True

    def wait_until_sent(self) -> None:
        """Return when the host may write here."""
        if self._in_use:
            self._driver.synchronize(self.sent)
            self._in_use = False

    def close(self) -> None:
        """Give it back, when no copy uses it any more; unless the GPU fails, and then nobody else gets it."""
        try:
            self.wait_until_sent()
            self._driver.synchronize(self.arrived)
            if self._pinned:
                self._driver.unregister(self._address)
        except TransportError:
            _kept_mapped.append(self._block)
            raise
        self._arena.release(self._block)

    def idle(self) -> bool:
        """Return whether no copy uses it."""
        return self._driver.done(self.arrived) and self._driver.done(self.sent)
