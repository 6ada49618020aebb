"""What a rank does now, for `ringreduce top`: a small private file that it writes once a second.

One file for each rank, ``JOB.RANK.json`` in a folder of this user's (`folder`), on the machine of the rank; it is gone
with the world. JSON:

    job, rank, size, host, pid, command     who; the job is a word that its ranks share
    began, now                              seconds since 1970
    samples[]                               [time, steps, samples, seconds spent in communication], the oldest first
    nbytes                                  resident memory
    late                                    [rank, seconds]: who was waited for last, and how long; null
    sets[]                                  [name, ranks, number of the last blocking call, which, since when, or null]
    operations[]                            [name, ranks, name of the operation that waits longest to start, since when]
    error                                   after which no call was possible; null
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ringreduce.common.config import runtime_folder
from ringreduce.common.errors import ConfigError

__all__ = ["StatusFile", "folder", "read_all", "resident_nbytes"]

_EVERY_S = 1.0
_REMEMBERED = 11  # samples, so that rates are those of ten seconds

Status = dict[str, Any]


def folder() -> Path:
    """Return where the ranks of this user on this machine put their files; made if need be, for this user alone.

    Raises:
        ConfigError: somebody else has a folder of that name.
    """
    path = runtime_folder()
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(f"{path} is not a folder of this user's alone; remove it, or set XDG_RUNTIME_DIR or TMPDIR")
    return path


def resident_nbytes() -> int:
    """Return how much memory of this process is resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class StatusFile:
    """Writes what this rank does to its file, on a thread of its own, until it is closed.

    Args:
        path: the file.
        describe: returns all but ``samples``, and the newest of these.
        tidies: whether it removes what ranks that were killed have left, first.
    """

    def __init__(self, path: Path, describe: Callable[[], tuple[Status, list[float]]], *, tidies: bool = False) -> None:
        self._path = path
        self._tidies = tidies
        self._describe = describe
        self._samples: deque[list[float]] = deque(maxlen=_REMEMBERED)
        self._ends = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ringreduce status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the file; in a process that was forked, do nothing."""
        if os.getpid() != self._pid or self._ends.is_set():
            return
        self._ends.set()
        self._thread.join()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        if self._tidies:
            with suppress(ConfigError, OSError):
                read_all()
        while not self._ends.wait(_EVERY_S):
            # The program goes on meanwhile, and may change what is looked at; then the next time will do.
            with suppress(RuntimeError, OSError):
                self._write()

    def _write(self) -> None:
        status, sample = self._describe()
        self._samples.append(sample)
        status["samples"] = list(self._samples)
        new = self._path.with_suffix(".new")
        with open(new, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump(status, file)
        os.replace(new, self._path)


def read_all() -> list[Status]:
    """Return what the living ranks of this user on this machine say, by job and rank; forget the dead.

    Raises:
        ConfigError: see `folder`.
    """
    found = []
    for path in folder().glob("*.json"):
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            alive = os.path.exists(f"/proc/{status['pid']}")
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it has gone meanwhile, or is none of ours
        if alive:
            found.append(status)
        else:
            path.unlink(missing_ok=True)
    began: dict[str, float] = {}
    for each in found:
        began[each["job"]] = min(each["began"], began.get(each["job"], each["began"]))
    return sorted(found, key=lambda each: (began[each["job"]], each["job"], each["rank"]))
