"""The timeline: one clock from messages both ways, a file that is complete JSON at any time, and what is in it."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.engine import Engine, Reduction
from ringreduce.observe.timeline import Clock, Timeline, Track, distance
from ringreduce.testing import run_engines, run_ranks, run_threads
from ringreduce.transport.memory import MemoryWorld

CLOCK = Clock("job", 0.0)
Event = dict[str, Any]


def events_of(path: Path, kind: str | None = None) -> list[Event]:
    """Return what a trace holds."""
    return [event for event in json.loads(path.read_text()) if kind is None or event["ph"] == kind]


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        ([-3e-6], [5e-6], 0.0),
        ([4.0], [6.0], 5.0),
        ([4.0, 4.9, 1.0], [9.0, 5.1, 5.3], 5.0),
        ([-8.0], [-7.0], -7.5),
        ([0.0], [0.0], 0.0),
    ],
)
def test_a_clock_is_as_far_ahead_as_the_fastest_messages_allow(
    lower: list[float], upper: list[float], expected: float
) -> None:
    """The distance lies in the middle of what all rounds leave possible, and is 0 where that is possible."""
    assert distance(lower, upper) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_of_one_machine_agree_on_the_clock(size: int) -> None:
    """Where all read the same clock, they agree on when it was 0, and on the job, to the bit."""
    world = MemoryWorld(size, 30.0)
    clocks = run_threads(size, lambda rank: Clock.agree(world.messages(rank)))
    assert len(set(clocks)) == 1


def test_the_file_is_complete_at_any_time_and_holds_all_ranks(tmp_path: Path) -> None:
    """After every piece that any rank writes the file is JSON, with the events of all ranks so far."""
    path = tmp_path / "trace.json"
    timelines = [Timeline(path, CLOCK, 1, rank, "host", mark_batches=False) for rank in range(3)]
    for count in (1, 2):
        for rank, timeline in enumerate(timelines):
            timeline.span("work", 1.0, 2.5, 1, size=7)
            timeline.write()
            spans = Counter(event["pid"] for event in events_of(path, "X"))
            assert spans == Counter({each: count if each <= rank else count - 1 for each in range(3)}) - Counter()
    assert events_of(path, "X")[0] == {
        "name": "work",
        "ph": "X",
        "pid": 0,
        "tid": 1,
        "ts": 1e6,
        "dur": 1.5e6,
        "args": {"size": 7},
    }


def test_a_trace_is_on_disk_though_its_program_waits_and_is_killed(tmp_path: Path) -> None:
    """Within a second, by the file's name, whatever the program does then; complete, as JSON and with all events."""
    source = """
import os, signal, sys
from pathlib import Path
import numpy as np
import ringreduce as rr
rr.init()
path = Path(sys.argv[1])
for name in ("allreduce", "allgather"):
    getattr(rr, name)(np.ones(3))
    while name not in path.read_text():  # the program has nothing more to tell meanwhile
        os.sched_yield()
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "trace.json"
    environ = {**os.environ, "RINGREDUCE_TIMELINE": str(path)}
    command = [sys.executable, "-c", source, str(path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL, done.stderr
    spans = [json.dumps(event) for event in json.loads(path.read_text())]
    assert all(any(name in span for span in spans) for name in ("allreduce", "allgather"))


def test_another_trace_begins_the_file_anew(tmp_path: Path) -> None:
    """Neither an earlier job's trace nor an earlier one of this job is left of a file; an empty one will do."""
    path = tmp_path / "trace.json"
    path.touch()
    for clock, number in ((CLOCK, 1), (CLOCK, 2), (Clock("another job", 0.0), 2)):
        for rank in (1, 0):
            timeline = Timeline(path, clock, number, rank, "host", mark_batches=False)
            timeline.span("work", 0.0, 1.0, 1)
            timeline.write()
        assert [event["pid"] for event in events_of(path, "X")] == [1, 0]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    """The error names the path and the reason; once a trace runs, it is a line in the log and the program goes on."""
    with pytest.raises(ConfigError, match=r"missing.*trace\.json.*No such file"):
        Timeline(tmp_path / "missing" / "trace.json", CLOCK, 1, 0, "host", mark_batches=False)


