"""The metrics: one table of names, for ``/metrics``, OpenTelemetry, `ringreduce top` and the page of a job.

A name ends with its unit; one that ends with ``_total`` is that of a counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringreduce.common.instruments import mean_values
from ringreduce.observe.job.job_view import JobView, last_values, rows
from ringreduce.observe.seen.metrics import Family, Quantity, openmetrics
from ringreduce.observe.seen.snapshots import Snapshot

#: Of a `RankRow`, which `top` and the page of a job show.
OF_ROWS = (
    Quantity("steps_total", "steps", "Training steps."),
    Quantity("samples_total", "samples", "Samples that were read."),
    Quantity("steps_per_second", "steps_per_second", "Training steps in the last ten seconds."),
    Quantity("samples_per_second", "samples_per_second", "Samples in the last ten seconds."),
    Quantity("communication_ratio", "communication_ratio", "Share of time spent in communication."),
    Quantity("waiting_ratio", "waiting_ratio", "Share of time spent waiting for the last rank, where that is known."),
    Quantity("resident_memory_bytes", "resident_memory_bytes", "Resident memory."),
    Quantity("running_seconds", "running_seconds", "Since the rank began."),
    Quantity("silence_seconds", "silence_seconds", "Since the rank has told of itself."),
    Quantity("last_step_seconds", "last_step_seconds", "Since the last training step."),
)
#: Of the `Counters` of a rank.
OF_RANKS = (
    Quantity("processor_seconds_total mode", {"user": "user_s", "system": "system_s"}, "Processor time."),
    Quantity("page_faults_total kind", {"minor": "minor_faults", "major": "major_faults"}, "Page faults."),
    Quantity("garbage_collection_seconds_total", "gc_pause_s", "Pauses for Python's garbage collector."),
    Quantity("switched_away_total", "switched_away", "How often the rank had to leave a core."),
    Quantity("delayed_seconds_total", "delayed_s", "How long its threads were ready and had no core."),
)
#: Of `SpentOnSteps`.
OF_STEPS = Quantity(
    "spent_seconds_total on",
    {"steps": "steps_s", "input": "input_s", "communication": "communication_s", "waiting": "waiting_s"},
    "Where the time of training went: steps: all of it; communication: in collectives; waiting: of that, for others.",
)
#: Of the `Counters` of the first rank of a host.
OF_HOSTS = (
    Quantity(
        "host_processor_seconds_total mode",
        {mode: f"host_{mode}_s" for mode in ("user", "system", "idle", "iowait", "steal")},
        "Time of all cores.",
    ),
    Quantity("throttled_seconds_total", "throttled_s", "How long the quota of processor time was used up."),
    Quantity("memory_used_bytes", "memory_nbytes", "Memory in use, without caches."),
    Quantity("memory_limit_bytes", "memory_limit_nbytes", "Memory that there is."),
    Quantity("swapped_pages_total", "swapped_pages", "Pages that were written to swap, or read."),
    Quantity(
        "tcp_segments_total kind",
        {"sent": "sent_segments", "retransmitted": "retransmitted_segments"},
        "Segments of TCP.",
    ),
)
OF_INTERFACES = (
    Quantity(
        "network_bytes_total direction",
        {"receive": "rx_nbytes", "transmit": "tx_nbytes"},
        "Bytes by network interface.",
    ),
    Quantity("network_speed_bits", "speed_bits", "Bits that an interface carries a second."),
)
OF_DISKS = (
    Quantity("disk_bytes_total direction", {"read": "read_nbytes", "write": "written_nbytes"}, "Bytes by disk."),
    Quantity("disk_busy_seconds_total", "busy_s", "How long a disk was busy."),
)


def prometheus_text(families: Iterable[Family]) -> str:
    """Return metrics as Prometheus reads them, without families that are empty."""
    return openmetrics(each for each in families if each[3])


def families_of(snapshots: Sequence[Snapshot]) -> list[Family]:
    """Return snapshots of ranks of any jobs as metrics; some families may be empty."""
    of_ranks = [({"job": each.job, "rank": str(each.rank)}, each) for each in snapshots]
    of_rows = [({"job": each.job, "rank": str(each.rank)}, each) for each in rows(snapshots)]
    firsts = {(each.job, each.host): each.resources for each in reversed(snapshots)}
    of_hosts = [({"job": job, "host": host}, each) for (job, host), each in firsts.items()]
    interfaces = [({**host, "device": name}, one) for host, each in of_hosts for name, one in each.interfaces.items()]
    disks = [({**host, "device": name}, one) for host, each in of_hosts for name, one in each.disks.items()]
    return [
        *(each.family(of_rows) for each in OF_ROWS),
        ("rank_info", "gauge", "On which host a rank is.", [({**mine, "host": it.host}, 1.0) for mine, it in of_ranks]),
        *(each.family([(mine, it.resources) for mine, it in of_ranks]) for each in OF_RANKS),
        OF_STEPS.family([(mine, it.spent) for mine, it in of_ranks if it.spent is not None]),
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
