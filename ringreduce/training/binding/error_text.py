"""Errors that travel as text: frameworks make errors of their own of what fails inside of their compiled programs."""

from __future__ import annotations

import re
from collections import deque

_failures: deque[tuple[int, BaseException]] = deque(maxlen=16)
_unseen: deque[BaseException] = deque(maxlen=1)
_MARK = re.compile(r"\[ringreduce error ([0-9]+)\]")


def described(error: BaseException, *, awaited: bool = True) -> str:
    """Return a text by which `original` finds the error again, if not many have come since.

    Args:
        error: the error.
        awaited: whether the program waits for what has failed. If not, it may never read the result, nor the text:
            `raise_unseen` raises the error then.
    """
    number = _failures[-1][0] + 1 if _failures else 1
    _failures.append((number, error))
    if not awaited:
        _unseen.append(error)
    return f"{type(error).__name__}: {error} [ringreduce error {number}]"


def original(text: str) -> BaseException | None:
    """Return the error that was `described` by a part of this text; None: none was."""
    found = _MARK.search(text)
    error = dict(_failures).get(int(found[1])) if found is not None else None
    if error in _unseen:
        _unseen.clear()
    return error


def error_of(error: BaseException) -> BaseException:
    """Return the error of ringreduce that made a compiled program fail; ``error`` itself, if it was another one.

    Args:
        error: that the framework raised, whose text has ours in it.
    """
    return original(str(error)) or error


def raise_unseen() -> None:
    """Raise the last error that the program did not wait for, unless it has seen it."""
    if _unseen:
        raise _unseen.popleft()