def test_files_are_private(tmp_path: Path) -> None:
    """Others may not read a trace, nor lock it, whatever the umask; also where an earlier one was open to them."""
    path = tmp_path / "trace.json"
    before = os.umask(0)
    try:
        Timeline(path, CLOCK, 1, 0, "host", mark_batches=False)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        path.chmod(0o666)
        Timeline(path, CLOCK, 2, 0, "host", mark_batches=False)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)


FOREIGN = {
    "notes": "notes " * 1000,
    "JSON": '[\n{"name": "something else"}\n]\n',
    "another program's trace": '[\n{"name": "trace", "ph": "M", "pid": 1}\n]\n',
    "one byte": " ",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("held", [False, True])
def test_what_is_no_trace_stays_as_it_is(tmp_path: Path, content: str, held: bool) -> None:
    """A file that holds something else is refused at once and keeps its content and its mode, locked or not."""
    path = tmp_path / "trace.json"
    path.write_text(content)
    path.chmod(0o640)
    with open(path) as reader:
        if held:
            fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match=r"trace\.json.* no trace of ringreduce"):
            Timeline(path, CLOCK, 1, 0, "host", mark_batches=False, patience_s=0.0)
    assert path.read_text() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def _symlink(path: Path, target: Path) -> None:
    path.symlink_to(target)


def _dangling_symlink(path: Path, target: Path) -> None:
    path.symlink_to(target.with_name("nowhere"))


def _hard_link(path: Path, target: Path) -> None:
    os.link(target, path)


def _fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path, target: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (_symlink, "symbolic link"),
        (_dangling_symlink, "symbolic link"),
        (_hard_link, "2 names"),
        (_fifo, "no regular file"),
        (_folder, "directory"),
    ],
)
def test_only_a_plain_file_is_written(tmp_path: Path, make: Callable[[Path, Path], None], complaint: str) -> None:
    """No link is followed, and nothing waits for a reader of a pipe; what a link leads to stays as it is."""
    target, path = tmp_path / "target", tmp_path / "trace.json"
    Timeline(target, CLOCK, 1, 0, "host", mark_batches=False)
    before = target.read_bytes()
    make(path, target)
    with pytest.raises(ConfigError, match=complaint):
        Timeline(path, CLOCK, 2, 0, "host", mark_batches=False)
    assert target.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


def test_a_device_is_refused() -> None:
    """Whoever may write to it."""
    with pytest.raises(ConfigError, match="no regular file"):
        Timeline("/dev/null", CLOCK, 1, 0, "host", mark_batches=False)


