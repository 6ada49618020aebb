"""``--ship``: copies the environment and the program to all hosts of a job, over what also starts their daemons.

Below one folder, the same on all hosts, each file has the path that it has here: ``/home/me/train.py`` becomes
``/tmp/ringreduce-ship-1000/JOB/root/home/me/train.py``. So the ranks of all hosts have the same command line. On this
host that ``root`` is a link to ``/``, so that it needs no copy; on others it is a link to the copy of this version,
which serves jobs of all hosts that have the same files. The agents of hosts have both; see `host_agent`.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
import stat
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.host_agent import TREE
from ringreduce.launcher.python_line import PythonLine, script_of
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import Start

_PIECE_NBYTES = 1 << 18
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)  # of files that are copied: sockets and the like are not
#: Files that change when a module is imported for the first time; they go along, but make no other version.
_COMPILED = "__pycache__"


class _ShippedFile(NamedTuple):
    """What is copied: under which name, from where, and what it is like."""

    path: str
    source: str
    like: os.stat_result


class Shipment:
    """What is copied to the hosts of a job, and where to.

    Args:
        spec: options of the job.

    Attributes:
        paths: files and folders, by absolute path; none is within another.
        nbytes: about how many bytes go to each host.
        name: of this version, the same on all hosts that start jobs of it.
        root: the folder below which a job finds the files by their paths; on this host it leads to these themselves.
        store: the folder below which another host has the files by their paths.

    Raises:
        ConfigError: this Python is in no virtual environment, or a file is not there or cannot be read.
    """

    def __init__(self, spec: LaunchSpec) -> None:
        if sys.prefix == sys.base_prefix:
            raise ConfigError(
                f"--ship copies a virtual environment, and {sys.executable} is in none: make one by python -m venv "
                ".venv, and install ringreduce and what the program needs with .venv/bin/pip"
            )
        self._base = os.path.join(tempfile.gettempdir(), f"ringreduce-ship-{os.getuid()}")
        self._folder = os.getcwd()
        self._own = {os.path.abspath(path) for path in (spec.folder, spec.results) if path is not None}
        self.paths: list[str] = []
        wanted = {sys.prefix, *_package(), *_program(spec), *map(os.path.abspath, spec.ship_paths)}
        for path in sorted(wanted, key=lambda path: path.split(os.sep)):
            if not os.path.exists(path):
                raise ConfigError(f"--ship-path {path}: it is not there")
            if _is_within(self._base, path):
                raise ConfigError(
                    f"--ship-path {path} holds the copies themselves ({self._base}); name what is needed of it"
                )
            if not self._has(path):
                self.paths.append(path)
        try:
            self._files = [file for path in self.paths for file in _files(path, os.path.realpath(path))]
        except OSError as error:
            raise ConfigError(f"--ship: {error.filename}: {error.strerror}") from None
        self.nbytes = sum(file.like.st_size for file in self._files if stat.S_ISREG(file.like.st_mode))
        version = hashlib.sha256(os.fsencode(self._folder))
        for path, source, like in self._files:
            if _COMPILED not in path.split(os.sep) and not stat.S_ISDIR(like.st_mode):
                link = os.readlink(source) if stat.S_ISLNK(like.st_mode) else ""
                version.update(os.fsencode(f"{path}\0{like.st_size} {like.st_mtime_ns} {like.st_mode} {link}\n"))
        environment = hashlib.sha256(os.fsencode(sys.prefix)).hexdigest()[:8]
        self.name = f"{environment}-{version.hexdigest()[:16]}"
        self._job = f"{environment}-{secrets.token_hex(8)}"
        self.root = os.path.join(self._base, self._job, TREE)
        self.store = os.path.join(self._base, self.name, TREE)

    def request(self, *, leads_here: bool, keep: bool) -> dict[str, Any]:
        """Return what the agent of a host is asked for: of this host, or of one that is to have a copy."""
        return {
            "base": self._base,
            "name": self.name,
            "job": self._job,
            "leads here": leads_here,
            "version": sys.version.partition("(")[0].strip(),
            "keep": keep,
        }

    def _has(self, path: str) -> bool:
        return any(_is_within(path, other) for other in self.paths)

    def there(self, word: str) -> str:
        """Return a word of a command line as it is for the job: a path of a copy, also in ``--option=PATH``."""
        return self._moved(word, self.root)

    def _moved(self, word: str, root: str) -> str:
        option, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
        inside = os.path.isabs(value) and value not in self._own and self._has(value)
        return f"{option}{equals}{root}{os.path.normpath(value)}" if inside else word

    def start(self, start: Start) -> Start:
        """Return what starts the job on the copies."""
        spec = start.spec
        given = spec.variables().get("PYTHONPATH") or os.environ.get("PYTHONPATH", "")
        folders = [os.path.abspath(folder) for folder in sys.path]  # as of the folders of editable installs
        ours = [
            f"{self.root}{folder}"
            for folder in folders
            if (self._has(folder) or any(_is_within(path, folder) for path in self.paths))
            and not _is_within(folder, sys.prefix)
        ]
        python_path = dict.fromkeys([*map(self.there, filter(None, given.split(":"))), *ours])
        variables = {"VIRTUAL_ENV": f"{self.root}{sys.prefix}", "PYTHONPATH": ":".join(python_path)}
        exported = (*spec.exported, *(f"{name}={value}" for name, value in variables.items() if value))
        more = ["--wdir", f"{self.root}{self._folder}"]
        mpirun = self.there(start.mpirun.path)
        if mpirun != start.mpirun.path:
            prefix = os.path.dirname(os.path.dirname(mpirun))
            more += ["--prefix", prefix]
            # Or ranks would look for its files where mpirun finds itself, which is where the link of this host leads.
            more += [word for name in ("OPAL_PREFIX", "PMIX_PREFIX") for word in ("-x", f"{name}={prefix}")]
        spec = replace(spec, exported=exported, more=(*more, *spec.more))
        return replace(start, spec=spec, there=self.there, has_copies=True)

    def write(self, write: Callable[[bytes], object]) -> None:
        """Write an archive of tar, in pieces of 256 KiB, by a function.

        Raises:
            ConfigError: a file cannot be read, or changes meanwhile.
        """
        stream: Any = SimpleNamespace(write=write)
        archive = tarfile.open(fileobj=stream, mode="w|", bufsize=_PIECE_NBYTES, format=tarfile.GNU_FORMAT)  # noqa: SIM115
        try:
            folder = tarfile.TarInfo(self._folder.lstrip(os.sep))
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o700
            archive.addfile(folder)
            for file in self._files:
                try:
                    self._add(archive, file)
                except OSError as error:
                    raise ConfigError(f"--ship: {file.source} has changed, or cannot be read: {error}") from None
            archive.close()
        except BaseException:
            stream.write = len  # what it would still write goes nowhere
            raise

    def _add(self, archive: tarfile.TarFile, file: _ShippedFile) -> None:
        mode = file.like.st_mode
        member = tarfile.TarInfo(file.path.lstrip(os.sep))
        member.mode = stat.S_IMODE(mode) | (0o700 if stat.S_ISDIR(mode) else 0o600)
        if not stat.S_ISREG(mode):
            member.type = tarfile.DIRTYPE if stat.S_ISDIR(mode) else tarfile.SYMTYPE
            member.linkname = self._moved(os.readlink(file.source), self.store) if stat.S_ISLNK(mode) else ""
            archive.addfile(member)
            return
        member.mtime = int(file.like.st_mtime)  # compiled modules name it
        member.size = file.like.st_size
        with open(file.source, "rb") as content:
            is_script = _is_within(file.path, os.path.join(sys.prefix, "bin")) and content.read(2) == b"#!"
            content.seek(0)
            if not is_script:
                archive.addfile(member, content)
                return
            prefix = os.fsencode(sys.prefix)
            text = content.read().replace(prefix, os.fsencode(self.store) + prefix)
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text))


def _is_within(path: str, folder: str) -> bool:
    path = os.path.normpath(path)
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _package() -> list[str]:
    """Return the files of ringreduce: its folder, and the module of torch's backend beside it."""
    package = Path(__file__).parents[1]
    return [str(each) for each in (package, package.with_name("ringreduce_torch_backend.py")) if each.exists()]


