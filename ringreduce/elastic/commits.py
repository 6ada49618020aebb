"""Commits on disk, from which a later job resumes: which ranks write and keep which part, and which commit counts."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from ringreduce.audit.fingerprints import fingerprint
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import create_file, own_folder, partial_path
from ringreduce.common.launch import launch
from ringreduce.common.sealed_files import disk_keys
from ringreduce.elastic.commit_store import CommitStore
from ringreduce.elastic.copies import Copies
from ringreduce.elastic.runs import ReplacedError, following, new_job, own_token
from ringreduce.runtime import audited, rank, record, record_refusal, size
from ringreduce.training.calls.objects import allgather_object, alltoall_object, broadcast_object

_log = logging.getLogger(__name__)

T = TypeVar("T")


class LostCommitsError(ConfigError):
    """What was committed is on none of the disks."""


class SealedCommitsError(ConfigError):
    """There are commits that the key of RINGREDUCE_DISK_KEY_FILE does not open."""


class _Commit(NamedTuple):
    """Which commit: a later one is greater."""

    run: str
    number: int


_NONE = _Commit("", 0)


class _WholePart(NamedTuple):
    """A part of a commit of so many ranks.

    Attributes:
        known: the last commit that any rank had on disk when this was made.
        begun: the commits from which its run has come: those with which it and the earlier runs of its job began,
            the last one first.
    """

    commit: _Commit
    part: str
    size: int
    known: _Commit
    begun: tuple[_Commit, ...]


class DiskCommits(CommitStore):
    """Commits in a folder: rank 0 writes the part of all ranks, each rank its own part, and others copies.

    A commit is known by its number and its run: what a job writes from when it begins until its ranks change. Of two
    runs the later one counts (`ringreduce.elastic.runs`): what a host brings back that was away or stood still is not
    the last commit. Each folder has the name of the last run that has begun there, and ranks of earlier ones, which
    have not heard of it, write nothing there any more.

    Args:
        folder: path of the folder, the same for the ranks of a host.
        every: one of so many commits is written.
        keep: number of commits that stay.
        write: writes content to an open file.
        read: reads it from one.
        replicas: on how many hosts each part is to be.
        key_file: file with the secret that seals commits; None: they are not sealed.

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
        replicas: int = 1,
        key_file: str | None = None,
    ) -> None:
        least = 1 if replicas == 1 else 2  # One that is whole, and with replicas one that not all have written yet.
        super().__init__(folder, max(keep, least), write=write, read=read)
        self._key_file = key_file
        self._every = every
        self._replicas = replicas
        self._begins_with_own = False
        self._run = ""
        # The last commit that this rank has written, and the last that was on some disk.
        self._stored = self._known = _NONE
        self._begun: tuple[_Commit, ...] = ()  # The same as of `_WholePart`.
        self._parts: list[str] = []  # Parts that this rank has written last.
        self._replaced = ""  # Why this rank may not write any more.
        self._skipped: tuple[int, Callable[[], Mapping[str, Any]], Mapping[str, Any], Mapping[str, Any]] | None = None
        self.number: int | None = None

    def open(self, values: Mapping[str, Any], *, has_own: bool, reason: str = "") -> None:
        """Make the folder ready, and choose the commit to begin with. Collective.

        Args:
            values: values of the state, by name, to try whether they can be written and read.
            has_own: whether ranks write parts of their own.
            reason: reason why this rank cannot keep commits here; empty if the caller knows none.

        Raises:
            ConfigError: on all ranks, if a rank cannot use the folder or write a value.
            LostCommitsError: likewise, if no host has a commit that was made.
            SealedCommitsError: likewise, if a rank lacks the key of a commit.
            ReplacedError: likewise, if the job was begun again meanwhile.
        """
        try:
            self._require_storable(values)
            self.prepare()
        except (ConfigError, OSError) as error:
            reason = reason or str(error)
        asked = f"every={self._every}, replicas={self._replicas}"
        everyone = allgather_object((reason, self._take_keys(), asked))
        reasons, flaws_of_keys, wanted = zip(*everyone, strict=True)
        _refuse(self.folder, reasons)
        _refuse(self.folder, flaws_of_keys, SealedCommitsError)
        _refuse(self.folder, ["" if each == wanted[0] else f"{each} and not {wanted[0]}" for each in wanted])
        self._place_copies()
        examined = allgather_object((self._examined(has_own=has_own), self._last_run()))
        by_holder = [pieces for pieces, _ in examined]
        held: dict[tuple[_Commit, str], list[int]] = {}  # By whole commit and part, on whose disks it is.
        for holder, pieces in enumerate(by_holder):
            for piece in pieces:
                held.setdefault((piece.commit, piece.part), []).append(holder)
        sizes = {piece.commit: piece.size for pieces in by_holder for piece in pieces if not piece.part}
        line = _line(sorted(sizes), {piece.commit.run: piece.begun for pieces in by_holder for piece in pieces})
        with_parts = [
            commit for commit in line if has_own and all((commit, _part_of(owner)) in held for owner in range(size()))
        ]
        chosen = choose(line, with_parts, sizes)
        self._say_discarded(sorted(sizes.keys() - set(line)), chosen)
        last_known = max((piece.known for pieces in by_holder for piece in pieces), default=_NONE)
        lacks_parts = has_own and chosen is not None and chosen not in with_parts and sizes[chosen] == size()
        has_parts = any((chosen, _part_of(owner)) in held for owner in range(size()))
        self._require_none_lost(chosen, last_known, lacks_parts=lacks_parts and has_parts)
        if chosen is not None:
            self.number = chosen.number
            self._known = chosen
            self._begun = (chosen,)
            self._begins_with_own = chosen in with_parts
            self._distribute(chosen, held)
        there = {*(last for _, last in examined), *(commit.run for commit, _ in held)}
        self._run = new_job(broadcast_object(launch().fence or own_token()), there)
        try:
            reason = "" if self._claim(self._run) else "another job begins with these commits"
        except OSError as error:
            reason = str(error)
        _refuse(self.folder, allgather_object(reason), ReplacedError)

    def begin(self, take: Callable[[Any], str]) -> None:
        """Have rank 0 take the part of all ranks of the commit to begin with. Collective.

        Args:
            take: takes it; returns its fault, or an empty text.

        Raises:
            ConfigError: it cannot, on all ranks.
        """
        assert self.number is not None
        wrong = broadcast_object(take(self.load(self.number)) if rank() == 0 else "")
        _refuse(self.folder, [f"commit {self.number} {wrong}" if wrong else ""])

    def own(self) -> dict[str, Any] | None:
        """Return this rank's part of that commit; None if there is none, or the number of ranks differs."""
        if not self._begins_with_own or self.number is None:
            return None
        own: dict[str, Any] = self.load(self.number, _part_of(rank()))
        return own if own["size"] == size() else None

    def is_due(self, number: int) -> bool:
        """Return whether a commit is to be written."""
        return number % self._every == 0

    def put_all(
        self,
        number: int,
        common: Callable[[], Mapping[str, Any]],
        own: Mapping[str, Any],
        values: Mapping[str, Any],
        forced: bool,
    ) -> None:
        """Have a commit written; returns once the copies that others write are there. Collective.

        Args:
            number: number of the commit.
            common: returns saved states of objects, by name.
            own: saved states of objects, by name; the same names on all ranks.
            values: values by name.
            forced: wait until the one before is written. Without copies, a commit waits for its turn, unless a later
                one comes. With copies, all ranks skip a commit while one of them still writes, unless few are due: so
                all write the same commits, and remove none before a later one is whole.

        Raises:
            ReplacedError: others have begun again in the folder of this rank, as it has found when it wrote the last.
        """
        arguments = number, common, own, values
        self._require_not_replaced()
        if not self._copies.holds:
            self._place_copies()
            last, begun = max(allgather_object((self._run, self._begun)))  # A rank may have missed one.
            self._begun = (_Commit(last, number - 1), *begun)
            self._run = following(last)
        copies = self._copies
        keeps_common = rank() in copies.keepers(None)
        parts: dict[str, Any] = {}
        if own or (copies.speaks and not keeps_common):  # A host that keeps nothing else knows by it of lost commits.
            parts[_part_of(rank())] = {"objects": own, "values": {}, "size": size()}
        if copies.count > 1:
            forced |= self._every > 1
            if forced:
                self.settle()
            everyone = allgather_object((self.is_idle, max(self._known, self._stored)))
            self._known = max(number_known for _, number_known in everyone)
            self._skipped = None
            if not (forced or all(is_idle for is_idle, _ in everyone)):
                self._skipped = arguments
                return
        if copies.count > 1 and own:
            others = copies.keepers(rank())[1:]
            came = alltoall_object(dict.fromkeys(others, parts[_part_of(rank())]))
            parts.update({_part_of(source): part for source, part in came.items()})
        if keeps_common:
            parts[""] = {"objects": common(), "values": values, "size": size()}
        description: dict[str, Any] = {"run": self._run, "from": self._begun, "size": size()}
        if copies.count > 1:
            description["known"] = self._known
        for part, content in parts.items():
            self.put(number, content, part, said=description)
        self._parts = list(parts)

    def put_last(self, number: int) -> None:
        """Have the last commit of a training written, if it was skipped. Collective."""
        if self._skipped is not None and self._skipped[0] == number:
            self.put_all(*self._skipped, forced=True)

    def settle(self) -> None:
        super().settle()
        self._require_not_replaced()

    def is_whole(self, number: int) -> bool:
        """Wait until all is written; return whether a commit is there on all ranks. Collective."""
        self.settle()
        whole = all(
            self.has(number, part) and self._piece(number, part).commit.run == self._run for part in self._parts
        )
        return all(allgather_object(whole))

    def _store(self, number: int, content: Any, part: str, said: Mapping[str, Any]) -> None:
        if not self._claim(said["run"]):
            if not self._replaced:
                self._replaced = (
                    f"commit {number} is not written: another job, or other ranks of this one, have begun again with "
                    f"the commits in {self.folder}. What these ranks train is thrown away, and they end"
                )
                _log.error("%s", self._replaced)
            return
        super()._store(number, content, part, said)
        if not part:
            self._stored = _Commit(said["run"], number)
            if audited():
                file = self._path(number).absolute()
                # A seal needs none: who reads the record need not have the key.
                digest = self.description(number).get("sha256") or fingerprint(file)
                record("written", {"number": number, "file": str(file), "sha256": digest})

    # ---- which commit to begin with ----

    def _take_keys(self) -> str:
        """Read the key, and try whether it is that of all commits; return why not, or an empty text."""
        try:
            self.keys = disk_keys(self._key_file)
            self.require_our_keys()
        except ConfigError as error:
            return str(error)
        return ""

    def _place_copies(self) -> None:
        self._copies = Copies(self.folder, self._replicas)
        if rank() == 0 and self._copies.count < self._replicas:
            warning = "replicas=%d, but commits are on %d disk: there are no more hosts, or they share this folder"
            _log.warning(warning, self._replicas, self._copies.count)

    def _examined(self, *, has_own: bool) -> list[_WholePart]:
        """Return the whole parts among those that this rank checks; of each disk, every part is checked by one rank."""
        own = {*([_part_of(rank())] if has_own else []), *([""] if rank() == 0 else [])}
        place, count = self._copies.shares()
        return [
            self._piece(number, part)
            for number, part in self._pieces()
            if (part in own if self._replicas == 1 else (number + _owner_of(part)) % count == place)
            and self.has(number, part)
        ]

    def _piece(self, number: int, part: str) -> _WholePart:
        description = self.description(number, part)
        last_known = _Commit(*description.get("known", _NONE))
        # Older commits have "begun".
        begun = tuple(_Commit(*commit) for commit in description.get("from", [description.get("begun", _NONE)]))
        # Older descriptions have no size.
        ranks = description.get("size") or (0 if part else self.load(number)["size"])
        return _WholePart(_Commit(description.get("run", ""), number), part, size=ranks, known=last_known, begun=begun)

    def _require_none_lost(self, chosen: _Commit | None, known: _Commit, *, lacks_parts: bool) -> None:
        """Raise, or log, that a commit which was on a disk is on none; or that only parts of ranks are."""
        if chosen is None and known > _NONE:
            raise LostCommitsError(
                f"commit {known.number} is on none of these hosts: more were lost than replicas={self._replicas} makes "
                f"up for. Begin again with a host that has it, or remove {self.folder} on each host to train from the "
                "beginning"
            )
        if chosen is None or rank() != 0:
            return
        if chosen < known:
            _log.error("commit %d is not whole on these hosts; commit %d is used", known.number, chosen.number)
        if lacks_parts:
            lost = "of commit %d, parts of single ranks are lost: ranks begin with new random numbers and equal weights"
            _log.error(lost, chosen.number)

    def _distribute(self, commit: _Commit, held: Mapping[tuple[_Commit, str], Sequence[int]]) -> None:
        """Give the ranks that keep parts of a commit those that are not on their disks. Collective."""
        disks = self._copies.disks
        missing = [
            (held[commit, _part_of(owner)][0], keeper, _part_of(owner))
            for owner in (None, *(range(size()) if self._begins_with_own else ()))
            for keeper in self._copies.keepers(owner)
            if disks[keeper] not in {disks[holder] for holder in held[commit, _part_of(owner)]}
        ]
        reason = ""
        while missing:
            # In each round a rank sends another one at most one part.
            now = {(source, keeper): part for source, keeper, part in missing}
            sent = {}
            for keeper, part in ((keeper, part) for (source, keeper), part in now.items() if source == rank()):
                try:
                    sent[keeper] = part, self.parcel(commit.number, part)
                except OSError as error:  # The others wait for this rank; all learn the reason at the end.
                    reason = str(error)
            for part, parcel in alltoall_object(sent).values():
                try:
                    self.accept(commit.number, part, parcel)
                except (OSError, ValueError) as error:
                    reason = str(error)
            missing = [copy for copy in missing if now[copy[:2]] != copy[2]]
        _refuse(self.folder, allgather_object(reason))

    def _say_discarded(self, given_up: Sequence[_Commit], chosen: _Commit | None) -> None:
        """Log which whole commits are not of the history that goes on."""
        if given_up and chosen is not None and rank() == 0:
            _log.warning(
                "thrown away: commit%s %s of ranks that went on without the others, which have begun again since; "
                "commit %d is used",
                "s" * (len(given_up) > 1),
                ", ".join(str(commit.number) for commit in given_up),
                chosen.number,
            )

    def _require_not_replaced(self) -> None:
        if self._replaced:
            error = ReplacedError(self._replaced)
            record_refusal("keep_on_disk", error)
            raise error

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


