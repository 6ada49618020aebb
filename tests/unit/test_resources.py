"""What a rank and its host use: from files as Linux writes them, and compared with psutil."""

from __future__ import annotations

import gc
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from ringreduce.observe.seen.resources import DiskCounters, InterfaceCounters, Resources

STAT = """cpu  1000 200 300 4000 50 6 7 80 0 0
cpu0 500 100 150 2000 25 3 3 40 0 0
intr 12345
"""
SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm InSegs OutSegs RetransSegs InErrs
Tcp: 1 9000 8000 70 0
Udp: InDatagrams
Udp: 5
"""
NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls
    lo: 111 1 0 0 0 0 0 0 111 1 0 0 0 0 0 0
  eth0:222222 20 0 0 0 0 0 0 333333 30 0 0 0 0 0 0
 wlan0: 4 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0
"""
DISKS = """   8       0 sda 10 0 2000 30 40 0 5000 60 0 700 90
   8       1 sda1 10 0 2000 30 40 0 5000 60 0 700 90
   7       0 loop0 0 0 0 0 0 0 0 0 0 0 0
 253       0 dm-0 1 0 8 3 0 0 0 0 0 12 3
"""
FILES = {
    "proc/stat": STAT,
    "proc/net/snmp": SNMP,
    "proc/net/dev": NET,
    "sys/class/net/eth0/speed": "10000\n",
    "sys/class/net/wlan0/speed": "-1\n",
    "proc/diskstats": DISKS,
    "sys/block/sda/stat": "",
    "sys/block/dm-0/stat": "",
    "sys/block/loop0/stat": "",
    "proc/vmstat": "nr_free_pages 7\npswpin 30\npswpout 12\npswpinned 5\n",
    "proc/meminfo": "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n",
    "proc/self/task/1/schedstat": "1000 2500000000 3\n",
    "proc/self/task/9/schedstat": "1000 500000000 3\n",
}
VERSION_2 = {
    "proc/self/cgroup": "0::/jobs/mine\n",
    "sys/fs/cgroup/jobs/mine/cpu.stat": "usage_usec 5\nnr_throttled 2\nthrottled_usec 250000\n",
    "sys/fs/cgroup/jobs/cpu.stat": "usage_usec 5\nnr_throttled 2\nthrottled_usec 1000000\n",
    "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    "sys/fs/cgroup/jobs/mine/memory.current": "1000\n",
    "sys/fs/cgroup/jobs/memory.max": "500000\n",
    "sys/fs/cgroup/jobs/memory.current": "300000\n",
    "sys/fs/cgroup/jobs/memory.stat": "anon 1\ninactive_file 100000\nactive_file 3\n",
}
VERSION_1 = {
    "proc/self/cgroup": "9:name=systemd:/\n5:memory:/job\n3:cpu,cpuacct:/\n0::/\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "400000\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "350000\n",
    "sys/fs/cgroup/memory/job/memory.stat": "cache 9\ntotal_inactive_file 50000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "900000\n",
    "sys/fs/cgroup/cpu/cpu.stat": "nr_periods 1\nnr_throttled 1\nthrottled_time 3000000000\n",
}


def system(root: Path, files: dict[str, str]) -> Resources:
    """Return what reads these files."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Resources(str(root))


def test_counters_of_the_host(tmp_path: Path):
    """In seconds and bytes; caches that can be taken back are not used memory; a partition is a part of its disk."""
    found = system(tmp_path, FILES).read()
    ticks = os.sysconf("SC_CLK_TCK")
    times = {"user": 1200, "system": 313, "idle": 4000, "iowait": 50, "steal": 80}
    assert {f"host_{name}_s": count / ticks for name, count in times.items()}.items() <= asdict(found).items()
    assert (found.sent_segments, found.retransmitted_segments, found.swapped_pages) == (8000, 70, 42)
    assert (found.memory_nbytes, found.memory_limit_nbytes) == (600 << 10, 1000 << 10)
    assert (found.throttled_s, found.delayed_s) == (None, 3.0)
    assert found.interfaces == {
        "eth0": InterfaceCounters(10_000_000_000, 222222, 333333),
        "wlan0": InterfaceCounters(None, 4, 5),
    }
    assert found.disks == {"sda": DiskCounters(2000 * 512, 5000 * 512, 0.7), "dm-0": DiskCounters(8 * 512, 0, 0.012)}


@pytest.mark.parametrize(
    ("files", "memory", "throttled_s"),
    [
        (VERSION_2, (200_000, 500_000), 1.25),
        ({**VERSION_2, "proc/self/cgroup": "0::/../elsewhere\n"}, (600 << 10, 1000 << 10), None),
        (VERSION_1, (300_000, 400_000), 3.0),
    ],
)
def test_limits_of_control_groups(
    files: dict[str, str], memory: tuple[int, int], throttled_s: float | None, tmp_path: Path
):
    """The least limit of a group and those above it counts; all of them may keep the process from running."""
    found = system(tmp_path, {**FILES, **files}).read()
    assert (found.memory_nbytes, found.memory_limit_nbytes) == memory
    assert found.throttled_s == throttled_s


def test_a_system_that_says_nothing(tmp_path: Path):
    """What cannot be read is None, or empty; nothing fails."""
    found = system(tmp_path, {}).read()
    unknown = {key for key, value in asdict(found).items() if value is None}
    host = {"host_user_s", "host_system_s", "host_idle_s", "host_iowait_s", "host_steal_s", "swapped_pages"}
    host |= {"memory_nbytes", "memory_limit_nbytes", "sent_segments", "retransmitted_segments"}
    assert unknown == {*host, "throttled_s", "delayed_s"}
    assert (found.interfaces, found.disks) == ({}, {})


def test_this_process_as_psutil_sees_it():
    """Processor time, memory and cores; they are between what psutil says before and after."""
    psutil = pytest.importorskip("psutil")
    me = psutil.Process()
    before = me.cpu_times(), psutil.net_io_counters(pernic=True)
    found = Resources().read()
    after = me.cpu_times(), psutil.net_io_counters(pernic=True)
    tick = 1 / os.sysconf("SC_CLK_TCK")
    assert before[0].user - tick <= found.user_s <= after[0].user + tick
    assert before[0].system - tick <= found.system_s <= after[0].system + tick
    assert [*found.cores] == me.cpu_affinity()
    assert abs(found.resident_nbytes - me.memory_info().rss) < 16 << 20
    for name, each in found.interfaces.items():
        assert before[1][name].bytes_recv <= each.rx_nbytes <= after[1][name].bytes_recv


def test_pauses_of_the_garbage_collector():
    """Are measured from `begin` to `end`."""
    resources = Resources()
    resources.begin()
    gc.collect()
    resources.end()
    measured = resources.gc_pause_s
    gc.collect()
    assert 0 < measured == resources.gc_pause_s
    resources.end()  # a second time changes nothing
