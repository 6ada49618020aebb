"""A cluster that need not exist, and which allreduce would be the fastest there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from ringreduce.algorithms import Collective, find, names
from ringreduce.bench.tune import Sample, fit
from ringreduce.buffers.codecs import CODECS
from ringreduce.collectives.call import Path, Problem, path_for
from ringreduce.collectives.choice.selection import choose
from ringreduce.collectives.choice.tuning import CostModel, is_ours
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.quantities import format_seconds, parse_nbytes, parse_rate, parse_seconds
from ringreduce.common.reduce_ops import SUM
from ringreduce.common.settings import OneOf, option
from ringreduce.common.topology import Topology
from ringreduce.simulate.clock import Links, ends_of
from ringreduce.simulate.rounds import Floats
from ringreduce.simulate.traffic import Traffic, traffic_of

#: What of the time is due to what: the terms that are 0 without it.
_CAUSES = {"links": ("beta",), "latency": ("alpha", "sync"), "processors": ("message", "copy", "gamma")}


#: The terms that a bench of one node tells.
_WITHIN = ("sync", "copy", "gamma", "message")
#: Formats in which gradients may travel between nodes, and elements on which their size is measured.
WIRES = tuple(CODECS)
_CODED = 1 << 20


def parse_memory_rate(text: str) -> float:
    """Read a rate of memory, in bytes per second."""
    return parse_rate(text, of_link=False)


@dataclass(frozen=True)
class Rates:
    """Rates and times of the parts of a cluster: seconds, and bytes per second.

    Attributes:
        rate: of a node's link, in each direction.
        latency_s: from the start of an empty message between nodes to its arrival.
        message_s: of a processor, for each message that it sends or receives.
        barrier_s: of the ranks of a node.
        memory_rate: at which a rank reads and writes the memory of others of its node.
        reduction_rate: at which a rank reduces.
        within_s: the latency of messages inside a node.
        burst_nbytes: what a link lets through at once after a rest.
        wire: the format in which gradients travel between nodes; None: as they are.
    """

    rate: float = 100e9 / 8
    latency_s: float = option("--latency", parse_seconds, 2e-6, "Until an empty message arrives.", unset="2us")
    message_s: float = option(
        "--message", parse_seconds, 5e-6, "Of a processor, for one sent or received.", unset="5us"
    )
    barrier_s: float = option("--barrier", parse_seconds, 5e-6, "Of the ranks of a node.", unset="5us")
    memory_rate: float = option("--memory", parse_memory_rate, 8e9, "Of access to other ranks' memory.", unset="8GB/s")
    reduction_rate: float = option("--reduction", parse_memory_rate, 10e9, "At which a rank reduces.", unset="10GB/s")
    within_s: float = option("--within", parse_seconds, 1e-6, "Latency of messages inside a node.", unset="1us")
    burst_nbytes: int = option("--burst", parse_nbytes, 0, "What a link lets through at once after a rest.")
    wire: str | None = option("--wire", OneOf(WIRES), None, "Format of gradients between nodes.")

    def links(self) -> Links:
        """Return the terms of the model."""
        copy = 1 / self.memory_rate
        between = CostModel(
            self.latency_s,
            1 / self.rate,
            sync=self.barrier_s,
            copy=copy,
            gamma=1 / self.reduction_rate,
            message=self.message_s,
        )
        wire = CODECS[self.wire].nbytes(_CODED) / (4 * _CODED) if self.wire else 1.0
        return Links(between, self.within_s, copy, burst=float(self.burst_nbytes), wire=wire)


@dataclass(frozen=True)
class Cluster:
    """Ranks, links, and who comes late.

    Attributes:
        topology: the ranks.
        links: between them.
        late: rank -> seconds by which it begins each call, or ends the computation of each step, after the others.
        noise_s: mean of a delay of every rank, exponential and another one each time.
    """

    topology: Topology
    links: Links
    late: Mapping[int, float] = field(default_factory=dict)
    noise_s: float = 0.0

    def __post_init__(self) -> None:
        if beyond := [rank for rank in self.late if not 0 <= rank < self.topology.size]:
            raise ConfigError(f"rank {beyond[0]} is late, and the last one is {self.topology.size - 1}")
        if beyond := [node for node in self.links.slow if not 0 <= node < len(self.topology.nodes)]:
            raise ConfigError(f"node {beyond[0]} is slow, and the last one is {len(self.topology.nodes) - 1}")

    def delays(self, random: np.random.Generator) -> Floats:
        """Return by how many seconds each rank is late, by its place along the nodes."""
        delays = random.exponential(self.noise_s, self.topology.size) if self.noise_s else np.zeros(self.topology.size)
        for rank, late_s in self.late.items():
            delays[self.topology.place_of(rank)] += late_s
        return delays


class Simulator:
    """Allreduces on a cluster.

    Attributes:
        left_out: algorithm -> why it cannot be simulated there.

    Args:
        cluster: the ranks.
        algorithms: which; None: all that run there.
    """

    def __init__(self, cluster: Cluster, algorithms: Iterable[str] | None = None) -> None:
        self.cluster = cluster
        self.left_out = dict[str, str]()
        self._traffic: dict[str, Traffic] = {}
        self._known: dict[int, dict[str, float]] = {}
        differ = bool(cluster.late or cluster.noise_s or cluster.links.slow)  # nodes, in what they do when
        for name in names(Collective.ALLREDUCE, cluster.topology) if algorithms is None else algorithms:
            try:
                self._traffic[name] = _traffic(name, cluster.topology, differ)
            except ConfigError as error:
                self.left_out[name] = str(error)
        if not self._traffic:
            raise ConfigError(f"nothing can be simulated there: {self.left_out}")
        self._delays = cluster.delays(np.random.default_rng(0))

    def times(self, nbytes: int) -> dict[str, float]:
        """Return algorithm -> seconds from when a rank without delay begins until the last rank ends, fastest first."""
        if nbytes not in self._known:
            found = {name: self._time(name, nbytes, self.cluster.links) for name in self._traffic}
            self._known[nbytes] = dict(sorted(found.items(), key=lambda each: each[1]))
        return self._known[nbytes]

    def explain(self, nbytes: int) -> str:
        """Say which algorithm is the fastest, what its time goes into, which is next, and what the rules would take."""
        (name, seconds), *others = self.times(nbytes).items()
        shares = self._shares(name, nbytes, seconds)
        said = ", ".join(f"{cause} {share:.0%}" for cause, share in shares.items() if share >= 0.005)
        text = f"{name} {format_seconds(seconds)}" + (f" ({said})" if said else "")
        slower = {other: f" {each / seconds - 1:+.0%}" if seconds else "" for other, each in others}
        text += f"; next {others[0][0]}{slower[others[0][0]]}" if others else ""
        rule = choose(Problem(Collective.ALLREDUCE, nbytes, self.cluster.topology, op=SUM), Config()).algorithm
        return text if rule == name else f"{text}; the built-in rules take {rule}{slower.get(rule, '')}"

    def _time(self, name: str, nbytes: int, links: Links) -> float:
        topology = self.cluster.topology
        traffic = self._traffic[name]
        delays = self._delays if len(traffic.nodes) == topology.size else np.zeros(len(traffic.nodes))
        if path_for(name, Problem(Collective.ALLREDUCE, nbytes, topology)) is Path.ONE_SHOT:
            model = replace(links.between, alpha=links.alpha, beta=links.beta)
            return float(delays.max()) + model.predict(name, nbytes, topology)
        return float(ends_of(traffic, nbytes, links=links, starts=delays).max())

    def _shares(self, name: str, nbytes: int, seconds: float) -> dict[str, float]:
        """Return what would be saved without each cause, as a share of all that would be saved."""
        links = self.cluster.links
        saved = {}
        for cause, terms in _CAUSES.items():
            between = replace(links.between, **dict.fromkeys(terms, 0.0))
            alpha = 0.0 if "alpha" in terms else links.alpha
            beta = 0.0 if "copy" in terms else links.beta
            without = replace(links, between=between, alpha=alpha, beta=beta)
            saved[cause] = max(0.0, seconds - self._time(name, nbytes, without))
        total = sum(saved.values())
        return {cause: each / total for cause, each in saved.items()} if total else {}


@lru_cache(maxsize=16)  # of many ranks, each takes up to some hundred MB
def _traffic(name: str, topology: Topology, whole: bool) -> Traffic:
    return traffic_of(find(Collective.ALLREDUCE, name), topology, whole=whole)


# ---- what a cluster is made of, from what `bench` has measured ----


def topology_of(sizes: Iterable[int]) -> Topology:
    """Return nodes of so many consecutive ranks."""
    return Topology.from_hosts(node for node, ranks in enumerate(sizes) for _ in range(ranks))


def links_of(reports: Iterable[str], otherwise: Links) -> Links:
    """Return links from JSON reports of ``bench allreduce --algorithm all``.

    What nodes and links between them take comes from reports of several nodes, what messages inside a node take from
    reports of one.

    Args:
        reports: the texts of the files.
        otherwise: the links, where there is no report of that kind.

    Raises:
        ConfigError: a text is no such report, or holds nothing to fit.
    """
    samples = [each for text in reports for each in samples_of(text)]
    kinds = ([each for each in samples if each.topology.single_node is single] for single in (True, False))
    one, several = (fit(kind) if kind else None for kind in kinds)
    between = otherwise.between
    alpha, beta = (one.alpha, one.beta) if one else (otherwise.alpha, otherwise.beta)
    for found, terms in ((one, _WITHIN), (several, ("alpha", "beta", *_WITHIN))):
        # What no measured algorithm does keeps its value.
        between = replace(between, **{term: value for term in terms if (value := getattr(found, term, 0.0)) > 0})
    return replace(otherwise, between=between, alpha=alpha, beta=beta)


def samples_of(text: str) -> list[Sample]:
    """Return the times of our allreduces in a JSON report of ``bench``.

    Raises:
        ConfigError: it is none.
    """
    try:
        report = json.loads(text)
        topology = _placed(report["config"])
        return [
            Sample(
                each["algorithm"], int(each["size"]), topology=topology, seconds=float(each["time_us"]["median"]) * 1e-6
            )
            for each in report["results"]
            if each["collective"] == "allreduce" and is_ours(each["algorithm"]) and float(each["time_us"]["median"]) > 0
        ]
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"not a JSON report of bench: {type(error).__name__}: {error}") from None


def _placed(config: Mapping[str, Any]) -> Topology:
    """Return where the ranks of a report were."""
    nranks = int(config["nranks"])
    nnodes = int(config["nnodes"])
    uneven = [int(each) for each in re.findall(r"\d+", config["placement"].partition("nodes of")[2])]
    sizes = uneven or [nranks // nnodes] * nnodes
    if len(sizes) != nnodes or sum(sizes) != nranks:
        raise ValueError(f"{nranks} ranks on {nnodes} nodes, of which it says {config['placement']!r}")
    return topology_of(sizes)


def describe(links: Links) -> str:
    """Say what a cluster is made of, in one line."""
    between = links.between
    parts = [f"links {8e-9 / between.beta:.4g} Gbit/s"] if between.beta else []
    rates = {"memory": between.copy, "reduction": between.gamma}
    parts += [f"{what} {1e-9 / each:.4g} GB/s" for what, each in rates.items() if each]
    seconds = {"latency": between.alpha, "message": between.message, "barrier": between.sync, "within": links.alpha}
    parts += [f"{what} {format_seconds(each)}" for what, each in seconds.items()]
    parts += [f"link of node {node} {factor:.3g} times slower" for node, factor in links.slow.items()]
    parts += [f"{links.wire:.3g} bytes sent between nodes for each"] if links.wire != 1 else []
    return ", ".join(parts)
