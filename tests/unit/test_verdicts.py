"""Why a job is slow: each rule with figures to which it applies, and with figures beside these."""

from __future__ import annotations

import json
import math
import time
import weakref
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import ringreduce as rr
from ringreduce.cli import main
from ringreduce.common.instruments import Pace
from ringreduce.observe.job.host_uses import uses_of
from ringreduce.observe.job.job_report import figures_of, report_of
from ringreduce.observe.job.verdicts import RULES, Figures, HostUse, in_words, judge
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.pace import Slow
from ringreduce.observe.seen.recorder import FlightRecorder
from ringreduce.observe.seen.reported_values import ReportedValues
from ringreduce.observe.seen.resources import Counters, DiskCounters, InterfaceCounters, Resources
from ringreduce.observe.seen.snapshots import Snapshot, UsedResources
from ringreduce.observe.seen.step_clock import Lap, Spent, StepClock

#: Steps of 0.1 s, of which a healthy job computes most.
HEALTHY = Figures(
    ranks=4,
    nodes=2,
    seconds=70.0,
    start_s=8.0,
    steps_s=60.0,
    steps=600,
    samples_per_s=640.0,
    step_s=0.1,
    compute_s=0.08,
    input_s=0.005,
    waiting_s=0.005,
    communication_s=0.01,
    crowded=0.02,
    hosts={0: "h1", 1: "h1", 2: "h2", 3: "h2"},
    uses=[
        HostUse(host="h1", interface="eth0", network=0.3, disk="sda", busy=0.2),
        HostUse(host="h2", interface="eth0", network=0.2, disk="sda", busy=0.1, memory=0.99, faults=1.0, swapped=9),
    ],
)


def slow(kind: str, part: float) -> Slow:
    reason = "it waits for a disk, a device or a lock"
    return Slow(-1 if kind == "sometimes" else 3, kind, part, 0.05, "" if kind == "sometimes" else reason, "waiting")


def use(**parts: Any) -> list[HostUse]:
    return [HostUse(host="h1"), HostUse(host="h2", interface="eth1", disk="sdb", **parts)]


#: By rule: figures to which it applies, and the nearest to which it does not; the words, and the speedup at most.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str, float]] = {
    "shared cores": (
        {"crowds": [((2, 3), 1)], "crowded": 0.4, "communication_s": 0.045},
        {"crowds": [], "crowded": 0.4, "communication_s": 0.045},
        "ranks 2-3 share 1 core",
        2.0,
    ),
    "memory": (
        {"uses": use(memory=0.99, faults=50.0), "input_s": 0.05},
        {"uses": use(memory=0.7, faults=50.0), "input_s": 0.05},
        "h2 uses 99% of its memory",
        2.0,
    ),
    "disk": (
        {"uses": use(busy=0.9), "input_s": 0.05},
        {"uses": use(busy=0.7), "input_s": 0.05},
        "disk sdb of h2 is busy 90% of the time",
        2.0,
    ),
    "slow rank": (
        {"slow": slow("always", 0.9), "waiting_s": 0.05, "compute_s": 0.035},
        {"slow": slow("always", 0.9), "waiting_s": 0.009},
        "rank 3 of h2 is last in 90% of steps, by 50 ms: it waits for a disk",
        2.0,
    ),
    "uneven ranks": (
        {"slow": slow("sometimes", 0.4), "waiting_s": 0.05},
        {"slow": slow("rarely", 0.1), "waiting_s": 0.05},
        "several ranks are late, in turn or at once: one is last in 40% of steps, by 50 ms",
        2.0,
    ),
    "input": ({"input_s": 0.064}, {"input_s": 0.019}, "ranks wait for data in 64% of the time", 1 / 0.36),
    "network": (
        {"communication_s": 0.08, "uses": use(network=0.94)},
        {"communication_s": 0.08, "uses": use(network=0.7)},
        "eth1 of h2 is at 94% of its speed",
        1 / 0.4,
    ),
    "retransmissions": (
        {"uses": use(resent=0.02), "communication_s": 0.05},
        {"uses": use(resent=0.009), "communication_s": 0.05},
        "h2 sends 2.0% of its TCP segments again",
        2.0,
    ),
    "communication": (
        {"communication_s": 0.05, "uses": use(network=0.7)},
        {"communication_s": 0.05, "uses": use(network=0.9)},
        "communication takes 50% of a step",
        2.0,
    ),
    "crowded cores": (
        {"crowded": 0.5, "communication_s": 0.02},
        {"crowded": 0.19},
        "ranks wait for a core, which others have, in 50% of the time in which they compute",
        2.0,
    ),
    "garbage collector": (
        {"uses": use(collecting=0.25)},
        {"uses": use(collecting=0.19)},
        "Python collects garbage in 25% of the time",
        1 / 0.75,
    ),
    "throttled": (
        {"uses": use(throttled=0.5)},
        {"uses": use(throttled=0.04)},
        "h2 limits processors, and stops its ranks 50% of the time",
        2.0,
    ),
    "steal": (
        {"uses": use(stolen=0.2)},
        {"uses": use(stolen=0.04)},
        "other virtual machines have 20% of the processors of h2",
        1.25,
    ),
    "swapping": ({"uses": use(swapped=300)}, {"uses": use(swapped=200)}, "h2 swaps memory to disk", 1.0),
}


