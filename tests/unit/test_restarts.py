"""What the launcher of elastic jobs makes of what ranks say, and when it asks them to begin again."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.discovery import Discovery
from ringreduce.launcher.hosts import Cooldown, SizePolicy
from ringreduce.launcher.marks import Mark
from ringreduce.launcher.mpirun import Mpirun
from ringreduce.launcher.restarts import Restarts
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import Start

OnMark = Callable[[Mark], None]
Tell = Callable[[OnMark, Callable[[], None]], int]


class Jobs:
    """Stands for jobs: what happens in each is a function, which hears and looks as a job does, and returns a status.

    Args:
        tells: what happens, by job.

    Attributes:
        asked: how often ranks were asked to begin again, by job.
        started: the ranks and the variables of each job.
        now: the time.
        ended: how often a job was ended.
        killed: how often one was killed.
        takes: whether jobs take signals.
        asks_later: by job, whether it is to ask its ranks to stop once they listen.
        written: what each writes to standard error.
        logins: the command lines by which mpirun starts daemons.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *tells: Tell) -> None:
        self.asked: list[int] = []
        self.started: list[tuple[Mapping[str, int], Mapping[str, str]]] = []
        self.listed: dict[str, int] = {"a": 2}
        self.written = b""
        self.now, self.ended, self.killed = 0.0, 0, 0
        self.takes = False
        self.asks_later: list[bool] = []
        self.logins: list[list[str]] = []
        jobs, left = self, list(tells)

        class FakeJob:
            stopped = asks_later = False

            @property
            def written(self) -> bytes:
                return jobs.written

            def __init__(self, line: list[str], environment: Mapping[str, str], on_mark: OnMark, **how: object) -> None:
                self._on_mark, self._tell = on_mark, left.pop(0)
                jobs.asked.append(0)

            def wait(self, look: Callable[[], None]) -> int:
                jobs.asks_later.append(self.asks_later)
                return self._tell(self._on_mark, look)

            def logins(self) -> list[list[str]]:
                return jobs.logins

            def signal_ranks(self) -> None:
                jobs.asked[-1] += 1

            def end(self) -> None:
                jobs.ended += 1

            def kill(self) -> None:
                jobs.killed += 1

            def take(self, number: signal.Signals) -> bool:
                return jobs.takes

            def end_line(self) -> None:
                pass

        monkeypatch.setattr("ringreduce.launcher.restarts.Job", FakeJob)
        monkeypatch.setattr("time.sleep", self.wait)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def run(
        self, least: int, most: int, cooldown: Cooldown | None = None, *, grows: bool = True, **options: Any
    ) -> int:
        spec = LaunchSpec(program=("true",), elastic=True, most=most if grows else None, **options)
        started = self.started

        class Recorded(Start):
            def command(self, ranks: Mapping[str, int], more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
                started.append((dict(ranks), dict(more)))
                return [], {}

        policy = SizePolicy(least, most, cooldown)
        start = Recorded(
            spec, Mpirun("mpirun", "Open MPI", 5), policy, frozenset({"me"}), remote=True, by_ssh=True, grows=True
        )
        listed = None if spec.script else lambda: self.listed
        return Restarts(start, listed, lambda: self.now).run()


def begin(on_mark: OnMark, size: int, host: str = "a") -> None:
    for rank in range(size):
        on_mark(Mark("is connected", rank, host))


def test_ranks_are_not_asked_once_one_has_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its training is over, and so is that of the others."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        jobs.listed = {"a": 3}
        look()
        on_mark(Mark("has ended well", 0, "a"))
        look()
        return 0

    jobs = Jobs(monkeypatch, job)
    assert jobs.run(1, 3) == 0
    assert jobs.asked == [1]


def test_the_limit_of_a_job_is_never_negative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where ranks that have not heard of it have changed past it: the next job has none left."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        on_mark(Mark("has gone on", 0, "a"))
        on_mark(Mark("begins again", 0, "a"))
        return 0

    def last(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, first, last)
    assert jobs.run(1, 2, reset_limit=1) == 0
    assert [more["RINGREDUCE_RESET_LIMIT"] for _, more in jobs.started] == ["1", "0"]


def test_a_crash_at_the_end_of_a_job_that_begins_again_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host has all its slots in the next job, though without a cooldown a death is for ever."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        jobs.listed = {"a": 3}
        look()
        on_mark(Mark("begins again", 0, "a"))
        on_mark(Mark("has died", 1, "a"))
        return 1

    def last(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, first, last)
    assert jobs.run(2, 3) == 0
    assert [ranks for ranks, _ in jobs.started] == [{"a": 2}, {"a": 3}]


def test_a_job_without_a_start_has_failed_though_a_rank_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 ended well before `init`, which rank 0 noticed, ended, and told first; mpirun says 0 of both."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has died", 0, "a"))
        on_mark(Mark("has ended well", 1, "a"))
        return 0

    jobs = Jobs(monkeypatch, job)
    assert jobs.run(1, 2) == 1
    assert jobs.ended == 1


