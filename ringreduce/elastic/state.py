"""States: what elastic training commits, restores and synchronises when the ranks change."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ringreduce import runtime
from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import launch
from ringreduce.elastic.commits import DiskCommits

__all__ = ["HostsUpdatedInterrupt", "ObjectState", "State"]

_log = logging.getLogger(__name__)

#: What may happen to the hosts of a job; values can be combined with ``|``.
_ADDED, _REMOVED = 2, 1


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818  # Horovod's name
    """The ranks of an elastic job change; not a failure.

    Attributes:
        skip_sync: whether the ranks that stay hold the same state still, because there are only removals.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class _Commits:
    """How often `State.commit` was called on this rank; an attribute of the same name hides it."""

    def __get__(self, state: State | None, kind: type) -> Any:
        return self if state is None else state._commits


class State:
    """What training keeps. Subclasses say how: `save`, `restore` and `sync`.

    Programs give states attributes, under names of their own; public here are Horovod's names alone, and `commits`.

    Args:
        bcast_object: returns rank 0's argument on all ranks; collective. None: this rank is alone.
        get_rank: returns this rank; taken for Horovod's sake.

    Attributes:
        commits: how often `commit` was called on this rank; unless a program names an attribute of its own so.
    """

    commits = _Commits()
    _disk: DiskCommits | None = None  # where another job finds what is committed

    def __init__(
        self, bcast_object: Callable[[Any], Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object
        self._callbacks: list[Callable[[], object]] = []
        self._updates = 0
        self._lock = threading.Lock()
        self._complained = False
        self._commits = 0

    def save(self) -> None:
        """Copy everything, in this process's memory."""
        raise NotImplementedError  # subclasses know how

    def restore(self) -> None:
        """Load the last copy."""
        raise NotImplementedError  # subclasses know how

    def sync(self) -> None:
        """Make all ranks hold rank 0's values, and take a copy. Collective."""
        raise NotImplementedError  # subclasses know how

    def reset(self) -> None:
        """Prepare for other ranks than before; called when they are connected. Does nothing unless overridden."""

    def commit(self) -> None:
        """Take a copy, then check whether the hosts have changed. Costs a copy of the state. Collective.

        Raises:
            HostsUpdatedInterrupt: they have, on all ranks.
        """
        self.save()
        self._commits += 1
        self.check_host_updates()

    def _keep_as_launched(self) -> None:
        """Keep commits where the launcher says so. Collective. Does nothing unless overridden."""

    def _keep_for_next_job(self) -> bool:
        """Commit, and return whether another job can begin with just this, on all ranks. Collective."""
        return False

    def check_host_updates(self) -> None:
        """Check whether the launcher has announced to rank 0 that the hosts have changed. Collective.

        Under ``ringreduce run``, which starts a new job on other hosts, a state that does not outlive this job, or is
        trained on another thread than the main one, logs an error, once, and goes on; and once the ranks may change no
        more (``--reset-limit``), it goes on, too.

        Raises:
            HostsUpdatedInterrupt: they have, on all ranks.
        """
        with self._lock:
            changes, self._updates = self._updates, 0
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
            self._complain("takes commits on disk; call state.keep_on_disk(folder) before the training")
            return False
        if threading.current_thread() is not threading.main_thread():
            # What ends this thread leaves the main one to save a model that is not done.
            self._complain("takes a training that can end the program; call it on the main thread")
            return False
        return _may_begin_again()

    def _complain(self, why: str) -> None:
        if not self._complained and runtime.rank() == 0:
            _log.error("the hosts have changed, and the job goes on as it is: to begin again on others %s", why)
        self._complained = True

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Record that hosts were removed (1), added (2) or both (3); from any thread.

        For programs that watch the hosts themselves. What ``ringreduce run`` says comes by a signal.
        """
        with self._lock:
            self._updates |= update_res

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Let functions be called after `reset`, in this order, when the ranks have changed."""
        self._callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Do what is to be done when the ranks have changed."""
        with self._lock:
            self._updates = 0
        runtime.hosts_changed()  # of the ranks that there were; what holds still, the launcher says again
        self.reset()
        for callback in self._callbacks:
            callback()


def _may_begin_again() -> bool:
    """Return whether the ranks may change once more; checked here, as the launcher learns of recoveries too late."""
    most = launch().reset_limit
    return most is None or runtime.recoveries() < most


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
            raise ConfigError(f"a state cannot keep what is called {', '.join(taken)}; give it another name")
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
