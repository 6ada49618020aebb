"""Copies of the private memory of other processes: right, in parts, and with clear errors where there is none."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from ringreduce.common.errors import PeerLostError, TransportError
from ringreduce.transport.shared.private import PrivateMemory, reads

if not reads(os.getpid(), np.zeros(1).__array_interface__["data"][0], 8):
    pytest.skip("this system lets nobody copy memory of processes", allow_module_level=True)


def memory_of(array: np.ndarray) -> PrivateMemory:
    address = array.__array_interface__["data"][0]
    return PrivateMemory(7, os.getpid(), address, array.dtype, array.size)


@pytest.mark.parametrize("count", [0, 1, 1001, 300_000])
def test_all_elements_are_copied(count: int) -> None:
    """A copy holds what the memory holds when it is made, not when it was bound."""
    source, target = np.zeros(count, np.int64), np.zeros(count, np.int64)
    copy = memory_of(source).copy_to(target)
    for turn in range(3):
        source[:] = np.arange(count) + turn
        copy()
        assert (target == source).all()


def test_parts_are_those_of_the_elements() -> None:
    """A part has the elements that a part of the array has, also a part of a part, and one beyond the end."""
    source = np.arange(1000, dtype=np.float32)
    for part in (slice(3, 70), slice(0, 0), slice(990, 2000)):
        taken = memory_of(source)[part]
        assert taken.size == source[part].size
        target = np.empty(taken.size, np.float32)
        taken.copy_to(target)()
        assert (target == source[part]).all()
    target = np.empty(5, np.float32)
    memory_of(source)[10:30][5:10].copy_to(target)()
    assert (target == np.arange(15, 20)).all()


def test_memory_of_another_process() -> None:
    """What a process holds is copied while it does something else; once it has ended, it is lost, and said to be."""
    program = (
        "import sys, numpy as np; array = np.arange(5000); "
        "print(array.__array_interface__['data'][0], flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="ascii"
    )
    address = int(child.stdout.readline())
    assert reads(child.pid, address, 40_000)
    target = np.empty(5000, np.int64)
    copy = PrivateMemory(3, child.pid, address, target.dtype, target.size).copy_to(target)
    copy()
    assert (target == np.arange(5000)).all()
    child.communicate("")
    with pytest.raises(PeerLostError, match="rank 3 is lost"):
        copy()


def test_elements_are_stored() -> None:
    """What is copied there is what the array holds then, in the part that was asked for; nothing when the rank left."""
    target, source = np.zeros(1000, np.int64), np.arange(100)
    copy = memory_of(target)[300:400].copy_from(source)
    source += 7
    copy()
    assert (target[300:400] == np.arange(100) + 7).all()
    assert not target[:300].any()
    assert not target[400:].any()

    def left() -> None:
        raise PeerLostError(7, "it has left")

    address = target.__array_interface__["data"][0]
    with pytest.raises(PeerLostError, match="it has left"):
        PrivateMemory(7, os.getpid(), address, target.dtype, 100, left).copy_from(source)()
    assert not target[:300].any()


def test_what_is_not_there_is_an_error() -> None:
    """Addresses without memory are found out beforehand, and named if a copy meets them all the same."""
    target = np.empty(16, np.uint8)
    assert not reads(os.getpid(), 4096, 16)
    with pytest.raises(TransportError, match="rank 5's array: Bad address"):
        PrivateMemory(5, os.getpid(), 4096, target.dtype, target.size).copy_to(target)()
