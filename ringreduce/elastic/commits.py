"""Commits on disk, from which a later job resumes: a folder that holds the last few, whole or not at all."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from ringreduce.common.config import VERSION
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import create_file, own_folder, replace_file
from ringreduce.common.launch import notify_launcher
from ringreduce.runtime import rank, size
from ringreduce.training.calls.objects import allgather_object, broadcast_object

__all__ = ["CommitStore", "DiskCommits", "choose", "require_seen_by_all"]

_log = logging.getLogger(__name__)

_NAME = re.compile(r"commit-([0-9]{12})((?:\.rank-[0-9]+)?)\.(json|pt)")
_CHUNK_NBYTES = 1 << 20


class CommitStore:
    """The last commits of a training, in a folder, for a job that begins again.

    Each is a file of content, ``commit-000000000012.pt``, and one with its length and SHA-256,
    ``commit-000000000012.json``. Both are written under other names, flushed to the disk and renamed, the second last:
    a commit without it does not count. A rank's own part goes into a file of its own beside it, ``.rank-3.pt``.

    Commits are written beside the training, on one thread. While it writes, a new commit waits, and the next one
    takes its place: no more than two commits are in memory.

    Args:
        folder: path of the folder; `prepare` makes it if need be, for this user alone.
        keep: number of commits that stay; older ones are removed, with the parts of all ranks.
        write: writes content to an open file.
        read: reads it from one.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int,
        write: Callable[[Any, BinaryIO], None],
        read: Callable[[BinaryIO], Any],
    ) -> None:
        self.folder = Path(folder)
        self._keep = keep
        self._write = write
        self._read = read
        self._waiting: dict[str, tuple[int, Any]] = {}  # by part, what is to be written
        self._writer = ThreadPoolExecutor(1, "ringreduce writes commits")
        self._last: Future[None] | None = None
        self._has_said = False  # to the launcher that there is a commit of this job

    def put(self, number: int, content: Any, part: str = "") -> None:
        """Have a commit written; returns at once.

        Args:
            number: number of the commit.
            content: content, which nobody changes from now on.
            part: suffix of a rank, ``".rank-3"``; empty: the part of all ranks.
        """
        self._waiting[part] = number, content
        self._last = self._writer.submit(self._write_waiting, part)

    def settle(self) -> None:
        """Return when everything is written."""
        settled: Future[None] | None = None
        while settled is not self._last:  # what is written may have more written
            settled = self._last
            if settled is not None:
                settled.result()  # one thread does one thing after the other

    def prepare(self) -> None:
        """Make the folder, and remove the partial commits of writers that have died.

        Raises:
            OSError: the folder cannot be used, belongs to another user, or others may write to it.
        """
        own_folder(self.folder)
        for each in self.folder.glob(".commit-*"):
            if not os.path.exists(f"/proc/{each.suffix[1:]}"):
                each.unlink(missing_ok=True)
        probe = self.folder / f".probe.{os.getpid()}"
        create_file(probe).close()
        probe.unlink()

    def whole(self, part: str = "") -> list[int]:
        """Return the numbers of the commits that have a whole part, ascending.

        Args:
            part: as for `put`.
        """
        return [number for number in sorted(self._numbers(part)) if self.has(number, part)]

    def has(self, number: int, part: str = "") -> bool:
        """Return whether a part of a commit is whole; log the reason if it is not."""
        why = self._flaw(number, part)
        if why:
            _log.error("%s cannot be used: %s", self._path(number, part), why)
        return not why

    def examine(self, part: str = "") -> dict[int, str]:
        """Return the numbers of all commits, ascending, each with the reason why it cannot be used; empty: it can.

        Args:
            part: as for `put`.
        """
        return {number: self._flaw(number, part) for number in sorted(self._numbers(part))}

    def load(self, number: int, part: str = "") -> Any:
        """Return the content of a whole part."""
        with _open(self._path(number, part)) as file:
            return self._read(file)

    # ---- files ----

    def _path(self, number: int, part: str = "", suffix: str = "pt") -> Path:
        return self.folder / f"commit-{number:012}{part}.{suffix}"

    def _numbers(self, part: str) -> list[int]:
        if not self.folder.is_dir():
            return []
        return [
            int(found[1])
            for each in self.folder.iterdir()
            if (found := _NAME.fullmatch(each.name)) and found[2] == part and found[3] == "json"
        ]

    def _flaw(self, number: int, part: str) -> str:
        """Return the reason why a part of a commit cannot be used; empty if it can."""
        try:
            self._require_whole(number, part)
        except Exception as error:  # whatever a truncated or foreign file leads to
            return str(error) or type(error).__name__
        return ""

    def _require_whole(self, number: int, part: str) -> None:
        with _open(self._path(number, part, "json")) as file:
            said = json.loads(file.read())
        path = self._path(number, part)
        found = {"nbytes": path.stat().st_size, "sha256": _digest(path)}
        for what, value in found.items():
            if said[what] != value:
                raise ValueError(f"its {what} is {value}, not {said[what]}")

    def _write_waiting(self, part: str) -> None:
        if part not in self._waiting:
            return  # what came later was written in its place
        number, content = self._waiting.pop(part)
        try:
            self._store(number, content, part)
        except Exception:  # a full disk, or what cannot be pickled: the training goes on
            _log.exception("commit %d was not written to %s", number, self.folder)

    def _store(self, number: int, content: Any, part: str) -> None:
        path = self._path(number, part)
        replace_file(path, lambda file: self._write(content, file))
        try:
            self.load(number, part)  # what cannot be read again is no commit
        except Exception:
            path.unlink()
            raise
        said = {"nbytes": path.stat().st_size, "sha256": _digest(path), "ringreduce": VERSION}
        replace_file(self._path(number, part, "json"), lambda file: file.write(json.dumps(said).encode()))
        if not part and not self._has_said:
            self._has_said = True
            notify_launcher("has a commit")
        # Those of higher numbers, which were there and could not be used, do not count.
        kept = sorted(each for each in self._numbers(part) if each <= number)[-self._keep :]
        for each in self.folder.iterdir():
            found = _NAME.fullmatch(each.name)
            # What is common to the ranks takes along the parts of all: those of ranks that have died, too.
            if found and (found[2] == part or not part) and int(found[1]) < kept[0]:
                each.unlink(missing_ok=True)


