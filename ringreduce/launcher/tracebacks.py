"""Tracebacks that several ranks write at about the same time are shown once, with how many ranks have written them.

What ranks write to standard error comes mixed, line by line: a line that is next in a traceback which was shown
already, and of which another copy has begun, belongs to that copy. Nothing is lost: a copy that turns out to be none is
shown when it does.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_HEAD = b"Traceback (most recent call last):\n"
#: The last line of a traceback: an exception, with or without words.
_LAST = re.compile(rb"(?!ringreduce: )[A-Za-z_][\w.]*(?:: .*)?\n")
_FAILED = re.compile(rb"ringreduce: rank ([0-9]+) of [0-9]+ failed; ")
_LINES = re.compile(rb"[^\n]*\n|[^\n]+\Z")
#: Later ones are shown, as a program may write the same traceback again and again.
_TOGETHER_S = 5.0


@dataclass(eq=False)
class _Shown:
    """A traceback that users have seen.

    Attributes:
        begun: time of its first line, in seconds of the clock.
        lines: its lines so far; those of a message that has several follow the line of the exception.
        ranks: ranks that have written it, if they are known.
        count: number of copies of it.
        last: the line of the exception; empty while it has not come.
    """

    begun: float
    lines: list[bytes]
    ranks: set[int] = field(default_factory=set)
    count: int = 1
    last: bytes = b""


@dataclass(eq=False)
class _RepeatedTraceback:
    """A copy that is not shown, as it has been the same so far.

    Attributes:
        like: tracebacks that it may be a copy of.
        lines: its lines so far.
        rank: rank that has written it; None if unknown.
        is_whole: whether the line of the exception has come; more lines of its message may follow.
    """

    like: list[_Shown]
    lines: list[bytes]
    rank: int | None
    is_whole: bool = False

    def next_like(self, line: bytes) -> list[_Shown]:
        """Return the tracebacks in which a line is the next."""
        place = len(self.lines)
        return [each for each in self.like if len(each.lines) > place and each.lines[place] == line]


class Tracebacks:
    """Leaves out tracebacks that other ranks have written a moment before.

    Args:
        ranks: number of ranks; None if unknown.
        clock: returns seconds.
    """

    def __init__(self, ranks: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._clock = clock
        self._held = b""  # the beginning of a line that may be one of a traceback
        self._shown: list[_Shown] = []
        self._growing: _Shown | None = None
        self._copies: list[_RepeatedTraceback] = []
        self._rank: int | None = None  # that has said, in the last line, that it fails

    def feed(self, chunk: bytes) -> bytes:
        """Return the lines of some output that users see."""
        lines = _LINES.findall(self._held + chunk)
        self._held = b"" if not lines or lines[-1].endswith(b"\n") else lines.pop()
        text = b"".join(map(self._pass, lines))
        if not _HEAD.startswith(self._held):
            if not self._held.startswith((b" ", b"\t")):
                self._forget_whole()
            if self._growing is None and not self._copies:  # what is held begins no line of a traceback
                text = text + self._held
                self._held = b""
        return text

    def idle(self) -> bytes:
        """Return the lines that are held, as nothing comes for a while; and a line about each copy if all have come."""
        return self._release(self._clock() - _TOGETHER_S)

    def rest(self) -> bytes:
        """Return the lines that are held, and a line about each copy, as nothing follows."""
        return self._release(math.inf)

    def _release(self, until: float) -> bytes:
        text = b"".join(b"".join(each.lines) for each in self._copies if not each.is_whole) + self._held
        self._held = b""
        self._copies = []
        self._growing = None
        over = [each for each in self._shown if each.begun < until]
        self._shown = [each for each in self._shown if each.begun >= until]
        notes = b"".join(self._note(each) for each in over if each.count > 1)
        return text + (b"\n" if notes and text and not text.endswith(b"\n") else b"") + notes

    def _note(self, shown: _Shown) -> bytes:
        which = f"{shown.count} ranks" if self._ranks is None else f"{shown.count} of {self._ranks} ranks"
        if shown.count == self._ranks:
            which = f"ranks 0-{self._ranks - 1}"
        elif len(shown.ranks) == shown.count:
            which = f"ranks {', '.join(map(str, sorted(shown.ranks)))}"
        last = shown.last.decode(errors="replace").strip()
        return f"ringreduce: {which} have written this traceback, which is shown once: {last[:200]}\n".encode()

    def _pass(self, line: bytes) -> bytes:
        rank = self._rank
        self._rank = None
        ends = _LAST.fullmatch(line) is not None
        if not line[:1].isspace():
            self._forget_whole()
        if line == _HEAD:
            return self._begin(rank)
        if failed := _FAILED.match(line):
            self._rank = int(failed[1])
            return line
        if not (ends or line[:1].isspace()):
            return line  # between those of tracebacks
        if copy := max(
            (each for each in self._copies if each.next_like(line)), key=lambda each: len(each.lines), default=None
        ):
            copy.like = copy.next_like(line)
            copy.lines.append(line)
            if ends:
                copy.is_whole = True
                copy.like[0].count += 1
                copy.like[0].ranks |= set() if copy.rank is None else {copy.rank}
            return b""
        text = line
        if self._growing is None and self._copies:  # the oldest goes on otherwise
            other = self._copies.pop(0)
            if other.is_whole:
                return line
            text = b"".join(other.lines) + line
            self._show(other.lines, other.rank)
        if self._growing is not None:
            self._growing.lines.append(line)
            if ends:
                self._growing.last = line
        return text

    def _forget_whole(self) -> None:
        """Let go of tracebacks that have ended, as the line that comes belongs to none of their messages."""
        self._copies = [each for each in self._copies if not each.is_whole]
        if self._growing is not None and self._growing.last:
            self._growing = None

    def _begin(self, rank: int | None) -> bytes:
        now = self._clock()
        most = self._ranks if self._ranks is not None else 1 << 30
        like = [each for each in self._shown if now - each.begun < _TOGETHER_S and each.count < most]
        if not like:
            if self._growing is None:  # else that is of another rank, and what follows may be of either
                self._show([_HEAD], rank)
            return _HEAD
        self._copies.append(_RepeatedTraceback(like, [_HEAD], rank))
        return b""

    def _show(self, lines: list[bytes], rank: int | None) -> None:
        self._growing = _Shown(self._clock(), [*lines], set() if rank is None else {rank})
        self._shown.append(self._growing)
