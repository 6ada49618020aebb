"""One view of a job: the snapshots of all ranks at rank 0, and what is made of them."""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from browser import look
from recorded_ranks import snapshot

from ringreduce.common.errors import ConfigError, TransportError
from ringreduce.common.instruments import mean_values
from ringreduce.common.quantities import format_nbytes
from ringreduce.observe.job.gathering import Gathering
from ringreduce.observe.job.host_uses import uses_of
from ringreduce.observe.job.job_view import JobView, last_values, rows
from ringreduce.observe.out.job_page import job_page
from ringreduce.observe.out.metric_table import families_of_job, prometheus_text
from ringreduce.observe.seen.snapshots import VERSION, RateSample, ReportedValue, SlowRank, Snapshot, UsedResources
from ringreduce.transport.memory import MemoryWorld


class Ranks:
    """Ranks that tell what they do, in this process.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        world = MemoryWorld(size, 30.0)
        self.size = size
        self.messages = [world.messages(rank) for rank in range(size)]
        self.gatherings = [Gathering(each, rank, size) for rank, each in enumerate(self.messages)]

    def tell(self, second: float, *ranks: int, say: Callable[..., Snapshot] = snapshot) -> None:
        """Let ranks tell, rank 0 last; none: all of them."""
        for rank in reversed(ranks or range(self.size)):
            self.gatherings[rank].tell(say(rank, self.size, second))


def comparable(told: Snapshot) -> Snapshot:
    """Return it without what is sent less exactly, or not at all."""
    return replace(told, samples=(), arrived=None, values={}, spent=None)


def metrics(view: JobView, *told: Snapshot) -> str:
    """Return what Prometheus gets."""
    return prometheus_text(families_of_job(view, told))


def test_rank_0_has_what_all_ranks_say():
    """In the order of ranks, as they said it but for less than a millisecond, with all samples of ten seconds."""
    ranks = Ranks(4)
    for second in range(14):
        ranks.tell(second + 0.25)
    found = ranks.gatherings[0].latest()
    assert [each.rank for each in found] == [0, 1, 2, 3]
    for rank, each in enumerate(found):
        expected = snapshot(rank, 4, 13.25)
        assert comparable(each) == comparable(expected)
        assert each.spent == pytest.approx(expected.spent, abs=1e-3)
        assert each.values["loss"] == pytest.approx(expected.values["loss"], rel=1e-5)
        assert [sample.time for sample in each.samples] == [1000.25 + second for second in range(3, 14)]
        assert abs(each.arrived - time.time()) < 60
    assert [each.time for each in ranks.gatherings[0].earlier()] == [1003.25] * 4


def test_a_note_is_small():
    """40 kB/s of 256 ranks are 156 bytes of each."""
    ranks = Ranks(256)
    for second in range(6):
        ranks.tell(float(second), 0, 7)
    first = ranks.gatherings[7].nbytes
    for second in range(6, 26):
        ranks.tell(float(second), 0, 7)
    assert (ranks.gatherings[7].nbytes - first) / 20 < 156


def test_a_rank_that_says_nothing_is_missing(monkeypatch: pytest.MonkeyPatch):
    """After ten seconds, whether it has never said anything or has stopped; others are shown."""
    ranks = Ranks(3)
    now = [5000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    view = JobView(3)
    ranks.tell(0.0, 0, 1)
    assert view.health(rows(ranks.gatherings[0].latest())).missing == []
    now[0] += 11.0
    ranks.tell(1.0, 0)
    health = view.health(rows(ranks.gatherings[0].latest()))
    assert (health.missing, health.alive) == ([1, 2], False)
    assert 'ringreduce_ranks_missing{job="0123abcd"} 2\n' in metrics(view, *ranks.gatherings[0].latest())


def test_a_note_that_is_lost_silences_its_rank_alone():
    """What follows it cannot be read; nothing else changes."""
    ranks = Ranks(3)
    ranks.tell(0.0)
    ranks.messages[1].post(b"\xff\x00 no note", 0)
    ranks.tell(1.0)
    ranks.tell(2.0)
    assert [each.time for each in ranks.gatherings[0].latest()] == [1002.0, 1000.0, 1002.0]


def test_after_a_note_that_does_not_open_nothing_is_heard():
    """What comes later could be read wrongly; rank 0 sees itself, and nothing fails."""
    ranks = Ranks(3)
    ranks.tell(0.0)

    def fail() -> None:
        raise TransportError("control note 1 from rank 2 (150 bytes) does not open")

    ranks.messages[0].poll = fail
    ranks.tell(1.0)
    del ranks.messages[0].poll
    ranks.tell(2.0)
    assert [each.time for each in ranks.gatherings[0].latest()] == [1002.0, 1000.0, 1000.0]


def test_a_snapshot_of_another_version_is_refused(caplog: pytest.LogCaptureFixture):
    """In one line, which names the versions; the other ranks are shown."""
    told = snapshot(1, 2, 1.0).to_json()
    assert Snapshot.from_json(json.loads(json.dumps(told))) == snapshot(1, 2, 1.0)
    for wrong in ({**told, "version": 99}, {**told, "more": 1}, [], None, {}):
        with pytest.raises(ConfigError):
            Snapshot.from_json(wrong)
    ranks = Ranks(2)
    for second in (0.0, 1.0):
        ranks.tell(second, 1, say=lambda *of_rank: replace(snapshot(*of_rank), version=99))
        ranks.tell(second, 0)
    assert [each.rank for each in ranks.gatherings[0].latest()] == [0]
    (record,) = caplog.records
    assert "rank 1" in record.getMessage()
    assert f"no snapshot of version {VERSION}, which this ringreduce reads, but 99" in record.getMessage()


def test_one_rank_needs_no_messages():
    """It hears itself."""
    alone = Gathering(None, 0, 1)
    for second in (1.0, 2.0):
        alone.tell(snapshot(0, 1, second))
    assert [each.time for each in alone.latest()] == [1002.0]
    alone.end(together=True)


def test_how_much_of_a_host_is_used():
    """Since the first step, by the host's counters; each host counts once, whatever the number of its ranks."""

    def first(rank: int, second: float) -> Snapshot:
        then = snapshot(rank, 12, second)
        used = UsedResources(then.host, then.time, then.resources)
        return snapshot(rank, 12, 20.0, first=used)

    uses = uses_of([first(rank, 10.0) for rank in range(12)])
    assert [each.host for each in uses] == ["node0", "node1"]
    use = uses[1]
    assert (use.stolen, use.resent, use.memory) == pytest.approx((0.1, 0.01, 0.75))
    assert (use.interface, use.network) == ("eth0", pytest.approx(0.8)), "the other one is idle"
    assert (use.disk, use.busy) == ("sda", pytest.approx(0.2))
    (begun,) = uses_of([first(0, 0.0)])  # from counters that are 0
    assert (begun.stolen, begun.resent) == pytest.approx((0.1, 0.01))
    assert uses_of([snapshot(0, 1, 20.0)]) == []  # nothing earlier is known


