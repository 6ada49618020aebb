"""Who is slow: the verdict, `ringreduce top`, the page of a job and the report of a trace name the same rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from recorded_ranks import snapshot

from ringreduce.common.instruments import EngineTally
from ringreduce.doctor.trace_report import report, waited_for
from ringreduce.engine.pacemaker import Paces
from ringreduce.observe.job.job_report import figures_of
from ringreduce.observe.job.job_view import JobView, rows
from ringreduce.observe.job.verdicts import judge
from ringreduce.observe.out.job_page import job_page
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.snapshots import SlowRank
from ringreduce.observe.seen.step_clock import Lap, Spent

STEPS = 512
USUAL_S = 0.05

Change = Callable[[np.ndarray], None]


class Case(NamedTuple):
    """A job.

    Attributes:
        size: how many ranks.
        change: changes how long each rank takes for its own part of each step (seconds), which is alike but for noise.
        named: who is to be named; -1: none, though they wait; None: nobody waits for long.
        where: the pass in which a rank takes longer.
    """

    size: int
    change: Change
    named: int | None
    where: str = "forward"


def longer(rank: int, seconds: float, steps: Any = slice(None)) -> Change:
    def change(own: np.ndarray) -> None:
        own[rank, steps] += seconds

    return change


def in_turn(seconds: float, *, ranks: int, every: int = 1) -> Change:
    """Each rank in turn takes longer, in every so many steps."""

    def change(own: np.ndarray) -> None:
        for number, step in enumerate(range(0, STEPS, every)):
            own[number % ranks, step] += seconds

    return change


def alike(own: np.ndarray) -> None:
    """All ranks take equally long."""


#: The last one is that of a job of two slow ranks, for neither of which alone the others wait.
JOBS = {
    "one rank": Case(2, longer(1, 0.03), named=1),
    "one rank of four": Case(4, longer(2, 0.03), named=2),
    "the first rank": Case(3, longer(0, 0.03), named=0),
    "one rank, in its backward pass": Case(2, longer(1, 0.03), named=1, where="backward"),
    "one rank, in every second step": Case(3, longer(1, 0.1, slice(None, None, 2)), named=1),
    "one rank after another": Case(2, in_turn(0.03, ranks=2), named=-1),
    "one rank of four after another": Case(4, in_turn(0.03, ranks=4), named=-1),
    "three bad steps of one rank": Case(2, longer(1, 3.0, [100, 200, 300]), named=1),
    "three bad steps of three ranks": Case(3, in_turn(6.0, ranks=3, every=200), named=-1),
    "three bad steps that cost little": Case(2, longer(1, 0.5, [100, 200, 300]), named=None),
    "all alike": Case(3, alike, named=None),
    "two of three ranks": Case(3, lambda own: (longer(1, 0.03)(own), longer(2, 0.03)(own))[0], named=-1),
}


def durations(case: Case) -> np.ndarray:
    """Return how long ranks take for their own part of each step (seconds), by rank and step."""
    own = USUAL_S + np.random.default_rng(case.size).uniform(0.0, 5e-4, (case.size, STEPS))
    case.change(own)
    return own


def paced(own: np.ndarray) -> EngineTally:
    """Return what an engine counts, once all ranks have reported."""
    size = len(own)
    paces, tally = Paces(size), EngineTally()
    for number in range(STEPS // 16):
        for rank in range(size):
            times = own[rank, 16 * number : 16 * number + 16].tolist()
            notes = paces.receive(rank, 0, number, times, sum(times), sum(times), 0.0, 0, 0.0, ())
        tally.add_paces(notes[0][1])
    return tally


def traced(own: np.ndarray, where: str) -> list[dict[str, Any]]:
    """Return the trace of such a job: of each step the passes, and an allreduce that all enter and leave together."""
    events: list[dict[str, Any]] = [{"name": "trace", "ph": "M", "pid": 0, "args": {"job": "j"}}]
    ends = (own.max(axis=0) + 0.002).cumsum()
    for rank, times in enumerate(own):
        for number, name in ((1, "program"), (3, "world: blocking")):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": name}})
        for step, (end, took) in enumerate(zip(ends, times, strict=True)):
            begin = end - own[:, step].max() - 0.002
            turn = 0.02 if where == "backward" else took - 0.02  # when the forward pass ends
            for row, name, since, until, about in (
                (1, f"step {step}", 0.0, end - begin - 0.001, {"step": step}),
                (1, "forward", 0.0, turn, {}),
                (1, "backward", turn, took, {}),
                (3, "allreduce", took, end - begin - 0.001, {"nbytes": 64}),
            ):
                at = {"ts": (begin + since) * 1e6, "dur": (until - since) * 1e6}
                events.append({"name": name, "ph": "X", "pid": rank, "tid": row, **at, "args": about})
    return events


@pytest.mark.parametrize("name", JOBS)
def test_who_must_be_named(name: str) -> None:
    """By all four."""
    case = JOBS[name]
    own = durations(case)
    ranks = [*range(case.size)]
    tally = paced(own)
    metrics = Metrics.of([], [(tally, 0.0, ranks, [ranks])])

    step_s = float(own.max(axis=0).mean()) + 0.002
    laps = [Lap(1 + 16 * number, 0, 16 * number * step_s, Spent()) for number in range(STEPS // 16)]
    figures = figures_of(metrics, laps, nodes=[ranks], began_s=0.0, made=1009)
    assert (None if figures.slow is None else figures.slow.rank) == case.named
    said = {each.name: each.says for each in judge(replace(figures, steps_s=60.0))}
    assert ("slow rank" in said) == (case.named is not None and case.named >= 0)
    assert said.get("slow rank", f"rank {case.named} ").startswith(f"rank {case.named} ")
    assert ("uneven ranks" in said) == (case.named == -1 and figures.waiting_s >= 0.2 * figures.step_s)

    found = report(traced(own, case.where))
    assert (None if found["slow"] is None else found["slow"]["rank"]) == case.named
    assert waited_for(found).startswith("" if case.named is None else "The others waited for ")
    assert (f"for rank {case.named}: it" in waited_for(found)) == (case.named is not None and case.named >= 0)

    # `top` and the page look at the last 128 steps, so in these the job is to be as in all.
    tally.before.clear()
    slow = Metrics.of([], [(tally, 0.0, ranks, [ranks])]).slow
    told = None if slow is None else SlowRank(slow.rank, slow.lateness, slow.words())
    shown = rows([snapshot(rank, case.size, 10.0, began=time.time() - 10.0, slow=told) for rank in ranks])
    assert [each.rank for each in shown if each.waiting] == [each for each in ranks if each == case.named]
    page = job_page(JobView(case.size).health(shown), shown, [], [], passed_s=0.0, lines={})
    awaited = [rank for rank in ranks if f'title="rank {rank} is waited for' in page]
    assert awaited == [each for each in ranks if each == case.named]
    assert ("several ranks are late" in page) == (case.named == -1)
