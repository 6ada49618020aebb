"""The other hosts of a job, and the agent of one, which what also starts mpirun's daemons there starts."""

from __future__ import annotations

import math
import os
import re
import resource
import shlex
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import connection, host_agent
from ringreduce.launcher.connection import HostConnection
from ringreduce.launcher.hosts import UNNAMED, is_here
from ringreduce.launcher.schedulers import slurm_job, slurm_step
from ringreduce.launcher.start import AGENTS, Start

#: Descriptors of a process: its input and output, and what it writes to standard error.
_FILES_OF_A_PROCESS = 2
_OTHER_FILES = 64
PIECE_NBYTES = 1 << 18
#: A host may take nothing for so long, or send no more results at the end.
STALL_S = 60
#: How long hosts have to end.
END_S = 30.0
_SHOWN = 400  # of what a host says
_RESULT = re.compile(rf"[0-9]{{1,9}}-[0-9]{{1,9}}({'|'.join(map(re.escape, host_agent.DONE))})")
#: Runs a program whose modules come on standard input, by their names and lengths; the last has its `main`.
_RUNS = (
    "import sys, types; new = lambda name: sys.modules.setdefault(name, types.ModuleType(name)).__dict__; "
    "[exec(sys.stdin.buffer.read(nbytes), new(name)) for name, nbytes in {0}]; new({0}[-1][0])['main']()"
)


def agent_line(python: str) -> tuple[list[str], bytes]:
    """Return what runs the agent of a host by a Python, and what that reads first, before the request."""
    texts = {module.__name__: Path(str(module.__file__)).read_bytes() for module in (connection, host_agent)}
    sizes = [(name, len(text)) for name, text in texts.items()]
    return [python, "-I", "-S", "-c", _RUNS.format(sizes)], b"".join(texts.values())


def others(start: Start) -> list[str]:
    """Return the hosts that a job may use at first, without this one."""
    listed = [host for host in start.listed if host != UNNAMED] or start.slots
    if not listed and start.allocation is not None:
        listed = start.allocation.slots
    return [host for host in listed if not is_here(host, start.here)]


