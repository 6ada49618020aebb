"""How much of the hosts of a job was used, for verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringreduce.observe.job.verdicts import HostUse
from ringreduce.observe.seen.snapshots import Snapshot, UsedResources

_SEGMENTS = 1000  # fewer say nothing


def _growth(then: float | None, now: float | None) -> float:
    """Return by how much a counter has grown; 0 where it is not known."""
    return 0.0 if then is None or now is None else float(now - then)


def _use(then: UsedResources, now: UsedResources) -> HostUse:
    """Return the use of a rank's host between two moments."""
    seconds = now.time - then.time
    old = then.resources
    new = now.resources
    stolen_s = _growth(old.host_steal_s, new.host_steal_s)
    parts = ("user", "system", "idle", "iowait")
    whole_s = stolen_s + sum(_growth(*(getattr(each, f"host_{part}_s") for each in (old, new))) for part in parts)
    networks = [
        (after.share_since(old.interfaces.get(name, after), seconds), name) for name, after in new.interfaces.items()
    ]
    network, interface = max(networks, default=(0.0, ""))
    disks = [((after.busy_s - old.disks.get(name, after).busy_s) / seconds, name) for name, after in new.disks.items()]
    busy, disk = max(disks, default=(0.0, ""))
    sent = _growth(old.sent_segments, new.sent_segments)
    resent = _growth(old.retransmitted_segments, new.retransmitted_segments)
    return HostUse(
        host=now.host,
        interface=interface,
        network=network,
        disk=disk,
        busy=min(busy, 1.0),
        throttled=min(_growth(old.throttled_s, new.throttled_s) / seconds, 1.0),
        stolen=stolen_s / whole_s if whole_s > 0 else 0.0,
        collecting=_growth(old.gc_pause_s, new.gc_pause_s) / seconds,
        swapped=_growth(old.swapped_pages, new.swapped_pages),
        resent=resent / sent if sent >= _SEGMENTS else 0.0,
        memory=(new.memory_nbytes or 0) / (new.memory_limit_nbytes or 1),
        faults=_growth(old.major_faults, new.major_faults) / seconds,
    )


def uses_of(snapshots: Sequence[Snapshot]) -> list[HostUse]:
    """Return the use of each host while steps were made: as its first rank has seen it, and of its ranks the most.

    Args:
        snapshots: the last ones of ranks.
    """
    uses: dict[str, HostUse] = {}
    for each in snapshots:
        then = each.first
        now = each.last or UsedResources(each.host, each.time, each.resources)
        if then is not None and now.time > then.time:
            use = _use(then, now)
            known = uses.setdefault(use.host, use)
            uses[use.host] = replace(
                known, collecting=max(known.collecting, use.collecting), faults=max(known.faults, use.faults)
            )
    return [*uses.values()]
