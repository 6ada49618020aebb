"""Which operations have waited for too long."""

from __future__ import annotations

from collections.abc import Iterable

from ringreduce.engine.orders import Waiting

__all__ = ["StallWatch"]


class StallWatch:
    """Decides when to warn about an operation that not all ranks submit, and when to give it up.

    Args:
        warning_s: warn about one that has waited for so long (seconds), and again whenever it has waited for twice as
            long as at its last warning. None: never.
        limit_s: give it up after so long (seconds).
    """

    def __init__(self, warning_s: float | None, limit_s: float) -> None:
        self._warning_s = warning_s
        self._limit_s = limit_s
        self._next: dict[tuple[str, float], float] = {}

    def check(self, waiting: Iterable[Waiting], now: float) -> tuple[list[Waiting], list[Waiting]]:
        """Return the operations to warn about, and those to give up.

        Args:
            waiting: all operations that wait.
            now: the time (seconds), on the clock of ``since``.
        """
        late, expired, known = [], [], {}
        for each in waiting:
            seconds = now - each.since
            key = each.name, each.since
            if seconds >= self._limit_s:
                expired.append(each)
                continue
            if self._warning_s is None:
                continue
            due = self._next.get(key, self._warning_s)
            if seconds >= due:
                late.append(each)
                due = 2 * seconds
            known[key] = due
        self._next = known
        return late, expired
