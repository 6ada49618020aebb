"""Commits on disk: whole or not at all, the last few, and never one that was changed."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ringreduce.common import processes
from ringreduce.common.files import partial_path
from ringreduce.elastic import CommitStore


def store_in(folder: Path, keep: int = 3) -> CommitStore:
    store = CommitStore(folder / "commits", keep, pickle.dump, pickle.load)
    store.prepare()
    return store


def put(store: CommitStore, *numbers: int, part: str = "") -> None:
    """Write commits one after the other, none given way to by the next."""
    for number in numbers:
        store.put(number, {"number": number, "data": b"x" * 1000}, part)
        store.settle()


def whole(store: CommitStore, part: str = "") -> list[int]:
    """Return the numbers of the commits that have a whole part, ascending; the log names the others."""
    return [number for number in store.examine(part) if store.has(number, part)]


def content_of(store: CommitStore, number: int) -> Path:
    (path,) = store.folder.glob(f"commit-*{number}.pt")
    return path


def test_the_newest_commit_is_found_in_another_process_too(tmp_path: Path) -> None:
    """What was put last comes back, from a store of its own."""
    assert whole(store_in(tmp_path)) == []
    put(store_in(tmp_path), 7, 12)
    assert whole(store_in(tmp_path)) == [7, 12]
    assert store_in(tmp_path).load(12)["number"] == 12


def test_the_last_few_are_kept(tmp_path: Path) -> None:
    """Older ones go, with the ranks' own parts; nothing else is left in the folder."""
    store = store_in(tmp_path, keep=2)
    for number in range(1, 6):
        put(store, number, part=".rank-3")
        put(store, number)
    names = sorted(each.name for each in store.folder.iterdir())
    assert names == sorted(
        f"commit-00000000000{number}{part}.{suffix}"
        for number in (4, 5)
        for part in ("", ".rank-3")
        for suffix in ("pt", "json")
    )
    assert whole(store, ".rank-3") == [4, 5]


def test_a_part_that_is_new_removes_none_of_other_ranks(tmp_path: Path) -> None:
    """As after growth: until the commit is whole, the one before is what a job begins with."""
    store = store_in(tmp_path, keep=2)
    put(store, 1, part=".rank-0")
    put(store, 2, part=".rank-1")
    assert whole(store, ".rank-0") == [1]


@pytest.mark.parametrize("harm", ["truncated", "flipped", "gone", "foreign", "not described"])
def test_a_commit_that_is_not_whole_is_refused_by_name(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before it is used."""
    store = store_in(tmp_path)
    put(store, 1, 2)
    path = content_of(store, 2)
    data = path.read_bytes()
    if harm == "truncated":
        path.write_bytes(data[:-1])
    elif harm == "flipped":
        path.write_bytes(data[:500] + bytes([data[500] ^ 1]) + data[501:])
    elif harm == "gone":
        path.unlink()
    elif harm == "foreign":
        path.with_suffix(".json").write_text("[]")
    else:
        path.with_suffix(".json").unlink()
    assert whole(store) == [1]
    assert (path.name in caplog.text) == (harm != "not described")  # without a description it never was a commit


def test_what_cannot_be_written_leaves_what_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The training goes on; the log names the commit; no half of a file is left."""

    def write(content: Any, file: BinaryIO) -> None:
        file.write(b"half")
        if content["number"] == 2:
            raise OSError(28, "No space left on device")
        pickle.dump(content, file)

    store = CommitStore(tmp_path, 3, write, lambda file: pickle.loads(file.read()[4:]))
    put(store, 1, 2)
    assert whole(store) == [1]
    assert "commit 2 was not written" in caplog.text
    assert len(list(tmp_path.iterdir())) == 2


def test_what_waits_gives_way_to_what_comes_after_it(tmp_path: Path) -> None:
    """While one is being written, the last of those that come is kept for afterwards, and no other."""
    written: list[int] = []

    def write(content: Any, file: BinaryIO) -> None:
        if not written:
            for number in (2, 3, 4):
                store.put(number, {"number": number})
        written.append(content["number"])
        pickle.dump(content, file)

    store = CommitStore(tmp_path, 5, write, pickle.load)
    store.put(1, {"number": 1})
    store.settle()
    assert written == [1, 4]


def test_only_the_user_can_read_it(tmp_path: Path) -> None:
    """Folder and files are private."""
    store = store_in(tmp_path)
    put(store, 1)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in store.folder.iterdir()} == {0o600}


