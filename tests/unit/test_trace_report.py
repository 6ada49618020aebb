"""`ringreduce timeline report`: where the time of steps went, from traces whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browser import look
from click.testing import CliRunner

from ringreduce.cli import main
from ringreduce.common.errors import ConfigError
from ringreduce.doctor.trace_report import PARTS, load, report, to_html, waited_for

JOB = {"name": "trace", "ph": "M", "pid": 0, "args": {"job": "j 1"}}


def row(rank: int, number: int, name: str) -> dict[str, Any]:
    return {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": name}}


def span(rank: int, number: int, name: str, begin_ms: float, end_ms: float, **arguments: Any) -> dict[str, Any]:
    times = {"ts": begin_ms * 1e3, "dur": (end_ms - begin_ms) * 1e3}
    return {"name": name, "ph": "X", "pid": rank, "tid": number, **times, "args": arguments}


def training(slow: int = 1, steps: int = 4) -> list[dict[str, Any]]:
    """Return a trace of two ranks, one 3 ms behind the other.

    A step takes 20 ms: forward 4, backward 8, an allreduce 5 of which 2 are hidden behind that, optimizer 1, and the
    rest.
    """
    events = [JOB]
    for rank in range(2):
        events += [row(rank, 1, "program"), row(rank, 2, "world: asynchronous"), row(rank, 3, "world: blocking")]
        for step in range(steps):
            at = 100.0 * step + (3.0 if rank == slow else 0.0)
            events += [
                span(rank, 1, f"step {step}", at, at + 20, step=step),
                span(rank, 1, "forward", at + 1, at + 5),
                span(rank, 1, "backward", at + 5, at + 13),
                span(rank, 2, "allreduce", at + 11, at + 16),
                span(rank, 2, "load and add", at + 12, at + 13),
                span(rank, 1, "optimizer", at + 17, at + 18),
            ]
    return events


def test_time_is_divided_without_counting_anything_twice():
    """The parts add up to the step; what communication hides behind the backward pass counts as that."""
    found = report(training())
    for each in found["ranks"]:
        assert each["steps"] == 4
        parts = {part: each[part] for part in PARTS}
        assert parts == pytest.approx(
            {"forward": 4.0, "backward": 8.0, "optimizer": 1.0, "communication": 3.0, "waiting": 0.0, "rest": 4.0}
        )
        assert sum(parts.values()) == pytest.approx(each["step"])
        assert each["hidden"] == pytest.approx(2.0)


def test_who_comes_last_is_named():
    """By the ends of backward passes, where nothing else is in the trace; a rank that is alone is not late."""
    first, second = report(training(slow=0))["ranks"]
    assert (first["last"], first["late"]) == (1.0, pytest.approx(3.0))
    assert (second["last"], second["late"]) == (0.0, 0.0)
    (alone,) = report([event for event in training() if event["pid"] == 0])["ranks"]
    assert (alone["last"], alone["late"]) == (0.0, 0.0)


def operation(rank: int, submitted_ms: float, runs_ms: float, ended_ms: float, number: int) -> list[dict[str, Any]]:
    """Return an asynchronous operation in a trace; the engine takes it in at once."""
    about = {"pid": rank, "tid": 2, "cat": "operation", "id": f"{rank}.{number}", "args": {}}
    marks = [("b", "gradients", submitted_ms), ("b", "queue", submitted_ms), ("e", "queue", submitted_ms)]
    marks += [("b", "negotiate", submitted_ms), ("e", "negotiate", runs_ms), ("b", "run", runs_ms)]
    marks += [("e", "run", ended_ms), ("e", "gradients", ended_ms)]
    return [{"name": name, "ph": kind, "ts": at * 1e3, **about} for kind, name, at in marks]


def held_back(where: str, late: int, ranks: int = 3, steps: int = 4) -> list[dict[str, Any]]:
    """Return a trace of ranks of which one enters the reduction 20 ms after the first, and the others 0 and 1 ms after.

    A step takes 30 ms: forward 2, backward 4, and 1 until the reduction, which runs for 1 once all ranks have entered
    it, and takes 0.5 to begin; then optimizer 1, and the rest. The late rank is held back between backward pass and
    reduction, so all backward passes end at the same time.

    Args:
        where: the reduction is an ``"operation"``, or a ``"call"``.
        late: which rank.
        ranks: how many.
        steps: how many.
    """
    events, others = [JOB], [rank for rank in range(ranks) if rank != late]
    for rank in range(ranks):
        behind = 20.0 if rank == late else float(others.index(rank))
        events += [row(rank, 1, "program"), row(rank, 2, "world: asynchronous"), row(rank, 3, "world: blocking")]
        for step in range(steps):
            at = 100.0 * step
            entered, runs = at + 7 + behind, at + 27.5
            events += [
                span(rank, 1, f"step {step}", at, at + 30, step=step),
                span(rank, 1, "forward", at, at + 2),
                span(rank, 1, "backward", at + 2, at + 6),
                span(rank, 1, "optimizer", at + 29, at + 30),
            ]
            if where == "operation":
                events += operation(rank, entered, runs, runs + 1, step)
                events.append(span(rank, 2, "allreduce", runs, runs + 1, nbytes=64))
            else:
                events += [span(rank, 3, "allreduce", entered, runs + 1, nbytes=64)]
                events += [span(rank, 3, "rendezvous", entered, runs)]
    return events


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("where", ["operation", "call"])
def test_waiting_for_a_rank_is_no_rest_and_that_rank_is_named(where: str, late: int):
    """From when a rank enters a reduction until the last one does, it waits; only then does it communicate.

    All backward passes end at the same time, which says nothing of who was late.
    """
    found = report(held_back(where, late))
    innocent = [each for each in found["ranks"] if each["rank"] != late]
    for behind, each in enumerate(innocent):
        assert each["waiting"] == pytest.approx(20.0 - behind)
        assert each["rest"] == pytest.approx(30 - 7 - (20 - behind) - 1.5)
        assert (each["last"], each["late"]) == (0.0, 0.0)
    slow = found["ranks"][late]
    assert (slow["waiting"], slow["last"], slow["late"]) == (0.0, 1.0, pytest.approx(19.0))
    for each in found["ranks"]:
        assert each["communication"] == pytest.approx(1.5)
        assert sum(each[part] for part in PARTS) == pytest.approx(each["step"])
    named = f"The others waited for rank {late}: it was last in 100% of the steps, 19.00 ms after the last but one."
    assert waited_for(found).startswith(named)
    assert named in to_html(found, "trace")


def test_waiting_beside_work_does_not_count():
    """A reduction that is submitted at the begin of a backward pass takes no time while that goes on."""
    events = held_back("operation", 1, ranks=2)
    for event in events:
        if event["name"] == "backward":
            event["dur"] = 10e3  # until 5 ms after rank 0 has submitted
    for each, waited in zip(report(events)["ranks"], (15.0, 0.0), strict=True):
        assert each["waiting"] == pytest.approx(waited)
        assert sum(each[part] for part in PARTS) == pytest.approx(each["step"])


def test_what_other_ranks_do_not_enter_is_no_waiting():
    """Operations that were withdrawn, those of another set of ranks of that name, and those of one rank alone."""
    events = held_back("operation", 1, ranks=2, steps=2)
    gone = ("run", "negotiate")
    withdrawn = [each for each in events if each.get("id", "").startswith("1.") and each["name"] in gone]
    for each in report([each for each in events if each not in withdrawn])["ranks"]:
        assert each["waiting"] == 0.0
    for event in events:
        if event["name"] == "thread_name":
            event["args"]["place"] = f"set [{event['pid']}]"
    for each in report(events)["ranks"]:
        assert each["waiting"] == 0.0


def test_first_steps_can_be_left_out():
    """They warm up."""
    assert report(training(), skip=3)["ranks"][0]["steps"] == 1
    with pytest.raises(ConfigError, match="among the first 4, which are left out"):
        report(training(), skip=4)
    with pytest.raises(ConfigError, match="neither training steps nor collectives"):
        report(training(steps=0))


def test_without_steps_the_collectives_are_reported(tmp_path: Path):
    """As of a program that does not use torch: how many there were, how large they were, and how long they took."""
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    calls = [
        {"name": name, "ph": "X", "pid": rank, "tid": 1, "ts": 0.0, "dur": took, "args": {"nbytes": 1024}}
        for rank in range(2)
        for name, took in (("allreduce", 1000.0), ("allreduce", 3000.0), ("allreduce", 2000.0), ("barrier", 500.0))
    ]
    trace.write_text(json.dumps([*training(steps=0), *calls]))
    first = {"rank": 0, "collective": "allreduce", "calls": 3, "nbytes": 3072, "total": 6.0, "median": 2.0}
    found = report(load(trace))
    assert found["ranks"] == []
    assert found["collectives"][0] == first
    assert [(each["rank"], each["collective"]) for each in found["collectives"]] == [
        (rank, name) for rank in range(2) for name in ("allreduce", "barrier")
    ]
    command = ["timeline", "report", str(trace), "--html", str(page)]
    shown = CliRunner().invoke(main, command, standalone_mode=False).output.splitlines()
    assert shown[1].split() == ["0", "allreduce", "3", "3", "KiB", "6.00", "2.000"]
    tree = ElementTree.fromstring(page.read_text().partition("\n")[2].replace('<meta charset="utf-8"/>', ""))
    assert len(tree.findall(".//tr")) == 5


def test_the_page_is_whole_and_needs_nothing_else():
    """It is well-formed, has a bar for each part of each rank, and loads nothing; names are escaped."""
    page = to_html(report(training()), "<trace>.json")
    tree = ElementTree.fromstring(page.partition("\n")[2].replace('<meta charset="utf-8"/>', ""))
    assert len(tree.findall(".//rect")) == 2 * len(PARTS)
    assert tree.findtext(".//h1") == "<trace>.json"
    assert "http" not in page
    assert "<script" not in page


def test_the_command(tmp_path: Path):
    """As a table, as JSON, and as a page."""
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    trace.write_text(json.dumps(training()))
    command = ["timeline", "report", str(trace), "--html", str(page)]
    for columns in ("20", "80", "200"):  # numbers stay whole, however narrow a terminal is
        shown = CliRunner().invoke(main, command, standalone_mode=False, env={"COLUMNS": columns}).output.splitlines()
        assert shown[0].split()[:3] == ["rank", "steps", "step"]
        assert shown[1].split()[:7] == ["0", "3", "20.00", "4.00", "8.00", "1.00", "3.00"]
        assert shown[1].split()[7:] == ["0.00", "4.00", "2.00", "0%", "0.00"]
    assert " ".join(shown[3:]).startswith("The others waited for rank 1: it was last in 100% of the steps, 3.00 ms")
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert look(page) == {}
    said = CliRunner().invoke(main, ["timeline", "report", str(trace), "--json"], standalone_mode=False).output
    assert json.loads(said) == report(training(), skip=1)


def test_what_is_no_trace_is_refused(tmp_path: Path):
    """With the reason."""
    path = tmp_path / "trace.json"
    for text in ("{", "[]", '{"a": 1}', "[1]", '[{"name": "x", "args": {}}]', "some text"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no trace of ringreduce"):
            load(path)
    path.write_text('[\n{"name": "trace", "ph": "M", "pi')
    with pytest.raises(ConfigError, match="ends in the middle of a trace"):
        load(path)
    with pytest.raises(ConfigError, match=r"cannot be read: .*No such file"):
        load(tmp_path / "nowhere.json")
