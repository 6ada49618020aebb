"""On which disks the copies of commits are: ranks of a host, and ranks that see the same folder, have one disk."""

from __future__ import annotations

import os
import secrets
import weakref
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path

from ringreduce.common.files import create_file, partial_path
from ringreduce.common.topology import Topology
from ringreduce.runtime import rank, size
from ringreduce.runtime.blocking import world
from ringreduce.training.calls.objects import allgather_object


class Copies:
    """Which ranks of this world write which parts of a commit, so that each part is on the disks of several hosts.

    Collective: each rank makes a file in its folder, and looks whose files it sees there.

    Args:
        folder: where this rank's commits are; it exists.
        wanted: how many copies there are to be, on as many disks.

    Attributes:
        count: how many there are: no more than disks.
        disks: by rank, the first rank that sees the same folder.
    """

    def __init__(self, folder: Path, wanted: int) -> None:
        self._world = weakref.ref(world())
        self.disks = list(range(size()))
        if wanted > 1:
            self.disks = _seen(folder)
            homes = [world().hosts.home_of(member) for member in range(size())]
            self._hosts = Topology.from_hosts(_merged(homes, self.disks))
        else:
            self._hosts = Topology.uniform(1, size())
        self.count = min(wanted, len(self._hosts.nodes))

    @property
    def holds(self) -> bool:
        """Whether they were made in the world that there is now."""
        return self._world() is world()

    def keepers(self, owner: int | None) -> list[int]:
        """Return which ranks write a part, one on each of `count` disks.

        Args:
            owner: rank whose part it is, and the first that keeps it; None: the part of all ranks.
        """
        nodes = self._hosts.nodes
        home = self._hosts.home_of(owner or 0)
        place = self._hosts.local_rank(owner or 0)
        chosen = [nodes[(home + number) % len(nodes)] for number in range(self.count)]
        return [node[place % len(node)] for node in chosen]

    def shares(self) -> tuple[int, int]:
        """Return this rank's number among those that see its folder, and how many these are."""
        peers = [peer for peer, disk in enumerate(self.disks) if disk == self.disks[rank()]]
        return peers.index(rank()), len(peers)

    @property
    def speaks(self) -> bool:
        """Whether this is the first rank on its host."""
        return self._hosts.local_rank(rank()) == 0


def _seen(folder: Path) -> list[int]:
    """Return, by rank, the first rank whose file it sees in its folder; itself, if it cannot make one."""
    # As a partial commit, which `CommitStore.prepare` removes if this process dies.
    probe = partial_path(folder / f"commit-{secrets.token_hex(8)}")
    with suppress(OSError):
        create_file(probe).close()
    names = allgather_object(probe.name)
    disk = next((other for other, name in enumerate(names) if os.path.exists(folder / name)), rank())
    disks = allgather_object(disk)  # By now all have looked.
    with suppress(OSError):
        probe.unlink()
    return disks


def _merged(*groupings: Sequence[Hashable]) -> list[int]:
    """Return, by rank, the first rank that is reached from there by going from one rank to another of its group."""
    first = list(range(len(groupings[0])))
    before: list[int] = []
    while first != before:
        before = first
        for grouping in groupings:
            least: dict[Hashable, int] = {}
            for key, reached in zip(grouping, first, strict=True):
                least[key] = min(reached, least.get(key, reached))
            first = [least[key] for key in grouping]
    return first
