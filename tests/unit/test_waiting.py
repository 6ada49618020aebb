"""Waiting: until something holds, a watcher objects, or the time is over."""

from __future__ import annotations

import time

import pytest

from ringreduce.common.errors import CollectiveTimeoutError, PeerLostError
from ringreduce.transport.waiting import Waiter


class Later:
    """Becomes true at its n-th look."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


def nothing() -> str:
    raise AssertionError("nobody wants to know what is missing")


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("looks", [1, 2, 150, 1000])
def test_a_wait_ends_when_its_condition_holds(looks: int, crowded: bool) -> None:
    """The condition is looked at until it holds and not once more, whether ranks outnumber cores or not."""
    ready = Later(looks)
    Waiter(30.0, crowded).until(ready, nothing)
    assert ready.left == 0


def test_the_time_limit_names_what_is_missing() -> None:
    """When the time is over the error is a TimeoutError with the limit and what was waited for."""
    with pytest.raises(CollectiveTimeoutError, match=r"^waited 0\.001 s for rank 3 in allreduce$") as caught:
        Waiter(0.001).until(lambda: False, lambda: "rank 3 in allreduce")
    assert isinstance(caught.value, TimeoutError)


def test_what_came_at_the_last_moment_counts() -> None:
    """The condition is looked at once more after the time is over: a rank that was not given the core is not late."""
    ready = Later(1)
    Waiter(0.0, crowded=True).until(ready, nothing)
    assert ready.left == 0


def test_watchers_may_end_a_wait() -> None:
    """Watchers are called in order while a rank waits, and the error of one is the wait's."""
    waiter, calls = Waiter(30.0), []

    def object_at_the_third_call() -> None:
        calls.append("second")
        if len(calls) == 6:
            raise PeerLostError(1, "gone")

    waiter.watchers += [lambda: calls.append("first"), object_at_the_third_call]
    with pytest.raises(PeerLostError):
        waiter.until(lambda: False, nothing)
    assert calls == ["first", "second"] * 3


def test_nobody_is_watched_when_the_condition_holds() -> None:
    """A wait that is over at once costs no look at the peers."""
    waiter = Waiter(30.0)
    waiter.watchers.append(lambda: pytest.fail("watched"))
    waiter.until(lambda: True, nothing)


def test_a_patient_rank_looks_at_transfers_between_naps_and_never_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that yields beside a program that computes gets the core back after a whole slice of it."""
    monkeypatch.setattr("os.sched_yield", lambda: pytest.fail("yielded"))
    waiter = Waiter(30.0)
    waiter.patient = lambda: True
    ready = Later(4)
    started = time.monotonic()
    waiter.until_some(ready, nothing)
    assert ready.left == 0
    assert time.monotonic() - started >= 3 * 250e-6  # the naps