@pytest.mark.parametrize("why", ["agreed", "warned", "due"])
def test_no_job_begins_where_one_has_failed_that_was_to_stop(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Whoever asked: its ranks agreed, or this process was warned and they listen, or the allocation ends."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        if why == "agreed":
            on_mark(Mark("agrees to stop", 0, "a"))
        elif why == "warned":
            on_mark(Mark("has a commit", 0, "a"))
            os.kill(os.getpid(), signal.SIGUSR1)
        on_mark(Mark("has died", 1, "a"))
        return 1

    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    jobs = Jobs(monkeypatch, job)
    jobs.takes = True
    due = {"stop_before_s": 60.0} if why == "due" else {}
    assert jobs.run(1, 2, restarts=1, **due) == os.EX_TEMPFAIL
    assert len(jobs.started) == 1


def test_the_job_after_one_that_failed_when_it_was_warned_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nobody knows whether SIGUSR1 was to stop it: it had made no commit, and its ranks had not agreed."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        os.kill(os.getpid(), signal.SIGUSR1)
        return 1

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, first, second)
    jobs.takes = True
    assert jobs.run(1, 2, restarts=1) == 0
    assert jobs.asks_later == [False, True]


def test_hosts_that_count_as_failing_are_named_where_slots_are_too_few(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With how long they do, as the job waits and when it gives up."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        on_mark(Mark("has died", 1, "a"))
        return 1

    jobs = Jobs(monkeypatch, job)
    with pytest.raises(ConfigError, match=r"0 slots .*; a counts as failing for another 9. s; add hosts"):
        jobs.run(2, 2, Cooldown(100, 100), restarts=1, start_timeout_s=5.0)
    assert "waiting for 2 slots; 0 can be used; a counts as failing for another 98 s" in capsys.readouterr().err


def test_users_hear_once_that_no_rank_listens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 s after the first request, unless a death has withdrawn that."""
    said: list[bool] = []

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        jobs.listed = {"a": 3}
        for seconds in (0.0, 29.0, 1.0, 1.0):
            jobs.wait(seconds)
            if len(said) == 2:
                on_mark(Mark("has gone on", 0, "a"))
            look()
            said.append("no rank has begun again" in capsys.readouterr().err)
        for _ in range(40):
            jobs.wait(1.0)
            look()
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, job)
    assert jobs.run(1, 3) == 0
    assert said == [False] * 4
    assert capsys.readouterr().err.count("no rank has begun again 30 s after they were asked to") == 1


@pytest.mark.parametrize("went_on", [True, False])
def test_ranks_that_go_on_while_others_begin_again_are_ended(monkeypatch: pytest.MonkeyPatch, went_on: bool) -> None:
    """A death splits them: those that have said so know that all is on disk, and the next job begins with that."""

    def splitting(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        on_mark(Mark("begins again", 0, "a"))
        if went_on:
            on_mark(Mark("has gone on", 0, "a"))
        else:
            look()
            assert jobs.ended == 0
            jobs.now += 31
        look()
        assert jobs.ended == 1
        return 143

    def ending(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        look()
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, splitting, ending)
    assert jobs.run(1, 2) == 0
    assert len(jobs.started) == 2
    assert jobs.ended == 1


@pytest.mark.parametrize("other", ["a", "me"])
def test_a_silent_host_is_lost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: str) -> None:
    """The job is killed, and begins again from its commit on the other, this one or not; no restart is spent."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2, other)
        on_mark(Mark("has a commit", 0, other))
        on_mark(Mark("lives", 1, "b"))
        while not jobs.killed:
            on_mark(Mark("lives", 0, other))
            look()
            look()  # less than a second later
            jobs.now += 1.0
        return 137

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, other))
        return 0

    jobs = Jobs(monkeypatch, first, second)
    jobs.listed = {other: 1, "b": 1}
    assert jobs.run(1, 2) == 0
    assert [ranks for ranks, _ in jobs.started] == [{other: 1, "b": 1}, {other: 1}]
    assert (jobs.killed, jobs.now) == (1, 11.0)
    said = capsys.readouterr().err
    assert "b is lost: it has said nothing for 10 s; it is used again once it answers" in said
    assert "begins again from its last commit, without b" in said


