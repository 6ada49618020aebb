"""States, which elastic training commits, and the loop that restores and synchronises them when the ranks change."""

from __future__ import annotations

import copy
import gc
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

from ringreduce import runtime
from ringreduce.common.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    RingReduceError,
    TransportError,
)
from ringreduce.common.launch import launch, notify_launcher
from ringreduce.elastic.commits import DiskCommits
from ringreduce.elastic.runs import may_commit
from ringreduce.runtime.blocking import barrier
from ringreduce.training.binding.error_text import error_of
from ringreduce.training.calls.objects import allgather_object

_log = logging.getLogger(__name__)

#: What may happen to the hosts of a job; values can be combined with ``|``.
_ADDED = 2
_REMOVED = 1
_CHANGED = "the hosts have changed, but this job cannot begin again on them: it needs"
_ASKED = "a rank was asked to stop, but this job cannot stop: it needs"


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # Horovod's name
    """The ranks of an elastic job change; not a failure.

    Attributes:
        skip_sync: whether the ranks that stay still hold the same state, because ranks were only removed.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class _Commits:
    """The number of calls of `State.commit` on this rank; an attribute of the same name hides it."""

    def __get__(self, state: State | None, kind: type) -> Any:
        return self if state is None else state._commits


class State:
    """The state of training. Subclasses define `save`, `restore` and `sync`.

    Programs give states attributes, under names of their own; public here are Horovod's names alone, and `commits`.

    Args:
        bcast_object: returns rank 0's argument on all ranks; collective. None: this rank is alone.
        get_rank: returns this rank; taken for Horovod's sake.

    Attributes:
        commits: number of calls of `commit` on this rank, unless a program names an attribute of its own so.
    """

    commits = _Commits()
    _disk: DiskCommits | None = None  # Another job finds the commits there.

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object
        self._callbacks: list[Callable[[], object]] = []
        self._updates: deque[int] = deque()  # Other threads may append to it.
        self._complained = False
        self._commits = 0

    def save(self) -> None:
        """Copy everything, in this process's memory."""
        raise NotImplementedError  # Subclasses know how.

    def restore(self) -> None:
        """Load the last copy."""
        raise NotImplementedError  # Subclasses know how.

    def sync(self) -> None:
        """Make all ranks hold rank 0's values, and take a copy. Collective."""
        raise NotImplementedError  # Subclasses know how.

    def reset(self) -> None:
        """Prepare for other ranks than before; called when they are connected. Does nothing unless overridden."""

    def commit(self) -> None:
        """Take a copy, then check whether the hosts have changed. Costs a copy of the state. Collective.

        If a rank was asked to stop (see `ringreduce.stopping`), and the state is kept on disk, all ranks write this
        commit there and end, with the status `os.EX_TEMPFAIL`: begun again, the job goes on from it.

        Raises:
            HostsUpdatedInterrupt: they have, on all ranks.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def _keep_as_launched(self) -> None:
        """Keep commits in the folder of the launcher, if any. Collective. Does nothing unless overridden."""

    def _keep_for_next_job(self, *, committed: bool = False) -> bool:
        """Commit, unless this step is ``committed``; return whether another job can begin with it, on all ranks.

        Collective.
        """
        return False

    def check_host_updates(self) -> None:
        """Check whether the launcher has announced to rank 0 that the hosts have changed. Collective.

        If a rank was asked to stop, this commits, and ends all ranks as `commit` does.

        Under ``ringreduce run``, which starts a new job on other hosts, a state that does not outlive this job, or is
        trained on another thread than the main one, logs an error, once, and goes on; and once the ranks may change no
        more (``--reset-limit``), it goes on, too.

        Raises:
            HostsUpdatedInterrupt: they have, on all ranks.
        """
        if self._is_to_stop():
            self._stop(committed=False)
        self._check_hosts()

    def _is_to_stop(self) -> bool:
        """Return whether a rank was asked to stop, and a later job can go on. Collective."""
        return self._disk is not None and runtime.stopping()

    def _stop(self, *, committed: bool) -> None:
        """End all ranks once a commit is on disk; return if it cannot be. Collective.

        Args:
            committed: whether the last commit is being written, and is of this step.
        """
        if threading.current_thread() is not threading.main_thread():
            self._complain(f"{_ASKED} a training on the main thread")
        elif self._keep_for_next_job(committed=committed):
            if runtime.rank() == 0:
                _log.info("commit %d is on disk; the job stops; run again, it goes on from it", self._commits)
            _end(os.EX_TEMPFAIL)
        else:
            self._complain(f"{_ASKED} a commit that can be written")

    def _check_hosts(self) -> None:
        """Check the hosts, as in `check_host_updates`."""
        changes = 0
        while self._updates:
            changes |= self._updates.popleft()
        if runtime.hosts_changed():
            changes |= _ADDED
        if changes and launch().is_restartable and not self._can_begin_again():
            changes = 0
        if self._bcast_object is not None:
            changes = self._bcast_object(changes)
        if changes:
            raise HostsUpdatedInterrupt(skip_sync=changes == _REMOVED)

    def _can_begin_again(self) -> bool:
        if self._disk is None:
            self._complain(f"{_CHANGED} commits on disk; call state.keep_on_disk(folder) before the training")
            return False
        if threading.current_thread() is not threading.main_thread():
            # What ends this thread leaves the main one to save a model that is not done.
            self._complain(f"{_CHANGED} a training that can end the program; call it on the main thread")
            return False
        most = launch().reset_limit  # Counted here, as the launcher learns of recoveries too late.
        return most is None or runtime.recoveries() < most

    def _complain(self, said: str) -> None:
        if not self._complained and runtime.rank() == 0:
            _log.error("%s", said)
        self._complained = True

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that hosts were removed (1), added (2) or both (3); from any thread.

        For programs that watch the hosts themselves; ``ringreduce run`` sends a signal.
        """
        self._updates.append(update_res)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Let functions be called after `reset`, in this order, when the ranks have changed."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Prepare for the new ranks, and call the reset callbacks."""
        self._updates.clear()
        # Forgets what the former ranks were told: the launcher says it again if it still holds.
        runtime.hosts_changed()
        self.reset()
        for callback in self._callbacks:
            callback()


