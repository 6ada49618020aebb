"""What is shown of jobs, from snapshots of their ranks: a row for each rank, the health of a job, its time lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringreduce.common.instruments import mean_values
from ringreduce.observe.job.waits import waits
from ringreduce.observe.seen.snapshots import SlowRank, Snapshot
from ringreduce.observe.seen.step_clock import SpentOnSteps

_WAITING_S = 1.0  # in one call; less is usual
_MISSING_S = 10.0  # a rank that says nothing for so long is missing
_SILENT_S = 5.0  # one that says nothing for so long is busy without letting go of Python, or stopped
_POINTS = 600  # of the time lines; when there are more, every second one goes
#: What the time lines show, means over the ranks; and the values that the program reports.
_LINES = ("steps_per_second", "communication_ratio", "waiting_ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """What is shown of a rank. Its numbers have the names of their metrics; None: not known.

    Attributes:
        job, rank, size, host, pid, command: which.
        error: after which no call was possible.
        running_seconds: since it began.
        steps, samples: how many, and a second.
        communication_ratio, waiting_ratio: shares of time. How much of communication is waiting for the last rank, only
            optimizers of ringreduce know: else that is None, and a part of communication.
        resident_memory_bytes: of the process.
        silence_seconds: since it has said so.
        last_step_seconds: since its last step.
        slow: for whom the others wait.
        waiting: for whom this rank waits, or why others wait for it, in words.
    """

    job: str
    rank: int
    size: int
    host: str
    pid: int
    command: tuple[str, ...]
    error: str | None
    running_seconds: float
    steps: int
    samples: float
    steps_per_second: float | None
    samples_per_second: float | None
    communication_ratio: float | None
    waiting_ratio: float | None
    resident_memory_bytes: int
    silence_seconds: float
    last_step_seconds: float | None
    slow: SlowRank | None
    waiting: str | None

    @property
    def trouble(self) -> str:
        """Its error, or for how long it is silent; else nothing."""
        if self.error is not None:
            return self.error
        return f"silent for {self.silence_seconds:.0f} s" if self.silence_seconds > _SILENT_S else ""


def rows(snapshots: Sequence[Snapshot]) -> list[RankRow]:
    """Return what is shown of each rank, job by job."""
    return [
        row
        for job in dict.fromkeys(each.job for each in snapshots)
        for row in _rows_of({each.rank: each for each in snapshots if each.job == job})
    ]


def _rows_of(ranks: Mapping[int, Snapshot]) -> Iterator[RankRow]:
    """Yield what is shown of the ranks of a job."""
    waiting = _waiting(ranks)
    for rank, each in ranks.items():
        then = each.samples[0]
        now = each.samples[-1]
        passed_s = now.time - then.time
        share = None if passed_s <= 0 else min((now.communication_s - then.communication_s) / passed_s, 1.0)
        communication, waited = _parted(share, each.spent)
        silence_s = each.age_s(time.time())
        lateness = each.slow.lateness if each.slow is not None and each.slow.rank == rank else None
        yield RankRow(
            job=each.job,
            rank=rank,
            size=each.size,
            host=each.host,
            pid=each.pid,
            command=each.command,
            error=each.error,
            running_seconds=each.time - each.began,
            steps=now.steps,
            samples=now.samples,
            steps_per_second=(now.steps - then.steps) / passed_s if passed_s > 0 else None,
            samples_per_second=(now.samples - then.samples) / passed_s if passed_s > 0 else None,
            communication_ratio=communication,
            waiting_ratio=waited,
            resident_memory_bytes=each.resources.resident_nbytes,
            silence_seconds=silence_s,
            last_step_seconds=each.time - each.stepped + silence_s,
            slow=each.slow,
            waiting=waiting.get(rank, lateness),
        )


def _parted(share: float | None, spent: SpentOnSteps | None) -> tuple[float | None, float | None]:
    """Return a share of time without waiting for the last rank, and that of waiting, as in all steps so far."""
    if share is None or spent is None or not spent.communication_s or spent.waiting_s is None:
        return share, None
    part = min(spent.waiting_s / spent.communication_s, 1.0)
    return share * (1 - part), share * part


def _waiting(ranks: Mapping[int, Snapshot]) -> dict[int, str]:
    """Return whom the ranks of a job wait for, in words, by rank."""
    texts = {}
    for wait in waits(ranks):
        for rank in wait.present:
            seconds, what = wait.of_rank(rank, ranks[rank].time)
            if seconds >= _WAITING_S:
                texts[rank] = f"{seconds:.0f} s in {what}"
    return texts


def last_values(snapshots: Iterable[Snapshot]) -> dict[int, dict[str, float]]:
    """Return the last values that the program has reported, by rank and name."""
    return {each.rank: {name: value.last for name, value in each.values.items()} for each in snapshots}


# ---- one job ----


@dataclass(frozen=True, slots=True)
class JobHealth:
    """The state of a job, as ``/health`` says it.

    Attributes:
        alive: all ranks are heard.
        job, command: None before any rank has said anything.
        ranks: how many.
        missing, errors: which say nothing; what has failed, by rank.
        steps, last_step_age_s: of the rank that has made most; since the last step of any rank.
        restarts, recoveries: see `JobView`.
    """

    alive: bool
    job: str | None
    command: tuple[str, ...] | None
    ranks: int
    missing: list[int]
    errors: dict[int, str]
    steps: int
    last_step_age_s: float | None
    restarts: int
    recoveries: int


class JobView:
    """What is shown of one job, all of whose ranks are heard.

    Args:
        size: of the world.
        restarts: how often the launcher has started the job again.
        recoveries: how often it has gone on without ranks that had failed.
    """

    def __init__(self, size: int, restarts: int = 0, recoveries: int = 0) -> None:
        self._size = size
        self._began = time.time()
        self._restarts = restarts
        self._recoveries = recoveries
        self._looks = 0
        self._every = 1
        self._lines: dict[str, list[tuple[float, float]]] = {}
        self._lock = threading.Lock()

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """Return the time lines: of each the moments (seconds since 1970) and values, the oldest first."""
        with self._lock:
            return {name: [*line] for name, line in self._lines.items()}

    def remember(self, now: Sequence[Snapshot]) -> None:
        """Add what ranks say to the time lines; to be called once a second."""
        self._looks += 1
        if self._looks % self._every or not now:
            return
        ranks = rows(now)
        points = {}
        for name in _LINES:
            if known := [value for row in ranks if (value := getattr(row, name)) is not None]:
                points[name] = sum(known) / len(known)
        points |= {f"value {name}": value for name, value in mean_values(last_values(now).values()).items()}
        with self._lock:
            for name, value in points.items():
                self._lines.setdefault(name, []).append((now[0].time, value))
            if max(map(len, self._lines.values()), default=0) >= _POINTS:
                self._lines = {name: line[::2] for name, line in self._lines.items()}
                self._every *= 2

    def health(self, ranks: Sequence[RankRow]) -> JobHealth:
        """Return the state of the job, given its `rows`."""
        heard = {each.rank for each in ranks if each.silence_seconds < _MISSING_S}
        begins = time.time() - self._began < _MISSING_S
        missing = [] if begins else [rank for rank in range(self._size) if rank not in heard]
        ages = [each.last_step_seconds for each in ranks if each.last_step_seconds is not None]
        return JobHealth(
            alive=not missing,
            job=ranks[0].job if ranks else None,
            command=ranks[0].command if ranks else None,
            ranks=self._size,
            missing=missing,
            errors={each.rank: each.error for each in ranks if each.error is not None},
            steps=max((each.steps for each in ranks), default=0),
            last_step_age_s=round(min(ages), 3) if ages else None,
            restarts=self._restarts,
            recoveries=self._recoveries,
        )
