"""When ranks are asked to stop before an allocation ends."""

from __future__ import annotations

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.allocations_end import StopBefore, end_of_allocation, parse_seconds


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("90s", 90.0), ("5m", 300.0), ("1.5h", 5400.0), (" 2h ", 7200.0)]
)
def test_a_time_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    """Also fractions."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "5 m 3", "m", "5d", "1e3"])
def test_other_times_are_refused(text: str) -> None:
    """With examples of what is one."""
    with pytest.raises(ValueError, match=r"expected a time as in 90, 90s, 5m or 1\.5h"):
        parse_seconds(text)


def test_without_slurm_the_environment_may_state_the_end() -> None:
    """In seconds since 1970; or nobody knows it."""
    assert end_of_allocation({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9
    assert end_of_allocation({"SLURM_JOB_END_TIME": "soon"}) is None
    with pytest.raises(ConfigError, match="nobody says when this allocation ends"):
        StopBefore(60.0, lambda: None)


def test_it_is_time_so_long_before_the_end_that_counts_then() -> None:
    """A limit that was extended meanwhile is found when the time has come."""
    ends = [1000.0, 2000.0, 2000.0]
    times = [939.0, 941.0, 1939.0, 1940.0]
    stop = StopBefore(60.0, lambda: ends.pop(0), lambda: times[0])
    found = []
    while times:
        found.append(stop.is_due())
        times.pop(0)
    assert found == [False, False, False, True]
