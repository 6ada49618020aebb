"""How long ranks take for their own part of steps: measured with a given clock, put together, and put in words."""

from __future__ import annotations

from dataclasses import astuple
from functools import reduce
from typing import Any

import numpy as np
import pytest
from host_reducers import make_reducer

from ringreduce.common.instruments import EngineTally, Pace
from ringreduce.engine import Engine
from ringreduce.engine.pacemaker import Pacemaker, Paces, ProcessUsage
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.pace import Lasting, find_slow
from ringreduce.testing import run_engines
from ringreduce.training.binding.host import ArraySpec
from ringreduce.training.data.shares import Shares


class Machine:
    """A clock, waits and usage that a test moves."""

    def __init__(self) -> None:
        self.now_s = self.waited_s = self.processor_s = 0.0
        self.delayed_s = 0.0
        self.faults = 0
        self.sent: list[Any] = []
        self.pacemaker = Pacemaker(
            2, lambda: self.waited_s, self.sent.append, (4, 5), lambda: self.now_s, lambda: self.usage()
        )

    def usage(self) -> ProcessUsage:
        return ProcessUsage(self.processor_s, self.delayed_s, self.faults)

    def step(self, own_s: float, waits_s: float = 0.0, joins: int = 0) -> None:
        """Make a step: own work of which the process gets half a core, and waits; then a reduction of 1 s."""
        self.now_s += own_s + waits_s
        self.waited_s += waits_s
        self.processor_s += own_s / 2
        self.delayed_s += own_s / 4
        self.faults += 5
        self.pacemaker.arrive(joins)
        self.now_s += 1.0
        self.waited_s += 1.0
        self.processor_s += 9.0
        self.pacemaker.leave()


def test_a_report_holds_own_times_without_reductions_and_waits():
    """The first step, which begins before anything is known, is left out; every eighth is sampled."""
    machine = Machine()
    own = [0.25 * (number % 3 + 1) for number in range(17)]
    for each in own:
        machine.step(each)
    machine.pacemaker.loading_s += 0.5
    sampled = own[1::8][:2]
    ((kind, joins, number, times, *rest),) = machine.sent
    assert (kind, joins, number, times) == ("pace", 0, 0, own[1:])
    assert rest == [sum(sampled), sum(sampled) / 2, sum(sampled) / 4, 10, 0.0, (4, 5)]
    for each in own[:16]:
        machine.step(each, waits_s=3.0)
    _, _, number, times, *rest = machine.sent[1]
    assert (number, times) == (1, own[:16])
    assert rest == [0.0, 0.0, 0.0, 0.0, 0.5, (4, 5)], "of steps with waits in between, what was used is not known"


def test_steps_count_anew_after_a_join():
    """As ranks that had joined have made fewer."""
    machine = Machine()
    for _ in range(20):
        machine.step(1.0)
    for _ in range(17):
        machine.step(2.0, joins=1)
    assert [said[1:4] for said in machine.sent] == [[0, 0, [1.0] * 16], [1, 0, [2.0] * 16]]


def report(*own: float, joins: int = 0, number: int = 0) -> list[Any]:
    return [joins, number, list(own), 1.0, 0.5, 2, 3, 0.25, (0,)]


def test_the_last_rank_of_each_step_is_counted():
    """With how much later it came than the last but one, a millisecond or more; and all that each rank has waited."""
    paces = Paces(3)
    assert paces.receive(2, *report(0.010, 0.030, 0.0109, 0.5)) == []
    assert paces.receive(0, *report(0.020, 0.010, 0.0100, 0.1)) == []
    ((kind, said),) = paces.receive(1, *report(0.012, 0.014, 0.0100, 0.3))
    assert kind == "paces"
    tally = EngineTally()
    tally.add_paces(said)
    found = tally.paces
    assert [each.last for each in found] == [1, 0, 2]
    assert [each.late_s for each in found] == pytest.approx([0.008, 0.0, 0.016 + 0.2])
    assert [each.waited_s for each in found] == pytest.approx([0.4209, 0.2249, 0.01])
    assert [each.own_s for each in found] == pytest.approx([0.14, 0.336, 0.5509])
    tally.add_paces(said)
    assert tally.paces[2].steps == 8
    assert tally.paces[2] - found[2] == found[2]


def test_reports_that_some_ranks_do_not_send_are_forgotten():
    """They had joined: no later report is held up, and memory does not grow."""
    paces = Paces(2)
    for number in range(50):
        assert paces.receive(0, *report(1.0, number=number)) == []
    assert len(paces._reports) <= 3
    assert paces.receive(0, *report(1.0, joins=1)) == []
    assert paces.receive(1, *report(2.0, joins=1))
    assert paces._reports == {}


def pace(last: int = 0, late_s: float = 0.0, **more: Any) -> Pace:
    usual: dict[str, Any] = {
        "waited_s": 0.0 if late_s else 3.4,
        "steps": 100, "own_s": 10.0, "sampled_s": 2.5, "processor_s": 2.5, "delayed_s": 0.0, "faults": 100,
        "loading_s": 0.0, "cores": (),
    }  # fmt: skip
    return Pace(last=last, late_s=late_s, **(usual | more))


