"""Cleanup: closes every part even if one fails."""

from __future__ import annotations

from collections.abc import Callable


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
