"""Network namespaces as hosts, each with a link of limited rate to one switch; the programs that make them."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

__all__ = [
    "SUBNET",
    "ClusterError",
    "address",
    "call",
    "connect",
    "host_name",
    "hosts_of",
    "ip",
    "pids_of",
    "remove",
    "require_hosts",
    "set_link",
]

SUBNET = "10.113.0"
# What a token bucket lets through at once: the kernel hands it packets of up to 64 KiB. A switch has buffers too.
BURST, QUEUE = "256kb", "20ms"


class ClusterError(Exception):
    """What the user has to know; the text is all of it."""


def connect(name: str, count: int, rate: str) -> None:
    """Make the hosts and the switch; all of it or, after an error, nothing.

    Args:
        name: of the cluster.
        count: of hosts.
        rate: of each link, in each direction, in tc's form.
    """
    if os.geteuid() != 0:
        raise ClusterError("this needs root, who alone may make network namespaces")
    if hosts_of(name):
        raise ClusterError(f"there is a cluster {name!r} already; `down` removes it")
    if not 1 <= count <= 200:
        raise ClusterError(f"a cluster has 1 to 200 hosts, not {count}")
    switch = f"{name}-switch"
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number in range(count):
            _add_host(name, number, count, rate)
    except BaseException:
        remove(name)
        raise


def _add_host(name: str, number: int, count: int, rate: str) -> None:
    host, switch, port = host_name(name, number), f"{name}-switch", f"port{number}"
    names = Path("/etc/netns") / host  # seen as /etc in the namespace
    names.mkdir(parents=True, exist_ok=True)
    lines = ["127.0.0.1 localhost", *(f"{address(each)} {host_name(name, each)}" for each in range(count))]
    (names / "hosts").write_text("\n".join(lines) + "\n")
    ip("netns", "add", host)
    ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    ip("-n", host, "link", "set", "lo", "up")
    ip("-n", host, "address", "add", f"{address(number)}/24", "dev", "eth0")
    ip("-n", host, "link", "set", "eth0", "up")
    for namespace, device in ((host, "eth0"), (switch, port)):  # each end limits what it sends
        bucket = ("root", "tbf", "rate", rate, "burst", BURST, "latency", QUEUE)
        call("tc", "-n", namespace, "qdisc", "add", "dev", device, *bucket)


def set_link(host: str, state: str) -> None:
    """Set the link of a host ``"up"`` or ``"down"``."""
    ip("-n", host, "link", "set", "eth0", state)


def remove(name: str) -> None:
    """End what runs on the hosts, then remove them; nothing is left, whatever state they are in."""
    hosts = hosts_of(name)
    for send in (signal.SIGTERM, signal.SIGKILL):
        pids = [pid for host in hosts for pid in pids_of(host)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, send)
        deadline = time.monotonic() + 2.0
        while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
    for namespace in (*hosts, f"{name}-switch"):
        if (Path("/run/netns") / namespace).exists():
            ip("netns", "delete", namespace)
        names = Path("/etc/netns") / namespace
        (names / "hosts").unlink(missing_ok=True)
        if names.exists():
            names.rmdir()
    with contextlib.suppress(OSError):  # others may have something there
        Path("/etc/netns").rmdir()


def pids_of(host: str) -> list[int]:
    """Return the processes on a host, by their numbers on this machine."""
    return [int(pid) for pid in ip("netns", "pids", host).split()]


def host_name(name: str, number: int) -> str:
    return f"{name}-host{number}"


def address(number: int) -> str:
    return f"{SUBNET}.{number + 1}"


def hosts_of(name: str) -> list[str]:
    """Return the hosts of a cluster, in order; none if it is not up."""
    prefix = host_name(name, 0)[:-1]
    found = Path("/run/netns").glob(f"{prefix}*") if Path("/run/netns").exists() else ()
    return sorted((each.name for each in found), key=lambda host: int(host.removeprefix(prefix)))


def require_hosts(name: str, count: int = 1) -> list[str]:
    """Return the hosts of a cluster; raise a `ClusterError` if these are fewer than ``count``."""
    hosts = hosts_of(name)
    if len(hosts) < count:
        raise ClusterError(f"the cluster {name!r} has {len(hosts)} hosts, and this takes {count}; see `up`")
    return hosts


def ip(*words: str) -> str:
    return call("ip", *words)


def call(*command: str) -> str:
    """Return what a program prints; raise a `ClusterError` with its complaint if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        raise ClusterError(f"there is no {command[0]!r} here: install its package") from None
    if done.returncode:
        raise ClusterError(f"{shlex.join(command)}: {done.stderr.strip()}")
    return done.stdout
