"""The audit record of several ranks: rank 0 keeps it, for all."""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringreduce as rr
from ringreduce import runtime
from ringreduce.audit.chain import examine, is_signed
from ringreduce.common.keys import read_secret, write_secret
from ringreduce.observe.job.job_view import last_values

torch = pytest.importorskip("torch")
hvd: Any = pytest.importorskip("ringreduce.torch")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> Iterator[Path]:
    """A world that is recorded, in this file."""
    path = Path(rr.broadcast_object(str(tmp_path_factory.mktemp("audit") / "audit")))
    rr.shutdown()
    with monkeypatch.context() as patch:
        patch.setenv("RINGREDUCE_AUDIT", str(path))
        rr.init()
        yield path
        rr.shutdown()
    rr.init()


def test_commits_are_recorded_with_the_fingerprints_of_what_they_hold(recorded: Path) -> None:
    """Of what is common to the ranks, by name; hashed here by hand. The end comes last, without an error."""
    torch.manual_seed(rr.rank())
    model = torch.nn.Linear(3, 2)
    state = hvd.elastic.TorchState(model, generators=hvd.elastic.Generators(), epoch=0)
    state.sync()
    expected = []
    for _ in range(2):
        state.commit()
        digest = hashlib.sha256(b"\ndict 2\nbias\nfloat32 2\n" + model.bias.detach().numpy().tobytes())
        digest.update(b"weight\nfloat32 2x3\n" + model.weight.detach().numpy().tobytes())
        expected.append({"number": state.commits, "sha256": {"model": digest.hexdigest()}})
        with torch.no_grad():
            model.weight += 1
    rr.audit("data", of=rr.rank())
    rr.audit("configuration", seed=7)
    assert rr.audited() == (rr.rank() == 0)
    assert rr.fingerprint(state._handlers["model"]._saved) == expected[1]["sha256"]["model"]
    size = rr.size()
    rr.barrier()  # what rank 0 has said, others do not repeat
    rr.shutdown()
    rr.init()
    found = examine(recorded.read_bytes())
    assert (found.wrong, found.cut) == (None, [])
    # Other ranks end when they like.
    late = [each for each in found.lines if each["ranks"] != [0]]
    assert sorted((each["event"], each["facts"]["of"], each["ranks"]) for each in late) == [
        ("data", rank, [rank]) for rank in range(1, size)
    ]
    lines = [each for each in found.lines if each["ranks"] == [0]]
    assert [each["event"] for each in lines] == ["begin", "commit", "commit", "data", "configuration", "end", "begin"]
    assert (lines[0]["facts"]["size"], lines[0]["facts"]["hosts"]) == (size, {platform.node(): list(range(size))})
    assert lines[0]["facts"]["settings"]["audit"] == str(recorded)
    assert ("mpi4py" in lines[0]["facts"]["versions"]) or size == 1
    assert lines[0]["facts"]["versions"]["torch"] == torch.__version__
    assert [each["facts"] for each in lines[1:3]] == expected
    assert [each["facts"] for each in lines[3:6]] == [{"of": 0}, {"seed": 7}, {"error": None}]


def test_what_ranks_say_is_recorded_with_the_next_commit(recorded: Path) -> None:
    """By rank 0, one line for what several say alike, with the first of them."""
    state = hvd.elastic.TorchState(torch.nn.Linear(3, 2), epoch=0)
    rr.audit("data", odd=rr.rank() % 2)
    state.commit()
    rr.barrier()
    found = examine(recorded.read_bytes())
    said = {each["facts"]["odd"]: each["ranks"] for each in found.lines if each["event"] == "data"}
    assert said == {0: [0], **({1: [1]} if rr.size() > 1 else {})}
    rr.barrier()


@pytest.mark.parametrize("are_gathered", [False, True])
def test_values_of_the_program_are_recorded(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, are_gathered: bool
) -> None:
    """At commits, means over the ranks; at the end of all ranks where rank 0 gathers them, else its own."""
    rank, size = rr.rank(), rr.size()
    rr.shutdown()
    with monkeypatch.context() as patch:
        if are_gathered:
            patch.setenv("RINGREDUCE_WATCHDOG", "1000")
        rr.init()
    state = hvd.elastic.TorchState(torch.nn.Linear(3, 2), epoch=0)
    for step in range(3):
        rr.report_value("loss", 10.0 * step + rank)
    state.commit()
    rr.report_value("loss", torch.tensor(100.0 + 2 * rank, requires_grad=True) ** 2)
    own = runtime._process.own()
    assert own is not None
    if are_gathered and rank == 0:
        gathering = own.observer._collection.gathering
        assert gathering is not None
        deadline = time.monotonic() + 60
        told = {other: {"loss": (100.0 + 2 * other) ** 2} for other in range(size)}
        while last_values(gathering.latest()) != told:
            assert time.monotonic() < deadline
            time.sleep(0.01)  # ranks tell once a second
    rr.barrier()
    rr.shutdown()
    rr.init()
    rr.barrier()
    found = examine(recorded.read_bytes())
    assert found.wrong is None
    (world,) = {each["world"] for each in found.lines if each["event"] == "values"}
    lines = [each for each in found.lines if each["world"] == world]
    assert [each["event"] for each in lines] == ["begin", "commit", "values", "values", "end"]
    everyone = list(range(size))
    assert (lines[2]["ranks"], lines[2]["facts"]) == (everyone, {"loss": 20 + (size - 1) / 2})
    mean = sum((100.0 + 2 * other) ** 2 for other in everyone) / size
    last = (everyone, {"loss": mean}) if are_gathered else ([0], {"loss": 10000.0})
    assert (lines[3]["ranks"], lines[3]["facts"]) == last
    rr.barrier()


