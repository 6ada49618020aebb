"""Jobs one after the other, after a failure or on other hosts; each goes on with what the last has left on disk."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ringreduce.common.errors import ConfigError
from ringreduce.launcher import failures
from ringreduce.launcher.failures import Failure
from ringreduce.launcher.hosts import Hosts, Rules
from ringreduce.launcher.job import Job, Mark, say

__all__ = ["Restarts", "Wishes"]

_LOOK_EVERY_S = 1.0
#: How long ranks have to end once the first has said that they begin again. Whatever the others do, the next job begins
#: with what is on disk.
_LEAVING_S = 30.0
#: After so long without an answer, users are told what may be wrong.
_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for.

    Attributes:
        rules: how many ranks, and how long hosts count as failing.
        elastic: whether ranks live on without others.
        watches: whether the ranks are told when there are other hosts to begin again on.
        restarts: how often a job that has failed is started again.
        reset_limit: how often at most the ranks change, in whatever way; None: as often as need be.
        start_timeout_s: how long to wait for enough slots.
        verbose: whether mpirun's own notices of failures are shown.
    """

    rules: Rules
    elastic: bool = False
    watches: bool = False
    restarts: int = 0
    reset_limit: int | None = None
    start_timeout_s: float = 600.0
    verbose: bool = False


