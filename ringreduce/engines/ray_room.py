"""The room that ranks have on a cluster of Ray: bundles of cores and GPUs, and slots for mpirun's daemons."""

from __future__ import annotations

import importlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ringreduce.common.errors import ConfigError
from ringreduce.engines.slots import Slots, hold, listed, slots

_log = logging.getLogger(__name__)

#: Until another task is to hold the slot of a node: after the first that has ended, twice as long after each further.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


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


@dataclass
class _Holder:
    """The task that holds a slot on a node.

    Attributes:
        name: of the slot.
        task: of Ray.
        pause_s: seconds after its begin until another may begin, if it ends.
        begun: when it began, in seconds.
    """

    name: str
    task: Any
    pause_s: float = _FIRST_PAUSE_S
    begun: float = field(default_factory=time.monotonic)


class Room:
    """Bundles that Ray has placed, or will once there is room, and a slot on each node with one.

    Args:
        ray: the module.
        bundle: resources of a bundle.
        ranks: of a bundle.
        slots: for daemons.

    Attributes:
        slots: for daemons; they also listen for stand-ins.
        address: of this node, which needs no slot: mpirun is here.
    """

    def __init__(self, ray: Any, bundle: Mapping[str, float], ranks: int, slots: Slots) -> None:
        self._ray = ray
        self._bundle = dict(bundle)
        self._ranks = ranks
        self._groups: list[Any] = []
        self.slots = slots
        self._holders: dict[str, _Holder] = {}
        self._said: set[str] = set()  # the hosts whose tasks have ended, as users know
        self._numbers = itertools.count()
        self._list: Callable[[], object] = lambda: None
        self.address = str(ray.util.get_node_ip_address())

    def take(self, count: int, strategy: str = "PACK") -> Any:
        """Ask for bundles, and return their placement group."""
        groups = importlib.import_module("ray.util.placement_group")
        self._groups.append(groups.placement_group([self._bundle] * count, strategy=strategy))
        return self._groups[-1]

    def leave(self) -> None:
        """Give all of it back; nothing if Ray was shut down, which this would start anew."""
        if not self._ray.is_initialized():
            return
        groups = importlib.import_module("ray.util.placement_group")
        for each in self._groups:
            groups.remove_placement_group(each)

    def places(self) -> list[RankPlace]:
        """Return a place for each rank that has room now, host by host; none if Ray was shut down."""
        if not self._ray.is_initialized():
            return []
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
        held = self.slots.held()
        ready = {host for host, each in self._holders.items() if each.name in held} | {self.address}
        return Counter(each.host for each in places if each.host in ready)

    def _hold(self, places: list[RankPlace]) -> None:
        """Have a task hold a slot on each node; where it ends, another one, later and later if they end at once."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        for host, node in {each.host: each.node for each in places if each.host != self.address}.items():
            last = self._holders.get(host)
            why = "" if last is None else self._why_ended(last)
            if last is not None and not why:
                continue
            if why and host not in self._said:
                self._said.add(host)
                _log.warning("no rank can start on %s until another task holds a slot there: %s", host, why)
            lasted_s = 0.0 if last is None else time.monotonic() - last.begun
            if last is not None and lasted_s < last.pause_s:
                continue
            name = f"{host}/{next(self._numbers)}"
            where = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": where}
            task = self._ray.remote(hold).options(**options).remote(self.slots.ticket, name)
            pause_s = _FIRST_PAUSE_S
            if last is not None and lasted_s < 2 * _LONGEST_PAUSE_S:
                pause_s = min(2 * last.pause_s, _LONGEST_PAUSE_S)
            self._holders[host] = _Holder(name, task, pause_s)

    def _why_ended(self, holder: _Holder) -> str:
        """Return why a task has ended; empty if it has not."""
        if not self._ray.wait([holder.task], timeout=0)[0]:
            return ""
        try:
            self._ray.get(holder.task)
        except self._ray.exceptions.RayError as error:  # as where Ray has lost a node
            why = getattr(error, "cause", None) or error
            return " ".join(str(why).split()) or type(why).__name__
        return "its task has ended"

    def wait(self, limit_s: float) -> dict[str, int]:
        """Return the slots by host once all other hosts of places hold one.

        Raises:
            ConfigError: some have not within so many seconds, or their tasks have ended.
        """
        self._hold(self.places())
        holders = dict(self._holders)

        def look() -> None:
            for host, each in holders.items():
                why = self._why_ended(each)
                if why:
                    raise ConfigError(f"mpirun's daemon cannot start on {host}: {why}")

        self.slots.wait([each.name for each in holders.values()], limit_s, look)
        return self.hosts()

    def start(self, host: str, command: str) -> int:
        """Run a command of a shell on a host; return its status.

        Raises:
            CollectiveError: the task there has ended.
            ConfigError: there is none.
        """
        if host not in self._holders:
            raise ConfigError("no task of Ray holds a slot there")
        try:
            return self.slots.start(self._holders[host].name, command)
        finally:
            self._list()  # before the launcher asks for hosts again

    @contextmanager
    def listed(self, folder: Path) -> Iterator[Path]:
        """As `ringreduce.engines.slots.listed`, of these hosts."""
        with listed(self.hosts, folder) as (program, self._list):
            try:
                yield program
            finally:
                self._list = lambda: None


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
    with slots(str(ray.util.get_node_ip_address())) as held:
        made = Room(ray, bundle, ranks, held)
        try:
            if not made.take(count, strategy).wait(limit_s):
                raise ConfigError(
                    f"Ray had no room for {count} times {bundle} ({strategy}) within {limit_s:g} s; the cluster has "
                    f"{ray.cluster_resources()}, of which {ray.available_resources()} is free"
                )
            yield made
        finally:
            made.leave()
