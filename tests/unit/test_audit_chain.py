"""The chain of an audit record: each kind of tampering is found, and what a killed process leaves is none."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.audit.chain import ChainedFile, examine, is_signed
from ringreduce.audit.run_record import AuditRecord
from ringreduce.common.keys import Secret
from ringreduce.testing import run_threads


def written(path: Path) -> bytes:
    """Let three worlds of two ranks write a record, as restarts do; return its bytes, of 12 lines."""
    for number in range(3):
        first, second = (AuditRecord(str(path), f"world{number}", rank) for rank in range(2))
        first.append("begin", {"size": 2, "text": 'a "quoted" text, "hash": "' + "0" * 64 + '"}\nand more'})
        second.append("data", {"own": number})
        first.append("commit", {"number": number, "sha256": {"model": "f" * 64}})
        second.end(None)
        first.end(None)
    return path.read_bytes()


with TemporaryDirectory() as folder:
    RECORD = written(Path(folder) / "audit")
LINES = RECORD.splitlines(keepends=True)
ENTRY = {name: value for name, value in json.loads(LINES[0]).items() if name not in ("line", "before", "hash")}


def hashed(body: bytes) -> bytes:
    """Return a line with the hash that is right for it, as the documentation says; ``body`` is what comes before."""
    return body + b', "hash": "' + hashlib.sha256(body + b"}").hexdigest().encode() + b'"}\n'


def rehashed(line: bytes, /, **changes: Any) -> bytes:
    """Return a line with other entries."""
    said = {**json.loads(line), **changes}
    del said["hash"]
    return hashed(json.dumps(said).encode().removesuffix(b"}"))


def test_a_record_is_a_chain_that_other_programs_can_check() -> None:
    """By a text search and SHA-256 alone."""
    before = b""
    for number, line in enumerate(LINES, 1):
        found = re.fullmatch(rb'(\{"line": (\d+), "before": "(\w*)", .*), "hash": "(\w+)"\}\n', line)
        assert (int(found[2]), found[3]) == (number, before)
        before = hashlib.sha256(found[1] + b"}").hexdigest().encode()
        assert found[4] == before
    examined = examine(RECORD)
    assert (len(LINES), examined.wrong, examined.cut) == (12, None, [])
    assert examined.lines == [json.loads(line) for line in LINES]


places = st.integers(0, len(LINES) - 1)


def changed(data: st.DataObject) -> list[bytes]:
    place = data.draw(places)
    line = bytearray(LINES[place])
    line[data.draw(st.integers(0, len(line) - 1))] ^= data.draw(st.integers(1, 255))
    return [*LINES[:place], bytes(line), *LINES[place + 1 :]]


def removed(data: st.DataObject) -> list[bytes]:
    first = data.draw(st.integers(0, len(LINES) - 2))
    return [*LINES[:first], *LINES[data.draw(st.integers(first + 1, len(LINES) - 1)) :]]


def inserted(data: st.DataObject) -> list[bytes]:
    place = data.draw(st.integers(0, len(LINES)))
    line = data.draw(st.sampled_from(LINES) | st.binary(max_size=50).map(lambda text: text.replace(b"\n", b"") + b"\n"))
    return [*LINES[:place], line, *LINES[place:]]


def moved(data: st.DataObject) -> list[bytes]:
    return data.draw(st.permutations(LINES).filter(lambda lines: lines != LINES))


def changed_with_its_hash(data: st.DataObject) -> list[bytes]:
    place = data.draw(st.integers(0, len(LINES) - 2))
    return [*LINES[:place], rehashed(LINES[place], facts={"a": data.draw(st.integers())}), *LINES[place + 1 :]]


def inserted_with_its_hash(data: st.DataObject) -> list[bytes]:
    place = data.draw(st.integers(0, len(LINES) - 1))
    before = json.loads(LINES[place - 1])["hash"] if place else ""
    line = rehashed(data.draw(st.sampled_from(LINES)), line=place + 1, before=before, facts={"a": 1})
    return [*LINES[:place], line, *LINES[place:]]


@pytest.mark.parametrize(
    "tamper",
    [changed, removed, inserted, moved, changed_with_its_hash, inserted_with_its_hash],
    ids=lambda each: each.__name__,
)
def test_the_first_wrong_line_is_named(tamper: Callable[[st.DataObject], list[bytes]]) -> None:
    """The first line in which the file differs from what was written, whatever was done to it."""

    @given(st.data())
    def check(data: st.DataObject) -> None:
        tampered = b"".join(tamper(data))
        lines, whole = (re.findall(rb"[^\n]*\n|[^\n]+", each) for each in (tampered, RECORD))
        first = next(place for place in count() if lines[place : place + 1] != whole[place : place + 1])
        found = examine(tampered)
        assert found.wrong == first + 1
        assert found.lines == [json.loads(line) for line in LINES[:first]]

    check()


@given(st.integers(0, len(RECORD)))
def test_a_truncated_record_is_what_a_killed_process_leaves(nbytes: int) -> None:
    """That is nothing to find without a signature; a line that was cut off is named, and those before it are there."""
    found = examine(RECORD[:nbytes])
    end = RECORD[:nbytes].rpartition(b"\n")[2]
    is_cut = bool(end) and end + b"\n" not in LINES
    assert (found.wrong, found.cut) == (None, [len(found.lines) + 1] if is_cut else [])
    assert found.lines == [json.loads(line) for line in LINES[: len(found.lines)]]
    assert len(found.lines) == RECORD[:nbytes].count(b"\n") + (bool(end) and not is_cut)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=3), st.integers(0, 2))
def test_a_process_goes_on_after_half_a_line(cuts: list[int], zeros: int) -> None:
    """After any number of them, and zeros of a machine that stopped; they are named, and cannot be changed later."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "audit"
        path.touch(0o600)
        path.write_bytes(b"".join(LINES[:3]))
        record = AuditRecord(str(path), "world")
        for length in cuts:
            whole = path.read_bytes()
            record.append("mine", {"text": "x" * 100})
            added = path.read_bytes()[len(whole) :]
            path.write_bytes(whole + added[: min(length, len(added) - 2)] + b"\0" * zeros)
        record.append("last", {})
        data = path.read_bytes()
    found = examine(data)
    assert found.wrong is None
    lines = data.splitlines(keepends=True)
    assert sorted([*found.cut, *(each["line"] for each in found.lines)]) == list(range(1, len(lines) + 1))
    assert found.lines[:3] == [json.loads(line) for line in LINES[:3]]
    assert found.lines[-1]["event"] == "last"
    for number in found.cut:
        tampered = [*lines[: number - 1], b"{" + lines[number - 1], *lines[number:]]
        assert examine(b"".join(tampered)).wrong in found.cut
        assert examine(b"".join(lines[: number - 1] + lines[number:])).wrong is not None


