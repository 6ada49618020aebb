"""What ranks say of themselves, as it was recorded, for tests of what is made of it."""

from __future__ import annotations

import random
from typing import Any

from ringreduce.observe.resources import Resources

RECORDED = Resources().read()


def snapshot(rank: int, size: int, second: float, *, began: float = 1000.0, **more: Any) -> dict[str, Any]:
    """Return what a rank says that makes five steps a second; each host has eight ranks, and a network of 10 Gbit/s."""
    now = began + second
    luck = random.Random(f"{rank} {second}").random()
    counters = {
        "host_user_s": 6.0 * second,
        "host_system_s": 1.0 * second,
        "host_idle_s": 2.0 * second,
        "host_iowait_s": 0.0,
        "host_steal_s": 1.0 * second,
        "memory_nbytes": 12 << 30,
        "memory_limit_nbytes": 16 << 30,
        "sent_segments": int(1000 * second),
        "retransmitted_segments": int(10 * second),
        "interfaces": {
            "eth0": {"speed_bits": 10**10, "rx_nbytes": int(1e9 * second), "tx_nbytes": int(5e8 * second)},
            "eth1": {"speed_bits": None, "rx_nbytes": 5, "tx_nbytes": 5},
        },
        "disks": {"sda": {"read_nbytes": int(1e6 * second), "written_nbytes": 0, "busy_s": round(0.2 * second, 3)}},
    }
    call = {"number": int(5 * second), "collective": "allreduce", "nbytes": 4 << 20, "started": now - 0.2, "ended": now}
    return {
        "job": "0123abcd",
        "rank": rank,
        "size": size,
        "host": f"node{rank // 8}",
        "pid": 1000 + rank,
        "process_began": 77,
        "command": ["python", "train.py", "--data", "/data/images"],
        "began": began,
        "time": now,
        "stepped": now - 0.1,
        "samples": [[now, int(5 * second), int(160 * second), 0.3 * second]],
        "nbytes": 3 << 30,
        "slow": None,
        "error": None,
        "sets": [{"id": 0, "name": "world", "ranks": [*range(size)], "calls": [call], "operations": []}],
        "resources": {**RECORDED, **counters},
        "values": {"loss": [7e-5 * luck, 7, 2.0 + rank]},
        "spent": {"steps_s": second, "input_s": luck, "communication_s": 0.3 * second, "waiting_s": luck},
        **more,
    }
