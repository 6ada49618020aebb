"""Parts of libraries that have no public interface: each is checked by itself, and it is known what is lost without it.

What touches them lies in one ``private.py`` per binding, as named functions; `doctor` runs their checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringreduce.common.errors import ConfigError


class Part(NamedTuple):
    """A private part of a library that a binding touches.

    Attributes:
        name: of the function that touches it.
        works: returns whether it is as expected in the installed version; any error means no.
        without: what users lose where it is not, as the end of a sentence that begins with "without it".
    """

    name: str
    works: Callable[[], object]
    without: str


def missing(parts: Sequence[Part]) -> dict[str, str]:
    """Return the parts that are not as expected, by name, with what is lost without them; empty if all are.

    Local; it takes some milliseconds and changes nothing.
    """
    return {each.name: each.without for each in parts if not _works(each)}


def _works(part: Part) -> bool:
    try:
        return bool(part.works())
    except Exception:  # whatever a changed library makes of it
        return False


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
