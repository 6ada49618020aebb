"""What ``--ship`` copies to the hosts of a job: which files, in which version, and the job that runs on the copies."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import IO, NamedTuple

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.python_line import PythonLine, script_of
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import Start
from ringreduce.launcher.unpack import TREE

_PIECE_NBYTES = 1 << 18
_HEADER_NBYTES = 512  # of a file in an archive
_KINDS = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)  # of files that are copied: sockets and the like are not
#: Files that change when a module is imported for the first time; they go along, but make no other version.
_COMPILED = "__pycache__"


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
        own: folders that each host has by its own path, for logs and results.
        files: all of ``paths``.
        name: of this version, the same on all hosts that start jobs of it.
        job: what leads to this version in jobs that this host starts.
    """

    paths: tuple[str, ...]
    base: str
    environment: str
    folder: str
    own: frozenset[str]
    files: tuple[_File, ...]
    name: str
    job: str

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
        version = hashlib.sha256(os.getcwd().encode())
        for path, source, like in files:
            if _COMPILED not in path.split(os.sep) and not stat.S_ISDIR(like.st_mode):
                link = os.readlink(source) if stat.S_ISLNK(like.st_mode) else ""
                version.update(f"{path}\0{like.st_size} {like.st_mtime_ns} {like.st_mode} {link}\n".encode(
                    errors="surrogateescape"))  # fmt: skip
        own = frozenset(os.path.abspath(each) for each in (spec.folder, spec.results) if each is not None)
        name = f"{_short(sys.prefix)}-{version.hexdigest()[:16]}"
        return cls(
            paths=tuple(paths),
            base=base,
            environment=sys.prefix,
            folder=os.getcwd(),
            own=own,
            files=files,
            name=name,
            job=f"{name}-{_short(os.uname().nodename)}",
        )

    @property
    def root(self) -> str:
        """The folder below which a job finds the files by their paths; on this host it leads to these themselves."""
        return os.path.join(self.base, self.job, TREE)

    @property
    def store(self) -> str:
        """The folder below which another host has the files by their paths."""
        return os.path.join(self.base, self.name, TREE)

    @property
    def nbytes(self) -> int:
        """About how many bytes go to each host."""
        return sum(
            _HEADER_NBYTES + (each.like.st_size if stat.S_ISREG(each.like.st_mode) else 0) for each in self.files
        )

    def there(self, word: str) -> str:
        """Return a word of a command line as it is for the job: a path of a copy, also in ``--option=PATH``."""
        return self._moved(word, self.root)

    def _moved(self, word: str, root: str) -> str:
        option, equals, value = word.rpartition("=") if word.startswith("-") else ("", "", word)
        inside = os.path.isabs(value) and value not in self.own and any(_is_within(value, path) for path in self.paths)
        return f"{option}{equals}{root}{os.path.normpath(value)}" if inside else word

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
        if mpirun != start.mpirun.path:
            prefix = os.path.dirname(os.path.dirname(mpirun))
            more += ["--prefix", prefix]
            # Or ranks would look for its files where mpirun finds itself, which is where the link of this host leads.
            more += [word for name in ("OPAL_PREFIX", "PMIX_PREFIX") for word in ("-x", f"{name}={prefix}")]
        spec = replace(spec, exported=exported, more=(*more, *spec.more))
        return replace(start, spec=spec, there=self.there, has_copies=True)

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
            member.linkname = self._moved(os.readlink(file.source), self.store)
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
                text = content.read().replace(self.environment.encode(), f"{self.store}{self.environment}".encode())
            member.size = len(text)
            archive.addfile(member, BytesIO(text))


def _member(path: str, mode: int, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path.lstrip(os.sep))
    member.mode = mode
    member.type = kind
    return member


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


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


def _files(path: str, source: str) -> Iterator[_File]:
    like = os.lstat(source)
    if stat.S_IFMT(like.st_mode) in _KINDS:
        yield _File(path, source, like)
    if stat.S_ISDIR(like.st_mode):
        with os.scandir(source) as entries:
            for name in sorted(each.name for each in entries):
                yield from _files(os.path.join(path, name), os.path.join(source, name))
