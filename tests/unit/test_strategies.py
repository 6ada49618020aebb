"""How steps get their averages: strategies behind one interface, gradients as values, and probes of overlap."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_reducers import make_reducer

import ringreduce as rr
from ringreduce.engine import Engine
from ringreduce.testing import run_engines
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.gradients.record import ADDED, CHANGED, Record
from ringreduce.training.optimizers.user_options import checked, named_options
from ringreduce.training.options.features import StrategyOption
from ringreduce.training.strategies import stages
from ringreduce.training.strategies.chosen import STRATEGIES
from ringreduce.training.strategies.stages import NEXT, Event, OverlapProbe, Stage, what_is_wrong

ROOT = Path(__file__).parents[2]


def toy_strategy() -> tuple[StrategyOption, Any]:
    """Return the option and the class that CONTRIBUTING.md shows."""
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Add a strategy\n")[2]
    (program,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(program, names)
    return names["EVERY_SECOND"], names["EverySecond"]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_strategy_of_the_documents_skips_every_second_exchange(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is in the list, its option chooses it, and refuses others by name."""
    option, kind = toy_strategy()
    monkeypatch.setitem(STRATEGIES, option, lambda context, agreement, inner: kind(inner()))
    for other, name in (({"op": "adasum"}, "Adasum"), ({"reduce_in": "backward"}, "backward"), ({"staleness": 1}, "")):
        with pytest.raises(rr.ConfigError, match=rf"{name}.* and every_second=True do not go together: it"):
            checked(named_options(every_second=True, **other), rr.Config(), [])

    def train(engine: Engine) -> None:
        reducer = make_reducer(engine, [("a", ArraySpec((3,), np.float32))], op=rr.SUM, every_second=True)
        assert reducer.options.in_words([])["every_second"] is True
        for step in range(1, 12):
            (reduced,) = reducer.reduce([np.full(3, step * (engine.communicator.rank + 1), np.float32)])
            if step % 2:
                assert reduced is None
            else:
                assert reduced.tolist() == [(step - 1 + step) * size * (size + 1) // 2] * 3

    run_engines(size, train)


@pytest.mark.parametrize(
    ("size", "options", "chain"),
    [
        (1, {}, ["LoneSteps"]),
        (1, {"staleness": 2}, ["PacedSteps", "LateAverages"]),
        (2, {}, ["PacedSteps", "RepeatedSteps", "WholeSteps"]),
        (2, {"staleness": 1}, ["PacedSteps", "LateAverages"]),
    ],
)
def test_options_choose_the_strategy(size: int, options: dict[str, Any], chain: list[str]) -> None:
    """From the outside in."""

    def choose(engine: Engine) -> list[str]:
        strategy = make_reducer(engine, [], **options)._strategy
        found = []
        while strategy is not None:
            found.append(type(strategy).__name__)
            strategy = getattr(strategy, "_inner", getattr(strategy, "_whole", None))
        return found

    assert run_engines(size, choose) == [chain] * size


STEPS = 40
NAMED = [(f"parameter {number}", ArraySpec((number + 1,), np.float32)) for number in range(3)]


def gradients(step: int, rank: int, missing: int | None = None) -> list[Any]:
    found: list[Any] = [np.full(number + 1, (rank + 1) * (step + number), np.float32) for number in range(3)]
    if missing is not None:
        found[missing] = None
    return found


@pytest.mark.parametrize(
    ("options", "nbytes"),
    [
        ({}, 1 << 20),
        ({"shard": "node"}, 256 << 20),
        ({"shard": "node", "overlap": True}, 1 << 20),
        ({"shard": "node", "bucket_nbytes": 7}, 7),
    ],
)
def test_buckets_of_shards_are_large_where_nothing_overlaps(options: dict[str, Any], nbytes: int) -> None:
    """All of a bucket's parameters move when it is made, and each bucket costs two meetings of the ranks."""

    def settle(engine: Engine) -> int:
        chosen = checked(named_options(**options), engine.communicator.config, [])
        return int(chosen.settled(engine.communicator, on_device=False).bucket_nbytes)

    assert run_engines(2, settle, config=rr.Config(bucket_nbytes=1 << 20, timeout_s=30.0)) == [nbytes] * 2


def test_steps_that_are_alike_take_one_operation() -> None:
    """An agreement and the buckets are two; what repeats the last step is one, but for steps 1, 2, 4, 8 and so on."""

    def train(engine: Engine) -> list[int]:
        reducer, taken = make_reducer(engine, NAMED, op=rr.SUM), []
        for step in range(STEPS):
            before = engine.tally.operations
            reduced = [total.tolist() for total in reducer.reduce(gradients(step, engine.communicator.rank))]
            assert reduced == [[3.0 * (step + number)] * (number + 1) for number in range(3)]
            taken.append(engine.tally.operations - before)
        return taken

    for taken in run_engines(2, train):
        assert [step for step, count in enumerate(taken) if count != 1] == [0, 1, 3, 7, 15, 31]


@pytest.mark.parametrize("odd_ranks", [{0}, {1}, {0, 1}], ids=str)
@pytest.mark.parametrize("when", [5, 9, 10, 20])
def test_a_rank_that_differs_makes_all_agree_first(odd_ranks: set[int], when: int) -> None:
    """A rank without a gradient in some steps counts as zeros there, and nobody loses what it had."""

    def train(engine: Engine) -> None:
        rank, reducer = engine.communicator.rank, make_reducer(engine, NAMED, op=rr.SUM)
        for step in range(STEPS):
            odd = step in (when, when + 1, when + 5)
            mine = gradients(step, rank, 1 if odd and rank in odd_ranks else None)
            ranks = [each for each in range(2) if not (odd and each in odd_ranks)]
            first, second, third = reducer.reduce(mine)
            assert first.tolist() == [3.0 * step]
            assert third.tolist() == [3.0 * (step + 2)] * 3
            if ranks:
                assert second.tolist() == [sum(each + 1.0 for each in ranks) * (step + 1)] * 2
            else:
                assert second is None

    run_engines(2, train)


def test_ranks_that_never_agree_seldom_try_to_repeat() -> None:
    """Where one rank's gradients change in every other step, attempts become rare: at most one refusal per doubling."""

    def train(engine: Engine) -> int:
        reducer = make_reducer(engine, NAMED, op=rr.SUM)
        before = engine.tally.operations
        for step in range(4 * STEPS):
            odd = step % 8 == 7 and engine.communicator.rank == 1
            _, second, _ = reducer.reduce(gradients(step, engine.communicator.rank, 1 if odd else None))
            assert second.tolist() == [(1 if step % 8 == 7 else 3) * (step + 1.0)] * 2
        return engine.tally.operations - before

    for count in run_engines(2, train):
        assert count < 2 * 4 * STEPS + 3 + 8


@pytest.mark.parametrize("keep", [lambda total: total, lambda total: total[1:], lambda total: total.reshape(3, 1).T])
def test_results_that_are_held_keep_their_values(keep: Any) -> None:
    """What a step has returned, or a view of it, is not written to by later ones, repeated or not."""

    def train(engine: Engine) -> None:
        reducer, history = make_reducer(engine, NAMED, op=rr.SUM), []
        for step in range(STEPS):
            total = reducer.reduce(gradients(step, engine.communicator.rank))
            if engine.communicator.rank == 0 and step % 7 == 5:
                history.append((keep(total[2]), 3.0 * (step + 2)))
        assert history or engine.communicator.rank
        assert all((held == value).all() for held, value in history)

    run_engines(2, train)


def test_parameters_that_come_and_go() -> None:
    """Each step is of the parameters that there are."""

    def train(engine: Engine) -> None:
        used = NAMED[:2]
        reducer = make_reducer(engine, used, op=rr.SUM)
        for step in range(STEPS):
            used[:] = NAMED[:2] if step < 10 else NAMED if step < 20 else NAMED[1:]
            mine = [np.full(spec.shape, step * (engine.communicator.rank + 1), np.float32) for _, spec in used]
            assert [total.tolist() for total in reducer.reduce(mine)] == [
                [3.0 * step] * spec.shape[0] for _, spec in used
            ]

    run_engines(2, train)


def test_a_true_mismatch_is_one_error_for_all() -> None:
    """Ranks whose numbers of parameters differ hear of it once, and go on."""

    def train(engine: Engine) -> str:
        named = [("one", ArraySpec((1,), np.float32))]
        reducer = make_reducer(engine, named, op=rr.SUM)
        reducer.checks.after_join()  # compares no data
        for _ in range(6):
            reducer.reduce([np.ones(1, np.float32)])
        if engine.communicator.rank == 1:
            named.append(("two", ArraySpec((1,), np.float32)))
        with pytest.raises(rr.MismatchError) as caught:
            reducer.reduce([np.ones(1, np.float32)] * len(named))
        del named[1:]
        assert reducer.reduce([np.ones(1, np.float32)])[0].tolist() == [2]
        return str(caught.value)

    first, second = run_engines(2, train)
    assert first == second


@pytest.mark.parametrize("said", list(itertools.product([None, 0, 1, 2**32 - 1], repeat=2)))
def test_signed_numbers_differ_or_not(said: tuple[int | None, int | None]) -> None:
    """Ranks that sign the same number agree, and those that sign none are not asked."""

    class Memory:
        def empty(self, count: int, dtype: Any) -> Any:
            return np.full(count, 255, dtype)

    memory = Memory()
    records = [Record(memory, 2, overlaps=True) for _ in said]
    for record, number in zip(records, said, strict=True):
        record.begin(bytes([1, 255]))
        if number is not None:
            record.sign("layout", number)
    np.maximum(records[0].memory, records[1].memory, out=records[0].memory)
    assert records[0].differs("layout") == (None not in said and said[0] != said[1])
    assert not records[0].differs("weights")
    assert records[0].found.tolist() == [1, 255]


def test_the_stages_of_a_bucket() -> None:
    """Each event in each stage leads where the design says, or cannot happen; a step ends all of them."""
    filling, under_way, waiting = Stage.FILLING, Stage.UNDER_WAY, Stage.WAITING
    expected = {
        filling: {Event.SUBMITTED: under_way, Event.HELD_BACK: waiting, Event.CLEARED: filling},
        under_way: {Event.WITHDRAWN: waiting, Event.CLEARED: under_way},
        waiting: {Event.CLEARED: waiting},
    }
    for stage, event in itertools.product(Stage, Event):
        after = filling if event is Event.STEPPED else expected[stage].get(event)
        assert NEXT.get((stage, event)) is after


@pytest.mark.parametrize("everyone", [True, False])
@pytest.mark.parametrize("status", [0, ADDED, CHANGED])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(["kept", "cleared", "both", "missing"], repeat=2)))
def test_what_makes_a_reduced_bucket_wrong(status: int, first: str, second: str, everyone: bool) -> None:
    """Of two gradients of one bucket: written to, or cleared on some ranks and not on others."""
    said = (first, second)
    cleared = np.array([each in ("cleared", "both") for each in said])
    kept = np.array([each in ("kept", "both") for each in said])
    found = what_is_wrong(np.array([0, status], np.uint8), cleared, kept, everyone=everyone)
    expected = (
        "then joined"
        if not everyone
        else "has written to"
        if status == CHANGED
        else "some ranks, and not all"
        if "both" in said
        else ""
    )
    assert expected in found
    assert bool(found) is bool(expected)


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