def test_a_host_whose_speaker_has_ended_is_not_expected_to_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rank has died, or has ended well; nor is one that never spoke."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 3)
        on_mark(Mark("lives", 0, "a"))
        on_mark(Mark("lives", 1, "b"))
        on_mark(Mark("has died", 1, "b"))
        on_mark(Mark("has ended well", 0, "a"))
        for _ in range(30):
            look()
            jobs.now += 1.0
        return 0

    jobs = Jobs(monkeypatch, job)
    jobs.listed = {"a": 1, "b": 1, "c": 1}
    assert jobs.run(1, 3) == 0
    assert jobs.killed == 0


def test_a_lost_host_without_a_commit_spends_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to go on from: the job ends, unless it may be started again."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        on_mark(Mark("lives", 1, "b"))
        while not jobs.killed:
            on_mark(Mark("lives", 0, "a"))
            look()
            jobs.now += 1.0
        return 137

    jobs = Jobs(monkeypatch, job)
    jobs.listed = {"a": 1, "b": 1}
    assert jobs.run(1, 2) == 137


@pytest.mark.parametrize("has_commit", [True, False])
def test_a_lost_daemon_spends_no_restart_where_there_is_a_commit(
    monkeypatch: pytest.MonkeyPatch, has_commit: bool
) -> None:
    """All hosts are used again; mpirun's status says that it has lost one."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        if has_commit:
            on_mark(Mark("has a commit", 0, "a"))
        return 255

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, first, second)
    assert jobs.run(1, 2) == (0 if has_commit else 255)
    assert [ranks for ranks, _ in jobs.started] == [{"a": 2}] * (2 if has_commit else 1)


@pytest.mark.parametrize("come", [0, 2])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_begins_without_a_host_that_is_down(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], come: int, restarts: int
) -> None:
    """It spends no restart as long as no rank has begun; after that and before a commit it does, or the job ends, and
    nobody is told that the host is used again.
    """

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, come)
        jobs.written = b"prterun: daemon failed to report back\n  Local host:    a\n  Remote host:   b\n"
        return 255

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        jobs.written = b""
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, first, second)
    jobs.listed = {"a": 1, "b": 1}
    goes_on = come == 0 or restarts == 1
    assert jobs.run(1, 2, restarts=restarts) == (0 if goes_on else 255)
    assert [ranks for ranks, _ in jobs.started] == [{"a": 1, "b": 1}, {"a": 1}][: 1 + goes_on]
    said = capfd.readouterr().err
    assert ("b is lost: mpirun has no connection to it; it is used again once it answers" in said) == goes_on
    assert ("b is lost: mpirun has no connection to it; the job ends" in said) != goes_on
    assert ("the job begins without b" in said) == (come == 0)


def test_restarts_wait_and_come_back_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 2 and 4 seconds; a job that has written a commit gives all of them back, and the first wait is short again."""
    begun: list[float] = []

    def failing(on_mark: OnMark, look: Callable[[], None]) -> int:
        begun.append(jobs.now)
        return 1

    def working(on_mark: OnMark, look: Callable[[], None]) -> int:
        begun.append(jobs.now)
        on_mark(Mark("has a commit", 0, "a"))
        return 1

    jobs = Jobs(monkeypatch, failing, failing, failing, working, failing, failing, failing)
    assert jobs.run(1, 2, restarts=3) == 1
    assert begun == [0.0, 1.0, 3.0, 7.0, 8.0, 10.0, 14.0]