class ObjectState(State):
    """Attributes that are kept by value.

    Args:
        bcast_object: as for `State`.
        get_rank: as for `State`.
        **kwargs: the attributes and their first values: anything that can be copied and pickled.

    Raises:
        ConfigError: a name begins with an underscore, or is that of a method of `State`.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        taken = sorted(name for name in kwargs if name.startswith("_") or callable(getattr(State, name, None)))
        if taken:
            raise ConfigError(f"a state cannot have a value of the name {', '.join(taken)}; give it another name")
        self._names = list(kwargs)
        self._saved: dict[str, Any] = {}
        for name, value in kwargs.items():
            setattr(self, name, value)
        ObjectState.save(self)

    def save(self) -> None:
        self._saved = self._copied_values()

    def restore(self) -> None:
        self._take_values(self._saved)

    def _copied_values(self) -> dict[str, Any]:
        return copy.deepcopy({name: getattr(self, name) for name in self._names})

    def _take_values(self, copied: dict[str, Any]) -> None:
        for name, value in copy.deepcopy(copied).items():
            setattr(self, name, value)

    def sync(self) -> None:
        self._sync_values()
        ObjectState.save(self)

    def _sync_values(self) -> None:
        """Take the values of rank 0, and its number of commits: it has the latest. Collective."""
        values = {name: getattr(self, name) for name in (*self._names, "_commits")}
        if self._bcast_object is not None:
            values = self._bcast_object(values)
        for name, value in values.items():
            setattr(self, name, value)


#: How often in a row a function is called again after an error without a commit in between.
_VAIN_RESTARTS = 3

P = ParamSpec("P")
S = TypeVar("S", bound=State)
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Decorate a training function that takes a `State` first, so that it is called again when the ranks change.

    Before each call the state is synchronised, unless all ranks hold the same state already. When hosts are added or
    removed, the function is called again with the state as it is; when a rank has failed, with the last commit. In
    between ringreduce is shut down and started again, and the state's reset callbacks are called. Errors that are no
    change of the ranks (a mismatch, a wrong argument) are raised to the caller, and so is the fourth error without a
    commit in between.

    Under ``ringreduce run`` with options by which the job grows, new hosts need a new job: this one commits, exits with
    status 0 once the commit is on disk, without running what follows the training, and the next job begins with that
    commit through ``keep_on_disk``.

    The new world is that of ``init()`` without arguments; a reset callback can register process sets again.

    A job survives the death of a rank under ``ringreduce run --elastic``, or Open MPI's ``mpirun --with-ft ulfm``; any
    other launcher ends it. The survivors are renumbered, those with the latest commit first, and go on. A rank that
    does not come within the time limit counts as failed there, too. At the end all ranks wait for each other.
    """
    return _repeated(func, _reconnect)


def run_fn(func: Callable[Concatenate[S, P], T], reset: Callable[[], object]) -> Callable[Concatenate[S, P], T]:
    """Decorate as `run` does, with the caller's function to reconnect the ranks.

    Args:
        func: function to call with a state.
        reset: called before the state's `on_reset`. Collective. Its errors go to the caller.
    """

    def reconnect(state: S, failure: CollectiveError | None) -> bool:
        reset()
        return False

    return _repeated(func, reconnect)


