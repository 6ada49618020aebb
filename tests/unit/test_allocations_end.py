"""When ranks are asked to stop before an allocation ends."""

from __future__ import annotations

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.allocations_end import StopBefore, end_of_allocation


def test_without_slurm_the_environment_may_state_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds since 1970; or nobody knows it. Also where there is no squeue to ask, as in a container."""
    monkeypatch.setenv("PATH", "/nowhere")
    in_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1700000000"}
    assert end_of_allocation(in_job) == 1.7e9
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


def test_the_end_is_not_asked_for_at_each_look() -> None:
    """Once it is due, only now and then: an answer may take long, and the launcher has other work meanwhile."""
    now = 940.0
    asked: list[float] = []

    def end() -> float:
        asked.append(now)
        return 1000.0

    stop = StopBefore(60.0, end, lambda: now)
    while now < 1000.0:
        assert stop.is_due()
        now += 1.0
    assert asked == [940.0, 940.0, 970.0]
