"""Who is where: ranks and the nodes they share memory on. Plain values, made from a list of host names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True)
class Topology:
    """The ranks of a process set, grouped into nodes; the same value on every rank.

    What is derived from the nodes is computed once, so that the schedule of one rank takes no walk through all ranks.

    Attributes:
        nodes: for each node the ranks on it, ascending; nodes in order of their first rank.
        size: how many ranks there are.
        single_node: whether all are on one node.
    """

    nodes: tuple[tuple[int, ...], ...]
    size: int = field(init=False, compare=False, repr=False)
    single_node: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        ranks = sorted(rank for node in self.nodes for rank in node)
        assert ranks == list(range(len(ranks))) and all(self.nodes), f"not a topology: {self.nodes}"
        object.__setattr__(self, "size", len(ranks))
        object.__setattr__(self, "single_node", len(self.nodes) == 1)

    def __hash__(self) -> int:
        return self._hash

    @classmethod
    def from_hosts(cls, hosts: Iterable[Hashable]) -> Topology:
        """Group ranks by host: ``hosts[r]`` names where rank r runs, in any hashable terms."""
        nodes: dict[Hashable, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        return cls(tuple(tuple(node) for node in nodes.values()))

    @classmethod
    def uniform(cls, nnodes: int, local_size: int) -> Topology:
        """Return ``nnodes`` nodes of ``local_size`` consecutive ranks each."""
        return cls.from_hosts(rank // local_size for rank in range(nnodes * local_size))

    @cached_property
    def homogeneous(self) -> bool:
        """Whether every node holds the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    @cached_property
    def lanes(self) -> int:
        """The ranks of the smallest node: so many local ranks there are on every node."""
        return min(len(node) for node in self.nodes)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """All ranks, node after node, so that neighbours mostly share a node."""
        return tuple(rank for node in self.nodes for rank in node)

    def place_of(self, rank: int) -> int:
        """Return where in ``order`` the rank is."""
        return self._places[rank]

    def home_of(self, rank: int) -> int:
        """Return the number of the rank's node."""
        return self._homes[rank]

    def node_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the node of ``rank``, itself included."""
        return self.nodes[self._homes[rank]]

    def local_rank(self, rank: int) -> int:
        return self._places[rank] - self._places[self.node_of(rank)[0]]

    def cross_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same local rank, one of each node that has so many."""
        return self._cross_groups[self.local_rank(rank)]

    @cached_property
    def _places(self) -> tuple[int, ...]:
        places = [0] * self.size
        for place, rank in enumerate(self.order):
            places[rank] = place
        return tuple(places)

    @cached_property
    def _homes(self) -> tuple[int, ...]:
        homes = [0] * self.size
        for number, node in enumerate(self.nodes):
            for rank in node:
                homes[rank] = number
        return tuple(homes)

    @cached_property
    def _cross_groups(self) -> tuple[tuple[int, ...], ...]:
        most = max(len(node) for node in self.nodes)
        return tuple(tuple(node[local] for node in self.nodes if local < len(node)) for local in range(most))

    @cached_property
    def _hash(self) -> int:
        return hash(self.nodes)

    def describe(self) -> str:
        """Say it in words: ``4 ranks on 1 node``, ``8 ranks on 2 nodes x 4``, ``5 ranks on nodes of 3, 2``."""
        sizes: Sequence[int] = [len(node) for node in self.nodes]
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        if self.single_node:
            return f"{ranks} on 1 node"
        if self.homogeneous:
            return f"{ranks} on {len(sizes)} nodes x {sizes[0]}"
        return f"{ranks} on nodes of {', '.join(map(str, sizes))}"
