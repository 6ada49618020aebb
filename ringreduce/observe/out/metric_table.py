"""The metrics: one table of names, for ``/metrics``, OpenTelemetry, `ringreduce top` and the page of a job.

A name ends with its unit; one that ends with ``_total`` is that of a counter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Generic, TypeVar

from ringreduce.common.instruments import mean_values
from ringreduce.observe.job.job_view import JobView, RankRow, last_values, rows
from ringreduce.observe.seen.metrics import Family, openmetrics
from ringreduce.observe.seen.resources import Counters, DiskCounters, InterfaceCounters
from ringreduce.observe.seen.snapshots import Snapshot

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Quantity(Generic[T]):
    """A metric.

    Attributes:
        name: after ``ringreduce_``.
        meaning: in a sentence.
        of: returns the value, or several by the value of ``label``; None: not known.
        label: which tells several values apart.
    """

    name: str
    meaning: str
    of: Callable[[T], float | Mapping[str, float | None] | None]
    label: str = ""

    def family(self, sources: Iterable[tuple[Mapping[str, str], T]]) -> Family:
        """Return what there is of it. One that cannot be made is empty, and the others come.

        Args:
            sources: labels, and of what they are.
        """
        samples: list[tuple[Mapping[str, str], float]] = []
        try:
            for labels, source in sources:
                values = self.of(source)
                by_label = values if isinstance(values, Mapping) else {"": values}
                for label, value in by_label.items():
                    if value is not None:
                        samples.append(({**labels, self.label: label} if self.label else labels, +value))
        except (TypeError, ValueError, AttributeError) as error:
            samples = []
            _complain(self.name, f"{type(error).__name__}: {error}")
        kind = "counter" if self.name.endswith("_total") else "gauge"
        return self.name.removesuffix("_total"), kind, self.meaning, samples


@cache
def _complain(name: str, why: str) -> None:
    """Log once that a metric cannot be made."""
    _log.error("the metric %s is left out: %s", name, why)


def _shown(name: str, meaning: str) -> Quantity[RankRow]:
    return Quantity(name, meaning, attrgetter(name.removesuffix("_total")))


#: As a row of `top` and of the page has them.
OF_ROWS = (
    _shown("steps_total", "Training steps."),
    _shown("samples_total", "Samples that were read."),
    _shown("steps_per_second", "Training steps in the last ten seconds."),
    _shown("samples_per_second", "Samples in the last ten seconds."),
    _shown("communication_ratio", "Share of time spent in communication."),
    _shown("waiting_ratio", "Share of time spent waiting for the last rank, where that is known."),
    _shown("resident_memory_bytes", "Resident memory."),
    _shown("running_seconds", "Since the rank began."),
    _shown("silence_seconds", "Since the rank has told of itself."),
    _shown("last_step_seconds", "Since the last training step."),
)

OF_RANKS: tuple[Quantity[Snapshot], ...] = (
    Quantity(
        "processor_seconds_total",
        "Processor time.",
        lambda it: {"user": it.resources.user_s, "system": it.resources.system_s},
        "mode",
    ),
    Quantity(
        "page_faults_total",
        "Page faults.",
        lambda it: {"minor": it.resources.minor_faults, "major": it.resources.major_faults},
        "kind",
    ),
    Quantity(
        "garbage_collection_seconds_total",
        "Pauses for Python's garbage collector.",
        lambda it: it.resources.gc_pause_s,
    ),
    Quantity("switched_away_total", "How often the rank had to leave a core.", lambda it: it.resources.switched_away),
    Quantity(
        "delayed_seconds_total", "How long its threads have waited for a core.", lambda it: it.resources.delayed_s
    ),
    Quantity(
        "spent_seconds_total",
        "Where the time of training steps went.",
        lambda it: {} if it.spent is None else {name.removesuffix("_s"): s for name, s in it.spent._asdict().items()},
        "on",
    ),
)

OF_HOSTS: tuple[Quantity[Counters], ...] = (
    Quantity(
        "host_processor_seconds_total",
        "Time of all cores.",
        lambda it: {mode: getattr(it, f"host_{mode}_s") for mode in ("user", "system", "idle", "iowait", "steal")},
        "mode",
    ),
    Quantity("throttled_seconds_total", "How long the quota of processor time was used up.", lambda it: it.throttled_s),
    Quantity("memory_used_bytes", "Memory in use, without caches.", lambda it: it.memory_nbytes),
    Quantity("memory_limit_bytes", "Memory that there is.", lambda it: it.memory_limit_nbytes),
    Quantity("swapped_pages_total", "Pages that were written to swap, or read.", lambda it: it.swapped_pages),
    Quantity(
        "tcp_segments_total",
        "Segments of TCP.",
        lambda it: {"sent": it.sent_segments, "retransmitted": it.retransmitted_segments},
        "kind",
    ),
)

OF_INTERFACES: tuple[Quantity[InterfaceCounters], ...] = (
    Quantity(
        "network_bytes_total",
        "Bytes by network interface.",
        lambda it: {"receive": it.rx_nbytes, "transmit": it.tx_nbytes},
        "direction",
    ),
    Quantity("network_speed_bits", "Bits that an interface carries a second.", lambda it: it.speed_bits),
)

OF_DISKS: tuple[Quantity[DiskCounters], ...] = (
    Quantity(
        "disk_bytes_total",
        "Bytes by disk.",
        lambda it: {"read": it.read_nbytes, "write": it.written_nbytes},
        "direction",
    ),
    Quantity("disk_busy_seconds_total", "How long a disk was busy.", lambda it: it.busy_s),
)


def prometheus_text(families: Iterable[Family]) -> str:
    """Return metrics as Prometheus reads them, without families that are empty."""
    return openmetrics(each for each in families if each[3])


def families_of(snapshots: Sequence[Snapshot]) -> list[Family]:
    """Return snapshots of ranks of any jobs as metrics; some families may be empty."""
    of_rows = [({"job": each.job, "rank": str(each.rank)}, each) for each in rows(snapshots)]
    of_ranks = [({"job": each.job, "rank": str(each.rank)}, each) for each in snapshots]
    # The first rank of a host speaks for it.
    firsts = {(each.job, each.host): each.resources for each in reversed(snapshots)}
    of_hosts = [({"job": job, "host": host}, each) for (job, host), each in firsts.items()]
    interfaces = [({**host, "device": name}, one) for host, each in of_hosts for name, one in each.interfaces.items()]
    disks = [({**host, "device": name}, one) for host, each in of_hosts for name, one in each.disks.items()]
    info = [({**labels, "host": each.host}, 1.0) for labels, each in of_ranks]
    return [
        *(each.family(of_rows) for each in OF_ROWS),
        ("rank_info", "gauge", "On which host a rank is.", info),
        *(each.family(of_ranks) for each in OF_RANKS),
        *(each.family(of_hosts) for each in OF_HOSTS),
        *(each.family(interfaces) for each in OF_INTERFACES),
        *(each.family(disks) for each in OF_DISKS),
    ]


def families_of_job(view: JobView, snapshots: Sequence[Snapshot]) -> list[Family]:
    """Return a job, all of whose ranks are heard, as metrics; some families may be empty."""
    health = view.health(rows(snapshots))
    mine = {"job": health.job or ""}
    means = mean_values(last_values(snapshots).values())
    values = [({**mine, "name": name}, value) for name, value in means.items()]
    return [
        ("ranks", "gauge", "Ranks of the job.", [(mine, health.ranks)]),
        ("ranks_missing", "gauge", "Ranks that have told nothing for 10 s.", [(mine, len(health.missing))]),
        ("restarts", "counter", "Starts of the job after failures.", [(mine, health.restarts)]),
        ("recoveries", "counter", "Failures after which the others went on.", [(mine, health.recoveries)]),
        ("value", "gauge", "Values that the program reports, means over the ranks.", values),
        *families_of(snapshots),
    ]
