"""Simulated times against those that are written down and closed forms; and the command ``simulate``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ringreduce.algorithms import Algorithm, Collective, find, names
from ringreduce.cli.simulate import command
from ringreduce.collectives.choice.tuning import CostModel
from ringreduce.common.errors import ConfigError
from ringreduce.common.topology import Topology
from ringreduce.simulate.clock import Links, ends_of
from ringreduce.simulate.cluster import Cluster, Simulator, links_of, topology_of
from ringreduce.simulate.report import scaling, simulate
from ringreduce.simulate.rounds import Lines
from ringreduce.simulate.step_times import SimulatedTraining, simulate_step
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


@pytest.mark.parametrize("topology", [*(Topology.uniform(*each) for each in SHAPES), *UNEVEN], ids=Topology.describe)
def test_symmetric_is_written_down(topology: Topology):
    """A schedule that is moved from rank to rank gives each rank the time that all its generated steps give.

    Nodes may be of several sizes, in any order.
    """
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


FOUR = Cluster(Topology.uniform(4, 1), LINKS)


def run(*arguments: str) -> str:
    """Return what the command prints."""
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code == 0, found.output
    return found.stdout


def refusal(*arguments: str) -> str:
    """Return why the command refuses arguments."""
    found = CliRunner().invoke(command, arguments)
    assert found.exit_code != 0
    return found.output if isinstance(found.exception, SystemExit) else str(found.exception)


def report(topology: Topology, model: CostModel) -> str:
    """Return the report of a bench whose times a model has made."""
    algorithms = names(Collective.ALLREDUCE, topology)
    results = [
        {
            "collective": "allreduce",
            "algorithm": name,
            "size": nbytes,
            "time_us": {"median": 1e6 * model.predict(name, nbytes, topology)},
        }
        for name in algorithms
        for nbytes in (8, 1 << 14, 1 << 20)
    ]
    config = {"nranks": topology.size, "nnodes": len(topology.nodes), "placement": topology.describe()}
    return json.dumps({"config": config, "results": [*results, {**results[0], "algorithm": "mpi"}]})


# ---- the cluster ----


def test_the_fastest_comes_first_and_its_reason_with_it():
    """The text names the fastest, shares that add up, the next one, and what the built-in rules take instead."""
    simulator = Simulator(FOUR)
    times = simulator.times(8)
    assert list(times.values()) == sorted(times.values())
    assert set(times) == set(names(Collective.ALLREDUCE, FOUR.topology))
    said = simulator.explain(8)
    assert said.startswith(next(iter(times)))
    assert f"next {list(times)[1]} +" in said


def test_a_small_allreduce_on_one_node_is_that_of_the_model():
    """It takes one barrier and the mailboxes of the others."""
    simulator = Simulator(Cluster(Topology.uniform(1, 4), LINKS), ["one_shot"])
    assert simulator.times(1000)["one_shot"] == pytest.approx(MODEL.predict("one_shot", 1000, Topology.uniform(1, 4)))


def test_reports_give_links():
    """Several nodes give the terms of nodes and links; one node, those of messages inside."""
    inner = replace(MODEL, alpha=7e-7, beta=3e-10)
    texts = [report(Topology.uniform(2, 4), MODEL), report(Topology.uniform(1, 4), inner)]
    found = links_of(texts, Links(CostModel(1, 1, 1, 1, 1, 1), 1, 1))
    for term in ("alpha", "beta", "sync", "copy", "gamma", "message"):
        assert getattr(found.between, term) == pytest.approx(getattr(MODEL, term), rel=1e-5), term
    assert (found.alpha, found.beta) == pytest.approx((7e-7, 3e-10), rel=1e-5)
    uneven = links_of([report(topology_of([3, 2, 4]), MODEL)], LINKS)
    assert uneven.between.beta == pytest.approx(MODEL.beta, rel=1e-5)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"config": {}}', '{"config": {"nranks": 2, "nnodes": 0}}'])
def test_what_is_no_report_is_refused(text: str):
    """In one line that says so, whatever is in the file."""
    with pytest.raises(ConfigError, match="not a JSON report of bench"):
        links_of([text], LINKS)


def test_ranks_and_nodes_must_be_there():
    """Late ranks and slow nodes beyond the last one are errors."""
    with pytest.raises(ConfigError, match="rank 4 is late, and the last one is 3"):
        replace(FOUR, late={4: 1.0})
    with pytest.raises(ConfigError, match="node 9 is slow, and the last one is 3"):
        replace(FOUR, links=replace(LINKS, slow={9: 2.0}))


def test_what_cannot_be_simulated_is_left_out():
    """And named; if nothing remains, that is an error."""
    simulator = Simulator(FOUR, ["ring", "two_shot", "rnig"])
    assert list(simulator.left_out) == ["two_shot", "rnig"]
    assert "all ranks must share one node" in simulator.left_out["two_shot"]
    with pytest.raises(ConfigError, match="nothing can be simulated there"):
        Simulator(FOUR, ["nothing"])


# ---- a training step ----


def exchange(nbytes: int) -> float:
    """Return the seconds of an exchange that is 1 ms, and 1 ns for each byte."""
    return 1e-3 + 1e-9 * nbytes


STEP = SimulatedTraining(compute_s=0.03, nbytes=8_000_000, update_s=0.002)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (STEP, 0.03 + 0.009 + 0.002),
        (replace(STEP, period=10), 0.032 + 0.009 / 10),
        (replace(STEP, staleness=1), 0.032),
        # The exchange of 49 ms is what a step takes, as it runs beside the next one and is longer.
        (replace(STEP, nbytes=48_000_000, staleness=1), 0.049),
        # Two buckets: the first is complete 10 ms before the end and takes 5 ms, the second begins at the end.
        (replace(STEP, overlap=True, bucket_nbytes=4_000_000), 0.032 + 0.005),
    ],
    ids=["synchronous", "period", "stale", "stale and long", "overlap"],
)
def test_a_step_of_ranks_that_are_never_late(training: SimulatedTraining, expected: float):
    """Computation, exchange and update add up, but for what overlaps."""
    found = simulate_step(training, FOUR, exchange)
    assert found.seconds == pytest.approx(expected)
    assert found.own_s == pytest.approx(0.032)
    assert found.efficiency == pytest.approx(0.032 / expected)


def test_shares_of_a_node_divide_the_update():
    """Each of 4 ranks of a node steps on a quarter of the parameters."""
    found = simulate_step(replace(STEP, shard=True), Cluster(Topology.uniform(2, 4), LINKS), exchange)
    assert found.seconds == pytest.approx(0.03 + 0.009 + 0.002 / 4)


@pytest.mark.parametrize("how", [{}, {"period": 20}, {"staleness": 4}])
def test_a_rank_that_is_always_late_holds_up_every_step(how: dict[str, Any]):
    """Neither a period nor staleness helps against it."""
    late = replace(FOUR, late={2: 0.03})
    before, after = (simulate_step(replace(STEP, **how), each, lambda nbytes: 0.0) for each in (FOUR, late))
    assert after.seconds == pytest.approx(before.seconds + 0.03)


def test_a_period_evens_out_noise():
    """Of exponential delays with mean m, the synchronous step waits for the largest: m (1 + 1/2 + 1/3 + 1/4) on 4."""
    noisy = replace(FOUR, noise_s=0.01)
    synchronous, rare = (simulate_step(replace(STEP, period=each), noisy, lambda nbytes: 0.0) for each in (1, 50))
    mean = 0.01 * sum(1 / each for each in range(1, 5))
    assert synchronous.seconds - 0.032 == pytest.approx(mean, rel=0.5)
    assert 0.042 <= rare.seconds < synchronous.seconds


# ---- the command ----


def test_the_table_has_a_line_for_each_algorithm_and_size():
    """And begins with what it assumes."""
    text = run("--nodes", "8", "--ranks-per-node", "2", "--link", "10gbit", "-b", "8", "-e", "1M", "-f", "64")
    assert text.startswith("# 16 ranks on 8 nodes x 2; links 10 Gbit/s, memory 8 GB/s")
    for name in names(Collective.ALLREDUCE, Topology.uniform(8, 2)):
        assert f"\n  {name} " in text
    assert "\n       8 B  " in text
    assert "\n     1 MiB  " in text


def test_what_takes_no_time_is_simulated_too():
    """One rank alone, and a cluster that is perfect but for its rates."""
    assert "efficiency 100.0%" in run("-e", "64", "--nodes", "1", "--compute", "1ms", "--gradients", "1M")
    assert "ring" in run("--nodes", "2", "-e", "64", "--latency", "0s", "--message", "0s", "--barrier", "0s")


def test_json_has_it_all():
    """Sizes with the times of all algorithms, the training, and the steps on more and more ranks."""
    arguments = ["--nodes", "4", "--ranks-per-node", "2", "--link", "10gbit", "--link", "100gbit", "-e", "64"]
    arguments += ["--compute", "30ms", "--gradients", "8M", "--scaling", "--late", "1:1ms", "--wire", "int8", "--json"]
    found = json.loads(run(*arguments))
    assert [each["size"] for each in found["sizes"]] == [8, 64]
    assert found["late"] == {"1": 1e-3}
    assert found["links"]["wire"] == pytest.approx(0.25, rel=0.1)
    assert found["step"]["own_s"] == 0.03
    assert [each["ranks"] for each in found["scaling"]] == [1, 2, 4, 8] * 2
    slow, fast = ([each["seconds"] for each in found["scaling"] if each["rate"] == rate] for rate in (1.25e9, 1.25e10))
    assert slow == sorted(slow)
    assert all(np.array(fast) <= np.array(slow))


def test_nodes_may_be_uneven_and_links_slow():
    """A slow link of one node makes every allreduce of all slower."""
    options = ["--nodes", "3", "--ranks-per-node", "2,2,1", "-b", "1M", "-e", "1M", "--json"]
    usual, slow = (json.loads(run(*options, *more))["sizes"][0] for more in ([], ["--slow-link", "2:1gbit"]))
    assert all(slow["seconds"][name] > seconds for name, seconds in usual["seconds"].items())


def test_a_picture_is_written(tmp_path: Path):
    """With what it assumes in it."""
    pytest.importorskip("matplotlib")
    path = tmp_path / "times.svg"
    run("--nodes", "4", "-e", "64", "--compute", "1ms", "--gradients", "1M", "--scaling", "--plot", str(path))
    assert path.read_text().startswith("<?xml")


def test_parameters_come_from_a_report(tmp_path: Path):
    """And take the place of what is usual."""
    path = tmp_path / "bench.json"
    path.write_text(report(Topology.uniform(2, 2), MODEL))
    found = json.loads(run("--nodes", "4", "-e", "8", "--from", str(path), "--json"))
    assert found["links"]["between"]["alpha"] == pytest.approx(MODEL.alpha, rel=1e-5)


@pytest.mark.parametrize(
    ("option", "value", "where", "expected"),
    [
        ("--link", "10gbit", ("between", "beta"), 8e-10),
        ("--latency", "7us", ("between", "alpha"), 7e-6),
        ("--latency", "2us", ("between", "alpha"), 2e-6),
        ("--message", "3us", ("between", "message"), 3e-6),
        ("--barrier", "4us", ("between", "sync"), 4e-6),
        ("--memory", "4GB", ("between", "copy"), 2.5e-10),
        ("--memory", "4GB", ("beta",), 2.5e-10),
        ("--reduction", "5GB", ("between", "gamma"), 2e-10),
        ("--within", "9us", ("alpha",), 9e-6),
    ],
)
def test_options_take_the_place_of_what_a_report_says(
    tmp_path: Path, option: str, value: str, where: tuple[str, ...], expected: float
) -> None:
    """Also those that say what is usual; nothing else changes but for the rate of memory, which is two terms."""
    paths = [tmp_path / "one.json", tmp_path / "two.json"]
    for nodes, path in enumerate(paths, 1):
        model = CostModel(alpha=3e-6, beta=3e-11, sync=3e-6, copy=3e-10, gamma=3e-10, message=6e-7)
        path.write_text(report(Topology.uniform(nodes, 4), model))
    options = ["--nodes", "4", "-e", "8", "--json", *(word for path in paths for word in ("--from", str(path)))]

    def terms(*more: str) -> dict[tuple[str, ...], float]:
        links = json.loads(run(*options, *more))["links"]
        between = {("between", name): value for name, value in links["between"].items()}
        return between | {(name,): links[name] for name in ("alpha", "beta")}

    before, after = terms(), terms(option, value)
    assert after[where] == pytest.approx(expected)
    assert before[where] != pytest.approx(expected)
    assert [name for name in before if before[name] != after[name]] in ([where], [("between", "copy"), ("beta",)])


def test_growing_clusters_have_the_links_of_a_report(tmp_path: Path):
    path = tmp_path / "bench.json"
    path.write_text(report(Topology.uniform(2, 2), MODEL))
    training = "--compute", "1ms", "--gradients", "8M", "--scaling"
    found = json.loads(run("--nodes", "4", "-e", "8", "--from", str(path), *training, "--json"))
    assert found["scaling"][0]["rate"] == pytest.approx(1 / found["links"]["between"]["beta"])
    assert found["scaling"][-1]["seconds"] == pytest.approx(found["step"]["seconds"])


def test_wire_formats_have_an_algorithm_of_their_own():
    found = json.loads(run("--nodes", "4", "--ranks-per-node", "2", "-e", "8", "--wire", "int8", "--json"))
    assert {name for each in found["sizes"] for name in each["seconds"]} == {"hierarchical_direct"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--link", "fast"], "expected a rate"),
        (["--latency", "2"], "expected a time"),
        (["--late", "3"], "expected a number, a colon and a value"),
        (["--ranks-per-node", "2,x"], "expected ranks per node"),
        (["--nodes", "3", "--ranks-per-node", "2,2"], "has 2 counts, for 3 nodes"),
        (["--compute", "1ms"], "both --compute and --gradients"),
        (["--scaling"], "give --compute and --gradients"),
        (["--compute", "1ms", "--gradients", "8", "--scaling", "--ranks-per-node", "2,1"], "nodes of equal size"),
        (["--link", "1gbit", "--link", "2gbit"], "several --link are for --scaling"),
        (["--compute", "1ms", "--gradients", "8", "--scaling", "--slow-link", "1:1gbit"], "on equal links"),
        (["-b", "1M", "-e", "8"], "--maxbytes is smaller"),
        (["--nodes", "2", "--late", "2:1ms"], "rank 2 is late"),
        (["--algorithm", "rnig"], "unknown allreduce algorithm 'rnig'"),
    ],
)
def test_wrong_use_is_refused(arguments: list[str], complaint: str):
    """With what is wrong, and what was expected."""
    assert complaint in refusal(*arguments)


def test_progress_is_told():
    """After each size, and after each number of ranks for each rate of links."""
    sizes, ranks = [], []
    training = SimulatedTraining(compute_s=0.01, nbytes=1 << 10)
    report = simulate(FOUR, [8, 16, 24], ["ring"], training, lambda done, total: sizes.append((done, total)))
    scaling(report, [1e9, 1e10], ["ring"], lambda done, total: ranks.append((done, total)))
    assert sizes == [(1, 4), (2, 4), (3, 4)]
    assert ranks == [(done, 6) for done in range(1, 7)]
