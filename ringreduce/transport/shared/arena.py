"""The arena: hands out pieces of the memory that a rank shares with its node, and says where arrays are."""

from __future__ import annotations

import bisect
import os
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringreduce.buffers import Array, address_of
from ringreduce.common.errors import TransportError
from ringreduce.common.processes import Forked
from ringreduce.transport.shared.private import PrivateMemory, reads
from ringreduce.transport.shared.segments import Segments

#: Places in the memory of a rank, as one number: not negative, in its arena, see `place_in`; less than these two, the
#: negative of an address in the private memory of its process.
NOWHERE = -1  # No peer can reach the array.
MAILED = -2  # The array is in the rank's mailbox for this call.

_PAGE = 4096
_KEPT_NBYTES = 256 << 20  # Free memory that keeps its pages, of each of two kinds.
_OFFSET_BITS = 44  # 16 TiB; leaves 19 bits for the segment


def place_in(segment: int, offset: int) -> int:
    """Return the place in the arena of a rank that is at an offset (bytes) in one of its segments."""
    return segment << _OFFSET_BITS | offset


def segment_and_offset(place: int) -> tuple[int, int]:
    """Return where a place in an arena is; see `place_in`."""
    return place >> _OFFSET_BITS, place & (1 << _OFFSET_BITS) - 1


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the arena: its bytes, as an array and as a memoryview, where they are, and where peers find them."""

    memory: Array
    view: memoryview
    address: int
    place: int


def memory_nbytes() -> int:
    """Return how much memory this machine has, or the container in which this process runs."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # There may be no such cgroup, or no limit: "max".
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return min(limits)