def test_a_script_is_asked_again_before_a_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it says after the pause counts: its last answer, from before that, names a host that is gone."""
    listed = tmp_path / "listed"
    listed.write_text("a:1\nb:1\n")
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)

    def failing(on_mark: OnMark, look: Callable[[], None]) -> int:
        return 1

    def ending(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    sleep = time.sleep

    def wait(seconds: float) -> None:
        if not jobs.started:
            sleep(seconds)  # until the thread has the first answer
            return
        jobs.wait(seconds)
        listed.write_text("a:1\nc:1\n")

    monkeypatch.setattr(Discovery, "ask_for_ever", Discovery.ask)  # in place of every second
    jobs = Jobs(monkeypatch, failing, ending)
    monkeypatch.setattr("time.sleep", wait)
    assert jobs.run(2, 2, restarts=1, script=str(script)) == 0
    assert [ranks for ranks, _ in jobs.started] == [{"a": 1, "b": 1}, {"a": 1, "c": 1}]


def test_a_lost_host_may_be_unlisted_or_call_itself_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script drops it, or addresses are listed: the job begins again without it."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        on_mark(Mark("has a commit", 0, "one"))
        on_mark(Mark("lives", 1, "two"))
        jobs.listed = {"10.0.0.1": 1}
        while not jobs.killed:
            on_mark(Mark("lives", 0, "one"))
            look()
            jobs.now += 1.0
        return 137

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "one"))
        return 0

    jobs = Jobs(monkeypatch, first, second)
    jobs.listed = {"10.0.0.1": 1, "10.0.0.2": 1}
    assert jobs.run(1, 2) == 0
    assert [ranks for ranks, _ in jobs.started] == [{"10.0.0.1": 1, "10.0.0.2": 1}, {"10.0.0.1": 1}]


def test_a_commit_counts_after_a_new_start_on_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that is lost before the second job has written one ends nothing: that of the first is on disk."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 1)
        on_mark(Mark("has a commit", 0, "a"))
        on_mark(Mark("begins again", 0, "a"))
        return 0

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("lives", 1, "b"))
        while not jobs.killed:
            on_mark(Mark("lives", 0, "a"))
            look()
            jobs.now += 1.0
        return 137

    def third(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, first, second, third)
    jobs.listed = {"a": 1, "b": 1}
    assert jobs.run(1, 2) == 0
    assert [ranks for ranks, _ in jobs.started][-1] == {"a": 1}


@pytest.mark.parametrize(
    "said",
    [
        "PRTE has lost communication with a remote daemon.\n  Remote daemon: [prterun-me-7@0,2] on node me\n",
        "Remote host: me\nringreduce: what mpirun has started on b is lost\n",
    ],
)
def test_a_lost_host_that_mpirun_calls_otherwise(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """As it does where hosts are parts of one machine: it is known by its daemon's number, or by the agent."""

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        jobs.written = b""
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, losing, second)
    jobs.listed = {"a": 1, "b": 1}
    jobs.written = said.encode()
    assert jobs.run(1, 2) == 0
    assert [ranks for ranks, _ in jobs.started] == [{"a": 1, "b": 1}, {"a": 1}]


@pytest.mark.parametrize(
    ("listed", "node", "lost"),
    [
        pytest.param(["127.0.0.2", "10.0.0.2"], "two", [], id="of no host"),
        pytest.param(["127.0.0.2", "10.0.0.2"], "me", ["10.0.0.2"], id="of several, one of which is mpirun's"),
        pytest.param(["a", "b"], "a-and-b", ["a"], id="of several elsewhere"),
    ],
)
def test_the_number_of_a_daemon_counts_where_its_name_is_that_of_several_hosts(
    monkeypatch: pytest.MonkeyPatch, listed: list[str], node: str, lost: list[str]
) -> None:
    """Daemon 1 is that of the first host but mpirun's own, which may be listed by an address of this machine."""

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        for rank in range(2):
            on_mark(Mark("has come", rank, "a-and-b"))
        begin(on_mark, 2, "a-and-b")
        on_mark(Mark("has a commit", 0, "a-and-b"))
        return 1

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        jobs.written = b""
        on_mark(Mark("has ended well", 0, "a-and-b"))
        return 0

    jobs = Jobs(monkeypatch, first, second)
    jobs.listed = dict.fromkeys(listed, 1)
    said = "PRTE has lost communication with a remote daemon.\n  Remote daemon: [prterun-me-7@0,1] on node"
    jobs.written = f"{said} {node}\n".encode()
    assert jobs.run(1, 2) == 0
    assert [[*ranks] for ranks, _ in jobs.started] == [listed, [host for host in listed if host not in lost]]


def test_what_a_rank_writes_of_ssh_is_no_lost_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has ended well stays so."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, job)
    jobs.written = b"ssh: connect to host example.org port 22: Connection refused\nRemote host: x\n"
    assert jobs.run(1, 2, restarts=1) == 0
    assert len(jobs.started) == 1