SLOW = {"last": 85, "late_s": 3.4, "own_s": 13.4}


@pytest.mark.parametrize(
    ("slow", "reason", "cure"),
    [
        ({}, "it computes all the time, with 100% of a core: it has more work, or a slower core", "fewer samples"),
        (
            {"processor_s": 1.275, "delayed_s": 1.0, "cores": (1,)},
            "it had 51% of a core, as rank 2 has the same one",
            "--bind-to core",
        ),
        (
            {"processor_s": 1.275, "delayed_s": 1.0},
            "it had 51% of a core, as other processes, or its own threads",
            "OMP_NUM_THREADS",
        ),
        (
            {"processor_s": 0.5, "delayed_s": 0.25, "cores": (1,)},
            "it used 20% of a core, the others up to 100%: it waits for a disk",
            "find what it waits for",
        ),
        (
            {"processor_s": 0.2, "delayed_s": 0.9},
            "it used 8% of a core, the others up to 100%: it waits for a disk",
            "find what it waits for",
        ),
        ({"loading_s": 3.0}, "it waits 30 ms a step for data, the others 0 ms", "more workers"),
        ({"faults": 1_500_000}, "it has 80400 page faults a step, the others 4", "reuse memory"),
        ({"sampled_s": 0.0}, "why, was not measured", "fewer samples"),
    ],
)
def test_a_rank_that_is_always_slow_is_named_with_the_reason(slow: dict[str, Any], reason: str, cure: str) -> None:
    """And with what helps against that: fewer samples only where it has too much work."""
    paces = [pace(), pace(), pace(cores=slow.get("cores", (2,))), pace(**{**SLOW, **slow})]
    found = find_slow(paces, [(0, 1), (2, 3)])
    assert (found.rank, found.kind) == (3, "always")
    assert str(found).startswith(f"rank 3 is last in 85% of steps, by 40 ms: {reason}")
    assert cure in str(found)
    assert cure in found.warning(None) or cure == "fewer samples"
    assert ("give it fewer samples, by SAMPLER" in found.warning("SAMPLER")) == (cure == "fewer samples")


@pytest.mark.parametrize(
    ("last", "kind"), [((0, 0, 80), "always"), ((20, 10, 45), "sometimes"), ((0, 0, 19), "rarely")]
)
def test_kinds(last: tuple[int, ...], kind: str) -> None:
    """One rank explains the waits; none does; one does, in few steps."""
    found = find_slow([pace(each, each * 0.1, waited_s=sum(last) * 0.1 - each * 0.1) for each in last], [(0, 1, 2)])
    assert found.kind == kind


@pytest.mark.parametrize(
    "paces",
    [[], [pace(waited_s=0.9), pace(100, 0.9)], [pace(60, 3.0, steps=63), pace(steps=63)]],
    ids=["none", "little", "few"],
)
def test_nothing_is_said_of_little_waiting_or_few_steps(paces: list[Pace]) -> None:
    """Less than a tenth of the time, or than 64 steps."""
    assert find_slow(paces, [(0, 1)]) is None


def test_metrics_hold_all_ranks_by_their_numbers_in_the_world():
    """Those of the process set that has trained most."""
    tally, idle = EngineTally(), EngineTally()
    tally.paces = [pace(), pace(85, 3.4)]
    found = Metrics.of([], [(idle, 0.0, [0], [(0,)]), (tally, 0.0, [5, 3], [(0, 1)])])
    assert found.paces == {5: pace(), 3: pace(85, 3.4)}
    assert 'ringreduce_steps_last_total{rank="3"} 85' in found.to_openmetrics(3)
    assert found.slow.rank == 3


NAMED = [("w", ArraySpec((3,), np.float32))]


def reported(rank: int, *, last: int = 16, costs: float = 0.4, own_s: float = 2.0, **more: Any) -> list[Pace]:
    """Return the paces of two ranks in a report of 16 steps: of one that is last in some of them, and of the other."""
    slow = pace(last, costs * own_s, steps=16, own_s=own_s, **more)
    other = pace(16 - last, 0.0, steps=16, own_s=own_s * (1 - costs))
    return [other, slow] if rank else [slow, other]


