"""`ringreduce audit` and `ringreduce reproduce`: what they say of a record, and with which exit status."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.audit.chain import examine
from ringreduce.audit.run_record import AuditRecord
from ringreduce.cli import main
from ringreduce.common.keys import write_secret
from ringreduce.elastic import CommitStore

BEGIN: dict[str, Any] = {
    "command": ["/opt/venv/bin/python3", "train.py", "--name", "a b"],
    "versions": {"ringreduce": "0.1.0", "Python": "3.11.4", "numpy": "2.1.0"},
    "settings": {"timeout_s": 30.0, "check_weights_every": 100, "check_data": False, "report": "/r.json"}
    | {"status_address": ["127.0.0.1", 19417], "status_token_file": "/t", "verdict": True, "watchdog_s": 60.0},
    "size": 4,
    "hosts": {"one": [0, 1], "two": [2, 3]},
    "restart": 1,
    "allocation": {"scheduler": "Slurm", "job": "77"},
    "folder": "/home/a/train/src",
    "script": {"path": "/home/a/train/src/train.py", "sha256": "e" * 64},
    "repository": {
        "path": "/home/a/train",
        "url": "https://example.org/train.git",
        "commit": "c" * 40,
        "clean": False,
        "difference": "d" * 64,
        "untracked": ["new.py"],
    },
    "packages": {"sha256": "f" * 64, "versions": {"numpy": "2.1.0", "mine": "0.1"}, "elsewhere": ["mine"]},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A record of one run of rank 0 and another."""
    path = tmp_path / "audit.jsonl"
    first, second = (AuditRecord(str(path), "0123abcd", rank) for rank in range(2))
    first.append("begin", BEGIN)
    first.append("configuration", {"seed": 7, "name": "a\x1b[31m"})
    first.append("data", {"train": "a" * 64})
    first.append("commit", {"number": 1, "sha256": {"model": "b" * 64}})
    second.append("refused", {"what": "broadcast_object", "error": "too large"})
    second.end(None)
    first.end(None)
    return path


def ringreduce(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def test_values_of_the_program_are_shown_with_the_ranks_that_they_are_of(tmp_path: Path) -> None:
    """The record is whole with them."""
    path = tmp_path / "audit.jsonl"
    AuditRecord(str(path), "0123abcd").end(None, {0: {"loss": 0.5}, 1: {"loss": 1.0}, 2: {}})
    shown = [line.split() for line in ringreduce("audit", "show", path).stdout.splitlines()]
    assert [words[1:] for words in shown[1:]] == [["values", "ranks", "0-1:", "loss=0.75"], ["end", "well"]]
    assert ringreduce("audit", "verify", path).exit_code == 0


def test_verify_says_whether_a_record_is_whole_and_what_it_cannot_know(path: Path) -> None:
    """A hash that was kept elsewhere shows that lines were removed at the end, or the chain made anew."""
    lines = path.read_text().splitlines(keepends=True)
    last = json.loads(lines[-1])["hash"]
    done = ringreduce("audit", "verify", path)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path}: whole: 6 lines, of 1 run\n{path}: not known: ")
    assert f"--has {last}" in done.stdout
    done = ringreduce("audit", "verify", path, "--has", last)
    assert (done.exit_code, f"line 6 has the hash {last}" in done.stdout) == (0, True)
    path.write_text("".join(lines[:-1]) + lines[-1][:30])
    done = ringreduce("audit", "verify", path)
    assert done.exit_code == 0
    assert "line 6 was cut off" in done.stdout
    assert "run 0123abcd has no end" in done.stdout
    done = ringreduce("audit", "verify", path, "--has", last)
    assert (done.exit_code, f"no line has the hash {last}" in done.stdout) == (1, True)
    assert ringreduce("audit", "verify", path, "--has", "abc").exit_code == 2
    assert ringreduce("audit", "verify", path.parent / "missing").exit_code == 2


