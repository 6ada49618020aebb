"""One mpirun: its standard error, the messages of its ranks, and the processes below it on this host."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import own_host
from ringreduce.common.processes import end_with_parent, handles, is_launcher, is_pending
from ringreduce.launcher import states
from ringreduce.launcher.chains import Chains, SeenProcess, send
from ringreduce.launcher.failures import KEPT_NBYTES
from ringreduce.launcher.grace import Grace, programs
from ringreduce.launcher.marks import DIED, DIED_UNSAID, ENDED_WELL, STOPPED, Hearing, Mark
from ringreduce.launcher.notices import Output
from ringreduce.launcher.start import Start
from ringreduce.launcher.states import Happening, LaunchEvent
from ringreduce.launcher.stderr import perhaps_unread, say
from ringreduce.launcher.tracebacks import Tracebacks

#: How often to look whether mpirun has ended, or ranks should begin again (seconds).
_LOOK_EVERY_S = 1.0
_FIRST_LOOKS_S = 0.05

_READ_NBYTES = 1 << 16


def _ranks_of(line: Sequence[str]) -> int | None:
    """Return the number of ranks that a command line of mpirun starts; None if it names none."""
    number = line[line.index("-np") + 1] if "-np" in line[:-1] else ""
    return int(number) if number.isdigit() else None


def _begin(parent: int, ending: signal.Signals, *, shielded: bool) -> None:
    """Let this process, which becomes mpirun, end with its parent, and with its ranks then."""
    if shielded:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    end_with_parent(parent, ending)


def _timeout_s(environment: Mapping[str, str]) -> float:
    try:
        return Config.from_environ(environment).timeout_s
    except ConfigError:  # as the ranks will say
        return Config().timeout_s


class Job:
    """An mpirun that has been started; it tells what happens to it and to its ranks.

    SIGTERM is kept from Open MPI's, which kills its ranks a quarter of a second after it, and one that is sent to it
    counts as sent to this process. (It unblocks signals in these.)

    Args:
        start: of the job.
        line: its command line.
        environment: environment of its ranks.
        tell: called with each event.
        messages: receives the messages of the ranks; None: nothing does.
        asks_later: whether it asks its ranks to stop once they listen.

    Attributes:
        written: the end of its standard error.
        logins: returns the command lines by which mpirun starts daemons by ssh.
    """

    def __init__(
        self,
        start: Start,
        line: Sequence[str],
        environment: Mapping[str, str],
        tell: Callable[[LaunchEvent], None],
        *,
        messages: Hearing | None = None,
        asks_later: bool = False,
    ) -> None:
        self._start = start
        self._tell = tell
        self._messages = messages
        self._asks_later = asks_later
        self._asked: set[tuple[int, int]] = set()  # the processes that were asked to stop; 0: those of other hosts
        self._grace: Grace | None = None
        self._shielded = start.mpirun.kind == "Open MPI"
        self._ending = signal.SIGINT if self._shielded else signal.SIGTERM  # by which mpirun ends its ranks
        self._heard_by_mpirun = -math.inf  # when that got a SIGTERM, and this process acted on it
        self._ended_line = True
        self.written = b""
        keeps_on = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup, which mpirun would undo
        self._process = subprocess.Popen(
            line,
            env=environment,
            stdin=None if start.passes_stdin else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=keeps_on,  # a hangup is sent to all processes of a session
            preexec_fn=partial(_begin, os.getpid(), self._ending, shielded=self._shielded),
        )
        self._output = Output(None if start.spec.verbose else lambda: self._chains.mpirun.pid)
        self._tracebacks = Tracebacks(_ranks_of(line))
        self._chains = Chains(
            self._process.pid,
            (lambda rank: tell(Mark(DIED_UNSAID, rank, own_host()))) if start.spec.elastic else None,
            say=self.say,
            patience=_timeout_s(environment) / _LOOK_EVERY_S,
            has_mpirun=is_launcher(Path(line[0]).name),
            ranks=1 if start.remote else _ranks_of(line) or 1,
        )
        self.logins = self._chains.logins
        self._looked = time.monotonic()
        self._starters: dict[int, SeenProcess] = {}  # of daemons on hosts of Slurm

    def wait(self, look: Callable[[], object]) -> int:
        """Return its status when it has ended, also after an interrupt.

        Args:
            look: is called every second meanwhile, but not while ranks have ``--grace``.
        """
        try:
            self._forward_errors(look)
            status = self._wait_for_end()
        except KeyboardInterrupt:  # which mpirun has got as well from a terminal, but not from who sends a signal
            self._tell(Happening(states.INTERRUPTED, "interrupted; ending all ranks"))
            with suppress(KeyboardInterrupt):  # of somebody who does not wait
                self._forward_errors(lambda: None)  # or mpirun would wait for someone to read it
                self._wait_for_end()
            self._process.kill()
            status = self._process.wait()
        finally:
            for each in self._starters.values():  # of a host that was lost: Slurm would keep them for minutes
                send(each, signal.SIGKILL)
            send(self._chains.mpirun, self._ending)  # a script of the site in its place may have ended before it
            assert self._process.stderr is not None
            self._process.stderr.close()
        return status if status >= 0 else 128 - status

    @property
    def has_ended(self) -> bool:
        """Whether it hears no signal any more."""
        return self._process.poll() is not None

    # ---- what it is told to do ----

    def ask_to_leave(self) -> None:
        """Have mpirun signal to all ranks that the hosts have changed; not before all are connected."""
        send(self._chains.mpirun, signal.SIGUSR2)

    def end(self) -> None:
        """Have mpirun end all ranks."""
        grace = self._grace
        self._grace = None
        send(self._chains.mpirun, self._ending)
        if grace is not None:
            grace.end()

    def kill(self) -> None:
        """Kill mpirun, and the ranks of this host; daemons of other hosts notice, and end theirs."""
        if self.has_ended:
            return
        ranks = self._chains.mpirun.children()
        send(self._chains.mpirun, signal.SIGKILL)
        self._process.kill()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
                os.killpg(rank.pid, signal.SIGKILL)  # what it has started: mpirun gives each rank a group

    def takes_twice(self, number: int) -> bool:
        """Return whether mpirun got this signal a moment ago: who signals all processes sends one to each."""
        return number == signal.SIGTERM and time.monotonic() - self._heard_by_mpirun < _LOOK_EVERY_S

    def can_give_grace(self, number: int) -> bool:
        """Return whether ranks can be given time to end after a signal."""
        has_time = number == signal.SIGTERM and self._start.spec.grace_s > 0
        return has_time and (bool(self._chains.ranks()) or self._passes_on())

    def give_grace(self) -> None:
        """Ask the ranks to end."""
        ranks = self._chains.ranks()
        mpirun = self._chains.mpirun
        if ranks:
            self._grace = Grace(mpirun.pid, self._start.spec.grace_s, holds=not self._start.spec.elastic, known=ranks)
        elif self._passes_on():  # they are on other hosts, and mpirun passes no SIGTERM on
            send(mpirun, signal.SIGUSR1)

    def _passes_on(self) -> bool:
        mpirun = self._chains.mpirun
        return is_launcher(mpirun.program) and handles(mpirun.pid, signal.SIGUSR1)

    def kill_ranks(self) -> None:
        """Kill the ranks of this host that have time to end."""
        if self._grace is not None:
            self._grace.kill()

    def pass_on(self, number: int) -> None:
        """Have mpirun send a signal to all ranks; not before it is ready, as it would end by that."""
        if self._grace is not None:
            return
        if handles(self._chains.mpirun.pid, number):
            send(self._chains.mpirun, signal.Signals(number))
        elif number == signal.SIGUSR1:
            self._asks_later = True

    def ask_to_stop(self) -> bool:
        """Ask the listening ranks of this host to stop, which pass it on to all; return whether one listens.

        Each is asked once. Where no rank is on this host, mpirun passes it on.
        """
        ranks = self._chains.ranks()
        asked = False
        for each in (program for rank in ranks for program in programs(rank)):
            key = each.pid, each.began
            if not each.is_shell and key not in self._asked and handles(each.pid, signal.SIGUSR1):
                send(each, signal.SIGUSR1)
                self._asked.add(key)
                asked = True
        if not ranks and self._chains.known and not self._asked and handles(self._chains.mpirun.pid, signal.SIGUSR1):
            self._asked.add((0, 0))
            asked = True
            send(self._chains.mpirun, signal.SIGUSR1)
        return asked

    def say(self, text: str) -> None:
        """Write a line of this command's own, after the end of what the job has written last."""
        if not self._ended_line:
            self._show(b"\n")
        say(text)

    # ---- what it tells ----

    def _look_after_processes(self) -> bool:
        """Look after the processes of this host, every second; return whether this was done now."""
        pids = {self._process.pid, self._chains.mpirun.pid} if self._shielded else set()
        if math.isinf(self._heard_by_mpirun) and any(is_pending(each, signal.SIGTERM) for each in pids):
            self._heard_by_mpirun = time.monotonic()
            has_grace = self.can_give_grace(signal.SIGTERM)
            self._tell(Happening(states.END_ASKED_MPIRUN, number=signal.SIGTERM, has_grace=has_grace))
        grace = self._grace
        if grace is not None:
            if grace.is_over() and self._grace is grace:  # else a second signal has ended it
                self._grace = None
                if grace.has_failed:
                    self._tell(Happening(states.FAILED))
                self._tell(Happening(states.GRACE_OVER))
                grace.end()
            return False
        self._tell(Happening(states.TIME))
        if self._chains.known and time.monotonic() < self._looked + _LOOK_EVERY_S:
            return False
        self._looked = time.monotonic()
        self._chains.look()
        if self._shielded and self._chains.is_stuck:
            mpirun = f"mpirun (process {self._chains.mpirun.pid})"
            text = f"{mpirun} takes no note of processes of its own that have ended: it hangs, and is killed"
            self._tell(Happening(states.STUCK, text))
        self._asks_later = self._asks_later and not self.ask_to_stop()
        self._starters |= {each.pid: each for each in self._chains.mpirun.children() if each.name == "srun"}
        return True

    @property
    def _look_again_s(self) -> float:
        """Seconds until the next look: few, until the processes of ranks are known."""
        return _LOOK_EVERY_S if self._chains.known and self._grace is None else _FIRST_LOOKS_S

    def _wait_for_end(self) -> int:
        while True:
            self._look_after_processes()
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(self._look_again_s)

    def _forward_errors(self, look: Callable[[], object]) -> None:
        """Until mpirun closes it, or has ended: others, such as an ssh that stays for later, may hold it open."""
        assert self._process.stderr is not None
        waiting = select.poll()
        waiting.register(self._process.stderr, select.POLLIN)
        if self._messages is not None:
            waiting.register(self._messages, select.POLLIN)
        written = time.monotonic()
        while True:
            has_ended = self.has_ended
            if self._look_after_processes():
                look()
            ready = [descriptor for descriptor, _ in waiting.poll(self._look_again_s * 1000)]
            for mark in () if self._messages is None else self._messages.read():
                self._hear(mark)
            if self._process.stderr.fileno() in ready:
                chunk = self._process.stderr.read(_READ_NBYTES)
                if not chunk:
                    break
                written = time.monotonic()
                self.written = (self.written + chunk)[-KEPT_NBYTES:]
                self._show(self._tracebacks.feed(self._output.feed(chunk)))
            elif has_ended:
                break
            elif time.monotonic() - written >= self._look_again_s:  # messages come all the time
                self._show(self._tracebacks.feed(self._output.idle()) + self._tracebacks.idle())
        self._show(self._tracebacks.feed(self._output.idle()) + self._tracebacks.rest())
        for mark in () if self._messages is None else self._messages.last():
            self._hear(mark)

    def _hear(self, mark: Mark) -> None:
        if mark.what in (ENDED_WELL, STOPPED, DIED):
            self._chains.has_told(mark.rank)
        self._tell(mark)

    def _show(self, text: bytes) -> None:
        if text:
            self._ended_line = text.endswith(b"\n")
            with perhaps_unread():  # the ranks go on
                sys.stderr.buffer.write(text)
                sys.stderr.flush()
