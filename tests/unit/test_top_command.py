"""`ringreduce top`: what is shown, from what ranks say."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import pytest
from click.testing import CliRunner

from ringreduce.cli import main, reports
from ringreduce.common import processes
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.observe import observer
from ringreduce.observe.job.job_view import rows
from ringreduce.observe.out.metric_table import families_of, prometheus_text
from ringreduce.observe.seen import recorder
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.recorder import FlightRecorder
from ringreduce.observe.seen.snapshots import RateSample, SeenCall, SeenOperation, SeenSet, SlowRank, Snapshot
from ringreduce.observe.seen.timeline import JobClock
from ringreduce.observe.watchers import Beginning
from ringreduce.transport.memory import MemoryWorld


def said(rank: int, **more: Any) -> Snapshot:
    """Return what a rank of three says that has done 50 steps in 10 s, a quarter of that in communication."""
    told = Snapshot(
        job="0123abcd",
        rank=rank,
        size=3,
        host="node7",
        pid=os.getpid(),
        command=("python", "train.py"),
        began=1000.0,
        time=1060.0,
        samples=(
            RateSample(1050.0, 200, 6400, 30.0),
            RateSample(1055.0, 210, 7000, 31.0),
            RateSample(1060.0, 250, 8000, 32.5),
        ),
    )
    return replace(told, **more)


#: Announces what it gets as a rank would, until it is ended.
ANNOUNCES = """
import json, os, sys, threading
from ringreduce.common.processes import Announcement
status = Announcement("ringreduce-status")
status.replace(json.dumps({**json.loads(sys.argv[1]), "pid": os.getpid()}).encode())
print(flush=True)
threading.Event().wait()
"""


@contextmanager
def announced(*told: Snapshot) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Let a process announce each of these."""
    words = [[sys.executable, "-c", ANNOUNCES, json.dumps(each.to_json())] for each in told]
    started = [subprocess.Popen(each, stdout=subprocess.PIPE) for each in words]
    try:
        for each in started:
            each.stdout.readline()
        yield started
    finally:
        for each in started:
            each.kill()
            each.communicate()


def seen(job: str) -> list[Snapshot]:
    """Return what the ranks of a job announce; others of this user may run."""
    return [each for each in recorder.read_all() if each.job == job]


FIRST = RateSample(1060.0, 1, 2, 3.0)


def test_rates_are_those_of_the_last_samples():
    """Steps and samples for each second, and the share of communication, between the oldest sample and the newest."""
    (row,) = rows([said(0)])
    assert (row.steps, row.samples) == (250, 8000)
    assert (row.steps_per_second, row.samples_per_second, row.communication_ratio) == (5.0, 160.0, 0.25)
    assert row.running_seconds == 60.0
    (row,) = rows([said(0, samples=(FIRST,))])
    assert (row.steps_per_second, row.samples_per_second, row.communication_ratio) == (None, None, None)


def world(call: tuple[int, bool] | None = None, *operations: str, since: float = 1048.0) -> tuple[SeenSet]:
    """Return what a rank says of the world: its last call with whether it has ended, and what waits to start."""
    calls = () if call is None else (SeenCall(call[0], "allreduce", 8, since, 1059.0 if call[1] else None),)
    waiting = tuple(SeenOperation(name, "", "", since) for name in operations)
    return (SeenSet(0, "world", None, calls, waiting),)


INSIDE, BEFORE = world((41, False)), world((40, True))
WAITS = world(None, "SGD, buckets", since=1052.0)


@pytest.mark.parametrize(
    ("ranks", "texts"),
    [
        ((INSIDE, BEFORE, INSIDE), ["12 s in allreduce for rank 1", None, "12 s in allreduce for rank 1"]),
        ((INSIDE, INSIDE, INSIDE), ["12 s in allreduce for all, who have come"] * 3),
        ((INSIDE,), ["12 s in allreduce for ranks 1-2"]),
        ((world((41, False), since=1059.9), BEFORE), [None, None]),
        ((WAITS, world()), ["8 s in 'SGD, buckets' for rank 1", None]),
        ((WAITS, WAITS, world(None, "other", since=1059.5)), [*["8 s in 'SGD, buckets' for rank 2"] * 2, None]),
    ],
)
def test_who_is_waited_for_is_named(ranks: tuple[tuple[SeenSet], ...], texts: list[str | None]):
    """Ranks that wait for a second name those that have not come to a call, or have not submitted an operation."""
    assert [each.waiting for each in rows([said(rank, sets=sets) for rank, sets in enumerate(ranks)])] == texts


def test_a_slow_rank_is_named_with_the_reason():
    """In its own row."""
    slow = SlowRank(1, "last in 85% of steps, by 40 ms: it computes all the time", "rank 1 is last")
    assert [each.waiting for each in rows([said(rank, slow=slow) for rank in (0, 1)])] == [None, slow.lateness]


