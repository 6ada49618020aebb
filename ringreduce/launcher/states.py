"""Where a job is, what happens to it, and what follows, as one table.

A job is one mpirun after another, until it has ended for good. Here are pure functions: the launcher's loop tells them
what happens, as events, and does what they answer, as actions (`ringreduce.launcher.restarts`).
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from ringreduce.common.launch import STALLED
from ringreduce.launcher import growth, marks
from ringreduce.launcher.failures import name_rank
from ringreduce.launcher.hosts import UNNAMED, Hosts, SizePolicy
from ringreduce.launcher.marks import Mark
from ringreduce.launcher.spec import LaunchSpec

#: Before an mpirun that has failed is started again: the first time, twice as long after each further failure, at most.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
#: How long mpirun has to end by itself after the ranks of this host have ended. Then it gets SIGTERM: ranks of other
#: hosts may still run.
_BY_ITSELF_S = 2.0
#: A wait for hosts that is shorter is not worth a line.
_UNSAID_WAIT_S = 1.0
#: The status of Open MPI's mpirun when a daemon ends, which it says on standard output. No rank of an elastic job has
#: it: the shells over them end by a signal.
_NO_DAEMON = 255


class Phase(Enum):
    """What a job is doing; each value is its name in the drawing of `docs/architecture.md`."""

    WAITING = "waiting"  # until there are hosts enough
    STARTING = "starting"  # mpirun runs; a death now would not be noticed by the other ranks
    RUNNING = "running"  # all ranks are connected; only those of elastic jobs say so
    LEAVING = "leaving"  # the ranks end for a start on other hosts: their commit is on disk
    STOPPING = "stopping"  # the ranks have --grace to end
    ENDING = "ending"  # mpirun ends its ranks
    KILLED = "killed"  # mpirun and the ranks of this host were
    PAUSING = "pausing"  # after a failure, before the next start
    ENDED = "ended"  # for good


#: How long a phase takes at most, where that is always the same. Once ranks leave, all is on disk: whatever the others
#: do, the next mpirun begins with that. mpirun gives ranks less than a second to end. SIGKILL needs no limit.
_LIMITS_S = {Phase.LEAVING: 30.0, Phase.ENDING: 15.0}


class Do(Enum):
    """What the loop is to do."""

    SAY = "say a text"
    SAY_ONCE = "say a text, unless it was the last that was said in this way"
    START = "start mpirun, with the ranks that now count as living"
    ASK_TO_STOP = "ask the ranks that listen to stop, and say a text once one does"
    ASK_TO_LEAVE = "ask the ranks to begin again on other hosts"
    PASS_ON = "pass a signal on to the ranks"
    GIVE_GRACE = "ask the ranks to end, and give them time"
    KILL_RANKS = "kill those that still have time to end"
    END = "have mpirun end its ranks"
    KILL = "kill mpirun and the ranks of this host"
    EXPLAIN = "say why the ranks have failed, with this status"
    SAY_IF_ALONE = "say that each rank worked for itself, if they could have connected"
    LIST_AGAIN = "ask a script anew which hosts there are"
    LOSE = "note that a host is lost, for what else waits for it"
    FIND = "note that it answers again"
    GIVE_UP = "raise an error with a text"


class Action(NamedTuple):
    """Something to do, with a text, or with the number of a signal or a status, where it takes one."""

    do: Do
    text: str = ""
    number: int = 0


# ---- events: each has a `what`, by which the table knows it ----


class Happening(NamedTuple):
    """Something that happens; the marks of ranks are events, too.

    Attributes:
        what: one of the words below.
        text: what users read of it; why a host is lost.
        number: of a signal.
        host: which is lost, by its name in the list or there; or which answers again.
        has_grace: whether ranks can be given time to end.
    """

    what: str
    text: str = ""
    number: int = 0
    host: str = ""
    has_grace: bool = False


class HostsListed(NamedTuple):
    """The slots by host that there are now."""

    slots: Mapping[str, int]
    what: str = "hosts are listed"


class MpirunEnded(NamedTuple):
    """mpirun has ended.

    Attributes:
        status: of mpirun.
        has_error: whether a rank of a job that is not elastic has written that it ends the job by an error.
        has_logged_error: whether one has in a file of its own.
        has_lost_daemon: whether mpirun says that it has lost one.
        lost: the hosts that it has no connection to, by their names there.
        is_due: whether the ranks are to stop, as the allocation ends.
    """

    status: int
    has_error: bool = False
    has_logged_error: bool = False
    has_lost_daemon: bool = False
    lost: tuple[str, ...] = ()
    is_due: bool = False
    what: str = "mpirun ends"


LaunchEvent = Mark | Happening | HostsListed | MpirunEnded

# Of this host.
FAILED = "a rank here was killed or failed"
GRACE_OVER = "all ranks here have ended"
STUCK = "mpirun hangs"
# Of other hosts.
SILENT = "a host is silent"
CUT_OFF = "a host cannot connect"
LATE = "ranks come too late"
UNREACHED = "a host is not reached"
ANSWERS = "a lost host answers"
# Signals to this process, and to mpirun.
END_ASKED = "SIGTERM, SIGHUP"
END_ASKED_MPIRUN = "SIGTERM to mpirun"
STOP_ASKED = "SIGUSR1"
USERS_SIGNAL = "SIGUSR2"
MISSED = "a signal after mpirun's end"
INTERRUPTED = "interrupt"
# Of the time.
STOP_DUE = "the allocation ends"
TIME = "the limit passes"  # which is told again and again, and does nothing before that
# No events, but what has come of one, and is remembered like them.
_HAD_NO_START = "a rank died before all were connected"
_HAD_GRACE = "ranks were given time"
_WAITED = "users know of the wait"
_UNANSWERED = "users know that no rank has begun again"


# ---- the state ----


class Terms(NamedTuple):
    """What users have asked for; see `ringreduce.launcher.start.Start`."""

    spec: LaunchSpec
    policy: SizePolicy
    asks_lost_hosts: bool = False


@dataclass(frozen=True)
class JobState:
    """Where a job is.

    Attributes:
        terms: which never change.
        phase: what it is doing.
        until: when the time for that is over.
        hosts: which it may use, and where its ranks are.
        heard: what has happened since mpirun was started, and was not ignored.
        kept: what has happened ever, and counts for each mpirun after that.
        to_stop: the ranks that have agreed to stop, and have not ended yet.
        signal: by which it ends, or which no rank has heard: then no other mpirun is started.
        changes: how often its ranks have changed.
        failed: number of failures since the last mpirun that has made steps.
        status: its exit status, once it has ended.
    """

    terms: Terms
    phase: Phase = Phase.WAITING
    until: float = math.inf
    hosts: Hosts = field(default_factory=Hosts)
    heard: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    to_stop: frozenset[int] = frozenset()
    signal: int | None = None
    changes: int = 0
    failed: int = 0
    status: int = 0

    @property
    def stops(self) -> bool:
        """Whether mpirun ends because of a signal."""
        return not self.heard.isdisjoint((END_ASKED, INTERRUPTED))

    @property
    def leaves(self) -> bool:
        """Whether the ranks begin again; a death is none then: what they have done is on disk."""
        return marks.BEGINS_AGAIN in self.heard

    @property
    def has_commit(self) -> bool:
        """Whether there is one to go on from."""
        return marks.COMMIT in self.heard | self.kept

    @property
    def may_regain_hosts(self) -> bool:
        """Whether a lost host is of use as soon as it answers."""
        return self.phase is Phase.WAITING or (self.phase is Phase.RUNNING and marks.COMMIT in self.heard)

    @property
    def is_at_limit(self) -> bool:
        """Whether its ranks may not change any more."""
        return self.terms.spec.reset_limit is not None and self.changes >= self.terms.spec.reset_limit

    @property
    def limit_said(self) -> str:
        """That in words."""
        return f"and its ranks have changed {self.changes} times, where --reset-limit is {self.terms.spec.reset_limit}"

    def going_to(self, phase: Phase, now: float) -> JobState:
        """Return this in a phase, and until when at most; what was killed is not just ending any more."""
        if phase is self.phase or (phase is Phase.ENDING and self.phase is Phase.KILLED):
            return self
        return replace(self, phase=phase, until=now + _LIMITS_S.get(phase, math.inf))

    def ended(self, status: int) -> JobState:
        """Return this once the job has ended for good."""
        return replace(self, phase=Phase.ENDED, status=status)

    def noting(self, *what: str) -> JobState:
        """Return this, with more that was heard."""
        return replace(self, heard=self.heard.union(what))

    def outlives_loss(self, now: float) -> bool:
        """Return whether a job that has lost hosts is started on the others, and no restart is spent.

        It goes on from a commit; or has no step to lose yet, and hosts enough.
        """
        policy = self.terms.policy
        left = self.hosts.failed(now, policy).next_ranks(policy, now)
        return self.has_commit or (self.terms.spec.elastic and marks.CONNECTED not in self.heard and bool(left))


Answer = tuple[JobState, tuple[Action, ...]]


def _say(text: str) -> Action:
    return Action(Do.SAY, text)


# ---- what an event changes, beyond its row of the table: while mpirun runs ----


def _gone_on(state: JobState, event: Mark, now: float) -> Answer:
    """Survivors have a new world, and have dropped what they were asked; if others leave, that is what counts."""
    if state.leaves:  # a rank failed before these knew that all was on disk: the others have ended
        return replace(state, until=now) if state.phase is Phase.LEAVING else state, ()
    until = math.inf if state.phase is Phase.RUNNING else state.until
    return replace(state, changes=state.changes + 1, until=until), ()


def _stop_agreed(state: JobState, mark: Mark, now: float) -> Answer:
    """Ranks agree a second time after a death, which the others survive."""
    return replace(state, to_stop=(frozenset() if mark.rank in state.to_stop else state.to_stop) | {mark.rank}), ()


def _ended_well(state: JobState, mark: Mark, now: float) -> Answer:
    return replace(state, to_stop=state.to_stop - {mark.rank}), ()


def _died(state: JobState, mark: Mark, now: float) -> Answer:
    """Note where a rank has died; if not all are connected, the others would wait for it, and the job is ended."""
    if state.leaves:
        return state, ()
    host = state.hosts.host_of(mark.rank, mark.host)
    state = replace(state, hosts=state.hosts.died(host, now, state.terms.policy))
    if not state.heard.isdisjoint((marks.CONNECTED, _HAD_NO_START)):
        return state, ()
    who = name_rank(mark.rank, {mark.rank: host} if marks.COME in state.heard else {})
    actions = (_say(f"{who} has died before all ranks came to init(), so the job is ended"), Action(Do.END))
    return state.noting(_HAD_NO_START).going_to(Phase.ENDING, now), actions


def _lose(state: JobState, event: Happening, now: float) -> Answer:
    """Go on without a host, and say what becomes of it."""
    host = state.hosts.known_as(event.host)
    if host is None:  # of another job, as a rank may write of it, unless this one's hosts have no names here
        said = _say(f"{event.host} is lost: {event.text}")
        return state, (Action(Do.LOSE, event.host), said) if UNNAMED in state.hosts.listed else ()
    if host in state.hosts.lost:
        return state, ()
    state = replace(state, hosts=state.hosts.without(host))
    what_follows = "the job ends"
    if not state.is_at_limit and (state.outlives_loss(now) or state.failed < state.terms.spec.restarts):
        comes_back = state.terms.asks_lost_hosts and host in state.hosts.returning()
        what_follows = "it is used again once it answers" if comes_back else "it is left out from now on"
    return state, (Action(Do.LOSE, host), _say(f"{host} is lost: {event.text}; {what_follows}"))


def _answers(state: JobState, event: Happening, now: float) -> Answer:
    hosts = state.hosts.returned(event.host)
    return replace(state, hosts=hosts), (Action(Do.FIND, event.host), _say(f"{event.host} answers again"))


# ---- signals, and the time that ranks have ----


def _end_asked(state: JobState, event: Happening, now: float) -> Answer:
    """Give the ranks time to end, if that can be."""
    state = replace(state.noting(END_ASKED), signal=event.number)
    if not event.has_grace:
        return state.going_to(Phase.ENDING, now), (Action(Do.END),)
    until = now + state.terms.spec.grace_s
    return replace(state.noting(_HAD_GRACE), phase=Phase.STOPPING, until=until), (Action(Do.GIVE_GRACE),)


def _end_asked_again(state: JobState, event: Happening, now: float) -> Answer:
    """A second signal takes the time from the ranks."""
    state = state.noting(FAILED) if state.phase is Phase.STOPPING else state
    return replace(state, signal=event.number), ()


def _grace_over(state: JobState, event: Happening, now: float) -> Answer:
    return replace(state, until=now + _BY_ITSELF_S), ()


def _stop_asked(state: JobState, event: Happening, now: float) -> Answer:
    """Ranks that end for a new start hear nothing: the run is warned then."""
    state = replace(state, kept=state.kept | {STOP_ASKED})
    return _missed(state, event, now) if state.leaves and not state.stops else (state, ())


def _missed(state: JobState, event: Happening, now: float) -> Answer:
    return replace(state, signal=event.number if state.signal is None else state.signal), ()


def _unstarted(state: JobState, event: Happening, now: float) -> Answer:
    number = signal.Signals(event.number)
    said = _say(f"{number.name} has come while no job runs, and none is begun")
    return state.ended(os.EX_TEMPFAIL if number == signal.SIGUSR1 else 128 + number), (said,)


# ---- other hosts, and the next start ----


def _listed(state: JobState, event: HostsListed, now: float) -> Answer:
    return replace(state, hosts=replace(state.hosts, listed=event.slots)), ()


def _may_grow(state: JobState, event: HostsListed, now: float) -> Answer:
    """Ask the ranks to begin again on other hosts, and again, as they may not listen yet."""
    state, _ = _listed(state, event, now)
    # Without an option for growth, ranks that have died are not replaced.
    may_change = bool(state.terms.spec.growth) or ANSWERS in state.heard
    then = sum(state.hosts.next_ranks(state.terms.policy, now).values()) if may_change else 0
    reason = growth.reason_to_change(state.hosts.living, event.slots, then)
    # Ranks that have ended well leave no training, and their mpirun may be ending, too.
    if not reason or marks.ENDED_WELL in state.heard:
        return replace(state, until=math.inf), ()
    if state.is_at_limit:
        return state, (Action(Do.SAY_ONCE, f"{reason}, {state.limit_said}: they go on as they are"),)
    said = Action(Do.SAY_ONCE, f"{reason}; the job begins again after the next commit")
    return replace(state, until=min(state.until, now + growth.ANSWER_S)), (said, Action(Do.ASK_TO_LEAVE))


def _unanswered(state: JobState, event: Happening, now: float) -> Answer:
    """Say once what may be wrong."""
    said = () if _UNANSWERED in state.kept else (_say(growth.UNANSWERED),)
    return replace(state, until=math.inf, kept=state.kept | {_UNANSWERED}), said


def _wait(state: JobState, event: HostsListed, now: float) -> Answer:
    """Start mpirun once there are hosts enough; give up after --start-timeout."""
    policy = state.terms.policy
    limit_s = state.terms.spec.start_timeout_s
    state, _ = _listed(state, event, now)
    if math.isinf(state.until):
        state = replace(state, until=now + limit_s)
    ranks = state.hosts.next_ranks(policy, now)
    if ranks:
        state = replace(state, hosts=state.hosts.started(ranks), heard=frozenset(), to_stop=frozenset())
        return state.going_to(Phase.STARTING, now), (Action(Do.START),)
    there = sum(state.hosts.usable(policy, now).values())
    unused = "".join(f"; {each}" for each in [state.hosts.unused_said(policy, now)] if each)
    if now > state.until:
        error = Action(
            Do.GIVE_UP,
            f"after {limit_s:g} s there are {there} slots to use, and the job needs "
            f"{policy.least} (--min-np){unused}; add hosts, or wait longer with --start-timeout",
        )
        return state.ended(1), (error,)
    if _WAITED in state.heard or now - (state.until - limit_s) <= _UNSAID_WAIT_S:
        return state, ()
    return state.noting(_WAITED), (_say(f"waiting for {policy.least} slots; {there} can be used{unused}"),)


# ---- mpirun has ended ----


def _status(state: JobState, event: MpirunEnded) -> int:
    """Return the status of a job that has ended with mpirun: EX_TEMPFAIL alone says that it is to be run again."""
    is_elastic = state.terms.spec.elastic
    if INTERRUPTED in state.heard:
        return 128 + signal.SIGINT
    if is_elastic:
        has_stopped = marks.STOPPED in state.heard and not state.to_stop
    else:
        has_stopped = event.status == os.EX_TEMPFAIL and not event.has_error and FAILED not in state.heard
    if has_stopped:
        return 1 if event.has_logged_error else os.EX_TEMPFAIL  # where ranks write to files, mpirun says one end alone
    if _ends_by_signal(state, event):
        return 128 + (state.signal or 0)
    if event.status:
        return 1 if event.status == os.EX_TEMPFAIL else event.status
    # mpirun may end with status 0 though it has lost ranks.
    has_ended_well = marks.ENDED_WELL in state.heard and _HAD_NO_START not in state.heard
    return int(event.has_lost_daemon or (is_elastic and not has_ended_well))


def _ends_by_signal(state: JobState, event: MpirunEnded) -> bool:
    return state.stops and (event.status != 0 or _HAD_GRACE in state.heard)


def _mpirun_ended(state: JobState, event: MpirunEnded, now: float) -> Answer:
    """Say how it has ended, and decide whether the job is started again."""
    status = _status(state, event)
    actions: list[Action] = []
    if _ends_by_signal(state, event) and status == 128 + (state.signal or 0):
        actions += [_say(f"ended by {signal.Signals(status - 128).name}; all ranks have ended")]
    if status not in (0, os.EX_TEMPFAIL) and not state.stops and not state.leaves:
        for name in event.lost:
            state, said = _lose(state, Happening(UNREACHED, "mpirun has no connection to it", host=name), now)
            actions += said
        actions += [Action(Do.EXPLAIN, number=status)]
    if status == 0 and not state.stops and marks.BEGUN not in state.heard:
        actions += [Action(Do.SAY_IF_ALONE)]
    state, then = _decide(state, event, status, now)
    actions += then
    if state.phase is not Phase.ENDED and state.signal is not None:
        state, unstarted = _unstarted(state, Happening(MISSED, number=state.signal), now)
        actions += unstarted
    return state, tuple(actions)


def _decide(state: JobState, event: MpirunEnded, status: int, now: float) -> Answer:
    """Decide whether a job that has ended with a status is started again."""
    spec = state.terms.spec
    if spec.watchdog_action == "end" and (marks.STALLS in state.heard or status == STALLED):
        return state.ended(STALLED), ()
    if marks.COMMIT in state.heard:  # it made steps
        state = replace(state, kept=state.kept | {marks.COMMIT}, failed=0)
    if state.leaves and not state.stops:
        return replace(state, changes=state.changes + 1).going_to(Phase.WAITING, now), ()
    lost = [host for host in dict.fromkeys(state.hosts.places) if host in state.hosts.lost]
    lacks_daemon = spec.elastic and (event.status == _NO_DAEMON or event.has_lost_daemon)
    goes_on = (lacks_daemon and marks.COMMIT in state.heard) or (bool(lost) and state.outlives_loss(now))
    is_over = status in (0, os.EX_TEMPFAIL) or state.stops or (state.failed == spec.restarts and not goes_on)
    was_to_stop = event.is_due or marks.AGREES in state.heard or {STOP_ASKED, marks.COMMIT} <= state.kept
    if is_over:
        return state.ended(status), ()
    if was_to_stop:  # a new mpirun would begin in an allocation that ends
        return state.ended(os.EX_TEMPFAIL), (
            _say(
                f"the job has ended with status {status} as it was asked to stop; it is not started again here. "
                "Run again, it goes on from its last commit"
            ),
        )
    if state.is_at_limit:
        text = f"the job has ended with status {status}, {state.limit_said}: it is not started again"
        return state.ended(status), (_say(text),)
    state = replace(state, changes=state.changes + 1, hosts=state.hosts.failed(now, state.terms.policy))
    if goes_on:
        why = f"without {' and '.join(lost)}" if lost else "as mpirun has lost a daemon"
        said = _say(f"the job begins {'again from its last commit, ' if state.has_commit else ''}{why}")
        return state.going_to(Phase.WAITING, now), (said, Action(Do.LIST_AGAIN))
    pause_s = min(_FIRST_PAUSE_S * 2**state.failed, _LONGEST_PAUSE_S)
    state = replace(state, phase=Phase.PAUSING, until=now + pause_s, failed=state.failed + 1)
    said = _say(
        f"the job has ended with status {status}; starting it again ({state.failed} of {spec.restarts}), "
        f"in {pause_s:g} s"
    )
    return state, (said,)


# ---- the table ----

_ALIVE = (Phase.STARTING, Phase.RUNNING, Phase.LEAVING, Phase.STOPPING, Phase.ENDING, Phase.KILLED)
_WORKING = _ALIVE[:3]
_IDLE = (Phase.WAITING, Phase.PAUSING)
_DEATHS = (marks.DIED, marks.DIED_UNSAID)


class Transition(NamedTuple):
    """What some events do in some phases.

    Attributes:
        what: the events.
        phases: in which it does that.
        to: the phase that follows; None: it stays in its own.
        do: what is to be done, with the text or the number of the event.
        change: returns the state before that, and actions before these.
        perhaps: phases to which ``change`` may go.
    """

    what: tuple[str, ...]
    phases: tuple[Phase, ...]
    to: Phase | None = None
    do: tuple[Do, ...] = ()
    change: Callable[..., Answer] | None = None
    perhaps: tuple[Phase, ...] = ()


#: What each event does, in each phase; in phases where it has no row, it is ignored.
ROWS = (
    Transition(("hosts are listed",), (Phase.WAITING,), change=_wait, perhaps=(Phase.STARTING, Phase.ENDED)),
    Transition(("hosts are listed",), (Phase.RUNNING,), change=_may_grow),
    Transition(("hosts are listed",), (Phase.STARTING, *_ALIVE[2:]), change=_listed),
    Transition((marks.COME, marks.BEGUN, marks.COMMIT), _ALIVE),
    Transition((marks.CONNECTED,), (Phase.STARTING,), Phase.RUNNING),
    Transition((marks.CONNECTED,), _ALIVE[1:]),
    Transition((marks.GONE_ON,), _ALIVE, change=_gone_on),
    Transition((marks.BEGINS_AGAIN,), _WORKING, Phase.LEAVING),
    Transition((marks.BEGINS_AGAIN,), _ALIVE[3:]),
    Transition((marks.AGREES,), _ALIVE, change=_stop_agreed),
    Transition((marks.STOPPED, marks.ENDED_WELL), _ALIVE, change=_ended_well),
    Transition(_DEATHS, (Phase.STARTING, Phase.STOPPING), change=_died, perhaps=(Phase.ENDING,)),
    Transition(_DEATHS, (Phase.RUNNING,), change=_died),
    Transition((marks.DIED,), (Phase.ENDING, Phase.KILLED), change=_died),
    Transition((marks.STALLS,), _ALIVE[:5], Phase.ENDING, (Do.END,)),
    Transition((SILENT,), _ALIVE, Phase.KILLED, (Do.KILL,), _lose),
    Transition((CUT_OFF, STUCK), _ALIVE[:5], Phase.KILLED, (Do.SAY, Do.KILL)),
    Transition((LATE, INTERRUPTED), _ALIVE[:5], Phase.ENDING, (Do.SAY, Do.END)),
    Transition((INTERRUPTED,), (Phase.KILLED,), do=(Do.SAY,)),
    Transition((UNREACHED,), _ALIVE, change=_lose),
    Transition((ANSWERS,), (Phase.WAITING, Phase.RUNNING), change=_answers),
    Transition((STOP_DUE,), _WORKING, do=(Do.ASK_TO_STOP,)),
    Transition((STOP_ASKED,), _ALIVE, do=(Do.PASS_ON,), change=_stop_asked),
    Transition((USERS_SIGNAL,), _ALIVE, do=(Do.PASS_ON,)),
    Transition((END_ASKED, END_ASKED_MPIRUN), _WORKING, change=_end_asked, perhaps=(Phase.STOPPING, Phase.ENDING)),
    Transition((END_ASKED,), (Phase.STOPPING,), Phase.ENDING, (Do.KILL_RANKS, Do.END), _end_asked_again),
    Transition((END_ASKED,), (Phase.ENDING, Phase.KILLED), do=(Do.END,), change=_end_asked_again),
    Transition((MISSED,), _ALIVE, change=_missed),
    Transition((MISSED,), _IDLE, change=_unstarted, perhaps=(Phase.ENDED,)),
    Transition((FAILED,), (Phase.STOPPING,)),
    Transition((GRACE_OVER,), (Phase.STOPPING,), change=_grace_over),
    Transition((TIME,), (Phase.RUNNING,), change=_unanswered),
    Transition((TIME,), (Phase.LEAVING, Phase.STOPPING), Phase.ENDING, (Do.END,)),
    Transition((TIME,), (Phase.ENDING,), Phase.KILLED, (Do.KILL,)),
    Transition((TIME,), (Phase.PAUSING,), Phase.WAITING, (Do.LIST_AGAIN,)),
    Transition(("mpirun ends",), _ALIVE, change=_mpirun_ended, perhaps=(Phase.WAITING, Phase.PAUSING, Phase.ENDED)),
)
TABLE = {(phase, what): row for row in ROWS for phase in row.phases for what in row.what}


def next_state(state: JobState, event: LaunchEvent, now: float) -> Answer:
    """Return where a job is after an event, and what is to be done.

    Args:
        state: before it.
        event: what happens.
        now: the time, in seconds of the clock.
    """
    row = TABLE.get((state.phase, event.what))
    if row is None or (event.what == TIME and now < state.until):
        return state, ()
    of_event = (event.text, event.number) if isinstance(event, Happening) else ()
    state = state.noting(event.what)
    actions: tuple[Action, ...] = ()
    if row.change is not None:
        state, actions = row.change(state, event, now)
    if row.to is not None:
        state = state.going_to(row.to, now)
    return state, (*actions, *(Action(do, *of_event) for do in row.do))
