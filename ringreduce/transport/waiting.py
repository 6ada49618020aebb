"""How a rank waits for its peers: poll, then give the core away, then nap; never for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ringreduce.common.errors import CollectiveTimeoutError

_POLLS = 100  # Checks before the core is given away: about 5 us.
_YIELDS = 16  # How often the core is given away between two looks at the clock.
_YIELD_S = 0.002  # After this long a peer is late, not merely behind: nap instead.
_SOME_YIELD_S = 100e-6  # The same where other transfers are under way.
_SLOW_S = 400e-6  # Transfers that take longer are not worth the core's time.
_MOST_S = 4e-3  # A longer wait counts as this one.
_NAP_S = 50e-6  # The kernel rounds this up to about 100 us.
_PATIENT_YIELD_S = 50e-6  # The limit where the program needs the core.
_PATIENT_NAP_S = 250e-6
_LONG_NAP_S = 1e-3  # The nap after a second of waiting.


def _never() -> bool:
    return False


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
        self.patient: Callable[[], bool] = _never
        self.watchers: list[Callable[[], None]] = []
        self._usual_s = 0.0  # How long waits for some of several transfers take.

    def forget(self) -> None:
        """Ask nobody any more: transports that end with messages under way keep their waiter, but not its users."""
        self.patient = _never
        self.watchers.clear()

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
        self._check(ready, waiting_for, yield_s=_YIELD_S, naps_s=(_NAP_S, _NAP_S), checks=_YIELDS)

    def until_some(self, ready: Callable[[], object], waiting_for: Callable[[], str]) -> None:
        """Return soon after ``ready()`` is true, which ends one of several large transfers that are under way.

        On slow links, where such waits are long, the rank naps an eighth of the usual time between checks, a half if it
        is patient, and leaves the core to the program and to the kernel, which moves the data.

        Args, Raises:
            as for `until`.
        """
        patient = self.patient()
        slow = self._usual_s > _SLOW_S
        yield_s = 0.0 if patient or slow else _SOME_YIELD_S
        naps_s = max(self._usual_s / 8, _NAP_S), max(self._usual_s / 2, _PATIENT_NAP_S)
        took_s = self._check(ready, waiting_for, yield_s=yield_s, naps_s=naps_s, checks=1)
        if not (patient or self.patient()):
            self._usual_s += (min(took_s, _MOST_S) - self._usual_s) / 8

    def _check(
        self,
        ready: Callable[[], object],
        waiting_for: Callable[[], str],
        yield_s: float,
        naps_s: tuple[float, float],
        checks: int,
    ) -> float:
        """Wait until ``ready()``; return about how long that took.

        Args:
            ready, waiting_for: as for `until`.
            yield_s: how long to check all the time; less, if the rank is patient.
            naps_s: how long each nap is after that, for the first second: where nobody computes, and where the rank is
                patient, which may change during the wait.
            checks: how many there are between two naps.
        """
        started = time.monotonic()
        elapsed = 0.0
        naps = not yield_s
        patient = self.patient()
        while elapsed < self.timeout_s:
            for left in reversed(range(checks if naps else _YIELDS)):
                if ready():
                    return elapsed
                if left or not (naps and patient):  # To yield, too, would make a nap some ms longer beside the program.
                    os.sched_yield()
            for watcher in self.watchers:
                watcher()
            elapsed = time.monotonic() - started
            patient = self.patient()
            naps = elapsed > yield_s or (elapsed > _PATIENT_YIELD_S and patient)
            if naps:
                # Flags and MPI have nothing to sleep on; to spin for long would take the core from those waited for.
                time.sleep(naps_s[patient] if elapsed < 1.0 else _LONG_NAP_S)
        if not ready():
            raise CollectiveTimeoutError(f"waited {self.timeout_s:g} s for {waiting_for()}")
        return elapsed
