"""Timing takes turns, lets the slowest rank count, and summarises without surprises."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ringreduce.bench.measure import (
    CallStopwatch,
    Contender,
    Summary,
    iterations_for,
    time_in_turn,
    turn_for,
    warmup_for,
)
from ringreduce.bench.modes import hidden
from ringreduce.common.reduce_ops import MAX


class Log:
    """A world of two whose other rank takes ``other_s`` per call, and a record of what happens."""

    def __init__(self, other_s: float) -> None:
        self.events: list[str] = []
        self.now = 0.0
        self._other_s = other_s

    def barrier(self) -> None:
        self.events.append("barrier")

    def allreduce(self, array, op, *, out=None):
        assert op is MAX
        self.events.append("allreduce")
        return np.maximum(array, self._other_s)

    def contender(self, name: str, seconds: list[float]) -> Contender:
        """Return one whose calls take so long, one after the other."""
        durations = iter(seconds)

        def call() -> np.ndarray:
            assert not gc.isenabled() or name not in self.events
            self.events.append(name)
            self.now += next(durations)
            return np.empty(0)

        return Contender(name, np.empty(0), call)


def test_contenders_take_turns():
    """After the warm-up, turns alternate; each begins with two untimed calls, timed ones stand behind a barrier."""
    log = Log(0.0)
    contenders = [log.contender(name, [1.0] * 15) for name in "ab"]
    times = time_in_turn(log, contenders, 10, 1, watch=CallStopwatch(lambda: log.now))
    first, second = (["x", "x", *["barrier", "x"] * iterations] for iterations in (8, 2))
    turns = [event.replace("x", name) for turn in (first, second) for name in "ab" for event in turn]
    assert log.events == ["a", "b", *turns, "allreduce"]
    assert [row.tolist() for row in times] == [[1.0] * 10] * 2


def test_the_slowest_rank_counts():
    """An iteration takes as long as it took on the rank that was slowest in it."""
    log = Log(other_s=2.0)
    (times,) = time_in_turn(
        log, [log.contender("a", [9.0, 9.0, 1.0, 3.0, 1.5])], 3, 0, watch=CallStopwatch(lambda: log.now)
    )
    assert times.tolist() == [2.0, 3.0, 2.0]


def test_garbage_collection_is_on_again_afterwards():
    """The collector pauses while the clock runs, and only then."""
    assert gc.isenabled()
    log = Log(0.0)
    time_in_turn(log, [log.contender("a", [1.0] * 3)], 1, 0, watch=CallStopwatch(lambda: log.now))
    assert gc.isenabled()


def test_summary():
    """Seconds become microseconds; order does not matter."""
    summary = Summary.of_seconds(np.array([5, 1, 2, 3, 4]) * 1e-6)
    assert summary.iterations == 5
    assert (summary.min, summary.max) == pytest.approx((1, 5))
    assert (summary.median, summary.mean) == pytest.approx((3, 3))
    assert (summary.p90, summary.p95, summary.p99) == pytest.approx((4.6, 4.8, 4.96))
    assert summary.variation == pytest.approx(100 * 2**0.5 / 3)


def test_summary_of_one():
    """A single iteration is all there is to say."""
    summary = Summary.of_seconds(np.array([2e-6]))
    assert (summary.min, summary.median, summary.p95, summary.deviation) == pytest.approx((2, 2, 2, 0))


@pytest.mark.parametrize(
    ("nbytes", "iterations"), [(0, 300), (8, 300), (65536, 300), (1 << 20, 300), (16 << 20, 64), (64 << 20, 16)]
)
def test_iterations_follow_the_size(nbytes: int, iterations: int):
    """Small sizes get enough iterations for a steady median, large ones few enough to finish."""
    assert iterations_for(nbytes) == iterations


def test_warmup_follows_the_iterations():
    """Short calls are warmed up ten times, long ones three times."""
    assert (warmup_for(300), warmup_for(12)) == (10, 3)


def test_turns_follow_the_iterations():
    """About eight turns, each of at least eight timed calls."""
    assert (turn_for(300), turn_for(16), turn_for(1)) == (37, 8, 8)


@pytest.mark.parametrize(
    ("times", "part"),
    [
        ((100.0, 100.0, 100.0), 1.0),
        ((100.0, 100.0, 150.0), 0.5),
        ((100.0, 100.0, 200.0), 0.0),
        ((100.0, 100.0, 250.0), -0.5),  # they disturb each other
        ((100.0, 100.0, 90.0), 1.0),  # noise: no more than all of it can be hidden
        ((100.0, 40.0, 100.0), None),  # a computation that is too short, or too long, hides something else
        ((100.0, 210.0, 210.0), None),
    ],
)
def test_the_part_that_is_hidden(times: tuple[float, float, float], part: float | None) -> None:
    """As the OSU micro-benchmarks define it: what both together take longer than the computation, of the allreduce."""
    assert hidden(*times) == part
