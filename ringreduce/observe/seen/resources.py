"""What a rank and its host use: processor, memory, network, disks. These are counters of Linux, from /proc and /sys."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

_SECTOR_NBYTES = 512  # in /proc/diskstats, whatever the device has
_TICKS = os.sysconf("SC_CLK_TCK")
_HOST_TIMES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")  # of /proc/stat, in this order


@dataclass(frozen=True, slots=True)
class InterfaceCounters:
    """What an interface of the network has received and sent, and what it carries a second; None: unknown."""

    speed_bits: int | None
    rx_nbytes: float
    tx_nbytes: float

    def share_since(self, before: InterfaceCounters, seconds: float) -> float:
        """Return which share of the speed was used since so many seconds ago; 0 where the speed is not known."""
        nbytes = max(self.rx_nbytes - before.rx_nbytes, self.tx_nbytes - before.tx_nbytes)
        return 8 * nbytes / seconds / self.speed_bits if self.speed_bits else 0.0


@dataclass(frozen=True, slots=True)
class DiskCounters:
    """What was read from a disk and written to it, and for how long it was busy."""

    read_nbytes: float
    written_nbytes: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Counters:
    """What a process and its host have used since they began; what the system does not say is None.

    Attributes:
        user_s, system_s, minor_faults, major_faults: of the process.
        switched_away, delayed_s: how often it had to leave a core, and how long its threads have waited for one.
        gc_pause_s: how long it was in Python's garbage collector since `Resources.begin`.
        resident_nbytes, cores: of it, now.
        host_user_s, host_system_s, host_idle_s, host_iowait_s, host_steal_s: of the host, over all cores.
        swapped_pages, sent_segments, retransmitted_segments: of the host; segments of TCP.
        throttled_s: of the control group.
        memory_nbytes, memory_limit_nbytes: now; of the control group if it has a limit, else of the host. Caches that
            the system can take back do not count.
        interfaces: by name, without the loopback.
        disks: by name, those that were used.
    """

    user_s: float | None = None
    system_s: float | None = None
    minor_faults: int | None = None
    major_faults: int | None = None
    switched_away: int | None = None
    delayed_s: float | None = None
    gc_pause_s: float | None = None
    resident_nbytes: int = 0
    cores: tuple[int, ...] = ()
    host_user_s: float | None = None
    host_system_s: float | None = None
    host_idle_s: float | None = None
    host_iowait_s: float | None = None
    host_steal_s: float | None = None
    swapped_pages: int | None = None
    sent_segments: int | None = None
    retransmitted_segments: int | None = None
    throttled_s: float | None = None
    memory_nbytes: int | None = None
    memory_limit_nbytes: int | None = None
    interfaces: dict[str, InterfaceCounters] = field(default_factory=dict)
    disks: dict[str, DiskCounters] = field(default_factory=dict)


class Resources:
    """Reads what this process and its host have used.

    Args:
        root: of the file system, without the last slash; another one in tests.

    Attributes:
        gc_pause_s: how long this process was in Python's garbage collector since `begin`, in seconds.
    """

    def __init__(self, root: str = "") -> None:
        self.gc_pause_s = 0.0
        self._gc_began = 0.0
        self._root = root
        self._speeds: dict[str, int | None] = {}
        self._has_old_groups = os.path.exists(f"{root}/sys/fs/cgroup/memory")  # those of version 1
        # Of both resources, this process's groups from its own up to the highest one that it sees.
        self._cpu_groups = self._groups("cpu")
        self._memory_groups = self._groups("memory")

    def begin(self) -> None:
        """Measure the garbage collector from now on, until `end`."""
        gc.callbacks.append(self._collected)

    def end(self) -> None:
        """Measure the garbage collector no more."""
        with suppress(ValueError):  # it had not begun
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, about: object) -> None:
        if phase == "start":
            self._gc_began = perf_counter()
        else:
            self.gc_pause_s += perf_counter() - self._gc_began

    def read(self) -> Counters:
        """Return the counters of now."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        memory_nbytes, memory_limit_nbytes = self._memory()
        sent, retransmitted = self._segments()
        return Counters(
            user_s=round(used.ru_utime, 3),
            system_s=round(used.ru_stime, 3),
            resident_nbytes=resident_nbytes(),
            minor_faults=used.ru_minflt,
            major_faults=used.ru_majflt,
            gc_pause_s=round(self.gc_pause_s, 3),
            switched_away=used.ru_nivcsw,
            delayed_s=self._delayed_s(),
            cores=tuple(sorted(os.sched_getaffinity(0))),
            **self._host_times(),
            throttled_s=self._throttled_s(),
            memory_nbytes=memory_nbytes,
            memory_limit_nbytes=memory_limit_nbytes,
            swapped_pages=self._sum("/proc/vmstat", "pswpin", "pswpout"),
            sent_segments=sent,
            retransmitted_segments=retransmitted,
            interfaces=self._interfaces(),
            disks=dict(self._disks()),
        )

    # ---- the process ----

    def _delayed_s(self) -> float | None:
        """Return how long the threads of this process have waited for a core; those that have ended do not count."""
        total = None
        with suppress(OSError):
            for thread in os.listdir(f"{self._root}/proc/self/task"):
                words = self._text(f"/proc/self/task/{thread}/schedstat").split()
                total = (total or 0.0) + int(words[1]) / 1e9 if len(words) > 1 else total
        return total if total is None else round(total, 3)

    # ---- the host ----

    def _host_times(self) -> dict[str, float | None]:
        words = self._text("/proc/stat").partition("\n")[0].split()[1:]
        times = dict(zip(_HOST_TIMES, (int(each) / _TICKS for each in words), strict=False))
        parts = {
            "host_user_s": ("user", "nice"),
            "host_system_s": ("system", "irq", "softirq"),
            **{f"host_{name}_s": (name,) for name in ("idle", "iowait", "steal")},
        }
        return {key: round(sum(times[part] for part in of), 2) if times else None for key, of in parts.items()}

    def _segments(self) -> tuple[int | None, int | None]:
        """Return how many segments of TCP were sent, and how many of these once more."""
        lines = [each.split() for each in self._text("/proc/net/snmp").splitlines() if each.startswith("Tcp:")]
        tcp = dict(zip(*lines, strict=True)) if lines else {}  # a line of names, and one of numbers
        sent, again = (int(tcp[name]) if name in tcp else None for name in ("OutSegs", "RetransSegs"))
        return sent, again

    def _interfaces(self) -> dict[str, InterfaceCounters]:
        found = {}
        for line in self._text("/proc/net/dev").splitlines()[2:]:
            name, _, rest = line.strip().partition(":")
            words = rest.split()
            if name != "lo" and len(words) > 8:
                if name not in self._speeds:
                    self._speeds[name] = self._speed(name)
                found[name] = InterfaceCounters(self._speeds[name], int(words[0]), int(words[8]))
        return found

    def _speed(self, name: str) -> int | None:
        text = self._text(f"/sys/class/net/{name}/speed").strip()  # in Mbit/s; -1, or an error: it is not known
        return int(text) * 1_000_000 if text.isdigit() and int(text) else None

    def _disks(self) -> Iterator[tuple[str, DiskCounters]]:
        for line in self._text("/proc/diskstats").splitlines():
            words = line.split()
            if len(words) < 13 or words[3] == words[7] == "0":
                continue
            if os.path.exists(f"{self._root}/sys/block/{words[2]}"):  # a partition is not there
                read, written = (int(words[place]) * _SECTOR_NBYTES for place in (5, 9))
                yield words[2], DiskCounters(read, written, int(words[12]) / 1e3)

    # ---- the control group ----

    def _groups(self, controller: str) -> list[str]:
        """Return the folders of this process's group and of those above it; none: the system has no such groups."""
        for line in self._text("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") if self._has_old_groups else not controllers:
                base = f"/sys/fs/cgroup/{controller}" if self._has_old_groups else "/sys/fs/cgroup"
                names = [each for each in path.split("/") if each]
                # A container sees its own group as the root, whatever this file says.
                if ".." in names or not os.path.exists(f"{self._root}{base}{path}"):
                    return [base]
                return [base + "".join(f"/{each}" for each in names[:count]) for count in range(len(names), -1, -1)]
        return []

    def _throttled_s(self) -> float | None:
        """Return how long the group, and those above it, were kept from running, as they had used up their quota."""
        found = []
        for group in self._cpu_groups:
            if (microseconds := self._sum(f"{group}/cpu.stat", "throttled_usec")) is not None:
                found.append(microseconds / 1e6)
            elif (nanoseconds := self._sum(f"{group}/cpu.stat", "throttled_time")) is not None:
                found.append(nanoseconds / 1e9)
        return sum(found) if found else None

    def _memory(self) -> tuple[int | None, int | None]:
        """Return what is used of the memory, and its limit: of the group with the least one, else of the host."""
        total = self._sum("/proc/meminfo", "MemTotal:")
        available = self._sum("/proc/meminfo", "MemAvailable:")
        host = (None if total is None or available is None else (total - available) << 10, total and total << 10)
        names = ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_inactive_file")
        usage, limit, cache = names if self._has_old_groups else ("memory.current", "memory.max", "inactive_file")
        found = [host]
        for group in self._memory_groups:
            most = self._text(f"{group}/{limit}").strip()
            now = self._text(f"{group}/{usage}").strip()
            if most.isdigit() and now.isdigit() and (host[1] is None or int(most) < host[1]):
                found.append((int(now) - (self._sum(f"{group}/memory.stat", cache) or 0), int(most)))
        return min(found, key=lambda each: float("inf") if each[1] is None else each[1])

    # ---- files ----

    def _text(self, path: str) -> str:
        """Return what a file says; nothing if it cannot be read."""
        try:
            with open(self._root + path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except OSError:
            return ""

    def _sum(self, path: str, *names: str) -> int | None:
        """Return the sum of some numbers of a file of lines ``name number``; None: it has none of them."""
        found = [line.split() for line in self._text(path).splitlines()]
        numbers = [int(words[1]) for words in found if words and words[0] in names]
        return sum(numbers) if numbers else None


def resident_nbytes() -> int:
    """Return how much memory of this process is resident."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
