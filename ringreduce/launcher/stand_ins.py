"""Ranks that mpirun has not started: it starts a stand-in in place of each, and another system the rank itself.

The stand-in sends what mpirun says to its rank, in the environment, to the program, which hands it to a process on that
host. That is the rank from then on. The stand-in ends as that process ends, so that MPI notices deaths as always.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ringreduce.common.launch import MESSAGES_HERE
from ringreduce.common.processes import launcher, pid_namespace
from ringreduce.launcher.agent_server import HOST, TICKET
from ringreduce.launcher.connection import connected

#: What mpirun, and `ringreduce run`, say to a rank.
_HANDED = ("PMIX_", "OMPI_", "PRTE_", "OPAL_", "RINGREDUCE_", "HOROVOD_", MESSAGES_HERE)
_GROWS = "RINGREDUCE_RESTARTABLE"
#: The number of the system call; glibc has a function for it since 2.30 only.
_TGKILL = {"x86_64": 234, "ppc64le": 250}.get(os.uname().machine, 131)
#: What a stand-in asks the program for: the number of the process that is the rank.
STAND_IN = "stand-in"
#: The program says by this that the end of the rank is a good one.
LEAVE = "leave"


def stand_in() -> None:
    """Be in a rank's place, until the process has ended whose number the program sends; then end well, or by a signal.

    The request to the program has ``environ``, for `become`; ``host``, the engine's name for it; ``pids``: the
    namespace of numbers of processes.
    """
    environ = {name: value for name, value in os.environ.items() if name.startswith(_HANDED)}
    request = {"what": STAND_IN, "environ": environ, "host": os.environ[HOST], "pids": pid_namespace()}
    leaves = False
    with suppress(OSError, EOFError), connected(os.environ[TICKET], request) as connection:
        process = int(connection.receive_json())
        rank = os.pidfd_open(process)
        if _GROWS in environ:  # the launcher says by this signal that there are other hosts
            signal.signal(
                signal.SIGUSR2, lambda *_: ctypes.CDLL(None).syscall(_TGKILL, process, process, signal.SIGUSR2)
            )
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        waiting = select.poll()
        waiting.register(rank, select.POLLIN)
        waiting.register(connection, select.POLLIN)
        daemon = os.pidfd_open(launcher() or os.getppid())
        waiting.register(daemon, select.POLLIN)
        while True:
            ready = [number for number, _ in waiting.poll()]
            if daemon in ready:
                break
            if connection.fileno() in ready:
                leaves = connection.receive_json() == LEAVE  # or the program has ended, and this raises
                waiting.unregister(connection)
            elif rank in ready:
                break
    if not leaves:
        os.kill(os.getpid(), signal.SIGKILL)  # which MPI reports to the others


def become(environ: Mapping[str, str]) -> None:
    """Be the rank that mpirun says this to, with further variables; on the main thread, before it calls ``init``."""
    if _GROWS in environ:  # as the launcher has it; other threads have it not, so that it is sent to this one alone
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    os.environ.update(environ)
    # Other ranks of this host look at this file for a process that has ended before it called `init`.
    known = Path(environ.get("PMIX_SERVER_TMPDIR", ""), f"ringreduce-process-{environ['OMPI_COMM_WORLD_RANK']}")
    if known.exists():
        known.write_text(str(os.getpid()))