def test_verify_checks_signatures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that was cut, continued or made anew by somebody without the key has another status than a whole one."""
    path, key_file = tmp_path / "audit", tmp_path / "key"
    key = write_secret(key_file)
    record = AuditRecord(str(path), "0123abcd")
    record._file.key = key
    record.append("begin", BEGIN)
    record.append("data", {"train": "a" * 64})
    record.end(None)
    whole = path.read_bytes()
    done = ringreduce("audit", "verify", path, "--key", key_file)
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"signed: each line, by the key {key.fingerprint}" in done.stdout
    assert ringreduce("audit", "verify", path).exit_code == 0
    assert "--key FILE" in ringreduce("audit", "verify", path).stdout
    monkeypatch.setenv("RINGREDUCE_KEY_FILE", str(key_file))
    assert ringreduce("audit", "verify", path).stdout == done.stdout

    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    cut = ringreduce("audit", "verify", path)
    assert (cut.exit_code, "the last run has no end" in cut.stdout) == (1, True)
    path.write_bytes(whole)
    AuditRecord(str(path), "another").append("begin", BEGIN)
    continued = ringreduce("audit", "verify", path)
    assert (continued.exit_code, f"line 4 is not signed by the key {key.fingerprint}" in continued.stdout) == (1, True)
    path.unlink()
    for event, facts in (("begin", BEGIN), ("end", {"error": None})):
        AuditRecord(str(path), "0123abcd").append(event, facts)
    anew = ringreduce("audit", "verify", path)
    assert anew.exit_code == 1
    assert f"line 1 is not signed by the key {key.fingerprint}" in anew.stdout
    path.write_bytes(b"")
    assert ringreduce("audit", "verify", path).exit_code == 1
    other = write_secret(tmp_path / "other")
    path.write_bytes(whole)
    assert f"by the key {other.fingerprint}" in ringreduce("audit", "verify", path, "--key", tmp_path / "other").stdout
    assert ringreduce("audit", "verify", path, "--key", tmp_path / "none").exit_code == 2


@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda lines: [*lines[:2], lines[2].replace("aaa", "abc"), *lines[3:]], 3),
        (lambda lines: [*lines[:2], *lines[4:]], 3),
        (lambda lines: [*lines[:4], lines[1], *lines[4:]], 5),
        (lambda lines: ["hello\n", *lines], 1),
    ],
)
def test_verify_names_the_first_wrong_line(path: Path, change: Any, number: int) -> None:
    """Other commands do so, too, after what they know from the lines before it."""
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    done = ringreduce("audit", "verify", path)
    assert done.exit_code == 1
    assert done.stdout.startswith(f"{path}: line {number} is wrong: ")
    done = ringreduce("audit", "show", path)
    assert (done.exit_code, f"line {number} is wrong" in done.stderr, "commit" in done.stdout) == (1, True, number > 1)
    assert ringreduce("reproduce", path).exit_code == (1 if number > 1 else 2)


def test_show_prints_a_run_as_people_read_it(path: Path) -> None:
    """In order, with the rank where it is not rank 0; what a terminal would act on is escaped."""
    done = ringreduce("audit", "show", path)
    assert (done.exit_code, done.stderr) == (0, "")
    rows = [line.split(None, 1) for line in done.stdout.splitlines()]
    assert done.stdout.startswith("run 0123abcd, ")
    said = {row[0]: row[1].strip() for row in rows[1:10]}
    assert said["command"] == "/opt/venv/bin/python3 train.py --name 'a b'"
    assert said["ranks"] == "4 on one (ranks 0-1), two (ranks 2-3)"
    assert said["allocation"] == "scheduler=Slurm, job=77"
    assert said["script"] == f"path=/home/a/train/src/train.py, sha256={'e' * 64}"
    assert said["repository"] == (
        f"path=/home/a/train, url=https://example.org/train.git, commit={'c' * 40}, clean=false, "
        f'difference={"d" * 64}, untracked=["new.py"]'
    )
    assert said["packages"] == f"2, sha256 {'f' * 64}"
    assert said["settings"] == "RINGREDUCE_TIMEOUT=30.0 RINGREDUCE_CHECK=100 RINGREDUCE_CHECK_DATA=0"
    events = [row[1].strip().split(None, 1) for row in rows[10:]]
    assert [each[0] for each in events] == ["configuration", "data", "commit", "refused", "end"]
    assert events[0][1] == r'seed=7, name="a\u001b[31m"'
    assert events[3][1] == "rank 1: what=broadcast_object, error=too large"
    assert events[4][1] == "well"


def test_reproduce_prints_a_shell_program_and_what_cannot_be_had(path: Path) -> None:
    """All of its words are quoted; the report is a new one, to be compared with that of the run."""
    done = ringreduce("reproduce", path)
    assert (done.exit_code, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    commands = [line for line in lines if not line.startswith("#")]
    assert commands == [
        "git clone -- https://example.org/train.git again && cd again",
        f"git checkout {'c' * 40}",
        f"echo '{'e' * 64}  src/train.py' | sha256sum --check",
        "cd -- src/",
        "python3.11 -m venv venv && . venv/bin/activate  # it was Python 3.11.4",
        "pip install numpy==2.1.0",
        "RINGREDUCE_TIMEOUT=30.0 RINGREDUCE_CHECK=100 RINGREDUCE_CHECK_DATA=0 RINGREDUCE_REPORT=again.json "
        "ringreduce run -np 4 -H one:2,two:2 python train.py --name 'a b'",
    ]
    said = [line for line in lines if line.startswith("#")]
    assert said[0].startswith("# run 0123abcd of ")
    assert said[1:] == [
        r'# configuration: seed=7, name="a\u001b[31m"',
        f"# data: train={'a' * 64}",
        f'# cannot be had: difference={"d" * 64}, untracked=["new.py"], packages=["mine==0.1"]',
    ]
    done = ringreduce("reproduce", path, "--world", "ffff")
    assert (done.exit_code, done.stderr) == (2, "Error: the record has no run whose token begins with 'ffff'\n")


#: What somebody may write into a record, hashes included.
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inside: (
        st.lists(inside, max_size=2) | st.dictionaries(st.text(max_size=3) | st.sampled_from(list(BEGIN)), inside)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from([*BEGIN, "error"]), anything), st.sampled_from(["begin", "end", "data", "x"]))
def test_what_a_record_says_is_printed_whatever_it_is(facts: dict[str, Any], event: str) -> None:
    """By no traceback; and nothing of it gets out of a comment or a word of the shell."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "audit"
        record = AuditRecord(str(path), "world")
        record.append("begin", {**BEGIN, **(facts if event == "begin" else {})})
        record.append(event, facts)
        for words in (("audit", "show"), ("audit", "verify"), ("reproduce",)):
            done = ringreduce(*words, path)
            assert done.exit_code == 0, done.exception
            assert done.stdout.replace("\n", "").isprintable()
    for line in done.stdout.splitlines():
        assert line.startswith("#") or shlex.split(line)


