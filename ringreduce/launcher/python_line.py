"""Command lines of Python: which program it runs by them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

_PYTHON = re.compile(r"(python|pypy)[0-9.t]*")
#: Names of standard input, where Python expects a script.
_STDIN = ("-", "/dev/stdin")
#: Options with a value: of one letter, in the same word or the next one, and by name, in the next one.
_VALUED = frozenset("WX")
_VALUED_NAMES = frozenset({"--check-hash-based-pycs"})
#: Options that end Python at once.
_ENDING = frozenset("hV?")
_ENDING_NAMES = re.compile("--(help.*|version)")


class ProgramSource(Enum):
    """Where the program comes from that Python runs."""

    SCRIPT = auto()  # a file, or a folder or an archive with a __main__.py
    MODULE = auto()
    TEXT = auto()  # of the command line
    INPUT = auto()
    NOTHING = auto()  # it prints its version, or help


#: Options of one letter that name the program; what follows are its arguments.
_LAST = {"c": ProgramSource.TEXT, "m": ProgramSource.MODULE}


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
        left = [*words[1:]]
        while left:
            word = left.pop(0)
            if word in _STDIN:
                return cls(ProgramSource.INPUT, arguments=tuple(left))
            if not word.startswith("-"):
                return cls(ProgramSource.SCRIPT, word, tuple(left))
            if word == "--":  # what follows is no option
                return cls._after_options(left)
            if word in _VALUED_NAMES:
                del left[:1]
            elif _ENDING_NAMES.fullmatch(word):
                return cls(ProgramSource.NOTHING)
            elif (found := cls._letters(word, left)) is not None:
                return found
        return cls(ProgramSource.INPUT)

    @classmethod
    def _after_options(cls, left: list[str]) -> PythonLine:
        if not left or left[0] in _STDIN:
            return cls(ProgramSource.INPUT, arguments=tuple(left[1:]))
        return cls(ProgramSource.SCRIPT, left[0], tuple(left[1:]))

    @classmethod
    def _letters(cls, word: str, left: list[str]) -> PythonLine | None:
        """Return what options of one letter in one word run, if any of them does; a value is taken from the others."""
        for place, letter in enumerate(word[1:], 2):
            if letter in _ENDING:
                return cls(ProgramSource.NOTHING)
            if letter in _VALUED or letter in _LAST:
                value = word[place:]
                if not value and left:
                    value = left.pop(0)
                return cls(_LAST[letter], value, tuple(left)) if letter in _LAST else None
        return None


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
