"""The message of a failed job: that of the rank that failed, found in the output of all."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["KEPT_NBYTES", "Failure", "find", "find_in_files", "find_killed"]

#: So much of the end of what is written is looked at.
KEPT_NBYTES = 1 << 16

_PREFIX = re.compile(r"\[([0-9]+)\](?:<std(?:err|out)>:)? ?")
#: What a rank says that ends the job; see `ringreduce.runtime.termination`. Ranks that only notice its end say "ends:".
_ENDING = re.compile(r"ringreduce: rank ([0-9]+) of [0-9]+ .*; ending the job")
_OTHER = re.compile(r"ringreduce: |-{20,}|Abort\([0-9]+\) on node|Fatal error in |=+$|\x1e")
_TRACEBACK = "Traceback (most recent call last):"
#: Of a Python that cannot begin: the place of a syntax error, in a file that is the program, and one line on others.
_PLACE = re.compile(r'  File ".*", line [0-9]+$')
_SYNTAX = re.compile(r"(?:SyntaxError|IndentationError|TabError): ")
_NO_PROGRAM = re.compile(r"[^:]*python[^:]*: (?:can't (?:open file|find)|No module named|Error while finding) ")
_GOES_ON = re.compile(r"\s|Traceback|During handling of the above|The above exception was|$")
#: Of mpirun: the rank that it names as the first to fail.
_BLAMED = re.compile(
    r"(?:Process name: +\[[^\]]*,|MPI_ABORT was invoked on rank |due to process rank |"
    r"Abort\([0-9]+\) on node [0-9]+ \(rank )([0-9]+)"
)


_KILLED = re.compile(r"process rank ([0-9]+) with PID [0-9]+ on node \S+\s+exited on\s+signal ([0-9]+)")


class Failure(NamedTuple):
    """The rank that failed, None if that is not known, and what it said: its traceback, or one line."""

    rank: int | None
    words: str


def find(text: str) -> Failure | None:
    """Return what a rank that failed has written; None: nothing that looks like it.

    A rank that ends the job says so by ringreduce. Before `init` there is only the traceback, and mpirun may name the
    rank.

    Args:
        text: what ranks and mpirun have written, mixed line by line.
    """
    blamed = _BLAMED.search(text)
    lines = [_split(line) for line in text.splitlines()]
    for index, (_, line) in enumerate(lines):
        ending = _ENDING.match(line)
        if ending is not None:
            return Failure(int(ending[1]), _block(lines, index, traceback_at=index + 1))
    rank = None if blamed is None else int(blamed[1])
    starts = [index for index, (_, line) in enumerate(lines) if line == _TRACEBACK]
    if not starts:
        return _of_python(lines, rank)
    # A handled exception may have been logged before; the last block of the rank that is blamed counts.
    own = [index for index in starts if lines[index][0] == rank] or starts
    first = own[-1]
    while True:  # back to the beginning of a chain of exceptions
        before = [index for index in own if index < first and _reaches(lines, index, first)]
        if not before:
            break
        first = before[-1]
    return Failure(lines[first][0] if lines[first][0] is not None else rank, _block(lines, first, traceback_at=first))


def find_killed(text: str) -> tuple[int, int] | None:
    """Return the first rank that a signal has ended, and the number of that signal, as Open MPI's mpirun says it."""
    found = _KILLED.search(text)
    return None if found is None else (int(found[1]), int(found[2]))


def find_in_files(folder: Path) -> Failure | None:
    """Return what the rank that failed has written into its file ``rank-N.log``; None: there is nothing like it here.

    Args:
        folder: of the files.
    """
    found: list[tuple[bool, float, Failure]] = []
    for path in folder.glob("rank-*.log"):
        number = path.stem.removeprefix("rank-")
        failure = find(_end(path)) if number.isdigit() else None
        if failure is not None:
            ending = failure.words.startswith("ringreduce: ")
            found.append((not ending, path.stat().st_mtime, Failure(int(number), failure.words)))
    return min(found, key=lambda each: each[:2])[2] if found else None


def _end(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - KEPT_NBYTES, 0))
        return file.read().decode(errors="replace")


def _split(line: str) -> tuple[int | None, str]:
    """Return the rank in front of a line, if there is one, and the rest."""
    found = _PREFIX.match(line)
    return (None, line) if found is None else (int(found[1]), line[found.end() :])


def _block(lines: Sequence[tuple[int | None, str]], first: int, traceback_at: int) -> str:
    """Return the lines of one rank from ``first`` on, as far as they belong to it."""
    rank = lines[first][0]
    taken = [line for _, line in lines[first:traceback_at]]
    is_message = False
    for who, line in lines[traceback_at:]:
        if who != rank:
            continue
        if _OTHER.match(line) or (is_message and not _GOES_ON.match(line)):
            break
        taken.append(line)
        is_message = not _GOES_ON.match(line)  # the error itself is at the beginning of its line
    while taken and not taken[-1].strip():
        taken.pop()
    return "\n".join(taken)


def _of_python(lines: Sequence[tuple[int | None, str]], blamed: int | None) -> Failure | None:
    """Return why Python could not begin with a program; None: that was not it, as a rank said something else first."""
    for rank in dict.fromkeys(rank for rank, _ in lines):
        own = [text for other, text in lines if other == rank and text.strip()]
        last = None
        if _NO_PROGRAM.match(own[0]):
            last = 0
        elif _PLACE.match(own[0]):
            last = next((number for number, text in enumerate(own) if _SYNTAX.match(text)), None)
        if last is not None:  # ranks that mpirun does not name may have mixed their lines, which are the same
            return Failure(blamed if rank is None else rank, "\n".join(dict.fromkeys(own[: last + 1])))
    return None


def _reaches(lines: Sequence[tuple[int | None, str]], first: int, last: int) -> bool:
    """Return whether the block that begins at ``first`` has the line ``last`` in it."""
    rank = lines[first][0]
    own = [index for index in range(first, last) if lines[index][0] == rank]
    chained = ("During handling of the above", "The above exception was")
    tail = [lines[index][1] for index in own if lines[index][1].strip()]
    return bool(tail) and tail[-1].startswith(chained)
