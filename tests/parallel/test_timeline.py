"""The timeline and the metrics of a job: one trace of all ranks, and counters that add up."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import ringreduce as rr
from ringreduce.common.instruments import Tally
from ringreduce.doctor.trace_report import report, waited_for

hvd = pytest.importorskip("ringreduce.torch")
torch = pytest.importorskip("torch")

PRIVATE = MPI.COMM_WORLD.Dup()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that all ranks share."""
    return Path(PRIVATE.bcast(str(tmp_path / "trace.json")))


def trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, once all ranks have written theirs."""
    hvd.stop_timeline()
    PRIVATE.Barrier()
    events: list[dict[str, Any]] = json.loads(path.read_text())
    PRIVATE.Barrier()
    return events


def test_a_trace_shows_all_ranks_on_one_clock(world: rr.Communicator, path: Path) -> None:
    """Every rank is in the file; no rank leaves a collective before the last one has entered it."""
    hvd.start_timeline(path)
    for _ in range(5):
        rr.allreduce(np.ones(1001))
    spans = [event for event in trace(path) if event["ph"] == "X" and event["name"] == "allreduce"]
    by_rank = [[event for event in spans if event["pid"] == rank] for rank in range(world.size)]
    assert [len(each) for each in by_rank] == [5] * world.size
    for calls in zip(*by_rank, strict=True):
        entered = max(call["ts"] for call in calls)
        left = min(call["ts"] + call["dur"] for call in calls)
        assert entered <= left


def test_operations_are_in_the_trace_with_their_names(world: rr.Communicator, path: Path) -> None:
    """Each asynchronous operation is there on each rank, begun and ended, and so are marks where they start."""
    hvd.start_timeline(path, mark_cycles=True)
    for step in range(3):
        handles = [hvd.allreduce_async(torch.ones(3), name=f"tensor {i}") for i in range(4)]
        handles.append(hvd.broadcast_async(torch.ones(2), 0, name=f"only once {step}"))
        for handle in handles:
            hvd.synchronize(handle)
    events = trace(path)
    for rank in range(world.size):
        mine = [event for event in events if event["pid"] == rank]
        for kind in "be":
            names = [event["name"] for event in mine if event["ph"] == kind]
            assert names.count("tensor 3") == 3
            assert names.count("only once 2") == 1
            assert names.count("queue") == names.count("negotiate") == names.count("run") == 15
        assert any(event["ph"] == "i" for event in mine)


def test_a_timeline_can_follow_another(world: rr.Communicator, path: Path) -> None:
    """Starting twice is refused, stopping twice is harmless, and a new trace holds nothing of the last one."""
    hvd.stop_timeline()
    hvd.start_timeline(path)
    with pytest.raises(rr.ConfigError, match="stop_timeline"):
        hvd.start_timeline(path)
    rr.allreduce(np.ones(3))
    assert any(event["name"] == "allreduce" for event in trace(path))
    hvd.stop_timeline()
    hvd.start_timeline(path)
    rr.allgather(np.ones(3))
    names = {event["name"] for event in trace(path)}
    assert "allgather" in names
    assert "allreduce" not in names


@pytest.mark.sizes(2, 3, 4)  # for one, the set of rank 0 is the set of all ranks
def test_process_sets_that_come_later_are_in_the_trace(world: rr.Communicator, path: Path) -> None:
    """A set that is added while a trace is written has rows of its own on its members."""
    hvd.start_timeline(path)
    first = hvd.add_process_set([0])
    hvd.remove_process_set(first)
    rows = [event["args"]["name"] for event in trace(path) if event["name"] == "thread_name"]
    expected = ["world: blocking", "world: asynchronous"] * world.size
    assert sorted(row for row in rows if row.startswith("world")) == sorted(expected)
    assert len([row for row in rows if row.startswith("process set")]) == 2


def test_metrics_count_calls_and_bytes(world: rr.Communicator) -> None:
    """Calls and bytes of blocking collectives are exact, repeated calls on one array included; time passes."""
    before = rr.metrics().collectives
    array = np.ones(1000, np.float32)
    for _ in range(7):
        rr.allreduce(array, out=array)
    rr.broadcast(np.ones(5))
    after = rr.metrics().collectives
    none = Tally(0, 0, 0.0)
    old, new = before.get("allreduce", none), after["allreduce"]
    assert (new.calls - old.calls, new.nbytes - old.nbytes) == (7, 7 * 4000)
    assert new.seconds > old.seconds
    assert after["broadcast"].nbytes - before.get("broadcast", none).nbytes == 40


def test_metrics_count_operations(world: rr.Communicator) -> None:
    """Every asynchronous operation counts once; those that were fused ran in fewer pieces; overlap is a fraction."""
    before = rr.metrics()
    for _ in range(5):
        handles = [hvd.allreduce_async(torch.ones(3), name=f"metric {i}") for i in range(6)]
        for handle in handles:
            hvd.synchronize(handle)
    after = rr.metrics()
    assert after.operations - before.operations == 30
    assert 5 <= after.batches - before.batches < 30
    assert after.operations_s > before.operations_s
    assert 0.0 <= after.overlap <= 1.0


def test_metrics_name_the_rank_that_was_late(world: rr.Communicator) -> None:
    """All ranks agree on which rank the others had to wait for."""
    late = world.size - 1
    for name in ("first", "second", "third"):
        if world.rank == late:
            PRIVATE.Barrier()
        handle = hvd.allreduce_async(torch.ones(3), name=name)
        if world.rank != late:
            hvd.poll(handle)  # the engine has it, and time passes, before the last rank goes on
            sum(range(200_000))
            PRIVATE.Barrier()
        hvd.synchronize(handle)
    found = rr.metrics()
    if world.size > 1:
        assert found.late_rank == late
        assert found.late_s > 1e-3
    else:
        assert found.late_rank is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_shows_the_steps_of_a_training(world: rr.Communicator, path: Path, overlap: bool) -> None:
    """Steps are numbered, hold passes and updates one after the other, and buckets tell their parameters."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), overlap=overlap
    )

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(5, 3)).sum().backward()
            optimizer.step()

    train(3)  # by then buckets travel during the backward pass, where they may
    hvd.start_timeline(path)
    train(3)
    with torch.no_grad():
        model(torch.ones(1, 3))
    events = trace(path)
    train(1)  # the trace has ended, and the hooks with it
    assert json.loads(path.read_text()) == events
    for rank in range(world.size):
        mine = [event for event in events if event["pid"] == rank]
        (row,) = [each["tid"] for each in mine if each["ph"] == "M" and each["args"].get("name") == "program"]
        spans = [each for each in mine if each["ph"] == "X" and each["tid"] == row]
        steps = [each for each in spans if each["name"].startswith("step")]
        assert [(each["name"], each["args"]) for each in steps] == [(f"step {n}", {"step": n}) for n in range(3)]
        for step in steps:
            inside = [each for each in spans if each is not step and contains(step, each)]
            assert [each["name"] for each in inside] == ["forward", "backward", "optimizer"]
            assert all(end_of(one) <= other["ts"] + 2e-3 for one, other in pairwise(inside))
        assert [each["name"] for each in spans if each not in steps][-1] == "forward"
        runs = [each["args"]["parameters"] for each in mine if each["name"] == "run" and "args" in each]
        names = sorted(name for name, _ in model.named_parameters())
        assert [sorted(each) for each in runs] == [names] * (3 if world.size > 1 else 0)
        ids = {
            kind: {each["id"] for each in mine if each["ph"] == kind and each.get("cat") == "arrow"} for kind in "sf"
        }
        operations = {each["id"] for each in mine if each["name"] == "run" and each["ph"] == "b"}
        assert operations <= ids["s"] & ids["f"]


@pytest.mark.sizes(2, 3, 4)
def test_the_report_names_the_rank_that_the_others_wait_for(world: rr.Communicator, path: Path) -> None:
    """Though all end their backward passes before, it is the last in each step, and the others wait in theirs."""
    model, late = torch.nn.Linear(3, 2), world.size - 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvd.start_timeline(path)
    for _ in range(3):
        model(torch.ones(5, 3)).sum().backward()
        PRIVATE.Barrier()
        if world.rank == late:
            PRIVATE.Barrier()
        handle = hvd.allreduce_async(torch.ones(3), name="gradients")
        if world.rank != late:
            hvd.poll(handle)
            sum(range(1_000_000))
            PRIVATE.Barrier()
        hvd.synchronize(handle)
        optimizer.step()
    events = trace(path)
    found = report(events)
    ranks = found["ranks"]
    assert [each["last"] for each in ranks] == [float(each["rank"] == late) for each in ranks]
    assert all((each["waiting"] == 0.0) == (each["rank"] == late) for each in ranks)
    assert waited_for(found).startswith(f"The others waited for rank {late}: it was last in 100%")


def end_of(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"])


def contains(span: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(span["ts"] <= other["ts"] + 2e-3 and end_of(other) <= end_of(span) + 2e-3)