@contextmanager
def held(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Keep a lock on a file, as another process can that may open it."""
    with open(path) as file:
        fcntl.flock(file, kind)
        yield


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_nobody_waits_for_who_holds_the_file(tmp_path: Path, kind: int, caplog: pytest.LogCaptureFixture) -> None:
    """While another process has the file locked, the rank goes on and keeps what it sees; later all of it is there."""
    path = tmp_path / "trace.json"
    path.touch()
    with held(path, kind):
        timeline = Timeline(path, CLOCK, 1, 0, "host", mark_batches=False, patience_s=0.0)
        for number in range(10_000):
            timeline.span(str(number), number, number + 0.5, 1)
        assert path.read_bytes() == b""
    timeline.write()
    assert [event["name"] for event in events_of(path, "X")] == [str(number) for number in range(10_000)]
    assert [event["name"] for event in events_of(path, "M")] == ["trace", "process_name", "process_sort_index"]
    assert caplog.text == ""


def test_what_is_kept_is_bounded(tmp_path: Path) -> None:
    """A rank that cannot write for long keeps the first events, drops further ones, and says in the trace how many."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, CLOCK, 1, 0, "host", mark_batches=False, patience_s=0.0)
    count = 100_000
    with held(path):
        for number in range(count):
            timeline.add("i", str(number), 0.0)
    timeline.write()
    timeline.add("i", "last", 0.0)
    timeline.write()
    *kept, last = [event["name"] for event in events_of(path, "i")]
    assert kept == [str(number) for number in range(len(kept))]
    assert last == "last"
    assert 10_000 < len(kept) < count
    (dropped,) = [event for event in events_of(path, "M") if event["name"] == "dropped_events"]
    assert dropped["args"]["count"] == count - len(kept)
    assert dropped["pid"] == 0


def test_a_trace_that_ends_while_the_file_is_held_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log; the file stays as it was."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, CLOCK, 1, 0, "host", mark_batches=False, patience_s=0.0)
    before = path.read_bytes()
    timeline.span("work", 0.0, 1.0, 1)
    with held(path):
        timeline.flush()
    assert path.read_bytes() == before
    (record,) = caplog.records
    assert record.getMessage().endswith("events that it lacks: 1")


def test_ranks_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each waits for its turn when it asks for everything to be written; the events of each are there, in order."""
    path = tmp_path / "trace.json"

    def trace(rank: int) -> None:
        timeline = Timeline(path, CLOCK, 1, rank, "host", mark_batches=False)
        for number in range(100):
            timeline.add("i", str(number), 0.0)
            assert timeline.write()

    run_threads(4, trace)
    by_rank = {rank: [event["name"] for event in events_of(path, "i") if event["pid"] == rank] for rank in range(4)}
    assert by_rank == {rank: [str(number) for number in range(100)] for rank in range(4)}


def test_a_trace_that_has_given_way_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A rank that still writes to a trace when another begins the next one in its file takes nothing of that away."""
    path = tmp_path / "trace.json"
    late = Timeline(path, CLOCK, 1, 0, "host", mark_batches=False)
    Timeline(path, CLOCK, 2, 1, "host", mark_batches=False)
    before = path.read_bytes()
    for _ in range(3):
        late.span("work", 0.0, 1.0, 1)
        late.flush()
    assert path.read_bytes() == before
    (record,) = caplog.records
    assert "another trace" in record.getMessage()


@pytest.mark.parametrize("tail", [b"\n]\n" + b" " * 100_000, b",", b',\n{"name":"unf', b',\n{"na' + b" " * 100_000])
def test_what_a_killed_rank_left_unfinished_is_mended(tmp_path: Path, tail: bytes) -> None:
    """A rank that was killed as it wrote leaves room after the bracket, or half an event; the next piece mends that."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, CLOCK, 1, 0, "host", mark_batches=False)
    for name in ("first", "second"):
        timeline.span(name, 0.0, 1.0, 1)
    timeline.write()
    path.write_bytes(path.read_bytes().removesuffix(b"\n]\n") + tail)
    timeline.span("third", 0.0, 1.0, 1)
    timeline.write()
    names = [event["name"] for event in events_of(path, "X")]
    # Whether the last line was whole is not known where nothing follows it.
    assert names == (["first", "third"] if tail == b"," else ["first", "second", "third"])


FULL_DISK = """
import json, logging, resource, sys
from ringreduce.common.errors import ConfigError
from ringreduce.observe.timeline import Clock, Timeline

path, limit = sys.argv[1], int(sys.argv[2])
logging.basicConfig(format="logged: %(message)s")
first, second = (Timeline(path, Clock("job", 0.0), 1, rank, "host", mark_batches=False) for rank in (0, 1))
first.span("before", 0.0, 1.0, 1)
first.write()
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # a write that goes beyond is cut short
for number in range(20_000):
    for timeline in (first, second):
        timeline.span(f"{number:100}", 0.0, 1.0, 1)
    if number % 1000 == 0:
        first.flush()
        second.flush()
        json.load(open(path))
first.flush()
second.flush()
print(len(json.load(open(path))))
"""


@pytest.mark.parametrize("limit", [700, 4096, 5000, 100_000, 1_000_003])
def test_a_full_disk_leaves_a_whole_trace(tmp_path: Path, limit: int) -> None:
    """What fitted is there, complete; each rank says so in one line and writes no more, and the program goes on."""
    path = tmp_path / "trace.json"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path), str(limit)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    logged = [line for line in done.stderr.splitlines() if line.startswith("logged: ")]
    assert len(logged) == 2, done.stderr
    assert all("File too large" in line for line in logged)
    events = events_of(path)
    assert len(events) == int(done.stdout)
    assert next(event["name"] for event in events if event["ph"] == "X") == "before"
    assert path.stat().st_size <= limit


def test_a_disk_that_is_full_from_the_start_is_refused(tmp_path: Path) -> None:
    """No part of a trace is left, and what is no trace of ours cannot come of it."""
    path = tmp_path / "trace.json"
    source = """
import resource, sys
from ringreduce.observe.timeline import Clock, Timeline
resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.RLIM_INFINITY))
Timeline(sys.argv[1], Clock("job", 0.0), 1, 0, "host", mark_batches=False)
"""
    done = subprocess.run(
        [sys.executable, "-c", source, str(path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert "ConfigError" in done.stderr
    assert "File too large" in done.stderr
    assert path.read_bytes() == b""


def test_a_trace_that_fails_later_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One, however often it is tried; what is traced goes on when the file can no longer be written."""
    folder = tmp_path / "there"
    folder.mkdir()
    timeline = Timeline(folder / "trace.json", CLOCK, 1, 0, "host", mark_batches=False)
    (folder / "trace.json").unlink()
    folder.rmdir()
    for _ in range(5):
        timeline.span("work", 0.0, 1.0, 1)
        timeline.flush()
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


