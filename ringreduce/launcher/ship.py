"""``--ship``: copies the environment and the program to all hosts of a job, over what also starts their daemons.

Below one folder, the same on all hosts, each file has the path that it has here: ``/home/me/train.py`` becomes
``/tmp/ringreduce-ship-1000/VERSION/root/home/me/train.py``. On this host that ``root`` is a link to ``/``. So the ranks
of all hosts have the same command line, and this host needs no copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shlex
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import unpack
from ringreduce.launcher.hosts import is_here
from ringreduce.launcher.job import say
from ringreduce.launcher.schedulers import Allocation
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import UNNAMED, Start

__all__ = ["Cargo", "shipped"]

#: Returns what is called with the bytes that were copied, and all there are; takes what to say of them.
_Progress = Callable[[str], AbstractContextManager[Callable[[int, int], object]]]

_PIECE_NBYTES = 1 << 18
_HEADER_NBYTES = 512  # of a file in an archive
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)  # of files that are copied: sockets and the like are not
#: How long a host may say nothing: at first, as another job may copy the same, and while it writes the last files.
_ANSWER_S = 120.0
#: How long it may take nothing.
_STALL_S = 60.0
#: How long hosts have to remove a copy.
_REMOVE_S = 30.0
#: Files that change when a module is imported for the first time; they go along, but make no other version.
_COMPILED = "__pycache__"
#: Agents of Open MPI in place of ssh.
_AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent")


class _File(NamedTuple):
    """What is copied: under which name, from where, and what it is like."""

    path: str
    source: str
    like: os.stat_result


@dataclass(frozen=True)
class Cargo:
    """What is copied, and where to.

    Attributes:
        paths: files and folders, by absolute path; none is within another.
        base: the folder of all copies of this user.
        environment: the folder of the virtual environment.
        folder: the working directory, which hosts have, too, with what ``paths`` have of it.
        logs: a folder that each host has by its own path; empty: there is none.
        files: all of ``paths``.
        name: of this version.
    """

    paths: tuple[str, ...]
    base: str
    environment: str
    folder: str
    logs: str
    files: tuple[_File, ...]
    name: str

    @classmethod
    def of(cls, spec: LaunchSpec) -> Cargo:
        """Return what a job takes.

        Raises:
            ConfigError: this Python is in no virtual environment, or a file is not there or cannot be read.
        """
        if sys.prefix == sys.base_prefix:
            raise ConfigError(
                f"--ship copies a virtual environment, and {sys.executable} is in none: make one by python -m venv "
                ".venv, and install ringreduce and what the program needs with .venv/bin/pip"
            )
        base = os.path.join(tempfile.gettempdir(), f"ringreduce-ship-{os.getuid()}")
        wanted = [sys.prefix, *_package(), *_program(spec), *map(os.path.abspath, spec.ship_paths)]
        paths: list[str] = []
        for path in sorted(set(wanted), key=lambda each: each.split(os.sep)):
            if not os.path.exists(path):
                raise ConfigError(f"--ship-path {path}: it is not there")
            if _is_within(base, path):
                raise ConfigError(f"--ship-path {path} holds the copies themselves ({base}); name what is needed of it")
            if not any(_is_within(path, other) for other in paths):
                paths.append(path)
        try:
            files = tuple(each for path in paths for each in _files(path, os.path.realpath(path)))
        except OSError as error:
            raise ConfigError(f"--ship: {error.filename}: {error.strerror}") from None
        host = os.uname().nodename
        kind = hashlib.sha256(f"{host} {sys.prefix}".encode()).hexdigest()[:8]
        version = hashlib.sha256(os.getcwd().encode())
        for path, source, like in files:
            if _COMPILED not in path.split(os.sep) and not stat.S_ISDIR(like.st_mode):
                link = os.readlink(source) if stat.S_ISLNK(like.st_mode) else ""
                version.update(f"{path}\0{like.st_size} {like.st_mtime_ns} {like.st_mode} {link}\n".encode(
                    errors="surrogateescape"))  # fmt: skip
        logs = os.path.abspath(spec.folder) if spec.folder is not None else ""
        name = f"{kind}-{version.hexdigest()[:16]}"
        return cls(
            paths=tuple(paths),
            base=base,
            environment=sys.prefix,
            folder=os.getcwd(),
            logs=logs,
            files=files,
            name=name,
        )

    @property
    def root(self) -> str:
        """The folder below which a host has the files by their paths."""
        return os.path.join(self.base, self.name, "root")

    @property
    def nbytes(self) -> int:
        """About how many bytes go to each host."""
        return sum(
            _HEADER_NBYTES + (each.like.st_size if stat.S_ISREG(each.like.st_mode) else 0) for each in self.files
        )

    def there(self, word: str) -> str:
        """Return a word of a command line as it is for the copies: a path in them, also in ``--option=PATH``."""
        option, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
        inside = os.path.isabs(value) and value != self.logs and any(_is_within(value, path) for path in self.paths)
        return f"{option}{equals}{self.root}{os.path.normpath(value)}" if inside else word

    def start(self, start: Start) -> Start:
        """Return what starts the job on the copies."""
        spec = start.spec
        given = spec.variables().get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        found = [os.path.abspath(each) for each in sys.path]  # as of the folders of editable installs
        ours = [
            f"{self.root}{each}"
            for each in found
            if any(_is_within(path, each) or _is_within(each, path) for path in self.paths)
            and not _is_within(each, self.environment)
        ]
        python_path = dict.fromkeys([*map(self.there, filter(None, given.split(":"))), *ours])
        variables = {"VIRTUAL_ENV": f"{self.root}{self.environment}", "PYTHONPATH": ":".join(python_path)}
        exported = (*spec.exported, *(f"{name}={value}" for name, value in variables.items() if value))
        more = ["--wdir", f"{self.root}{self.folder}"]
        mpirun = self.there(start.mpirun.path)
        more += ["--prefix", os.path.dirname(os.path.dirname(mpirun))] if mpirun != start.mpirun.path else []
        return replace(start, spec=replace(spec, exported=exported, more=(*more, *spec.more)), there=self.there)

    def write(self, stream: IO[bytes]) -> None:
        """Write an archive of tar.

        Raises:
            ConfigError: a file cannot be read, or changes meanwhile.
        """
        with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
            archive.copybufsize = _PIECE_NBYTES  # type: ignore[attr-defined]
            archive.addfile(_member(self.folder, 0o700, tarfile.DIRTYPE))
            for each in self.files:
                try:
                    self._add(archive, each)
                except OSError as error:
                    raise ConfigError(f"--ship: {each.source} has changed, or cannot be read: {error}") from None

    def _add(self, archive: tarfile.TarFile, file: _File) -> None:
        mode = file.like.st_mode
        if stat.S_ISDIR(mode):
            archive.addfile(_member(file.path, stat.S_IMODE(mode) | 0o700, tarfile.DIRTYPE))
        elif stat.S_ISLNK(mode):
            member = _member(file.path, 0o777, tarfile.SYMTYPE)
            member.linkname = self.there(os.readlink(file.source))
            archive.addfile(member)
        else:
            with open(file.source, "rb") as content:
                member = _member(file.path, stat.S_IMODE(mode) | 0o600, tarfile.REGTYPE)
                member.mtime = int(file.like.st_mtime)  # compiled modules name it
                member.size = file.like.st_size
                begins = content.read(2) if _is_within(file.path, os.path.join(self.environment, "bin")) else b""
                content.seek(0)
                if begins != b"#!":
                    archive.addfile(member, content)
                    return
                text = content.read().replace(self.environment.encode(), f"{self.root}{self.environment}".encode())
            member.size = len(text)
            archive.addfile(member, BytesIO(text))


def _member(path: str, mode: int, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path.lstrip(os.sep))
    member.mode = mode
    member.type = kind
    return member


def _is_within(path: str, folder: str) -> bool:
    path = os.path.normpath(path)
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _package() -> list[str]:
    """Return the files of ringreduce: its folder, and the module of torch's backend beside it."""
    package = Path(__file__).parents[1]
    return [str(each) for each in (package, package.with_name("ringreduce_torch_backend.py")) if each.exists()]


