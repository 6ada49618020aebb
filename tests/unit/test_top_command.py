"""`ringreduce top`: what is shown, from what ranks say."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path
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
        process_began=processes.began(os.getpid()),
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


def write(place: Path, *told: Snapshot) -> None:
    """Write what ranks say to where `ringreduce top` finds it."""
    for each in told:
        (place / f"{each.job}.{each.rank}.json").write_text(json.dumps(each.to_json()))


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


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where ranks put what they say."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return recorder.folder()


def test_the_command_shows_living_ranks_and_forgets_the_dead(place: Path):
    """Those of the job that is asked for, as a table or as JSON; what is left of a killed rank is removed."""
    write(place, said(0), said(1, error="PeerLostError: rank 2 is lost"), said(2, pid=2**30))
    (place / "no.json").write_text("{")
    shown = CliRunner().invoke(main, ["top", "--once"], standalone_mode=False, env={"COLUMNS": "120"})
    assert "0123abcd: 3 ranks, 2 of them seen here, 60 s, python train.py" in shown.output
    assert "PeerLostError: rank 2 is lost" in shown.output
    assert not (place / "0123abcd.2.json").exists()
    found = json.loads(CliRunner().invoke(main, ["top", "--json"], standalone_mode=False).output)
    assert [each["rank"] for each in found] == [0, 1]
    assert "node7" not in shown.output  # which all ranks share
    write(place, said(1, host="node8"))
    shown = CliRunner().invoke(main, ["top", "--once"], standalone_mode=False, env={"COLUMNS": "120"})
    assert all(f"{host} " in shown.output for host in ("node7", "node8"))
    other = CliRunner().invoke(main, ["top", "--once", "--job", "ffff"], standalone_mode=False)
    assert "no job of this user whose name begins with ffff" in other.output


def test_a_rank_of_another_version_is_named_and_not_shown(place: Path, caplog: pytest.LogCaptureFixture):
    """In one line; the other ranks are shown."""
    write(place, said(0), said(1, version=99))
    assert [each.rank for each in recorder.read_all()] == [0]
    (record,) = caplog.records
    assert "0123abcd.1.json is not shown: it is no snapshot of version 1" in record.getMessage()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nobody else may read or write what ranks say, and no link leads elsewhere."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "ringreduce").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        recorder.folder()
    (tmp_path / "ringreduce").rmdir()
    (tmp_path / "ringreduce").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        recorder.folder()


def test_the_file_of_a_rank_holds_its_last_samples(place: Path):
    """It is for this user alone, and goes with the rank, as does its folder; killed ranks' go when rank 0 begins."""
    write(place, said(1, job="killed", pid=2**30))
    (place / "killed.1.1-1").write_text("half")
    mine = FlightRecorder(0, 1, None, [])
    mine.begin_status("j", lambda: Metrics.of([], []))
    for mine.steps in range(21):
        mine.write_status()
    (found,) = recorder.read_all()
    assert [sample.steps for sample in found.samples] == list(range(10, 21))
    assert (place / "j.0.json").stat().st_mode & 0o777 == 0o600
    mine.end_status()
    assert not place.exists()


def test_files_that_a_killed_launcher_has_left_are_no_ranks(place: Path):
    """A process of the same number is another one if it began later, and one that nobody has waited for has ended."""
    mine = processes.began(os.getpid())
    assert mine is not None
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    for job, pid, began in (("other", os.getpid(), mine - 1), ("zombie", ended.pid, None), ("mine", os.getpid(), mine)):
        write(place, said(0, job=job, pid=pid, process_began=began))
    assert [each.job for each in recorder.read_all()] == ["mine"]
    assert [each.name for each in place.iterdir()] == ["mine.0.json"]
    ended.wait()


def test_a_rank_writes_until_it_ends(place: Path, monkeypatch: pytest.MonkeyPatch):
    """Again and again, beside the program; its file goes with its world."""
    written, count = threading.Event(), itertools.count()

    def metrics() -> Metrics:
        if next(count) == 20:
            written.set()
        return Metrics.of([], [])

    monkeypatch.setattr(observer, "_EVERY_S", 0.001)
    observed = observer.Observer(0, 1, JobClock("j", 0.0), Config(), [], [])
    observed.begin(
        Beginning(config=Config(), messages=MemoryWorld(1, 30.0).messages(0), library="none", metrics=metrics)
    )
    assert written.wait(30)
    (found,) = recorder.read_all()
    assert len(found.samples) == 11
    observed.end()
    assert not place.exists()


def test_a_port_that_is_taken_is_an_error(place: Path):
    """In one line, with what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1 cannot be served: Address already in use"):
            reports.top.main(["--prometheus", port], standalone_mode=False)
