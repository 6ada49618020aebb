"""How a rank waits for its peers: poll, then give the core away, then nap; never for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ringreduce.errors import CollectiveTimeoutError

__all__ = ["Waiter"]

_POLLS = 100  # checks before the core is given away: about 5 us
_YIELDS = 16  # times that it is, between two looks at the clock
_YIELD_S = 0.002  # after this long a peer is late, not merely behind: nap instead
_NAP_S = 50e-6  # the kernel rounds this up to about 100 us


class Waiter:
    """Waits until something holds; one for each communicator.

    While it waits it calls the ``watchers``: cheap functions that look whether the wait can still succeed (is the
    peer's process alive, did a peer report a mismatch) and raise if it cannot.

    Attributes:
        timeout_s: how long one wait may last.
        crowded: whether ranks outnumber cores, so that polling takes the time from the very peer that is waited for.
        patient: returns whether to nap at once, as the program needs the core for something else.
        watchers: see above.
    """

    def __init__(self, timeout_s: float, crowded: bool = False) -> None:
        self.timeout_s = timeout_s
        self.crowded = crowded
        self.patient: Callable[[], bool] = lambda: False
        self.watchers: list[Callable[[], None]] = []

    def until(self, ready: Callable[[], object], waiting_for: Callable[[], str], *, yield_s: float = _YIELD_S) -> None:
        """Return once ``ready()`` is true.

        Args:
            ready: checks without blocking.
            waiting_for: says, for the error message, what is missing and from whom.
            yield_s: how long to check all the time before napping in between.

        Raises:
            CollectiveTimeoutError: it was not true within the time limit.
        """
        naps = self.patient()
        for _ in range(0 if self.crowded or naps else _POLLS):
            if ready():
                return
        started = time.monotonic()
        elapsed = 0.0
        while elapsed < self.timeout_s:
            for _ in range(1 if naps else _YIELDS):
                if ready():
                    return
                os.sched_yield()
            for watcher in self.watchers:
                watcher()
            elapsed = time.monotonic() - started
            naps = elapsed > yield_s or self.patient()
            if naps:
                # Flags and MPI have nothing to sleep on; to spin for long would take the core from those waited for.
                time.sleep(_NAP_S if elapsed < 1.0 else 20 * _NAP_S)
        if not ready():
            raise CollectiveTimeoutError(f"waited {self.timeout_s:g} s for {waiting_for()}")
