"""What is shown of jobs, from snapshots of their ranks: rows, how much of the hosts is used, health, and metrics."""

from __future__ import annotations

import logging
import threading
import time
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ringreduce.observe.metrics import Family, openmetrics
from ringreduce.observe.reported_values import mean_values
from ringreduce.observe.waits import waits

_log = logging.getLogger(__name__)

Snapshot = Mapping[str, Any]

_WAITING_S = 1.0  # in one call; less is usual
_MISSING_S = 10.0  # a rank that says nothing for so long is missing
_POINTS = 600  # of the time lines; when there are more, every second one goes


def rows(statuses: Sequence[Snapshot]) -> list[dict[str, Any]]:
    """Return what is shown of each rank, given what they say (`ringreduce.observe.snapshots`).

    Returns:
        job, rank, size, host, pid, command, seconds (since it began), age_s (since it said so), steps, samples,
        step_age_s (since its last step; None: it says nothing of that), steps_per_s, samples_per_s, communication
        and waited (shares of time, 0 to 1), nbytes, slow (for whom the others wait, as in snapshots),
        waiting (text, or None), error. Rates are None where nothing earlier is known. How much of communication is
        waiting for the last rank, only optimizers of ringreduce know: else ``waited`` is None, and a part of it.
    """
    return [
        row
        for job in dict.fromkeys(each["job"] for each in statuses)
        for row in _rows_of({each["rank"]: each for each in statuses if each["job"] == job})
    ]


def _rows_of(ranks: Mapping[int, Snapshot]) -> Iterator[dict[str, Any]]:
    """Yield what is shown of the ranks of a job."""
    waiting = _waiting(ranks)
    for rank, each in ranks.items():
        then = each["samples"][0]
        now = each["samples"][-1]
        passed = now[0] - then[0]
        rates = [(new - old) / passed if passed > 0 else None for new, old in zip(now[1:], then[1:], strict=True)]
        slow = each.get("slow")
        text = waiting.get(rank, slow[1] if slow is not None and slow[0] == rank else None)
        communication, waited = _parted(None if rates[2] is None else min(rates[2], 1.0), each.get("spent") or {})
        age_s = max(time.time() - each.get("arrived", each["time"]), 0.0)
        yield {
            **{key: each[key] for key in ("job", "rank", "size", "host", "pid", "command", "nbytes", "error")},
            "seconds": each["time"] - each["began"],
            "age_s": age_s,
            "steps": now[1],
            "samples": now[2],
            "step_age_s": each["time"] - each["stepped"] + age_s if "stepped" in each else None,
            "steps_per_s": rates[0],
            "samples_per_s": rates[1],
            "communication": communication,
            "waited": waited,
            "slow": slow,
            "waiting": text,
        }


def _parted(share: float | None, spent: Mapping[str, float]) -> tuple[float | None, float | None]:
    """Return a share of time without waiting for the last rank, and that of waiting, as in all steps so far."""
    if share is None or not spent.get("communication_s") or "waiting_s" not in spent:
        return share, None
    part = min(spent["waiting_s"] / spent["communication_s"], 1.0)
    return share * (1 - part), share * part


def _waiting(ranks: Mapping[int, Snapshot]) -> dict[int, str]:
    """Return whom the ranks of a job wait for, in words, by rank."""
    found = {}
    for wait in waits(ranks):
        for rank in wait.present:
            seconds, what = wait.of_rank(rank, ranks[rank]["time"])
            if seconds >= _WAITING_S:
                found[rank] = f"{seconds:.0f} s in {what}"
    return found


# ---- hosts ----