def let_open(hosts: int) -> None:
    """Let this process have so many files open that it can have a process on each of so many hosts.

    Raises:
        ConfigError: the system does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + hosts * _FILES_OF_A_PROCESS + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(f"{hosts} hosts take {needed} open files here, and there may be {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def reaches(start: Start) -> bool:
    """Return whether other hosts are reached by ssh, by srun, or by an agent that the environment names."""
    return start.by_ssh or bool(slurm_job(os.environ)) or bool(_agent())


def _agent() -> str:
    return next((os.environ[name] for name in AGENTS["Open MPI"] if name in os.environ), "")


def command_on(host: str, command: Sequence[str], start: Start) -> list[str]:
    """Return what runs a command on a host as mpirun starts its daemon there.

    Raises:
        ConfigError: that is neither ssh, nor srun, nor an agent that the environment names.
    """
    if start.by_ssh:
        return [*start.mpirun.ssh_to(host, start.spec, os.environ), shlex.join(command)]
    if slurm_job(os.environ):  # also where users name hosts of the allocation
        return [*slurm_step(), f"--nodelist={host}", *command]
    if agent := _agent():
        return [*shlex.split(agent), host, shlex.join(command)]
    name = AGENTS["Open MPI"][0]
    raise ConfigError(f"hosts are reached by ssh, by srun, or by the agent that {name} names; set that")


def hear(connection: HostConnection, folder: Path, take: Callable[[str, Any], object]) -> None:
    """Take what an agent sends: messages, and files of results, until it ends.

    Args:
        connection: to it.
        folder: where files go to.
        take: called with each message: what it is, and its value.

    Raises:
        EOFError: it has ended.
        OSError: the connection is broken, or files cannot be written.
        ValueError: a file has a name that no rank gives, or that another one has.
    """
    while True:
        what, value = connection.receive_json()
        if what != "file":
            take(what, value)
            continue
        if not _RESULT.fullmatch(value) or (folder / value).exists():
            raise ValueError(f"{value!r} is no result, or has come before")
        coming = (folder / value).with_suffix(".coming")
        with coming.open("xb") as file:
            file.writelines(connection.receive_content())
        coming.rename(folder / value)


class Agent:
    """The agent of a host, and what it has answered.

    Args:
        name: of the host.
        line: starts it.
        begins: what it reads first.
        changed: is notified when it has answered.
        take: called with its other messages.
        folder: for results.
        lost: called with the error by which results are lost.

    Attributes:
        name: the argument.
        connection: to it.
        answer: its last one: ``"wants"`` files, ``"ready"``, ``"failed"`` or ``"ended"``; empty: none yet.
        value: that belongs to the answer.
        passed_on: the last request up to which all messages have come; infinite: it has ended.

    Raises:
        OSError: there is no such program.
    """

    def __init__(
        self,
        name: str,
        line: Sequence[str],
        begins: bytes,
        *,
        changed: threading.Condition,
        take: Callable[[str, Any], object],
        folder: Path,
        lost: Callable[[Exception], object],
    ) -> None:
        self.name = name
        self.answer = ""
        self.value: Any = None
        self.passed_on: float = 0
        self._changed = changed
        self._others = take
        self._peer, theirs = socket.socketpair()
        self._peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STALL_S, 0))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process runs
        try:  # in its own session: an interrupt is for this process, which ends it
            with theirs:
                number = theirs.fileno()
                self._process = subprocess.Popen(
                    line, stdin=number, stdout=number, stderr=self._errors, start_new_session=True
                )
        except OSError:
            self._peer.close()
            self._errors.close()
            raise
        with suppress(OSError):  # its answer says why
            self._peer.sendall(begins)
        self.connection = HostConnection(self._peer)

        def read() -> None:
            try:
                self._skip_greeting()
                hear(self.connection, folder, self._take)
            except EOFError:
                pass
            except (OSError, ValueError) as error:
                lost(error)
            with self._changed:
                if self.answer != "failed":
                    self.answer = "ended"
                self.passed_on = math.inf
                self._changed.notify_all()

        self._reader = threading.Thread(target=read, name=f"ringreduce hears {name}", daemon=True)
        self._reader.start()

    def _skip_greeting(self) -> None:
        """Skip what shells of the host write."""
        line = b""
        while line != host_agent.GREETING + b"\n":
            byte = self._peer.recv(1)
            if not byte:
                raise EOFError
            line = (b"" if line.endswith(b"\n") else line)[-_SHOWN:] + byte

    def _take(self, what: str, value: Any) -> None:
        if what not in ("wants", "ready", "failed", "passed on"):
            self._others(what, value)
            return
        with self._changed:
            if what == "passed on":
                self.passed_on = value
            else:
                self.answer = what
                self.value = value
            self._changed.notify_all()

    @property
    def hangs(self) -> bool:
        """Whether it runs on, though it has not answered."""
        return not self.answer and self._process.poll() is None

    def has_passed_on(self, number: int) -> bool:
        """Return whether no message from before a request is still to come."""
        return self.passed_on >= number

    def why_not(self, python: str, python_is: str) -> str:
        """Return why it is not ready, as it says, or by how its process has ended."""
        if self.answer == "failed":
            return f"{self.name}: {self.value}"
        if self.hangs:
            return f"{self.name} does not answer"
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._errors.seek(0)
        written = " ".join(self._errors.read().decode(errors="replace").split())[-_SHOWN:]
        if self._process.returncode == 127 or (python in written and "No such file" in written):
            return f"{self.name} has no {python}, {python_is}; install it there ({written})"
        return f"{self.name} cannot be reached, or has ended, with status {self._process.returncode}: {written}"

    def close_input(self) -> None:
        """Have it do what is left to do, and end."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)

    def drain(self, stall_s: float) -> None:
        """Wait until all has come that it sends before its end, or nothing for too long."""
        begin = time.monotonic()
        while self._reader.is_alive() and time.monotonic() < max(begin, self.connection.heard) + stall_s:
            self._reader.join(1.0)

    def kill(self) -> None:
        """End the connection at once, as to a host that is lost."""
        self._process.kill()

    def has_ended(self, limit_s: float) -> bool:
        """Return whether it has ended within a time limit; it is killed if not, and counts no more."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        finally:
            with suppress(OSError):
                self._peer.shutdown(socket.SHUT_RDWR)  # which ends its reader
            self._peer.close()
            self._errors.close()
        return True