def test_what_cannot_be_read_again_is_no_commit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is found out at once, while the one before is there."""
    store = store_in(tmp_path)
    put(store, 1)
    store._read = lambda file: pickle.loads(b"")
    put(store, 2)
    assert whole(store) == [1]
    assert "commit 2 was not written" in caplog.text


def test_higher_numbers_that_were_refused_do_not_count(tmp_path: Path) -> None:
    """A job that begins again below them keeps what it writes."""
    store = store_in(tmp_path, keep=2)
    put(store, 11, 12)
    for number in (11, 12):
        content_of(store, number).write_bytes(b"")
    again = store_in(tmp_path, keep=2)
    assert whole(again) == []
    put(again, 1, 2, 3)
    assert whole(again) == [2, 3]


def test_a_ranks_own_part_is_written_before_the_common_one(tmp_path: Path) -> None:
    """In the order in which they are put, also while the disk is slow: a commit whose common part is there has all."""
    order: list[str] = []

    def write(content: Any, file: BinaryIO) -> None:
        if not order:
            store.put(2, "own", ".rank-0")
            store.put(2, "common")
        order.append(content)
        pickle.dump(content, file)

    store = CommitStore(tmp_path, 5, write, pickle.load)
    store.put(1, "first")
    store.settle()
    assert order == ["first", "own", "common"]


def test_what_dead_writers_have_left_is_removed(tmp_path: Path) -> None:
    """Half of a file, of a process that is gone; of another host's processes, a pid says nothing."""
    folder = tmp_path / "commits"
    folder.mkdir()
    mine = folder / f".commit-000000000001.pt.{processes.place()}.999999999"
    others = folder / ".commit-000000000002.pt.01234567.999999999"
    for each in (mine, others):
        each.touch()
    store = store_in(tmp_path, keep=2)
    assert not mine.exists()
    put(store, 1, 2, 3)
    assert others.exists()
    put(store, 4)  # after which nobody is to write commit 2
    assert not others.exists()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        store_in(tmp_path / "file")


def test_processes_of_two_hosts_with_one_pid_write_to_different_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that the hosts share."""
    mine = partial_path(tmp_path / "commit")
    monkeypatch.setattr(processes, "place", lambda: "01234567")
    others = partial_path(tmp_path / "commit")
    assert mine.name.rpartition(".")[2] == others.name.rpartition(".")[2]
    assert mine != others


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns it may put commits there, which are unpickled."""
    store_in(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"belongs to user [0-9]+, and this is user 12345"):
        store_in(tmp_path)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """With the command that mends it."""
    store_in(tmp_path).folder.chmod(mode)
    with pytest.raises(PermissionError, match="chmod go-w"):
        store_in(tmp_path)


@pytest.mark.parametrize("part", ["pt", "json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_is_no_file_among_commits_is_skipped_at_once(tmp_path: Path, part: str, make: Callable) -> None:
    """Nobody waits for a FIFO, reads a device or follows a link; the commit before it counts."""
    store = store_in(tmp_path)
    put(store, 1, 2)
    path = content_of(store, 2).with_suffix(f".{part}")
    path.unlink()
    make(path)
    assert whole(store_in(tmp_path)) == [1]


def test_links_in_place_of_temporary_files_are_not_followed(tmp_path: Path) -> None:
    """Neither to a file that would be overwritten, nor to one that would be made."""
    store, other = store_in(tmp_path), tmp_path / "other"
    other.write_text("keep")
    for name in (f"commit-{1:012}.pt", f"commit-{1:012}.json", "commit-probe"):
        partial_path(store.folder / name).symlink_to(other)
    put(store_in(tmp_path), 1)
    assert whole(store) == [1]
    assert other.read_text() == "keep"


def test_parts_of_ranks_that_have_died_go_with_their_commits(tmp_path: Path) -> None:
    """Nobody writes later ones in their place: what is common to the ranks takes along what is older than itself."""
    store = store_in(tmp_path, keep=2)
    store.prepare()
    for number in (1, 2, 3, 4, 5):
        for part in ("", ".rank-0", *([".rank-1", ".rank-2"] if number < 3 else [])):
            store.put(number, number, part)
            store.settle()
    kept = sorted(each.name for each in store.folder.glob("*.pt"))
    assert kept == [f"commit-{number:012}{part}.pt" for number in (4, 5) for part in ("", ".rank-0")]
    assert len(list(store.folder.glob("*.json"))) == len(kept)