@pytest.mark.parametrize("grows", [True, False])
def test_ranks_that_have_died_are_replaced_where_the_job_may_grow(monkeypatch: pytest.MonkeyPatch, grows: bool) -> None:
    """On slots of other hosts; a job that is just elastic goes on with those that live."""

    def job(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        on_mark(Mark("has a commit", 0, "a"))
        on_mark(Mark("has died", 1, "a"))
        look()
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, job)
    jobs.listed = {"a": 2, "b": 2}
    assert jobs.run(1, 2, grows=grows) == 0
    assert jobs.asked == [int(grows)]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, os.EX_TEMPFAIL), (signal.SIGUSR2, 0)],
)
@pytest.mark.parametrize("waits", [False, True])
def test_a_signal_between_two_jobs_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int, waits: bool
) -> None:
    """In the pause after a failure, or while slots are too few; SIGUSR1 as a stop. SIGUSR2 is for ranks alone."""

    def failing(on_mark: OnMark, look: Callable[[], None]) -> int:
        begin(on_mark, 2)
        if waits:
            jobs.listed = {}
            jobs.now += 100.0  # there is no pause left
        return 1

    def well(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    def wait(seconds: float) -> None:
        jobs.now += seconds
        if jobs.now > (102.0 if waits else 0.5) and not jobs.listed.get("b"):
            jobs.listed = {"a": 2, "b": 1}
            signal.raise_signal(number)

    jobs = Jobs(monkeypatch, failing, well)
    monkeypatch.setattr("time.sleep", wait)
    before = signal.getsignal(number)
    assert jobs.run(2, 2, restarts=1) == status
    assert len(jobs.started) == (2 if number == signal.SIGUSR2 else 1)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("heard", "silent"),
    [
        pytest.param([(0, "a")], [(1, "b")], id="all"),
        pytest.param([(0, "me")], [(1, "b")], id="this host too"),
        pytest.param([(0, "me")], [(2, "c")], id="this host and another, one is heard"),
    ],
)
def test_no_host_is_lost_while_words_do_not_come(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    heard: list[tuple[int, str]],
    silent: list[tuple[int, str]],
) -> None:
    """Nor as they come again, those of one host before those of another, which users hear once; later one is."""
    others = [(1, "b")] if silent != [(1, "b")] else []

    def first(on_mark: OnMark, look: Callable[[], None]) -> int:
        def seconds(count: int, *speaking: tuple[int, str]) -> None:
            for _ in range(count):
                for rank, host in speaking:
                    on_mark(Mark("lives", rank, host))
                look()
                jobs.now += 1.0

        begin(on_mark, len(jobs.listed), heard[0][1])
        on_mark(Mark("has a commit", *heard[0]))
        for _ in range(2):
            seconds(3, *heard, *silent, *others)
            seconds(30, *others)
            seconds(9, *heard, *others)
        seconds(1, *silent)
        assert jobs.killed == 0
        seconds(11, *heard, *others)
        assert jobs.killed == 1
        return 137

    def second(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", *heard[0]))
        return 0

    jobs = Jobs(monkeypatch, first, second)
    jobs.listed = {host: 1 for _, host in sorted(heard + others + silent)}
    assert jobs.run(1, 3) == 0
    left = {host: 1 for _, host in heard + others}
    assert [ranks for ranks, _ in jobs.started] == [jobs.listed, left]
    who = "this host" if heard[0][1] == "me" else "every host"
    assert (
        capsys.readouterr().err.count(
            f"{who} has said nothing for 10 s: mpirun or its output is stopped; no host counts as lost\n"
        )
        == 1
    )


def make_ssh(monkeypatch: pytest.MonkeyPatch, folder: Path, then: str) -> Path:
    """Put a program ssh on the path that opens a pipe, writes its arguments there, and goes on as given."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    program = folder / "ssh"
    program.write_text(f'#!/bin/sh\nexec 3>"{pipe}"\necho "$*" >&3\n{then}\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return pipe


def losing(on_mark: OnMark, look: Callable[[], None]) -> int:
    """End as a job does whose mpirun says that it has lost a host."""
    begin(on_mark, 2)
    on_mark(Mark("has a commit", 0, "a"))
    return 1


def test_a_lost_host_is_asked_while_a_job_waits_for_slots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And is used once it answers; when it is lost again, the job begins again once others are there."""
    pipe = make_ssh(monkeypatch, tmp_path, "exit 0")
    said: list[str] = []

    def wait(seconds: float) -> None:
        jobs.wait(seconds)
        if not said and jobs.now > 2.0:
            said.append(pipe.read_text())

    def losing_again(on_mark: OnMark, look: Callable[[], None]) -> int:
        jobs.listed = {"a": 1, "b": 1, "c": 1}
        return losing(on_mark, look)

    def ending(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    jobs = Jobs(monkeypatch, losing, losing_again, ending)
    jobs.listed = {"a": 1, "b": 1}
    jobs.written = b"Remote host: b\n"
    monkeypatch.setattr("time.sleep", wait)
    assert jobs.run(2, 2, start_timeout_s=1e5) == 0
    assert [ranks for ranks, _ in jobs.started] == [{"a": 1, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "c": 1}]
    assert said[0].endswith(" b true\n")
    text = capsys.readouterr().err
    assert "waiting for 2 slots; 1 can be used; b is lost\n" in text
    assert "b answers again\n" in text
    assert "b is lost: mpirun has no connection to it; it is left out from now on\n" in text


def test_what_asks_a_lost_host_ends_with_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though the login there hangs, and SIGTERM does not help; the host is named where slots were too few."""
    pipe = make_ssh(monkeypatch, tmp_path, "trap '' TERM; exec sleep 200")
    opened: list[TextIO] = []

    def wait(seconds: float) -> None:
        jobs.wait(seconds)
        if not opened:
            opened.append(pipe.open())
            opened[0].readline()  # it has begun

    jobs = Jobs(monkeypatch, losing)
    jobs.listed = {"a": 1, "b": 1}
    jobs.written = b"Remote host: b\n"
    monkeypatch.setattr("time.sleep", wait)
    with pytest.raises(ConfigError, match=r"1 slots .*; b is lost; add hosts"):
        jobs.run(2, 2, start_timeout_s=5.0)
    with opened[0] as said:
        assert said.read() == ""  # once nobody holds the other end


def test_ranks_that_do_not_come_to_their_hosts_end_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And of these hosts the one is lost whose login does not answer."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text("#!/bin/sh\ncase $* in *' b true') exit 1;; esac\n")
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def coming(on_mark: OnMark, look: Callable[[], None]) -> int:
        for rank in range(2):
            on_mark(Mark("has come", rank, "a"))
        jobs.now += 4.9
        look()
        assert jobs.ended == 0
        jobs.now += 0.1
        look()
        look()
        return 1

    jobs = Jobs(monkeypatch, coming)
    jobs.listed = {"a": 1, "b": 1, "c": 1}
    assert jobs.run(3, 3, grows=False, start_timeout_s=5.0) == 1
    assert jobs.ended == 1
    text = capsys.readouterr().err
    assert "rank 2 of 3 did not come to their hosts within 5 s (--start-timeout); the job is ended\n" in text
    assert "b is lost: its login by ssh does not answer within 10 s; the job ends" in text
    assert "c is lost" not in text


def test_a_host_that_cannot_connect_back_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is named; others that can, and one that does not answer, are not. No job ends where a rank has come."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(
        '#!/bin/sh\ncase $* in *" d "*) exit 255;; esac\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    listening, bound = socket.create_server(("127.0.0.1", 0)), socket.socket()
    bound.bind(("127.0.0.1", 0))  # nothing can connect to it

    def login(host: str, port: int) -> list[str]:
        return [
            "ssh",
            "-x",
            host,
            f'prted --prtemca prte_hnp_uri "prterun-a-7@0.0;tcp://127.0.0.1,127.0.0.1:{port}:8,8"',
        ]

    def connecting(on_mark: OnMark, look: Callable[[], None]) -> int:
        look()
        jobs.now += 15.0
        deadline = time.monotonic() + 60
        while not jobs.killed:
            assert time.monotonic() < deadline
            look()
            select.select([], [], [], 0.01)  # logins end by themselves, and nobody says so
        return 137

    def begun(on_mark: OnMark, look: Callable[[], None]) -> int:
        on_mark(Mark("has come", 0, "a"))
        jobs.now += 15.0
        look()
        on_mark(Mark("has ended well", 0, "a"))
        return 0

    with listening, bound:
        for tell, status in ((connecting, 137), (begun, 0)):
            jobs = Jobs(monkeypatch, tell)
            jobs.listed = {"a": 1, "b": 1, "c": 1, "d": 1}
            ports = {"b": listening.getsockname()[1], "c": bound.getsockname()[1], "d": bound.getsockname()[1]}
            jobs.logins = [login(*each) for each in ports.items()]
            assert jobs.run(4, 4, grows=False) == status
    said = "ringreduce: c cannot connect to mpirun on this host, though a login by ssh succeeds: a firewall is between"
    assert capsys.readouterr().err.count(said) == 1
