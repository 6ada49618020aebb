"""What the launcher of elastic jobs makes of what ranks say, and when it asks them to begin again."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.growth import Cooldown, Discovery
from ringreduce.launcher.hosts import SizePolicy, parse_hosts
from ringreduce.launcher.marks import Mark
from ringreduce.launcher.mpirun import Mpirun
from ringreduce.launcher.restarts import Restarts
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.start import Start
from ringreduce.launcher.states import TIME, Happening, LaunchEvent
from ringreduce.launcher.stderr import say


class Jobs:
    """Stands for mpirun: what happens while each runs is a text of steps, and the last step is its status.

    ``3 connected``: so many ranks, of the first host; ``1@b has died``: a mark; ``lists a:2,b:1``: hosts from now on;
    ``writes ...``: to its standard error; ``+5``: seconds pass; ``look``; ``11x1 0@a 1@b``: 11 looks, a second apart,
    before each of which these ranks say that they live, until it is killed; ``SIGUSR1``: to this process.

    Attributes:
        log: what the launcher does: the second, and ``start`` with the ranks by host, ``ask``, ``end`` or ``kill``.
        listed: the hosts that there are.
        now: the time.
        hears: whether an mpirun takes signals.
        logins: the command lines by which it starts daemons.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, listed: str, *scripts: str) -> None:
        self.log: list[str] = []
        self.listed = parse_hosts(listed, 1)
        self.now = 0.0
        self.hears = True
        self.logins: list[list[str]] = []
        jobs = self
        left = [*scripts]

        class FakeJob:
            def __init__(
                self,
                start: Start,
                line: object,
                environment: object,
                tell: Callable[[LaunchEvent], None],
                **how: object,
            ) -> None:
                self._tell = tell
                self._is_killed = False
                self.written = b""
                self.logins = lambda: jobs.logins
                self.ask_to_leave = lambda: jobs.note("ask")
                self.end = lambda: jobs.note("end")
                self.pass_on = self.takes_twice = self.can_give_grace = lambda number: False
                self.say = say
                if how["asks_later"]:
                    jobs.log[-1] += " warned"

            @property
            def has_ended(self) -> bool:
                return not jobs.hears

            def kill(self) -> None:
                self._is_killed = True
                jobs.note("kill")

            def ask_to_stop(self) -> bool:
                return False

            def wait(self, look: Callable[[], None]) -> int:
                *steps, status = left.pop(0).split("; ")
                for step in steps:
                    self._do(step, look)
                return int(status)

            def _do(self, step: str, look: Callable[[], None]) -> None:
                first, _, rest = step.partition(" ")
                if rest == "connected":
                    for rank in range(int(first)):
                        self._tell(Mark("is connected", rank, next(iter(jobs.listed))))
                elif "@" in first:
                    rank, _, host = first.partition("@")
                    self._tell(Mark(rest, int(rank), host))
                elif first == "lists":
                    jobs.listed = parse_hosts(rest, 1)
                elif first == "writes":
                    self.written = rest.encode()
                elif first.startswith("SIG"):
                    signal.raise_signal(signal.Signals[first])
                elif first.startswith("+"):
                    jobs.now += float(first)
                elif step == "look":
                    self._look(look)
                elif step == "until killed":
                    deadline = time.monotonic() + 60
                    while not self._is_killed:
                        assert time.monotonic() < deadline
                        self._look(look)
                        select.select([], [], [], 0.01)  # logins end by themselves, and nobody says so
                else:
                    count, seconds = first.split("x")
                    for _ in range(int(count)):
                        for each in rest.split():
                            self._do(f"{each} lives", look)
                        self._look(look)
                        if self._is_killed:
                            break
                        jobs.now += float(seconds)

            def _look(self, look: Callable[[], None]) -> None:
                self._tell(Happening(TIME))
                look()

        monkeypatch.setattr("ringreduce.launcher.restarts.Job", FakeJob)
        monkeypatch.setattr("time.sleep", self.wait)
        monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
        monkeypatch.delenv("SLURM_JOB_ID", raising=False)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def note(self, what: str) -> None:
        self.log.append(f"{self.now:.3g} {what}")

    def run(
        self, least: int, most: int, cooldown: Cooldown | None = None, *, grows: bool = True, **options: Any
    ) -> int:
        jobs = self

        class Recorded(Start):
            def command(self, ranks: Mapping[str, int], more: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
                hosts = ",".join(f"{host}:{count}" for host, count in ranks.items())
                limit = more.get("RINGREDUCE_RESET_LIMIT")
                jobs.note(f"start {hosts}" + (f" limit {limit}" if limit else ""))
                return [], {}

        spec = LaunchSpec(program=("true",), elastic=True, most=most if grows else None, **options)
        policy = SizePolicy(least, most, cooldown)
        start = Recorded(
            spec, Mpirun("mpirun", "Open MPI", 5), policy, frozenset({"me"}), remote=True, by_ssh=True, grows=True
        )
        return Restarts(start, None if spec.script else lambda: self.listed, lambda: self.now).run()


class Case(NamedTuple):
    """What happens, and what follows.

    Attributes:
        listed: the hosts at first.
        scripts: of each mpirun that is started.
        log: what the launcher does.
        status: of the job.
        said: what users read, once each.
        unsaid: what they do not read.
        least, most: number of ranks.
        options: of the job; ``error``: it raises this.
    """

    listed: str
    scripts: tuple[str, ...]
    log: str
    status: int = 0
    said: tuple[str, ...] = ()
    unsaid: tuple[str, ...] = ()
    least: int = 1
    most: int = 2
    options: Mapping[str, Any] = {}


WELL = "0@a has ended well; 0"
LOSING = "2 connected; 0@a has a commit; writes Remote host: b\n; 1"
SILENT_B = "3x1 0@a 1@b; 30x1; 9x1 0@a"
DEAF = "every host has said nothing for 10 s: this host may have lost its network; no host counts as lost\n"
LOST_DAEMON = (
    "PRTE has lost communication with a remote daemon.\n  Remote daemon: [prterun-me-7@0,{number}] on node {node}\n"
)


def come(*hosts: str) -> str:
    """Return the script by which a rank comes to each of these hosts, and all are connected."""
    return "; ".join([f"{len(hosts)} connected", *(f"{rank}@{host} has come" for rank, host in enumerate(hosts))])


BY_AGENT = "Remote host: me\nringreduce: what mpirun has started on b is lost\n"
DOWN = "writes prterun: daemon failed to report back\n  Local host:    a\n  Remote host:   b\n; 255"
NO_CONNECTION = "b is lost: mpirun has no connection to it; "
USED_AGAIN = NO_CONNECTION + "it is used again once it answers"


def numbered(node: str) -> str:
    """A job that loses daemon 1; daemon 1 is that of the first host but mpirun's own."""
    told = "; ".join(f"{rank}@a-and-b has come" for rank in range(2))
    said = LOST_DAEMON.format(number=1, node=node)
    return f"{told}; 2 connected; 0@a-and-b has a commit; writes {said}; 1"


CASES = {
    "ranks are not asked once one has ended well": Case(
        "a:2",
        ("2 connected; lists a:3; look; 0@a has ended well; look; 0",),
        "0 start a:2; 0 ask",
        most=3,
    ),
    "the limit of a job is never negative": Case(
        "a:2",
        ("2 connected; 0@a has gone on; 0@a begins again; 0", WELL),
        "0 start a:2 limit 1; 0 start a:2 limit 0",
        options={"reset_limit": 1},
    ),
    "a crash at the end of a job that begins again is no death": Case(
        "a:2",
        ("2 connected; lists a:3; look; 0@a begins again; 1@a has died; 1", WELL),
        "0 start a:2; 0 ask; 0 start a:3",
        least=2,
        most=3,
    ),
    "a job without a start has failed though a rank ended well": Case(
        "a:2", ("0@a has died; 1@a has ended well; 0",), "0 start a:2; 0 end", 1
    ),
    "no job begins where one has failed whose ranks agreed to stop": Case(
        "a:2",
        ("2 connected; 0@a agrees to stop; 1@a has died; 1",),
        "0 start a:2",
        os.EX_TEMPFAIL,
        options={"restarts": 1},
    ),
    "no job begins where one has failed that was warned": Case(
        "a:2",
        ("2 connected; 0@a has a commit; SIGUSR1; 1@a has died; 1",),
        "0 start a:2",
        os.EX_TEMPFAIL,
        options={"restarts": 1},
    ),
    "no job begins where one has failed and the allocation ends": Case(
        "a:2",
        ("2 connected; 1@a has died; 1",),
        "0 start a:2",
        os.EX_TEMPFAIL,
        options={"restarts": 1, "stop_before_s": 60.0},
    ),
    # Nobody knows whether SIGUSR1 was to stop it: it had made no commit, and its ranks had not agreed.
    "the job after one that failed when it was warned is warned": Case(
        "a:2",
        ("2 connected; SIGUSR1; 1", WELL),
        "0 start a:2; 1 start a:2 warned",
        options={"restarts": 1},
    ),
    "hosts that count as failing are named where slots are too few": Case(
        "a:2",
        ("2 connected; 1@a has died; 1",),
        "0 start a:2",
        said=("waiting for 2 slots; 0 can be used; a counts as failing for another 98 s",),
        least=2,
        options={
            "cooldown": Cooldown(100, 100),
            "restarts": 1,
            "start_timeout_s": 5.0,
            "error": "0 slots .*; a counts as failing for another 9. s; add hosts",
        },
    ),
    # A death withdraws the first request, so that the 30 s begin again; then users hear it once.
    "users hear that no rank listens after 30 s": Case(
        "a:2",
        ("2 connected; lists a:3; look; +29; look; +1; 0@a has gone on; look; +29; look; 0@a has ended well; 0",),
        "0 start a:2; 0 ask; 29 ask; 30 ask; 59 ask",
        unsaid=("no rank has begun again",),
        most=3,
    ),
    "users hear once that no rank listens": Case(
        "a:2",
        ("2 connected; lists a:3; look; +30; look; +30; look; +30; look; 0@a has ended well; 0",),
        "0 start a:2; 0 ask; 30 ask; 60 ask; 90 ask",
        said=("no rank has begun again 30 s after they were asked to",),
        most=3,
    ),
    # Those that have said so know that all is on disk, and the next job begins with that.
    "ranks that go on while others begin again are ended": Case(
        "a:2",
        ("2 connected; 0@a begins again; 0@a has gone on; look; 143", f"2 connected; look; {WELL}"),
        "0 start a:2; 0 end; 0 start a:2",
    ),
    "ranks that do not end 30 s after others begin again are ended": Case(
        "a:2",
        ("2 connected; 0@a begins again; look; +31; look; 143", f"2 connected; look; {WELL}"),
        "0 start a:2; 31 end; 31 start a:2",
    ),
    **{
        f"a silent host is lost, beside {other}": Case(
            f"{other}:1,b:1",
            (
                f"{come(other, 'b')}; 0@{other} has a commit; 1@b lives; 30x0.5 0@{other}; 137",
                f"0@{other} has ended well; 0",
            ),
            f"0 start {other}:1,b:1; 10 kill; 10 start {other}:1",
            said=(
                "b is lost: it has said nothing for 10 s; it is used again once it answers",
                "begins again from its last commit, without b",
            ),
        )
        for other in ("a", "me")
    },
    "a host whose ranks have ended, or that never spoke, is not expected to speak": Case(
        "a:1,b:1,c:1",
        (f"{come('a', 'b', 'c')}; 0@a lives; 1@b lives; 1@b has died; 0@a has ended well; 30x1; 0",),
        "0 start a:1,b:1,c:1",
        most=3,
    ),
    "a lost host without a commit spends restarts": Case(
        "a:1,b:1", (f"{come('a', 'b')}; 1@b lives; 20x1 0@a; 137",), "0 start a:1,b:1; 10 kill", 137
    ),
    "a lost daemon spends no restart where there is a commit": Case(
        "a:2", ("2 connected; 0@a has a commit; 255", WELL), "0 start a:2; 0 start a:2"
    ),
    "a lost daemon spends a restart where there is no commit": Case("a:2", ("2 connected; 255",), "0 start a:2", 255),
    "a job begins without a host that is down": Case(
        "a:1,b:1",
        (DOWN, WELL),
        "0 start a:1,b:1; 0 start a:1",
        said=(USED_AGAIN, "the job begins without b"),
    ),
    "a job that has begun ends with a host that is down": Case(
        "a:1,b:1", (f"2 connected; {DOWN}",), "0 start a:1,b:1", 255, (NO_CONNECTION + "the job ends",)
    ),
    "a job that has begun spends a restart on a host that is down": Case(
        "a:1,b:1",
        (f"2 connected; {DOWN}", WELL),
        "0 start a:1,b:1; 1 start a:1",
        said=(USED_AGAIN,),
        unsaid=("the job begins without b",),
        options={"restarts": 1},
    ),
    # A commit gives all restarts back, and the first wait is short again.
    "restarts wait 1, 2 and 4 seconds and come back with steps": Case(
        "a:2",
        ("1", "1", "1", "0@a has a commit; 1", "1", "1", "1"),
        "; ".join(f"{second} start a:2" for second in (0, 1, 3, 7, 8, 10, 14)),
        1,
        options={"restarts": 3},
    ),
    "a lost host may be unlisted or call itself otherwise": Case(
        "10.0.0.1:1,10.0.0.2:1",
        (
            f"{come('one', 'two')}; 0@one has a commit; 1@10.0.0.2 lives; 10x1 0@10.0.0.1; lists 10.0.0.1:1; "
            "1x1 0@10.0.0.1; 137",
            "0@one has ended well; 0",
        ),
        "0 start 10.0.0.1:1,10.0.0.2:1; 10 kill; 10 start 10.0.0.1:1",
    ),
    # That of the first job is on disk.
    "a commit counts after a new start on other hosts": Case(
        "a:1,b:1",
        ("1 connected; 0@a has a commit; 0@a begins again; 0", f"{come('a', 'b')}; 1@b lives; 20x1 0@a; 137", WELL),
        "0 start a:1,b:1; 0 start a:1,b:1; 10 kill; 10 start a:1",
    ),
    "a lost host is known by its daemon's number": Case(
        "a:1,b:1",
        (f"2 connected; 0@a has a commit; writes {LOST_DAEMON.format(number=2, node='me')}; 1", WELL),
        "0 start a:1,b:1; 0 start a:1",
    ),
    "a lost host is known by the agent": Case(
        "a:1,b:1",
        (
            f"2 connected; 0@a has a commit; writes {BY_AGENT}; 1",
            WELL,
        ),
        "0 start a:1,b:1; 0 start a:1",
    ),
    "the name of a node that is that of no host": Case(
        "127.0.0.2:1,10.0.0.2:1",
        (numbered("two"), WELL),
        "0 start 127.0.0.2:1,10.0.0.2:1; 0 start 127.0.0.2:1,10.0.0.2:1",
    ),
    "the name of a node that is that of several hosts, one of which is mpirun's": Case(
        "127.0.0.2:1,10.0.0.2:1", (numbered("me"), WELL), "0 start 127.0.0.2:1,10.0.0.2:1; 0 start 127.0.0.2:1"
    ),
    "the name of a node that is that of several hosts elsewhere": Case(
        "a:1,b:1", (numbered("a-and-b"), WELL), "0 start a:1,b:1; 0 start b:1"
    ),
    "what a rank writes of ssh is no lost host": Case(
        "a:2",
        (
            "2 connected; 0@a has ended well; writes ssh: connect to host example.org port 22: Connection refused\n"
            "Remote host: x\n; 0",
        ),
        "0 start a:2",
        options={"restarts": 1},
    ),
    "ranks that have died are replaced where the job may grow": Case(
        "a:2,b:2",
        (f"2 connected; 0@a has a commit; 1@a has died; look; {WELL}",),
        "0 start a:2; 0 ask",
    ),
    "a job that is just elastic goes on with the ranks that live": Case(
        "a:2,b:2",
        (f"2 connected; 0@a has a commit; 1@a has died; look; {WELL}",),
        "0 start a:2",
        options={"grows": False},
    ),
    # Words that come again come from one host before the other; a host that is silent then is lost.
    "no host is lost while no words come": Case(
        "a:1,b:1",
        (f"{come('a', 'b')}; 0@a has a commit; {SILENT_B}; {SILENT_B}; 1x1 1@b; 11x1 0@a; 137", WELL),
        "0 start a:1,b:1; 94 kill; 94 start a:1",
        said=(DEAF,),
    ),
    "a host is lost though it is the only one that has an agent": Case(
        "me:1,b:1",
        (f"{come('me', 'b')}; 0@me has a commit; 3x1 1@b; 30x1; 137", "0@me has ended well; 0"),
        "0 start me:1,b:1; 12 kill; 12 start me:1",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_from_what_ranks_say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    case = CASES[name]
    jobs = Jobs(monkeypatch, case.listed, *case.scripts)
    options = dict(case.options)
    error = options.pop("error", None)
    cooldown = options.pop("cooldown", None)
    if error is None:
        assert jobs.run(case.least, case.most, cooldown, **options) == case.status
    else:
        with pytest.raises(ConfigError, match=error):
            jobs.run(case.least, case.most, cooldown, **options)
    text = capsys.readouterr().err
    assert "; ".join(jobs.log) == case.log
    assert [said for said in case.said if text.count(said) != 1] == []
    assert [said for said in case.unsaid if said in text] == []


def test_a_script_is_asked_again_before_a_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it says after the pause counts: its last answer, from before that, names a host that is gone."""
    listed = tmp_path / "listed"
    listed.write_text("a:1\nb:1\n")
    script = tmp_path / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {listed}\n")
    script.chmod(0o755)
    sleep = time.sleep

    def wait(seconds: float) -> None:
        if not jobs.log:
            sleep(seconds)  # until the thread has the first answer
            return
        jobs.wait(seconds)
        listed.write_text("a:1\nc:1\n")

    monkeypatch.setattr(Discovery, "ask_for_ever", Discovery.ask)  # in place of every second
    jobs = Jobs(monkeypatch, "", "1", WELL)
    monkeypatch.setattr("time.sleep", wait)
    assert jobs.run(2, 2, restarts=1, script=str(script)) == 0
    assert jobs.log == ["0 start a:1,b:1", "1 start a:1,c:1"]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, os.EX_TEMPFAIL), (signal.SIGUSR2, 0)],
)
@pytest.mark.parametrize("waits", [False, True])
def test_a_signal_between_two_jobs_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, status: int, waits: bool
) -> None:
    """In the pause after a failure, or while slots are too few; SIGUSR1 as a stop. SIGUSR2 is for ranks alone."""

    def wait(seconds: float) -> None:
        jobs.now += seconds
        if jobs.now > (102.0 if waits else 0.5) and not jobs.listed.get("b"):
            jobs.listed = {"a": 2, "b": 1}
            signal.raise_signal(number)

    no_slots = "lists ,; +100; " if waits else ""  # and there is no pause left
    jobs = Jobs(monkeypatch, "a:2", f"2 connected; {no_slots}1", WELL)
    jobs.hears = False
    monkeypatch.setattr("time.sleep", wait)
    before = signal.getsignal(number)
    assert jobs.run(2, 2, restarts=1) == status
    assert len(jobs.log) == (2 if number == signal.SIGUSR2 else 1)
    assert signal.getsignal(number) is before


# ---- what is asked by ssh ----


def make_ssh(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Put a program ssh on the path."""
    path = folder / "bin" / "ssh"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o700)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


def make_telling_ssh(monkeypatch: pytest.MonkeyPatch, folder: Path, then: str) -> Path:
    """Put a program ssh on the path that opens a pipe, writes its arguments there, and goes on as given."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    make_ssh(monkeypatch, folder, f'exec 3>"{pipe}"\necho "$*" >&3\n{then}')
    return pipe


def test_a_lost_host_is_asked_while_a_job_waits_for_slots(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And is used once it answers; when it is lost again, the job begins again once others are there."""
    pipe = make_telling_ssh(monkeypatch, tmp_path, "exit 0")
    said: list[str] = []

    def wait(seconds: float) -> None:
        jobs.wait(seconds)
        if not said and jobs.now > 2.0:
            said.append(pipe.read_text())

    jobs = Jobs(monkeypatch, "a:1,b:1", LOSING, f"lists a:1,b:1,c:1; {LOSING}", WELL)
    monkeypatch.setattr("time.sleep", wait)
    assert jobs.run(2, 2, start_timeout_s=1e5) == 0
    assert [each.split()[-1] for each in jobs.log] == ["a:1,b:1", "a:1,b:1", "a:1,c:1"]
    assert said[0].endswith(" b true\n")
    text = capsys.readouterr().err
    assert "waiting for 2 slots; 1 can be used; b is lost\n" in text
    assert "b answers again\n" in text
    assert "b is lost: mpirun has no connection to it; it is left out from now on\n" in text


def test_what_asks_a_lost_host_ends_with_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though the login there hangs, and SIGTERM does not help; the host is named where slots were too few."""
    pipe = make_telling_ssh(monkeypatch, tmp_path, "trap '' TERM; exec sleep 200")
    opened: list[TextIO] = []

    def wait(seconds: float) -> None:
        jobs.wait(seconds)
        if not opened:
            opened.append(pipe.open())
            opened[0].readline()  # it has begun

    jobs = Jobs(monkeypatch, "a:1,b:1", LOSING)
    monkeypatch.setattr("time.sleep", wait)
    with pytest.raises(ConfigError, match=r"1 slots .*; b is lost; add hosts"):
        jobs.run(2, 2, start_timeout_s=5.0)
    with opened[0] as said:
        assert said.read() == ""  # once nobody holds the other end


def test_ranks_that_do_not_come_to_their_hosts_end_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And of these hosts the one is lost whose login does not answer."""
    make_ssh(monkeypatch, tmp_path, "case $* in *' b true') exit 1;; esac")
    jobs = Jobs(monkeypatch, "a:1,b:1,c:1", "0@a has come; 1@a has come; +4.9; look; +0.1; look; look; 1")
    assert jobs.run(3, 3, grows=False, start_timeout_s=5.0) == 1
    assert jobs.log == ["0 start a:1,b:1,c:1", "5 end"]
    text = capsys.readouterr().err
    assert "rank 2 of 3 did not come to their hosts within 5 s (--start-timeout); the job is ended\n" in text
    assert "b is lost: its login by ssh does not answer within 10 s; the job ends" in text
    assert "c is lost" not in text


def test_a_host_that_cannot_connect_back_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is named; others that can, and one that does not answer, are not. No job ends where a rank has come."""
    make_ssh(monkeypatch, tmp_path, 'case $* in *" d "*) exit 255;; esac\nfor last; do :; done\nexec sh -c "$last"')
    listening = socket.create_server(("127.0.0.1", 0))
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))  # nothing can connect to it

    def login(host: str, port: int) -> list[str]:
        uri = f"prterun-a-7@0.0;tcp://127.0.0.1,127.0.0.1:{port}:8,8"
        return ["ssh", "-x", host, f'prted --prtemca prte_hnp_uri "{uri}"']

    with listening, bound:
        for script, status in (("look; +15; until killed; 137", 137), (f"0@a has come; +15; look; {WELL}", 0)):
            jobs = Jobs(monkeypatch, "a:1,b:1,c:1,d:1", script)
            ports = {"b": listening.getsockname()[1], "c": bound.getsockname()[1], "d": bound.getsockname()[1]}
            jobs.logins = [login(*each) for each in ports.items()]
            assert jobs.run(4, 4, grows=False) == status
    said = "ringreduce: c cannot connect to mpirun on this host, though a login by ssh succeeds: a firewall is between"
    assert capsys.readouterr().err.count(said) == 1
