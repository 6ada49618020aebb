"""A probe makes steps with overlap and without it in turn, and finds out which are quicker."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from ringreduce.training.strategies import stages
from ringreduce.training.strategies.stages import OverlapProbe


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, bool], float]], tuple[OverlapProbe, list[bool]]]:
    """Return what runs a probe: its steps take seconds by their number and by whether they are with overlap."""

    def run_trial(seconds: Callable[[int, bool], float]) -> tuple[OverlapProbe, list[bool]]:
        tried, now, turns = OverlapProbe(), 0.0, []
        monkeypatch.setattr(stages, "perf_counter", lambda: now)
        for number in itertools.count():
            if tried.over:
                return tried, turns
            turns.append(tried.on)
            now += seconds(number, tried.on)
            tried.end_step(counts=True)
        raise AssertionError

    return run_trial


@pytest.mark.parametrize(("on", "off", "slower"), [(1.0, 1.1, False), (1.1, 1.0, True), (1.0, 1.0, False)])
def test_the_quicker_one_wins(run, on: float, off: float, slower: bool) -> None:
    """Steps that take longer with it than without are told from those that do not; a draw is none that does."""
    tried, turns = run(lambda _, with_it: on if with_it else off)
    assert tried.slower is slower
    assert turns.count(True) == turns.count(False) == len(turns) / 2


def test_few_odd_steps_do_not_decide(run) -> None:
    """Neither a step now and then that takes much longer, nor the first of each turn, changes the verdict."""
    tried, turns = run(lambda number, with_it: 50.0 if number % 6 == 0 or number % 5 == 0 else 1.0 if with_it else 1.2)
    assert tried.slower is False
    switches = sum(one != other for one, other in itertools.pairwise(turns))
    assert switches == 5


def test_a_step_that_is_left_out_is_charged_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to the step after it; and a trial in which nothing could be timed finds nothing slower."""
    tried, now = OverlapProbe(), 0.0
    monkeypatch.setattr(stages, "perf_counter", lambda: now)
    while not tried.over:
        now += 1.0 if tried.on else 1.2
        tried.end_step(counts=True)
        if not tried.on:
            now += 0.0 if tried.over else 100.0
            tried.end_step(counts=False)
    assert tried.slower is False
