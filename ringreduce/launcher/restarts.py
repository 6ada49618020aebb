"""The loop that starts a job, and starts it again after a failure or on other hosts, as its table of states says.

What happens becomes an event, and what the table answers is done here. Each mpirun resumes from the last commit.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import failures, states
from ringreduce.launcher.allocations_end import StopBefore
from ringreduce.launcher.failures import LogFiles
from ringreduce.launcher.growth import Discovery
from ringreduce.launcher.hosts import is_here, parse_hosts
from ringreduce.launcher.job import Job
from ringreduce.launcher.losses import LOGIN_S, Losses
from ringreduce.launcher.marks import WARNED, Hearing, Mark
from ringreduce.launcher.python_line import ProgramSource, PythonLine
from ringreduce.launcher.schedulers import slurm_job
from ringreduce.launcher.start import Start
from ringreduce.launcher.states import Action, Do, Happening, JobState, LaunchEvent, MpirunEnded, Phase
from ringreduce.launcher.stderr import say

#: No mpirun runs, and hosts do not say when they come: all there is to do is ask.
_ASK_EVERY_S = 0.1
_PAUSE_S = 0.05  # a signal does not end a pause, as its handler returns


@contextmanager
def _hearing(tell: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Hear the signals to this process that are for the job, which may come at any time."""
    numbers = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    numbers -= {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # as under nohup
    before = {each: signal.signal(each, lambda number, frame: tell(signal.Signals(number))) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Restarts:
    """Starts one mpirun after another until the job has ended for good.

    Args:
        start: starts each.
        listed: returns the present slots by host; None: those of ``start``, or of its script.
        clock: returns seconds.
        hearing: what hears of the ranks; None: nothing does.

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
        self._clock = clock
        self._discovery: Discovery | None = None
        self._listed = listed or (lambda: start.listed)
        if listed is None and start.spec.script is not None:
            self._discovery = Discovery(start.spec.script, partial(parse_hosts, slots=start.spec.slots or 1), say)
            self._discovery.begin()
            self._listed = self._discovery.hosts
        self._end = None if self._spec.stop_before_s is None else StopBefore(self._spec.stop_before_s)
        self._requeues = self._spec.requeue and bool(slurm_job(os.environ))
        self._is_warned = False  # by a signal of Slurm to the steps of its job
        self._losses = Losses(start, clock)
        self._starts = 0
        self._launch = 0  # number of the last mpirun, for commits: greater than those of all before, of any launcher
        self._name = secrets.token_hex(4)
        self._state = JobState(states.Terms(start.spec, start.policy, start.asks_lost_hosts))
        self._events: deque[LaunchEvent | signal.Signals] = deque()
        self._is_telling = False
        self._job: Job | None = None  # the last one
        self._logs: LogFiles | None = None
        self._said = ""

    def run(self) -> int:
        """Return the exit status of the job.

        Raises:
            ConfigError: there were too few slots for too long.
        """
        try:
            with _hearing(self._tell):
                while self._state.phase is not Phase.ENDED:
                    self._go_on()
            return self._state.status
        finally:
            self._losses.close()

    # ---- what happens ----

    def _tell(self, event: LaunchEvent | signal.Signals) -> None:
        """Tell the table what happens, and do what it says; a signal that comes meanwhile waits until that is done."""
        self._events.append(event)
        if self._is_telling:
            return
        self._is_telling = True
        try:
            while self._events:
                happening = self._events.popleft()
                if isinstance(happening, signal.Signals):
                    happening = self._signalled(happening)
                if isinstance(happening, Mark):
                    host = self._state.hosts.host_of(happening.rank, happening.host) or happening.host
                    self._losses.hear(happening, host)
                    self._is_warned = self._is_warned or (happening.what == WARNED and self._requeues)
                self._state, actions = states.next_state(self._state, happening, self._clock())
                for action in actions:
                    self._do(action)
        finally:
            self._is_telling = False

    def _signalled(self, number: signal.Signals) -> LaunchEvent:
        job = self._job
        if number == signal.SIGUSR2 and self._start.grows:
            return Happening(states.TIME)  # this process, and nobody else, asks ranks by it to begin again
        if number == signal.SIGUSR2:
            return Happening(states.USERS_SIGNAL, number=number)
        if job is None or job.has_ended:
            return Happening(states.MISSED, number=number)
        if number == signal.SIGUSR1:
            return Happening(states.STOP_ASKED, number=number)
        what = states.END_ASKED_MPIRUN if job.takes_twice(number) else states.END_ASKED
        return Happening(what, number=number, has_grace=job.can_give_grace(number))

    def _go_on(self) -> None:
        """Wait for what happens next, and tell it."""
        if self._state.phase is Phase.PAUSING:
            time.sleep(max(0.0, min(self._state.until - self._clock(), _PAUSE_S)))
            self._tell(Happening(states.TIME))
        elif self._state.phase is Phase.WAITING:
            self._look_for_hosts()
            if self._state.phase is Phase.WAITING:
                time.sleep(_ASK_EVERY_S)
        else:
            self._tell(self._ended(self._mpirun.wait(self._look)))

    def _look(self) -> None:
        """Look, every second while mpirun runs, for what nobody tells."""
        silent = self._losses.silent()
        for name in silent:
            why = f"it has said nothing for {self._spec.host_timeout_s:g} s"
            self._tell(Happening(states.SILENT, why, host=name))
        if silent:
            return
        if text := self._losses.are_cut_off(self._mpirun.logins):
            self._tell(Happening(states.CUT_OFF, text))
            return
        if text := self._losses.are_late():
            self._tell(Happening(states.LATE, text))
            for name in self._losses.silent_logins():
                why = f"its login by ssh does not answer within {LOGIN_S:g} s"
                self._tell(Happening(states.UNREACHED, why, host=name))
        if self._end is not None and self._end.is_due():
            text = f"the allocation ends in {self._end.left_s:.0f} s; the ranks are asked to stop"
            self._tell(Happening(states.STOP_DUE, text))
        if self._is_warned:
            text = "Slurm has sent a signal to the steps of this job; the ranks are asked to stop"
            self._tell(Happening(states.STOP_DUE, text))
        if self._start.grows:
            self._look_for_hosts()

    def _look_for_hosts(self) -> None:
        if self._state.may_regain_hosts:
            for name in self._losses.answering(self._state.hosts):
                self._tell(Happening(states.ANSWERS, host=name))
        self._tell(states.HostsListed(self._listed()))

    def _ended(self, status: int) -> MpirunEnded:
        written = self._mpirun.written.decode(errors="replace")
        is_remote = self._start.is_remote(self._losses.ranks)
        is_due = self._end is not None and self._end.is_due()
        return MpirunEnded(
            status,
            has_error=failures.has_ended_job(written),
            has_logged_error=self._logs is not None and self._logs.have_ended_job(),
            has_lost_daemon=is_remote and failures.has_lost_daemon(written),
            lost=tuple(self._losses.by_mpirun(self._state.hosts, written)) if is_remote else (),
            is_due=is_due or self._is_warned,
        )

    # ---- what follows ----

    def _do(self, action: Action) -> None:
        text = action.text
        match action.do:
            case Do.SAY:
                self._say(text)
            case Do.SAY_ONCE:
                self._say_once(text)
            case Do.START:
                self._begin()
            case Do.ASK_TO_STOP if self._mpirun.ask_to_stop():
                self._say_once(text)
            case Do.ASK_TO_LEAVE:
                self._mpirun.ask_to_leave()
            case Do.PASS_ON:
                self._mpirun.pass_on(action.number)
            case Do.GIVE_GRACE:
                self._mpirun.give_grace()
            case Do.KILL_RANKS:
                self._mpirun.kill_ranks()
            case Do.END:
                self._mpirun.end()
            case Do.KILL:
                self._mpirun.kill()
            case Do.EXPLAIN:
                self._explain(action.number)
            case Do.SAY_IF_ALONE:
                self._say_if_alone(self._losses.ranks)
            case Do.LIST_AGAIN if self._discovery is not None:
                self._discovery.ask()
            case Do.LOSE:
                self._start.lost.add(text)
            case Do.FIND:
                self._start.lost.discard(text)
            case Do.GIVE_UP:
                raise ConfigError(text)

    @property
    def _mpirun(self) -> Job:
        assert self._job is not None, "one was started"
        return self._job

    def _begin(self) -> None:
        """Start mpirun."""
        ranks = self._state.hosts.living
        self._launch = max(self._launch + 1, time.time_ns())
        more = {"RINGREDUCE_FENCE": f"{self._launch:020}-{self._name}"}
        more |= {"RINGREDUCE_RESTART": str(self._starts)} if self._starts else {}
        if self._spec.reset_limit is not None:
            more["RINGREDUCE_RESET_LIMIT"] = str(max(self._spec.reset_limit - self._state.changes, 0))
        hears_all = self._hearing is None or self._hearing.begin(self._start.places(ranks), more)
        line, environment = self._start.command(ranks, more)
        self._losses.begin(ranks, hears_all=hears_all)
        self._said = ""
        asks_later = states.STOP_ASKED in self._state.kept
        self._job = Job(self._start, line, environment, self._tell, messages=self._hearing, asks_later=asks_later)
        folder = self._spec.folder
        self._logs = None if folder is None else LogFiles(Path(folder), continues=bool(self._starts))
        self._starts += 1

    def _say(self, text: str) -> None:
        (say if self._job is None else self._job.say)(text)

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _explain(self, status: int) -> None:
        for text in failures.sentences(
            self._mpirun.written.decode(errors="replace"),
            status,
            self._logs,
            self._losses.places,
            without_package=self._losses.without_package,
            others=self._losses.by_ssh,
        ):
            self._say(text)

    def _say_if_alone(self, ranks: Mapping[str, int]) -> None:
        """Say that each rank of a program of Python worked for itself, as far as ranks of this host show that."""
        count = sum(ranks.values())
        line = PythonLine.of(self._spec.program)
        runs = line is not None and line.source is not ProgramSource.NOTHING
        are_here = any(is_here(host, self._start.here) for host in self._start.places(ranks))
        if count > 1 and runs and are_here and not self._spec.quiet:
            self._say(
                "no rank has called ringreduce.init(), or init_process_group() of torch.distributed: unless something "
                f"else connects them, {count} copies of the program ran each alone (--quiet leaves this line out)"
            )
