"""The audit record of several ranks: rank 0 keeps it, for all."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ringreduce as rr

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
    assert rr.audited() == (rr.rank() == 0)
    assert rr.fingerprint(state._handlers["model"]._saved) == expected[1]["sha256"]["model"]
    size = rr.size()
    rr.shutdown()
    rr.init()
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    assert [each["event"] for each in lines] == ["begin", "commit", "commit", "data", "end", "begin"]
    assert (lines[0]["facts"]["size"], lines[0]["facts"]["hosts"]) == (size, {platform.node(): list(range(size))})
    assert lines[0]["facts"]["settings"]["audit"] == str(recorded)
    assert ("mpi4py" in lines[0]["facts"]["versions"]) or size == 1
    assert lines[0]["facts"]["versions"]["torch"] == torch.__version__
    assert [each["facts"] for each in lines[1:3]] == expected
    assert [each["facts"] for each in lines[3:5]] == [{"of": 0}, {"error": None}]
