"""The audit record of a run, and fingerprints; tests/parallel/test_audit.py reads that of several ranks."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.audit.chain import ChainedFile, examine, is_signed
from ringreduce.audit.run_record import AuditRecord
from ringreduce.common.keys import read_secret, write_secret
from ringreduce.common.launch import allocation


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
    for event in ("begin", "commit", "written", "values", "exported", "refused", "failed", "end", "", 3):
        with pytest.raises(rr.ConfigError, match="the event of an audit"):
            rr.audit(event)  # type: ignore[arg-type]
    rr.audit("mine", data=[1, "a", None])
    assert not rr.audited()


def test_lines_are_appended_for_the_user_alone(tmp_path: Path) -> None:
    """What is there stays; a link is not followed; a world ends once."""
    path = tmp_path / "audit"
    AuditRecord(str(path), "another").append("of another job", {})
    record = AuditRecord(str(path), "world")
    record.end("first")
    record.end("second")
    lines = lines_of(path)
    assert [each["event"] for each in lines] == ["of another job", "end"]
    assert lines[1]["facts"] == {"error": "first"}
    assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(path)
    os.mkfifo(tmp_path / "pipe")
    for name, why in (("link", "link"), ("pipe", "has to be a file")):
        with pytest.raises(OSError, match=why):
            ChainedFile(str(tmp_path / name), alone=True).append([])


@pytest.mark.parametrize("how", ["owner", "names", "620", "604", "640"])
def test_a_file_that_others_can_write_to_or_lock_is_no_record(how: str, tmp_path: Path) -> None:
    """It stays as it is."""
    path = tmp_path / "audit"
    ChainedFile(str(path), alone=True).append([{"event": "first", "facts": {}}])
    before = path.read_bytes()
    if how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, -1)
    elif how == "names":
        os.link(path, tmp_path / "other")
    else:
        path.chmod(int(how, 8))
    with pytest.raises(PermissionError, match=r"a file of this user's alone \(chmod 600\), with one name"):
        ChainedFile(str(path), alone=True).append([{"event": "second", "facts": {}}])
    assert path.read_bytes() == before


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


def test_with_a_key_all_lines_are_signed(tmp_path: Path) -> None:
    """Those of runs; one in which `init` refuses the key has none, and so its line has no signature."""
    path, key_file = tmp_path / "audit", tmp_path / "key"
    write_secret(key_file)
    recorded(path, tmp_path, "-c", PROGRAM, RINGREDUCE_KEY_FILE=str(key_file))
    key_file.chmod(0o644)
    with pytest.raises(subprocess.CalledProcessError):
        recorded(path, tmp_path, "-c", PROGRAM, RINGREDUCE_KEY_FILE=str(key_file))
    key_file.chmod(0o600)
    recorded(path, tmp_path, "-c", PROGRAM, RINGREDUCE_KEY_FILE=str(key_file))
    found = examine(path.read_bytes())
    assert [each["event"] for each in found.lines] == ["begin", "end", "refused", "begin", "end"]
    key = read_secret(key_file, "KEY")
    assert [is_signed(each, key) for each in found.lines] == [True, True, False, True, True]
    assert "chmod 600" in found.lines[2]["facts"]["error"]


def test_a_record_that_cannot_be_begun_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is trained that nobody would have recorded."""
    monkeypatch.setenv("RINGREDUCE_AUDIT", str(tmp_path / "missing" / "audit"))
    with pytest.raises(rr.ConfigError, match=r"RINGREDUCE_AUDIT=.*/missing/audit cannot be written: .*No such file"):
        rr.init()
    assert not rr.is_initialized()


def test_a_folder_has_the_fingerprint_that_the_shell_finds(tmp_path: Path) -> None:
    """Of names and contents of all files, in folders within it and behind links too."""
    (tmp_path / "data" / "b").mkdir(parents=True)
    for name in ("z", "b/a b", "b.txt", "\u00e9"):
        (tmp_path / "data" / name).write_text(name * 1000)
    (tmp_path / "data" / "link").symlink_to(tmp_path / "data" / "z")
    script = "find -L . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path / "data", check=True, capture_output=True, text=True)
    first = rr.fingerprint(tmp_path / "data")
    assert done.stdout.split()[0] == first
    (tmp_path / "data" / "z").rename(tmp_path / "data" / "y")
    (tmp_path / "data" / "link").unlink()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "data" / "y")
    assert rr.fingerprint(tmp_path / "data") != first
    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    with pytest.raises(rr.ConfigError, match="loop' has no fingerprint"):
        rr.fingerprint(tmp_path / "data")


# ---- what the program is made of ----


def recorded(path: Path, cwd: Path, *command: str, **environment: str) -> dict[str, Any]:
    """Return what the record says of the begin of a program that was run as a command."""
    subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": ":".join(sys.path),
            "RINGREDUCE_AUDIT": str(path),
            **environment,
        },
        check=True,
        capture_output=True,
    )
    found = examine(path.read_bytes())
    assert found.wrong is None
    facts: dict[str, Any] = [each for each in found.lines if each["event"] == "begin"][-1]["facts"]
    return facts