class Restarts:
    """Starts jobs until one has ended for good.

    Args:
        wishes: what was asked for.
        listed: returns the slots by host that there are now.
        command: returns the command line and the environment of a job, given its ranks by host and its own variables.
        here: the names of this machine.
        clock: returns seconds.
        words: returns what the rank that failed has said, given what the job has written to standard error.
    """

    def __init__(
        self,
        wishes: Wishes,
        listed: Callable[[], Mapping[str, int]],
        command: Callable[[Mapping[str, int], Mapping[str, str]], tuple[list[str], dict[str, str]]],
        here: frozenset[str],
        clock: Callable[[], float] = time.monotonic,
        words: Callable[[str], Failure | None] = failures.find,
    ) -> None:
        self._wishes, self._listed, self._command, self._here = wishes, listed, command, here
        self._words, self._clock = words, clock
        self._hosts = Hosts()
        self._changes = 0  # of ranks
        self._silent: set[int] = set()  # ranks of the job that runs which have not said that they have begun
        self._any_ended_well = self._begins_again = False
        self._is_connected = False  # whether MPI tells the ranks of deaths
        self._job: Job | None = None  # that runs
        self._leaving: float | None = None  # when the first rank has said that the job begins again
        self._said = ""
        self._asked: float | None = None  # when the ranks were asked first, of the job that runs
        self._has_warned = False

    def run(self) -> int:
        """Return the exit status of the last job.

        Raises:
            ConfigError: there were too few slots for too long.
        """
        starts = failures = 0
        while True:
            status, stopped = self._run_one(starts)
            starts += 1
            if self._begins_again and not stopped:
                self._changes += 1
                continue
            if status == 0 or stopped or failures == self._wishes.restarts:
                return status
            if self._at_limit:
                say(f"the job has ended with status {status}, {self._limit_said}: it is not started again")
                return status
            failures += 1
            self._changes += 1
            self._hosts = self._hosts.failed(self._clock(), self._wishes.rules)
            say(f"the job has ended with status {status}; starting it again ({failures} of {self._wishes.restarts})")

    @property
    def _at_limit(self) -> bool:
        return self._wishes.reset_limit is not None and self._changes >= self._wishes.reset_limit

    @property
    def _limit_said(self) -> str:
        return f"and its ranks have changed {self._changes} times, where --reset-limit is {self._wishes.reset_limit}"

    def _run_one(self, starts: int) -> tuple[int, bool]:
        """Run a job once there are slots for it.

        Returns:
            Its status, which is not 0 if no rank has ended well, and whether it ended because this process was told to.
        """
        ranks = self._wait_for_slots()
        more = {"RINGREDUCE_RESTART": str(starts)} if starts else {}
        if self._wishes.reset_limit is not None:
            more["RINGREDUCE_RESET_LIMIT"] = str(max(self._wishes.reset_limit - self._changes, 0))
        line, environment = self._command(ranks, more)
        self._hosts = self._hosts.started(ranks)
        self._silent = set(range(sum(ranks.values())))
        self._any_ended_well = self._begins_again = self._is_connected = False
        self._leaving = None
        self._said = ""
        self._asked = None
        job = self._job = Job(line, environment, self._hear, verbose=self._wishes.verbose)
        status = job.wait(lambda: self._look(job), _LOOK_EVERY_S if self._wishes.watches else None)
        status = status or int(self._wishes.elastic and not self._any_ended_well)
        if status and not job.stopped and not self._begins_again:
            job.end_line()
            self._tell_failure(job.written.decode(errors="replace"), status)
        return status, job.stopped

    def _tell_failure(self, written: str, status: int) -> None:
        """Say which rank has failed; what it has said only if that is in a file, and so was not shown."""
        killed, failure = failures.find_killed(written), self._words(written)
        ended = f"and the job has ended with status {status}"
        if killed is not None:
            rank, number = killed
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            hint = "; if nobody sent that, memory ran out: see dmesg" * (number == signal.SIGKILL)
            say(f"rank {rank} was ended by {name}, {ended}{hint}")
        elif failure is not None:
            who = "a rank" if failure.rank is None else f"rank {failure.rank}"
            shown = failure.words.rpartition("\n")[2] in written
            say(f"{who} failed, {ended}" + ("" if shown else f":\n{failure.words}"))

    def _wait_for_slots(self) -> Mapping[str, int]:
        rules, wishes = self._wishes.rules, self._wishes
        begin, said = self._clock(), False
        while True:
            self._hosts = replace(self._hosts, listed=self._listed())
            ranks = self._hosts.next_ranks(rules, self._clock())
            if ranks:
                return ranks
            there = sum(self._hosts.usable(rules, self._clock()).values())
            if self._clock() - begin > wishes.start_timeout_s:
                raise ConfigError(
                    f"there are {there} slots that can be used after {wishes.start_timeout_s:g} s, and a job takes "
                    f"{rules.least} (--min-np){self._failing_said}; add hosts, or wait longer with --start-timeout"
                )
            if not said and self._clock() - begin > _LOOK_EVERY_S:
                say(f"waiting for {rules.least} slots; {there} can be used{self._failing_said}")
                said = True
            # No job runs, and hosts do not say when they come: all there is to do is ask.
            time.sleep(_LOOK_EVERY_S / 10)

    @property
    def _failing_said(self) -> str:
        said = self._hosts.failing_said(self._wishes.rules, self._clock())
        return f"; {said}" if said else ""

    def _hear(self, mark: Mark) -> None:
        if mark.what == "connected":
            self._is_connected = True
        elif mark.what == "has begun":
            self._silent.discard(mark.rank)
            self._hosts = self._hosts.began(mark.rank, mark.host)
        elif mark.what == "has ended well":
            self._any_ended_well = True
        elif mark.what == "has died" and self._begins_again:
            pass  # at its end: all that it has done is on disk, and the next job has a rank in its place
        elif mark.what == "has died":
            host = self._hosts.find(mark.host, self._here)
            self._hosts = self._hosts.died(host, self._clock(), self._wishes.rules)
            if not self._is_connected:
                self._end_unconnected(mark.rank)
        elif mark.what == "begin again":
            self._begins_again = True
            self._leaving = self._clock() if self._leaving is None else self._leaving
        elif self._begins_again:  # for these ranks, a death came before they knew that all was on disk: the others left
            self._leaving = -math.inf
        else:
            self._changes += 1
            self._asked = None  # what the ranks were asked before, they have dropped

    def _end_unconnected(self, rank: int) -> None:
        """End a job in which the other ranks would wait for a dead one, as MPI does not know of it yet."""
        if self._job is not None:
            self._is_connected = True  # once is enough
            say(f"rank {rank} has died before all ranks came to init(), so the job is ended")
            self._job.end()

    def _look(self, job: Job) -> None:
        """Tell the ranks, if they should begin again on other hosts; until they do, as they may not listen yet."""
        if self._leaving is not None and self._clock() - self._leaving >= _LEAVING_S:
            job.end()
            return
        self._hosts = replace(self._hosts, listed=self._listed())
        reason = self._hosts.reason_to_change(self._wishes.rules, self._clock())
        # Ranks that have ended well leave no training, and their mpirun may be ending, too.
        if not reason or self._begins_again or self._silent or self._any_ended_well:
            self._asked = None
            return
        if self._at_limit:
            self._say_once(f"{reason}, {self._limit_said}: they go on as they are")
        else:
            self._say_once(f"{reason}; the job begins again after the next commit")
            job.tell_ranks(signal.SIGUSR2)
            self._asked = self._clock() if self._asked is None else self._asked
            if self._clock() - self._asked >= _ANSWER_S and not self._has_warned:
                self._has_warned = True
                say(
                    f"no rank has begun again {_ANSWER_S:g} s after they were asked to: they do with the next "
                    "state.commit() or state.check_host_updates(), and not at all if the program ignores SIGUSR2, has "
                    "handled it since before init(), or has called that on another thread than the main one"
                )

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            say(text)
