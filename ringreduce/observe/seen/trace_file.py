"""The file of a trace: events of all ranks, merged from a part that each of them writes.

The parts are in a private hidden folder beside the file. The last rank that stops merges them, by a new file that it
renames, and removes the folder; so does each rank that ends because of an error. Ranks that were killed leave their
parts to `collect`, and to the next trace in that file. Where hosts share no file system, each has a file with its own
ranks.
"""

from __future__ import annotations

import errno
import glob
import itertools
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from ringreduce.common.files import is_own_file, open_file, partial_path, replace_file
from ringreduce.common.sealed_files import PLAIN, KeyFile, is_sealed

_OPENING = b'[\n{"name": "trace", "ph": "M", "pid": 0, "args": {"job": '
_CLOSING = b"\n]\n"
_SEPARATOR = b",\n"  # ends each event of a part
_HEAD_NBYTES = 1 << 10  # of a file, with the name of its trace
_PURPOSE = "a trace"  # of a file that is sealed
_LENGTH_NBYTES = 8  # before each piece of a part that is sealed


class TraceFile:
    """A rank's access to the file of a trace. One thread at a time may use it.

    Args:
        path: of the file.
        name: of the trace: the job and a number, with a space between them. The same on all ranks.
        rank: this one.
        keys: seals the file and its parts.
    """

    def __init__(self, path: str, name: str, rank: int, keys: KeyFile) -> None:
        self._path = os.path.abspath(path)
        self._keys = keys
        self._name = name
        self._head = _OPENING + json.dumps(name).encode() + b"}}"
        job, _, number = name.rpartition(" ")
        trace = f"{job[:8]}-{number}"
        self._folder = _folder_of(self._path, trace)
        self._removed = _folder_of(self._path, f"{trace}-{rank}")  # where this rank moves the folder to remove it
        self._part = os.path.join(self._folder, str(rank))
        self._finished = False
        self._npieces = 0  # of the part

    def begin(self, text: bytes) -> None:
        """Make this rank's part with its first events, and the file; an earlier trace in the file is replaced.

        Raises:
            OSError: that does not work; or the file is none of this user's regular files, or holds something else than
                a trace of ours. Then it stays as it is.
        """
        _read_head(self._path, self._keys)
        try:
            with suppress(FileExistsError):
                os.mkdir(self._folder, 0o700)
            found = os.lstat(self._folder)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                raise FileExistsError(errno.EEXIST, f"{self._folder} is no folder of this user's")
            for earlier in glob.glob(_folder_of(glob.escape(self._path), "*")):
                if earlier != self._folder:
                    shutil.rmtree(earlier, ignore_errors=True)
            self._write(text, os.O_CREAT | os.O_TRUNC)
            self.merge()
        except OSError:
            with suppress(OSError):
                os.unlink(self._part)
                if not self._parts():
                    shutil.rmtree(self._folder)
            raise

    def append(self, text: bytes) -> None:
        """Append events to this rank's part: each encoded, with a comma and a newline behind it.

        Raises:
            OSError: that does not work; then none of them is in the part.
        """
        try:
            self._write(text)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "another trace was begun in it, or it was removed") from None

    def finish(self, ranks: int, *, at_once: bool) -> None:
        """Append no more; merge the parts if all ranks that have one are finished.

        Args:
            ranks: remove the parts then, if at least so many ranks have one.
            at_once: merge them whatever other ranks do.

        Raises:
            OSError: as for `merge`.
        """
        with suppress(FileNotFoundError):  # all have finished, and another rank has removed the parts
            os.chmod(self._part, stat.S_IRUSR)  # how others see that this rank has finished
            parts = self._parts()
            over = not any(each.stat().st_mode & stat.S_IWUSR for each in parts)
            if (over or at_once) and not (self._finished and not os.path.lexists(self._path)):  # moved since
                self.merge()
            if over and len(parts) >= ranks:
                # Moved first, so that the merge of another rank fails, which would see some of the parts only.
                os.rename(self._folder, self._removed)
                shutil.rmtree(self._removed, ignore_errors=True)
        self._finished = True

    def merge(self) -> None:
        """Make the file out of the parts.

        Raises:
            OSError: that does not work; the file and the parts are as they were.
        """
        new = partial_path(Path(self._part))
        path = Path(self._path)
        replace_file(path, lambda file: self._keys.write(file, _PURPOSE, self._write_all), new=new, durable=False)

    def _write_all(self, file: BinaryIO) -> None:
        file.write(self._head)
        for part in self._parts():
            for text in self._texts(part):
                whole, _, _ = text.rpartition(_SEPARATOR)  # a killed rank may have cut an event
                if whole:
                    file.write(_SEPARATOR + whole)
        file.write(_CLOSING)

    def _texts(self, part: Path) -> Iterator[bytes]:
        """Return what a part holds: as it is, or piece by piece, up to one that a killed rank has cut.

        Raises:
            OSError: it cannot be read, or a piece was changed.
        """
        if not self._keys.seals:
            yield part.read_bytes()
            return
        with part.open("rb") as file:
            for number in itertools.count():
                nbytes = int.from_bytes(file.read(_LENGTH_NBYTES), "big")
                if not 0 < nbytes <= os.fstat(file.fileno()).st_size - file.tell():
                    return
                try:
                    yield self._keys.opened(BytesIO(file.read(nbytes)), self._purpose(part.name, number)).read()
                except ValueError as error:
                    raise OSError(f"piece {number} of {part}: {error}") from None

    def _purpose(self, part: str, number: int) -> str:
        return f"piece {number} of rank {part} of the trace {self._name}"

    def _sealed(self, text: bytes) -> bytes:
        """Return a text as a part has it."""
        if not self._keys.seals:
            return text
        sealed = BytesIO()
        self._keys.write(
            sealed, self._purpose(os.path.basename(self._part), self._npieces), lambda file: file.write(text)
        )
        return sealed.tell().to_bytes(_LENGTH_NBYTES, "big") + sealed.getvalue()

    def _write(self, text: bytes, flags: int = 0) -> None:
        rest = memoryview(self._sealed(text))
        descriptor = os.open(self._part, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | flags, 0o600)
        before = os.fstat(descriptor).st_size
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
        finally:
            os.close(descriptor)
        self._npieces += 1

    def _parts(self) -> list[Path]:
        return sorted(each for each in Path(self._folder).iterdir() if each.name.isdigit())


