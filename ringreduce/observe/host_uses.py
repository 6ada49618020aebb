"""What the hosts of a job did between two looks, for verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringreduce.observe.job_view import growth, usage
from ringreduce.observe.verdicts import HostUse

__all__ = ["uses_of"]

_SEGMENTS = 1000  # fewer say nothing

Snapshot = Mapping[str, Any]


def uses_of(then: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[HostUse]:
    """Return the uses of hosts, given snapshots of ranks with their ``resources`` from two moments."""
    before = {each["rank"]: each for each in then}
    ranks = [(before[each["rank"]], each) for each in now if each["rank"] in before]
    pairs = [
        (old, new) for old, new in ranks if "resources" in old and "resources" in new and new["time"] > old["time"]
    ]
    used = usage([new for _, new in pairs], [old for old, _ in pairs])
    return [_use(host, seen, [each for each in pairs if each[1]["host"] == host]) for host, seen in used.items()]


def _use(host: str, seen: Mapping[str, Any], ranks: Sequence[tuple[Snapshot, Snapshot]]) -> HostUse:
    """Return the use of a host, as `usage` has seen it, and of its ranks the most."""
    network, interface = max(
        ((each["share"] or 0.0, name) for name, each in seen["interfaces"].items()), default=(0.0, "")
    )
    busy, disk = max(((each["busy_s"], name) for name, each in seen["disks"].items()), default=(0.0, ""))
    first = ranks[0]
    sent = _more(first, "sent_segments")
    return HostUse(
        host=host,
        interface=interface,
        network=network,
        disk=disk,
        busy=min(busy, 1.0),
        throttled=min(_rate(first, "throttled_s"), 1.0),
        stolen=seen["steal"] or 0.0,
        collecting=max(_rate(each, "gc_pause_s") for each in ranks),
        swapped=_more(first, "swapped_pages"),
        resent=(seen["retransmitted"] or 0.0) if sent >= _SEGMENTS else 0.0,
        memory=(seen["memory_nbytes"] or 0) / (seen["memory_limit_nbytes"] or 1),
        faults=max(_rate(each, "major_faults") for each in ranks),
    )


def _more(pair: tuple[Snapshot, Snapshot], name: str) -> float:
    old, new = pair
    return growth(old["resources"], new["resources"], name)


def _rate(pair: tuple[Snapshot, Snapshot], name: str) -> float:
    seconds: float = pair[1]["time"] - pair[0]["time"]
    return _more(pair, name) / seconds