@given(st.binary(max_size=200), st.integers(0, len(LINES)))
def test_whatever_a_file_holds_has_a_verdict(rest: bytes, nlines: int) -> None:
    """And a process goes on with what is whole; it adds nothing to what is wrong, or it stays so."""
    data = b"".join(LINES[:nlines]) + rest
    found = examine(data)
    assert found.lines == [json.loads(line) for line in LINES[: len(found.lines)]]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "audit"
        path.touch(0o600)
        path.write_bytes(data)
        try:
            ChainedFile(str(path), alone=True).append([ENTRY])
        except OSError:
            assert found.wrong is not None
            assert path.read_bytes() == data
        else:
            assert found.wrong is not None or examine(path.read_bytes()).wrong is None


def test_a_record_that_was_changed_is_not_continued(tmp_path: Path) -> None:
    """Else the change would be part of the chain."""
    path = tmp_path / "audit"
    for data in (RECORD[:-5] + b"x" + RECORD[-4:], RECORD.replace(b'"error": null', b'"error": 0'), b"a letter\n"):
        path.touch(0o600)
        path.write_bytes(data)
        with pytest.raises(OSError, match="its last line was changed, or it is no audit record"):
            ChainedFile(str(path), alone=True).append([ENTRY])
        assert path.read_bytes() == data


def test_lines_of_several_writers_are_one_chain(tmp_path: Path) -> None:
    """Each has opened the file by itself, as processes do; lines of any length."""
    path = tmp_path / "audit"

    def write(rank: int) -> None:
        record = AuditRecord(str(path), "world")
        for number in range(20):
            record.append("mine", {"of": [rank, number], "text": "x" * 20_000 * (number % 5)})

    run_threads(4, write)
    found = examine(path.read_bytes())
    assert found.wrong is None
    said = [tuple(each["facts"]["of"]) for each in found.lines]
    assert sorted(said) == [(rank, number) for rank in range(4) for number in range(20)]
    assert all([number for of, number in said if of == rank] == list(range(20)) for rank in range(4))