def test_what_is_refused_is_recorded(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object over the limit, a folder of commits that others may write to, and settings that differ, at init."""
    size, rank = rr.size(), rr.rank()
    folder = recorded.parent / "commits"
    if rank == 0:
        folder.mkdir()
        folder.chmod(0o777)
    rr.barrier()
    state = hvd.elastic.TorchState(torch.nn.Linear(3, 2), epoch=0)
    with pytest.raises(rr.ConfigError, match="chmod go-w"):
        state.keep_on_disk(folder)
    rr.barrier()
    rr.shutdown()
    with monkeypatch.context() as patch:
        patch.setenv("RINGREDUCE_OBJECT_LIMIT", "1000")
        rr.init()
        with pytest.raises(rr.ConfigError, match="RINGREDUCE_OBJECT_LIMIT"):
            rr.broadcast_object(b"x" * 2000)
        rr.barrier()
        rr.shutdown()
        patch.setenv("RINGREDUCE_FUSION", str(1000 + rank))
        if size > 1:
            with pytest.raises(rr.MismatchError):
                rr.init()
    rr.init()
    rr.barrier()
    found = examine(recorded.read_bytes())
    refused = [each["facts"] for each in found.lines if each["event"] == "refused"]
    assert [each["what"] for each in refused] == ["keep_on_disk", "broadcast_object", *["init"] * (size > 1)]
    assert "chmod go-w" in refused[0]["error"]
    assert "RINGREDUCE_OBJECT_LIMIT=1000" in refused[1]["error"]
    assert all("RINGREDUCE_FUSION" in each["error"] for each in refused[2:])
    assert found.wrong is None
    rr.barrier()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("lacks", ["setting", "key", "mode"])
def test_a_rank_without_the_key_is_recorded(
    lacks: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any rank raises the error, which may be the end of the job; rank 0 has signed it."""
    rank, size = rr.rank(), rr.size()
    key_file = recorded.parent / "key"
    if rank == 0:
        write_secret(key_file)
    rr.barrier()
    rr.shutdown()
    with monkeypatch.context() as patch:
        patch.setenv("RINGREDUCE_NODE_SIZE", "1")
        patch.setenv("RINGREDUCE_KEY_FILE", str(key_file))
        if rank == size - 1:
            if lacks == "setting":
                patch.delenv("RINGREDUCE_KEY_FILE")
            else:
                write_secret(tmp_path / "other")
                (tmp_path / "other").chmod(0o640 if lacks == "mode" else 0o600)
                patch.setenv("RINGREDUCE_KEY_FILE", str(tmp_path / "other"))
        with pytest.raises(rr.ConfigError, match=rf"rank {size - 1}\b"):
            rr.init()
        last = examine(recorded.read_bytes()).lines[-1]
    rr.init()
    assert (last["event"], last["facts"]["what"], last["ranks"]) == ("refused", "init", [0])
    assert f"rank {size - 1}" in last["facts"]["error"]
    assert is_signed(last, read_secret(key_file, "KEY"))
    assert examine(recorded.read_bytes()).wrong is None
    rr.barrier()


@pytest.mark.parametrize("is_sealed", [False, True])
def test_commits_on_disk_are_recorded_with_the_hash_of_their_file(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, is_sealed: bool
) -> None:
    """Once they are written; what lies on a disk can be compared with the record, also by who has no key."""
    folder = recorded.parent / "commits"
    if is_sealed:
        if rr.rank() == 0:
            write_secret(recorded.parent / "key")
        rr.barrier()
        rr.shutdown()
        monkeypatch.setenv("RINGREDUCE_DISK_KEY_FILE", str(recorded.parent / "key"))
        rr.init()
    state = hvd.elastic.TorchState(torch.nn.Linear(3, 2), epoch=0)
    state.keep_on_disk(folder)
    state.commit()
    state._disk.settle()
    rr.barrier()
    (line,) = [each for each in examine(recorded.read_bytes()).lines if each["event"] == "written"]
    (file,) = folder.glob("commit-*.pt")
    assert line["facts"] == {"number": 1, "file": str(file), "sha256": rr.fingerprint(file)}
    rr.barrier()
