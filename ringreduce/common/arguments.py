"""Arguments of calls: what counts as a number, and how a rank with wrong arguments notifies the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, Protocol, TypeVar

from ringreduce.common.errors import ConfigError

_Context = TypeVar("_Context", bound="CheckingArguments")


class _Notifier(Protocol):
    """What notifies the other ranks of a call: a `Communicator`."""

    def refuse(self, name: str, error: Exception) -> None:
        """Enter a call of this name with the reason why this rank cannot make it, so that it ends for all."""

    def rendezvous(self, text: str) -> None:
        """Return when every rank has called it with this text."""


class CheckingArguments:
    """A context in which the arguments of a call are checked, before the other ranks know of the call.

    If a check raises an error, the other ranks get it, so that they do not wait for this one. (A class, because
    `@contextmanager` would add its own frames to the recorded stack.) A subclass may notify them by other means.

    Args:
        notifier: the ranks of the call.
        name: of the call, for the other ranks.
        text: of the rendezvous once the checks have passed. None: there is none, as the call itself compares.
    """

    __slots__ = ("_name", "_notifier", "_text")

    def __init__(self, notifier: _Notifier, name: str, text: str | None = None) -> None:
        self._notifier = notifier
        self._name = name
        self._text = text

    def __enter__(self: _Context) -> _Context:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._refuse(error)
        elif error is None and self._text is not None:
            self._notifier.rendezvous(self._text)

    def _refuse(self, error: Exception) -> None:
        self._notifier.refuse(self._name, error)


def real_number(name: str, value: Any) -> float:
    """Return a factor as a float; None: 1.

    Args:
        name: of the argument, for the error.
        value: what was given; text is no number, whatever it says.

    Raises:
        ConfigError: it is no number, or too large for a float.
    """
    if type(value) is float:
        return value
    if value is None:
        return 1.0
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} must be a number that a float can hold, got {shown(value)}") from None
        except Exception as error:  # The conversion of somebody's type may raise anything.
            raise ConfigError(f"{name} must be a number, got {shown(value)}") from error
    raise ConfigError(f"{name} must be a number, got {shown(value)}")


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
    except Exception as error:  # The conversion of somebody's type may raise anything.
        raise ConfigError(f"{name} must be a whole number, got {shown(value)}") from error
    if least is not None and whole < least:
        raise ConfigError(f"{name} must be at least {least}, got {shown(whole)}")
    return whole


def array_shape(shape: Any) -> tuple[int, ...]:
    """Return the shape of a new array, given as one whole number or several, of any library.

    Raises:
        ConfigError: there are others than whole numbers, or one is negative.
    """
    try:
        dims = tuple(map(index, shape)) if isinstance(shape, Sequence) else (index(shape),)
    except TypeError:
        raise ConfigError(f"shape must be made of whole numbers, got {shape!r}") from None
    if min(dims, default=0) < 0:
        raise ConfigError(f"an array cannot have the shape {dims}")
    return dims


def shape_text(shape: Iterable[object]) -> str:
    """Return a shape as ranks compare it: ``3x5``, ``*x5`` where rows may differ, ``scalar``."""
    return "x".join(map(str, shape)) or "scalar"


def row_counts(splits: Any, rows: int, size: int) -> list[int]:
    """Return how many rows of an array go to each rank.

    Args:
        splits: rows for rank 0, 1, ..., as integers of any library; None: equal parts.
        rows: of the array.
        size: the number of ranks.

    Raises:
        ConfigError: they are no whole numbers, or do not add up to the rows; or the rows do not divide equally.
    """
    if splits is None:
        if rows % size:
            raise ConfigError(f"{rows} rows do not divide into {size} equal parts; give splits")
        return [rows // size] * size
    if not isinstance(splits, Iterable):
        raise ConfigError(f"splits must be {size} whole numbers, got {shown(splits)}")
    counts = [whole_number("each of the splits", split) for split in splits]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ConfigError(f"splits must be {size} numbers >= 0 that add up to the {rows} rows, got {counts}")
    return counts


def shown(value: object) -> str:
    """Return what an error says was given: the value, or its type if that cannot be printed."""
    try:
        return repr(value)
    except Exception:  # It is a whole number with thousands of digits, or of somebody's type.
        return f"one of type {type(value).__name__} that cannot be printed"
