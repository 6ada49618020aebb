"""Who is where: ranks and the nodes they share memory on. Plain values, made from a list of host names."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Topology:
    """The ranks of a process set, grouped into nodes; the same value on every rank.

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

    @property
    def homogeneous(self) -> bool:
        """Whether every node holds the same number of ranks."""
        return len({len(node) for node in self.nodes}) == 1

    def node_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks on the node of ``rank``, itself included."""
        return next(node for node in self.nodes if rank in node)

    def local_rank(self, rank: int) -> int:
        return self.node_of(rank).index(rank)

    def cross_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same local rank, one of each node that has so many."""
        local = self.local_rank(rank)
        return tuple(node[local] for node in self.nodes if local < len(node))

    def describe(self) -> str:
        """Say it in words: ``4 ranks on 1 node``, ``8 ranks on 2 nodes x 4``, ``5 ranks on nodes of 3, 2``."""
        sizes: Sequence[int] = [len(node) for node in self.nodes]
        ranks = f"{self.size} rank{'s' * (self.size != 1)}"
        if self.single_node:
            return f"{ranks} on 1 node"
        if self.homogeneous:
            return f"{ranks} on {len(sizes)} nodes x {sizes[0]}"
        return f"{ranks} on nodes of {', '.join(map(str, sizes))}"
