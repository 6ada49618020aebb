"""Copies to and from the private memory of other processes of a node: one, where shared memory would take two.

process_vm_readv(2) and process_vm_writev(2) of Linux make them, without help from the other process. They ask for the
right to trace it (ptrace(2)), which processes of one user have, unless the system is set up otherwise; `reads` finds
out.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from ringreduce.buffers import Array, address_of
from ringreduce.common.errors import PeerLostError, TransportError

_MOST_NBYTES = 1 << 30  # The most bytes of one call; Linux copies no more than 2 GiB at once.


def _find(name: str) -> Any:
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):  # This is another system than Linux.
        return None
    function.restype = ctypes.c_ssize_t
    vector = ctypes.c_void_p, ctypes.c_ulong
    function.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return function


_readv = _find("process_vm_readv")
_writev = _find("process_vm_writev")


class PrivateMemory:
    """Elements one after the other in the private memory of a peer's process: to be copied, not touched.

    Args:
        rank: the peer.
        pid: its process.
        address: of the first element, there.
        dtype: of the elements.
        size: how many there are.
        present: called before anything is stored there; raises if the peer has ended the call. Its memory may be
            somebody else's then.
    """

    __slots__ = ("_address", "_pid", "_present", "_rank", "dtype", "size")

    def __init__(
        self,
        rank: int,
        pid: int,
        address: int,
        dtype: np.dtype[Any],
        size: int,
        present: Callable[[], object] = lambda: None,
    ) -> None:
        self._rank = rank
        self._pid = pid
        self._address = address
        self._present = present
        self.dtype = dtype
        self.size = size

    def __getitem__(self, part: slice) -> PrivateMemory:
        start, stop, _ = part.indices(self.size)
        address = self._address + start * self.dtype.itemsize
        return PrivateMemory(
            self._rank, self._pid, address, dtype=self.dtype, size=max(0, stop - start), present=self._present
        )

    def copy_to(self, target: Array) -> Callable[[], object]:
        """Bind: copy all elements into as many of a contiguous ``target``; returns the call.

        Raises:
            PeerLostError: when called: the process has ended.
            TransportError: when called: its memory cannot be read; at once, where no memory can be.
        """
        return self._bind(_readv, target, None)

    def copy_from(self, source: Array) -> Callable[[], object]:
        """Bind: copy all elements of a contiguous ``source`` here; otherwise as `copy_to`."""
        return self._bind(_writev, source, self._present)

    def _bind(self, transfer: Any, array: Array, present: Callable[[], object] | None) -> Callable[[], object]:
        pid = self._pid
        rank = self._rank
        copies = self._copies(array)

        def copy(memory: Array = array) -> None:  # The default keeps the array alive.
            for here, there, nbytes in copies:
                if present is not None:
                    present()
                copied = transfer(pid, here, 1, there, 1, 0)
                if copied != nbytes:
                    _fail(rank, copied, nbytes)

        return copy

    def _copies(self, array: Array) -> list[tuple[Any, Any, int]]:
        """Return (vector here, vector there, bytes) of calls that copy everything."""
        assert array.nbytes == self.size * self.dtype.itemsize
        assert array.flags.c_contiguous
        if _readv is None:
            raise TransportError("this system cannot copy memory of other processes")
        copies = []
        for start in range(0, array.nbytes, _MOST_NBYTES):
            nbytes = min(_MOST_NBYTES, array.nbytes - start)
            here = (ctypes.c_size_t * 2)(address_of(array) + start, nbytes)
            copies.append((here, (ctypes.c_size_t * 2)(self._address + start, nbytes), nbytes))
        return copies


def reads(pid: int, address: int, nbytes: int) -> bool:
    """Return whether memory of a process can be copied: its first and its last byte; of another's, or of this one's."""
    if _readv is None:
        return False
    byte = ctypes.create_string_buffer(1)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(byte), 1)
    ends = {address, address + max(1, nbytes) - 1}
    return all(_readv(pid, here, 1, (ctypes.c_size_t * 2)(end, 1), 1, 0) == 1 for end in ends)


def _fail(rank: int, copied: int, nbytes: int) -> NoReturn:
    number = ctypes.get_errno()
    if copied >= 0:
        raise TransportError(f"only {copied} of {nbytes} bytes of rank {rank}'s array could be copied")
    if number == errno.ESRCH:
        raise PeerLostError(rank, "its process has ended; this rank was about to copy its memory")
    raise TransportError(f"cannot copy the memory of rank {rank}'s array: {os.strerror(number)}")
