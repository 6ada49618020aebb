"""The files of commits: whole or not at all, the last few, and never one that was changed."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ringreduce.common.config import VERSION
from ringreduce.common.errors import ConfigError, ForeignFileError
from ringreduce.common.files import is_abandoned, open_file, own_folder, replace_file, require_writable
from ringreduce.common.launch import notify_launcher
from ringreduce.common.sealed_files import PLAIN, KeyFile

_log = logging.getLogger(__name__)

_NAME = re.compile(r"commit-([0-9]{12})((?:\.rank-[0-9]+)?)\.(json|pt)")
_LAST_RUN = "commit-last-run"
_PARTIAL = re.compile(r"\.commit-([0-9]{12})\..*")


class CommitStore:
    """The last commits of a training, in a folder, for a job that begins again.

    Each is a file of content, ``commit-000000000012.pt``, and one that describes it, ``commit-000000000012.json``: its
    length and its SHA-256; or its salt, where files are sealed, as the seal shows what was changed. Both are written
    under other names, flushed to the disk and renamed, the second last: a commit without it does not count. A rank's
    own part goes into a file of its own beside it, ``.rank-3.pt``; ``commit-last-run`` names who may write.

    Commits are written beside the training, on one thread. While it writes, a new commit waits, and the next one
    takes its place: no more than two commits are in memory.

    Args:
        folder: path of the folder; `prepare` makes it if need be, for this user alone.
        keep: number of commits that stay; older ones are removed, with the parts of all ranks.
        write: writes content to an open file.
        read: reads it from one.
        keys: seals both files.

    Attributes:
        folder: as above.
        keys: as above.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        keep: int,
        write: Callable[[Any, BinaryIO], None],
        read: Callable[[BinaryIO], Any],
        keys: KeyFile = PLAIN,
    ) -> None:
        self.folder = Path(folder)
        self.keys = keys
        self._keep = keep
        self._write = write
        self._read = read
        self._waiting: dict[str, tuple[int, Any, Mapping[str, Any]]] = {}  # By part, what is to be written.
        self._writer = ThreadPoolExecutor(1, "ringreduce writes commits")
        self._last: Future[None] | None = None
        self._has_said = False  # Whether the launcher knows that there is a commit of this job.

    def put(self, number: int, content: Any, part: str = "", said: Mapping[str, Any] | None = None) -> None:
        """Have a commit written; returns at once.

        Args:
            number: number of the commit.
            content: content, which nobody changes from now on.
            part: suffix of a rank, ``".rank-3"``; empty: the part of all ranks.
            said: further entries of its description.
        """
        self._waiting[part] = number, content, said or {}
        self._last = self._writer.submit(self._write_waiting, part)

    @property
    def is_idle(self) -> bool:
        """Whether everything is written."""
        return self._last is None or self._last.done()

    def settle(self) -> None:
        """Return when everything is written."""
        settled: Future[None] | None = None
        while settled is not self._last:  # A write may have started another one.
            settled = self._last
            if settled is not None:
                settled.result()  # One thread makes all writes, one after the other.

    def prepare(self) -> None:
        """Make the folder, and remove the partial commits of writers that have died.

        Raises:
            OSError: the folder cannot be used, belongs to another user, or others may write to it.
        """
        own_folder(self.folder)
        for path in self.folder.glob(".commit-*"):
            if is_abandoned(path):
                path.unlink(missing_ok=True)
        require_writable(self.folder / "commit-probe")

    def require_our_keys(self) -> None:
        """Raise a `ForeignFileError` if a commit is sealed and there is no key, by another key, or not at all."""
        for number, part in self._pieces():
            for suffix in ("json", "pt"):
                path = self._path(number, part, suffix)
                try:
                    with open_file(path, links=False) as file:
                        self.keys.require_ours(file)
                except ForeignFileError as error:
                    raise ForeignFileError(f"{path.name}: {error}") from None
                except (OSError, ValueError):
                    pass  # It cannot be used; the examination of commits says so.

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
        return {number: self._flaw(number, part) for number in self._numbers(part)}

    def load(self, number: int, part: str = "") -> Any:
        """Return the content of a whole part."""
        with self._opened(self._path(number, part)) as file:
            return self._read(file)

    def description(self, number: int, part: str = "") -> dict[str, Any]:
        """Return what is said of a part: its length, its SHA-256 or salt, and what `put` was given to say."""
        with self._opened(self._path(number, part, "json")) as file:
            description: dict[str, Any] = json.loads(file.read())
        return description

    def parcel(self, number: int, part: str) -> tuple[bytes, npt.NDArray[np.uint8]]:
        """Return the description and the content of a part that is whole, as files have them, for `accept`."""
        described = open_file(self._path(number, part, "json"), links=False)
        with described, open_file(self._path(number, part), links=False) as file:
            return described.read(), np.asarray(np.memmap(file, np.uint8, "r"))

    def accept(self, number: int, part: str, parcel: tuple[bytes, npt.NDArray[np.uint8]]) -> None:
        """Store what `parcel` has returned on another host.

        Raises:
            OSError, ValueError: it cannot be stored; it is not as it was.
        """
        said, content = parcel
        replace_file(self._path(number, part), lambda file: file.write(content.data))
        replace_file(self._path(number, part, "json"), lambda file: file.write(said))
        self._require_whole(number, part)

    # ---- who may write ----

    def _claim(self, run: str) -> bool:
        """Let only this run and later ones write here; return False if a later one has said the same."""
        last = self._last_run()
        if last < run:
            self._replace(self.folder / _LAST_RUN, lambda file: file.write(run.encode()))
        return last <= run

    def _last_run(self) -> str:
        """Return the name of the last run that has begun here; empty if there is none that can be read."""
        try:
            with self._opened(self.folder / _LAST_RUN) as file:
                return file.read().decode()
        except (ConfigError, OSError, ValueError):
            return ""

    # ---- files ----

    def _path(self, number: int, part: str = "", suffix: str = "pt") -> Path:
        return self.folder / f"commit-{number:012}{part}.{suffix}"

    def _opened(self, path: Path) -> BinaryIO:
        file = open_file(path, links=False)
        try:
            return self.keys.opened(file, path.name)
        except BaseException:
            file.close()
            raise

    def _replace(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        replace_file(path, lambda file: self.keys.write(file, path.name, write))

    def _pieces(self) -> list[tuple[int, str]]:
        """Return the numbers and parts of all that has a description, ascending."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted((int(match[1]), match[2]) for match in matches if match and match[3] == "json")

    def _numbers(self, part: str) -> list[int]:
        return [number for number, name in self._pieces() if name == part]

    def _flaw(self, number: int, part: str) -> str:
        """Return the reason why a part of a commit cannot be used; empty if it can."""
        try:
            self._require_whole(number, part)
        except Exception as error:  # A truncated or foreign file may raise anything.
            return str(error) or type(error).__name__
        return ""

    def _require_whole(self, number: int, part: str) -> None:
        description = self.description(number, part)
        for what, value in self._mark(self._path(number, part)).items():
            if description.get(what) != value:
                raise ValueError(f"its {what} is {value}, not {description.get(what)}")

    def _mark(self, path: Path) -> dict[str, Any]:
        """Return what a description has of a file, all of which is read for it."""
        with open_file(path, links=False) as file:
            return {"nbytes": os.fstat(file.fileno()).st_size, **self.keys.mark(file, path.name)}

    def _write_waiting(self, part: str) -> None:
        if part not in self._waiting:
            return  # A later commit was written in its place.
        number, content, said = self._waiting.pop(part)
        try:
            self._store(number, content, part, said)
        except Exception:  # With a full disk, or an object that cannot be pickled, the training goes on.
            _log.exception("commit %d was not written to %s", number, self.folder)

    def _store(self, number: int, content: Any, part: str, said: Mapping[str, Any]) -> None:
        path = self._path(number, part)
        self._replace(path, lambda file: self._write(content, file))
        try:
            self.load(number, part)  # A file that cannot be read again is no commit.
        except Exception:
            path.unlink()
            raise
        said = {**said, **self._mark(path), "ringreduce": VERSION}
        self._replace(self._path(number, part, "json"), lambda file: file.write(json.dumps(said).encode()))
        if not part and not self._has_said:
            self._has_said = True
            notify_launcher("has a commit")
        # Those of higher numbers, which were there and could not be used, do not count.
        kept = [other for other in self._numbers(part) if other <= number]
        if len(kept) <= self._keep:  # A part that is new here says nothing of which commits are whole.
            return
        for each in self.folder.iterdir():
            match = _NAME.fullmatch(each.name)
            # A part takes along those of all ranks, which may have died, and what is common to the ranks everything.
            if match and (match[2] or not part) and int(match[1]) < kept[-self._keep]:
                each.unlink(missing_ok=True)
            # So old a partial one is that of a host that was lost: nobody there can tell that its writer has ended.
            partial = _PARTIAL.fullmatch(each.name)
            if partial and not part and int(partial[1]) < kept[-self._keep]:
                each.unlink(missing_ok=True)
