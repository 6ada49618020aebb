"""``--ship``: copies the environment and the program to all hosts of a job, over what also starts their daemons.

Below one folder, the same on all hosts, each file has the path that it has here: ``/home/me/train.py`` becomes
``/tmp/ringreduce-ship-1000/VERSION/root/home/me/train.py``. On this host that ``root`` is a link to ``/``. So the ranks
of all hosts have the same command line, and this host needs no copy.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import unpack
from ringreduce.launcher.cargo import Cargo, base_python
from ringreduce.launcher.hosts import is_here
from ringreduce.launcher.job import say
from ringreduce.launcher.schedulers import Allocation
from ringreduce.launcher.start import AGENTS, UNNAMED, Start

__all__ = ["shipped"]

#: Shows a bar with a text; within it, the function is called with the bytes that were copied so far, and with all.
_Progress = Callable[[str], AbstractContextManager[Callable[[int, int], object]]]

_PIECE_NBYTES = 1 << 18
#: How long a host may say nothing: at first, as another job may copy the same, and while it writes the last files.
_ANSWER_S = 120.0
#: How long it may take nothing.
_STALL_S = 60.0
#: How long hosts have to remove a copy.
_REMOVE_S = 30.0


def _line(start: Start, host: str, command: Sequence[str]) -> list[str]:
    """Return what runs a command on a host as mpirun starts its daemon there.

    Raises:
        ConfigError: it does so by something else than ssh, srun, or an agent that the environment names.
    """
    if start.by_ssh:
        return [*start.mpirun.ssh_to(host, start.spec, os.environ), shlex.join(command)]
    scheduler = Allocation.scheduler_here(os.environ)
    if scheduler is not None and scheduler.name == "Slurm":  # also where users name hosts of the allocation
        return ["srun", "--mpi=none", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host}", *command]
    names = AGENTS["Open MPI"]
    chosen = next((os.environ[name] for name in names if name in os.environ), "")
    if chosen:
        return [*shlex.split(chosen), host, shlex.join(command)]
    raise ConfigError(f"--ship reaches hosts by ssh, by srun, or by the agent that {names[0]} names; set that")


class _Host:
    """A process of a host's own Python, which has a copy as long as its standard input is open; see `unpack`.

    Args:
        name: of the host.
        line: runs it.
        program: its text, and the request.
    """

    def __init__(self, name: str, line: Sequence[str], program: bytes) -> None:
        self.name = name
        self._said = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process runs
        pipe = subprocess.PIPE
        try:  # in its own session: an interrupt is for this process, which ends it
            self.process = subprocess.Popen(
                line, stdin=pipe, stdout=pipe, stderr=self._errors, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"--ship: cannot run {line[0]}: {error.strerror}") from None
        self.input = cast("IO[bytes]", self.process.stdin)
        with suppress(BrokenPipeError):  # its answer says why
            self.input.write(program)
        os.set_blocking(self.input.fileno(), False)

    def answer(self, limit_s: float = _ANSWER_S) -> str:
        """Return what it answers.

        Raises:
            ConfigError: that it cannot have the copy, or nothing for too long.
        """
        output = cast("IO[bytes]", self.process.stdout)
        deadline = time.monotonic() + limit_s
        while True:
            line, end, rest = self._said.partition(b"\n")
            if not end:
                if not select.select([output], [], [], max(deadline - time.monotonic(), 0.0))[0]:
                    raise ConfigError(f"--ship: {self.name} has not answered for {limit_s:g} s")
                piece = os.read(output.fileno(), _PIECE_NBYTES)
                if not piece:
                    raise ConfigError(f"--ship: {self._how_it_ended()}")
                self._said += piece
                continue
            self._said = rest
            if line.startswith(unpack.MARK.encode()):
                what, text = json.loads(line[len(unpack.MARK) :])
                if what == "failed":
                    raise ConfigError(f"--ship: {self.name}: {text}")
                return str(what)

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_REMOVE_S)
        self._errors.seek(0)
        said = " ".join(self._errors.read().decode(errors="replace").split())[-400:]
        if self.process.returncode == 127 or (base_python() in said and "No such file" in said):
            python = base_python()
            return (
                f"{self.name} has no {python}, the Python that this environment was made by; install it there ({said})"
            )
        return f"{self.name} cannot be reached, or has ended, with status {self.process.returncode}: {said}"

    def close(self) -> None:
        """Have it remove the copy, unless that is kept, and end."""
        with suppress(OSError):
            self.input.close()

    def has_ended(self, limit_s: float) -> bool:
        """Return whether it has ended within a time limit; it is killed if not."""
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        finally:
            cast("IO[bytes]", self.process.stdout).close()
            self._errors.close()
        return True


class _ToAll:
    """A stream to several hosts: all get the same.

    Args:
        hosts: which.
        progress: called with the bytes that all have got.
    """

    def __init__(self, hosts: Sequence[_Host], progress: Callable[[int], object]) -> None:
        self._hosts = {host.input.fileno(): host for host in hosts}
        self._progress = progress
        self._sent_nbytes = 0
        self._held = bytearray()  # until there is enough: files are small

    def tell(self) -> int:
        """Return how many bytes were written."""
        return self._sent_nbytes + len(self._held)

    def write(self, piece: bytes) -> int:
        """Hand a piece to all hosts, now or with later ones; see `flush` for errors."""
        self._held += piece
        if len(self._held) >= _PIECE_NBYTES:
            self.flush()
        return len(piece)

    def flush(self) -> None:
        """Hand what was written to all hosts.

        Raises:
            ConfigError: one has ended, or takes nothing for too long.
        """
        piece = bytes(self._held)
        self._held.clear()
        left = {number: memoryview(piece) for number in self._hosts}
        while left:
            _, ready, _ = select.select([], list(left), [], _STALL_S)
            if not ready:
                names = " and ".join(self._hosts[number].name for number in left)
                raise ConfigError(f"--ship: {names} has taken nothing for {_STALL_S:g} s")
            for number in ready:
                try:
                    left[number] = left[number][os.write(number, left[number]) :]
                except BrokenPipeError:
                    self._hosts[number].answer()  # raises why
                    raise
                if not left[number]:
                    del left[number]
        self._sent_nbytes += len(piece)
        self._progress(self._sent_nbytes)


# ---- a job ----


@contextmanager
def shipped(start: Start, progress: _Progress) -> Iterator[Start]:
    """Have the environment and the program on all hosts of a job, as long as this context lasts, or longer if it keeps.

    Args:
        start: what starts the job; of one that copies nothing, it is returned.
        progress: shows how much is copied.

    Yields:
        What starts the job on the copies.

    Raises:
        ConfigError: a host cannot take the copy, in whatever way; nothing is left then.
    """
    spec = start.spec
    listed = [host for host in start.listed if host != UNNAMED] or start.slots
    if not listed and start.allocation is not None:
        listed = start.allocation.slots
    names = [host for host in listed if not is_here(host, start.here)]
    if not spec.ship or not names:
        yield start
        return
    if start.mpirun.kind != "Open MPI" or start.mpirun.major < 5:
        raise ConfigError(f"--ship takes Open MPI 5; {start.mpirun.path} says {start.mpirun.said!r}")
    cargo = Cargo.of(spec)
    hosts: list[_Host] = []
    try:
        # First this one: others may be this one by another name, and have the files then.
        hosts.append(_begin(cargo, os.uname().nodename, spec.keep, start=None))
        hosts[0].answer()
        hosts += [_begin(cargo, name, spec.keep, start=start) for name in names]
        _send(cargo, hosts[1:], progress)
        yield cargo.start(start)
    finally:
        for host in hosts:
            host.close()
        deadline = time.monotonic() + _REMOVE_S
        late = [host.name for host in hosts if not host.has_ended(max(deadline - time.monotonic(), 0.1))]
        if late:
            say(f"--ship: {' and '.join(late)} may still have {os.path.dirname(cargo.root)}")


def _begin(cargo: Cargo, name: str, keep: bool, start: Start | None) -> _Host:
    """Start the process that has the copy on a host; no start: on this one."""
    text = Path(unpack.__file__).read_bytes()
    request: Mapping[str, Any] = {
        "base": cargo.base,
        "name": cargo.name,
        "links": start is None,
        "python": f"{cargo.root}{sys.executable}",
        "version": sys.version.partition("(")[0].strip(),
        "count": len(cargo.files) + 1,
        "keep": keep,
    }
    command = [base_python(), "-I", "-c", f"import sys; exec(sys.stdin.buffer.read({len(text)}))"]
    line = command if start is None else _line(start, name, command)
    return _Host(name, line, text + json.dumps(request).encode() + b"\n")


def _send(cargo: Cargo, hosts: Sequence[_Host], progress: _Progress) -> None:
    """Send the files to the hosts that do not have them."""
    without = [host for host in hosts if host.answer() == "wants"]
    has = [host.name for host in hosts if host not in without]
    if has:
        say(f"--ship: {' and '.join(has)} {'has' if len(has) == 1 else 'have'} this version already")
    if not without:
        return
    names = " and ".join(host.name for host in without)
    began = time.monotonic()
    with progress(f"copying to {names}") as show:
        total_nbytes = cargo.nbytes
        stream = cast("IO[bytes]", _ToAll(without, lambda nbytes: show(min(nbytes, total_nbytes), total_nbytes)))
        cargo.write(stream)
        stream.flush()
        for host in without:
            host.answer()
    say(f"--ship: {cargo.nbytes / 1e6:.0f} MB copied to {names} in {time.monotonic() - began:.1f} s")
