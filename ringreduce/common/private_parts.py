"""Parts of libraries that have no public interface: a table says whether each is there, and what is lost without it.

What touches them lies in one ``private.py`` per binding, as named functions; `doctor` reads their tables. What the
functions do with the parts is tested with each version.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringreduce.common.errors import ConfigError


class Part(NamedTuple):
    """A private part of a library that a binding touches.

    Attributes:
        name: of the function that touches it.
        is_there: returns whether the installed version has it; any error means no.
        without: what users lose where it is not, as the end of a sentence that begins with "without it".
    """

    name: str
    is_there: Callable[[], object]
    without: str


def missing(parts: Sequence[Part]) -> dict[str, str]:
    """Return the parts that are not there, by name, with what is lost without them; empty if all are.

    Local; it takes some milliseconds and changes nothing.
    """
    return {part.name: part.without for part in parts if not _is_there(part)}


def _is_there(part: Part) -> bool:
    try:
        return bool(part.is_there())
    except Exception:  # A changed library may raise anything.
        return False


def mentions(function: Callable[..., object], name: str) -> bool:
    """Return whether the code of a function has a name in it, as an attribute or as a text."""
    code = inspect.unwrap(function).__code__
    return name in code.co_names or name in code.co_consts


def lacking(library: str, version: str, part: str, instead: str) -> ConfigError:
    """Return the error for what cannot be done without a private part.

    Args:
        library: its name.
        version: the installed one.
        part: its name in the library.
        instead: what users can do, as the end of a sentence.
    """
    return ConfigError(
        f"{library} {version} has no {part}, which this needs: use a version of {library} for which `ringreduce "
        f"doctor` finds all private parts as expected, or {instead}"
    )
