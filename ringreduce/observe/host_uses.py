"""What the hosts of a job did while steps were made, for verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ringreduce.observe.job_view import growth, usage
from ringreduce.observe.verdicts import HostUse

_SEGMENTS = 1000  # fewer say nothing

Snapshot = Mapping[str, Any]


def _use(then: Snapshot, now: Snapshot) -> HostUse:
    """Return the use of a rank's host between two moments."""
    seconds = now["time"] - then["time"]
    (seen,) = usage([{"rank": 0, **now}], [{"rank": 0, **then}]).values()
    network, interface = max(
        ((each["share"] or 0.0, name) for name, each in seen["interfaces"].items()), default=(0.0, "")
    )
    busy, disk = max(((each["busy_s"], name) for name, each in seen["disks"].items()), default=(0.0, ""))

    def more(name: str) -> float:
        return growth(then["resources"], now["resources"], name)

    return HostUse(
        host=now["host"],
        interface=interface,
        network=network,
        disk=disk,
        busy=min(busy, 1.0),
        throttled=min(more("throttled_s") / seconds, 1.0),
        stolen=seen["steal"] or 0.0,
        collecting=more("gc_pause_s") / seconds,
        swapped=more("swapped_pages"),
        resent=(seen["retransmitted"] or 0.0) if more("sent_segments") >= _SEGMENTS else 0.0,
        memory=(seen["memory_nbytes"] or 0) / (seen["memory_limit_nbytes"] or 1),
        faults=more("major_faults") / seconds,
    )


def uses_of(snapshots: Sequence[Snapshot]) -> list[HostUse]:
    """Return the use of each host while steps were made: as its first rank has seen it, and of its ranks the most.

    Args:
        snapshots: the last ones of ranks.
    """
    found: dict[str, HostUse] = {}
    for each in snapshots:
        then = each.get("first")
        now = each.get("last") or each
        if then is not None and now["time"] > then["time"]:
            use = _use(then, now)
            known = found.setdefault(use.host, use)
            found[use.host] = replace(
                known, collecting=max(known.collecting, use.collecting), faults=max(known.faults, use.faults)
            )
    return [*found.values()]