def test_steps_lie_in_their_collective(tmp_path: Path) -> None:
    """A collective's steps follow each other from its beginning and end before it does; others are left out."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, CLOCK, 1, 0, "host", mark_batches=False)
    track = timeline.track("row")
    track.step_finished("before")
    track.collective_started("allreduce", "ring", 64)
    track.step_finished("one")
    track.step_finished("two")
    track.collective_finished("allreduce", "ring", 64, 0.0)
    track.step_finished("after")
    timeline.write()
    spans = {event["name"]: event for event in events_of(path, "X")}
    assert spans.keys() == {"one", "two", "allreduce"}
    ends = {name: event["ts"] + event["dur"] for name, event in spans.items()}
    assert spans["one"]["ts"] == spans["allreduce"]["ts"]
    assert spans["two"]["ts"] == pytest.approx(ends["one"], abs=2e-3)
    assert ends["two"] <= ends["allreduce"] + 2e-3
    assert spans["allreduce"]["args"] == {"algorithm": "ring", "nbytes": 64}
    assert [event["args"]["value"] for event in events_of(path, "C")] == [64]


def test_an_operation_goes_through_its_phases(tmp_path: Path) -> None:
    """Each operation is queued, negotiated and run, one phase after the other, and the counter follows them."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, CLOCK, 1, 3, "host", mark_batches=True)
    track = timeline.track("row")
    track.operations_finished(["from before the trace"])
    for name in ("a", "b", "a", "never runs"):
        track.operation_submitted(name)
    for name in ("a", "b", "a"):
        track.operation_announced(name)
    track.operations_started(["a", "b"])
    track.operations_finished(["a", "b"])
    track.operations_finished(["never runs"])
    track.operations_finished(["a"])
    timeline.write()
    phases: dict[str, list[str]] = {}
    for event in events_of(path):
        if event["ph"] in "be":
            phases.setdefault(event["id"], []).append(event["ph"] + " " + event["name"])
    whole = ["b queue", "e queue", "b negotiate", "e negotiate", "b run", "e run"]
    assert list(phases.values()) == [
        ["b a", *whole, "e a"],
        ["b b", *whole, "e b"],
        ["b a", *whole[:4], "e a"],
        ["b never runs", *whole[:2], "e never runs"],
    ]
    under_way = [event["args"]["value"] for event in events_of(path, "C")]
    assert under_way == [0, 1, 2, 3, 4, 2, 1, 0]
    assert [event["name"] for event in events_of(path, "i")] == ["batch of 2"]


