"""How much of the hosts of a job is used, for people and for verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ringreduce.observe.job.verdicts import HostUse
from ringreduce.observe.seen.resources import Counters, DiskCounters, InterfaceCounters
from ringreduce.observe.seen.snapshots import Snapshot, UsedResources

T = TypeVar("T", InterfaceCounters, DiskCounters)

_SEGMENTS = 1000  # fewer say nothing


@dataclass(frozen=True, slots=True)
class HostUsage:
    """How much of a host was used between two looks; None: not known.

    Attributes:
        processor, steal: shares of all cores, 0 to 1.
        retransmitted: share of segments of TCP.
        memory_nbytes, memory_limit_nbytes: at the second look.
        interfaces, disks: those that were used, by name, with their counters a second.
        ranks: of the job, that are there.
    """

    processor: float | None
    steal: float | None
    retransmitted: float | None
    memory_nbytes: int | None
    memory_limit_nbytes: int | None
    interfaces: Mapping[str, InterfaceCounters]
    disks: Mapping[str, DiskCounters]
    ranks: list[int] = field(default_factory=list)

    @classmethod
    def between(cls, then: Counters, now: Counters, seconds: float) -> HostUsage:
        """Return what was used from one look to another one, so many seconds later."""
        used_s = _growth(then.host_user_s, now.host_user_s) + _growth(then.host_system_s, now.host_system_s)
        steal_s = _growth(then.host_steal_s, now.host_steal_s)
        whole_s = used_s + steal_s
        whole_s += _growth(then.host_idle_s, now.host_idle_s) + _growth(then.host_iowait_s, now.host_iowait_s)
        return cls(
            processor=_share(used_s, whole_s),
            steal=_share(steal_s, whole_s),
            retransmitted=_share(
                _growth(then.retransmitted_segments, now.retransmitted_segments),
                _growth(then.sent_segments, now.sent_segments),
            ),
            memory_nbytes=now.memory_nbytes,
            memory_limit_nbytes=now.memory_limit_nbytes,
            interfaces=_rates(then.interfaces, now.interfaces, seconds),
            disks=_rates(then.disks, now.disks, seconds),
        )


def _growth(then: float | None, now: float | None) -> float:
    """Return by how much a counter has grown; 0 where it is not known."""
    return 0.0 if then is None or now is None else float(now - then)


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _rates(then: Mapping[str, T], now: Mapping[str, T], seconds: float) -> dict[str, T]:
    """Return the counters, a second, of the devices that were used."""
    rates = {}
    for name, new in now.items():
        old = then.get(name, new)
        if new != old and seconds > 0:
            rates[name] = replace(
                new, **{key: (getattr(new, key) - getattr(old, key)) / seconds for key in new.GROWING}
            )
    return rates


def usage(now: Sequence[Snapshot], then: Sequence[Snapshot]) -> dict[str, HostUsage]:
    """Return how much of each host was used between two looks, by host, in the order of ranks.

    Args:
        now, then: snapshots; those of ranks that are in one of them alone count as new. The first rank of a host speaks
            for it.
    """
    before = {each.rank: each for each in then}
    hosts: dict[str, HostUsage] = {}
    for each in now:
        old = before.get(each.rank, each)
        if each.host not in hosts:
            hosts[each.host] = HostUsage.between(old.resources, each.resources, each.time - old.time)
        hosts[each.host].ranks.append(each.rank)
    return hosts


def _use(then: UsedResources, now: UsedResources) -> HostUse:
    """Return the use of a rank's host between two moments."""
    seconds = now.time - then.time
    old = then.resources
    new = now.resources
    seen = HostUsage.between(old, new, seconds)
    network, interface = max(((each.share or 0.0, name) for name, each in seen.interfaces.items()), default=(0.0, ""))
    busy, disk = max(((each.busy_s, name) for name, each in seen.disks.items()), default=(0.0, ""))
    has_sent = _growth(old.sent_segments, new.sent_segments) >= _SEGMENTS
    return HostUse(
        host=now.host,
        interface=interface,
        network=network,
        disk=disk,
        busy=min(busy, 1.0),
        throttled=min(_growth(old.throttled_s, new.throttled_s) / seconds, 1.0),
        stolen=seen.steal or 0.0,
        collecting=_growth(old.gc_pause_s, new.gc_pause_s) / seconds,
        swapped=_growth(old.swapped_pages, new.swapped_pages),
        resent=(seen.retransmitted or 0.0) if has_sent else 0.0,
        memory=(seen.memory_nbytes or 0) / (seen.memory_limit_nbytes or 1),
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
