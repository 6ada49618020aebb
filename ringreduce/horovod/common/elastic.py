"""Elastic training, under the name of Horovod's module for all frameworks."""

from __future__ import annotations

from typing import Protocol

from ringreduce.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "WorkerNotificationManager", "notification_manager", "run_fn"]


class _Listener(Protocol):
    def on_hosts_updated(self, timestamp: float, update_res: int) -> None: ...


class WorkerNotificationManager:
    """Passes on to listeners, such as states, that hosts have changed; for programs that watch the hosts themselves.

    Not needed: states read the launcher's announcements at their commits.
    """

    def __init__(self) -> None:
        self._listeners: list[_Listener] = []

    def init(self, *ignored: object, **options: object) -> None:
        """Do nothing: there is no service to connect to."""

    def register_listener(self, listener: _Listener) -> None:
        """Call its ``on_hosts_updated`` from now on."""
        if listener not in self._listeners:
            self._listeners.append(listener)

    def remove_listener(self, listener: _Listener) -> None:
        """Call it no more."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Tell all listeners that hosts were removed (1), added (2) or both (3); from any thread."""
        for listener in list(self._listeners):
            listener.on_hosts_updated(timestamp, update_res)


notification_manager = WorkerNotificationManager()