def usage(now: Sequence[Snapshot], then: Sequence[Snapshot]) -> dict[str, dict[str, Any]]:
    """Return how much of each host was used between two looks, by host, in the order of ranks.

    Args:
        now, then: snapshots with their ``resources``; those of ranks that are in one of them alone count as new.

    Returns:
        ``ranks`` (a list), ``memory_nbytes``, ``memory_limit_nbytes``; shares, 0 to 1, of all cores ``processor`` and
        ``steal``, ``retransmitted`` of segments; ``interfaces`` and ``disks``, those that were used, by name: their
        counters (`Resources.read`) a second, and ``share`` of the speed of an interface. None: not known.
    """
    before = {each["rank"]: each for each in then}
    found: dict[str, dict[str, Any]] = {}
    for each in now:
        if (known := found.get(each["host"])) is not None:
            known["ranks"].append(each["rank"])
        elif "resources" in each:
            old = before.get(each["rank"], each)
            host = _used(each["resources"], old.get("resources", {}), each["time"] - old["time"])
            found[each["host"]] = {"ranks": [each["rank"]], **host}
    return found


def _used(now: Mapping[str, Any], then: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Return how much of a host was used between two looks."""
    times = {name: growth(then, now, f"host_{name}_s") for name in ("user", "system", "idle", "iowait", "steal")}
    whole = sum(times.values())
    sent = growth(then, now, "sent_segments")
    return {
        **{key: now.get(key) for key in ("memory_nbytes", "memory_limit_nbytes")},
        "processor": (times["user"] + times["system"]) / whole if whole > 0 else None,
        "steal": times["steal"] / whole if whole > 0 else None,
        "retransmitted": growth(then, now, "retransmitted_segments") / sent if sent > 0 else None,
        "interfaces": _rates(now, then, "interfaces", seconds),
        "disks": _rates(now, then, "disks", seconds),
    }


def growth(then: Mapping[str, Any], now: Mapping[str, Any], key: str) -> float:
    """Return by how much a counter of a rank's ``resources`` has grown; 0 where it is not known."""
    old, new = (each.get(key) for each in (then, now))
    return 0.0 if old is None or new is None else float(new - old)


def _rates(now: Mapping[str, Any], then: Mapping[str, Any], kind: str, seconds: float) -> dict[str, dict[str, Any]]:
    """Return by how much the counters of the devices that were used have grown a second."""
    found: dict[str, dict[str, Any]] = {}
    for name, counters in now.get(kind, {}).items() if seconds > 0 else ():
        old = then.get(kind, {}).get(name, counters)
        speed = counters.get("speed_bits")
        rates = {key: (value - old[key]) / seconds for key, value in counters.items() if key != "speed_bits"}
        if any(rates.values()):
            share = {"share": 8 * max(rates.values()) / speed if speed else None} if kind == "interfaces" else {}
            found[name] = rates | share
    return found


def last_values(snapshots: Iterable[Snapshot]) -> dict[int, dict[str, float]]:
    """Return the last values that the program has reported, by rank and name."""
    return {each["rank"]: {name: last for name, (_, _, last) in each.get("values", {}).items()} for each in snapshots}


# ---- one job ----


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
        self._changes = {"restarts": restarts, "recoveries": recoveries}
        self._looks = 0
        self._every = 1
        self._lines: dict[str, list[tuple[float, float]]] = {}
        self._lock = threading.Lock()

    def lines(self) -> dict[str, list[tuple[float, float]]]:
        """Return the time lines: of each the moments (seconds since 1970) and values, the oldest first."""
        with self._lock:
            return {name: [*line] for name, line in self._lines.items()}

    def remember(self, now: Sequence[Snapshot], then: Sequence[Snapshot]) -> None:
        """Add to the time lines; to be called once a second.

        Args:
            now, then: the ranks, and what they said some seconds ago.
        """
        self._looks += 1
        if self._looks % self._every or not now:
            return
        hosts = usage(now, then).values()
        interfaces = [each["share"] for host in hosts for each in host["interfaces"].values()]
        disks = [each["busy_s"] for host in hosts for each in host["disks"].values()]
        points = {f"value {name}": value for name, value in mean_values(last_values(now).values()).items()}
        for name, shares in (("network", interfaces), ("disk", disks)):
            if known := [each for each in shares if each is not None]:
                points[name] = max(known)
        ranks = rows(now)
        for name in ("communication", "waited"):
            if shares := [each[name] for each in ranks if each[name] is not None]:
                points[name] = sum(shares) / len(shares)
        if rates := [each["steps_per_s"] for each in ranks if each["steps_per_s"]]:
            points["step"] = len(rates) / sum(rates)
        with self._lock:
            for name, value in points.items():
                self._lines.setdefault(name, []).append((now[0]["time"], value))
            if max(map(len, self._lines.values()), default=0) >= _POINTS:
                self._lines = {name: line[::2] for name, line in self._lines.items()}
                self._every *= 2

    def health(self, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the state of the job, given its `rows`.

        Returns:
            ``alive`` (all ranks are heard), ``job``, ``command``, ``ranks``, ``missing`` (a list), ``errors`` (by
            rank), ``steps``, ``last_step_age_s`` (of the last step of any rank), ``restarts``, ``recoveries``.
        """
        heard = {each["rank"] for each in ranks if each["age_s"] < _MISSING_S}
        begins = time.time() - self._began < _MISSING_S
        missing = [] if begins else [rank for rank in range(self._size) if rank not in heard]
        ages = [each["step_age_s"] for each in ranks if each["step_age_s"] is not None]
        return {
            "alive": not missing,
            "job": ranks[0]["job"] if ranks else None,
            "command": ranks[0]["command"] if ranks else None,
            "ranks": self._size,
            "missing": missing,
            "errors": {each["rank"]: each["error"] for each in ranks if each["error"] is not None},
            "steps": max((each["steps"] for each in ranks), default=0),
            "last_step_age_s": round(min(ages), 3) if ages else None,
            **self._changes,
        }

    def metrics(self, snapshots: Sequence[Snapshot]) -> str:
        """Return all of it for Prometheus."""
        return prometheus_text(self.families(snapshots))

    def families(self, snapshots: Sequence[Snapshot]) -> list[Family]:
        """Return all of it as metrics; some families may be empty."""
        health = self.health(rows(snapshots))
        mine = {"job": health["job"] or ""}
        means = mean_values(last_values(snapshots).values())
        values = [({**mine, "name": name}, value) for name, value in means.items()]
        more: list[Family] = [
            ("ranks", "gauge", "Ranks of the job.", [(mine, health["ranks"])]),
            ("ranks_missing", "gauge", "Ranks that have told nothing for 10 s.", [(mine, len(health["missing"]))]),
            ("restarts", "counter", "Starts of the job after failures.", [(mine, health["restarts"])]),
            ("recoveries", "counter", "Failures after which the others went on.", [(mine, health["recoveries"])]),
            ("value", "gauge", "Values that the program reports, means over the ranks.", values),
        ]
        return families_of(snapshots, more)


# ---- Prometheus ----

#: Families of metrics: the key in a row, name, and meaning. Those whose names end in _total are counters.
_ROWS = (
    ("steps", "steps_total", "Training steps."),
    ("samples", "samples_total", "Samples that were read."),
    ("communication", "communication_ratio", "Share of time spent in communication."),
    ("waited", "waiting_ratio", "Share of time spent waiting for the last rank, where that is known."),
    ("nbytes", "resident_memory_bytes", "Resident memory."),
    ("age_s", "silence_seconds", "Since the rank has told of itself."),
    ("step_age_s", "last_step_seconds", "Since the last training step."),
)
#: Families: name and a label, the values of the label with the keys of the numbers, and meaning.
_OF_RANKS = (  # from "resources" and "spent"
    ("processor_seconds_total mode", "user=user_s system=system_s", "Processor time."),
    ("page_faults_total kind", "minor=minor_faults major=major_faults", "Page faults."),
    ("garbage_collection_seconds_total", "gc_pause_s", "Pauses for Python's garbage collector."),
    ("switched_away_total", "switched_away", "How often the rank had to leave a core."),
    ("delayed_seconds_total", "delayed_s", "How long its threads have waited for a core."),
    (
        *("spent_seconds_total on", "steps=steps_s input=input_s communication=communication_s waiting=waiting_s"),
        "Where the time of training steps went.",
    ),
)
_OF_HOSTS = (  # from "resources"
    (
        "host_processor_seconds_total mode",
        " ".join(f"{mode}=host_{mode}_s" for mode in ("user", "system", "idle", "iowait", "steal")),
        "Time of all cores.",
    ),
    ("throttled_seconds_total", "throttled_s", "How long the quota of processor time was used up."),
    ("memory_used_bytes", "memory_nbytes", "Memory in use, without caches."),
    ("memory_limit_bytes", "memory_limit_nbytes", "Memory that there is."),
    ("swapped_pages_total", "swapped_pages", "Pages that were written to swap, or read."),
    ("tcp_segments_total kind", "sent=sent_segments retransmitted=retransmitted_segments", "Segments of TCP."),
)
_OF_DEVICES = (  # from "interfaces" and "disks"
    ("network_bytes_total direction", "receive=rx_nbytes transmit=tx_nbytes", "Bytes by network interface."),
    ("network_speed_bits", "speed_bits", "Bits that an interface carries a second."),
    ("disk_bytes_total direction", "read=read_nbytes write=written_nbytes", "Bytes by disk."),
    ("disk_busy_seconds_total", "busy_s", "How long a disk was busy."),
)


def prometheus_text(families: Iterable[Family]) -> str:
    """Return metrics as Prometheus reads them, without families that are empty."""
    return openmetrics(each for each in families if each[3])


def families_of(snapshots: Sequence[Snapshot], more: Sequence[Family] = ()) -> list[Family]:
    """Return snapshots of ranks as metrics; some families may be empty.

    Args:
        snapshots: of any jobs.
        more: further families.
    """
    found = rows(snapshots)
    ranks = [({"job": each["job"], "rank": str(each["rank"])}, each) for each in snapshots]
    of_rows = [({"job": each["job"], "rank": str(each["rank"])}, each) for each in found]
    of_ranks = [(mine, ChainMap(each.get("spent") or {}, each.get("resources") or {})) for mine, each in ranks]
    # The first rank of a host speaks for it.
    firsts = {(each["job"], each["host"]): each.get("resources") or {} for each in reversed(snapshots)}
    of_hosts = [({"job": job, "host": host}, each) for (job, host), each in firsts.items()]
    of_devices = [
        ({**mine, "device": name}, device)
        for mine, each in of_hosts
        for kind in ("interfaces", "disks")
        for name, device in (each.get(kind) or {}).items()
    ]
    info = [({**mine, "host": each["host"]}, 1.0) for mine, each in ranks]
    return [
        *(_family(name, key, meaning, sources=of_rows) for key, name, meaning in _ROWS),
        *more,
        ("rank_info", "gauge", "On which host a rank is.", info),
        *(_family(*about, sources=of_ranks) for about in _OF_RANKS),
        *(_family(*about, sources=of_hosts) for about in _OF_HOSTS),
        *(_family(*about, sources=of_devices) for about in _OF_DEVICES),
    ]


@cache
def _complain(name: str, why: str) -> None:
    """Log once that a family cannot be made."""
    _log.error("the metric %s is left out: %s", name, why)


def _family(
    named: str, keys: str, meaning: str, sources: Iterable[tuple[Mapping[str, str], Mapping[str, Any]]]
) -> Family:
    """Return a family of what there is of it; see the tables above. One that fails is empty, and the others come."""
    name, _, label = named.partition(" ")
    pairs = [each.rpartition("=") for each in keys.split()]
    samples: list[tuple[Mapping[str, str], float]] = []
    try:
        samples = [
            ({**labels, label: value} if label else labels, +source[key])
            for labels, source in sources
            for value, _, key in pairs
            if source.get(key) is not None
        ]
    except (TypeError, ValueError, AttributeError) as error:
        _complain(name, f"{type(error).__name__}: {error}")
    return name.removesuffix("_total"), "counter" if name.endswith("_total") else "gauge", meaning, samples