@pytest.mark.parametrize("evil", ["-uevil", "--upload-pack=evil", "mine @ file:///evil", "a/../evil", "ext::evil"])
def test_nothing_in_a_record_becomes_an_option(path: Path, evil: str) -> None:
    """Of git, pip, Python or `ringreduce run`, or an address for pip: somebody else may have made the whole record."""
    path.unlink()
    names = {"versions": {"Python": evil}, "repository": {"url": evil, "commit": evil}, "command": ["-H", evil]}
    AuditRecord(str(path), "0123abcd").append(
        "begin",
        {**BEGIN, **names, "packages": {"versions": {evil: "1", "numpy": evil, "torch": "2.9+cpu"}}},
    )
    commands = [shlex.split(line, comments=True) for line in ringreduce("reproduce", path).stdout.splitlines()]
    assert [words for words in commands if words][1:] == [
        ["python3", "-m", "venv", "venv", "&&", ".", "venv/bin/activate"],
        ["pip", "install", "torch==2.9+cpu"],
    ]
    names = {"repository": {"url": evil, "commit": "c" * 40, "path": "/home"}, "folder": f"/home/{evil}"}
    AuditRecord(str(path), "1123abcd").append("begin", {**BEGIN, **names})
    lines = ringreduce("reproduce", path).stdout.splitlines()
    assert lines[1] == f"git clone -- {shlex.quote(evil)} again && cd again"
    assert lines[4] == f"cd -- {shlex.quote(evil + '/')}"


def test_an_exported_model_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its hash and the commit that it comes from; and so is a folder that was refused."""
    torch = pytest.importorskip("torch")
    path = tmp_path / "audit"
    monkeypatch.setenv("RINGREDUCE_AUDIT", str(path))
    store = CommitStore(tmp_path / "commits", 5, torch.save, torch.load)
    store.prepare()
    store.put(3, {"objects": {"model": {"a": torch.ones(2)}}, "values": {}, "size": 1})
    store.settle()
    assert ringreduce("export", store.folder, tmp_path / "model.pt").exit_code == 0
    store.folder.chmod(0o770)
    assert ringreduce("export", store.folder, tmp_path / "again.pt").exit_code == 2
    found = examine(path.read_bytes())
    assert found.wrong is None
    exported, refused = [each for each in found.lines if each["event"] in ("exported", "refused")]
    sha256 = hashlib.sha256((tmp_path / "model.pt").read_bytes()).hexdigest()
    folder = str(store.folder)
    expected = {"file": str(tmp_path / "model.pt"), "sha256": sha256, "name": "model", "commit": 3, "folder": folder}
    assert (exported["event"], exported["facts"]) == ("exported", expected)
    assert (refused["event"], refused["facts"]["what"]) == ("refused", "export")
    assert "chmod go-w" in refused["facts"]["error"]
