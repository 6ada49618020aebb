"""Simulated times: of symmetric schedules against those that are written down, and against closed forms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ringreduce.algorithms import Algorithm, Collective, find, names
from ringreduce.collectives.choice.tuning import CostModel
from ringreduce.common.errors import ConfigError
from ringreduce.common.topology import Topology
from ringreduce.simulate.clock import Links, ends_of
from ringreduce.simulate.rounds import Lines
from ringreduce.simulate.traffic import traffic_of

MODEL = CostModel(alpha=2e-6, beta=2e-11, sync=2e-6, copy=1e-10, gamma=2e-10, message=5e-7)
LINKS = Links(MODEL, alpha=1e-6, beta=1.25e-10)
SHAPES = [(4, 1), (8, 1), (6, 1), (4, 2), (8, 4), (2, 8), (3, 4), (5, 3)]
UNEVEN = [Topology.from_hosts("aabbbc"), Topology.from_hosts("abcabcab"), Topology.from_hosts("aaab")]
SIZES = (0, 8, 60_000, 1 << 22, 100_000_007)

rng = np.random.default_rng


def allreduces(topology: Topology) -> list[Algorithm]:
    """Return all algorithms that run there."""
    return [find(Collective.ALLREDUCE, name) for name in names(Collective.ALLREDUCE, topology)]


def times(algorithm: Algorithm, topology: Topology, nbytes: int, links: Links, **how: bool) -> np.ndarray:
    """Return when each rank ends that begins at a time of its own."""
    traffic = traffic_of(algorithm, topology, **how)
    starts = rng(nbytes).exponential(1e-4, topology.size) if how.get("whole", True) else np.zeros(len(traffic.nodes))
    return ends_of(traffic, nbytes, links, starts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_symmetric_is_written_down(shape: tuple[int, int]):
    """A schedule that is moved from rank to rank gives each rank the time that all its generated steps give."""
    topology = Topology.uniform(*shape)
    for algorithm in allreduces(topology):
        for nbytes in SIZES:
            there = times(algorithm, topology, nbytes, LINKS, written_down=True)
            assert times(algorithm, topology, nbytes, LINKS) == pytest.approx(there, rel=1e-9), algorithm.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_node_stands_for_all(shape: tuple[int, int]):
    """Where all begin at the same time, the ranks of one node have the times of those of all nodes."""
    topology = Topology.uniform(*shape)
    for algorithm in allreduces(topology):
        whole, part = traffic_of(algorithm, topology, written_down=True), traffic_of(algorithm, topology, whole=False)
        for nbytes in SIZES:
            there = ends_of(whole, nbytes, LINKS, np.zeros(topology.size))
            here = ends_of(part, nbytes, LINKS, np.zeros(len(part.nodes)))
            assert np.tile(here, topology.size // len(here)) == pytest.approx(there, rel=1e-9), algorithm.name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_traffic_is_what_algorithms_state(shape: tuple[int, int]):
    """The busiest rank sends and touches as many bytes as the cost of the algorithm says, in as many rounds."""
    topology = Topology.uniform(*shape)
    for algorithm in allreduces(topology):
        cost, traffic = algorithm.cost(topology), traffic_of(algorithm, topology)
        sent, touched = np.zeros(topology.size), np.zeros(topology.size)
        for each, often in traffic.rounds:
            np.add.at(sent, each.started.source, each.started.nblocks * often / traffic.nblocks)
            touched += each.touched * often / traffic.nblocks
        assert (sent.max(), touched.max()) == pytest.approx((cost.sent, cost.touched)), algorithm.name
        assert sum(often for _, often in traffic.rounds) == cost.steps, algorithm.name


@pytest.mark.parametrize("name", ["ring", "hierarchical", "hierarchical_halving", "direct", "recursive_doubling"])
def test_long_schedules_are_recognised(name: str):
    """Of these, one node is enough, whatever the number of ranks; and few rounds differ."""
    topology = Topology.uniform(16, 4)
    traffic = traffic_of(find(Collective.ALLREDUCE, name), topology, whole=False)
    assert len(traffic.nodes) == 4
    assert len({id(each) for each, _ in traffic.rounds}) <= 12


@pytest.mark.parametrize("topology", UNEVEN, ids=Topology.describe)
def test_nodes_may_differ(topology: Topology):
    """On nodes of several sizes, in any order, times are those of the generated steps."""
    for algorithm in allreduces(topology):
        there = times(algorithm, topology, 1 << 20, LINKS, written_down=True)
        assert times(algorithm, topology, 1 << 20, LINKS) == pytest.approx(there, rel=1e-9), algorithm.name


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("nbytes", [8, 60_000])
def test_where_nothing_overlaps_it_is_the_model(name: str, nodes: int, nbytes: int):
    """One segment, one rank on each node, one message at a time: rounds, bytes and messages add up."""
    topology = Topology.uniform(nodes, 1)
    found = times(find(Collective.ALLREDUCE, name), topology, nbytes, LINKS, whole=False)
    assert found == pytest.approx(MODEL.predict(name, nbytes, topology), rel=1e-9)


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_doubling", "two_shot"])
def test_barriers_and_touched_bytes_are_those_of_the_model(name: str):
    """With messages that cost nothing, only what a node does by itself takes time."""
    topology = Topology.uniform(1 if name == "two_shot" else 4, 4)
    free = replace(MODEL, alpha=0.0, beta=0.0, message=0.0)
    found = times(find(Collective.ALLREDUCE, name), topology, 1 << 16, replace(LINKS, between=free), whole=False)
    assert found.max() == pytest.approx(free.predict(name, 1 << 16, topology), rel=1e-9)


def test_a_large_buffer_fills_the_link():
    """Its segments share the link out of a node, which each of P ranks fills with 2 n (P - 1) / P bytes."""
    only_rate = Links(CostModel(0, 1e-9, 0, 0, 0), 0, 0)
    for name in ("ring", "halving_doubling", "direct"):
        found = times(find(Collective.ALLREDUCE, name), Topology.uniform(8, 1), 1 << 27, only_rate, whole=False)
        assert found.max() == pytest.approx(2 * 7 / 8 * (1 << 27) * 1e-9, rel=0.02), name


def test_a_link_serves_in_the_order_of_readiness():
    """Each message begins when it is ready and the link is free; of several that are ready, the first in the list."""
    random = rng(3)
    links, ready, taking = random.integers(0, 3, 20), random.integers(0, 6, 20) / 1.0, random.integers(1, 4, 20) / 1.0
    free, expected, until = np.array([2.0, 0.0, 5.0]), np.zeros(20), [2.0, 0.0, 5.0]
    for message in sorted(range(20), key=lambda each: (ready[each], each)):
        until[links[message]] = max(until[links[message]], ready[message]) + taking[message]
        expected[message] = until[links[message]]
    assert Lines(links, np.arange(20)).serve(ready, taking, free) == pytest.approx(expected)
    assert free == pytest.approx(until)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2), (3, 4)], ids=str)
def test_nothing_gets_faster_by_what_costs_more(shape: tuple[int, int]):
    """Times grow, or stay, with each parameter, the size and the starts."""
    topology = Topology.uniform(*shape)
    dearer = [
        replace(LINKS, between=replace(MODEL, **{term: 1.7 * getattr(MODEL, term)}))
        for term in ("alpha", "beta", "sync", "copy", "gamma", "message")
    ]
    dearer += [replace(LINKS, alpha=3e-6), replace(LINKS, beta=1e-9), replace(LINKS, slow={1: 2.5})]
    for algorithm in allreduces(topology):
        traffic, starts = traffic_of(algorithm, topology), rng(5).exponential(1e-4, topology.size)
        sizes = [ends_of(traffic, nbytes, LINKS, starts).max() for nbytes in (8, 1 << 16, 1 << 20, 1 << 24)]
        assert sizes == sorted(sizes), algorithm.name
        for nbytes, before in ((8, sizes[0]), (1 << 20, sizes[2])):
            for links in dearer:
                assert ends_of(traffic, nbytes, links, starts).max() >= before * (1 - 1e-12), (algorithm.name, links)
            assert ends_of(traffic, nbytes, LINKS, starts + 1e-3).max() == pytest.approx(before + 1e-3)


def test_a_late_rank_holds_up_all():
    """No rank ends an allreduce before the last one has begun; those that wait for it end a little later."""
    topology = Topology.uniform(4, 2)
    starts = np.zeros(8)
    starts[5] = 1.0
    for algorithm in allreduces(topology):
        ends = ends_of(traffic_of(algorithm, topology), 1 << 10, LINKS, starts)
        assert 1.0 < ends.min() <= ends.max() < 1.001, algorithm.name


def test_what_is_too_large_is_refused():
    """A schedule without symmetry and with too many steps, and a round of too many messages, are no simulation."""
    long = Topology.from_hosts([0] * 3 + [1 + rank // 2 for rank in range(4000)])
    with pytest.raises(ConfigError, match="steps that are not symmetric"):
        traffic_of(find(Collective.ALLREDUCE, "hierarchical"), long)
    with pytest.raises(ConfigError, match="messages in a round"):
        traffic_of(find(Collective.ALLREDUCE, "direct"), Topology.uniform(4096, 1))


@pytest.mark.parametrize(("name", "rounds", "sent"), [("recursive_doubling", 14, 14.0), ("halving_doubling", 28, 2.0)])
def test_sixteen_thousand_ranks(name: str, rounds: int, sent: float):
    """In 14 or 28 rounds a rank sends the buffer 14 times or twice, and reduces it 14 times or once."""
    nbytes, topology = 1 << 16, Topology.uniform(1 << 14, 1)
    found = times(find(Collective.ALLREDUCE, name), topology, nbytes, LINKS, whole=False)
    reduced = 14.0 if name == "recursive_doubling" else 1.0
    expected = rounds * (MODEL.alpha + 2 * MODEL.message) + nbytes * (sent * MODEL.beta + reduced * MODEL.gamma)
    assert found == pytest.approx(expected, rel=1e-3)


def test_a_tree_of_sixteen_thousand_ranks_is_written_down():
    """All ranks are simulated, each of which has few steps; a message takes from the leaves to the root and back."""
    topology = Topology.uniform(2048, 8)
    found = times(find(Collective.ALLREDUCE, "double_tree"), topology, 8, LINKS, whole=False)
    assert len(found) == 1 << 14
    assert 2 * 11 * MODEL.alpha < found.max() < 2 * 14 * (MODEL.alpha + 6 * MODEL.message)
