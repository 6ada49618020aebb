"""Clusters of machines with sshd, Slurm or the files of pods, all on this machine; see `scripts/cluster`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "cluster"

#: Each rank says where it is, and takes part in one allreduce.
WHO = """
import os, socket
import numpy as np, ringreduce as rr
rr.init()
total = rr.allreduce(np.full(3, rr.rank() + 1.0), op="sum")
assert (total == rr.size() * (rr.size() + 1) / 2).all(), total
print(f"rank {rr.rank()} of {rr.size()} on {socket.gethostname()}", flush=True)
"""

#: Rank 0 asks for what it serves itself, until all ranks are there.
SEEN = """
import socket, sys, time
import numpy as np
import ringreduce as rr
from ringreduce.common.errors import ConfigError
from ringreduce.observe.out.serving import ask

rr.init()
found, seen = [], 0.0
while not seen:
    rr.count(steps=1)
    time.sleep(0.05)  # of a step
    if rr.rank() == 0:
        try:
            found = ask(":9400", "/ranks", sys.argv[1])
        except ConfigError as error:
            print(error, file=sys.stderr)
        seen = float(len(found) == rr.size())
    seen = rr.allreduce(np.array([seen]), op=rr.MAX)[0]
listening = any(":24B8 " in line and " 0A " in line for line in open("/proc/net/tcp"))  # on port 9400
assert listening == (socket.gethostname() == rr.broadcast_object(socket.gethostname(), 0))
for each in found:
    print("rank", each["rank"], "of", rr.size(), "on", each["host"], flush=True)
"""


@dataclass(frozen=True)
class Done:
    """A command that has ended: its status, what it wrote to both outputs, and how long it took."""

    status: int
    text: str
    seconds: float

    def ranks(self) -> list[str]:
        """Return where the ranks said they are, in their order."""
        return sorted(line for line in self.text.splitlines() if line.startswith("rank "))


class Cluster:
    """A cluster that is up.

    Args:
        kind: ``"ssh"``, ``"slurm"``, ``"pods"`` or ``"trainjob"``.
        hosts: how many.
        slots: of each.
        options: for ``scripts/cluster up``.
    """

    def __init__(self, kind: str, hosts: int, slots: int = 2, options: Sequence[str] = ()) -> None:
        self.name = f"{kind[:2]}{os.getpid() % 10_000}"  # names of network devices are short
        self._call("up", kind, str(hosts), "--slots", str(slots), "--rate", "10gbit", *options)
        self.shared = Path(self._call("shared").strip())

    def _call(self, *words: str) -> str:
        command = [sys.executable, str(SCRIPT), "--name", self.name, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def host(self, number: int) -> str:
        """Return the name of a host."""
        return f"{self.name}-host{number}"

    def die(self, number: int) -> None:
        """Take the power of a host."""
        self._call("die", str(number))

    def unplug(self, number: int) -> None:
        """Take the cable of a host out."""
        self._call("unplug", str(number))

    def freeze(self, number: int) -> None:
        """Let a host stand still."""
        self._call("freeze", str(number))

    def thaw(self, number: int) -> None:
        """Let it go on."""
        self._call("thaw", str(number))

    def boot(self, number: int) -> None:
        """Start a host."""
        self._call("boot", str(number))

    def list_workers(self, count: int, slots: int) -> None:
        """Let the files of the launcher name so many workers."""
        self._call("list", str(count), "--slots", str(slots))

    def down(self) -> None:
        """Remove it."""
        self._call("down")

    def line(self, number: int, *words: str) -> list[str]:
        """Return the command line that runs a command on a host."""
        return [sys.executable, str(SCRIPT), "--name", self.name, "exec", str(number), *words]

    def run(
        self, number: int, *words: str, timeout_s: float = 60.0, variables: Mapping[str, str] | None = None
    ) -> Done:
        """Run a command on a host, within a time limit that nothing survives."""
        begin = time.monotonic()
        line = self._limited(number, ["timeout", "--kill-after=5", str(timeout_s)], words)
        done = ended(line, timeout_s, variables={**environ(), **(variables or {})}, folder=self.shared)
        return Done(done.returncode, done.stdout, time.monotonic() - begin)

    def _limited(self, number: int, limit: Sequence[str], words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host, below one there that ends it."""
        return self.line(number, *limit, *words)

    def write(self, name: str, text: str) -> Path:
        """Write a file into the folder that all hosts share."""
        path = self.shared / name
        path.write_text(text)
        return path


def ended(
    line: Sequence[str], timeout_s: float, variables: Mapping[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Return how a command ended, with all that it wrote; it has a time limit of its own, and a little longer here."""
    return subprocess.run(
        line,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s + 20,
        check=False,
        cwd=folder,
        env=variables,
    )


def environ() -> dict[str, str]:
    """Return the variables of commands on hosts.

    A policy of mapping that is set for all jobs of this machine would hide what the launcher does.
    """
    return {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_MCA", "PRTE", "OMP_"))}


def why_not(kind: str) -> str:
    """Return why there can be no cluster of a kind here; empty if there can."""
    if os.geteuid() != 0:
        return "clusters take root"
    programs = ["ip", "tc", "unshare", "nsenter", "ssh", "sshd", "mpirun"]
    programs += ["slurmctld", "munged"] if kind == "slurm" else []
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    if kind == "trainjob":
        hidden = [each for each in (SCRIPT.parent, Path(sys.prefix), Path(sys.base_prefix)) if not _is_for_all(each)]
        if hidden:
            return f"such pods do not run as root, and {hidden[0]} is not for all users"
    return _refusal()


def _is_for_all(path: Path) -> bool:
    """Return whether all users may read a folder, and go there; in such pods they may go through /root."""
    there = path.resolve()
    return all(each.stat().st_mode & 0o005 == 0o005 for each in (there, *there.parents) if each != Path("/root"))


@cache
def _refusal() -> str:
    """Return why root may not make hosts, as in many containers; empty if it may."""
    attempts = (
        "mount -t tmpfs none /tmp",
        "ip link add one type veth peer name two",
        "ip link add three type bridge",
        "tc qdisc add dev one root tbf rate 1gbit burst 256kb latency 20ms",
    )
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", " && ".join(attempts)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return f"root may not make hosts here: {done.stderr.strip()}" if done.returncode else ""


def cluster_of(kind: str, hosts: int, slots: int = 2) -> Callable[[], Iterator[Cluster]]:
    """Return a fixture of a module: a cluster that is removed at the end, with the program ``who.py``."""

    @pytest.fixture(scope="module")
    def cluster() -> Iterator[Cluster]:
        reason = why_not(kind)
        if reason:
            pytest.skip(reason)
        made = Cluster(kind, hosts, slots)
        made.write("who.py", WHO)
        yield made
        made.down()

    return cluster
