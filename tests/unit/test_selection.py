"""The choice of an algorithm: by size and topology, by name, and in words."""

from __future__ import annotations

import pytest

from ringreduce.algorithms import ALGORITHMS, Collective
from ringreduce.collectives import VENDOR, Choice, Problem
from ringreduce.collectives.choice import selection
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM
from ringreduce.common.topology import Topology

#: Where the rules change, bytes; docs and claims quote these.
ONE_SHOT, ONE_SHOT_OF_MANY, SMALL, TREE, HOP = 2 << 10, 32 << 10, 24 << 10, 48 << 10, 128 << 10

ONE, NODE, FLAT, THREE, GRID, UNEVEN, UNEVEN_THREE, MANY, MANY_LANES = (
    Topology.uniform(1, 1),
    Topology.uniform(1, 4),
    Topology.uniform(4, 1),
    Topology.uniform(3, 1),
    Topology.uniform(2, 4),
    Topology.from_hosts("aab"),
    Topology.from_hosts("aabcc"),
    Topology.uniform(17, 1),
    Topology.uniform(17, 2),
)
RULES = selection.RULES
TOPOLOGIES = [ONE, NODE, FLAT, THREE, GRID, UNEVEN, UNEVEN_THREE, MANY, MANY_LANES]


def call(
    topology: Topology, nbytes: int, collective: Collective = Collective.ALLREDUCE, *, vendor: bool = True
) -> Problem:
    """Return a call on float32, with an MPI library that takes everything or with none."""
    return Problem(collective, nbytes, topology, op=SUM, library=(lambda *_: True) if vendor else None)


def choose(topology: Topology, nbytes: int, collective: Collective = Collective.ALLREDUCE, **settings) -> Choice:
    vendor = settings.pop("vendor", True)
    return selection.choose(call(topology, nbytes, collective, vendor=vendor), Config(**settings))


@pytest.mark.parametrize(
    ("topology", "nbytes", "algorithm"),
    [
        (NODE, 64 << 10, "load"),
        (NODE, (64 << 10) + 1, "two_shot"),
        (FLAT, 3 * HOP, "binomial"),
        (FLAT, 3 * HOP + 1, "chain"),
        (GRID, 4 * HOP, "hierarchical_binomial"),
        (GRID, 4 * HOP + 1, "hierarchical_chain"),
        (UNEVEN, 2 * HOP, "binomial"),
    ],
)
def test_a_reduction_to_a_root_goes_by_size_and_topology(topology: Topology, nbytes: int, algorithm: str) -> None:
    """Between nodes it goes along trees and chains, unless terms must be added in the order of ranks."""
    assert choose(topology, nbytes, Collective.REDUCE).algorithm == algorithm
    if not topology.single_node:
        assert choose(topology, nbytes, Collective.REDUCE, deterministic=True).algorithm == "direct"


def all_choices() -> list[tuple[str, str] | None]:
    """Return what is chosen for all collectives on all kinds of topologies, around every limit; None: nothing."""
    found: list[tuple[str, str] | None] = []
    for topology in [*TOPOLOGIES, Topology.uniform(1, 2)]:
        for collective in Collective:
            limits = {rule.limit.of(topology) for rule in RULES if rule.limit is not None}
            for nbytes in sorted({0, *limits, *(limit + 1 for limit in limits)}):
                for deterministic in (False, True):
                    try:
                        choice = choose(topology, nbytes, collective, deterministic=deterministic)
                        found.append((choice.algorithm, choice.reason))
                    except (AssertionError, ConfigError):  # no rule, or an algorithm of other collectives
                        found.append(None)
    return found


