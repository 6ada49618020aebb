"""What is refused is in the audit record, wherever that happens; tests/parallel/test_audit.py: by several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import ringreduce as rr
from ringreduce.audit.chain import examine
from ringreduce.audit.run_record import AuditRecord
from ringreduce.cli import main
from ringreduce.common.errors import ChangedMessageError
from ringreduce.common.keys import write_secret
from ringreduce.common.lifetime import Lifetime
from ringreduce.common.sealed_files import disk_keys
from ringreduce.elastic.commits import require_seen_by_all


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The record that runs make; it is whole at the end."""
    path = tmp_path / "audit"
    monkeypatch.setenv("RINGREDUCE_AUDIT", str(path))
    yield path
    rr.shutdown()
    assert examine(path.read_bytes()).wrong is None


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with a key."""
    write_secret(tmp_path / "key")
    return tmp_path / "key"


def refused(path: Path) -> list[tuple[str, str]]:
    """Return what was refused, and why."""
    lines = examine(path.read_bytes()).lines
    return [(each["facts"]["what"], each["facts"]["error"]) for each in lines if each["event"] == "refused"]


@pytest.mark.parametrize("variable", ["RINGREDUCE_KEY_FILE", "RINGREDUCE_DISK_KEY_FILE"])
@pytest.mark.parametrize("owner", ["others read it", "another user"])
def test_a_key_of_somebody_else(
    owner: str, variable: str, audit: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No world begins with it."""
    if owner == "another user":
        if os.geteuid():
            pytest.skip("giving files away takes root")
        os.chown(key_file, 4242, -1)
    else:
        key_file.chmod(0o640)
    monkeypatch.setenv(variable, str(key_file))
    with pytest.raises(rr.ConfigError):
        rr.init()
    ((what, error),) = refused(audit)
    assert what == "init"
    assert f"{variable}={key_file}" in error
    assert ("belongs to user 4242" if owner == "another user" else "chmod 600") in error


@pytest.mark.parametrize("command", ["run", "unseal", "doctor", "timeline", "export"])
def test_what_commands_refuse(
    command: str, audit: Path, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that others may read, before a job starts or a file is read; a file of another key; a folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    if command == "run":
        key_file.chmod(0o644)
        words = ["run", f"--encrypt={key_file}", "-np", "2", "true"]
    else:
        monkeypatch.setenv("RINGREDUCE_DISK_KEY_FILE", str(key_file))
        with (folder / "rank-0.json").open("wb") as file:
            write_secret(tmp_path / "other")
            disk_keys(str(tmp_path / "other")).write(file, "rank-0.json", lambda inner: inner.write(b"{}"))
        words = {
            "unseal": ["unseal", str(folder / "rank-0.json"), str(tmp_path / "out")],
            "timeline": ["timeline", "report", str(folder / "rank-0.json")],
            "doctor": ["doctor", "--dump", str(folder)],
            "export": ["export", str(folder), str(tmp_path / "out")],
        }[command]
        if command == "export":
            pytest.importorskip("torch")
            folder.chmod(0o777)
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 2, done.output
    ((what, error),) = refused(audit)
    assert what == command
    assert error.startswith("ForeignFileError: ")


def test_what_ranks_refuse_while_they_run(
    audit: Path, key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace in the place of somebody's file, a folder for commits, a checkpoint of no key."""
    monkeypatch.setenv("RINGREDUCE_DISK_KEY_FILE", str(key_file))
    rr.init()
    (tmp_path / "trace.json").write_text("a letter")
    with pytest.raises(rr.ForeignFileError):
        rr.start_timeline(tmp_path / "trace.json")
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits").chmod(0o777)
    with pytest.raises(rr.ConfigError, match="chmod go-w"):
        require_seen_by_all(str(tmp_path / "commits"))
    torch = pytest.importorskip("torch")
    from ringreduce.torch import load_checkpoint

    torch.save({}, tmp_path / "checkpoint")
    for _ in range(2):  # of what is refused again there is one line
        with pytest.raises(rr.ConfigError, match="it is not sealed"):
            load_checkpoint(tmp_path / "checkpoint", model=torch.nn.Linear(1, 1))
    assert [what for what, _ in refused(audit)] == ["start_timeline", "keep_on_disk", "load_checkpoint"]


def test_failures_are_known_above() -> None:
    """Of anything below, with its error; a listener whose object has gone is not kept."""
    heard: list[object] = []

    class Listener:
        def hear(self, error: BaseException) -> None:
            heard.append(error)

    world = Lifetime()
    listener = Listener()
    world.listen_while_held("failed below", listener.hear)
    child = world.child()
    error = ChangedMessageError("changed")
    child.child().fail(error)
    assert (heard, child.open, world.open) == ([error], True, True)
    world.fail(ValueError("its own"))
    del listener
    child.fail(ValueError("of nobody"))
    assert heard == [error]


def test_a_refusal_of_another_host_is_left_to_rank_0(tmp_path: Path) -> None:
    """Which then ends the job; ranks of its host write their own."""
    for rank, with_rank_0 in ((0, True), (1, True), (2, False)):
        record = AuditRecord(str(tmp_path / "audit"), "world", rank, with_rank_0=with_rank_0)
        assert not record.leaves_refusals
        record.refuse("message", ChangedMessageError("changed"))
        assert record.leaves_refusals == (rank == 2)
        record.end("it failed")
    lines = examine((tmp_path / "audit").read_bytes()).lines
    assert [(each["event"], each["ranks"]) for each in lines] == [("refused", [0]), ("end", [0]), ("failed", [1])]
