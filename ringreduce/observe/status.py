"""What a rank does now, for `ringreduce top`: a small private file that it writes once a second.

One file for each rank, ``JOB.RANK.json`` in a folder of this user's (`folder`), on the machine of the rank; it is
removed with the world. It is a brief snapshot (`ringreduce.observe.flight_recorder`), and besides:

    job, command                            the job is a word that its ranks share
    began                                   seconds since 1970
    samples[]                               [time, steps, samples, seconds spent in communication], the oldest first
    nbytes                                  resident memory
    late                                    [rank, seconds]: who was waited for last, and how long; null
"""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ringreduce.common.config import runtime_folder
from ringreduce.common.errors import ConfigError
from ringreduce.observe.flight_recorder import FlightRecorder, Snapshot, write
from ringreduce.observe.metrics import Metrics
from ringreduce.observe.repeated import Repeated

__all__ = ["StatusFile", "folder", "read_all", "resident_nbytes"]

_EVERY_S = 1.0
_REMEMBERED = 11  # samples, so that rates are those of ten seconds


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
        job: which.
        rank: this one. Rank 0 first removes the files of ranks that were killed.
        recorder: takes snapshots.
        metrics: returns what this rank's calls add up to.
        counted: returns how many steps and samples the program has counted.

    Raises:
        ConfigError, OSError: there is no folder for it.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        recorder: FlightRecorder,
        metrics: Callable[[], Metrics],
        counted: Callable[[], tuple[int, int]],
    ) -> None:
        self._common = {"job": job, "command": sys.orig_argv, "began": time.time()}
        self._recorder, self._metrics, self._counted = recorder, metrics, counted
        self._path = folder() / f"{job}.{rank}.json"
        self._samples: deque[list[float]] = deque(maxlen=_REMEMBERED)
        self._pid = os.getpid()
        if rank == 0:
            read_all()
        self._thread = Repeated("ringreduce status", _EVERY_S, self._write_if_possible)

    def close(self) -> None:
        """Remove the file; in a process that was forked, do nothing."""
        if os.getpid() == self._pid:
            self._thread.end()
            self._path.unlink(missing_ok=True)

    def write(self) -> None:
        """Write what this rank does now."""
        said, total = self._recorder.snapshot(brief=True), self._metrics()
        blocking = [each.communicators["blocking"] for each in self._recorder.observed if each.is_open()]
        spent_s = total.waited_s + sum(tally.seconds for each in blocking for tally in each.tallies.values())
        under_way = [call for each in said["sets"] for call in each["calls"] if call["ended"] is None]
        spent_s += sum(said["time"] - call["started"] for call in under_way)
        self._samples.append([said["time"], *self._counted(), spent_s])
        more = {
            "samples": list(self._samples),
            "nbytes": resident_nbytes(),
            "late": None if total.late_rank is None else [total.late_rank, total.late_s],
        }
        write(self._path, {**said, **self._common, **more})

    def _write_if_possible(self) -> None:
        # The program goes on meanwhile, and may change what is looked at; then the next time will do.
        with suppress(RuntimeError, OSError):
            self.write()


def read_all() -> list[Snapshot]:
    """Return what the living ranks of this user on this machine say, by job and rank; remove the files of the others.

    Raises:
        ConfigError: see `folder`.
    """
    found = []
    for path in folder().glob("*.json"):
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            alive = os.path.exists(f"/proc/{status['pid']}")
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it was removed meanwhile, or is none of ours
        if alive:
            found.append(status)
        else:
            for remains in folder().glob(f"{path.stem}.*"):
                remains.unlink(missing_ok=True)
    began: dict[str, float] = {}
    for each in found:
        began[each["job"]] = min(each["began"], began.get(each["job"], each["began"]))
    return sorted(found, key=lambda each: (began[each["job"]], each["job"], each["rank"]))
