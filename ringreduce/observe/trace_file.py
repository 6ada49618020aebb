"""The file of a trace: events of all ranks, collected from a part that each of them writes.

The parts are in a private hidden folder beside the file. One rank at a time holds a lock and makes the file out of the
parts: it writes a new file and renames it. So a reader always finds complete JSON, no rank waits for another, and when
the rank with the lock dies, another one takes over. The last rank that finishes removes the folder; ranks that were
killed leave it to `collect`, and to the next trace in that file. Where hosts share no file system, each has a file with
its own ranks.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import mmap
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ringreduce.common.files import replace_file

__all__ = ["TraceFile", "collect"]

_OPENING = b'[\n{"name": "trace", "ph": "M", "pid": 0, "args": {"job": '
_CLOSING = b"\n]\n"
_SEPARATOR = b",\n"  # ends each event of a part


class TraceFile:
    """A rank's access to the file of a trace. One thread at a time may use it.

    Args:
        path: of the file.
        name: of the trace: the job and a number, with a space between them. The same on all ranks.
        rank: this one.
    """

    def __init__(self, path: str, name: str, rank: int) -> None:
        self._path = os.path.abspath(path)
        self._head = _OPENING + json.dumps(name).encode() + b"}}"
        job, _, number = name.rpartition(" ")
        self._folder = _folder_of(self._path, f"{job[:8]}-{number}")
        self._part = os.path.join(self._folder, str(rank))
        self._new = Path(self._folder, f"new.{rank}")
        self._lock: int | None = None
        self._begun = self._finished = False

    def begin(self, text: bytes) -> None:
        """Make this rank's part with its first events, and the file; an earlier trace in the file is replaced.

        Raises:
            OSError: that does not work; or the file is none of this user's regular files, or holds something else than
                a trace of ours. Then it stays as it is.
        """
        _read_head(self._path)
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
            self.close()
            raise
        self._begun = True

    def append(self, text: bytes) -> None:
        """Append events to this rank's part: each encoded, with a comma and a newline behind it.

        Raises:
            OSError: that does not work; then none of them is in the part.
        """
        try:
            self._write(text)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "another trace was begun in it, or it was removed") from None

    def merge(self) -> None:
        """Make the file if it lacks events and no other rank does so.

        Raises:
            OSError: that does not work; the file is as it was.
        """
        if self._lead():
            self._make(self._parts())

    def finish(self, ranks: int) -> None:
        """Make the file for the last time; remove the parts if at least ``ranks`` ranks have one and all have finished.

        What other ranks append later, they add to the file.

        Raises:
            OSError: as for `merge`.
        """
        with suppress(FileNotFoundError):  # all have finished, and another rank has removed the parts
            os.chmod(self._part, stat.S_IRUSR)  # how others see that this rank has finished
            # A rank that has the lock looks again after it has released it, unless others go on writing and will look.
            while self._lead():
                parts = self._parts()
                try:
                    self._make(parts)
                    if len(parts) >= ranks and not any(writable for *_, writable in parts):
                        shutil.rmtree(self._folder, ignore_errors=True)
                finally:
                    self.close()
                now = self._parts()
                if now == parts or any(writable for *_, writable in now):
                    break
        self._finished = True

    def _write(self, text: bytes, flags: int = 0) -> None:
        descriptor = os.open(self._part, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | flags, 0o600)
        before, rest = os.fstat(descriptor).st_size, memoryview(text)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
        finally:
            os.close(descriptor)

    def _lead(self) -> bool:
        """Return whether this rank has the lock, or gets it now."""
        if self._lock is None:
            descriptor = os.open(os.path.join(self._folder, "lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            except OSError:
                pass  # a file system without locks: then several ranks may make the file, each one a complete one
            self._lock = descriptor
        return True

    def close(self) -> None:
        """Let another rank make the file."""
        if self._lock is not None:
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process that was forked has the descriptor, too
            os.close(self._lock)
            self._lock = None

    def _parts(self) -> list[tuple[str, int, bool]]:
        """Return path and size of each part, and whether its rank goes on writing."""
        with os.scandir(self._folder) as entries:
            found = [(each.path, each.stat()) for each in entries if each.name.isdigit()]
        return sorted((path, stated.st_size, bool(stated.st_mode & stat.S_IWUSR)) for path, stated in found)

    def _make(self, parts: list[tuple[str, int, bool]]) -> None:
        """Make the file out of the parts if it is not as long as these."""
        head, size = _read_head(self._path, len(self._head))
        if head and head != self._head and self._begun:
            raise FileExistsError(errno.EEXIST, "another trace was begun in it")
        if not parts or (self._finished and not head):
            return  # it has been moved since
        if head == self._head and size == len(head) + sum(size for _, size, _ in parts) + len(_CLOSING):
            return

        def write(file: BinaryIO) -> None:
            file.write(self._head + _SEPARATOR)
            for path, size, _ in parts:
                if size:
                    with open(path, "rb") as part, mmap.mmap(part.fileno(), 0, access=mmap.ACCESS_READ) as text:
                        file.write(memoryview(text)[: text.rfind(b"\n") + 1])  # a killed rank may have cut an event
            file.seek(-len(_SEPARATOR), os.SEEK_END)
            file.write(_CLOSING)

        replace_file(Path(self._path), write, new=self._new, durable=False)


def collect(path: str | os.PathLike[str]) -> None:
    """Add to a trace what ranks that were killed have written last. Does nothing while its job does so, or fails."""
    with suppress(OSError, ValueError):
        head, _ = _read_head(os.fspath(path), 1 << 10)
        file = TraceFile(os.fspath(path), json.loads(head[len(_OPENING) : head.index(b"}}")]), -1)
        try:
            file.merge()
        finally:
            file.close()


def _folder_of(path: str, trace: str) -> str:
    """Return where the parts of a trace are, which is to become the file at ``path``."""
    folder, name = os.path.split(path)
    return os.path.join(folder, f".{name}.{trace}.ringreduce")


def _read_head(path: str, length: int = len(_OPENING)) -> tuple[bytes, int]:
    """Return how a file begins, and its size; nothing if there is none.

    Raises:
        OSError: it cannot be read, is none of this user's regular files, or holds something else than a trace of ours.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        return b"", 0
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a symbolic link; name the file itself") from None
        raise
    try:
        found, head = os.fstat(descriptor), b""
        complaint = ""
        if not stat.S_ISREG(found.st_mode):
            complaint = "it is no regular file; name another one"
        elif found.st_uid != os.geteuid():
            complaint = f"it belongs to user {found.st_uid}, and this is user {os.geteuid()}; name another file"
        elif found.st_nlink > 1:
            complaint = f"it has {found.st_nlink} names (hard links); name another file"
        elif (head := os.pread(descriptor, max(length, len(_OPENING)), 0)) and not head.startswith(_OPENING):
            complaint = "it is no trace of ringreduce; remove it, or name another file"
        if complaint:
            raise FileExistsError(errno.EEXIST, complaint)
        return head, found.st_size
    finally:
        os.close(descriptor)
