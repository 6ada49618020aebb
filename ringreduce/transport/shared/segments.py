"""Memory that the ranks of a node share, as segments: made by each rank, mapped by the others."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping

import numpy as np

from ringreduce.buffers import Array
from ringreduce.common.errors import TransportError
from ringreduce.common.finalizers import when_ended

_MAP_FIXED = 0x10  # Python's mmap has no name for this flag of Linux.


class Segments(ABC):
    """Makes segments of one's own and maps those of the peers.

    Attributes:
        nbytes: how large segments are, but for single blocks that are larger.
    """

    nbytes = 64 << 20  # Address space, not memory: pages come into being when they are touched.

    def pid(self, rank: int) -> int:
        """Return the process of a peer: this one, unless segments are mapped from others."""
        return os.getpid()

    @abstractmethod
    def create(self, nbytes: int) -> tuple[int, Array]:
        """Return a new page-aligned segment of zeros and the positive id by which peers may open it.

        Raises:
            TransportError: there is no memory to share.
        """

    @abstractmethod
    def discard(self, segment_id: int, offset: int, nbytes: int) -> None:
        """Give the pages of a part of one's own segment back to the system; it reads as zeros afterwards."""

    @abstractmethod
    def open(self, rank: int, segment_id: int) -> Array:
        """Map a segment of a peer's; the same array each time.

        Raises:
            TransportError: this process cannot reach that memory.
        """

    @abstractmethod
    def create_kept(self, nbytes: int) -> tuple[int, Array]:
        """Return a segment of its own that lives as long as arrays of it, on any rank, and its id; see `create`."""

    @abstractmethod
    def open_kept(self, rank: int, segment_id: int) -> Array:
        """Map a segment that a peer made by `create_kept`, which must hold it until this returns; see `open`."""

    @abstractmethod
    def alive(self, rank: int) -> bool:
        """Return whether the peer's process still runs."""

    def after_fork_in_child(self) -> None:
        """Keep what is written to segments from now on to this process, which was forked by a rank that has them.

        What the rank writes may be seen here, in pages that this process has not written to.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Give back what nobody holds; arrays that users still hold stay valid."""


class MemfdSegments(Segments):
    """Segments that are anonymous files, mapped by peers through ``/proc/<pid>/fd/<n>``.

    They have no name, so that none remains when a rank is killed, and they are not bound by the size of /dev/shm.

    Args:
        pids: the process of every rank on this node.
    """

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self._fds: list[int] = []
        self._own: dict[int, mmap.mmap] = {}
        self._opened: dict[tuple[int, int], Array] = {}
        # By descriptor, which is open as long as the memory is mapped.
        self._kept: dict[int, weakref.ref[mmap.mmap]] = {}
        self._watched: dict[int, int] = {}  # By rank, the descriptor of its process.

    def pid(self, rank: int) -> int:
        return self._pids[rank]

    def create(self, nbytes: int) -> tuple[int, Array]:
        fd, mapped = self._make(nbytes)
        self._fds.append(fd)
        self._own[fd] = mapped
        return fd, np.frombuffer(mapped, np.uint8)

    def _make(self, nbytes: int) -> tuple[int, mmap.mmap]:
        try:
            fd = os.memfd_create("ringreduce", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            return fd, mmap.mmap(fd, nbytes)
        except (OSError, AttributeError) as error:
            raise TransportError(f"cannot make {nbytes} bytes of memory to share: {error}") from error

    def create_kept(self, nbytes: int) -> tuple[int, Array]:
        fd, mapped = self._make(nbytes)
        return self._keep(fd, mapped)

    def open_kept(self, rank: int, segment_id: int) -> Array:
        fd = self._descriptor(rank, segment_id)
        return self._keep(fd, mmap.mmap(fd, os.fstat(fd).st_size))[1]

    def _keep(self, fd: int, mapped: mmap.mmap) -> tuple[int, Array]:
        self._kept[fd] = weakref.ref(mapped)
        when_ended(mapped, _close, self._kept, fd)
        return fd, np.frombuffer(mapped, np.uint8)

    def discard(self, segment_id: int, offset: int, nbytes: int) -> None:
        self._own[segment_id].madvise(mmap.MADV_REMOVE, offset, nbytes)

    def open(self, rank: int, segment_id: int) -> Array:
        key = rank, segment_id
        if key not in self._opened:
            self._opened[key] = self._map(rank, segment_id)
        return self._opened[key]

    def _map(self, rank: int, segment_id: int) -> Array:
        fd = self._descriptor(rank, segment_id)
        try:
            return np.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), np.uint8)
        finally:
            os.close(fd)

    def _descriptor(self, rank: int, segment_id: int) -> int:
        path = f"/proc/{self._pids[rank]}/fd/{segment_id}"
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransportError(f"cannot map the memory of rank {rank} ({path}): {error.strerror}") from error

    def after_fork_in_child(self) -> None:
        # The same file at the same addresses, but pages that are written here become this process's own. To copy all
        # of it would cost each worker of a DataLoader the memory and the time of all gradients, which it never reads.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        kept = {fd: mapped for fd, reference in self._kept.items() if (mapped := reference()) is not None}
        for fd, mapped in (self._own | kept).items():
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            access = mmap.PROT_READ | mmap.PROT_WRITE
            kind = mmap.MAP_PRIVATE | _MAP_FIXED
            if libc.mmap(address, len(mapped), access, kind, fd, 0) != address:
                raise OSError(ctypes.get_errno(), "cannot map shared memory for this process alone")

    def alive(self, rank: int) -> bool:
        if rank not in self._watched:
            try:
                pidfd = os.pidfd_open(self._pids[rank])
            except ProcessLookupError:
                return False
            except (OSError, AttributeError):  # This kernel has no process descriptors: ask for the process each time.
                return os.path.exists(f"/proc/{self._pids[rank]}")
            self._fds.append(pidfd)
            self._watched[rank] = pidfd
        watch = select.poll()  # Made each time, as two threads that wait in two groups may not share one.
        watch.register(self._watched[rank], select.POLLIN)
        return not watch.poll(0)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._own.clear()
        self._opened.clear()
        self._watched.clear()


def _close(kept: dict[int, weakref.ref[mmap.mmap]], fd: int) -> None:
    del kept[fd]
    os.close(fd)


class PrivateSegments(Segments):
    """Ordinary memory of this process, for ranks that share with nobody."""

    def __init__(self) -> None:
        self._own: list[mmap.mmap] = []

    def create(self, nbytes: int) -> tuple[int, Array]:
        # Private: a process that is forked gets its own copy, page by page, as of all other memory.
        self._own.append(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        return len(self._own), np.frombuffer(self._own[-1], np.uint8)

    def discard(self, segment_id: int, offset: int, nbytes: int) -> None:
        self._own[segment_id - 1].madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def create_kept(self, nbytes: int) -> tuple[int, Array]:
        return 0, np.zeros(nbytes, np.uint8)

    def open(self, rank: int, segment_id: int) -> Array:
        raise TransportError(f"rank {rank} shares no memory with this one")

    open_kept = open

    def alive(self, rank: int) -> bool:
        return True

    def close(self) -> None:
        pass
