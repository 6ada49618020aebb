"""The timeline: one clock from messages both ways, one file of what all ranks have written, and what is in it."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.engine import Engine, Reduction
from ringreduce.observe.seen import timeline as module
from ringreduce.observe.seen.timeline import JobClock, Timeline, distance
from ringreduce.observe.seen.trace_file import collect
from ringreduce.testing import run_engines, run_threads
from ringreduce.transport.memory import MemoryWorld

CLOCK = JobClock("job", 0.0)
Event = dict[str, Any]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a trace."""
    return tmp_path / "trace.json"


@pytest.fixture
def begin(path: Path) -> Iterator[Callable[..., Timeline]]:
    """A function that begins a trace; those that a test does not end are ended after it."""
    begun = []

    def begin(rank: int = 0, number: int = 1, clock: JobClock = CLOCK, at: Path = path, **more: Any) -> Timeline:
        begun.append(Timeline(at, clock, number, rank, "host", **{"mark_batches": False, **more}))
        return begun[-1]

    yield begin
    for each in begun:
        each.stop(0)


def events_of(path: Path, kind: str | None = None) -> list[Event]:
    """Return what a trace holds, with what ranks have written that have not ended it."""
    collect(path)
    return [event for event in json.loads(path.read_text()) if kind is None or event["ph"] == kind]


def names_of(path: Path, kind: str = "X") -> list[str]:
    return [event["name"] for event in events_of(path, kind)]


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
    clocks = run_threads(size, lambda rank: JobClock.agree(world.messages(rank)))
    assert len(set(clocks)) == 1


