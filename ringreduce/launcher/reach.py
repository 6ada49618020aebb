"""Processes on the other hosts of a job, over what also starts mpirun's daemons there.

Each runs the text of a file that takes the standard library alone, reads a request, and lives until its standard input
ends: when the launcher closes it, or has ended in whatever way.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.hosts import UNNAMED, is_here
from ringreduce.launcher.schedulers import slurm_job, slurm_step
from ringreduce.launcher.start import AGENTS, Start

#: Begins the lines of answers; what the shells of a host write as well does not count.
MARK = "ringreduce-answer "
PIECE_NBYTES = 1 << 18
#: How long a host may say nothing: at first, as another job may copy the same, and while it writes the last files.
_ANSWER_S = 120.0
#: How long it may take nothing.
_STALL_S = 60.0
#: How long hosts have to end.
_END_S = 30.0
#: Pipes to and from a process, and what it writes to standard error.
_FILES_OF_A_PROCESS = 3
_OTHER_FILES = 64
_SHOWN = 400  # of what a host says


@dataclass(frozen=True, slots=True)
class Errand:
    """What processes of hosts are for.

    Attributes:
        name: as users know it; errors begin with it.
        python: runs there, by the same path on all hosts.
        python_is: which Python that is, in words.
        program: module whose text it runs.
    """

    name: str
    python: str
    python_is: str
    program: ModuleType

    def begin(self, host: str, request: Mapping[str, Any], start: Start | None) -> HostProcess:
        """Start the process of a host; no start: of this one.

        Raises:
            ConfigError: there is no connection to it, or nothing to make one by.
        """
        text = Path(str(self.program.__file__)).read_bytes()
        command = [self.python, "-I", "-c", f"import sys; exec(sys.stdin.buffer.read({len(text)}))"]
        line = command if start is None else command_on(host, command, start)
        return HostProcess(self, host, line, text + json.dumps({**request, "mark": MARK}).encode() + b"\n")


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


def texts(start: Start, names: Sequence[str], files: Sequence[str], limit_s: float) -> list[str]:
    """Return the texts of files, one after the other, for each host that gives them within a time limit."""
    asked = []
    for name in names:
        with suppress(ConfigError):
            line = ["timeout", "--kill-after=1", f"{limit_s:g}", *command_on(name, ["cat", *files], start)]
            quiet = subprocess.DEVNULL
            asked.append(subprocess.Popen(line, stdin=quiet, stdout=subprocess.PIPE, stderr=quiet, text=True))
    outputs = [process.communicate()[0] for process in asked]
    return [text for text, process in zip(outputs, asked, strict=True) if process.returncode == 0]


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


class HostRefusedError(ConfigError):
    """A host that is reached cannot do what its process is for."""


class HostProcess:
    """A process of a host's own Python, which lives as long as its standard input is open.

    Args:
        errand: what it is for.
        name: of the host.
        line: runs it.
        begins: what it reads first: its text, and the request.

    Attributes:
        input, output: its standard input, which does not block, and its standard output.
        rest: what it has written after its last answer, as far as that was read.
    """

    def __init__(self, errand: Errand, name: str, line: Sequence[str], begins: bytes) -> None:
        self.name = name
        self.rest = b""
        self._errand = errand
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process runs
        pipe = subprocess.PIPE
        try:  # in its own session: an interrupt is for this process, which ends it
            self._process = subprocess.Popen(
                line, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0, start_new_session=True
            )
        except OSError as error:
            self._errors.close()
            raise ConfigError(f"{errand.name}: cannot run {line[0]}: {error.strerror}") from None
        self.input = cast("IO[bytes]", self._process.stdin)
        self.output = cast("IO[bytes]", self._process.stdout)
        with suppress(BrokenPipeError):  # its answer says why
            self.input.write(begins)
        os.set_blocking(self.input.fileno(), False)

    def answer(self, limit_s: float = _ANSWER_S) -> str:
        """Return what it answers.

        Raises:
            HostRefusedError: that it cannot do what it is for.
            ConfigError: it has ended, or answers nothing for too long.
        """
        waiting = select.poll()
        waiting.register(self.output, select.POLLIN)
        deadline = time.monotonic() + limit_s
        while True:
            line, end, rest = self.rest.partition(b"\n")
            if not end:
                if not waiting.poll(max(deadline - time.monotonic(), 0.0) * 1000):
                    raise ConfigError(f"{self._errand.name}: {self.name} has not answered for {limit_s:g} s")
                piece = os.read(self.output.fileno(), PIECE_NBYTES)
                if not piece:
                    raise ConfigError(f"{self._errand.name}: {self._how_it_ended()}")
                self.rest += piece
                continue
            self.rest = rest
            if line.startswith(MARK.encode()):
                what, text = json.loads(line[len(MARK) :])
                if what == "failed":
                    raise HostRefusedError(f"{self._errand.name}: {self.name}: {text}")
                return str(what)

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._errors.seek(0)
        said = " ".join(self._errors.read().decode(errors="replace").split())[-_SHOWN:]
        python = self._errand.python
        if self._process.returncode == 127 or (python in said and "No such file" in said):
            return f"{self.name} has no {python}, {self._errand.python_is}; install it there ({said})"
        return f"{self.name} cannot be reached, or has ended, with status {self._process.returncode}: {said}"

    @property
    def hangs(self) -> bool:
        """Whether it runs on, though it has not answered."""
        return self._process.poll() is None

    def close_input(self) -> None:
        """Have it do what is left to do, and end."""
        with suppress(OSError):
            self.input.close()

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
            self.close_input()
            self.output.close()
            self._errors.close()
        return True


def close_inputs(processes: Sequence[HostProcess], start: Start) -> None:
    """Have all processes end; those of hosts that were lost are not waited for."""
    for each in processes:
        if start.has_lost(each.name):
            each.kill()
        each.close_input()


def end_all(processes: Sequence[HostProcess], start: Start) -> list[str]:
    """Have all processes end; return the hosts whose processes may not have, as they are lost, or late."""
    close_inputs(processes, start)
    deadline = time.monotonic() + _END_S
    ended = {each.name: each.has_ended(max(deadline - time.monotonic(), 0.1)) for each in processes}
    return [name for name, has_ended in ended.items() if start.has_lost(name) or not has_ended]


class ToAll:
    """A stream to processes of several hosts: all get the same.

    Args:
        errand: what they are for.
        processes: which.
        progress: called with the bytes that all have got.
    """

    def __init__(
        self, errand: Errand, processes: Sequence[HostProcess], progress: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        self._errand = errand
        self._processes = {each.input.fileno(): each for each in processes}
        self._progress = progress
        self._sent_nbytes = 0
        self._held = bytearray()  # until there is enough: files are small

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._sent_nbytes + len(self._held)

    def write(self, piece: bytes) -> int:
        """Hand a piece to all, now or with later ones; see `flush` for errors."""
        self._held += piece
        if len(self._held) >= PIECE_NBYTES:
            self.flush()
        return len(piece)

    def flush(self) -> None:
        """Hand what was written to all.

        Raises:
            ConfigError: one has ended, or takes nothing for too long.
        """
        piece = bytes(self._held)
        self._held.clear()
        left = {number: memoryview(piece) for number in self._processes if piece}
        waiting = select.poll()
        for number in left:
            waiting.register(number, select.POLLOUT)
        while left:
            ready = waiting.poll(_STALL_S * 1000)
            if not ready:
                names = " and ".join(self._processes[number].name for number in left)
                raise ConfigError(f"{self._errand.name}: {names} has taken nothing for {_STALL_S:g} s")
            for number, _ in ready:
                try:
                    left[number] = left[number][os.write(number, left[number]) :]
                except BrokenPipeError:
                    self._processes[number].answer()  # raises why
                    raise
                if not left[number]:
                    waiting.unregister(number)
                    del left[number]
        self._sent_nbytes += len(piece)
        self._progress(self._sent_nbytes)