def _refuse(folder: str | Path, reasons: Sequence[str], kind: type[ConfigError] = ConfigError) -> None:
    """Raise an error if there are reasons; each is at the place of its rank, empty where a rank has none."""
    text = "; ".join(f"rank {number}: {reason}" for number, reason in enumerate(reasons) if reason)
    if text:
        error = kind(f"commits cannot be kept in {folder}: {text}")
        record_refusal("keep_on_disk", error)
        raise error


def _part_of(owner: int | None) -> str:
    return "" if owner is None else f".rank-{owner}"


def _owner_of(part: str) -> int:
    return int(part.removeprefix(".rank-") or 0)


def _line(commits: Sequence[_Commit], begun: Mapping[str, Sequence[_Commit]]) -> list[_Commit]:
    """Return the last of some commits and those from which it has come, ascending, without those that were given up.

    Args:
        commits: all, ascending.
        begun: by run, the commits from which it has come, as for `_WholePart`.
    """
    last: dict[str, int] = {}  # By run, the last number in it that counts.
    before = commits[-1:]
    while before:
        for commit in before:
            last[commit.run] = min([commit.number, *last.values()])
        before = [commit for commit in begun.get(before[-1].run, ()) if commit.run not in last]
    return [commit for commit in commits if commit.number <= last.get(commit.run, -1)]