def test_each_rule_has_its_figures() -> None:
    """The table of rules, in order; a new one needs a case."""
    assert [rule.name for rule in RULES] == [*CASES]


@pytest.mark.parametrize("name", CASES)
def test_a_rule_applies_to_its_figures_and_not_beside_them(name: str) -> None:
    """With what it says, and what its remedy brings at most; and it is what is to be changed first."""
    applies, beside, says, speedup = CASES[name]
    found = {each.name: each for each in judge(replace(HEALTHY, **applies))}
    assert found[name].says.startswith(says)
    assert found[name].remedy
    assert found[name].speedup == pytest.approx(speedup)
    assert name not in {each.name for each in judge(replace(HEALTHY, **beside))}


def test_one_host_is_not_blamed_for_its_network() -> None:
    """Other programs use it."""
    uses = use(network=0.95, resent=0.1)
    found = judge(replace(HEALTHY, nodes=1, communication_s=0.05, uses=uses))
    assert [each.name for each in found] == ["communication"]


def test_a_rank_that_sleeps_waits_for_no_core_meanwhile() -> None:
    """Most of the little that it runs it has waited for; without others, steps would hardly be shorter."""
    sleeps = replace(HEALTHY, crowded=0.6, queued_s=0.004)
    found = {each.name: each for each in judge(sleeps)}
    assert found["crowded cores"].speedup == pytest.approx(0.1 / 0.096)


def test_a_healthy_job_gets_no_blame() -> None:
    """Its parts are said, and that there is nothing to change."""
    assert judge(HEALTHY) == []
    assert in_words(HEALTHY, []) == [
        "4 ranks on 2 hosts, 70.0 s (8.0 s until the end of the first step), 600 steps of 100 ms, 640 samples/s",
        "a step: compute 80%, input 5%, waiting for other ranks 5%, communication 10%",
        "nothing to change: no part of a step takes longer than usual",
    ]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"steps_s": 59.0}, "too short to judge: that takes 60 s of steps"),
        ({"step_s": 0.004, "input_s": 0.003}, "too short to judge: that takes steps of 5 ms"),
    ],
    ids=["job", "steps"],
)
def test_what_is_too_short_is_not_judged(parts: dict[str, Any], why: str) -> None:
    """Whatever the rules say of it: one line."""
    figures = replace(HEALTHY, slow=slow("always", 0.9), uses=use(collecting=0.9, throttled=0.9), **parts)
    assert judge(figures) == []
    (line,) = in_words(figures, [])
    assert line.startswith("4 ranks on 2 hosts, 70.0 s (8.0 s until the end of the first step), 600 steps of ")
    assert line.endswith(why)


