"""Arguments that are numbers: what counts as one, and errors that name the argument."""

from __future__ import annotations

from operator import index
from typing import Any

from ringreduce.errors import ConfigError

__all__ = ["real_number", "whole_number"]


def real_number(name: str, value: Any) -> float:
    """Return a factor as a float; None: 1.

    Raises:
        ConfigError: it is no number.
    """
    if type(value) is float:
        return value
    if value is None:
        return 1.0
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a number, got {value!r}") from None


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """Return an integer of any library as Python's.

    Args:
        name: of the argument, for the error.
        value: what was given; a float is no whole number, as none is that was rounded without notice.
        least: the smallest that makes sense; None: any does.

    Raises:
        ConfigError: it is no whole number, or too small.
    """
    try:
        whole = index(value)
    except TypeError:
        raise ConfigError(f"{name} must be a whole number, got {value!r}") from None
    if least is not None and whole < least:
        raise ConfigError(f"{name} must be at least {least}, got {whole}")
    return whole
