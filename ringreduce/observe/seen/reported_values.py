"""Values that a program reports, such as its loss: kept without a copy, and read later by another thread."""

from __future__ import annotations

import math
import threading
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.observe.seen.snapshots import ReportedValue

_PENDING = 1000  # of a name, before they are read at once


class ReportedValues:
    """The values of this rank, by name.

    Attributes:
        count: how many were added.
    """

    def __init__(self) -> None:
        self._pending: dict[str, list[Any]] = {}
        self._read: dict[str, ReportedValue] = {}
        self._reading = threading.Lock()
        self.count = 0

    def add(self, name: str, value: Any) -> None:
        """Take a value; one in device memory is read later.

        Raises:
            ConfigError: it is no number, and no array of one element; or the name is no text.
        """
        if not isinstance(name, str):
            raise ConfigError(f"report_value takes a name and a value, got {name!r}")
        if not isinstance(value, (int, float)):
            detach = getattr(value, "detach", None)
            value = value if detach is None else detach()  # or it would keep the graph that it comes from
            if not hasattr(value, "__float__") or math.prod(getattr(value, "shape", ())) != 1:
                raise ConfigError(f"report_value({name!r}, ...) takes a number, or an array of one; got {value!r}")
        pending = self._pending.setdefault(name, [])
        pending.append(value)
        self.count += 1
        if len(pending) >= _PENDING:
            self._settle()

    def take(self) -> dict[str, ReportedValue]:
        """Return what came since this was called last, by name."""
        self._settle()
        with self._reading:
            taken = self._read
            self._read = {name: ReportedValue(0.0, 0, each.last) for name, each in taken.items()}
        return taken

    def last(self) -> dict[str, float]:
        """Return the last value of each name."""
        self._settle()
        return self.last_read()

    def last_read(self) -> dict[str, float]:
        """Return the last value of each name that was read; takes no lock, and waits for no device."""
        return {name: each.last for name, each in self._read.copy().items()}

    def _settle(self) -> None:
        with self._reading:
            for name, pending in list(self._pending.items()):
                values = [_number(each) for each in pending[: len(pending)]]
                del pending[: len(values)]
                if values:
                    total, number, _ = self._read.get(name, (0.0, 0, 0.0))
                    self._read[name] = ReportedValue(total + sum(values), number + len(values), values[-1])


def _number(value: Any) -> float:
    """Return a value as a number; NaN if it cannot be read any more, as of a graph that has not run."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except Exception:
        return math.nan