def _most_segments() -> int:
    """Return how many segments there may be before no more are made for results."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 4


class _Space:
    """The segments of a rank and what is free in them, handed out first fit. Used under the lock of its arena."""

    def __init__(self, segments: Segments) -> None:
        self.memory: dict[int, Array] = {}
        self._segments = segments
        self._free: dict[int, list[tuple[int, int]]] = {}  # By segment, offset and nbytes of its holes, ascending.
        self._freed_nbytes = 0  # Counted since the pages of holes went back.
        self._bases: list[tuple[int, int, int]] = []  # (address, nbytes, segment) of all segments, ascending

    def find(self, nbytes: int) -> int:
        """Take ``nbytes`` of what is free, and return their place; `NOWHERE`: no hole is large enough."""
        for segment, holes in self._free.items():
            for index, (offset, size) in enumerate(holes):
                if size >= nbytes:
                    holes[index : index + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
                    return place_in(segment, offset)
        return NOWHERE

    def extend(self, nbytes: int) -> int:
        """Take ``nbytes`` of a new segment."""
        self._discard_holes()
        segment, memory = self._segments.create(max(nbytes, self._segments.nbytes))
        self.memory[segment] = memory
        self._free[segment] = [(nbytes, memory.nbytes - nbytes)] if memory.nbytes > nbytes else []
        bisect.insort(self._bases, (address_of(memory), memory.nbytes, segment))
        return place_in(segment, 0)

    def release(self, place: int, nbytes: int) -> None:
        """Take memory back."""
        segment, start = segment_and_offset(place)
        holes = self._free[segment]
        bisect.insort(holes, (start, nbytes))
        merged: list[tuple[int, int]] = []
        for offset, size in holes:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free[segment] = merged
        self._freed_nbytes += nbytes
        if self._freed_nbytes > _KEPT_NBYTES:
            self._discard_holes()

    def _discard_holes(self) -> None:
        for segment, holes in self._free.items():
            for offset, size in holes:
                self._segments.discard(segment, offset, size)
        self._freed_nbytes = 0

    def locate(self, address: int, nbytes: int) -> int:
        """Return the place of memory; `NOWHERE` if it is not part of the segments."""
        index = bisect.bisect_right(self._bases, (address, 1 << 62, 0)) - 1
        if index < 0:
            return NOWHERE
        base, length, segment = self._bases[index]
        return place_in(segment, address - base) if address + nbytes <= base + length else NOWHERE


class _Lease(weakref.ref[Array]):
    """A reference to an array that uses a block; its callback returns the block to the arena.

    Attributes:
        block: of the array.
        result_nbytes: of the array, if it counts as a result; else -1.
        seen: the processes that were forked while the array lived, and may look at it still.
    """

    __slots__ = ("block", "result_nbytes", "seen")

    block: Block
    result_nbytes: int
    seen: tuple[Forked, ...]


class Arena:
    """Hands out blocks of this rank's segments; makes segments as they are needed. Local, not collective; thread-safe.

    Blocks of freed arrays are kept, up to 256 MiB, with their pages, for arrays of the same size.
    Other free memory is handed out first fit. Its pages go back to the system once more than 256 MiB have become free,
    and when nothing of it is large enough and a new segment has to be made.

    What lives when the process forks is not handed out again before all processes that were forked have ended: they see
    what is written here later.

    Args:
        segments: makes them.
        results_nbytes: how much all results may take that live at once; beyond that they are private.

    Attributes:
        segments: its own and those of the peers; to be closed after everything that uses them.
        locate: returns the place of ``(address, nbytes)`` in the arena; `NOWHERE` if they are not part of it.
        copies_private: whether the ranks of the node can copy each other's private memory; the same on all of them.
    """

    def __init__(self, segments: Segments, results_nbytes: int = 0) -> None:
        self.copies_private = False
        self._lock = threading.RLock()
        self.segments = segments
        self._space = _Space(segments)
        self.locate = self._space.locate
        self._results_nbytes = results_nbytes
        self._result_nbytes_in_use = 0
        self._leases: dict[int, _Lease] = {}
        self._returned: deque[_Lease] = deque()  # Leases that are not taken back yet.
        self._kept: list[Block] = []
        self._kept_nbytes = 0
        self._seen: list[_Lease] = []  # Leases that forked processes which have not ended can see.

    def allocate(self, nbytes: int, most_segments: Callable[[], int] | None = None) -> Block:
        """Return a page-aligned block of at least one byte; its content is undefined.

        Raises:
            TransportError: there is no memory to share; or it would take a segment more than ``most_segments()``.
        """
        nbytes = max(1, -(-nbytes // _PAGE)) * _PAGE
        with self._lock:
            if self._returned:
                self._take_back()
            for index in range(len(self._kept) - 1, -1, -1):
                if self._kept[index].memory.nbytes == nbytes:
                    self._kept_nbytes -= nbytes
                    return self._kept.pop(index)
            place = self._take(nbytes, most_segments)
            memory = self.view(place, np.dtype(np.uint8), nbytes)
            return Block(memory, memory.data, address_of(memory), place=place)

    def release(self, block: Block) -> None:
        """Take a block back."""
        with self._lock:
            self._space.release(block.place, block.memory.nbytes)

    def array(self, nbytes: int) -> Array:
        """Return a block as an array; its memory returns to the arena when it and all its views are freed."""
        return self._lend(self.allocate(nbytes), np.dtype(np.uint8), nbytes, result_nbytes=-1)

    def result(self, dtype: np.dtype[Any], count: int, nbytes: int) -> tuple[Array, int] | None:
        """Return such an array of elements, for what a collective returns, and its address; None: it is better private.

        Results are private where those that live have reached their limit, or where it would take one more segment, and
        those are as many as a quarter of the files that this process may have open.
        """
        with self._lock:
            returned = self._returned
            # The result before, which has just come back: the usual case.
            if len(returned) == 1 and returned[0].result_nbytes == nbytes and not returned[0].seen:
                block = returned.popleft().block
                return self._lend(block, dtype, count, nbytes), block.address
            if returned:
                self._take_back()
            if self._result_nbytes_in_use + nbytes > self._results_nbytes:
                return None
            try:
                block = self.allocate(nbytes, _most_segments)
            except TransportError:
                return None
            self._result_nbytes_in_use += block.memory.nbytes
            return self._lend(block, dtype, count, nbytes), block.address

    def _lend(self, block: Block, dtype: np.dtype[Any], count: int, result_nbytes: int) -> Array:
        # Going through a memoryview makes the array the base of every view that is taken of it.
        array = np.frombuffer(block.view, dtype, count)
        lease = _Lease(array, self._end)
        lease.block = block
        lease.result_nbytes = result_nbytes
        lease.seen = ()
        self._leases[id(lease)] = lease
        return array

    def _end(self, lease: weakref.ref[Array]) -> None:
        # The collector may call this in the middle of `release`, or on another thread: this much is safe.
        self._returned.append(self._leases.pop(id(lease)))

    def _take_back(self) -> None:
        back = self._seen
        self._seen = []
        while self._returned:
            back.append(self._returned.popleft())
        for lease in back:
            if not all(process.ended for process in lease.seen):
                self._seen.append(lease)
                continue
            if lease.result_nbytes >= 0:
                self._result_nbytes_in_use -= lease.block.memory.nbytes
            self._keep(lease.block)

    def _keep(self, block: Block) -> None:
        if block.memory.nbytes > _KEPT_NBYTES:
            self.release(block)
            return
        self._kept.append(block)
        self._kept_nbytes += block.memory.nbytes
        while self._kept_nbytes > _KEPT_NBYTES:
            oldest = self._kept.pop(0)
            self._kept_nbytes -= oldest.memory.nbytes
            self.release(oldest)

    def forked(self, processes: Forked) -> None:
        """Hand out nothing that lives now again before all ``processes`` have ended, which are forked just now."""
        for lease in [*self._leases.values(), *self._returned]:
            if processes not in lease.seen:
                lease.seen = (*(process for process in lease.seen if not process.ended), processes)

    def place(self, address: int, nbytes: int) -> int:
        """Return the place of some memory of this rank's."""
        place = self.locate(address, nbytes)
        if place != NOWHERE:
            return place
        readable = self.copies_private and reads(os.getpid(), address, nbytes)  # Memory of devices may not be readable.
        return -address if readable else NOWHERE

    def at(
        self, rank: int, place: int, dtype: np.dtype[Any], count: int, present: Callable[[], object] = lambda: None
    ) -> Array | PrivateMemory:
        """Return elements of a peer's memory at a place that it has published; ``present`` as for `PrivateMemory`."""
        if place < MAILED:
            return PrivateMemory(rank, self.segments.pid(rank), -place, dtype=dtype, size=count, present=present)
        return self.peer_view(rank, place, dtype, count=count)

    def view(self, place: int, dtype: np.dtype[Any], count: int) -> Array:
        """Return elements of this rank's own arena, without holding on to the array that was made of it."""
        segment, offset = segment_and_offset(place)
        return self._space.memory[segment][offset:][: count * dtype.itemsize].view(dtype)

    def peer_view(self, rank: int, place: int, dtype: np.dtype[Any], count: int) -> Array:
        """Return elements of a peer's arena."""
        segment, offset = segment_and_offset(place)
        return self.segments.open(rank, segment)[offset:][: count * dtype.itemsize].view(dtype)

    def _take(self, nbytes: int, most_segments: Callable[[], int] | None) -> int:
        offset = self._space.find(nbytes)
        if offset == NOWHERE and self._kept:
            kept = self._kept
            self._kept = []
            self._kept_nbytes = 0
            for block in kept:
                self.release(block)
            offset = self._space.find(nbytes)
        if offset != NOWHERE:
            return offset
        if most_segments is not None and len(self._space.memory) >= most_segments():
            raise TransportError(f"there are {len(self._space.memory)} segments already")
        return self._space.extend(nbytes)
