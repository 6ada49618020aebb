"""The loop of elastic training: synchronise, train, and repeat both after a change of the ranks."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from ringreduce import runtime
from ringreduce.common.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    PeerLostError,
    RingReduceError,
    TransportError,
)
from ringreduce.common.launch import launch, notify_launcher
from ringreduce.elastic.state import HostsUpdatedInterrupt, State

__all__ = ["run", "run_fn"]

#: How often in a row a function is called again after an error without a commit in between.
_VAIN_RESTARTS = 3

_log = logging.getLogger(__name__)

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
    """Do what `run` does, with the caller's function to reconnect the ranks.

    Args:
        func: what to call with a state.
        reset: called before the state's `on_reset`. Collective. What it raises goes to the caller.
    """

    def reconnect(state: S, failure: CollectiveError | None) -> bool:
        reset()
        return False

    return _repeated(func, reconnect)


def _repeated(
    func: Callable[Concatenate[S, P], T], reconnect: Callable[[S, CollectiveError | None], bool]
) -> Callable[Concatenate[S, P], T]:
    """Return what calls a function again and again.

    Args:
        func: the function.
        reconnect: connects the ranks, given the state and, if that is why, an error. Returns whether there are fewer
            ranks than before, so that this cannot go on for ever.
    """

    @wraps(func)
    def repeated(state: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        _warn_of_srun()
        state._keep_as_launched()
        skip_sync = begun_anew = False
        restarts, commits = 0, state._commits
        failure: CollectiveError | None = None
        while True:
            try:
                if begun_anew:
                    state.on_reset()
                if not skip_sync:
                    state.sync()
                    commits = state._commits  # the same on all ranks by now
                result = _until_other_hosts(func, state, *args, **kwargs)
                _part()
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            except Exception as error:
                failure = error if isinstance(error, CollectiveError) else _behind(error)
                restarts = restarts + 1 if state._commits == commits else 1
                if failure is None or not _is_a_change_of_ranks(failure) or restarts > _VAIN_RESTARTS:
                    raise
                state.restore()
                skip_sync = False
            else:
                if state._disk is not None:
                    state._disk.settle()
                return result
            if reconnect(state, failure):
                restarts = 0
            failure, begun_anew = None, True
            gc.collect()  # the error's traceback was part of what holds the memory of the old world
            commits = state._commits

    return repeated


def _until_other_hosts(func: Callable[Concatenate[S, P], T], state: S, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function; where other hosts take another job, this one ends in here once that can begin."""
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
        _log.info("commit %d is on disk; the job ends, and begins again on the hosts that there are", state._commits)
    notify_launcher("begins again")
    with suppress(CollectiveError):  # a rank that dies now leaves nothing behind
        runtime.shutdown()
    sys.exit()


def _warn_of_srun() -> None:
    """Warn, where srun has started the ranks, that they cannot survive a death; say which launcher lets them."""
    launcher = launch().launcher
    if launcher is not None and launcher.name == "srun" and runtime.is_initialized() and runtime.rank() == 0:
        _log.warning(
            "srun ends this job with any of its ranks: nothing goes on when one dies. In the same allocation, start"
            " it by `ringreduce run --elastic -np %d python ...` instead, which takes Open MPI 5",
            runtime.size(),
        )


def _part() -> None:
    """Wait until all ranks have trained to the end: until then, they may have to recover together."""
    if launch().survives_deaths and runtime.is_initialized():
        runtime.barrier()


def _reconnect(state: State, failure: CollectiveError | None) -> bool:
    if failure is None or not launch().survives_deaths:
        runtime.shutdown()
        runtime.init()
        return False
    before = runtime.size()
    _log.warning("a rank of %d may be lost, and the others go on from commit %d: %s", before, state._commits, failure)
    while True:  # each time, another rank has failed
        try:
            runtime.go_on(failure, state._commits)
        except PeerLostError as another:
            failure = another
        else:
            if launch().is_restartable and runtime.rank() == 0:
                notify_launcher("has gone on")
            _require_limits(failure)
            return runtime.size() < before


def _require_limits(failure: CollectiveError) -> None:
    left, least = runtime.size(), launch().least_size
    times, most = runtime.recoveries(), launch().reset_limit
    if left < least:
        said = f"too few ranks are left, {left} where RINGREDUCE_MIN_NP={least}"
    elif most is not None and times > most:
        said = f"ranks were lost more often than the job may go on without them, RINGREDUCE_RESET_LIMIT={most}"
    else:
        return
    runtime.shutdown()
    raise TransportError(f"{said}; {failure}") from failure


def _behind(error: Exception) -> CollectiveError | None:
    """Return the failure from which a framework has made this error: passing it through C++ has changed its type."""
    failure = runtime.failure()
    passed_on = isinstance(error, RuntimeError) and not isinstance(error, RingReduceError)
    return failure if passed_on and isinstance(failure, CollectiveError) else None


def _is_a_change_of_ranks(error: CollectiveError) -> bool:
    if launch().survives_deaths and isinstance(error, (TransportError, CollectiveTimeoutError)):
        return True  # a rank that has given up or does not come is excluded, unless it comes to recover, too
    # The base class alone: programs raise it, under Horovod's name for it, to say so.
    return isinstance(error, PeerLostError) or type(error) is CollectiveError
