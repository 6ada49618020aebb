"""The file of an audit record, whose lines are a chain: each has the hash of the line before it, and its own.

    {"line": 2, "before": "HASH", ..., "hash": "HASH"}

``hash`` is the SHA-256 of the line without its last entry: of its bytes before ``, "hash"``, and a ``}``. ``before`` is
the ``hash`` of the last whole line, and empty in the first one. ``line`` is the number of the line in the file. A
process that is killed while it writes may leave half a line; the next one has ``cut``, the SHA-256 of all bytes between
the last whole line and itself.

With a secret, each line has a signature before its hash: the HMAC-SHA256 of the line without these two entries, of its
bytes before ``, "signature"`` and a ``}``, by a key that is derived from the secret. As ``before`` is in it, it holds
for all lines before, too. Without a secret, a user who may write the file can make all hashes anew.

A line that has an entry twice, at any depth, is no line: programs do not agree on which of the two it says.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from ringreduce.common.files import is_own_file, lock_file
from ringreduce.common.keys import Secret

_WHOLE = re.compile(rb'(\{.*), "hash": "([0-9a-f]{64})"\}', re.DOTALL)
_SIGNED = re.compile(rb'(\{.*), "signature": "([0-9a-f]{64})", "hash": "[0-9a-f]{64}"\}', re.DOTALL)
_BEGIN = b'{"line": '
_TYPES: dict[str, type] = {"line": int, "pid": int, "ranks": list, "facts": dict}
_TYPES |= dict.fromkeys(("before", "event", "world", "time", "host"), str)
_LOCK_S = 2.0
_TAIL_NBYTES = 1 << 16


class RecordLine(dict[str, Any]):
    """What a whole line of an audit record says, by entry.

    Args:
        text: its bytes.

    Attributes:
        text: the argument.

    Raises:
        ValueError: it is no object of JSON, or has an entry twice.
    """

    def __init__(self, text: bytes) -> None:
        super().__init__(json.loads(text, object_pairs_hook=_each_once))
        self.text = text


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("it has an entry twice")
    return entries


class Examination(NamedTuple):
    """What an audit record holds.

    Attributes:
        lines: the lines before the first wrong one that are whole, each with all its entries.
        cut: numbers of lines that were cut off, as a process was killed while it wrote.
        wrong: number of the first wrong line: it is not as it was written, or not where. None: there is none.
    """

    lines: list[RecordLine]
    cut: list[int]
    wrong: int | None = None


def examine(data: bytes) -> Examination:
    """Return what the bytes of an audit record say, and whether they are a chain."""
    lines: list[RecordLine] = []
    cut: list[int] = []
    halves: list[bytes] = []  # since the last whole line
    *texts, rest = data.split(b"\n")
    for number, text in enumerate([*texts, rest] if rest else texts, 1):
        line = _read(text)
        if line is None and _is_half(text):
            halves.append(text)
        elif line is None or line.get("cut") != _digest_of(halves):
            return Examination(lines, cut, number - len(halves))
        elif (wrong := _misplaced(number, line, lines)) is not None:
            return Examination([each for each in lines if each["line"] < wrong], [n for n in cut if n < wrong], wrong)
        else:
            cut += range(number - len(halves), number)
            halves.clear()
            lines.append(line)
    end = len(texts) + bool(rest) - len(halves)
    before = lines[-1]["hash"] if lines else ""
    for number, text in enumerate(halves, end + 1):
        begin = b'{"line": %d, "before": "%s", ' % (number, before.encode())
        text = text.rstrip(b"\0")
        if not rest or text[: len(begin)] != begin[: len(text)]:
            return Examination(lines, cut, number)
        cut.append(number)
    return Examination(lines, cut)


def _misplaced(number: int, line: RecordLine, lines: Sequence[RecordLine]) -> int | None:
    """Return which line is the first wrong one, given the next line and the ones before it; None: it belongs there."""
    last = lines[-1]["hash"] if lines else ""
    before = line["before"]
    if before == last:
        return None if line["line"] == number else number
    known = {"": 0, **{each["hash"]: each["line"] for each in lines}}
    if line["hash"] not in known and before in known:
        return int(known[before]) + 1  # what is between has been inserted
    # Of two lines that have right numbers and do not fit, the first one was changed, and its hash with it.
    return lines[-1]["line"] if lines and line["hash"] not in known and line["line"] == number else number


def _read(text: bytes) -> RecordLine | None:
    """Return what a line says; None: it is not as it was written."""
    parts = _WHOLE.fullmatch(text)
    if parts is None or _digest(parts[1] + b"}") != parts[2].decode():
        return None
    try:
        line = RecordLine(text)
    except (ValueError, RecursionError):
        return None
    return line if all(type(line.get(name)) is kind for name, kind in _TYPES.items()) else None


def _is_half(text: bytes) -> bool:
    """Return whether a line that is not whole may be what a process has left that was killed; else it was changed."""
    text = text.rstrip(b"\0")  # which a machine leaves that stops
    parts = _WHOLE.match(text)
    if parts and (parts.end() == len(text) or _digest(parts[1] + b"}") == parts[2].decode()):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text[: len(_BEGIN)] == _BEGIN[: len(text)]
    return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(halves: Sequence[bytes]) -> str | None:
    """Return the entry ``cut`` of a line after some halves; None: it has none, as there are no halves."""
    return _digest(b"\n".join([*halves, b""])) if halves else None


def is_signed(line: RecordLine, key: Secret) -> bool:
    """Return whether somebody who has a secret has written the bytes of a line, after all lines before it."""
    parts = _SIGNED.fullmatch(line.text)
    return parts is not None and hmac.compare_digest(_signature(parts[1] + b"}", key), parts[2])


def _signature(body: bytes, key: Secret) -> bytes:
    return hmac.digest(key.derive("audit record"), body, "sha256").hex().encode()


class ChainedFile:
    """An audit record to which processes of one host append, one at a time.

    Args:
        path: path of the file; made if need be, for this user alone.
        alone: whether this process appends also where files cannot be locked, as no other one does then.

    Attributes:
        path: the argument.
        key: signs the lines; None: they are not signed.
    """

    def __init__(self, path: str, *, alone: bool) -> None:
        self.path = path
        self.key: Secret | None = None
        self._alone = alone
        self._threads = threading.RLock()
        self._is_locked = False

    def append(self, entries: Sequence[Mapping[str, Any]], new_in: str | None = None) -> None:
        """Append lines.

        Args:
            entries: their entries, but for those of the chain.
            new_in: append only what no other line of this world says; None: all.

        Raises:
            OSError: the file cannot be written or locked, is a link or no file, belongs to another user or others may
                read or write it, its end was changed, or it has no line of that world, and so is another one.
        """
        with self._locked() as file:
            recorded = set[str]()
            if new_in is not None:
                texts = os.pread(file, os.fstat(file).st_size, 0).split(b"\n")
                recorded = {_fact_text(line) for text in texts if (line := _read(text)) and line["world"] == new_in}
                if not recorded:
                    raise FileNotFoundError("the record of rank 0 is not there")
            for entry in entries:
                if not recorded or _fact_text(entry) not in recorded:
                    _append(file, entry, self.key)
                if recorded:
                    recorded.add(_fact_text(entry))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        with self._threads:
            inside = self._is_locked  # a signal handler appends, in the midst of an append
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self.path, flags, 0o600)
            try:
                status = os.fstat(file)
                if not is_own_file(status) or status.st_mode & 0o077:  # Who may read a file may lock it.
                    raise PermissionError(
                        f"{self.path} has to be a file of this user's alone (chmod 600), with one name"
                    )
                if not inside:
                    self._lock(file)
                    self._is_locked = True
                yield file
            finally:
                os.close(file)
                self._is_locked = inside

    def _lock(self, file: int) -> None:
        try:
            lock_file(file, _LOCK_S)
        except TimeoutError as error:
            raise TimeoutError(f"{self.path}: {error}") from None
        except OSError:
            if not self._alone:
                raise


def _append(file: int, entry: Mapping[str, Any], key: Secret | None) -> None:
    while True:
        nbytes = os.fstat(file).st_size
        number, before, halves, tail = _end_of(file, nbytes)
        cut = {"cut": _digest_of(halves)} if halves else {}
        body = json.dumps({"line": number + 1, "before": before, **entry, **cut}).encode()
        if key is not None:
            body = body[:-1] + b', "signature": "%s"}' % _signature(body, key)
        data = tail + body[:-1] + f', "hash": "{_digest(body)}"}}\n'.encode()
        if os.write(file, data) != len(data):
            raise OSError("a line was cut off, as the disk is full")
        end = os.lseek(file, 0, os.SEEK_CUR)
        if end == nbytes + len(data):
            return
        os.ftruncate(file, end - len(data))  # a signal handler has appended before this line


def _end_of(file: int, nbytes: int) -> tuple[int, str, list[bytes], bytes]:
    """Return where a record ends.

    Returns:
        The number of its last line, the hash of the last whole one, the halves after that one, and what ends the last
        line before another one begins.
    """
    span = _TAIL_NBYTES
    while True:
        data = os.pread(file, span, max(nbytes - span, 0))
        tail = b"\n" if data and not data.endswith(b"\n") else b""
        texts = (data + tail).split(b"\n")[:-1]
        halves: list[bytes] = []
        for text in reversed(texts[1:] if span < nbytes else texts):  # the first one may have begun before
            if (line := _read(text)) is not None:
                return line["line"] + len(halves), line["hash"], halves[::-1], tail
            if not _is_half(text):
                raise OSError("its last line was changed, or it is no audit record; move it away")
            halves.append(text)
        if span >= nbytes:
            return len(halves), "", halves[::-1], tail
        span *= 16


def _fact_text(line: Mapping[str, Any]) -> str:
    """Return what a line says, equal for all ranks that say it."""
    return json.dumps([line["event"], line["facts"]], sort_keys=True)
