"""Collectives as schedules: the table of algorithms and how to look one up.

One file per family; `schedule` says what a schedule is, `verify` proves one, `draw` shows one. An algorithm that is
entered in `ALGORITHMS` is proved, documented and offered to users by that alone.
"""

from __future__ import annotations

from functools import lru_cache

from ringreduce.algorithms import (
    alltoall,
    broadcast,
    direct,
    double_tree,
    gather_scatter,
    halving_doubling,
    hierarchical,
    one_shot,
    recursive_doubling,
    reduce,
    ring,
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
    one_shot.ALLREDUCE,
    two_shot.ALLREDUCE,
    recursive_doubling.ALLREDUCE,
    halving_doubling.ALLREDUCE,
    double_tree.ALLREDUCE,
    direct.ALLREDUCE,
    ring.ALLREDUCE,
    hierarchical.ALLREDUCE,
    hierarchical.ALLREDUCE_DOUBLING,
    hierarchical.ALLREDUCE_HALVING,
    hierarchical.ALLREDUCE_DIRECT,
    two_shot.REDUCE_SCATTER,
    direct.REDUCE_SCATTER,
    ring.REDUCE_SCATTER,
    two_shot.ALLGATHER,
    direct.ALLGATHER,
    ring.ALLGATHER,
    two_shot.BROADCAST,
    broadcast.BINOMIAL,
    broadcast.CHAIN,
    two_shot.ALLTOALL,
    alltoall.DIRECT,
    alltoall.PAIRWISE,
    two_shot.REDUCE_BY_ROOT,
    two_shot.REDUCE,
    reduce.BINOMIAL,
    reduce.CHAIN,
    reduce.DIRECT,
    hierarchical.REDUCE_BINOMIAL,
    hierarchical.REDUCE_CHAIN,
    two_shot.GATHER,
    gather_scatter.GATHER_DIRECT,
    gather_scatter.GATHER_BINOMIAL,
    two_shot.SCATTER,
    gather_scatter.SCATTER_DIRECT,
    gather_scatter.SCATTER_BINOMIAL,
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