PROGRAM = "import ringreduce as rr; rr.init()\n"


def git(folder: Path, *words: str) -> bytes:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    return subprocess.run(["git", *names, *words], cwd=folder, check=True, capture_output=True).stdout


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_checkout_is_recorded_and_whether_it_was_changed(tmp_path: Path) -> None:
    """Of the script's repository, wherever it is run; the difference as git prints it, and files that git lacks."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    (folder / ".gitignore").write_text("ignored\n")
    (folder / "ignored").touch()
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "first")
    git(folder, "remote", "add", "origin", "https://user:pass@word@example.org/train.git?token=password#password")
    path = tmp_path / "audit"
    facts = recorded(path, tmp_path, "checkout/train.py")
    commit = git(folder, "rev-parse", "HEAD").decode().strip()
    url = "https://example.org/train.git"
    clean = {"path": str(folder), "url": url, "commit": commit, "clean": True, "difference": None, "untracked": []}
    assert facts["repository"] == clean
    assert facts["script"] == {"path": str(folder / "train.py"), "sha256": sha256(PROGRAM)}
    assert facts["folder"] == str(tmp_path)
    (folder / "train.py").write_text(PROGRAM + "# changed\n")
    (folder / "new.py").touch()
    changed = {"clean": False, "difference": sha256(git(folder, "diff", "--binary", "HEAD")), "untracked": ["new.py"]}
    assert recorded(path, folder, "train.py")["repository"] == {**clean, **changed}
    git(folder, "remote", "set-url", "origin", "git@example.org:a/train.git")
    assert recorded(path, folder, "train.py")["repository"]["url"] == "git@example.org:a/train.git"
    assert b"word" not in path.read_bytes()


def test_without_git_the_record_says_why(tmp_path: Path) -> None:
    """Where there is no repository, no git, or no commit; and a program that is no file."""
    path = tmp_path / "audit"
    no_git = recorded(path, tmp_path, "-c", PROGRAM, PATH=str(tmp_path))
    assert (no_git["repository"], no_git["script"]) == ({"unknown": "git is not installed"}, None)
    if shutil.which("git") is not None:
        nothing = recorded(path, tmp_path, "-c", PROGRAM, GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
        assert "not a git repository" in nothing["repository"]["unknown"]
        git(tmp_path, "init", "--quiet")
        assert "unknown" in recorded(path, tmp_path, "-c", PROGRAM)["repository"]


def test_packages_and_the_allocation_are_recorded(tmp_path: Path) -> None:
    """Versions by name, and which of them say little; and what the scheduler calls the job."""
    slurm = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[1-2]", "SLURM_RESTART_COUNT": "2"}
    facts = recorded(tmp_path / "audit", tmp_path, "-c", PROGRAM, RINGREDUCE_RESTART="1", **slurm)
    versions = facts["packages"]["versions"]
    assert versions["numpy"] == np.__version__
    assert facts["packages"]["sha256"] == sha256(*(f"{name}=={versions[name]}\n" for name in sorted(versions)))
    assert set(facts["packages"]["elsewhere"]) <= set(versions)
    assert facts["allocation"] == {"scheduler": "Slurm", "job": "77", "hosts": "gpu[1-2]", "restarts": "2"}
    assert facts["restart"] == 1
    assert allocation({"JOB_ID": "3"}) is None
    assert allocation({"JOB_ID": "3", "PE_HOSTFILE": "file"}) == {"scheduler": "Grid Engine", "job": "3"}


# ---- what other ranks say ----


def test_other_ranks_have_one_line_for_what_they_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At a commit, or at their end; without what rank 0 has said; not from other hosts, and not in another file."""
    path = tmp_path / "audit"
    ranks = [AuditRecord(str(path), "world", rank, with_rank_0=rank != 3) for rank in range(4)]
    for rank, each in enumerate(ranks):
        each.append("same", {"a": 1})
        each.append("own", {"rank is odd": rank % 2})
    values = [{"loss": 0.25, "seconds": math.inf}, {}, {"loss": 0.75}, {"loss": 2.0}]
    everyone = [(list(each._kept), said) for each, said in zip(ranks, values, strict=True)]
    for each, said in reversed(list(zip(ranks, values, strict=True))):
        each.collect(lambda mine: everyone, said)
    said = [(each["event"], each["ranks"]) for each in lines_of(path)]
    assert said == [("same", [0]), ("own", [0]), ("own", [1]), ("values", [0, 2, 3])]
    assert lines_of(path)[-1]["facts"] == {"loss": 1.0, "seconds": "inf"}
    for rank in (1, 2, 3):
        ranks[rank].append("late", {})
        ranks[rank].end("no")
    assert [(each["event"], each["ranks"]) for each in lines_of(path)[4:]] == [("late", [1]), ("failed", [1])]
    assert examine(path.read_bytes()).wrong is None
    assert "lacks a line (late and failed): rank 0, which keeps it, is on another host" in caplog.text
    elsewhere = AuditRecord(str(tmp_path / "other"), "world", 1)
    elsewhere.end("no")
    assert "lacks a line (failed): the record of rank 0 is not there" in caplog.text
