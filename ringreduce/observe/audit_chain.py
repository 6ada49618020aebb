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

import fcntl
import hashlib
import hmac
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

from ringreduce.common.keys import Secret

_WHOLE = re.compile(rb'(\{.*), "hash": "([0-9a-f]{64})"\}', re.DOTALL)
_SIGNED = re.compile(rb'(\{.*), "signature": "([0-9a-f]{64})", "hash": "[0-9a-f]{64}"\}', re.DOTALL)
_BEGIN = b'{"line": '
_TYPES = {
    **dict.fromkeys(("before", "event", "world", "time", "host"), str),
    **dict.fromkeys(("line", "pid"), int),
    **{"ranks": list, "facts": dict},
}
_CHANGED = "it was changed, or is no line of an audit record"
_LOCK_S = 2.0
_LOCK_AGAIN_S = 0.005
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
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has an entry twice")
    return found


class Examination(NamedTuple):
    """What an audit record holds.

    Attributes:
        lines: the lines before the first wrong one that are whole, each with all its entries.
        cut: numbers of lines that were cut off, as a process was killed while it wrote.
        wrong: number of the first wrong line; None: there is none.
        reason: what is wrong with it, for people.
    """

    lines: list[RecordLine]
    cut: list[int]
    wrong: int | None = None
    reason: str = ""


def examine(data: bytes) -> Examination:
    """Return what the bytes of an audit record say, and whether they are a chain."""
    lines: list[RecordLine] = []
    cut: list[int] = []
    halves: list[bytes] = []  # since the last whole line
    *texts, rest = data.split(b"\n")
    for number, text in enumerate([*texts, rest] if rest else texts, 1):
        line = _read(text)
        if line is None:
            if not _is_half(text):
                return Examination(lines, cut, number - len(halves), _CHANGED)
            halves.append(text)
            continue
        known = _digest(b"\n".join([*halves, b""])) if halves else None
        if line.get("cut") != known:
            return Examination(lines, cut, number - len(halves), "it was changed after the next whole line was written")
        if misplaced := _misplaced(number, line, lines):
            wrong, reason = misplaced
            right = [each for each in lines if each["line"] < wrong]
            return Examination(right, [each for each in cut if each < wrong], wrong, reason)
        cut += range(number - len(halves), number)
        halves.clear()
        lines.append(line)
    end = len(texts) + bool(rest) - len(halves)
    before = lines[-1]["hash"] if lines else ""
    for number, text in enumerate(halves, end + 1):
        begin = b'{"line": %d, "before": "%s", ' % (number, before.encode())
        text = text.rstrip(b"\0")
        if not rest or text[: len(begin)] != begin[: len(text)]:
            return Examination(lines, cut, number, _CHANGED)
        cut.append(number)
    return Examination(lines, cut)


