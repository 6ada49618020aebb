"""One mpirun: its standard error, the messages of its ranks, and its end."""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.processes import end_with_parent, handles, is_launcher, is_pending
from ringreduce.launcher.chains import Chains, SeenProcess, send
from ringreduce.launcher.failures import KEPT_NBYTES, has_ended_job
from ringreduce.launcher.grace import Grace, programs
from ringreduce.launcher.marks import Hearing, Mark
from ringreduce.launcher.notices import Output
from ringreduce.launcher.shells import shell
from ringreduce.launcher.tracebacks import Tracebacks

_INTERRUPTED = 128 + signal.SIGINT
#: How often to look whether mpirun has ended, or ranks should begin again (seconds).
_LOOK_EVERY_S = 1.0
_FIRST_LOOKS_S = 0.05
#: How long mpirun has to end after SIGTERM, before it and its ranks are killed. It gives ranks less than a second.
_TO_END_S = 15.0
#: How long mpirun has to end by itself after the ranks of this host have ended. Then it gets SIGTERM: ranks of other
#: hosts may still run.
_BY_ITSELF_S = 2.0

#: Starts a rank where others survive it, and says how it has ended.
SUPERVISOR = shell("rank")
#: Lets a SIGUSR2 wait until the rank looks for it. It is blocked before there are any threads, and in all that the rank
#: starts; mpirun sends it to these, too.
HEARING = (
    *(sys.executable, "-I", "-S", "-c"),
    "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}); "
    "os.execvp(sys.argv[1], sys.argv[1:])",
)

_READ_NBYTES = 1 << 16


def say(text: str) -> None:
    """Write a line of this command's own to standard error, unless nobody reads that any more."""
    with _perhaps_unread():
        print(f"ringreduce: {text}", file=sys.stderr, flush=True)


