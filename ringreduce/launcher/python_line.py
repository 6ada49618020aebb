"""Command lines of Python: which program it runs by them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from enum import Enum, auto
from getopt import GetoptError, getopt
from typing import NamedTuple

_PYTHON = re.compile(r"(python|pypy)[0-9.t]*")
#: Names of standard input, where Python expects a script.
STDIN = ("-", "/dev/stdin")
#: The word with the option of a text or a module, which ends the options: what follows are that program's arguments.
_LAST = re.compile("-[^-WX]*?([cm])")
#: All other options, as `getopt` takes them.
_LETTERS = "?bBdEhiIJOPqRsStuvVxW:X:"
_NAMES = ["help", "help-all", "help-env", "help-xoptions", "version", "check-hash-based-pycs="]
#: Options that end Python at once.
_ENDING = ("-?", "-h", "-V", "--help", "--version")


class ProgramSource(Enum):
    """Where the program comes from that Python runs."""

    SCRIPT = auto()  # a file, or a folder or an archive with a __main__.py
    MODULE = auto()
    TEXT = auto()  # of the command line
    INPUT = auto()
    NOTHING = auto()  # it prints its version, or help


class PythonLine(NamedTuple):
    """What Python runs by a command line.

    Attributes:
        source: where its program comes from.
        name: script, module or text; empty for other sources.
        arguments: those of the program.
    """

    source: ProgramSource
    name: str = ""
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, words: Sequence[str]) -> PythonLine | None:
        """Return what a command line runs, by Python's own rules for options; None: it starts no Python."""
        if not words or not _PYTHON.fullmatch(os.path.basename(words[0])):
            return None
        cut = next((place for place, word in enumerate(words) if _LAST.match(word)), len(words))
        after = words[cut:]
        try:
            options, left = getopt([*words[1:cut]], _LETTERS, _NAMES)
        except GetoptError:  # Python says what is wrong with it
            return cls(ProgramSource.NOTHING)
        if any(name.startswith(_ENDING) for name, _ in options):
            return cls(ProgramSource.NOTHING)
        if left and left[0] not in STDIN:
            return cls(ProgramSource.SCRIPT, left[0], (*left[1:], *after))
        if left or not after:
            return cls(ProgramSource.INPUT, arguments=(*left[1:], *after))
        last = _LAST.match(after[0])
        assert last is not None
        name, *arguments = filter(None, (after[0][last.end() :], *after[1:]))
        return cls(ProgramSource.TEXT if last[1] == "c" else ProgramSource.MODULE, name, tuple(arguments))


def script_of(words: Sequence[str]) -> str:
    """Return the script in a command line, of Python or of another program; empty: none is known.

    A module may run a script, as in ``python -m cProfile train.py``; of other programs than Python, this is the first
    word that is no option. It need not be a file that is there.
    """
    line = PythonLine.of(words)
    if line is None:
        return next((word for word in words[1:] if not word.startswith("-")), "")
    if line.source is ProgramSource.MODULE:
        return next((word for word in line.arguments if word.endswith(".py")), "")
    return line.name if line.source is ProgramSource.SCRIPT else ""