def _open(path: Path) -> BinaryIO:
    """Open a regular file for reading, without following links or waiting for FIFOs."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is no regular file")
    return file


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with _open(path) as file:
        while chunk := file.read(_CHUNK_NBYTES):
            digest.update(chunk)
    return digest.hexdigest()


# ---- what all ranks do together ----


class DiskCommits(CommitStore):
    """Commits in a folder: rank 0 writes the part of all ranks, and each rank its own part.

    Args:
        folder: path of the folder, the same on all ranks.
        every: one of so many commits is written.
        keep: number of commits that stay.
        write: writes content to an open file.
        read: reads it from one.

    Attributes:
        number: number of the commit with which training begins; None if there is none.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int,
        keep: int,
        write: Callable[[Any, BinaryIO], None],
        read: Callable[[BinaryIO], Any],
    ) -> None:
        super().__init__(folder, keep, write=write, read=read)
        self._every = every
        self._part = f".rank-{rank()}"
        self._has_own = self._begins_with_own = False
        self.number: int | None = None

    def open(self, values: Mapping[str, Any], *, has_own: bool, reason: str = "") -> None:
        """Make the folder ready, and choose the commit to begin with. Collective.

        Args:
            values: values of the state, by name, to try whether they can be written and read.
            has_own: whether ranks write parts of their own.
            reason: reason why this rank cannot keep commits here; empty if the caller knows none.

        Raises:
            ConfigError: on all ranks, if a rank cannot use the folder or write a value.
        """
        self._has_own = has_own
        whole: list[int] = []
        common: list[int] = []
        try:
            self._require_storable(values)
            self.prepare()
            whole = self.whole(self._part) if has_own else []
            common = self.whole() if rank() == 0 else []
        except (ConfigError, OSError) as error:
            reason = reason or str(error)
        everyone = allgather_object((reason, whole, common))
        self._refuse({number: said for number, (said, _, _) in enumerate(everyone) if said})
        common = everyone[0][2]
        with_parts = [number for number in common if all(number in theirs for _, theirs, _ in everyone)]
        self.number = broadcast_object(choose(self, common, with_parts) if rank() == 0 else None)
        self._begins_with_own = has_own and self.number in with_parts

    def begin(self, take: Callable[[Any], str]) -> None:
        """Have rank 0 take the part of all ranks of the commit to begin with. Collective.

        Args:
            take: takes it; returns its fault, or an empty text.

        Raises:
            ConfigError: it cannot, on all ranks.
        """
        assert self.number is not None
        wrong = broadcast_object(take(self.load(self.number)) if rank() == 0 else "")
        self._refuse({0: f"commit {self.number} {wrong}"} if wrong else {})

    def own(self) -> dict[str, Any] | None:
        """Return this rank's part of that commit; None if there is none, or the number of ranks differs."""
        if not self._begins_with_own or self.number is None:
            return None
        own: dict[str, Any] = self.load(self.number, self._part)
        return own if own["size"] == size() else None

    def is_due(self, number: int) -> bool:
        """Return whether a commit is to be written."""
        return number % self._every == 0

    def put_all(
        self, number: int, common: Mapping[str, Any], own: Mapping[str, Any], values: Mapping[str, Any]
    ) -> None:
        """Have a commit written; returns at once.

        Args:
            number: number of the commit.
            common, own: saved states of objects, by name, of all ranks and of this one.
            values: values by name.
        """
        if own:
            self.put(number, {"objects": own, "values": {}, "size": size()}, self._part)
        if rank() == 0:
            self.put(number, {"objects": common, "values": values, "size": size()})

    def is_whole(self, number: int) -> bool:
        """Wait until all is written; return whether a commit is there on all ranks. Collective."""
        self.settle()
        parts = [*([self._part] if self._has_own else []), *([""] if rank() == 0 else [])]
        return all(allgather_object(all(self.has(number, part) for part in parts)))

    def _require_storable(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            try:
                file = io.BytesIO()
                self._write(value, file)
                file.seek(0)
                self._read(file)
            except Exception as error:
                raise ConfigError(
                    f"{name} of the state cannot be kept on disk ({error}); keep what has a state dict, tensors, "
                    "and plain numbers, texts, lists and dicts"
                ) from error

    def _refuse(self, reasons: Mapping[int, str]) -> None:
        if reasons:
            said = "; ".join(f"rank {rank}: {reason}" for rank, reason in reasons.items())
            raise ConfigError(f"commits cannot be kept in {self.folder}: {said}")


def choose(store: CommitStore, common: list[int], with_parts: list[int]) -> int | None:
    """Return the last commit; or an earlier whole one, if the last is of as many ranks and lacks parts of theirs."""
    if with_parts:
        for number in reversed(common):
            if number in with_parts or store.load(number)["size"] != size():
                return number
    return max(common, default=None)


def require_seen_by_all(folder: str) -> None:
    """Raise a `ConfigError` on all ranks unless all see the folder, which rank 0 makes if need be. Collective."""
    probe = Path(folder) / f".shared.{os.getpid()}"
    reason = ""
    if rank() == 0:
        try:
            own_folder(probe.parent)
            create_file(probe).close()
        except OSError as error:
            reason = str(error)
    probe, reason = broadcast_object((probe, reason))
    if reason:
        raise ConfigError(f"commits cannot be kept in {folder}: rank 0: {reason}")
    seen = allgather_object(os.path.exists(probe))  # that of a path raises where a folder may not be entered
    if rank() == 0:
        probe.unlink()
    if not all(seen):
        raise ConfigError(
            f"commits of a job that grows are kept in {folder}, which rank {seen.index(False)} does not see; name "
            "a folder that all hosts share, as in horovodrun --commits FOLDER"
        )