@contextmanager
def _perhaps_unread() -> Iterator[None]:
    """Go on where standard error cannot be written to; if its reader has ended, as after `disown -h`, write no more."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # or Python tried again at its end, and ended with status 120
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)


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


class Signals:
    """The signals to this process that are for the job that runs, or for the run where none does: it then begins none.

    Attributes:
        missed: the first that no job has taken; None: none.
    """

    def __init__(self) -> None:
        self.missed: signal.Signals | None = None
        self._take: Callable[[signal.Signals], bool] = lambda number: False

    def __enter__(self) -> None:
        numbers = {signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
        numbers -= {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()  # as under nohup
        self._before = {each: signal.signal(each, self._on_signal) for each in numbers}

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def go_to(self, take: Callable[[signal.Signals], bool]) -> None:
        """Hand signals to a job, which returns whether it takes them; first the one that came while it was started."""
        self._take = take
        number, self.missed = self.missed, None
        if number is not None:
            self._on_signal(number, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        missed = not self._take(signal.Signals(number)) and number != signal.SIGUSR2  # which is for ranks alone
        self.missed = signal.Signals(number) if missed and self.missed is None else self.missed

    def pause(self, seconds: float, clock: Callable[[], float]) -> None:
        """Wait for some time, by a clock that returns seconds, or until a signal comes."""
        until = clock() + seconds
        while self.missed is None and (left_s := until - clock()) > 0:
            time.sleep(min(left_s, _FIRST_LOOKS_S))  # a signal does not end it, as its handler returns


class Job:
    """An mpirun that has been started.

    Args:
        line: its command line.
        environment: environment of its ranks.
        on_mark: called with each message of a rank.
        messages: receives these; None: nothing does.
        verbose: whether mpirun's own notices of failures are shown.
        grace_s: seconds that ranks of this host have to end after SIGTERM.
        shielded: whether SIGTERM is kept from mpirun, and one that is sent to it counts as sent to this process: Open
            MPI's kills its ranks a quarter of a second after it. (It unblocks signals in these.)
        stdin: standard input of mpirun, as for `subprocess.Popen`; None: that of this process.

    Attributes:
        stopped: whether it ends because this process got SIGTERM, SIGHUP or an interrupt.
        asks_later: whether it will ask its ranks to stop once they listen.
        written: the end of its standard error.
        logins: returns the command lines by which mpirun starts daemons by ssh.
    """

    def __init__(
        self,
        line: Sequence[str],
        environment: Mapping[str, str],
        on_mark: Callable[[Mark], None],
        *,
        messages: Hearing | None = None,
        verbose: bool = False,
        grace_s: float = 0.0,
        shielded: bool = False,
        stdin: int | None = None,
    ) -> None:
        self.stopped = False
        self._has_stopped = False  # a rank, by what its shell has said
        self._to_stop: set[int] = set()  # the ranks that have agreed to, and have not ended yet
        self.asks_later = False
        self._asked: set[tuple[int, int]] = set()  # the processes that were asked to stop; 0: those of other hosts
        self._grace: Grace | None = None
        self._grace_s = grace_s
        self._had_grace = False
        self._has_failed = False  # a rank did, or had to be killed
        self._shielded = shielded
        self._ending = signal.SIGINT if shielded else signal.SIGTERM  # by which mpirun ends its ranks
        self._heard_by_mpirun = -math.inf  # when that got a SIGTERM, and this process acted on it
        self._ends_at = math.inf
        self._ended_line = True
        self.written = b""
        self._ended_by: signal.Signals | None = None
        self._killed_at = math.inf
        self._on_mark = on_mark
        self._messages = messages
        keeps_on = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # as under nohup, which mpirun would undo
        self._process = subprocess.Popen(
            line,
            env=environment,
            stdin=stdin,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=keeps_on,  # a hangup is sent to all processes of a session
            preexec_fn=partial(_begin, os.getpid(), self._ending, shielded=shielded),
        )
        self._output = Output(None if verbose else lambda: self._chains.mpirun.pid)
        self._tracebacks = Tracebacks(_ranks_of(line))
        self._has_shells = SUPERVISOR[-1] in line
        self._chains = Chains(
            self._process.pid,
            self._on_unsaid_death if self._has_shells else None,
            say=self._say,
            patience=_timeout_s(environment) / _LOOK_EVERY_S,
            has_mpirun=is_launcher(Path(line[0]).name),
        )
        self.logins = self._chains.logins
        self._looked = time.monotonic()
        self._starters: dict[int, SeenProcess] = {}  # of daemons on hosts of Slurm

    def wait(self, look: Callable[[], object] = lambda: None) -> int:
        """Return its status when it has ended; that of an interrupted program, if this process was interrupted.

        Args:
            look: is called every second meanwhile.
        """
        try:
            self._forward_errors(look)
            status = self._wait_for_end()
        except KeyboardInterrupt:  # which mpirun has got as well from a terminal, but not from who sends a signal
            say("interrupted; ending all ranks")
            self.stopped = True
            self.end()
            with suppress(KeyboardInterrupt):  # of somebody who does not wait
                self._forward_errors(lambda: None)  # or mpirun would wait for someone to read it
                self._wait_for_end()
            self._process.kill()
            self._process.wait()
            return _INTERRUPTED
        finally:
            for each in self._starters.values():  # of a host that was lost: Slurm would keep them for minutes
                send(each, signal.SIGKILL)
            send(self._chains.mpirun, self._ending)  # a script of the site in its place may have ended before it
            assert self._process.stderr is not None
            self._process.stderr.close()
        if self._is_to_run_again(status):
            return os.EX_TEMPFAIL
        if self._ended_by is not None and (status or self._had_grace):
            say(f"ended by {self._ended_by.name}; all ranks have ended")
            return 128 + self._ended_by
        if status == os.EX_TEMPFAIL:
            return 1  # which is no stop
        return status if status >= 0 else 128 - status

    def _is_to_run_again(self, status: int) -> bool:
        """Return whether the ranks have stopped, and none of those that were to has ended in another way."""
        if self._has_shells:
            return self._has_stopped and not self._to_stop
        has_failed = self._has_failed or has_ended_job(self.written.decode(errors="replace"))
        return status == os.EX_TEMPFAIL and not has_failed

    def signal_ranks(self) -> None:
        """Have mpirun signal to all ranks that the hosts have changed; not before all are connected."""
        send(self._chains.mpirun, signal.SIGUSR2)

    def end(self) -> None:
        """Have mpirun end all ranks; it is killed if it does not."""
        self._killed_at = min(self._killed_at, time.monotonic() + _TO_END_S)
        grace = self._grace
        self._grace = None
        self._ends_at = math.inf
        send(self._chains.mpirun, self._ending)
        if grace is not None:
            grace.end()

    def kill(self) -> None:
        """Kill mpirun, and the ranks of this host; daemons of other hosts notice, and end theirs."""
        self._killed_at = -math.inf
        self._kill_if_late()

    def take(self, number: signal.Signals) -> bool:
        """Do what a signal to this process asks for; return False if the job has ended before."""
        if self._process.poll() is not None:
            return False
        if number in (signal.SIGUSR1, signal.SIGUSR2):
            self._pass_on(number)
        # Who signals all processes sends one to each.
        elif number != signal.SIGTERM or time.monotonic() - self._heard_by_mpirun >= _LOOK_EVERY_S:
            self._end_by(number)
        return True

    def _end_by(self, number: signal.Signals) -> None:
        self._ended_by = number
        ranks = self._chains.ranks()
        mpirun = self._chains.mpirun
        passes_on = is_launcher(mpirun.program) and handles(mpirun.pid, signal.SIGUSR1)
        if number != signal.SIGTERM or self.stopped or not self._grace_s or not (ranks or passes_on):
            if self._grace is not None:
                self._has_failed = True
                self._grace.kill()
            self.stopped = True
            self.end()
            return
        self.stopped = self._had_grace = True
        if ranks:
            self._grace = Grace(mpirun.pid, self._grace_s, holds=not self._has_shells, known=ranks)
        else:  # they are on other hosts, and mpirun passes no SIGTERM on
            self._ends_at = time.monotonic() + self._grace_s
            send(mpirun, signal.SIGUSR1)

    def _pass_on(self, number: signal.Signals) -> None:
        """Have mpirun send a signal to all ranks; not before it is ready, as it would end by that."""
        if self._grace is not None:
            return
        if handles(self._chains.mpirun.pid, number):
            send(self._chains.mpirun, number)
        elif number == signal.SIGUSR1:
            self.asks_later = True

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

    def _say(self, text: str) -> None:
        self.end_line()
        say(text)

    def _on_unsaid_death(self, rank: int) -> None:
        if math.isinf(self._killed_at):  # else all are ended
            self._on_mark(Mark("has died", rank, os.environ.get("PMIX_HOSTNAME") or os.uname().nodename))

    def _look(self) -> bool:
        """Look after the processes of this host, every second; return whether this was done now."""
        self._kill_if_late()
        pids = {self._process.pid, self._chains.mpirun.pid} if self._shielded else set()
        if math.isinf(self._heard_by_mpirun) and any(is_pending(each, signal.SIGTERM) for each in pids):
            self._heard_by_mpirun = time.monotonic()
            if not self.stopped:
                self._end_by(signal.SIGTERM)
        grace = self._grace
        if grace is not None:
            if grace.is_over() and self._grace is grace:  # else a second signal has ended it
                self._grace = None
                self._has_failed = grace.has_failed
                self._ends_at = time.monotonic() + _BY_ITSELF_S
                grace.end()
            return False
        if time.monotonic() >= self._ends_at:
            self.end()
        if self._chains.known and time.monotonic() < self._looked + _LOOK_EVERY_S:
            return False
        self._looked = time.monotonic()
        self._chains.look()
        if self._shielded and self._chains.is_stuck and time.monotonic() < self._killed_at:
            self._say(
                f"mpirun (process {self._chains.mpirun.pid}) takes no note of processes of its own that have ended: it "
                "hangs, and is killed"
            )
            self.kill()
        self.asks_later = self.asks_later and not self.ask_to_stop()
        self._starters |= {each.pid: each for each in self._chains.mpirun.children() if each.name == "srun"}
        return True

    @property
    def _look_again_s(self) -> float:
        """Seconds until the next look: few, until the processes of ranks are known."""
        return _LOOK_EVERY_S if self._chains.known and self._grace is None else _FIRST_LOOKS_S

    def _wait_for_end(self) -> int:
        while True:
            self._look()
            with suppress(subprocess.TimeoutExpired):
                return self._process.wait(self._look_again_s)

    def _kill_if_late(self) -> None:
        """Kill mpirun, and its ranks on this host, if it was asked to end long ago; ranks of other hosts then end."""
        if time.monotonic() < self._killed_at or self._process.poll() is not None:
            return
        ranks = self._chains.mpirun.children()
        send(self._chains.mpirun, signal.SIGKILL)
        self._process.kill()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
                os.killpg(rank.pid, signal.SIGKILL)  # what it has started: mpirun gives each rank a group

    def _forward_errors(self, look: Callable[[], object]) -> None:
        """Until mpirun closes it, or has ended: others, such as an ssh that stays for later, may hold it open."""
        assert self._process.stderr is not None
        waiting = select.poll()
        waiting.register(self._process.stderr, select.POLLIN)
        if self._messages is not None:
            waiting.register(self._messages, select.POLLIN)
        while True:
            has_ended = self._process.poll() is not None
            if self._look():
                look()
            ready = [descriptor for descriptor, _ in waiting.poll(self._look_again_s * 1000)]
            for mark in () if self._messages is None else self._messages.read():
                self._hear(mark)
            if self._process.stderr.fileno() in ready:
                chunk = self._process.stderr.read(_READ_NBYTES)
                if not chunk:
                    break
                self.written = (self.written + chunk)[-KEPT_NBYTES:]
                self._show(self._tracebacks.feed(self._output.feed(chunk)))
            elif not ready:
                if has_ended:
                    break
                self._show(self._tracebacks.feed(self._output.idle()) + self._tracebacks.idle())
        self._show(self._tracebacks.feed(self._output.idle()) + self._tracebacks.rest())
        for mark in () if self._messages is None else self._messages.last():
            self._hear(mark)

    def _hear(self, mark: Mark) -> None:
        """Note who is to stop, and does, and whose end is known."""
        if mark.what == "agrees to stop":  # the second time after a death, which the others survive
            self._to_stop = {mark.rank} if mark.rank in self._to_stop else self._to_stop | {mark.rank}
        elif mark.what in ("has stopped", "has ended well"):
            self._has_stopped |= mark.what == "has stopped"
            self._to_stop.discard(mark.rank)
        if mark.what in ("has ended well", "has stopped", "has died"):
            self._chains.has_told(mark.rank)
        self._on_mark(mark)

    def end_line(self) -> None:
        """End the line that the job has written last, if it has not."""
        if not self._ended_line:
            self._show(b"\n")

    def _show(self, text: bytes) -> None:
        if text:
            self._ended_line = text.endswith(b"\n")
            with _perhaps_unread():  # the ranks go on
                sys.stderr.buffer.write(text)
                sys.stderr.flush()
