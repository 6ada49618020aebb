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
_SOME_YIELD_S = 100e-6  # the same where other transfers are under way
_SLOW_S = 400e-6  # where these take so long, they are not worth the core's time
_NAP_S = 50e-6  # the kernel rounds this up to about 100 us
_PATIENT_NAP_S = 250e-6
_LONG_NAP_S = 1e-3  # after a second


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
        self._usual_s = 0.0  # how long waits for some of several transfers take

    def until(self, ready: Callable[[], object], waiting_for: Callable[[], str]) -> None:
        """Return once ``ready()`` is true.

        Args:
            ready: checks without blocking.
            waiting_for: says, for the error message, what is missing and from whom.

        Raises:
            CollectiveTimeoutError: it was not true within the time limit.
        """
        for _ in range(0 if self.crowded or self.patient() else _POLLS):
            if ready():
                return
        self._check(ready, waiting_for, _YIELD_S, _NAP_S, _YIELDS)

    def until_some(self, ready: Callable[[], object], waiting_for: Callable[[], str]) -> None:
        """Return soon after ``ready()`` is true, which ends one of several large transfers that are under way.

        On slow links, where such waits are long, the rank naps an eighth of the usual time between checks, and leaves
        the core to the program and to the kernel, which moves the data.

        Args, Raises:
            as for `until`.
        """
        patient, slow = self.patient(), self._usual_s > _SLOW_S
        took_s = self._check(ready, waiting_for, 0.0 if slow else _SOME_YIELD_S, max(self._usual_s / 8, _NAP_S), 1)
        if not (patient or self.patient()):
            self._usual_s += (min(took_s, 4 * _LONG_NAP_S) - self._usual_s) / 8

    def _check(
        self, ready: Callable[[], object], waiting_for: Callable[[], str], yield_s: float, nap_s: float, between: int
    ) -> float:
        """Check until ``ready()``, all the time at first, then so often between naps; return about how long it took."""
        started = time.monotonic()
        elapsed, patient = 0.0, self.patient()
        while elapsed < self.timeout_s:
            for _ in range(1 if patient else between if elapsed > yield_s else _YIELDS):
                if ready():
                    return elapsed
                os.sched_yield()
            for watcher in self.watchers:
                watcher()
            elapsed, patient = time.monotonic() - started, self.patient()
            # Flags and MPI have nothing to sleep on; to spin for long would take the core from those waited for.
            if patient or elapsed > yield_s:
                time.sleep(_LONG_NAP_S if elapsed >= 1.0 else _PATIENT_NAP_S if patient else nap_s)
        if not ready():
            raise CollectiveTimeoutError(f"waited {self.timeout_s:g} s for {waiting_for()}")
        return elapsed
