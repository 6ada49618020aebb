"""What ranks say of themselves, as it was recorded, for tests of what is made of it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from ringreduce.observe.seen.resources import DiskCounters, InterfaceCounters, Resources
from ringreduce.observe.seen.snapshots import RateSample, ReportedValue, SeenCall, SeenSet, Snapshot
from ringreduce.observe.seen.step_clock import SpentOnSteps

RECORDED = Resources().read()


def snapshot(rank: int, size: int, second: float, *, began: float = 1000.0, **more: Any) -> Snapshot:
    """Return what a rank says that makes five steps a second; each host has eight ranks, and a network of 10 Gbit/s."""
    now = began + second
    luck = random.Random(f"{rank} {second}").random()
    resources = replace(
        RECORDED,
        resident_nbytes=3 << 30,
        host_user_s=6.0 * second,
        host_system_s=1.0 * second,
        host_idle_s=2.0 * second,
        host_iowait_s=0.0,
        host_steal_s=1.0 * second,
        memory_nbytes=12 << 30,
        memory_limit_nbytes=16 << 30,
        sent_segments=int(1000 * second),
        retransmitted_segments=int(10 * second),
        interfaces={
            "eth0": InterfaceCounters(10**10, int(1e9 * second), int(5e8 * second)),
            "eth1": InterfaceCounters(None, 5, 5),
        },
        disks={"sda": DiskCounters(int(1e6 * second), 0, round(0.2 * second, 3))},
    )
    call = SeenCall(int(5 * second), "allreduce", 4 << 20, now - 0.2, now)
    recorded = Snapshot(
        job="0123abcd",
        rank=rank,
        size=size,
        host=f"node{rank // 8}",
        pid=1000 + rank,
        command=("python", "train.py", "--data", "/data/images"),
        began=began,
        time=now,
        stepped=now - 0.1,
        samples=(RateSample(now, int(5 * second), int(160 * second), 0.3 * second),),
        sets=(SeenSet(0, "world", None, (call,)),),
        resources=resources,
        values={"loss": ReportedValue(7e-5 * luck, 7, 2.0 + rank)},
        spent=SpentOnSteps(second, luck, 0.3 * second, luck),
    )
    return replace(recorded, **more)
