"""Commits on disk: whole or not at all, the last few, and never one that was changed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from ringreduce.elastic import CommitStore


def store_in(folder: Path, keep: int = 3) -> CommitStore:
    return CommitStore(folder / "commits", keep, pickle.dump, pickle.load)


def put(store: CommitStore, *numbers: int, part: str = "") -> None:
    """Write commits one after the other, none given way to by the next."""
    for number in numbers:
        store.put(number, {"number": number, "data": b"x" * 1000}, part)
        store.settle()


def content_of(store: CommitStore, number: int) -> Path:
    (path,) = store.folder.glob(f"commit-*{number}.pt")
    return path


def test_the_newest_commit_is_found_in_another_process_too(tmp_path: Path) -> None:
    """What was put last comes back, from a store of its own."""
    assert store_in(tmp_path).newest() is None
    put(store_in(tmp_path), 7, 12)
    found = store_in(tmp_path).newest()
    assert found is not None
    assert (found[0], found[1]["number"]) == (12, 12)


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
    assert (store.newest(".rank-3", 4) or (0,))[0] == 4


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
    found = store.newest()
    assert found is not None
    assert found[0] == 1
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
    found = store.newest()
    assert found is not None
    assert found[0] == 1
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
