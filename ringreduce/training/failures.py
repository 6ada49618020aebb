"""Errors that travel as text: frameworks make errors of their own of what fails inside of their compiled programs."""

from __future__ import annotations

import re
from collections import deque

_failures: deque[tuple[int, BaseException]] = deque(maxlen=16)
_MARK = re.compile(r"\[ringreduce error ([0-9]+)\]")


def described(error: BaseException) -> str:
    """Return a text by which `original` finds the error again, if not many have come since."""
    number = _failures[-1][0] + 1 if _failures else 1
    _failures.append((number, error))
    return f"{type(error).__name__}: {error} [ringreduce error {number}]"


def original(text: str) -> BaseException | None:
    """Return the error that was `described` by a part of this text; None: none was."""
    found = _MARK.search(text)
    return dict(_failures).get(int(found[1])) if found is not None else None