def test_the_file_is_complete_at_any_time_and_holds_all_ranks_in_the_end(
    path: Path, begin: Callable[..., Timeline]
) -> None:
    """What ranks have written is added for who asks, and when the last of them stops."""
    timelines = [begin(rank) for rank in range(3)]
    for count in (1, 2):
        for rank, timeline in enumerate(timelines):
            timeline.span("work", 1.0, 2.5, 1, size=7)
            timeline.write(50.0)
            spans = Counter(event["pid"] for event in events_of(path, "X"))
            assert spans == Counter({each: count if each <= rank else count - 1 for each in range(3)}) - Counter()
    for timeline in timelines:
        assert json.loads(path.read_text())
        timeline.span("end", 2.5, 3.0, 1)
        timeline.stop(3)
    spans = Counter(event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X")
    assert spans == {"work": 6, "end": 3}
    expected = {"name": "work", "ph": "X", "pid": 0, "tid": 1, "ts": 1e6, "dur": 1.5e6, "args": {"size": 7}}
    assert events_of(path, "X")[0] == expected


def test_a_rank_that_ends_with_an_error_makes_the_file_at_once(path: Path, begin: Callable[..., Timeline]) -> None:
    """With what the others have written by then: they may never end the trace."""
    for timeline in (dead := begin(0), begin(1)):
        timeline.span("work", 0.0, 1.0, 1)
        timeline.write(50.0)
    timeline.stop(2, at_once=True)
    assert Counter(event["pid"] for event in json.loads(path.read_text()) if event["ph"] == "X") == {0: 1, 1: 1}
    dead.span("more", 1.0, 2.0, 1)
    dead.stop(2)
    assert [event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"] == ["work", "more", "work"]


def test_nothing_but_the_file_is_there_in_the_end(path: Path, begin: Callable[..., Timeline]) -> None:
    """Once all ranks have stopped that there are; or, where some never begin the trace, once the world ends."""
    for ranks, late in ((2, False), (3, True)):
        timelines = [begin(rank, number=ranks) for rank in (1, 0)]
        for timeline, hidden in zip(timelines, (1, int(late)), strict=True):
            timeline.span("work", 0.0, 1.0, 1)
            timeline.stop(ranks)
            others = [each.name.startswith(".trace.json.") for each in path.parent.iterdir() if each != path]
            assert others == [True] * hidden
        assert Counter(event["pid"] for event in events_of(path, "X")) == {0: 1, 1: 1}
        moved = path.rename(path.with_name("moved")) if late else path
        for timeline in timelines:
            timeline.stop(0)
        assert list(path.parent.iterdir()) == [moved]


KILLED = """
import os, signal, sys
from ringreduce.observe.seen.timeline import JobClock, Timeline
timelines = [Timeline(sys.argv[1], JobClock("job", 0.0), 1, rank, "host", mark_batches=False) for rank in (0, 1)]
for timeline in reversed(timelines):
    timeline.span("work", 0.0, 1.0, 1)
    timeline.write(50.0)
timelines[1].span("last", 1.0, 2.0, 1)
timelines[1].write(50.0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("cut", [b"", b'{"name":"unf', b'{"na' + b" " * 100_000], ids=["none", "short", "long"])
def test_what_killed_ranks_have_written_is_not_lost(path: Path, begin: Callable[..., Timeline], cut: bytes) -> None:
    """It is added for who asks, and by a rank that begins; half an event is left out."""
    for go_on in (False, True):
        subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False, timeout=50)
        (folder,) = path.parent.glob(".trace.json.*")
        with open(folder / "1", "ab") as part:
            part.write(cut)
        if go_on:
            begin(2)
        else:
            collect(path)
        names = [event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"]
        assert names == ["work", "work", "last"]
    assert {event["pid"] for event in events_of(path)} == {0, 1, 2}
    begin(0, number=2)
    assert list(path.parent.glob(".trace.json.*")) != [folder]
    assert names_of(path) == []


def test_another_trace_begins_the_file_anew(path: Path, begin: Callable[..., Timeline]) -> None:
    """Neither an earlier job's trace nor an earlier one of this job is left of a file; an empty one will do."""
    path.touch()
    for clock, number in ((CLOCK, 1), (CLOCK, 2), (JobClock("another job", 0.0), 2)):
        timelines = [begin(rank, number, clock) for rank in (1, 0)]
        for timeline in timelines:
            timeline.span("work", 0.0, 1.0, 1)
            timeline.stop(2)
        assert [event["pid"] for event in events_of(path, "X")] == [0, 1]


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path, begin: Callable[..., Timeline]) -> None:
    """The error names the path and the reason."""
    with pytest.raises(ConfigError, match=r"missing.*trace\.json.*No such file"):
        begin(at=tmp_path / "missing" / "trace.json")


def test_files_are_private(path: Path, begin: Callable[..., Timeline]) -> None:
    """Others may not read a trace nor its parts, whatever the umask; also where an earlier one was open to them."""
    before = os.umask(0)
    try:
        for number in (1, 2):
            begin(number=number)
            (folder,) = path.parent.glob(".trace.json.*")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert {stat.S_IMODE(each.stat().st_mode) for each in (path, *folder.iterdir())} == {0o600}
            path.chmod(0o666)
    finally:
        os.umask(before)


FOREIGN = {
    "notes": "notes " * 1000,
    "JSON": '[\n{"name": "something else"}\n]\n',
    "another program's trace": '[\n{"name": "trace", "ph": "M", "pid": 1}\n]\n',
    "one byte": " ",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_what_is_no_trace_stays_as_it_is(path: Path, begin: Callable[..., Timeline], content: str) -> None:
    """A file that holds something else is refused at once and keeps its content and its mode."""
    path.write_text(content)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=r"trace\.json.* no trace of ringreduce"):
        begin()
    collect(path)
    assert path.read_text() == content
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda path, target: path.symlink_to(target), "symbolic link"),
        (lambda path, target: path.symlink_to(target.with_name("nowhere")), "symbolic link"),
        (lambda path, target: os.link(target, path), "one name"),
        (lambda path, target: os.mkfifo(path), "no regular file"),
        (lambda path, target: path.mkdir(), "no regular file"),
    ],
    ids=["link", "link to nothing", "hard link", "pipe", "folder"],
)
def test_only_a_plain_file_is_written(
    path: Path, begin: Callable[..., Timeline], make: Callable[[Path, Path], None], complaint: str
) -> None:
    """No link is followed, and nothing waits for a reader of a pipe; what a link leads to stays as it is."""
    target = path.with_name("target")
    begin(at=target)
    before = target.read_bytes()
    make(path, target)
    with pytest.raises(ConfigError, match=complaint):
        begin(number=2)
    assert target.read_bytes() == before
    assert not path.with_name("nowhere").exists()