def _misplaced(number: int, line: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> tuple[int, str] | None:
    """Return which line is wrong, and why, given the next line and the ones before it; None: it belongs there."""
    last = lines[-1]["hash"] if lines else ""
    if (line["before"], line["line"]) == (last, number):
        return None
    known = {"": 0, **{each["hash"]: each["line"] for each in lines}}
    if line["hash"] in known:
        return number, f"it is line {known[line['hash']]} once more"
    if line["before"] == last:
        return number, f"it has the number {line['line']}"
    if line["before"] in known:
        return known[line["before"]] + 1, f"it was inserted: line {number} is what followed before"
    if line["line"] == number and lines:
        return lines[-1]["line"], f"it was changed after line {number} was written, or that one was changed"
    if line["line"] > number:
        return number, f"lines {number} to {line['line'] - 1} are missing before it"
    return number, "it does not belong there"


def _read(text: bytes) -> RecordLine | None:
    """Return what a line says; None: it is not as it was written."""
    found = _WHOLE.fullmatch(text)
    if found is None or _digest(found[1] + b"}") != found[2].decode():
        return None
    try:
        line = RecordLine(text)
    except (ValueError, RecursionError):
        return None
    return line if all(type(line.get(name)) is kind for name, kind in _TYPES.items()) else None


def _is_half(text: bytes) -> bool:
    """Return whether a line that is not whole may be what a process has left that was killed; else it was changed."""
    text = text.rstrip(b"\0")  # which a machine leaves that stops
    if text[: len(_BEGIN)] != _BEGIN[: len(text)]:
        return False
    if _WHOLE.fullmatch(text) or ((found := _WHOLE.match(text)) and _digest(found[1] + b"}") == found[2].decode()):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return True
    return False


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def is_signed(line: RecordLine, key: Secret) -> bool:
    """Return whether somebody who has a secret has written the bytes of a line, after all lines before it."""
    found = _SIGNED.fullmatch(line.text)
    return found is not None and hmac.compare_digest(_signature(found[1] + b"}", key), found[2])


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

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Append lines.

        Args:
            entries: their entries, but for those of the chain.

        Raises:
            OSError: the file cannot be written or locked, is a link or no file, belongs to another user or others may
                read or write it, or its end was changed.
        """
        with self._locked() as file:
            for each in entries:
                _append(file, each, self.key)

    def append_new(self, entries: Sequence[Mapping[str, Any]], world: str) -> None:
        """Append those lines that say what no other line of a world says.

        Raises:
            OSError: as for `append`; or the file has no line of this world, and so is another one.
        """
        with self._locked() as file:
            texts = os.pread(file, os.fstat(file).st_size, 0).split(b"\n")
            said = {said_by(line) for text in texts if (line := _read(text)) and line["world"] == world}
            if not said:
                raise FileNotFoundError("the record of rank 0 is not there")
            for each in entries:
                if said_by(each) not in said:
                    _append(file, each, self.key)

    @contextmanager
    def _locked(self) -> Iterator[int]:
        with self._threads:
            inside = self._is_locked  # a signal handler appends, in the midst of an append
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self.path, flags, 0o600)
            try:
                found = os.fstat(file)
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(f"{self.path} is a pipe or a device, and no file")
                if found.st_uid != os.geteuid():
                    raise PermissionError(f"{self.path} belongs to user {found.st_uid}: name another file")
                if found.st_nlink > 1:
                    raise PermissionError(f"{self.path} has {found.st_nlink} names (hard links): name another file")
                if found.st_mode & 0o077:  # who may read a file may lock it, and keep this process from writing
                    raise PermissionError(
                        f"other users may read or write, and so lock {self.path}: chmod 600 {self.path}"
                    )
                if not inside:
                    self._lock(file)
                    self._is_locked = True
                yield file
            finally:
                os.close(file)
                self._is_locked = inside

    def _lock(self, file: int) -> None:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has kept {self.path} locked for {_LOCK_S:g} s") from None
                time.sleep(_LOCK_AGAIN_S)  # a lock that is waited for has no time limit
            except OSError:
                if not self._alone:
                    raise
                return
            else:
                return


def _append(file: int, entry: Mapping[str, Any], key: Secret | None) -> None:
    while True:
        nbytes = os.fstat(file).st_size
        number, before, gap, tail = _end_of(file, nbytes)
        chain = {"line": number + 1, "before": before}
        body = json.dumps({**chain, **entry, **({"cut": _digest(gap)} if gap else {})}, default=plain).encode()
        if key is not None:
            body = body[:-1] + b', "signature": "%s"}' % _signature(body, key)
        data = tail + body[:-1] + f', "hash": "{_digest(body)}"}}\n'.encode()
        if os.write(file, data) != len(data):
            raise OSError("a line was cut off, as the disk is full")
        end = os.lseek(file, 0, os.SEEK_CUR)
        if end == nbytes + len(data):
            return
        os.ftruncate(file, end - len(data))  # a signal handler has appended before this line


def _end_of(file: int, nbytes: int) -> tuple[int, str, bytes, bytes]:
    """Return where a record ends.

    Returns:
        The number of its last line, the hash of the last whole one, all bytes after that one, and what ends the last
        line before another one begins.
    """
    span = _TAIL_NBYTES
    while True:
        data = os.pread(file, span, max(nbytes - span, 0))
        tail = b"\n" if data and not data.endswith(b"\n") else b""
        texts = (data + tail).split(b"\n")[:-1]
        begin = 1 if span < nbytes else 0  # the first one may have begun before
        for place in range(len(texts) - 1, begin - 1, -1):
            line = _read(texts[place])
            halves = texts[place + 1 :]
            if line is not None:
                return line["line"] + len(halves), line["hash"], b"\n".join([*halves, b""]) if halves else b"", tail
            if not _is_half(texts[place]):
                raise OSError("its last line was changed, or it is no audit record; move it away")
        if span >= nbytes:
            return len(texts), "", b"\n".join([*texts, b""]) if texts else b"", tail
        span *= 16


def said_by(line: Mapping[str, Any]) -> str:
    """Return what a line says, equal for all ranks that say it."""
    return json.dumps([line["event"], line["facts"]], sort_keys=True)


def plain(value: Any) -> Any:
    """Return a setting as JSON says it."""
    return value.value if isinstance(value, Enum) else str(value)
