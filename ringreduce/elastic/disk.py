"""The commits of a state on disk, from which a later job resumes: what all ranks do together for that."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ringreduce.common.errors import ConfigError
from ringreduce.common.files import create_file, own_folder
from ringreduce.elastic.store import CommitStore
from ringreduce.runtime import rank, size
from ringreduce.training.objects import allgather_object, broadcast_object

__all__ = ["DiskCommits", "choose", "require_seen_by_all"]


class DiskCommits:
    """Commits in a folder: rank 0 writes what is common to the ranks, and each rank what is its own.

    Args:
        folder: the same on all ranks.
        every: how many commits there are to one that is written.
        keep: how many stay.
        write: writes content to an open file.
        read: reads it from one.

    Attributes:
        number: the commit with which training begins; None: there is none.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int,
        keep: int,
        write: Callable[[Any, BinaryIO], None],
        read: Callable[[BinaryIO], Any],
    ) -> None:
        self._folder, self._every = folder, every
        self._write, self._read = write, read
        self._store = CommitStore(folder, keep, write, read)
        self._part = f".rank-{rank()}"
        self._has_own = self._begins_with_own = False
        self.number: int | None = None
        self.settle = self._store.settle

    def open(self, values: Mapping[str, Any], *, has_own: bool, reason: str = "") -> None:
        """Make the folder ready, and choose the commit to begin with. Collective.

        Args:
            values: what the state keeps by value, to try whether it can be written and read.
            has_own: whether ranks write parts of their own.
            reason: why this rank cannot keep commits here; empty: it can, as far as the caller knows.

        Raises:
            ConfigError: on all ranks, if a rank cannot use the folder or write a value.
        """
        self._has_own = has_own
        whole: list[int] = []
        common: list[int] = []
        try:
            self._require_storable(values)
            self._store.prepare()
            whole = self._store.whole(self._part) if has_own else []
            common = self._store.whole() if rank() == 0 else []
        except (ConfigError, OSError) as error:
            reason = reason or str(error)
        everyone = allgather_object((reason, whole, common))
        self._refuse({number: said for number, (said, _, _) in enumerate(everyone) if said})
        common = everyone[0][2]
        with_parts = [number for number in common if all(number in theirs for _, theirs, _ in everyone)]
        self.number = broadcast_object(choose(self._store, common, with_parts) if rank() == 0 else None)
        self._begins_with_own = has_own and self.number in with_parts

    def load(self, take: Callable[[Any], str]) -> None:
        """Have rank 0 take what is common to the ranks in the commit to begin with. Collective.

        Args:
            take: takes it; returns what is wrong with it, or nothing.

        Raises:
            ConfigError: it cannot, on all ranks.
        """
        assert self.number is not None
        wrong = broadcast_object(take(self._store.load(self.number)) if rank() == 0 else "")
        self._refuse({0: f"commit {self.number} {wrong}"} if wrong else {})

    def load_own(self) -> dict[str, Any] | None:
        """Return this rank's part of that commit; None: there is none, or it is of another number of ranks."""
        if not self._begins_with_own or self.number is None:
            return None
        own: dict[str, Any] = self._store.load(self.number, self._part)
        return own if own["size"] == size() else None

    def is_due(self, number: int) -> bool:
        """Return whether a commit is one of those that are written."""
        return number % self._every == 0

    def put(self, number: int, common: Mapping[str, Any], own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Have a commit written; returns at once.

        Args:
            number: of the commit.
            common, own: saved states of objects, by name.
            values: what is kept by value.
        """
        if own:
            self._store.put(number, {"objects": own, "values": {}, "size": size()}, self._part)
        if rank() == 0:
            self._store.put(number, {"objects": common, "values": values, "size": size()})

    def is_whole(self, number: int) -> bool:
        """Wait until all is written; return whether a commit is there on all ranks. Collective."""
        self.settle()
        parts = [*([self._part] if self._has_own else []), *([""] if rank() == 0 else [])]
        return all(allgather_object(all(self._store.has(number, part) for part in parts)))

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
            raise ConfigError(f"commits cannot be kept in {self._folder}: {said}")


def choose(store: CommitStore, common: list[int], with_parts: list[int]) -> int | None:
    """Return the last commit; a whole one before it, if it is of as many ranks as now and lacks parts of theirs."""
    if with_parts:
        for number in reversed(common):
            if number in with_parts or store.load(number)["size"] != size():
                return number
    return max(common, default=None)


def require_seen_by_all(folder: str) -> None:
    """Raise a `ConfigError` on all ranks unless all of them see a folder, which rank 0 makes if need be. Collective."""
    probe, reason = Path(folder) / f".shared.{os.getpid()}", ""
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