def of_two(**parts: Any) -> Figures:
    """Return figures of two hosts with a rank each; times are milliseconds."""
    times = {name: parts.pop(name) / 1e3 for name in [*parts] if name.endswith("_s")}
    usual: dict[str, Any] = {
        "ranks": 2, "nodes": 2, "seconds": 110.0, "start_s": 9.0, "steps_s": 100.0, "steps": 79,
        "samples_per_s": 0.0, "input_s": 0.0, "hosts": {0: "h1", 1: "h2"},
    }  # fmt: skip
    return Figures(**(usual | times | parts))


#: Figures of jobs with a fault at the second host, as benchmarks/verdicts.py makes them, on busy cores; what is first.
MADE = {
    "a link of 100 Mbit/s": (
        of_two(
            step_s=181.6, compute_s=10.2, waiting_s=2.1, communication_s=169.2, crowded=0.55,
            uses=[HostUse(host="h1", network=0.009), HostUse(host="h2", interface="eth0", network=0.926)],
        ),
        "eth0 of h2 is at 93% of its speed",
    ),
    "a disk of 5 MB/s, which both hosts see": (
        of_two(
            step_s=107.7, compute_s=53.2, input_s=23.0, waiting_s=25.3, communication_s=6.0, crowded=0.09,
            slow=Slow(1, "always", 0.61, 0.08, "it waits 46 ms a step for data, the others 0 ms", "data"),
            uses=[HostUse(host="h1", disk="loop0", busy=1.0), HostUse(host="h2", disk="loop0", busy=0.974)],
        ),
        "disk loop0 of h2 is busy 97% of the time",
    ),
    "a program on the core of a rank": (
        of_two(
            step_s=55.3, compute_s=22.4, waiting_s=7.0, communication_s=25.8, crowded=0.38,
            slow=Slow(1, "always", 1.0, 0.014, "it had 50% of a core", "crowded"),
        ),
        "rank 1 of h2 is last in 100% of steps, by 14 ms: it had 50% of a core",
    ),
    "two ranks on a core": (
        of_two(
            ranks=3, step_s=105.6, compute_s=83.9, waiting_s=13.5, communication_s=8.2, crowded=0.43,
            slow=Slow(1, "always", 0.77, 0.02, "it had 51% of a core, as rank 2 has the same one", "shared"),
            crowds=[((1, 2), 1)], hosts={0: "h1", 1: "h2", 2: "h2"},
        ),
        "ranks 1-2 share 1 core",
    ),
    "little memory": (
        of_two(
            step_s=475.5, compute_s=58.4, input_s=204.0, waiting_s=202.4, communication_s=10.7, crowded=0.28,
            slow=Slow(1, "always", 1.0, 0.405, "it waits 408 ms a step for data, the others 0 ms", "data"),
            uses=[HostUse(host="h1", busy=0.794), HostUse(host="h2", busy=0.786, memory=0.905, faults=111.2)],
        ),
        "h2 uses 90% of its memory, and reads from disk what does not fit",
    ),
    "a queue that loses segments": (
        of_two(
            step_s=84.6, compute_s=9.4, waiting_s=2.2, communication_s=73.0, crowded=0.54,
            slow=Slow(-1, "sometimes", 0.55, 0.006, ""),
            uses=[HostUse(host="h1", resent=0.018), HostUse(host="h2", resent=0.021)],
        ),
        "h2 sends 2.1% of its TCP segments again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", MADE)
def test_the_fault_that_was_made_comes_first(fault: str) -> None:
    """And not what follows of it: ranks that wait, also for cores, data and communication."""
    figures, says = MADE[fault]
    assert judge(figures)[0].says == says


def test_what_saves_most_comes_first_and_eight_lines_are_enough() -> None:
    """However much applies."""
    uses = use(network=0.94, busy=0.9, throttled=0.5, stolen=0.2, swapped=300, memory=0.99, faults=50.0, resent=0.02)
    everything = replace(
        HEALTHY, slow=slow("always", 0.9), waiting_s=0.03, input_s=0.04, uses=uses, crowds=[((2, 3), 1)]
    )
    found = judge(everything)
    assert [each.saves_s for each in found] == sorted((each.saves_s for each in found), reverse=True)
    lines = in_words(everything, found)
    assert len(lines) <= 8
    assert lines[2] == "slow: h2 uses 99% of its memory, and reads from disk what does not fit"
    assert lines[3] == "first: use less memory, or raise its limit: at most 3.3 times as fast"


# ---- what figures are made of ----


def test_laps_are_few_and_even_however_many_steps() -> None:
    """The first is that of the first step; between two of them are equally many steps."""
    now = iter(range(10**6))
    clock = StepClock(lambda: Spent(loading_s=1.0), lambda: float(next(now)))
    for step in range(1, 5001):
        clock.look(step, 2 * step)
    steps = [lap.steps for lap in clock.laps]
    assert steps[0] == 1
    assert len({after - before for before, after in pairwise(steps)}) == 1
    assert 32 <= len(steps) <= 64
    assert steps[-1] > 4800
    assert clock.laps[-1].samples == 2 * steps[-1]


def laps(*, step_s: float, count: int = 101, **spent: float) -> list[Lap]:
    """Return laps of ten steps, given what is spent in each step."""
    return [
        Lap(1 + 10 * n, 320 * n, 5.0 + 10 * n * step_s, Spent(**{name: 10 * n * each for name, each in spent.items()}))
        for n in range(count)
    ]


def pace(**parts: Any) -> Pace:
    usual: dict[str, Any] = {
        "steps": 1000, "own_s": 60.0, "last": 0, "late_s": 0.0, "waited_s": 0.0, "sampled_s": 10.0, "processor_s": 10.0,
        "delayed_s": 0.0, "faults": 0, "loading_s": 10.0, "cores": (),
    }  # fmt: skip
    return Pace(**(usual | parts))


def metrics(*paces: Pace) -> Metrics:
    return replace(Metrics.of([], []), paces=dict(enumerate(paces)))


def test_parts_add_up_to_a_step() -> None:
    """Those of an average rank: its own time, what it waits for the last one, and the rest, which is communication."""
    late = pace(own_s=90.0, last=1000, late_s=30.0, processor_s=3.0, sampled_s=15.0)
    found = figures_of(
        metrics(pace(waited_s=30.0), late), laps(step_s=0.1, blocking_s=0.002), nodes=[[0, 1]], began_s=3.0, made=1009
    )
    assert (found.step_s, found.samples_per_s) == pytest.approx((0.1, 640.0))
    assert found.steps == 1009, "those after the last lap, too"
    assert (found.start_s, found.steps_s) == pytest.approx((2.0, 100.0)), "what came before is no part of a step"
    assert (found.input_s, found.waiting_s, found.communication_s) == pytest.approx((0.01, 0.015, 0.012))
    assert found.compute_s + found.input_s + found.waiting_s + found.communication_s == pytest.approx(found.step_s)
    assert (found.slow.rank, found.slow.kind, found.slow.cause) == (1, "always", "waiting")


def test_without_paces_this_rank_alone_is_known() -> None:
    """As in programs that reduce by themselves: waiting is a part of communication."""
    spent = {"blocking_s": 0.03, "waited_s": 0.01, "loading_s": 0.02, "delayed_s": 0.001}
    found = figures_of(metrics(), laps(step_s=0.1, **spent), nodes=[[0], [1]], began_s=3.0, made=1009)
    assert (found.input_s, found.waiting_s, found.communication_s) == pytest.approx((0.02, 0.0, 0.04))
    assert (found.ranks, found.nodes, found.slow, found.crowded) == (2, 2, None, pytest.approx(0.01))


def test_waiting_for_a_core_counts_while_ranks_compute() -> None:
    """What they wait while they wait for others costs nothing; a rank wants a core while it has one or waits for it."""
    ranks = metrics(pace(delayed_s=5.0, loading_s=30.0), pace(delayed_s=1.0, loading_s=0.0))
    found = figures_of(ranks, laps(step_s=0.1, delayed_s=0.09), nodes=[[0, 1]], began_s=3.0, made=1009)
    assert found.crowded == pytest.approx(6.0 / (20.0 + 6.0))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_of_few_steps_nothing_is_said(count: int) -> None:
    assert figures_of(metrics(), laps(step_s=0.1, count=count), nodes=[[0]], began_s=0.0, made=1009) is None
    assert report_of(None, [], {}) is None


@pytest.mark.parametrize(
    ("cores", "crowds"),
    [
        (((0,), (0,), (1,), (1,)), [([0, 1], 1), ([2, 3], 1)]),
        (((0, 1),) * 4, []),
        (((0, 1), (0, 1), (0,), (1,)), []),
        (((), (), (), ()), []),
    ],
)
def test_ranks_that_share_too_few_cores_are_named(cores: tuple[tuple[int, ...], ...], crowds: list[Any]) -> None:
    """Only those of one host, and only where there are fewer cores than ranks; many cores are not known."""
    paces = metrics(*(pace(cores=each) for each in cores))
    found = figures_of(paces, laps(step_s=0.1), nodes=[[0, 1], [2, 3]], began_s=3.0, made=1009)
    assert list(found.crowds) == crowds


def snapshot(rank: int, host: str, time: float, resources: Counters, **more: Any) -> Snapshot:
    return Snapshot(rank=rank, size=4, host=host, pid=1, time=time, resources=resources, **more)


def test_uses_of_hosts_are_those_of_the_time_of_steps() -> None:
    """Of counters that grow; what the system does not say, and interfaces without a speed, are left out."""
    then = Counters(
        interfaces={"eth0": InterfaceCounters(10**9, 100, 0), "lo": InterfaceCounters(None, 0, 0)},
        disks={"sda": DiskCounters(0, 0, 5.0)},
        host_user_s=10.0, host_idle_s=10.0, host_steal_s=0.0, host_iowait_s=None, throttled_s=1.0,
        gc_pause_s=0.0, sent_segments=0, retransmitted_segments=0, swapped_pages=7, major_faults=0,
    )  # fmt: skip
    now = replace(
        then,
        interfaces={"eth0": InterfaceCounters(10**9, 100, 10**9), "lo": InterfaceCounters(None, 10**12, 0)},
        disks={"sda": DiskCounters(0, 0, 9.0)},
        host_user_s=14.0, host_idle_s=15.0, host_steal_s=1.0, throttled_s=3.0, gc_pause_s=0.5,
        sent_segments=5000, retransmitted_segments=100, swapped_pages=10, major_faults=20,
        memory_nbytes=3, memory_limit_nbytes=4,
    )  # fmt: skip
    first = UsedResources("h1", 100.0, then)
    told = [
        snapshot(0, "h1", 110.0, replace(now, gc_pause_s=0.1, major_faults=0), first=first),
        # This rank makes no steps any more, and what it does since is not counted.
        snapshot(1, "h1", 130.0, replace(now, gc_pause_s=20.0), first=first, last=UsedResources("h1", 110.0, now)),
        snapshot(2, "h2", 9.0, now),
        snapshot(3, "h3", 100.0, now, first=UsedResources("h3", 100.0, then)),
    ]
    assert uses_of(told) == [
        HostUse(
            host="h1", interface="eth0", network=0.8, disk="sda", busy=0.4, throttled=0.2, stolen=0.1, collecting=0.05,
            swapped=3, resent=0.02, memory=0.75, faults=2.0,
        )
    ]  # fmt: skip


def test_what_comes_before_the_first_step_or_after_the_last_is_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As garbage that is collected while libraries are imported, and page faults of an evaluation at the end."""
    now = {"time": 0.0, "gc_pause_s": 0.0}
    monkeypatch.setattr(time, "time", lambda: now["time"])
    monkeypatch.setattr(Resources, "read", lambda self: Counters(gc_pause_s=now["gc_pause_s"]))
    recorder = FlightRecorder(0, 1, None, [])
    recorder.step_clock = StepClock(Spent)
    recorder.begin_status("j", lambda: Metrics.of([], []))

    def spend(seconds: float, collecting_s: float, steps: int) -> Snapshot:
        now["time"] += seconds
        now["gc_pause_s"] += collecting_s
        recorder.count(steps, 0)
        return recorder.write_status()

    assert uses_of([spend(60.0, 50.0, steps=0)]) == []
    assert uses_of([spend(30.0, 20.0, steps=1)]) == []
    for _ in range(5):
        told = spend(10.0, 1.0, steps=10)
    assert [each.collecting for each in uses_of([told])] == [pytest.approx(0.1)]
    assert [each.collecting for each in uses_of([spend(40.0, 30.0, steps=0)])] == [pytest.approx(0.1)]
    assert [each.collecting for each in uses_of([spend(9.0, 0.0, steps=0)])] == [pytest.approx(0.1)]
    recorder.end_status()


# ---- reports ----


def written(path: Path, step_s: float, *, noise: float = 0.0, **changes: Any) -> str:
    """Write the report of a job, whose laps differ in turn by a share of a step."""
    figures = replace(HEALTHY, step_s=step_s, **changes)
    steps: list[Lap] = []
    now = 0.0
    for number in range(41):
        steps.append(Lap(1 + 10 * number, 0, now, Spent()))
        now += 10 * step_s * (1 + noise * (number % 3 - 1))
    report_of(figures, steps, {"loss": 0.25}).write(str(path))
    return str(path)


@pytest.mark.parametrize(
    ("before_s", "after_s", "noise", "tolerance", "status"),
    [
        (0.1, 0.1, 0.01, "5%", 0),
        (0.1, 0.2, 0.01, "5%", 1),
        (0.1, 0.106, 0.001, "5%", 1),
        (0.1, 0.104, 0.001, "5%", 0),
        (0.1, 0.104, 0.001, "0.03", 1),
        (0.1, 0.106, 0.4, "5%", 0),
        (0.2, 0.1, 0.01, "0%", 0),
    ],
)
def test_a_slower_job_is_told_from_noise(
    tmp_path: Path, before_s: float, after_s: float, noise: float, tolerance: str, status: int
) -> None:
    """Slower steps end in status 1 if they are beyond the tolerance and beyond noise."""
    before = written(tmp_path / "a.json", before_s, noise=noise)
    after = written(tmp_path / "b.json", after_s, noise=noise)
    done = CliRunner().invoke(main, ["compare", before, after, "--tolerance", tolerance])
    assert done.exit_code == status, done.output
    assert done.output.startswith("a step: ")
    assert ("slower than" in done.output) == bool(status)


def test_what_is_new_and_what_has_gone_is_said(tmp_path: Path) -> None:
    """By rules, and by parts of a step; ranks that differ in number make no fair comparison."""
    before = written(tmp_path / "a.json", 0.1, input_s=0.04, compute_s=0.04)
    after = written(tmp_path / "b.json", 0.1, crowds=[((0, 1), 1)], ranks=2)
    done = CliRunner().invoke(main, ["compare", before, after])
    assert done.exit_code == 0
    assert done.output.splitlines()[1:] == [
        "compute: 40 ms -> 80 ms (+100.0%)",
        "input: 40 ms -> 5 ms (-87.5%)",
        "new: ranks 0-1 share 1 core",
        "gone: ranks wait for data in 40% of the time",
        "ranks: 4 -> 2, so these jobs are not alike",
    ]


def test_what_is_no_number_is_null_in_a_report() -> None:
    """As JSON has neither NaN nor infinity."""
    report = report_of(replace(HEALTHY, input_s=0.1), laps(step_s=0.1), {"loss": math.nan})
    assert report.found[0].speedup == math.inf
    said = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert (said["values"], said["found"][0]["speedup"]) == ({"loss": None}, None)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"laps_s": "x"}', "null"])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    good = written(tmp_path / "good.json", 0.1)
    (tmp_path / "bad.json").write_text(text, encoding="utf-8")
    done = CliRunner().invoke(main, ["compare", good, str(tmp_path / "bad.json")])
    assert done.exit_code == 2
    assert "bad.json is no report" in done.output


def test_a_world_reports_its_steps_and_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At any time, and at its end into the file that the settings name; on standard error where they ask for that."""
    path = tmp_path / "report.json"
    monkeypatch.setenv("RINGREDUCE_REPORT", str(path))
    rr.init()
    assert rr.report() is None
    for step in range(40):
        rr.count(steps=1, samples=8)
        rr.report_value("loss", 1 / (step + 1))
    found = rr.report()
    assert isinstance(found, rr.JobReport)
    assert str(found).startswith("1 rank, ")
    rr.shutdown()
    said = json.loads(path.read_text(encoding="utf-8"))
    assert (said["ranks"], said["values"]) == (1, {"loss": 1 / 40})
    assert said["samples_per_s"] == pytest.approx(8 / said["step_s"])


def test_the_verdict_is_on_standard_error_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing is on standard output."""
    for asked in ("1", "0"):
        monkeypatch.setenv("RINGREDUCE_VERDICT", asked)
        rr.init()
        rr.count(steps=1)
        for _ in range(30):
            rr.count(steps=1)
        rr.shutdown()
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("ringreduce: 1 rank, ") == (asked == "1")
        assert err.endswith(": too short to judge: that takes 60 s of steps\n") == (asked == "1")
        assert len(err.splitlines()) <= 1


def test_a_report_that_cannot_be_written_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGREDUCE_REPORT", str(tmp_path / "none" / "report.json"))
    rr.init()
    for _ in range(30):
        rr.count(steps=1)
    rr.shutdown()
    assert "the report cannot be written to" in caplog.text
    rr.init()
    rr.shutdown()
    assert "a report is about 17 steps or more" in caplog.text


# ---- values of the program ----


def test_values_are_summed_until_they_are_taken() -> None:
    """Of each name: the sum since the last time, how many, and the last; numbers and arrays of one element."""
    values = ReportedValues()
    for each in (1, 2.5, np.float32(3), np.ones((1, 1))):
        values.add("loss", each)
    values.add("rate", 0.5)
    assert values.take() == {"loss": (7.5, 4, 1.0), "rate": (0.5, 1, 0.5)}
    assert values.take() == {"loss": (0.0, 0, 1.0), "rate": (0.0, 0, 0.5)}
    for _ in range(5000):
        values.add("loss", 2.0)
    assert values.take()["loss"] == (10_000.0, 5000, 2.0)
    assert values.last() == {"loss": 2.0, "rate": 0.5}


def test_a_tensor_of_a_graph_does_not_keep_it() -> None:
    """What is kept until it is read is detached."""
    torch = pytest.importorskip("torch")
    values = ReportedValues()
    weight = torch.ones(3, requires_grad=True)
    loss = weight.square().sum()
    values.add("loss", loss)
    freed = weakref.ref(loss)
    del loss
    assert freed() is None
    assert values.last() == {"loss": 3.0}


@pytest.mark.parametrize(("name", "value"), [("loss", "x"), ("loss", None), ("loss", np.ones(2)), (3, 1.0)])
def test_what_is_no_value_is_refused(name: Any, value: Any) -> None:
    values = ReportedValues()
    with pytest.raises(rr.ConfigError, match="report_value"):
        values.add(name, value)
    assert values.last() == {}


def test_a_value_that_cannot_be_read_later_is_nan() -> None:
    """And others are read."""

    class Symbol:
        def __float__(self) -> float:
            raise TypeError

    values = ReportedValues()
    values.add("loss", Symbol())
    values.add("rate", 1)
    assert math.isnan(values.last()["loss"])
    assert values.last()["rate"] == 1.0