def test_prometheus_gets_every_rank():
    """A line for each rank and metric, with its type before it; what is not known is left out."""
    text = prometheus_text(families_of([said(0), said(2, samples=(FIRST,))]))
    assert '\nringreduce_steps_total{job="0123abcd",rank="0"} 250\n' in text
    assert '\nringreduce_communication_ratio{job="0123abcd",rank="0"} 0.25\n' in text
    assert 'communication_ratio{job="0123abcd",rank="2"}' not in text
    types = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    of_ranks = {"steps", "samples", "steps_per_second", "samples_per_second", "communication_ratio", "rank_info"}
    of_ranks |= {"running_seconds", "silence_seconds", "last_step_seconds", "resident_memory_bytes"}
    assert types == {f"ringreduce_{name}" for name in of_ranks}
    row = asdict(rows([said(0)])[0])
    shown = {name for name in of_ranks if name in row}
    assert shown == of_ranks - {"rank_info"}, "what `top --json` says has the names of the metrics"
    for name in shown - {"silence_seconds", "last_step_seconds"}:
        assert f'{name}{"_total" * (name in ("steps", "samples"))}{{job="0123abcd",rank="0"}} {row[name]}\n' in text


def top(*words: str) -> str:
    return CliRunner().invoke(main, ["top", *words], standalone_mode=False, env={"COLUMNS": "120"}).output


def test_the_command_shows_living_ranks():
    """Those of the job that is asked for, as a table or as JSON; a rank that is killed is shown no more."""
    failed = said(1, error="PeerLostError: rank 2 is lost")
    with announced(said(0), failed, said(2)) as ranks:
        ranks[2].kill()
        ranks[2].wait()
        shown = top("--once", "--job", "0123")
        assert "0123abcd: 3 ranks, 2 of them seen here, 60 s, python train.py" in shown
        assert "PeerLostError: rank 2 is lost" in shown
        assert "node7" not in shown  # which all ranks share
        assert [each["rank"] for each in json.loads(top("--json", "--job", "0123"))] == [0, 1]
        assert "no job of this user whose name begins with ffff" in top("--once", "--job", "ffff")
    with announced(said(0), said(1, host="node8")):
        shown = top("--once", "--job", "0123")
        assert all(f"{host} " in shown for host in ("node7", "node8"))


def test_a_rank_of_another_version_is_named_and_not_shown(caplog: pytest.LogCaptureFixture):
    """In one line; the other ranks are shown."""
    with announced(said(0), said(1, version=99)) as ranks:
        assert [each.rank for each in seen("0123abcd")] == [0]
    (record,) = caplog.records
    assert f"process {ranks[1].pid} is not shown: it is no snapshot of version" in record.getMessage()


def test_a_rank_announces_its_last_samples():
    """They go with its world."""
    mine = FlightRecorder(0, 1, None, [])
    mine.begin_status("samples", lambda: Metrics.of([], []))
    for mine.steps in range(21):
        mine.write_status()
    (found,) = seen("samples")
    assert [sample.steps for sample in found.samples] == list(range(10, 21))
    mine.end_status()
    mine.write_status()
    assert seen("samples") == []


def test_a_process_that_a_rank_has_forked_is_no_rank():
    """It inherits what the rank announces, which remains until it has ended."""
    mine = FlightRecorder(0, 1, None, [])
    mine.begin_status("forks", lambda: Metrics.of([], []))
    mine.write_status()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    mine.end_status()
    assert seen("forks") == []
    os.close(writing)
    os.waitpid(child, 0)
    os.close(reading)


def test_a_text_is_read_whole_while_it_is_replaced():
    """The last one or the next; and nothing that is announced after the end, in another thread."""
    texts = [bytes([letter]) * 100_000 for letter in b"ab"]
    mine, ends = processes.Announcement("ringreduce-test"), threading.Event()

    def replace() -> None:
        while not ends.is_set():
            for text in texts:
                mine.replace(text)

    replacing = threading.Thread(target=replace)
    replacing.start()
    for _ in range(300):
        found = [*processes.announced(os.getpid(), "ringreduce-test")]
        assert not found or any(text in texts for text in found)
    mine.close()
    ends.set()
    replacing.join()
    assert [*processes.announced(os.getpid(), "ringreduce-test")] == []


def test_a_rank_writes_until_it_ends(monkeypatch: pytest.MonkeyPatch):
    """Again and again, beside the program, until its world ends."""
    written, count = threading.Event(), itertools.count()

    def metrics() -> Metrics:
        if next(count) == 20:
            written.set()
        return Metrics.of([], [])

    monkeypatch.setattr(observer, "_EVERY_S", 0.001)
    observed = observer.Observer(0, 1, JobClock("writes", 0.0), Config(), [], [])
    observed.begin(
        Beginning(config=Config(), messages=MemoryWorld(1, 30.0).messages(0), library="none", metrics=metrics)
    )
    assert written.wait(30)
    (found,) = seen("writes")
    assert len(found.samples) == 11
    observed.end()
    assert seen("writes") == []


def test_a_port_that_is_taken_is_an_error():
    """In one line, with what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1 cannot be served: Address already in use"):
            reports.top.main(["--prometheus", port], standalone_mode=False)
