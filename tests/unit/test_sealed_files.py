"""What lies on disk can be sealed: it is read as it was written, or not at all."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.cli import main
from ringreduce.common.errors import ConfigError
from ringreduce.common.keys import Secret, write_secret
from ringreduce.common.sealed_files import DISK_VARIABLE, PLAIN, KeyFile, disk_keys
from ringreduce.elastic import CommitStore
from ringreduce.observe.seen.recorder import FlightRecorder
from ringreduce.observe.seen.timeline import JobClock, Timeline
from ringreduce.observe.seen.trace_file import TraceFile, collect, read_trace

PIECE = 1 << 20
RAW = bytes(range(32))
KEYS = KeyFile(Secret(RAW), "KEY")
OTHER = KeyFile(Secret(bytes(32)), "KEY")
KNOWN = b"what nobody else is to read, in a file that is sealed"


def content_of(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def sealed(content: bytes, purpose: str = "a test", keys: KeyFile = KEYS, step: int = 1 << 30) -> bytes:
    """Return a sealed file, written in steps of so many bytes."""
    file = io.BytesIO()

    def write(inner: io.BufferedIOBase) -> None:
        for begin in range(0, len(content), step):
            assert inner.write(content[begin : begin + step]) == len(content[begin : begin + step])

    keys.write(file, purpose, write)  # type: ignore[arg-type]
    return file.getvalue()


def unsealed(file: bytes, purpose: str | None = "a test", keys: KeyFile = KEYS) -> bytes:
    with keys.opened(io.BytesIO(file), purpose) as opened:
        return opened.read()


FILE = sealed(content_of(3 * PIECE + 7))
SIZES = [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, 3 * PIECE + 7]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("step", [1 << 30, PIECE, PIECE - 3, 100_003])
def test_it_is_read_as_it_was_written(nbytes: int, step: int) -> None:
    content = content_of(nbytes)
    assert unsealed(sealed(content, step=step)) == content


@given(st.lists(st.tuples(st.integers(0, 3 * PIECE + 20), st.integers(0, 2 * PIECE)), max_size=5))
def test_it_is_read_at_any_place(reads: list[tuple[int, int]]) -> None:
    """As archives are."""
    content = content_of(3 * PIECE + 7)
    with KEYS.opened(io.BytesIO(FILE)) as opened:
        for place, nbytes in reads:
            assert opened.seek(place) == place
            assert opened.read(nbytes) == content[place : place + nbytes]
        assert opened.seek(-5, io.SEEK_END) == len(content) - 5
        assert opened.read() == content[-5:]


def test_the_format_is_what_the_module_says() -> None:
    """Opened by hand: HKDF from its definition, and AES-GCM piece by piece."""
    file = io.BytesIO(FILE)
    assert file.read(20) == b"ringreduce sealed 1\n"
    assert file.read(8).decode() == Secret(RAW).fingerprint
    salt = file.read(32)
    purpose = file.read(int.from_bytes(file.read(2), "big"))
    extracted = hmac.new(salt, RAW, hashlib.sha256).digest()
    cipher = AESGCM(hmac.new(extracted, b"file: " + purpose + b"\x01", hashlib.sha256).digest())
    pieces = [
        cipher.decrypt(number.to_bytes(11, "big") + bytes([number == 3]), file.read(PIECE + 16), None)
        for number in range(4)
    ]
    assert b"".join(pieces) == content_of(3 * PIECE + 7)
    assert file.read() == b""


def test_files_of_equal_content_differ_and_hide_it() -> None:
    first, second = sealed(KNOWN), sealed(KNOWN)
    assert first[-len(KNOWN) :] != second[-len(KNOWN) :]
    assert KNOWN not in first
    assert RAW not in first


def changed_files() -> Iterator[tuple[str, bytes]]:
    """Yield what others could make of the file, and how."""
    head = len(FILE) - (3 * PIECE + 7) - 4 * 16
    whole = PIECE + 16
    pieces = [FILE[begin : begin + whole] for begin in range(head, len(FILE), whole)]
    for place in (21, 30, 62, 63, head - 1, head, head + PIECE, head + whole, len(FILE) - 20, len(FILE) - 1):
        yield f"byte {place} of {len(FILE)}", FILE[:place] + bytes([FILE[place] ^ 1]) + FILE[place + 1 :]
    for length in (25, 50, 61, 63, head - 1, head, head + 10, head + whole, head + 3 * whole, len(FILE) - 1):
        yield f"cut to {length}", FILE[:length]
    yield "longer", FILE + b"\0"
    yield "repeated", FILE[:head] + b"".join([pieces[0], *pieces])
    yield "repeated last", FILE + pieces[-1]
    yield "left out", FILE[:head] + b"".join(pieces[1:])
    yield "swapped", FILE[:head] + b"".join([pieces[1], pieces[0], *pieces[2:]])
    yield "of another file", FILE[:head] + sealed(content_of(3 * PIECE + 7))[head : head + whole] + b"".join(pieces[1:])


@pytest.mark.parametrize("file", [pytest.param(file, id=how) for how, file in changed_files()])
def test_what_was_changed_is_not_read(file: bytes) -> None:
    with pytest.raises(
        ValueError, match=r"it was changed, cut, or put in the place|it was cut|sealed by the key|and not"
    ):
        unsealed(file)


@given(st.binary(max_size=2000))
def test_what_begins_like_a_sealed_file_is_refused(rest: bytes) -> None:
    with pytest.raises(ValueError, match=r"it was c|sealed by the key|and not"):
        unsealed(b"ringreduce sealed 1\n" + Secret(RAW).fingerprint.encode() + rest)


def test_a_file_in_the_place_of_another_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"it is commit 3, and not commit 4"):
        unsealed(sealed(KNOWN, "commit 3"), "commit 4")
    renamed = sealed(KNOWN, "commit 3").replace(b"commit 3", b"commit 4")
    with pytest.raises(ValueError, match=r"it was changed"):
        unsealed(renamed, "commit 4")


def test_keys_that_do_not_fit_are_named() -> None:
    mine, others = Secret(RAW).fingerprint, Secret(bytes(32)).fingerprint
    with pytest.raises(ConfigError, match=rf"sealed by the key {others}, and that of KEY is {mine}"):
        unsealed(sealed(KNOWN, keys=OTHER))
    with pytest.raises(ConfigError, match=rf"sealed by the key {mine}: name the file of that key in {DISK_VARIABLE}"):
        unsealed(sealed(KNOWN), keys=PLAIN)
    with pytest.raises(ConfigError, match=r"it is not sealed, and KEY is set"):
        unsealed(KNOWN)
    assert unsealed(KNOWN, keys=PLAIN) == KNOWN


# ---- commits ----


def store_in(folder: Path, keys: KeyFile) -> CommitStore:
    store = CommitStore(folder, 5, pickle.dump, pickle.load, keys)
    store.prepare()
    return store


@pytest.fixture
def commits(tmp_path: Path) -> Path:
    """Three commits, with a part of a rank, of an array that is known."""
    store = store_in(tmp_path / "commits", KEYS)
    for number in (1, 2, 3):
        for part in ("", ".rank-3"):
            store.put(number, {"weights": np.frombuffer(KNOWN * 50_000, np.uint8), "number": number}, part)
            store.settle()
    return store.folder


def test_commits_hide_what_they_hold(commits: Path) -> None:
    """The array, how it is written, and what is said of the commit."""
    files = [each.read_bytes() for each in commits.iterdir()]
    assert len(files) == 12
    for words in (KNOWN, b"weights", b"numpy", b"nbytes", RAW):
        assert not any(words in each for each in files)
    store = store_in(commits, KEYS)
    store.require_our_keys()
    assert store.examine() == store.examine(".rank-3") == {1: "", 2: "", 3: ""}
    assert store.load(3, ".rank-3")["weights"].tobytes() == KNOWN * 50_000


@pytest.mark.parametrize(("keys", "said"), [(PLAIN, "name the file of that key in"), (OTHER, "and that of KEY is")])
def test_a_missing_or_wrong_key_is_named_and_nothing_is_changed(commits: Path, keys: KeyFile, said: str) -> None:
    before = {each.name: each.read_bytes() for each in commits.iterdir()}
    store = store_in(commits, keys)
    with pytest.raises(ConfigError, match=rf"commit-000000000001\.json: .*{said}"):
        store.require_our_keys()
    assert all(said in why for why in store.examine().values())
    assert {each.name: each.read_bytes() for each in commits.iterdir()} == before


def test_plain_commits_are_refused_with_a_key(tmp_path: Path) -> None:
    """Whoever may write there could have put them there, and what they hold may be unpickled."""
    store = store_in(tmp_path / "commits", PLAIN)
    store.put(1, {})
    store.settle()
    with pytest.raises(ConfigError, match=r"it is not sealed, and KEY is set"):
        store_in(store.folder, KEYS).require_our_keys()


@pytest.mark.parametrize("suffix", ["json", "pt"])
@pytest.mark.parametrize("place", [70, 150, -1])
def test_of_a_changed_commit_the_one_before_is_used(commits: Path, suffix: str, place: int) -> None:
    path = commits / f"commit-000000000003.{suffix}"
    file = bytearray(path.read_bytes())
    file[place] ^= 4
    path.write_bytes(file)
    found = store_in(commits, KEYS).examine()
    assert found[1] == found[2] == ""
    assert found[3] != ""


def test_a_commit_in_the_place_of_another_one_is_not_used(commits: Path) -> None:
    for suffix in ("json", "pt"):
        (commits / f"commit-000000000001.{suffix}").replace(commits / f"commit-000000000003.{suffix}")
    assert store_in(commits, KEYS).examine()[3] == "it is commit-000000000001.json, and not commit-000000000003.json"


def test_a_commit_that_was_written_twice_is_not_mixed(commits: Path) -> None:
    """Neither with the whole file of the first time, which is sealed for the same name, nor with pieces of it."""
    path = commits / "commit-000000000003.pt"
    first = path.read_bytes()
    store = store_in(commits, KEYS)
    store.put(3, {"weights": np.frombuffer(KNOWN * 50_000, np.uint8), "number": 3})
    store.settle()
    second = path.read_bytes()
    assert len(first) == len(second)
    assert store.examine()[3] == ""
    head = 20 + 8 + 32 + 2 + len(path.name)
    whole = PIECE + 16
    pieces = [second[begin : begin + whole] for begin in range(head, len(second), whole)]
    assert len(pieces) == 3
    mixed = {
        "of the first time": first,
        "a piece of it": second[:head] + first[head : head + whole] + b"".join(pieces[1:]),
        "its last piece": second[:head] + b"".join(pieces[:2]) + first[head + 2 * whole :],
        "its salt": first[:head] + second[head:],
        "without the last piece": second[: head + 2 * whole],
        "without the first": second[:head] + b"".join(pieces[1:]),
        "in another order": second[:head] + b"".join([pieces[1], pieces[0], pieces[2]]),
        "with more": second + b"0",
    }
    for how, file in mixed.items():
        path.write_bytes(file)
        assert store.examine()[3] != "", how
    path.write_bytes(second)
    assert store.examine()[3] == ""


def test_nothing_is_left_in_memory_of_a_piece_that_was_changed() -> None:
    """Where it is read to, there are no bytes that somebody may have chosen."""
    changed = bytearray(FILE)
    changed[-PIECE] ^= 1
    with KEYS.opened(io.BytesIO(changed)) as opened:
        room = bytearray(b"x" * 4 * PIECE)
        opened.seek(2 * PIECE)
        with pytest.raises(ValueError, match="it was changed"):
            opened.readinto(room)  # type: ignore[attr-defined]
        assert set(room[:PIECE]) <= set(b"x\0")


# ---- commands, traces and dumps ----


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a key, which the settings name."""
    path = tmp_path / "key"
    write_secret(path)
    monkeypatch.setenv(DISK_VARIABLE, str(path))
    return path


