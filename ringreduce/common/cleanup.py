"""Cleanup: closes every part even if one fails, and keeps host memory mapped that a GPU may still touch."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["close_all", "keep_mapped"]

#: Pinned memory that a copy or a kernel may still use: nobody waits for a device after a failure. If it were unmapped,
#: the device would go on to write into pages that the system has given to others, and addresses that are mapped anew
#: would count as pinned.
_kept: list[object] = []


def keep_mapped(memory: object) -> None:
    """Keep memory mapped until the process ends."""
    _kept.append(memory)


def close_all(*parts: Callable[[], object]) -> None:
    """Close every part, in this order, also after one that fails.

    Raises:
        Exception: the first that a part raised.
    """
    errors = []
    for part in parts:
        try:
            part()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