def _program(spec: LaunchSpec) -> list[str]:
    """Return the script, and what Python finds beside it without any setting: modules and packages."""
    program = spec.program
    script = script_of(program)
    if script and os.path.isdir(script) and PythonLine.of(program) is not None:
        return [os.path.abspath(script)]  # with a __main__.py; Python looks for modules in it
    if not os.path.isfile(script):
        script = program[0] if os.sep in program[0] else ""
    return with_modules(script) or _importable(Path.cwd())


def with_modules(script: str) -> list[str]:
    """Return a script and what is beside it; nothing of a part of the environment, or where there is no such file."""
    path = os.path.abspath(script)
    if not os.path.isfile(script) or _is_within(path, sys.prefix) or path == base_python():
        return []
    return [path, *_importable(Path(path).parent)]


def _importable(folder: Path) -> list[str]:
    """Return the modules and packages in a folder.

    Neither a link that leads nowhere, as editors make them, nor what is in another user's folder.
    """
    return [
        str(each)
        for each in folder.iterdir()
        if (each.suffix == ".py" and each.exists()) or os.path.isfile(each / "__init__.py")
    ]


def base_python() -> str:
    """Return the Python that the virtual environment was made by: other hosts have the same."""
    return os.path.join(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")


def _files(path: str, source: str) -> Iterator[_ShippedFile]:
    like = os.lstat(source)
    if stat.S_IFMT(like.st_mode) in _KINDS:
        yield _ShippedFile(path, source, like)
    if stat.S_ISDIR(like.st_mode):
        with os.scandir(source) as entries:
            for name in sorted(each.name for each in entries):
                yield from _files(os.path.join(path, name), os.path.join(source, name))
