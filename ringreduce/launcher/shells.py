"""The shells between mpirun and a rank: their programs are the files of ``sh/``."""

from __future__ import annotations

import re
from importlib.resources import files

#: How lines end after which a shell takes no semicolon.
_OPEN = re.compile(r"([({&]|\b(do|then|else))\Z")


def shell(name: str) -> tuple[str, ...]:
    """Return what runs the program ``sh/NAME.sh``, whose arguments follow; processes have it as ``ringreduce-NAME``.

    mpirun starts its text itself: other hosts need not have the file. It is one line, without the comments, for people
    who read a command line in ``--verbose``, or in a list of processes.
    """
    return "sh", "-c", _in_one_line((files(__package__) / "sh" / f"{name}.sh").read_text("ascii")), f"ringreduce-{name}"


def _in_one_line(program: str) -> str:
    """Return a program of a shell in one line.

    It has comments on lines of their own alone, and no ``case`` and no text that goes over several lines.
    """
    lines = [line.strip() for line in re.sub(r"\\\n\s*", "", program).splitlines()]
    *others, last = [line for line in lines if line and not line.startswith("#")]
    return " ".join([*(line if _OPEN.search(line) else f"{line};" for line in others), last])