@pytest.mark.parametrize(("node_size", "algorithm"), [(None, None), (None, "two_shot"), (1, "ring"), (2, None)])
def test_every_kind_of_collective_shows_its_steps(tmp_path: Path, node_size: int | None, algorithm: str | None) -> None:
    """Whatever carries an allreduce out, its steps cover it without gaps in their order, on every rank."""
    path = tmp_path / "trace.json"

    def check(communicator: Any) -> None:
        timeline = Timeline(path, CLOCK, 1, communicator.rank, "host", mark_batches=False)
        track = timeline.track("row")
        communicator.instruments.add(track)
        for count in (5, 100_001):
            communicator.allreduce(np.ones(count), algorithm=algorithm if count > 5 else None)
        communicator.instruments.remove(track)
        timeline.flush()

    run_ranks(4, check, node_size=node_size)
    for rank in range(4):
        spans = [event for event in events_of(path, "X") if event["pid"] == rank]
        wholes = [event for event in spans if event["name"] == "allreduce"]
        assert len(wholes) == 2
        for whole in wholes:
            end = whole["ts"] + whole["dur"] + 2e-3
            inside = [each for each in spans if each is not whole and whole["ts"] <= each["ts"] < end]
            assert inside
            assert all(each["ts"] + each["dur"] <= end for each in inside)


def test_what_travels_together_is_packed_and_unpacked_in_the_trace(tmp_path: Path) -> None:
    """A batch of operations spans the packing, the collective, and the unpacking, in this order."""
    path = tmp_path / "trace.json"

    def check(engine: Engine) -> None:
        timeline = Timeline(path, CLOCK, 1, engine.communicator.rank, "host", mark_batches=False)
        engine.communicator.instruments.add(timeline.track("row"))
        array = [np.ones(3), np.ones(4)]
        for _ in range(4):
            operations = [Reduction(f"r{i}", "sum", SUM, [each], [np.empty_like(each)]) for i, each in enumerate(array)]
            for operation in operations:
                engine.submit(operation)
            for operation in operations:
                engine.wait(operation)
        timeline.flush()

    run_engines(2, check, config=Config(timeout_s=30.0))
    for rank in (0, 1):
        spans = [event for event in events_of(path, "X") if event["pid"] == rank]
        batches = [each for each in spans if each["name"] == "r0 and 1 more"]
        assert batches
        batch = batches[-1]
        assert batch["args"] == {"operations": ["r0", "r1"]}
        end = batch["ts"] + batch["dur"]
        names = [each["name"] for each in spans if batch["ts"] <= each["ts"] and each["ts"] + each["dur"] <= end + 2e-3]
        order = [name for name in names if name in ("pack 2 arrays", "allreduce", "unpack 2 arrays")]
        assert order == ["pack 2 arrays", "allreduce", "unpack 2 arrays"]