def test_a_signal_handler_may_append_in_the_midst_of_a_line(tmp_path: Path) -> None:
    """At each place at which Python may run one, here before each call of the system."""
    for place in count():
        path = tmp_path / f"audit{place}"
        record = AuditRecord(str(path), "world")
        record.append("first", {})
        calls = count()

        def interrupt(frame: Any, event: str, what: Any, place: int = place, record: AuditRecord = record) -> None:
            if event == "c_call" and what.__module__ == "posix" and next(calls) == place:  # noqa: B023
                sys.setprofile(None)
                record.append("of the handler", {})

        sys.setprofile(interrupt)
        record.append("outer", {})
        sys.setprofile(None)
        found = examine(path.read_bytes())
        assert found.wrong is None
        if next(calls) <= place:
            break
        assert sorted(each["event"] for each in found.lines) == ["first", "of the handler", "outer"]
    assert place > 5


# ---- signatures ----

SECRET = bytes(range(32))
KEY = Secret(SECRET)


def signed(path: Path) -> bytes:
    """Return a record of four lines, by two ranks, of which each is signed."""
    for rank in (0, 1):
        record = AuditRecord(str(path), "world", rank)
        record._file.key = KEY
        record.append("begin" if rank == 0 else "data", {"of": rank, "text": '", "signature": "'})
        record.end("no")
    return path.read_bytes()


def test_each_line_is_signed_as_the_documentation_says(tmp_path: Path) -> None:
    """By HMAC-SHA256 of its bytes before the signature, with HKDF of RFC 5869, both here by the standard library."""
    data = signed(tmp_path / "audit")
    extracted = hmac.digest(bytes(32), SECRET, "sha256")
    derived = hmac.digest(extracted, b"audit record\x01", "sha256")
    assert len(data.splitlines()) == 4
    for line in data.splitlines():
        found = re.fullmatch(rb'(\{.*), "signature": "(\w{64})", "hash": "\w{64}"\}', line)
        assert hmac.digest(derived, found[1] + b"}", "sha256").hex() == found[2].decode()
    examined = examine(data)
    assert (examined.wrong, [is_signed(line, KEY) for line in examined.lines]) == (None, [True] * 4)
    assert not any(is_signed(line, Secret(bytes(32))) for line in examined.lines)
    assert KEY.derive("audit record") == derived
    for form in (SECRET, SECRET.hex().encode(), derived, derived.hex().encode()):
        assert form not in data


@given(st.integers(0, 3), st.sampled_from(["facts", "time", "world", "ranks", "signature", "host", "event"]))
def test_who_has_no_key_cannot_make_the_chain_anew(place: int, name: str) -> None:
    """With right hashes throughout, the line that was changed and all after it are not signed; nor are new ones."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "audit"
        lines = signed(path).splitlines(keepends=True)
        changed = {"facts": {"of": 9}, "ranks": [3], "signature": "f" * 64}.get(name, "another")
        anew = [*lines[:place], rehashed(lines[place], **{name: changed})]
        for line in lines[place + 1 :]:
            anew.append(rehashed(line, before=json.loads(anew[-1])["hash"]))
        path.write_bytes(b"".join(anew))
        AuditRecord(str(path), "world").append("data", {})
        examined = examine(path.read_bytes())
    assert examined.wrong is None
    assert [is_signed(line, KEY) for line in examined.lines] == [number < place for number in range(5)]


@given(st.recursive(st.none() | st.floats() | st.text(), lambda inside: st.lists(inside), max_leaves=4))
def test_no_signature_is_taken_for_one(value: Any) -> None:
    """Whatever is in its place."""
    (line,) = examine(rehashed(LINES[0], signature=value)).lines
    assert not is_signed(line, KEY)


@pytest.mark.parametrize("inside", [b'"of": 1', b'"event": "data"'])
def test_an_entry_that_is_there_twice_is_a_wrong_line(tmp_path: Path, inside: bytes) -> None:
    """Whichever comes first, at any depth, and with hashes that are right: programs read one or the other."""
    lines = signed(tmp_path / "audit").splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if inside in line)
    name = inside.partition(b":")[0]
    lie = name + b': "a lie"'
    for twice in (lie + b", " + inside, inside + b", " + lie, inside + b", " + inside):
        changed = hashed(lines[at].replace(inside, twice, 1).rpartition(b', "hash"')[0])
        found = examine(b"".join([*lines[:at], changed]))
        assert (found.wrong, len(found.lines)) == (at + 1, at)


def test_the_bytes_are_signed_and_not_what_they_say(tmp_path: Path) -> None:
    """Other blanks, or another way to write a letter, are another line."""
    lines = signed(tmp_path / "audit").splitlines(keepends=True)
    for old, new in ((b'"facts": ', b'"facts":  '), (b'"event"', rb'"\u0065vent"')):
        last = hashed(lines[-1].replace(old, new, 1).rpartition(b', "hash"')[0])
        found = examine(b"".join([*lines[:-1], last]))
        assert found.wrong is None
        assert [is_signed(line, KEY) for line in found.lines] == [True, True, True, False]
