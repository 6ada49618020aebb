"""Restarts a job after a failure or on other hosts; each run resumes from the last commit on disk."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import STALLED
from ringreduce.launcher import failures
from ringreduce.launcher.allocations_end import StepSignals, StopBefore
from ringreduce.launcher.discovery import Discovery
from ringreduce.launcher.failures import LogFiles
from ringreduce.launcher.hosts import Hosts, is_here
from ringreduce.launcher.job import Job, Signals, say
from ringreduce.launcher.losses import LOGIN_S, Losses
from ringreduce.launcher.marks import Hearing, Mark
from ringreduce.launcher.python_line import ProgramSource, PythonLine
from ringreduce.launcher.schedulers import slurm_job
from ringreduce.launcher.start import Start

_LOOK_EVERY_S = 1.0
#: How long ranks have to end once the first has said that they begin again. Whatever the others do, the next job begins
#: with what is on disk.
_LEAVING_S = 30.0
#: Before a job that has failed is started again: the first time, twice as long after each further failure, at most.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
#: The status of Open MPI's mpirun when a daemon ends, which it says on standard output. No rank of an elastic job has
#: it: the shells over them end by a signal.
_NO_DAEMON = 255
#: After so long without an answer, users see what may be wrong.
_ANSWER_S = 30.0


@dataclass
class _JobRanks:
    """The ranks of the running job.

    Attributes:
        are_connected: whether all have begun, and MPI reports deaths to them.
        any_ended_well: whether one has.
        has_no_start: whether one died before all came to `init`, which ends the job.
        leaving: time of the first mark that the job begins again; None if there was none.
        asked: time when they were first asked to begin again; None if they were not, or need not any more.
        said: reason that users saw last.
        has_stalled: whether rank 0 has found that none goes on, in a job that survives deaths.
        was_warned: whether this process got a SIGUSR1 for them or for those of a job before, which asks those to stop
            that listen.
        are_to_stop: whether one has said that they have agreed to stop.
        without_package: hosts that do not have ringreduce in the folder where this one has it.
        has_commit: whether one has written a commit to disk.
        has_lost_daemon: whether mpirun has said that it lost one.
        places: the hosts of ranks, where there may be several.
    """

    are_connected: bool = False
    any_ended_well: bool = False
    has_no_start: bool = False
    leaving: float | None = None
    asked: float | None = None
    said: str = ""
    has_stalled: bool = False
    was_warned: bool = False
    are_to_stop: bool = False
    without_package: set[str] = field(default_factory=set)
    has_commit: bool = False
    has_lost_daemon: bool = False
    places: dict[int, str] = field(default_factory=dict)

    def say_once(self, text: str) -> None:
        if text != self.said:
            self.said = text
            say(text)


class Restarts:
    """Starts jobs until one has ended for good.

    Args:
        start: starts each job.
        listed: returns the present slots by host; None: those of ``start``, or of its script.
        clock: returns seconds.
        hearing: what hears of the ranks; None: each job itself.

    Raises:
        ConfigError: ranks are to stop before the end of an allocation, and that is unknown.
    """

    def __init__(
        self,
        start: Start,
        listed: Callable[[], Mapping[str, int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        hearing: Hearing | None = None,
    ) -> None:
        self._start = start
        self._hearing = hearing
        self._spec = start.spec
        self._policy = start.policy
        self._clock = clock
        self._discovery = None if listed else _discovery(start)
        self._listed = listed or (self._discovery.hosts if self._discovery else lambda: start.listed)
        self._hosts = Hosts()
        self._end = None if self._spec.stop_before_s is None else StopBefore(self._spec.stop_before_s)
        self._steps: StepSignals | None = None
        self._signals = Signals()
        self._changes = 0  # of ranks
        self._ranks = _JobRanks()
        self._has_warned = False
        self._has_commit = False
        self._losses = Losses(start, clock)
        self._launch = 0  # number of the last job, for commits: greater than those of all before, of any launcher
        self._name = secrets.token_hex(4)
        self._have_begun = False  # ranks, to look for the others
        self._failed = 0  # jobs, since the last that has made steps

    def run(self) -> int:
        """Return the exit status of the last job.

        Raises:
            ConfigError: there were too few slots for too long.
        """
        try:
            with self._signals:
                if self._spec.requeue and slurm_job(os.environ):
                    self._steps = StepSignals()
                return self._run()
        finally:
            self._losses.close()
            if self._steps is not None:
                self._steps.close()

    def _run(self) -> int:
        starts = in_a_row = 0
        while True:
            status, stopped = self._run_one(starts)
            starts += 1
            if self._spec.watchdog_action == "end" and (self._ranks.has_stalled or status == STALLED):
                return STALLED
            if self._ranks.has_commit:  # it made steps
                self._has_commit = True
                self._failed = in_a_row = 0
            if self._ranks.leaving is not None and not stopped:
                self._changes += 1
                continue
            lost = self._losses.lost
            lacks_daemon = status == _NO_DAEMON or self._ranks.has_lost_daemon
            has_no_daemon = self._spec.elastic and lacks_daemon and self._ranks.has_commit
            goes_on = has_no_daemon or (bool(lost) and self._outlives_loss(self._hosts))
            if status in (0, os.EX_TEMPFAIL) or stopped or (self._failed == self._spec.restarts and not goes_on):
                return status
            if self._is_to_stop:  # a new job would begin in an allocation that ends
                say(
                    f"the job has ended with status {status} as it was asked to stop; it is not started again here. "
                    "Run again, it goes on from its last commit"
                )
                return os.EX_TEMPFAIL
            if self._at_limit:
                say(f"the job has ended with status {status}, {self._limit_said}: it is not started again")
                return status
            self._changes += 1
            self._hosts = self._hosts.failed(self._clock(), self._policy)
            if goes_on:
                why = f"without {' and '.join(lost)}" if lost else "as mpirun has lost a daemon"
                say(f"the job begins {'again from its last commit, ' if self._has_commit else ''}{why}")
            else:
                self._failed += 1
                in_a_row += 1
                pause_s = min(_FIRST_PAUSE_S * 2 ** (in_a_row - 1), _LONGEST_PAUSE_S)
                say(
                    f"the job has ended with status {status}; starting it again ({self._failed} of "
                    f"{self._spec.restarts}), in {pause_s:g} s"
                )
                self._signals.pause(pause_s, self._clock)
            if self._discovery is not None:
                self._discovery.ask()

    @property
    def _is_to_stop(self) -> bool:
        """Whether the job that has ended was asked to stop: its ranks agreed to, or heard it if they keep commits."""
        ranks = self._ranks
        is_due = (self._end is not None and self._end.is_due()) or (self._steps is not None and self._steps.have_come)
        return is_due or ranks.are_to_stop or (ranks.was_warned and self._has_commit)

    def _outlives_loss(self, hosts: Hosts) -> bool:
        """Return whether a job that has lost all but these hosts begins again there, and spends no restart.

        It goes on from a commit; or has no step to lose yet, and hosts enough.
        """
        if self._has_commit or self._ranks.has_commit:
            return True
        left = hosts.failed(self._clock(), self._policy).next_ranks(self._policy, self._clock())
        return self._spec.elastic and not self._ranks.are_connected and bool(left)

    @property
    def _at_limit(self) -> bool:
        return self._spec.reset_limit is not None and self._changes >= self._spec.reset_limit

    @property
    def _limit_said(self) -> str:
        return f"and its ranks have changed {self._changes} times, where --reset-limit is {self._spec.reset_limit}"

    def _run_one(self, starts: int) -> tuple[int, bool]:
        """Run a job once there are slots for it.

        Returns:
            Its status, which is not 0 if no rank has ended well or one died before `init`, and whether it ended
            because this process got a signal to.
        """
        hosts = self._wait_for_slots()
        missed = self._signals.missed
        if missed is not None:
            say(f"{missed.name} has come while no job runs, and none is begun")
            return os.EX_TEMPFAIL if missed == signal.SIGUSR1 else 128 + missed, True
        self._launch = max(self._launch + 1, time.time_ns())
        more = {"RINGREDUCE_FENCE": f"{self._launch:020}-{self._name}"}
        more |= {"RINGREDUCE_RESTART": str(starts)} if starts else {}
        if self._spec.reset_limit is not None:
            more["RINGREDUCE_RESET_LIMIT"] = str(max(self._spec.reset_limit - self._changes, 0))
        hears_all = self._hearing is None or self._hearing.begin(self._start.places(hosts), more)
        line, environment = self._start.command(hosts, more)
        self._hosts = self._hosts.started(hosts)
        self._losses.begin(hosts, hears_all=hears_all)
        ranks = self._ranks = _JobRanks(was_warned=self._ranks.was_warned)
        job = Job(
            line,
            environment,
            lambda mark: self._on_mark(mark, job),
            messages=self._hearing,
            verbose=self._spec.verbose,
            grace_s=self._spec.grace_s,
            shielded=self._start.mpirun.kind == "Open MPI",
            stdin=None if self._start.passes_stdin else subprocess.DEVNULL,
        )
        job.asks_later = ranks.was_warned
        self._signals.go_to(lambda number: self._hand_on(number, job, ranks))
        logs = None if self._spec.folder is None else LogFiles(Path(self._spec.folder), continues=bool(starts))
        status = job.wait(lambda: self._look(job))
        if status == os.EX_TEMPFAIL and logs is not None and logs.have_ended_job():
            status = 1  # where the ranks are in files, mpirun says of the first end alone
        written = job.written.decode(errors="replace")
        # mpirun may end with status 0 though it has lost ranks.
        is_remote = self._start.is_remote(hosts)
        ranks.has_lost_daemon = is_remote and failures.has_lost_daemon(written)
        status = status or int(
            ranks.has_lost_daemon or (self._spec.elastic and (ranks.has_no_start or not ranks.any_ended_well))
        )
        if status not in (0, os.EX_TEMPFAIL) and not job.stopped and ranks.leaving is None:
            job.end_line()
            for name in self._losses.by_mpirun(self._hosts, written) if is_remote else ():
                self._lose(name, "mpirun has no connection to it")
            for text in failures.sentences(
                written,
                status,
                logs,
                ranks.places,
                without_package=ranks.without_package,
                others=self._losses.by_ssh,
            ):
                say(text)
        if status == 0 and not job.stopped:
            self._say_if_alone(hosts)
        return status, job.stopped

    def _say_if_alone(self, hosts: Mapping[str, int]) -> None:
        """Say that each rank of a program of Python worked for itself, as far as ranks of this host show that."""
        count = sum(hosts.values())
        line = PythonLine.of(self._spec.program)
        runs = line is not None and line.source is not ProgramSource.NOTHING
        are_here = any(is_here(host, self._start.here) for host in self._start.places(hosts))
        if count > 1 and runs and are_here and not self._spec.quiet and not self._have_begun:
            say(
                "no rank has called ringreduce.init(), or init_process_group() of torch.distributed: unless something "
                f"else connects them, {count} copies of the program ran each alone (--quiet leaves this line out)"
            )

    def _hand_on(self, number: signal.Signals, job: Job, ranks: _JobRanks) -> bool:
        """Give a signal to the job; return whether that takes it."""
        if number == signal.SIGUSR2 and self._start.grows:
            return True  # by which this process, and nobody else, asks ranks to begin again
        takes = job.take(number)
        if number != signal.SIGUSR1:
            return takes
        ranks.was_warned |= takes
        return takes and ranks.leaving is None  # those that end for a new start hear nothing: the run is warned then

    def _wait_for_slots(self) -> Mapping[str, int]:
        policy = self._policy
        limit_s = self._spec.start_timeout_s
        begin = self._clock()
        said = False
        while True:
            self._hosts = replace(self._losses.ask(self._hosts), listed=self._listed())
            now = self._clock()
            ranks = self._hosts.next_ranks(policy, now)
            if ranks or self._signals.missed is not None:
                return ranks
            there = sum(self._hosts.usable(policy, now).values())
            unused = self._hosts.unused_said(policy, now)
            unused = f"; {unused}" if unused else ""
            if now - begin > limit_s:
                raise ConfigError(
                    f"after {limit_s:g} s there are {there} slots to use, and the job needs "
                    f"{policy.least} (--min-np){unused}; add hosts, or wait longer with --start-timeout"
                )
            if not said and now - begin > _LOOK_EVERY_S:
                say(f"waiting for {policy.least} slots; {there} can be used{unused}")
                said = True
            # No job runs, and hosts do not say when they come: all there is to do is ask.
            time.sleep(_LOOK_EVERY_S / 10)

    def _on_mark(self, mark: Mark, job: Job) -> None:
        ranks = self._ranks
        now = self._clock()
        host = self._hosts.host_of(mark.rank, mark.host) or mark.host
        self._losses.hear(mark, host)
        match mark.what:
            case "has begun":
                self._have_begun = True
            case "has come":
                ranks.places[mark.rank] = host
            case "is connected":
                ranks.are_connected = True
            case "has no package there":
                ranks.without_package.add(mark.host)
            case "has a commit":
                ranks.has_commit = True
            case "has ended well":
                ranks.any_ended_well = True
            case "agrees to stop":
                ranks.are_to_stop = True
            case "stalls":
                ranks.has_stalled = True
                job.end()
            case "begins again":
                ranks.leaving = now if ranks.leaving is None else ranks.leaving
            case "has gone on" if ranks.leaving is not None:
                # A rank failed before these knew that all was on disk: the others have ended.
                ranks.leaving = -math.inf
            case "has gone on":
                self._changes += 1
                ranks.asked = None  # what the ranks were asked before, they have dropped
            # At the end of a rank that begins again, a death is none: what it has done is on disk.
            case "has died" if ranks.leaving is None:
                host = self._hosts.host_of(mark.rank, mark.host)
                self._hosts = self._hosts.died(host, now, self._policy)
                if not ranks.are_connected and not ranks.has_no_start:
                    ranks.has_no_start = True  # the others would wait for it, as MPI does not know of it yet
                    who = failures.name_rank(mark.rank, ranks.places)
                    say(f"{who} has died before all ranks came to init(), so the job is ended")
                    job.end()

    def _look(self, job: Job) -> None:
        """Look whether hosts are lost; ask the ranks to stop, or to begin again on other hosts, until they do."""
        silent = self._losses.silent()
        for name in silent:
            why = f"it has said nothing for {self._spec.host_timeout_s:g} s"
            self._lose(name, why)
        if silent or self._losses.are_cut_off(job.logins):
            job.kill()  # mpirun would wait for such a host, to end as to go on
            return
        if self._losses.are_late():
            for name in self._losses.silent_logins():
                self._lose(name, f"its login by ssh does not answer within {LOGIN_S:g} s")
            job.end()
        if self._end is not None and self._end.is_due() and job.ask_to_stop():
            self._ranks.say_once(f"the allocation ends in {self._end.left_s:.0f} s; the ranks are asked to stop")
        if self._steps is not None and self._steps.have_come and job.ask_to_stop():
            self._ranks.say_once("Slurm has sent a signal to the steps of this job; the ranks are asked to stop")
        if self._start.grows:
            self._look_for_hosts(job)

    def _lose(self, name: str, why: str) -> None:
        """Go on without a host, and say what becomes of it; nothing, if the job ends with it."""
        left = self._hosts.without(self._hosts.known_as(name) or name)
        goes_on = (self._outlives_loss(left) or self._failed < self._spec.restarts) and not self._at_limit
        self._hosts = self._losses.lose(self._hosts, name, why, goes_on=goes_on)

    def _look_for_hosts(self, job: Job) -> None:
        """Request that the ranks begin again on other hosts, until they do, as they may not listen yet."""
        ranks = self._ranks
        now = self._clock()
        if ranks.leaving is not None and now - ranks.leaving >= _LEAVING_S:
            job.end()
            return
        hosts = self._losses.ask(self._hosts) if ranks.has_commit else self._hosts
        self._hosts = replace(hosts, listed=self._listed())
        # Without an option for growth, ranks that have died are not replaced.
        may_change = bool(self._spec.growth) or self._losses.has_returned
        reason = self._hosts.reason_to_change(self._policy, now) if may_change else ""
        # Ranks that have ended well leave no training, and their mpirun may be ending, too.
        if not reason or ranks.leaving is not None or not ranks.are_connected or ranks.any_ended_well:
            ranks.asked = None
        elif self._at_limit:
            ranks.say_once(f"{reason}, {self._limit_said}: they go on as they are")
        else:
            ranks.say_once(f"{reason}; the job begins again after the next commit")
            job.signal_ranks()
            ranks.asked = now if ranks.asked is None else ranks.asked
            if now - ranks.asked >= _ANSWER_S and not self._has_warned:
                self._has_warned = True
                say(
                    f"no rank has begun again {_ANSWER_S:g} s after they were asked to: they do with the next "
                    "state.commit() or state.check_host_updates()"
                )


def _discovery(start: Start) -> Discovery | None:
    """Return the script that names the hosts from now on; None if the listed hosts stay."""
    if start.spec.script is None:
        return None
    discovery = Discovery(start.spec.script, start.spec.slots or 1)
    threading.Thread(target=discovery.ask_for_ever, name="ringreduce asks for hosts", daemon=True).start()
    return discovery