def command(*words: object) -> Result:
    return CliRunner().invoke(main, list(map(str, words)))


def test_a_model_is_exported_sealed_and_opened(tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And as it is, on request; without the key it says so."""
    torch = pytest.importorskip("torch")
    store = CommitStore(tmp_path / "commits", 5, torch.save, torch.load, disk_keys(str(key_file)))
    store.prepare()
    store.put(7, {"objects": {"model": {"weight": torch.arange(5.0)}}, "values": {}, "size": 1})
    store.settle()
    out, opened, plain = (tmp_path / name for name in ("model.pt", "opened.pt", "plain.pt"))
    assert command("export", store.folder, out).exit_code == 0
    assert out.read_bytes().startswith(b"ringreduce sealed 1\n")
    assert command("unseal", out, opened).exit_code == 0
    assert command("export", store.folder, plain, "--plain").exit_code == 0
    for each in (opened, plain):
        assert torch.equal(torch.load(each, weights_only=True)["weight"], torch.arange(5.0))
        assert each.stat().st_mode & 0o777 == 0o600
    again = command("unseal", out, opened)
    assert (again.exit_code, "is there already" in again.output) == (2, True)
    monkeypatch.delenv(DISK_VARIABLE)
    for words in (("unseal", out, tmp_path / "other"), ("export", store.folder, tmp_path / "other")):
        done = command(*words)
        assert (done.exit_code, DISK_VARIABLE in done.output) == (2, True)
    assert not (tmp_path / "other").exists()


def test_a_changed_file_is_not_opened(tmp_path: Path, key_file: Path) -> None:
    path = tmp_path / "sealed"
    path.write_bytes(sealed(KNOWN, keys=disk_keys(str(key_file)))[:-1] + b"x")
    done = command("unseal", path, tmp_path / "out")
    assert done.exit_code == 2
    assert f"{path}: it was changed" in done.output
    assert not (tmp_path / "out").exists()


def trace_of_two(path: Path, keys: KeyFile = KEYS) -> list[Timeline]:
    return [Timeline(path, JobClock("job", 0.0), 1, rank, "host", mark_batches=False, keys=keys) for rank in (0, 1)]


def test_a_trace_is_sealed_in_its_parts_and_as_a_whole(tmp_path: Path) -> None:
    """Also of ranks that were killed, up to what they have written."""
    path = tmp_path / "trace.json"
    both = trace_of_two(path)
    for number in range(3):
        for rank, timeline in enumerate(both):
            timeline.add("i", f"secret event {number} of {rank}", at_s=float(number))
            timeline.write()
    parts = [each for each in tmp_path.glob(".trace.json.*/*") if each.name.isdigit()]
    assert len(parts) == 2
    cut = parts[1].read_bytes()[:-1]
    parts[1].chmod(0o600)
    parts[1].write_bytes(cut)  # as by a death in the midst of writing
    collect(path, KEYS)
    for file in (path, *parts):
        assert b"secret event" not in file.read_bytes()
    names = [each["name"] for each in json.loads(read_trace(path, KEYS))]
    assert [f"secret event {number} of 0" in names for number in range(3)] == [True] * 3
    assert sum(f"secret event {number} of 1" in names for number in range(3)) == 2
    for timeline in both:
        timeline.stop(2)
    with pytest.raises(ConfigError, match=r"sealed by the key"):
        read_trace(path, PLAIN)


@pytest.mark.parametrize("piece", ["changed", "of another key", "longer than the file"])
def test_a_part_that_others_wrote_to_is_an_error_or_ends(piece: str, tmp_path: Path) -> None:
    """It is an `OSError`, as all that keeps a trace from being written; a length is no reason to take memory."""
    path = tmp_path / "trace.json"
    trace = TraceFile(str(path), "job 1", 0, KEYS)
    trace.begin(b'{"name": "first"},\n')
    (part,) = tmp_path.glob(".trace.json.*/0")
    before, merged = part.read_bytes(), path.read_bytes()
    if piece == "longer than the file":
        part.write_bytes(before + (1 << 60).to_bytes(8, "big") + b"x")
        trace.merge()
        assert b'"first"' in read_trace(path, KEYS)
        return
    other = sealed(b'{"name": "other"},\n', keys=OTHER)
    part.write_bytes(before[:-1] + b"x" if piece == "changed" else before + len(other).to_bytes(8, "big") + other)
    with pytest.raises(OSError, match=rf"piece {int(piece != 'changed')} of .*: it"):
        trace.merge()
    assert path.read_bytes() == merged


@pytest.mark.parametrize(("change", "keys", "said"), [(1, KEYS, "it was changed"), (0, PLAIN, "sealed by the key ")])
def test_a_trace_that_was_changed_or_is_of_another_key_stays_as_it_is(
    change: int, keys: KeyFile, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    for timeline in trace_of_two(path):
        timeline.stop(2)
    *rest, last = path.read_bytes()
    before = bytes([*rest, last ^ change])
    path.write_bytes(before)
    with pytest.raises(ConfigError, match=rf"{said}.*name another file"):
        trace_of_two(path, keys)
    assert path.read_bytes() == before


def test_dumps_are_sealed_and_the_doctor_opens_them(
    tmp_path: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = FlightRecorder(0, 1, None, [])
    recorder.keys = disk_keys(str(key_file))
    path = recorder.dump(tmp_path / "dumps")
    assert path.read_bytes().startswith(b"ringreduce sealed 1\n")
    assert b"threads" not in path.read_bytes()
    assert command("doctor", "--dump", path.parent).output.startswith("no rank was waiting for another\n")
    monkeypatch.delenv(DISK_VARIABLE)
    done = command("doctor", "--dump", path.parent)
    assert (done.exit_code, DISK_VARIABLE in done.output) == (2, True)


FAILS_EARLY = """
import ringreduce as rr
from ringreduce.runtime.worlds import OwnWorld


def fail(world):
    world.communicator.abort(rr.TransportError("on purpose"))
    raise rr.TransportError("on purpose")


OwnWorld._use_table = fail
rr.init()
"""


def test_nothing_is_written_down_before_there_is_a_key(tmp_path: Path, key_file: Path) -> None:
    """Of a call that fails while a world begins."""
    dumps = tmp_path / "dumps"
    environ = {**os.environ, "RINGREDUCE_DUMP": str(dumps)}
    done = subprocess.run(
        [sys.executable, "-c", FAILS_EARLY], env=environ, check=False, capture_output=True, text=True, timeout=60
    )
    assert "TransportError: on purpose" in done.stderr
    assert not dumps.exists()
