"""``ringreduce export``: a plain state dict out of commits on disk."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ringreduce.cli import main
from ringreduce.elastic import CommitStore

torch = pytest.importorskip("torch")


def weights_of(number: int) -> dict[str, Any]:
    return {"weight": torch.arange(6.0).reshape(2, 3) + number, "steps": torch.tensor(number), "name": "plain"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Commits 3, 5 and 7, as a `TorchState` writes them."""
    store = CommitStore(tmp_path / "commits", 5, torch.save, torch.load)
    store.prepare()
    for number in (3, 5, 7):
        objects = {"model": weights_of(number), "optimizer": {"state": {}}}
        store.put(number, {"objects": objects, "values": {"epoch": 1}, "size": 2})
        store.settle()
    return store.folder


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def assert_holds(path: Path, number: int) -> None:
    """Nothing of ringreduce is needed to read it."""
    found = torch.load(path, weights_only=True)
    expected = weights_of(number)
    assert list(found) == list(expected)
    assert torch.equal(found["weight"], expected["weight"])
    assert torch.equal(found["steps"], expected["steps"])
    assert found["name"] == "plain"
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_last_whole_commit_is_exported(folder: Path) -> None:
    """Those that are not are named; a file that is there stays, unless it is to be overwritten."""
    out = folder.parent / "model.pt"
    done = export(folder, out)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: model of commit 7, ")
    assert_holds(out, 7)
    last = next(folder.glob("commit-*7.pt"))
    last.write_bytes(last.read_bytes()[:-1])
    done = export(folder, out)
    assert (done.exit_code, done.stderr) == (2, f"Error: {out} is there already; --force overwrites it\n")
    assert_holds(out, 7)
    done = export(folder, out, "--force")
    assert done.exit_code == 0
    assert done.stderr.startswith("commit 7 cannot be used: its nbytes is ")
    assert_holds(out, 5)
    assert sorted(each.name for each in folder.parent.iterdir()) == ["commits", "model.pt"]


def test_a_folder_that_others_may_write_to_is_refused(folder: Path) -> None:
    """Whoever can write there may have put another model in place of the commit's; the error says what to do."""
    folder.chmod(0o770)
    done = export(folder, folder.parent / "model.pt")
    assert done.exit_code == 2
    assert "chmod go-w" in done.stderr
    assert [each.name for each in folder.parent.iterdir()] == ["commits"]


def test_any_commit_and_any_object_can_be_chosen(folder: Path) -> None:
    """By number and name; what is not there is told, with what is."""
    out = folder.parent / "out.pt"
    assert export(folder, out, "--commit", 3).exit_code == 0
    assert_holds(out, 3)
    assert export(folder, out, "--force", "--name", "optimizer").exit_code == 0
    assert torch.load(out, weights_only=True) == {"state": {}}
    next(folder.glob("commit-*5.pt")).unlink()
    for options, complaint in {
        ("--commit", 4): f"there is no commit 4 in {folder} that can be used; whole are 3, 7",
        ("--commit", 5): f"there is no commit 5 in {folder} that can be used; whole are 3, 7",
        ("--name", "ema"): "commit 7 holds no 'ema'; it holds model, optimizer",
    }.items():
        done = export(folder, folder.parent / "more.pt", *options)
        assert (done.exit_code, complaint in done.stderr) == (2, True), done.stderr
        assert not (folder.parent / "more.pt").exists()


def test_folders_without_commits_are_refused(folder: Path) -> None:
    """Empty ones, those in which none is whole or torch's, and places that cannot be written to."""
    out = folder.parent / "model.pt"
    (folder.parent / "empty").mkdir()
    assert "there are no commits in " in export(folder.parent / "empty", out).stderr
    not_yet = export(folder.parent / "not yet", out)
    assert (not_yet.exit_code, not_yet.stderr.count("\n")) == (2, 1)
    assert "not yet yet: after state.keep_on_disk(FOLDER), the first commit() writes one" in not_yet.stderr
    done = export(folder, folder.parent / "missing" / "model.pt")
    assert (done.exit_code, "cannot be written: No such file" in done.stderr) == (2, True), done.stderr
    store = CommitStore(folder.parent / "pickles", 3, pickle.dump, pickle.load)
    store.prepare()
    store.put(1, {"objects": {"model": folder}})
    store.settle()
    assert "is not that of a TorchState: " in export(store.folder, out).stderr
    for each in folder.glob("*.pt"):
        each.write_bytes(b"")
    done = export(folder, out)
    assert (done.exit_code, "of the commits in" in done.stderr, out.exists()) == (2, True, False), done.stderr


def test_without_torch_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line."""
    monkeypatch.setitem(sys.modules, "torch", None)
    done = export(folder, folder / "out")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "needs PyTorch, which is not installed: pip install torch" in done.stderr


class _Touch:
    """Unpickled, makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_commit_runs_no_code(tmp_path: Path) -> None:
    """Though its lengths and sums are right: torch's states are tensors, numbers and text, and read as such."""
    store = CommitStore(tmp_path / "commits", 5, torch.save, lambda file: None)
    store.prepare()
    store.put(3, {"objects": {"model": _Touch(tmp_path / "ran")}, "values": {}, "size": 1})
    store.settle()
    assert store.examine() == {3: ""}
    done = export(store.folder, tmp_path / "out.pt")
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert not (tmp_path / "ran").exists()
