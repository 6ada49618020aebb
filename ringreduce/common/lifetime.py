"""Whether calls may be made: the one place that keeps it, for a world and for all that belongs to it; and its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakMethod, WeakValueDictionary, ref

from ringreduce.common.errors import ConfigError, ShutdownError, since

Event = Literal["failed", "failed below", "closed", "forking", "forked"]


class Lifetime:
    """The life of a world, a communicator, an engine, a group: open, until it fails, is closed, or is forked.

    Lifetimes form a tree: a world is above its communicators, engines and groups. A fork concerns all that is below. A
    failure ends only what has failed; its owner ends what depends on it.

    Events call listeners: ``"failed"``, with the error; ``"failed below"``, with that of anything below; ``"closed"``;
    ``"forking"``, with the `Forked` of processes that this one is forking or has just forked; ``"forked"``, in such a
    process.

    Args:
        when_closed: what the error of a call says that comes after `close`.

    Attributes:
        open: whether calls may be made.
        closed: whether `close` was called.
        failure: the error after which no call can be made; None: there is none.
        forked: why this process cannot communicate, as a rank has forked or started it; empty: it is the rank.
    """

    def __init__(
        self, when_closed: str = "ringreduce was shut down; call ringreduce.init() to start a new world"
    ) -> None:
        self.open = True
        self.closed = False
        self.failure: BaseException | None = None
        self.forked = ""
        self._when_closed = when_closed
        self._above: Callable[[], Lifetime | None] = lambda: None
        self._below: WeakValueDictionary[int, Lifetime] = (
            WeakValueDictionary()
        )  # Weak references: a closed one still gets forks while its arrays are used.
        self._listeners: list[tuple[Event, Callable[[], Callable[..., object] | None]]] = []

    def child(self, when_closed: str | None = None) -> Lifetime:
        """Return the lifetime of something that belongs to this, and is notified of its forks while somebody holds it.

        Args:
            when_closed: as for the class; None: as for this.
        """
        child = Lifetime(self._when_closed if when_closed is None else when_closed)
        self._below[id(child)] = child
        child._above = ref(self)
        return child

    def listen(self, event: Event, call: Callable[..., object]) -> None:
        """Have a function called in each such event."""
        self._listeners.append((event, lambda: call))

    def listen_while_held(self, event: Event, method: Callable[..., object]) -> None:
        """Have a method called in each such event, as long as somebody else holds its object.

        It is for what holds this lifetime: both then end with their last user, without Python's collector.
        """
        self._listeners.append((event, WeakMethod(method)))

    def require_open(self, what: str = "collective") -> None:
        """Raise why no call can be made, unless one can.

        Args:
            what: fails if this has: the error names it.

        Raises:
            ConfigError: this process was forked or started by the rank.
            ShutdownError: this was closed.
            TransportError: this has failed.
        """
        if self.open:
            return
        if self.forked:
            raise ConfigError(self.forked)
        if self.closed:
            raise ShutdownError(self._when_closed)
        assert self.failure is not None
        raise since(self.failure, what)

    def fail(self, error: BaseException) -> bool:
        """Refuse calls from now on because of an error; return whether it is the first."""
        if self.failure is not None:
            return False
        # Its traceback keeps the arrays of the call alive: a rank that is late may still store to them.
        self.open = False
        self.failure = error
        self._notify("failed", error)
        above = self._above()
        while above is not None:
            above._notify("failed below", error)
            above = above._above()
        return True

    def close(self) -> bool:
        """Refuse calls from now on; return whether there is something to close: once, and not in a forked process."""
        if self.closed or self.forked:
            return False
        self.open = False
        self.closed = True
        self._notify("closed")
        return True

    def forking(self, processes: object) -> None:
        """Tell all listeners here and below that this process forks others, or has just done so."""
        self._notify("forking", processes)
        for child in self._children():
            child.forking(processes)

    def fork(self, reason: str) -> None:
        """Refuse calls, here and below: this process was forked or started by the rank. Waits for no lock.

        Args:
            reason: what the errors say.
        """
        self.open = False
        self.forked = reason
        self._notify("forked")
        for child in self._children():
            child.fork(reason)

    def _children(self) -> list[Lifetime]:
        # Other threads may make children meanwhile: the list of references is made at once.
        return [each for found in self._below.valuerefs() if (each := found()) is not None]

    def _notify(self, event: Event, *what: Any) -> None:
        for listened, find in tuple(self._listeners):
            if listened == event and (call := find()) is not None:
                call(*what)


def close_all(*parts: Callable[[], object]) -> None:
    """Close every part, in this order, also after one that fails.

    Raises:
        Exception: the first that a part raised.
    """
    errors = []
    for part in parts:
        try:
            part()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
