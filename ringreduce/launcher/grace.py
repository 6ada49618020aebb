"""The time that ranks have to end after SIGTERM, in place of the quarter of a second that mpirun gives them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ringreduce.common.processes import is_launcher
from ringreduce.launcher.chains import SeenProcess, is_there, send, variables_of

#: Lets mpirun go on when the process that has stopped it is gone; takes its number. Whoever reads the standard input of
#: this sees its end then, however that process has ended.
_CONTINUE = ("sh", "-c", 'trap "" TERM HUP INT; read -r _; kill -CONT "$0"')


class Grace:
    """Asks the ranks of this host to end, and kills after some time those that have not.

    mpirun is stopped meanwhile where ranks do not survive others: it would kill all as soon as the first has ended.

    Args:
        pid: process id of mpirun.
        seconds: time that ranks have.
        holds: whether to stop mpirun.
        known: processes that mpirun has started as ranks, if they are its descendants.

    Attributes:
        has_failed: whether ranks had not ended after that; or, if mpirun is stopped, whether one has ended neither well
            nor with the status of a stop, of which mpirun may say nothing.
    """

    def __init__(self, pid: int, seconds: float, *, holds: bool, known: Iterable[SeenProcess]) -> None:
        self._until = time.monotonic() + seconds
        self._pid = pid
        self.has_failed = False
        self._waker = _continues_later(pid) if holds else None
        if holds:
            os.kill(pid, signal.SIGSTOP)
        ranks = {each.pid: each for each in [*known, *_ranks_of(pid)]}
        self._ranks = list(ranks.values())
        for rank in self._ranks:
            for each in programs(rank):
                send(each, signal.SIGTERM)

    def is_over(self) -> bool:
        """Return whether all ranks of this host have ended; those that have used up their time are killed."""
        if not any(map(is_there, self._ranks)):
            self.has_failed = self._waker is not None and any(map(_has_failed, self._ranks))
            return True
        if time.monotonic() < self._until:
            return False
        self.has_failed = True
        self.kill()
        return True

    def kill(self) -> None:
        """Kill the ranks, with what they have started."""
        for rank in self._ranks:
            now = SeenProcess.read(rank.pid)
            if now is not None and now.began == rank.began:  # it may have ended, and what it has started may not
                with suppress(ProcessLookupError, PermissionError):
                    # mpirun gives each rank a group: the shell over it, and what it starts, are in there.
                    (os.killpg if os.getpgid(rank.pid) == rank.pid else os.kill)(rank.pid, signal.SIGKILL)

    def end(self) -> None:
        """Let mpirun go on, which passes on the output of the ranks."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGCONT)
        if self._waker is not None and self._waker.stdin is not None:
            self._waker.stdin.close()
            self._waker.wait()


def _has_failed(rank: SeenProcess) -> bool:
    """Return whether a rank that has ended did neither end well nor with the status of a stop, as far as it is kept."""
    now = SeenProcess.read(rank.pid)
    if now is None or now.began != rank.began or now.state != "Z":
        return False
    return now.wait_status not in (0, os.EX_TEMPFAIL << 8)


def _continues_later(pid: int) -> subprocess.Popen[bytes]:
    nowhere = subprocess.DEVNULL
    return subprocess.Popen(
        [*_CONTINUE, str(pid)], stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    )


def programs(rank: SeenProcess) -> Iterator[SeenProcess]:
    """Yield a rank, and the children of a shell over it. A rank ends its own children, which load data, itself."""
    yield rank
    if rank.is_shell:
        for each in rank.children():
            yield from programs(each)


def _ranks_of(pid: int) -> Iterator[SeenProcess]:
    """Yield the processes that Open MPI's mpirun has started as ranks, also those under daemons of their own."""
    here = os.uname().nodename.encode().split(b".")[0]
    for number in filter(str.isdecimal, os.listdir("/proc")):
        variables = variables_of(int(number))
        job = variables.get(b"PMIX_NAMESPACE", b"").partition(b"prterun-")[2]
        host, _, last = job.rpartition(b"@")[0].rpartition(b"-")
        is_ours = last == b"%d" % pid and host.split(b".")[0] == here
        process = SeenProcess.read(int(number)) if is_ours and b"OMPI_COMM_WORLD_RANK" in variables else None
        parent = None if process is None else SeenProcess.read(process.parent)
        if process is not None and parent is not None and is_launcher(parent.name):
            yield process
