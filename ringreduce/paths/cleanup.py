"""Cleanup: closes every part even if one fails, and keeps host memory mapped that a GPU may still touch."""

from __future__ import annotations

import logging
from collections.abc import Callable

__all__ = ["abandon_all", "close_all", "keep_mapped"]

_log = logging.getLogger(__name__)

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


def abandon_all(*parts: Callable[[], object]) -> None:
    """Give up every part after a failure; only log errors of the device, which follow from it."""
    for part in parts:
        try:
            part()
        except Exception as error:
            _log.debug("in giving up the GPU: %s", error)