def test_a_device_is_refused(begin: Callable[..., Timeline]) -> None:
    """Whoever may write to it."""
    with pytest.raises(ConfigError, match="no regular file"):
        begin(at=Path("/dev/null"))


def while_busy(timeline: Timeline, action: Callable[[], object]) -> None:
    """Do something while another thread writes to the disk, and takes long."""
    taken, done = threading.Event(), threading.Event()

    def write() -> None:
        with timeline._turn:
            taken.set()
            done.wait(50)

    thread = threading.Thread(target=write)
    thread.start()
    taken.wait(50)
    action()
    done.set()
    thread.join()


def test_what_is_kept_is_bounded(path: Path, begin: Callable[..., Timeline]) -> None:
    """A rank whose disk is slow keeps the first events, drops further ones, and says in the trace how many."""
    timeline, count = begin(), 100_000
    while_busy(timeline, lambda: [timeline.add("i", str(number), 0.0) for number in range(count)])
    timeline.write(50.0)
    timeline.add("i", "last", 0.0)
    timeline.stop(1)
    *kept, last = names_of(path, "i")
    assert kept == [str(number) for number in range(len(kept))]
    assert last == "last"
    assert 10_000 < len(kept) < count
    (dropped,) = [event for event in events_of(path, "M") if event["name"] == "dropped_events"]
    assert (dropped["args"]["count"], dropped["pid"]) == (count - len(kept), 0)