def test_values_are_means_over_the_ranks():
    """Of the last that each has reported; ranks that report nothing do not count."""
    told = [snapshot(rank, 3, 1.0) for rank in range(3)]
    assert mean_values(last_values(told).values()) == {"loss": 3.0}
    told[2] = replace(told[2], values={})
    assert mean_values(last_values(told).values()) == {"loss": 2.5}


def test_time_lines_are_bounded():
    """They thin out as the job goes on, and keep their beginning and what they show."""
    view = JobView(1)
    for second in range(3000):
        samples = RateSample(0.0, 0, 0, 0.0), RateSample(10.0, 50, 1, 3.0)
        view.remember([snapshot(0, 1, second + 1.0, samples=samples)])
    lines = view.lines()
    assert set(lines) == {"steps_per_second", "communication_ratio", "waiting_ratio", "value loss"}
    assert all(300 <= len(line) < 600 and line[0][0] == 1001.0 for line in lines.values())
    assert lines["steps_per_second"][-1][1] == pytest.approx(5.0)
    shares = [lines[name][-1][1] for name in ("communication_ratio", "waiting_ratio")]
    assert sum(shares) == pytest.approx(0.3), "of the time, waiting for the last rank is no communication"
    spent = snapshot(0, 1, 3000.0).spent
    assert shares[1] == pytest.approx(0.3 * spent.waiting_s / 900)


