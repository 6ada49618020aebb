"""The observer interface: watch collectives from outside, at no cost while nobody does.

An observer overrides the methods it wants. It is called on the thread that runs the collective; one that raises is
removed and logged, and the collective goes on.
"""

from __future__ import annotations

import logging

__all__ = ["Instrument", "Instruments"]

_log = logging.getLogger(__name__)


class Instrument:
    """Base class of observers; every method may be overridden, none has to be."""

    def collective_started(self, collective: str, algorithm: str, nbytes: int) -> None:
        """A collective over ``nbytes`` bytes begins on this rank."""

    def collective_finished(self, collective: str, algorithm: str, nbytes: int, duration_s: float) -> None:
        """That collective has ended on this rank after ``duration_s`` seconds."""


class Instruments:
    """The observers of one communicator, in the order in which they were added.

    Attributes:
        observers: looked at before each call; nothing else happens while it is empty.
    """

    def __init__(self) -> None:
        self.observers: tuple[Instrument, ...] = ()

    def add(self, observer: Instrument) -> None:
        self.observers += (observer,)

    def remove(self, observer: Instrument) -> None:
        self.observers = tuple(each for each in self.observers if each is not observer)

    def started(self, collective: str, algorithm: str, nbytes: int) -> None:
        for observer in self.observers:
            try:
                observer.collective_started(collective, algorithm, nbytes)
            except Exception:
                self._drop(observer)

    def finished(self, collective: str, algorithm: str, nbytes: int, duration_s: float) -> None:
        for observer in self.observers:
            try:
                observer.collective_finished(collective, algorithm, nbytes, duration_s)
            except Exception:
                self._drop(observer)

    def _drop(self, observer: Instrument) -> None:
        _log.exception("instrument %r raised and was removed", observer)
        self.remove(observer)