def test_a_trace_that_ends_while_it_is_written_says_what_is_missing(
    begin: Callable[..., Timeline], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line in the log."""
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    timeline = begin()
    while_busy(timeline, lambda: (timeline.span("work", 0.0, 1.0, 1), timeline.stop(1)))
    (record,) = caplog.records
    assert record.getMessage().endswith("lacks events: 1")


def test_ranks_that_write_and_stop_at_once_lose_nothing(path: Path, begin: Callable[..., Timeline]) -> None:
    """When all have stopped, the events of each are there, in order, and nothing but the file."""
    for _ in range(10):
        begun = threading.Barrier(4)
        timelines = run_threads(4, begin)

        def trace(rank: int, timelines: list[Timeline] = timelines, begun: threading.Barrier = begun) -> None:
            begun.wait(50)
            for number in range(10):
                timelines[rank].add("i", str(number), 0.0)
                timelines[rank].write(50.0)
            timelines[rank].stop(4)

        run_threads(4, trace)
        by_rank = {rank: [event["name"] for event in events_of(path, "i") if event["pid"] == rank] for rank in range(4)}
        assert by_rank == {rank: [str(number) for number in range(10)] for rank in range(4)}
        assert list(path.parent.iterdir()) == [path]


def test_a_rank_that_merges_while_another_removes_the_parts_loses_nothing(
    path: Path, begin: Callable[..., Timeline], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks that stop at the same moment both merge the parts; the first to finish removes them."""
    timelines = [begin(rank) for rank in range(3)]
    for timeline in timelines:
        timeline.add("i", "last", 0.0)
    for timeline in timelines[:2]:
        timeline.stop(3)

    def remove(folder: str, **more: Any) -> None:
        os.unlink(os.path.join(folder, "0"))
        timelines[1].stop(3)
        remove_folder(folder, **more)

    remove_folder = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    timelines[2].stop(3)
    assert [event["pid"] for event in events_of(path, "i")] == [0, 1, 2]
    assert list(path.parent.iterdir()) == [path]


def test_a_trace_that_has_given_way_is_not_written(
    path: Path, begin: Callable[..., Timeline], caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that still writes to a trace when another begins the next one in its file takes nothing of that away."""
    late = begin()
    begin(1, number=2)
    before = path.read_bytes()
    for _ in range(3):
        late.span("work", 0.0, 1.0, 1)
        late.write(50.0)
    assert path.read_bytes() == before
    (record,) = caplog.records
    assert "another trace" in record.getMessage()


FULL_DISK = """
import logging, resource, sys
from ringreduce.observe.seen.timeline import JobClock, Timeline

path, limit = sys.argv[1], int(sys.argv[2])
logging.basicConfig(format="logged: %(message)s")
both = [Timeline(path, JobClock("job", 0.0), 1, rank, "host", mark_batches=False) for rank in (0, 1)]
both[0].span("before", 0.0, 1.0, 1)
both[0].write(50.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # a write that goes beyond is cut short
for number in range(20_000):
    for timeline in both:
        timeline.span(f"{number:100}", 0.0, 1.0, 1)
        if number % 1000 == 0:
            timeline.write(50.0)
for timeline in both:
    timeline.stop(2)
"""


@pytest.mark.parametrize("limit", [700, 5000, 1_000_003])
def test_a_full_disk_leaves_a_whole_trace(path: Path, limit: int) -> None:
    """What fitted is there, for who asks; each rank says so in one line and writes no more, and the program goes on."""
    command = [sys.executable, "-c", FULL_DISK, str(path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    logged = [line for line in done.stderr.splitlines() if line.startswith("logged: ")]
    assert len(logged) == 2, done.stderr
    assert all("File too large" in line for line in logged)
    assert json.loads(path.read_text())
    assert names_of(path)[0] == "before"
    assert path.stat().st_size <= 2 * limit


def test_a_disk_that_is_full_from_the_start_is_refused(path: Path) -> None:
    """No part of a trace is left."""
    source = """
import resource, sys
from ringreduce.observe.seen.timeline import JobClock, Timeline
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
Timeline(sys.argv[1], JobClock("job", 0.0), 1, 0, "host", mark_batches=False)
"""
    for limit in ("50", "220"):  # for a part; for the file
        command = [sys.executable, "-c", source, str(path), limit]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        assert "ConfigError" in done.stderr
        assert "File too large" in done.stderr
        assert list(path.parent.iterdir()) == []


def test_a_trace_that_fails_later_is_a_line_in_the_log(
    path: Path, begin: Callable[..., Timeline], caplog: pytest.LogCaptureFixture
) -> None:
    """One, however often it is tried; what is traced goes on when the file can no longer be written."""
    folder = path.parent / "there"
    folder.mkdir()
    timeline = begin(at=folder / "trace.json")
    shutil.rmtree(folder)
    for _ in range(5):
        timeline.span("work", 0.0, 1.0, 1)
        timeline.write(50.0)
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


def test_steps_lie_in_their_collective(path: Path, begin: Callable[..., Timeline]) -> None:
    """A collective's steps follow each other from its beginning and end before it does; others are left out."""
    timeline = begin()
    track = timeline.track("row")
    track.step_finished("before")
    track.collective_started("allreduce", "ring", 64)
    track.step_finished("one")
    track.step_finished("two")
    track.collective_finished("allreduce", "ring", 64, 0.0)
    track.step_finished("after")
    timeline.write(50.0)
    spans = {event["name"]: event for event in events_of(path, "X")}
    assert spans.keys() == {"one", "two", "allreduce"}
    ends = {name: event["ts"] + event["dur"] for name, event in spans.items()}
    assert spans["one"]["ts"] == spans["allreduce"]["ts"]
    assert spans["two"]["ts"] == pytest.approx(ends["one"], abs=2e-3)
    assert ends["two"] <= ends["allreduce"] + 2e-3
    assert spans["allreduce"]["args"] == {"algorithm": "ring", "nbytes": 64}
    assert [event["args"]["value"] for event in events_of(path, "C")] == [64]


def test_an_operation_goes_through_its_phases(path: Path, begin: Callable[..., Timeline]) -> None:
    """Each operation is queued, negotiated and run, one phase after the other, and the counter follows them."""
    timeline = begin(3, mark_batches=True)
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
    timeline.write(50.0)
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


def test_what_travels_together_is_packed_and_unpacked_in_the_trace(path: Path, begin: Callable[..., Timeline]) -> None:
    """A batch of operations spans the packing, the collective, and the unpacking, in this order."""

    def check(engine: Engine) -> None:
        timeline = begin(engine.communicator.rank)
        engine.communicator.instruments.add(timeline.track("row"))
        array = [np.ones(3), np.ones(4)]
        for _ in range(4):
            operations = [Reduction(f"r{i}", "sum", SUM, [each], [np.empty_like(each)]) for i, each in enumerate(array)]
            for operation in operations:
                engine.submit(operation)
            for operation in operations:
                engine.wait(operation)
        timeline.stop(2)

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


def test_arrows_lead_to_where_operations_run(path: Path, begin: Callable[..., Timeline]) -> None:
    """One begins where the program submitted the operation; one more leads from a late rank to each that has waited."""
    timelines = [begin(rank) for rank in range(3)]
    for timeline in timelines:
        timeline.program()("step 0", 0.0, 1.0, step=0)
        track = timeline.track("row", "world", timeline._rank, 3)
        for late in (True, False):
            track.operation_submitted("grad")
            track.operation_described("grad", ["weight", "bias"])
            track.operation_announced("grad")
            if late:
                track.rank_was_late(1, 0.5, 7)
            track.operations_started(["grad"])
            track.operations_finished(["grad"])
        timeline.stop(3)
    events = [each for each in events_of(path) if each.get("cat") == "arrow"]
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
    runs = [each for each in events_of(path, "b") if (each["name"], each["pid"]) == ("run", 0)]
    assert [each["args"] for each in runs] == [{"parameters": ["weight", "bias"]}] * 2


def test_rows_are_named(path: Path, begin: Callable[..., Timeline]) -> None:
    """A rank is a process with its host in the name, a track is a thread with its own."""
    timeline = begin(5)
    timeline.track("first")
    timeline.track("second")
    timeline.write(50.0)
    named = [(each["name"], each["tid"], each["args"]) for each in events_of(path, "M") if each["name"] != "trace"]
    assert named == [
        ("process_name", 0, {"name": "rank 5 (host)"}),
        ("process_sort_index", 0, {"sort_index": 5}),
        ("thread_name", 1, {"name": "first"}),
        ("thread_name", 2, {"name": "second"}),
    ]


@pytest.mark.parametrize("where", ["add", "append"])
def test_a_signal_handler_may_end_the_trace_whatever_it_interrupts(
    path: Path, begin: Callable[..., Timeline], where: str
) -> None:
    """It waits for nothing that its own thread does: neither to add an event nor to write."""
    timeline, told = begin(), []

    def interrupted(frame: Any, event: str, argument: object) -> None:
        if frame.f_code.co_name == where:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: told.append(timeline.stop(1)))
    try:
        timeline.span("work", 1.0, 2.0, 1)
        sys.settrace(interrupted)
        timeline.span("more", 2.0, 3.0, 1)
        timeline.write(50.0)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)
    assert len(told) == 1
    assert names_of(path)[0] == "work"


def test_operations_of_one_name_that_threads_submit_all_stay_in_the_trace(
    path: Path, begin: Callable[..., Timeline]
) -> None:
    """One thread submits while another takes them in: each has a beginning and an end."""
    timeline = begin()
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
    timeline.write(50.0)
    begun, ended = ({event["id"] for event in events_of(path, kind) if event["name"] == "grad"} for kind in "be")
    assert begun == ended
    assert len(begun) == count