def collect(path: str | os.PathLike[str], keys: KeyFile = PLAIN) -> None:
    """Merge what ranks have written of a trace so far, whatever has become of them. Does nothing if that fails."""
    with suppress(OSError, ValueError):
        head = _read_head(os.fspath(path), keys)
        TraceFile(os.fspath(path), json.loads(head[len(_OPENING) : head.index(b"}}")]), -1, keys).merge()


def read_trace(path: str | os.PathLike[str], keys: KeyFile) -> bytes:
    """Return what is in the file of a trace.

    Raises:
        OSError, ValueError: it cannot be read; or these keys do not open it.
    """
    with open_file(path) as file, keys.opened(file, _PURPOSE) as content:
        return content.read()


def _folder_of(path: str, trace: str) -> str:
    """Return where the parts of a trace are, which is to become the file at ``path``."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{trace}.ringreduce")


def _read_head(path: str, keys: KeyFile) -> bytes:
    """Return how a file begins; nothing if there is none.

    Raises:
        OSError: it cannot be read, is none of this user's regular files, or holds something else than a trace of ours.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a symbolic link; name the file itself") from None
        raise
    if not is_own_file(os.fstat(descriptor)):
        os.close(descriptor)
        why = "it is no regular file of this user's that has one name; name another file"
        raise FileExistsError(errno.EEXIST, why)
    try:
        with os.fdopen(descriptor, "rb") as file:
            head = file.read(_HEAD_NBYTES)
            if is_sealed(head):
                file.seek(0)
                head = keys.opened(file, _PURPOSE).read(_HEAD_NBYTES)
        if not head or head.startswith(_OPENING):
            return head
        why = "it is no trace of ringreduce; remove it"
    except ValueError as error:  # it is sealed, and these keys do not open it
        why = str(error)
    raise FileExistsError(errno.EEXIST, f"{why}, or name another file")