def test_arrows_lead_to_where_operations_run(tmp_path: Path) -> None:
    """One begins where the program submitted the operation; one more leads from a late rank to each that has waited."""
    timelines = [Timeline(tmp_path / f"{rank}", CLOCK, 1, rank, "host", mark_batches=False) for rank in range(3)]
    for timeline in timelines:
        timeline.program().span("step 0", 0.0, 1.0, step=0)
        track = timeline.track("row", "world", timeline._rank, 3)
        for late in (True, False):
            track.operation_submitted("grad")
            track.operation_described("grad", ["weight", "bias"])
            track.operation_announced("grad")
            if late:
                track.rank_was_late(1, 0.5, 7)
            track.operations_started(["grad"])
            track.operations_finished(["grad"])
        timeline.flush()
    events = [each for rank in range(3) for each in events_of(tmp_path / f"{rank}") if each.get("cat") == "arrow"]
    rows = {"s": 1, "f": 2}  # those of the program and of the track
    assert all(each["tid"] == rows[each["ph"]] for each in events)
    arrows = {(each["id"], each["ph"]): each for each in events}
    assert len(arrows) == len(events) == 2 * (3 * 2 + 2)
    across = {key: each["pid"] for key, each in arrows.items() if key[0].startswith("world")}
    assert across == {
        ("world 7 1 0", "s"): 1,
        ("world 7 1 0", "f"): 0,
        ("world 7 1 2", "s"): 1,
        ("world 7 1 2", "f"): 2,
    }
    assert all(arrows[id_, "s"]["ts"] <= arrows[id_, "f"]["ts"] for id_, kind in arrows if not id_.startswith("world"))
    runs = [each for each in events_of(tmp_path / "0", "b") if each["name"] == "run"]
    assert [each["args"] for each in runs] == [{"parameters": ["weight", "bias"]}] * 2


def test_rows_are_named(tmp_path: Path) -> None:
    """A rank is a process with its host in the name, a track is a thread with its own."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, CLOCK, 1, 5, "node7", mark_batches=False)
    tracks = [timeline.track("first"), timeline.track("second")]
    assert all(isinstance(each, Track) for each in tracks)
    timeline.flush()
    named = [(each["name"], each["tid"], each["args"]) for each in events_of(path, "M") if each["name"] != "trace"]
    assert named == [
        ("process_name", 0, {"name": "rank 5 (node7)"}),
        ("process_sort_index", 0, {"sort_index": 5}),
        ("thread_name", 1, {"name": "first"}),
        ("thread_name", 2, {"name": "second"}),
    ]


def test_a_signal_handler_may_flush_whatever_it_interrupts(tmp_path: Path) -> None:
    """It waits for no lock that its own thread holds: neither that of the events nor the turn to write."""
    path = tmp_path / "trace.json"
    interrupts: list[int] = []

    class Interrupted(Timeline):
        def _append(self, deadline_s: float) -> bool:
            for number in interrupts:
                signal.raise_signal(number)
            return super()._append(deadline_s)

    timeline = Interrupted(path, CLOCK, 1, 0, "host", mark_batches=False)
    timeline.span("work", 1.0, 2.0, 1)
    with timeline._lock:
        timeline.flush()
    assert [event["name"] for event in events_of(path, "X")] == ["work"]
    flushed: list[bool] = []

    before = signal.signal(signal.SIGUSR1, lambda *_: flushed.append(timeline.write()))
    try:
        interrupts.append(signal.SIGUSR1)
        timeline.span("more", 2.0, 3.0, 1)
        assert timeline.write()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert flushed == [False]
    assert [event["name"] for event in events_of(path, "X")] == ["work", "more"]


def test_operations_of_one_name_that_threads_submit_all_stay_in_the_trace(tmp_path: Path) -> None:
    """One thread submits while another takes them in: each has a beginning and an end."""
    path = tmp_path / "trace.json"
    timeline = Timeline(path, CLOCK, 1, 0, "host", mark_batches=False)
    track = timeline.track("world")
    count = 2000
    submitted: queue.SimpleQueue[str] = queue.SimpleQueue()

    def carry_out() -> None:
        for _ in range(count):
            name = submitted.get()
            track.operation_announced(name)
            track.operations_finished([name])

    thread = threading.Thread(target=carry_out)
    thread.start()
    for _ in range(count):
        track.operation_submitted("grad")
        submitted.put("grad")
    thread.join()
    timeline.write()
    begun, ended = ({event["id"] for event in events_of(path, kind) if event["name"] == "grad"} for kind in "be")
    assert begun == ended
    assert len(begun) == count
