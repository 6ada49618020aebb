"""The room that ranks have on a cluster of Ray: bundles of cores and GPUs, and slots for mpirun's daemons."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.common.errors import ConfigError
from ringreduce.engines.slots import Slots, hold, listed, slots

__all__ = ["RankPlace", "Room", "room"]


class RankPlace(NamedTuple):
    """Where a rank may be: a bundle of a placement group, and the node on which that is.

    Attributes:
        group: of Ray.
        bundle: its number in the group.
        node: Ray's name for the node.
        host: address of the node.
    """

    group: Any
    bundle: int
    node: str
    host: str


class Room:
    """Bundles that Ray has placed, or will once there is room, and a slot on each node with one.

    Args:
        ray: the module.
        bundle: resources of a bundle.
        ranks: of a bundle.
        slots: for daemons.
        ticket: for tasks that hold these.

    Attributes:
        address: of this node, which needs no slot: mpirun is here.
    """

    def __init__(self, ray: Any, bundle: Mapping[str, float], ranks: int, slots: Slots, ticket: str) -> None:
        self._ray = ray
        self._bundle = dict(bundle)
        self._ranks = ranks
        self._groups: list[Any] = []
        self._slots = slots
        self._ticket = ticket
        self._tasks: dict[str, tuple[str, Any]] = {}  # the name of the slot of a host, and the task that holds it
        self._numbers = itertools.count()
        self._list: Callable[[], object] = _nothing
        self.address = str(ray.util.get_node_ip_address())

    def take(self, count: int, strategy: str = "PACK") -> Any:
        """Ask for bundles, and return their placement group."""
        groups = importlib.import_module("ray.util.placement_group")
        self._groups.append(groups.placement_group([self._bundle] * count, strategy=strategy))
        return self._groups[-1]

    def leave(self) -> None:
        """Give all of it back."""
        groups = importlib.import_module("ray.util.placement_group")
        for each in self._groups:
            groups.remove_placement_group(each)

    def places(self) -> list[RankPlace]:
        """Return a place for each rank that has room now, host by host."""
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        found = []
        for group in self._groups:
            nodes = self._ray.util.placement_group_table(group)["bundles_to_node_id"]
            found += [RankPlace(group, bundle, node, hosts[node]) for bundle, node in nodes.items() if node in hosts]
        return [each for each in sorted(found, key=lambda each: each.host) for _ in range(self._ranks)]

    def hosts(self) -> dict[str, int]:
        """Return the slots by host, of hosts where daemons can start; have others hold a slot."""
        places = self.places()
        self._hold(places)
        ready = {host for host, (name, _) in self._tasks.items() if self._slots.has(name)} | {self.address}
        return Counter(each.host for each in places if each.host in ready)

    def _hold(self, places: list[RankPlace]) -> None:
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        for host, node in {each.host: each.node for each in places if each.host != self.address}.items():
            _, task = self._tasks.get(host, ("", None))
            if task is None or self._ray.wait([task], timeout=0)[0]:  # it fails where Ray has lost a node
                name = f"{host}/{next(self._numbers)}"
                where = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": where}
                self._tasks[host] = name, self._ray.remote(hold).options(**options).remote(self._ticket, name)

    def wait(self, limit_s: float) -> dict[str, int]:
        """Return the slots by host once all other hosts of places hold one.

        Raises:
            ConfigError: some have not within so many seconds.
        """
        self._hold(self.places())
        names = [name for name, _ in self._tasks.values()]
        tasks = [task for _, task in self._tasks.values()]
        self._slots.wait(names, limit_s, lambda: tasks and self._ray.get(self._ray.wait(tasks, timeout=0)[0]))
        return self.hosts()

    def start(self, host: str, command: str) -> int:
        """Run a command of a shell on a host; return its status.

        Raises:
            CollectiveError: the task there has ended.
        """
        try:
            return self._slots.start(self._tasks[host][0], command)
        finally:
            self._list()  # before the launcher asks for hosts again

    @contextmanager
    def listed(self, folder: Path) -> Iterator[Path]:
        """As `ringreduce.engines.slots.listed`, of these hosts."""
        with listed(self.hosts, folder) as (program, self._list):
            try:
                yield program
            finally:
                self._list = _nothing


def _nothing() -> None:
    pass


@contextmanager
def room(
    ray: Any, bundle: Mapping[str, float], ranks: int, *, count: int, strategy: str, limit_s: float
) -> Iterator[Room]:
    """Have room as long as this context lasts.

    Args:
        ray: the module.
        bundle: resources of a bundle.
        ranks: of a bundle.
        count: of bundles.
        strategy: by which Ray places them.
        limit_s: seconds to wait for them.

    Raises:
        ConfigError: there is none.
    """
    with slots(str(ray.util.get_node_ip_address())) as (held, ticket):
        made = Room(ray, bundle, ranks, slots=held, ticket=ticket)
        try:
            if not made.take(count, strategy).wait(limit_s):
                raise ConfigError(
                    f"Ray had no room for {count} times {bundle} ({strategy}) within {limit_s:g} s; the cluster has "
                    f"{ray.cluster_resources()}, of which {ray.available_resources()} is free"
                )
            yield made
        finally:
            made.leave()