def page_of(size: int, *, name: str = "loss") -> str:
    """Return the page of a job of a minute, of which one rank waits, one is silent and one has failed."""

    def say(rank: int, size: int, second: float) -> Snapshot:
        wave = math.sin(second / 9) + random.Random(second).random() / 3
        return snapshot(
            rank,
            size,
            second,
            began=time.time() - 65.0,
            values={name: ReportedValue(1.0, 1, 2.0 + wave), "accuracy": ReportedValue(1.0, 1, second / 100)},
            slow=SlowRank(1, "last in 85% of steps, by 40 ms: it loads data", "rank 1 is last in 85% of steps"),
            error="PeerLostError: rank 2 is lost" if size > 2 and rank == 3 else None,
        )

    ranks = Ranks(size)
    view = JobView(size, restarts=1)
    for second in range(0, 65, 1 if size < 100 else 5):
        ranks.tell(float(second), say=say)
        view.remember(ranks.gatherings[0].latest())
    now = ranks.gatherings[0].latest()
    before = ranks.gatherings[0].earlier()
    found = rows(now)
    if size > 5:
        found[5] = replace(found[5], silence_seconds=30.0)
    metrics = families_of_job(view, now), families_of_job(view, before)
    return job_page(view.health(found), found, *metrics, passed_s=now[0].time - before[0].time, lines=view.lines())


def test_the_page_has_the_metrics():
    """Of hosts and ranks; of counters, by how much they grow a second."""
    view = JobView(2)
    before, now = ([snapshot(rank, 2, second) for rank in range(2)] for second in (10.0, 20.0))
    families = families_of_job(view, now), families_of_job(view, before)
    page = job_page(view.health(rows(now)), rows(now), *families, passed_s=10.0, lines={})
    for heading in (
        "network bytes eth0 receive",
        "host processor seconds user",
        "resident memory bytes",
        "spent seconds communication",
    ):
        assert f"<th>{heading}</th>" in page
    for text in (f"{format_nbytes(10**9)}/s", "600%", "3 GiB", "5/s"):
        assert f"<td>{text}</td>" in page


@pytest.mark.parametrize("width", [1200, 400])
def test_the_page_in_a_browser(width: int, tmp_path: Path):
    """It needs nothing else, and is no wider than a window or a phone, with 2, 16 and 256 ranks."""
    paths = [tmp_path / f"job{size}.html" for size in (2, 16, 256)]
    for path in paths:
        path.write_text(page_of(int(path.stem[3:])))
    assert look(*paths, width=width) == {}


def test_what_programs_say_is_shown_as_text():
    """Names of values are no HTML, and ranks that wait, fail or are silent are seen as such."""
    page = page_of(16, name='<script>"loss"</script>')
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    states = re.findall(r'title="rank (\d+) ([^":]+)', page)
    assert dict(states) == {
        **{str(rank): "makes steps" for rank in range(16)},
        **{"1": "is waited for", "3": "is silent, or has failed", "5": "is silent, or has failed"},
    }
    assert "PeerLostError: rank 2 is lost" in page
    assert "rank 5" in page


def test_a_rank_that_has_made_no_step_is_shown_so():
    """Not as one that makes steps."""
    now = time.time()
    samples = RateSample(now - 5, 0, 0, 0.0), RateSample(now, 0, 0, 0.0)
    shown = rows([snapshot(0, 1, 9.0, began=now - 9.0, samples=samples, spent=None)])
    page = job_page(JobView(1).health(shown), shown, [], [], passed_s=0.0, lines={})
    assert re.findall(r'title="rank (\d+) ([^":]+)', page) == [("0", "has made no step")]


def test_metrics_escape_what_programs_say():
    """As OpenMetrics has it."""
    told = snapshot(0, 1, 1.0, values={'a "b"\\\n': ReportedValue(1.0, 1, 0.5)})
    assert r'ringreduce_value{job="0123abcd",name="a \"b\"\\\n"} 0.5' in metrics(JobView(1), told)


def test_the_health_is_json():
    """Also before any rank has said anything."""
    view = JobView(2)
    assert json.loads(json.dumps(asdict(view.health([])))) == {
        **{"alive": True, "job": None, "command": None, "ranks": 2, "missing": [], "errors": {}, "steps": 0},
        **{"last_step_age_s": None, "restarts": 0, "recoveries": 0},
    }
