"""Files of this user's alone, which are whole at any time, and folders that nobody else writes to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ringreduce.common import processes


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
        OSError: it cannot be written.
    """
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


def require_own(folder: Path) -> None:
    """Raise an OSError if other users may write to a folder, or have made the link that leads to it."""
    mine = os.geteuid()
    found = folder.stat()
    for owner in (found.st_uid, folder.lstat().st_uid or mine):  # root may have made a link
        if owner != mine:
            raise PermissionError(f"{folder} belongs to user {owner}, and this is user {mine}")
    if found.st_mode & 0o022:
        raise PermissionError(f"other users may write to {folder}; chmod go-w {folder}")