@pytest.mark.parametrize("row", range(len(RULES)))
def test_each_rule_decides_something(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule applies to every problem; without any one row, some problem gets another choice or none."""
    before = all_choices()
    assert None not in before
    monkeypatch.setattr(selection, "RULES", (*RULES[:row], *RULES[row + 1 :]))
    selection._applicable.cache_clear()
    try:
        assert all_choices() != before
    finally:
        selection._applicable.cache_clear()


@pytest.mark.parametrize(
    ("topology", "nbytes", "algorithm", "transport"),
    [
        (ONE, 1 << 30, "one_shot", "self"),
        (NODE, 0, "one_shot", "shared"),
        (Topology.uniform(1, 2), ONE_SHOT, "one_shot", "shared"),
        (Topology.uniform(1, 2), ONE_SHOT + 1, "two_shot", "shared"),
        (NODE, ONE_SHOT_OF_MANY, "one_shot", "shared"),
        (NODE, ONE_SHOT_OF_MANY + 1, "two_shot", "shared"),
        (FLAT, SMALL, "recursive_doubling", "messages"),
        (FLAT, SMALL + 1, "halving_doubling", "messages"),
        (THREE, TREE, "double_tree", "messages"),
        (THREE, TREE + 1, "direct", "messages"),
        (MANY, TREE + 1, "ring", "messages"),
        (GRID, 8, "hierarchical_doubling", "shared+messages"),
        (GRID, 4 * SMALL, "hierarchical_doubling", "shared+messages"),
        (GRID, 4 * SMALL + 1, "hierarchical_halving", "shared+messages"),
        (UNEVEN, SMALL, "hierarchical_doubling", "shared+messages"),
        (UNEVEN, SMALL + 1, "hierarchical_halving", "shared+messages"),
        (UNEVEN_THREE, 1 << 20, "hierarchical_direct", "shared+messages"),
        (MANY_LANES, 1 << 20, "hierarchical", "shared+messages"),
    ],
)
def test_allreduce_goes_by_size_and_topology(topology: Topology, nbytes: int, algorithm: str, transport: str) -> None:
    """Each row of the rules holds, at its limits too, and gives a reason."""
    choice = choose(topology, nbytes)
    assert (choice.algorithm, choice.transport) == (algorithm, transport)
    assert choice.reason


@pytest.mark.parametrize(
    ("topology", "small", "large"), [(NODE, "load", "load"), (FLAT, "direct", "direct"), (GRID, "direct", "ring")]
)
def test_reduce_scatter_goes_by_size_and_topology(topology: Topology, small: str, large: str) -> None:
    """Where ranks of a node share its link, all send to all at once only what is small."""
    limit = 64 << 10
    assert choose(topology, limit, Collective.REDUCE_SCATTER).algorithm == small
    assert choose(topology, limit + 1, Collective.REDUCE_SCATTER).algorithm == large


@pytest.mark.parametrize("vendor", [True, False])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.describe)
@pytest.mark.parametrize("collective", Collective, ids=lambda each: each.value)
def test_what_is_chosen_can_run(collective: Collective, topology: Topology, vendor: bool) -> None:
    """Whatever the size, the choice is among the names that can run there."""
    possible = selection.names(collective, topology, vendor=vendor)
    for nbytes in (0, 1, 10_000, 100_000, 1 << 20, 1 << 32):
        assert choose(topology, nbytes, collective, vendor=vendor).algorithm in possible


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.describe)
@pytest.mark.parametrize("collective", Collective, ids=lambda each: each.value)
def test_every_possible_name_can_be_forced(collective: Collective, topology: Topology) -> None:
    """A name that is offered is taken, with a transport that suits the topology."""
    for name in selection.names(collective, topology, vendor=True):
        choice = selection.forced(call(topology, 1000, collective), name)
        assert choice.algorithm == name
        assert (choice.transport == "self") == (topology.size == 1)
        assert choice.transport != "shared" or topology.single_node


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.describe)
def test_every_other_name_is_refused_with_a_reason(topology: Topology) -> None:
    """An algorithm that cannot run on a topology is a ConfigError that says why; an unknown one lists the known."""
    for algorithm in ALGORITHMS:
        if algorithm.refuses(topology) is not None:
            with pytest.raises(ConfigError, match=r"cannot run here: .+"):
                selection.forced(call(topology, 1000, algorithm.collective), algorithm.name)
    with pytest.raises(ConfigError, match=r"unknown allreduce algorithm 'bogus'; choose one of one_shot, two_shot, .*"):
        selection.forced(call(topology, 1000), "bogus")


def test_the_librarys_own_takes_a_library() -> None:
    """The name of the MPI library's allreduce is offered and accepted only where there is one, and for nothing else."""
    assert VENDOR not in selection.names(Collective.ALLREDUCE, FLAT, vendor=False)
    assert VENDOR not in selection.names(Collective.BROADCAST, FLAT, vendor=True)
    with pytest.raises(ConfigError, match="talk over MPI"):
        selection.forced(call(FLAT, 1000, vendor=False), VENDOR)
    with pytest.raises(ConfigError, match="unknown broadcast algorithm 'mpi'"):
        selection.forced(call(FLAT, 1000, Collective.BROADCAST), VENDOR)


def test_the_configured_algorithm_is_used_wherever_it_can_run() -> None:
    """The setting rules allreduces of all sizes, yields to the rules where it cannot run, and must exist."""
    assert {choose(FLAT, nbytes, algorithm="double_tree").algorithm for nbytes in (8, 1 << 30)} == {"double_tree"}
    assert choose(FLAT, 1 << 30, algorithm="two_shot").algorithm == "halving_doubling"
    assert choose(FLAT, 8, algorithm=VENDOR, vendor=False).algorithm == "recursive_doubling"
    assert choose(FLAT, 8, Collective.BROADCAST, algorithm="double_tree").algorithm == "binomial"
    for topology in (NODE, FLAT):
        with pytest.raises(ConfigError, match="'bogus'"):
            choose(topology, 8, algorithm="bogus")


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=Topology.describe)
def test_explain_says_what_would_run_and_what_else_could(topology: Topology) -> None:
    """The text has the collective, bytes, topology, algorithm and reason, and all the other names."""
    choice = choose(topology, 1 << 20)
    text = selection.explain(call(topology, 1 << 20), Config())
    for part in ("allreduce of 1048576 bytes", topology.describe(), choice.algorithm, choice.reason):
        assert part in text
    for name in selection.names(Collective.ALLREDUCE, topology, vendor=True):
        assert name in text
