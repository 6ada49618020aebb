"""The time that ranks have to end after SIGTERM. mpirun itself kills them after a quarter of a second."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ringreduce.common.processes import has_ended


class Grace:
    """Asks the ranks of this host to end, and kills those that have not after some time.

    mpirun is stopped meanwhile where ranks do not survive others: it would kill all as soon as the first has ended.

    Args:
        pid: of mpirun.
        seconds: how long ranks have.
        holds: whether to stop mpirun.
        known: the processes that mpirun has started as ranks, as far as they are its descendants.
    """

    def __init__(self, pid: int, seconds: float, *, holds: bool, known: list[int]) -> None:
        self._until = time.monotonic() + seconds
        if holds:
            os.kill(pid, signal.SIGSTOP)
        self._ranks = sorted({*known, *_ranks_of(pid)})
        self._send(signal.SIGTERM)

    def is_over(self) -> bool:
        """Return whether all ranks of this host have ended; those that have used up their time are killed."""
        if all(map(has_ended, self._ranks)):
            return True
        if time.monotonic() < self._until:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """Kill the ranks, with what they have started."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            with suppress(ProcessLookupError, PermissionError):
                # mpirun gives each rank a group: the shell over it, and what it starts, are in there.
                (os.killpg if os.getpgid(rank) == rank else os.kill)(rank, number)


def _ranks_of(pid: int) -> list[int]:
    """Return the processes that Open MPI's mpirun has started as ranks, also those under daemons of their own."""
    found = set(_processes_of(pid))
    return [each for each in found if _parent(each) not in found]


def _processes_of(pid: int) -> Iterator[int]:
    end = b"-%d@" % pid
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is somebody else's
            variables = path.read_bytes().split(b"\0")
            names = [each for each in variables if each.startswith(b"PMIX_NAMESPACE=prterun-")]
            if names and end in names[0] and any(each.startswith(b"OMPI_COMM_WORLD_RANK=") for each in variables):
                yield int(path.parent.name)


def _parent(pid: int) -> int:
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return 0
