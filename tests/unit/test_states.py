"""Where a job is after what happens: the table of the launcher, and the status that follows from it."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.launcher.hosts import Hosts, SizePolicy
from ringreduce.launcher.marks import AGREES, CONNECTED, DIED, DIED_UNSAID, ENDED_WELL, STOPPED, Mark
from ringreduce.launcher.spec import LaunchSpec
from ringreduce.launcher.states import (
    ROWS,
    TABLE,
    Happening,
    HostsListed,
    JobState,
    LaunchEvent,
    MpirunEnded,
    Phase,
    Terms,
    Transition,
    next_state,
)

HOSTS = Hosts({"a": 2}, {"a": 2}, places=("a", "a"))
EVENTS: dict[str, LaunchEvent] = {what: Happening(what, "why", 15, "a") for _, what in TABLE} | {
    "hosts are listed": HostsListed({"a": 2}),
    "mpirun ends": MpirunEnded(1),
}
EVENTS |= {what: Mark(what, 0, "a") for what in (AGREES, STOPPED, ENDED_WELL, DIED, DIED_UNSAID)}


def a_job(phase: Phase = Phase.STARTING, *, elastic: bool = True) -> JobState:
    terms = Terms(LaunchSpec(program=("true",), elastic=elastic), SizePolicy(1, 2))
    return JobState(terms, phase, 0.0, HOSTS, frozenset({CONNECTED} if phase is Phase.RUNNING else ()))


def may_follow(row: Transition, phase: Phase) -> set[Phase]:
    return {row.to} if row.to is not None else {phase, *row.perhaps}


def drawn() -> str:
    """Return which phases lead to which, by which events."""
    events = defaultdict[str, list[str]](list)
    for row in ROWS:
        leads_to = [phase.value for phase in (*row.perhaps, row.to) if phase is not None]
        begins = [phase.value for phase in row.phases if phase.value not in leads_to]
        if leads_to:
            events[f"{', '.join(begins)} -> {', '.join(leads_to)}"] += row.what
    return "\n".join(f"{phases}\n    {'; '.join(whats)}" for phases, whats in events.items())


@pytest.mark.parametrize("what", sorted(EVENTS))
@pytest.mark.parametrize("phase", Phase)
def test_each_event_is_answered_or_ignored_in_each_phase(phase: Phase, what: str) -> None:
    """It leads to a phase that its row names, with the actions of the row; without a row, nothing changes."""
    before = a_job(phase)
    after, actions = next_state(before, EVENTS[what], 0.0)
    row = TABLE.get((phase, what))
    if row is None:
        assert (after, actions) == (before, ())
    else:
        assert after.phase in may_follow(row, phase)
        assert what in after.heard or after.phase in (Phase.WAITING, Phase.STARTING)
        assert tuple(action.do for action in actions)[len(actions) - len(row.do) :] == row.do


def test_the_table_has_one_answer() -> None:
    """No two rows are for one event in one phase; each phase has a way out, but that of a job that has ended."""
    assert len(TABLE) == sum(len(row.phases) * len(row.what) for row in ROWS)
    leads = {(phase, after) for phase, what in TABLE for after in may_follow(TABLE[phase, what], phase) - {phase}}
    assert {phase for phase, _ in leads} == {*Phase} - {Phase.ENDED}
    assert {after for _, after in leads} == {*Phase}


def test_the_drawing_is_that_of_the_table() -> None:
    """Of `docs/architecture.md`."""
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"```text\n{drawn()}\n```" in page


@given(st.lists(st.tuples(st.sampled_from(sorted(EVENTS)), st.floats(0, 20)), max_size=40), st.booleans())
def test_whatever_happens_the_table_holds(happens: list[tuple[str, float]], elastic: bool) -> None:
    """Phases follow each other as rows say; once mpirun has ended, the job is there where no more of it is heard."""
    state = a_job(Phase.WAITING, elastic=elastic)
    now = 0.0
    for what, seconds in happens:
        now += seconds
        before = state.phase
        state, _ = next_state(state, EVENTS[what], now)
        if state.phase is not before:
            assert state.phase in may_follow(TABLE[before, what], before)
        if what == "mpirun ends":
            assert state.phase in (Phase.WAITING, Phase.PAUSING, Phase.ENDED)


@pytest.mark.parametrize(
    ("marks", "status"),
    [
        (((0, AGREES), (1, AGREES), (0, STOPPED), (1, STOPPED)), 75),
        (((0, AGREES), (1, AGREES), (1, STOPPED), (0, ENDED_WELL)), 75),
        (((0, AGREES), (1, AGREES), (0, STOPPED), (1, DIED)), 1),
        (((0, AGREES), (1, AGREES), (0, STOPPED)), 1),
        (((2, DIED), (0, AGREES), (1, AGREES), (0, STOPPED), (1, STOPPED)), 75),
        (((0, AGREES), (1, AGREES), (2, AGREES), (2, DIED), (1, AGREES), (0, AGREES), (0, STOPPED), (1, STOPPED)), 75),
    ],
    ids=["all", "one with status 0", "one fails", "one is killed", "a death before", "a death that the others survive"],
)
def test_a_job_has_stopped_if_all_do_that_have_agreed_to(marks: tuple[tuple[int, str], ...], status: int) -> None:
    """A rank that fails then is no stop; one that has failed before, and that the others survive, does not count."""
    state = a_job()
    for rank, what in ((0, CONNECTED), *marks):
        state, _ = next_state(state, Mark(what, rank, "a"), 0.0)
    assert next_state(state, MpirunEnded(0), 0.0)[0].status == status


@pytest.mark.parametrize(
    ("ended", "status"),
    [
        (MpirunEnded(os.EX_TEMPFAIL), 75),
        (MpirunEnded(os.EX_TEMPFAIL, has_error=True), 1),
        (MpirunEnded(os.EX_TEMPFAIL, has_logged_error=True), 1),
        (MpirunEnded(0), 0),
        (MpirunEnded(0, has_lost_daemon=True), 1),
        (MpirunEnded(7), 7),
    ],
)
def test_the_status_of_a_stop_does_not_hide_a_failure(ended: MpirunEnded, status: int) -> None:
    """In jobs that are not elastic, where mpirun has the status of the rank that ended first."""
    assert next_state(a_job(elastic=False), ended, 0.0)[0].status == status
