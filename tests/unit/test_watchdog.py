"""A job that stalls: when that is said, and what the likely cause is."""

from __future__ import annotations

import time

import pytest
from click.testing import CliRunner

import ringreduce as rr
from ringreduce.cli import main
from ringreduce.observe.job.watchdog import Watchdog
from ringreduce.observe.seen.activity import Activity, main_thread_place
from ringreduce.observe.seen.snapshots import SeenCall, SeenSet, Snapshot


class Job:
    """Two ranks under a watchdog of 10 s, with a clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.progress = [5, 5]
        self.busy: list[str | None] = [None, None]
        self.calls: list[tuple[SeenCall, ...]] = [(), ()]
        self.arrived_s = 0.0  # of rank 1, ago
        self.begun = True
        self.watchdog = Watchdog(10.0, 60.0, 2, lambda: self.now_s)

    def look(self, seconds: float, ranks: int = 2) -> str | None:
        self.now_s += seconds
        return self.watchdog.look(
            [
                Snapshot(
                    rank=rank, size=2, host="h", pid=1, time=time.time(), arrived=time.time() - self.arrived_s * rank,
                    progress=self.progress[rank], begun=self.begun, busy=self.busy[rank],
                    place=f"train.py:{rank} in load", sets=(SeenSet(0, "world", None, self.calls[rank]),),
                )
                for rank in range(ranks)
            ]
        )  # fmt: skip

    def call(self, number: int, *, ended: bool) -> tuple[SeenCall]:
        return (SeenCall(number, "allreduce", 8, 1.0, 2.0 if ended else None),)


def test_a_stall_is_said_once_and_again_after_progress() -> None:
    """Once the limit is over; any progress of any rank ends it."""
    job = Job()
    assert job.look(0.0) is None
    assert job.look(9.9) is None
    assert job.look(0.2).startswith("no rank has made a step, a collective or a report for 10 s. ")
    assert job.look(50.0) is None
    job.progress[1] += 1
    assert job.look(5.0) is None
    assert job.look(9.0) is None
    assert job.look(2.0) is not None


def test_before_the_first_step_there_is_more_time() -> None:
    """A job that imports libraries, reads data or compiles is healthy; any progress begins that time anew."""
    job = Job()
    job.begun = False
    assert job.look(0.0) is None
    assert job.look(50.0) is None
    job.progress[0] += 1
    assert job.look(50.0) is None
    assert job.look(50.0) is None
    assert "for 60 s" in job.look(11.0)


def test_a_rank_that_is_busy_keeps_the_job_alive() -> None:
    job = Job()
    job.look(0.0)
    job.busy[0] = "evaluation"
    assert job.look(100.0) is None
    job.busy[0] = None
    assert job.look(9.0) is None
    assert job.look(2.0) is not None


def test_the_cause_is_the_rank_that_does_not_come() -> None:
    """With the place where it is; if all have come or none waits, that; and first of all ranks that tell nothing."""
    job = Job()
    job.calls = [job.call(7, ended=False), job.call(6, ended=True)]
    job.look(0.0)
    assert job.look(11.0).endswith(
        "rank 1 never entered blocking call 7, allreduce of 8 B, in which rank 0 waited; "
        "rank 1 is at train.py:1 in load"
    )

    job = Job()
    job.calls = [job.call(7, ended=False), job.call(7, ended=False)]
    job.look(0.0)
    said = "ranks 0-1 were in blocking call 7, allreduce of 8 B, to which all have come: look at the network"
    assert said in job.look(11.0)

    job = Job()
    job.look(0.0)
    assert "no rank waits for another; rank 0 is at train.py:0 in load; rank 1" in job.look(11.0)

    job = Job()
    job.arrived_s = 20.0
    job.look(0.0)
    assert "rank 1 told nothing" in job.look(11.0)

    job = Job()
    job.look(0.0, ranks=1)
    assert "rank 1 told nothing" in job.look(11.0, ranks=1)


def test_a_rank_tells_what_it_is_busy_with_and_where_it_is() -> None:
    """The innermost of several; its place is in the program's own code, here this test."""
    activity = Activity()
    assert activity.now() is None
    with activity.busy("epoch end"), activity.busy("evaluation"):
        assert activity.now() == "evaluation"
    assert activity.now() is None
    assert "test_watchdog.py" in main_thread_place()


def test_busy_is_for_programs_with_and_without_a_world() -> None:
    with rr.busy("evaluation"):
        pass
    rr.init()
    with rr.busy("evaluation"):
        assert rr.rank() == 0
    rr.shutdown()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--watchdog-action", "end"], "add --watchdog SECONDS"),
        (["--watchdog", "5", "--watchdog-action", "restart"], "needs --max-restarts"),
        (["--watchdog", "5", "--watchdog-first", "0"], "a positive number of seconds"),
        (["--watchdog", "nan"], "a positive number of seconds"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], complaint: str) -> None:
    done = CliRunner().invoke(main, ["run", *options, "true"])
    assert done.exit_code == 2
    assert complaint in done.output


def test_a_watchdog_needs_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGREDUCE_WATCHDOG", "5")
    monkeypatch.setenv("RINGREDUCE_WATCHDOG_ACTION", "end")
    monkeypatch.setenv("RINGREDUCE_STATUS", "0")
    with pytest.raises(rr.ConfigError, match="RINGREDUCE_WATCHDOG reads what ranks say"):
        rr.init()
