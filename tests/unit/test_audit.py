"""The audit record of a run, and fingerprints; tests/parallel/test_audit.py reads that of several ranks."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.observe.audit import AuditRecord


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def sha256(*parts: bytes | str) -> str:
    return hashlib.sha256(b"".join(each.encode() if isinstance(each, str) else each for each in parts)).hexdigest()


def test_fingerprints_are_those_of_the_lines_that_are_documented(tmp_path: Path) -> None:
    """Of files, arrays and what holds them, whatever the order of keys or of elements in memory."""
    (tmp_path / "data").write_bytes(b"rows" * 1_000_000)
    assert rr.fingerprint(tmp_path / "data") == sha256(b"rows" * 1_000_000)
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert rr.fingerprint(matrix) == sha256("\nfloat32 2x3\n", matrix.tobytes())
    assert rr.fingerprint(np.asfortranarray(matrix)) == rr.fingerprint(matrix)
    assert rr.fingerprint(np.empty((0, 2), np.int64)) == sha256("\nint64 0x2\n")
    state = {"weight": matrix, "groups": [{"lr": 0.1, "on": None}], 3: np.float64(2), "seen": {5, 1}}
    expected = sha256(
        *("\ndict 4\n", "~int 3\nfloat64 scalar\n", np.float64(2).tobytes()),
        *("groups\nlist 1\n", "groups/0\ndict 2\n", "groups/0/lr\nfloat 0.1\n", "groups/0/on\nNoneType None\n"),
        *("seen\nset 2\n", "seen/0\nint 1\n", "seen/1\nint 5\n", "weight\nfloat32 2x3\n", matrix.tobytes()),
    )
    assert rr.fingerprint(state) == rr.fingerprint(dict(reversed(state.items()))) == expected


def test_every_value_counts() -> None:
    """Bits, dtypes, shapes and names."""
    values = [np.zeros(4, np.float32), -np.zeros(4, np.float32), np.zeros(4, np.int32), np.zeros((2, 2), np.float32)]
    values += [{"a": np.zeros(4, np.float32)}, {"b": np.zeros(4, np.float32)}, [1], [1.0], [True], ["1"]]
    values += [{"a": {"b": 1}}, {"a/b": 1}, {"a~1b": 1}, {}, [], (), set(), {0: 1}, {"0": 1}, {"~int 0": 1}]
    assert len({rr.fingerprint(each) for each in values}) == len(values)


def test_tensors_have_the_fingerprints_of_arrays() -> None:
    """Also of bfloat16, those that need gradients, and those that are views of others."""
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(3, 2).T.requires_grad_()
    assert rr.fingerprint(tensor) == rr.fingerprint(np.arange(6, dtype=np.float32).reshape(3, 2).T)
    bits = np.arange(4, dtype=np.uint16)
    assert rr.fingerprint(torch.from_numpy(bits).view(torch.bfloat16)) == sha256("\nbfloat16 4\n", bits.tobytes())


def test_what_has_no_value_has_no_fingerprint() -> None:
    """It would be another one in every process."""
    with pytest.raises(rr.ConfigError, match="optimizer/hook has no fingerprint: nobody knows the value of a object"):
        rr.fingerprint({"optimizer": {"hook": object()}})
    with pytest.raises(rr.ConfigError, match="value of a function"):
        rr.fingerprint(lambda: 0)
    with pytest.raises(rr.ConfigError, match="words has no fingerprint"):
        rr.fingerprint({"words": np.array(["a"], object)})


@pytest.mark.parametrize("fact", [np.float32(1), {1, 2}, float("nan"), b"bytes", object()])
def test_what_json_cannot_say_is_refused_anywhere(fact: object) -> None:
    """Also on ranks, and in runs, that keep no record."""
    with pytest.raises(rr.ConfigError, match="data cannot be recorded as JSON"):
        rr.audit("mine", data=fact)
    for event in ("begin", "commit", "end", "", 3):
        with pytest.raises(rr.ConfigError, match="the event of an audit"):
            rr.audit(event)  # type: ignore[arg-type]
    rr.audit("mine", data=[1, "a", None])
    assert not rr.audited()


def test_lines_are_appended_for_the_user_alone(tmp_path: Path) -> None:
    """What is there stays; a link is not followed; a world ends once."""
    path = tmp_path / "audit"
    path.touch(mode=0o600)
    path.write_text('{"event": "of another job"}\n')
    record = AuditRecord(str(path), {})
    record.end("first")
    record.end("second")
    lines = lines_of(path)
    assert [each["event"] for each in lines] == ["of another job", "begin", "end"]
    assert lines[2]["facts"] == {"error": "first"}
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="link"):
        AuditRecord(str(tmp_path / "link"), {})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe"):
        AuditRecord(str(tmp_path / "pipe"), {})
    AuditRecord(str(tmp_path / "new"), {})
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


def test_a_run_is_recorded_from_begin_to_end(tmp_path: Path) -> None:
    """What ran, where, with what; what the program says; and the error that has ended it."""
    path = tmp_path / "audit"
    source = "import ringreduce as rr; rr.init(); rr.audit('data', rows=3); {}"
    for last in ("", "raise ValueError('no')", "import sys; sys.exit(3)"):
        subprocess.run(
            [sys.executable, "-c", source.format(last), "an argument"],
            env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "RINGREDUCE_AUDIT": str(path)},
            check=False,
            capture_output=True,
        )
    lines = lines_of(path)
    assert [each["event"] for each in lines] == ["begin", "data", "end"] * 3
    assert len({each["world"] for each in lines}) == 3
    begin = lines[0]["facts"]
    assert begin["command"][-1] == "an argument"
    assert begin["size"] == 1
    assert list(begin["hosts"].values()) == [[0]]
    assert begin["versions"]["numpy"] == np.__version__
    assert begin["settings"]["audit"] == str(path)
    assert begin["settings"]["conventions"] == "chain_rule"
    assert lines[1]["facts"] == {"rows": 3}
    assert [each["facts"]["error"] for each in lines[2::3]] == [None, "ValueError: no", None]


def test_a_record_that_cannot_be_begun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained that nobody would have recorded."""
    monkeypatch.setenv("RINGREDUCE_AUDIT", str(tmp_path / "missing" / "audit"))
    with pytest.raises(rr.ConfigError, match=r"RINGREDUCE_AUDIT=.*/missing/audit cannot be written: .*No such file"):
        rr.init()
    assert not rr.is_initialized()
