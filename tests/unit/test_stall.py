"""The stall watch on a clock that the test turns."""

from __future__ import annotations

import pytest

from ringreduce.engine.coordinator import StallWatch
from ringreduce.engine.decisions import Waiting


def waiting(name: str = "x", since: float = 0.0) -> Waiting:
    return Waiting(name, since, (0,), (1,))


@pytest.mark.parametrize(
    ("warning_s", "limit_s", "times", "warned", "expired"),
    [
        (60.0, 300.0, [0, 59.9, 60, 61, 119, 120, 200, 240, 299.9], [60, 120, 240], []),
        (60.0, 300.0, [100, 150, 199, 200, 300, 301], [100, 200], [300, 301]),
        (None, 300.0, [60, 120, 299, 300], [], [300]),
        (60.0, 30.0, [29, 30, 60], [], [30, 60]),
    ],
)
def test_when_it_warns_and_gives_up(
    warning_s: float | None, limit_s: float, times: list[float], warned: list[float], expired: list[float]
) -> None:
    """It warns after the time that was set, then each time that twice as long has passed; at the limit it gives up,
    and warns no more.
    """
    watch, one = StallWatch(warning_s, limit_s), waiting()
    seen = {now: watch.check([one], now) for now in times}
    assert [now for now, (late, _) in seen.items() if late == [one]] == warned
    assert [now for now, (_, over) in seen.items() if over == [one]] == expired


def test_each_operation_has_its_own_time() -> None:
    """Also one that uses the name of an earlier one: it is not late because that one was."""
    watch = StallWatch(10.0, 100.0)
    early, late = waiting("x", 0.0), waiting("y", 5.0)
    assert watch.check([early, late], 12.0) == ([early], [])
    assert watch.check([early, late], 16.0) == ([late], [])
    again = waiting("x", 20.0)
    assert watch.check([again], 29.0) == ([], [])
    assert watch.check([again], 30.0) == ([again], [])
    assert watch.check([again, late], 105.0) == ([again], [late])


def test_what_has_come_to_an_end_is_forgotten() -> None:
    """The watch grows with what waits, not with what has waited."""
    watch = StallWatch(10.0, 100.0)
    watch.check([waiting(f"x{number}") for number in range(50)], 12.0)
    watch.check([], 13.0)
    assert not watch._next
