"""Files of this user's alone, which are whole at any time, and folders that nobody else writes to."""

from __future__ import annotations

import errno
import fcntl
import grp
import hashlib
import os
import pwd
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ringreduce.common import processes
from ringreduce.common.errors import ConfigError, ForeignFileError

_LOCK_AGAIN_S = 0.005
_CHUNK_NBYTES = 1 << 20


def create_file(path: Path) -> BinaryIO:
    """Open a new file for its owner alone, in place of what a process of the same number has left there."""
    path.unlink(missing_ok=True)
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))


def replace_file(
    path: Path, write: Callable[[BinaryIO], object], *, new: Path | None = None, durable: bool = True
) -> None:
    """Write a file that is there as a whole or not at all; readable by its owner alone.

    Args:
        path: of the file.
        write: writes what it is to hold.
        new: where that is written first; None: to its `partial_path`.
        durable: whether it is so whenever the machine stops, too.

    Raises:
        OSError: it cannot be written, or there is a folder, a device or a pipe, which stays.
    """
    _require_no_device(path)
    new = new or partial_path(path)
    try:
        with create_file(new) as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_file(path: str, content: bytes) -> None:
    """Replace a file that the user has named, and can have made again.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        replace_file(Path(path), lambda file: file.write(content), durable=False)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _require_no_device(path: Path) -> None:
    """Raise an OSError if there is what a file must not replace, as root could: a device, a pipe, or a link to one."""
    if os.path.exists(path) and not path.is_file():
        raise FileExistsError(errno.EEXIST, "there is something that is no file; name another one", str(path))


def require_writable(path: Path) -> None:
    """Raise an OSError if `replace_file` could not write a file; leaves nothing there."""
    _require_no_device(path)
    probe = partial_path(path)  # A name of its own: ranks of other hosts may have the same pid.
    create_file(probe).close()
    probe.unlink()


def partial_path(path: Path) -> Path:
    """Return a hidden path beside another one, where this process alone writes, among those of all hosts."""
    return path.with_name(f".{path.name}.{processes.place()}.{os.getpid()}")


def is_abandoned(partial: Path) -> bool:
    """Return whether a `partial_path` is that of a process of this host which has ended."""
    place, _, pid = partial.name.rpartition(".")
    return place.endswith(f".{processes.place()}") and not os.path.exists(f"/proc/{pid}")


def own_folder(folder: Path) -> None:
    """Make a folder for this user alone, if there is none.

    Raises:
        OSError: it cannot be made; or other users may write to it, and what is read from it may be unpickled.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_own(folder)


def is_own_file(found: os.stat_result) -> bool:
    """Return whether what was found is a regular file of this user's, to which one name leads, or none any more."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink <= 1


def require_own(folder: Path) -> None:
    """Raise an OSError if other users may write to a folder, or have made the link that leads to it."""
    mine = os.geteuid()
    status = folder.stat()
    for owner in (status.st_uid, folder.lstat().st_uid or mine):  # Root may have made a link.
        if owner != mine:
            raise PermissionError(f"{folder} belongs to user {owner}, and this is user {mine}")
    if status.st_mode & 0o022:
        raise PermissionError(f"other users may write to {folder}; chmod go-w {folder}")


def open_file(path: str | os.PathLike[str], *, links: bool = True) -> BinaryIO:
    """Open a regular file of anybody's for reading; no pipe or device is waited for.

    Args:
        path: of the file.
        links: whether links are followed.

    Raises:
        ConfigError: it is no regular file.
        OSError: it cannot be opened.
    """
    how = os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | how))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError("it is no regular file")
    return file


def sha256_of(file: BinaryIO) -> str:
    """Return the SHA-256 of what is left of a file, in hexadecimal."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_NBYTES):
        digest.update(chunk)
    return digest.hexdigest()


def lock_file(file: int, limit_s: float) -> None:
    """Lock an open file, which other processes lock for a while, too; it is unlocked when it is closed.

    Raises:
        TimeoutError: another one has had it for so long.
        OSError: files cannot be locked there.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has kept it locked for {limit_s:g} s") from None
            time.sleep(_LOCK_AGAIN_S)  # A lock that is waited for in the system has no time limit.
        else:
            return


def read_file(path: str | os.PathLike[str], *, most_nbytes: int, ours: bool = False) -> bytes:
    """Read a regular file whole; links are followed, as those of a ConfigMap of Kubernetes.

    Args:
        path: of the file.
        most_nbytes: it may have.
        ours: whether it decides what this user starts, and so has to be this user's or root's, and no other's to write.

    Raises:
        ConfigError: it is no regular file, or larger.
        ForeignFileError: it is not ours.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        if ours:
            require_ours(path, os.fstat(file.fileno()))
        content = file.read(most_nbytes + 1)
    if len(content) > most_nbytes:
        raise ConfigError(f"it has more than {most_nbytes >> 20} MiB")
    return content


def require_ours(path: str | os.PathLike[str], found: os.stat_result) -> None:
    """Raise a ForeignFileError unless a file, and a link that leads to it, is this user's or root's to change alone.

    Args:
        path: of the file.
        found: what is known of it.
    """
    mine = os.geteuid()
    for owner in (found.st_uid, os.lstat(path).st_uid):
        if owner not in (0, mine):
            raise ForeignFileError(f"it belongs to user {owner}, who can change it; chown {mine} {os.fspath(path)}")
    if found.st_mode & 0o002 or (found.st_mode & 0o020 and found.st_gid and not _is_private_group(found.st_gid)):
        raise ForeignFileError(f"other users may write to it; chmod go-w {os.fspath(path)}")


def _is_private_group(number: int) -> bool:
    """Return whether a group is this user's own by its name, as many systems make one for each user."""
    try:
        return grp.getgrgid(number).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
