"""Copies of the private memory of other processes of a node: one copy, where shared memory would take two.

process_vm_readv(2) of Linux makes them, without help from the process that is read. It asks for the right to trace that
process (ptrace(2)), which processes of one user have, unless the system is set up otherwise. `reads` finds out.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce.errors import PeerLostError, TransportError

__all__ = ["PrivateMemory", "reads"]

Array = npt.NDArray[Any]

_MOST_NBYTES = 1 << 30  # in one call; Linux copies no more than 2 GiB at once


def _find_readv() -> Any:
    try:
        readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):  # another system than Linux
        return None
    readv.restype = ctypes.c_ssize_t
    vector = ctypes.c_void_p, ctypes.c_ulong
    readv.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return readv


_readv = _find_readv()


class PrivateMemory:
    """Elements one after the other in the private memory of a peer's process, which can be copied, not touched.

    Args:
        rank: the peer.
        pid: its process.
        address: of the first element, there.
        dtype: of the elements.
        size: how many there are.
    """

    __slots__ = ("_address", "_pid", "_rank", "dtype", "size")

    def __init__(self, rank: int, pid: int, address: int, dtype: np.dtype[Any], size: int) -> None:
        self._rank = rank
        self._pid = pid
        self._address = address
        self.dtype = dtype
        self.size = size

    def __getitem__(self, part: slice) -> PrivateMemory:
        start, stop, _ = part.indices(self.size)
        address = self._address + start * self.dtype.itemsize
        return PrivateMemory(self._rank, self._pid, address, self.dtype, max(0, stop - start))

    def copy_to(self, target: Array) -> Callable[[], object]:
        """Bind: copy all elements into as many of a contiguous ``target``; returns the call.

        Raises:
            PeerLostError: when called: the process has ended.
            TransportError: when called: its memory cannot be read; at once, where no memory can be.
        """
        assert target.nbytes == self.size * self.dtype.itemsize
        assert target.flags.c_contiguous
        copies = []
        for start in range(0, target.nbytes, _MOST_NBYTES):
            nbytes = min(_MOST_NBYTES, target.nbytes - start)
            here = (ctypes.c_size_t * 2)(target.__array_interface__["data"][0] + start, nbytes)
            there = (ctypes.c_size_t * 2)(self._address + start, nbytes)
            copies.append((here, there, nbytes))
        pid, rank = self._pid, self._rank
        if _readv is None:
            raise TransportError("this system cannot copy memory of other processes")

        def copy(memory: Array = target) -> None:  # keeps the target
            for here, there, nbytes in copies:
                if _readv(pid, here, 1, there, 1, 0) != nbytes:
                    _fail(rank)

        return copy


def reads(pid: int, address: int, nbytes: int) -> bool:
    """Return whether memory of a process can be copied: its first and its last byte; of another's, or of this one's."""
    if _readv is None:
        return False
    byte = ctypes.create_string_buffer(1)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)
    ends = {address, address + max(1, nbytes) - 1}
    return all(_readv(pid, here, 1, (ctypes.c_size_t * 2)(end, 1), 1, 0) == 1 for end in ends)


def _fail(rank: int) -> None:
    number = ctypes.get_errno()
    if number == errno.ESRCH:
        raise PeerLostError(rank, "its process has ended; this rank was about to read its memory")
    raise TransportError(f"cannot read the memory of rank {rank}'s array: {os.strerror(number)}")