def _program(spec: LaunchSpec) -> list[str]:
    """Return the script, and what Python finds beside it without any setting: modules and packages."""
    words = [word for word in spec.program if not word.startswith("-")]
    script = next((word for word in words[1:2] if os.path.isfile(word)), words[0] if os.sep in words[0] else "")
    file = os.path.abspath(script)
    if not script or not os.path.isfile(file) or _is_within(file, sys.prefix) or file == _base_python():
        file = ""
    folder = Path(file).parent if file else Path.cwd()
    # Neither a link that leads nowhere, as editors make them, nor what is in another user's folder.
    beside = [
        str(each)
        for each in folder.iterdir()
        if (each.suffix == ".py" and each.exists()) or os.path.isfile(each / "__init__.py")
    ]
    return [*([file] if file else []), *beside]


def _base_python() -> str:
    """Return the Python that the virtual environment was made by: other hosts have the same."""
    return os.path.join(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")


def _files(path: str, source: str) -> Iterator[_File]:
    like = os.lstat(source)
    if stat.S_IFMT(like.st_mode) in _KINDS:
        yield _File(path, source, like)
    if stat.S_ISDIR(like.st_mode):
        with os.scandir(source) as entries:
            for name in sorted(each.name for each in entries):
                yield from _files(os.path.join(path, name), os.path.join(source, name))


# ---- hosts ----


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
    chosen = next((os.environ[name] for name in _AGENTS if name in os.environ), "")
    if chosen:
        return [*shlex.split(chosen), host, shlex.join(command)]
    raise ConfigError(f"--ship reaches hosts by ssh, by srun, or by the agent that {_AGENTS[0]} names; set that")


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
        if self.process.returncode == 127 or (_base_python() in said and "No such file" in said):
            python = _base_python()
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
    command = [_base_python(), "-I", "-c", f"import sys; exec(sys.stdin.buffer.read({len(text)}))"]
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