def test_lateness_is_reported_once_it_is_no_chance_and_lasts():
    """The same rank last in more than half of each of eight reports' steps and three of four of all, for ten seconds,
    at a cost of a fifth of the time.
    """
    table: list[tuple[str, list[list[Pace]], bool]] = [
        ("lasts", [reported(1)] * 8, True),
        ("lasts", [reported(0, last=12)] * 8, True),
        ("too few reports", [reported(1, own_s=20.0)] * 7, False),
        ("too short", [reported(1, own_s=1.2)] * 8, False),
        ("long enough after more", [reported(1, own_s=1.2)] * 9, True),
        ("another rank in between", [reported(1)] * 7 + [reported(0)] + [reported(1)] * 7, False),
        ("another rank before", [reported(0)] * 7 + [reported(1)] * 8, True),
        ("once not last in most steps", [reported(1)] * 7 + [reported(1, last=8)], False),
        ("last in too few of all", [reported(1, last=11)] * 20, False),
        ("last in 5 % of steps, by much", [reported(1, last=1, costs=0.5)] * 20, False),
        ("costs little", [reported(1, costs=0.15)] * 20, False),
        ("by turns", [reported(number % 2) for number in range(40)], False),
    ]
    for what, windows, enough in table:
        assert reduce(Lasting.after, windows, Lasting()).is_enough is enough, what


def test_ranks_that_are_late_by_chance_are_not_reported():
    """Of 2, 3 and 8 ranks one, drawn in each step, is late by half a step: not in 100,000 steps, whatever the seed."""
    for size in (2, 3, 8):
        draw, lasting = np.random.default_rng(size), Lasting()
        for _ in range(100_000 // 16):
            last = np.bincount(draw.integers(size, size=16), minlength=size)
            lasting = lasting.after([pace(int(each), each * 0.5, steps=16, own_s=24.0) for each in last])
            assert not lasting.is_enough


@pytest.mark.parametrize(
    ("causes", "reason"),
    [
        ([{}] * 8, "it computes all the time"),
        ([{"loading_s": 1.0}] * 8, "for data"),
        ([{"loading_s": 1.0}] * 4 + [{}] * 4, None),
        ([{"sampled_s": 0.0}] * 8, None),
    ],
    ids=["work", "data", "changes", "unknown"],
)
def test_lateness_without_a_reason_that_lasts_is_not_reported(causes: list[dict[str, Any]], reason: str | None) -> None:
    """The reason of the first reports must be that of the last ones."""
    windows = [reported(1, **each) for each in causes]
    found = reduce(Lasting.after, windows, Lasting()).slow(windows, [(0, 1)])
    assert (found is None) == (reason is None)
    if found is not None and reason is not None:
        assert reason in found.reason
        assert found.rank == 1


@pytest.mark.parametrize("by_speed", [False, True])
def test_rank_0_warns_once(by_speed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """After enough reports; not where samples are divided by speed."""

    def train(engine: Engine) -> None:
        reducer = make_reducer(engine, NAMED)
        if by_speed:
            engine.attached[Shares]
        for number in range(12):
            said = [pace(steps=16, own_s=1.6), pace(16, 0.784, steps=16, own_s=2.4)]
            engine.tally.add_paces([astuple(each) for each in said])
            reducer.checks.look_at_paces(weighs=reducer.options.weighs)
            if engine.communicator.rank == 0:
                assert bool(caplog.records) is (number >= 7 and not by_speed)

    run_engines(2, train)
    found = [each.getMessage() for each in caplog.records]
    assert len(found) == (not by_speed)
    assert all("rank 1 is last in 100% of steps, by 49 ms" in each for each in found)
    assert all("staleness" not in each for each in found)


def test_a_rank_that_was_slow_is_forgotten():
    """What is said is about the last eight reports, while `paces` hold all."""
    tally = EngineTally()
    for slow, names in ((0, [None] * 3 + [0] * 17), (1, [0] + [-1] * 5 + [1] * 14), (None, [1] * 7 + [None] * 13)):
        for name in names:
            late = pace(16, 1.5, steps=16, own_s=3.0)
            waits = pace(steps=16, own_s=1.5, waited_s=0.0 if slow is None else 1.5)
            tally.add_paces([astuple(late if rank == slow else waits) for rank in (0, 1)])
            found = Metrics.of([], [(tally, 0.0, [0, 1], [(0, 1)])])
            assert (None if found.slow is None else found.slow.rank) == name
    assert [each.last for each in found.paces.values()] == [16 * 20] * 2
    assert tally.recent[0].steps == 8 * 16
    assert tally.paces[0].steps == 60 * 16 == tally.earlier[0].steps + 16


@pytest.mark.parametrize("size", [2, 3])
def test_training_reports_to_all_ranks_with_no_further_operation(size: int) -> None:
    """After each 16 steps but the first, all ranks know the same of all."""

    def train(engine: Engine) -> list[tuple[int, list[Pace]]]:
        reducer, found = make_reducer(engine, NAMED), []
        for _ in range(1 + 3 * 16):
            reducer.reduce([np.ones(3, np.float32)])
            found.append((engine.tally.operations, engine.tally.paces))
        return found

    first, *others = run_engines(size, train)
    known = [len(paces) and paces[0].steps for _, paces in first]
    assert known == [0] * 16 + [16] * 16 + [32] * 16 + [48]
    assert all([paces for _, paces in other] == [paces for _, paces in first] for other in others)
    operations = [operations for operations, _ in first]
    assert operations[48] - operations[33] == 15