def _repeated(
    func: Callable[Concatenate[S, P], T], reconnect: Callable[[S, CollectiveError | None], bool]
) -> Callable[Concatenate[S, P], T]:
    """Return a function that calls another again and again.

    Args:
        func: the function.
        reconnect: connects the ranks, given the state and, if that is why, an error. Returns whether there are fewer
            ranks than before, so that this cannot go on for ever.
    """

    @wraps(func)
    def repeated(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        _warn_of_srun()
        state._keep_as_launched()
        if state._disk is not None:
            runtime.listen_for_stops()
        skip_sync = begun_anew = False
        restarts = 0
        commits = state._commits
        failure: CollectiveError | None = None
        while True:
            try:
                if begun_anew:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                    commits = state._commits  # All ranks have the same by now.
                result = _until_other_hosts(func, state, *args, **kwargs)
                if state._disk is not None:
                    state._disk.put_last(state._commits)
                _part()
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except Exception as raised:
                error = error_of(raised)
                failure = error if isinstance(error, CollectiveError) else _behind(raised)
                restarts = restarts + 1 if state._commits == commits else 1
                if failure is None or not _is_a_change_of_ranks(failure) or restarts > _VAIN_RESTARTS:
                    if error is raised:
                        raise
                    raise error from raised
                state.restore()
                skip_sync = False
            else:
                if state._disk is not None:
                    state._disk.settle()
                return result
            if reconnect(state, failure):
                restarts = 0
            failure = None
            begun_anew = True
            gc.collect()  # The error's traceback held memory of the old world.
            commits = state._commits

    return repeated


def _until_other_hosts(func: Callable[Concatenate[S, P], T], state: S, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; if other hosts need a new job, this one ends in here once that can begin."""
    while True:
        try:
            return func(state, *args, **kwargs)
        except HostsUpdatedInterrupt:
            if not launch().is_restartable:
                raise
        if state._keep_for_next_job():
            _end_for_next_job(state)
        # The state is as it was: the training goes on here.


def _end_for_next_job(state: State) -> NoReturn:
    if runtime.rank() == 0:
        _log.info("commit %d is on disk; the job ends, and begins again on the present hosts", state._commits)
    notify_launcher("begins again")
    _end(0)


def _end(status: int) -> NoReturn:
    """End this rank; all do, and the commit for the next job is on disk."""
    with suppress(CollectiveError):  # A rank that dies now leaves nothing behind.
        runtime.shutdown()
    sys.exit(status)


def _warn_of_srun() -> None:
    """Warn, where srun has started the ranks, that they cannot survive a death; say which launcher lets them."""
    launcher = launch().launcher
    if launcher is not None and launcher.name == "srun" and runtime.is_initialized() and runtime.rank() == 0:
        _log.warning(
            "srun ends this job when one of its ranks dies. To go on without that rank, start it in the same allocation"
            " by `ringreduce run --elastic -np %d python ...`, which needs Open MPI 5",
            runtime.size(),
        )


def _part() -> None:
    """Wait until all ranks have trained to the end: until then, they may have to recover together."""
    if launch().survives_deaths and runtime.is_initialized():
        barrier()


def _reconnect(state: State, failure: CollectiveError | None) -> bool:
    if failure is None or not launch().survives_deaths:
        runtime.shutdown()
        runtime.init()
        return False
    before = runtime.size()
    doubtful: set[int] = set()
    _log.warning("a rank of %d may have failed; others continue from commit %d: %s", before, state._commits, failure)
    while True:  # In each round another rank has failed.
        try:
            doubtful.update(runtime.go_on(failure, state._commits).doubtful)
            doubtful_to_all = set.intersection(*allgather_object(doubtful))  # One that knows of a death is enough.
        except PeerLostError as another:
            failure = another
        else:
            if launch().is_restartable and runtime.rank() == 0:
                notify_launcher("has gone on")
            _require_limits(failure)
            if state._disk is not None:
                _require_no_others(before, len(doubtful_to_all), failure)
            return runtime.size() < before


def _require_limits(failure: CollectiveError) -> None:
    left = runtime.size()
    least = launch().least_size
    times = runtime.recoveries()
    most = launch().reset_limit
    if left < least:
        reason = f"too few ranks survive: {left}, and --min-np (RINGREDUCE_MIN_NP) is {least}"
    elif most is not None and times > most:
        reason = f"ranks have failed more often than --reset-limit allows (RINGREDUCE_RESET_LIMIT={most})"
    else:
        return
    runtime.shutdown()
    raise TransportError(f"{reason}; {failure}") from failure


def _require_no_others(before: int, doubtful: int, failure: CollectiveError) -> None:
    """Raise a `TransportError` if the ranks that are missing may go on, too, and commit what counts then."""
    left = runtime.size()
    if may_commit(before, left, doubtful):
        return
    runtime.shutdown()
    raise TransportError(
        f"{left} of {before} ranks cannot go on by themselves: {doubtful} of the others are silent, but may live and "
        "commit as well, and of two histories one would be thrown away. Start the job again (--max-restarts does); it "
        f"goes on from its last commit; {failure}"
    ) from failure


def _behind(error: Exception) -> CollectiveError | None:
    """Return the failure that a framework has turned into this error, of another type, on its path through C++."""
    failure = runtime.failure()
    passed_on = isinstance(error, RuntimeError) and not isinstance(error, RingReduceError)
    return failure if passed_on and isinstance(failure, CollectiveError) else None


def _is_a_change_of_ranks(error: CollectiveError) -> bool:
    if launch().survives_deaths and isinstance(error, (TransportError, CollectiveTimeoutError)):
        return True  # A rank that has given up or does not come is excluded, unless it comes to recover, too.
    # The base class alone: programs raise it, under Horovod's name for it, to say so.
    return isinstance(error, PeerLostError) or type(error) is CollectiveError