def choose(common: Sequence[T], with_parts: Sequence[T], sizes: Mapping[T, int]) -> T | None:
    """Return the last commit; a whole one before it, if it is of as many ranks as now and lacks parts of theirs.

    Args:
        common: the commits whose common part is whole, ascending.
        with_parts: those of them that have parts of all ranks.
        sizes: of how many ranks each is.
    """
    fitting = [commit for commit in common if commit in with_parts or sizes[commit] != size()] if with_parts else common
    return fitting[-1] if fitting else None


def require_seen_by_all(folder: str) -> None:
    """Raise a `ConfigError` on all ranks unless all see the folder, which rank 0 makes if need be. Collective."""
    probe = partial_path(Path(folder) / "commit-seen")
    reason = ""
    if rank() == 0:
        try:
            own_folder(probe.parent)
            create_file(probe).close()
        except OSError as error:
            reason = str(error)
    probe, reason = broadcast_object((probe, reason))
    _refuse(folder, [reason])
    seen = allgather_object(os.path.exists(probe))  # Path.exists raises where a folder may not be entered.
    if rank() == 0:
        probe.unlink()
    if not all(seen):
        raise ConfigError(
            f"commits of a job that grows are kept in {folder}, which rank {seen.index(False)} does not see; name "
            "a folder that all hosts share, as in horovodrun --commits FOLDER; or with RINGREDUCE_COMMIT_REPLICAS=2, "
            "on the disks of two hosts"
        )
