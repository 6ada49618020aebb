"""Collectives as schedules: the table of algorithms and how to look one up.

One file per family; `schedule` says what a schedule is, `verify` proves one, `draw` shows one. An algorithm that is
entered in `ALGORITHMS` is proved, documented and offered to users by that alone.
"""

from __future__ import annotations

from functools import lru_cache

from ringreduce.algorithms import (
    double_tree,
    halving_doubling,
    hierarchical,
    pairs,
    recursive_doubling,
    ring,
    rooted,
    two_shot,
)
from ringreduce.algorithms.schedule import Algorithm, Collective, Cost, Schedule, Step, Transfer
from ringreduce.common.errors import ConfigError
from ringreduce.common.topology import Topology

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Collective",
    "Cost",
    "Schedule",
    "Step",
    "Transfer",
    "find",
    "names",
    "schedule_for",
]

ALGORITHMS: tuple[Algorithm, ...] = (
    pairs.ONE_SHOT,
    *two_shot.ALGORITHMS,
    recursive_doubling.ALLREDUCE,
    halving_doubling.ALLREDUCE,
    double_tree.ALLREDUCE,
    *pairs.ALGORITHMS,
    *ring.ALGORITHMS,
    *rooted.ALGORITHMS,
    *hierarchical.ALGORITHMS,
)


def find(collective: Collective, name: str) -> Algorithm:
    """Return the algorithm ``name`` of ``collective``.

    Raises:
        ConfigError: there is none of that name.
    """
    for algorithm in ALGORITHMS:
        if algorithm.collective is collective and algorithm.name == name:
            return algorithm
    raise ConfigError(f"unknown {collective.value} algorithm {name!r}; choose one of {', '.join(names(collective))}")


@lru_cache(maxsize=1024)
def names(collective: Collective, topology: Topology | None = None) -> tuple[str, ...]:
    """Return the names of the algorithms of ``collective``, with a ``topology`` only of those that run there."""
    return tuple(
        algorithm.name
        for algorithm in ALGORITHMS
        if algorithm.collective is collective and (topology is None or algorithm.refuses(topology) is None)
    )


@lru_cache(maxsize=1024)
def schedule_for(collective: Collective, name: str, rank: int, topology: Topology, root: int = 0) -> Schedule:
    """Return the schedule of ``rank``, from a cache where it was asked for before.

    Raises:
        ConfigError: there is no algorithm of that name, or it cannot run on this topology.
    """
    algorithm = find(collective, name)
    reason = algorithm.refuses(topology)
    if reason is not None:
        raise ConfigError(f"{collective.value} algorithm {name!r} cannot run here: {reason}")
    return algorithm.schedule(rank, topology, root)
