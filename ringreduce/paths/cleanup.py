"""How work on a GPU ends: all parts of it, whatever fails; and host memory that the GPU may touch stays mapped."""

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
    """Refer to memory until the process ends."""
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
    """Let go of every part after a failure, of which errors of the device are only a consequence."""
    for part in parts:
        try:
            part()
        except Exception as error:
            _log.debug("in giving up the GPU: %s", error)
