"""Which algorithm carries out a collective, and why. The same answer on every rank, from nothing that may differ.

The rules come from measurements (docs/benchmarks.md); a table that ``ringreduce tune`` made on the same machine takes
their place, where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.autotune import Table, through_mailboxes
from ringreduce.config import Config
from ringreduce.errors import ConfigError
from ringreduce.topology import Topology

__all__ = ["DETERMINISTIC", "NCCL", "VENDOR", "Choice", "choose", "explain", "forced", "names"]

#: The name that asks for sums in the order of ranks: the same bits from every algorithm that it stands for, so that
#: they depend neither on placement nor on size, fusion or segments.
DETERMINISTIC = "deterministic"

#: The name under which the MPI library's own allreduce is one more algorithm.
VENDOR = "mpi"

#: The name under which NCCL is one, for arrays in device memory.
NCCL = "nccl"

_MEASURED = "as the tuning table has it"

#: Up to this size one barrier with the data beside the flags beats two barriers without a copy: for two ranks, and for
#: more, whose barriers cost more.
_ONE_SHOT_NBYTES = 16 << 10
_ONE_SHOT_OF_MANY_NBYTES = 32 << 10
#: Between nodes, up to this size for each lane, the fewest rounds win: recursive doubling's, for 2^k nodes and wherever
#: nodes have several ranks; for other numbers of nodes with single ranks, those of a tree.
_DOUBLING_NBYTES = 24 << 10
_TREE_NBYTES = 48 << 10
#: An allreduce between nodes -> the same with lanes.
_HIERARCHICAL = {"halving_doubling": "hierarchical_halving", "direct": "hierarchical_direct", "ring": "hierarchical"}
#: So many nodes may send to one at once: switches have buffers for that, and everyone has messages for it.
_FEW_NODES = 16


@dataclass(frozen=True, slots=True)
class Choice:
    """An algorithm and the reason for it.

    Attributes:
        algorithm: a name from `names`; of arrays in device memory also `NCCL`, ``"kernels"``, ``"staged"``.
        transport: what moves the bytes: ``"shared"``, ``"shared+messages"``, ``"messages"`` or ``"self"``; those of
            device memory ``"device"``, ``"device+messages"``, ``"nccl"``, or ``"staged"``: through host memory.
        reason: why, in words.
    """

    algorithm: str
    transport: str
    reason: str


def names(collective: Collective, topology: Topology, *, vendor: bool) -> list[str]:
    """Return the algorithms that can run ``collective`` here.

    Args:
        collective: which.
        topology: on which ranks.
        vendor: whether the transport has an allreduce of its own.
    """
    ours = list(algorithms.names(collective, topology))
    return [*ours, VENDOR] if vendor and collective is Collective.ALLREDUCE else ours


def choose(
    collective: Collective, nbytes: int, topology: Topology, config: Config, *, vendor: bool, table: Table | None = None
) -> Choice:
    """Choose for a buffer of ``nbytes`` bytes on every rank.

    Args:
        collective: which.
        nbytes: of the buffer.
        topology: of the ranks.
        config: may name an algorithm.
        vendor: whether the transport has an allreduce of its own.
        table: what was measured on these ranks; the same on all of them.

    Raises:
        ConfigError: the configuration names an algorithm that does not exist.
    """
    if topology.size == 1:
        return Choice("one_shot" if collective is Collective.ALLREDUCE else "load", "self", "there is one rank")
    if config.deterministic and collective is Collective.ALLREDUCE:
        return _deterministic(nbytes, topology)
    if config.algorithm is not None and collective is Collective.ALLREDUCE:
        if config.algorithm in names(collective, topology, vendor=vendor):
            return forced(collective, config.algorithm, nbytes, topology, vendor=vendor)
        if config.algorithm not in (VENDOR, NCCL):
            algorithms.find(collective, config.algorithm)  # it may not run here, but it must exist
    if collective is not Collective.ALLREDUCE:
        return _choose_other(collective, topology)
    if table is not None and (measured := table.choose(nbytes).algorithm) in names(collective, topology, vendor=vendor):
        return replace(forced(collective, measured, nbytes, topology, vendor=vendor), reason=_MEASURED)
    if topology.single_node:
        return _choose_on_one_node(nbytes, topology)
    return _choose_between_nodes(nbytes, topology)


def forced(collective: Collective, name: str, nbytes: int, topology: Topology, *, vendor: bool) -> Choice:
    """Return the choice of an algorithm by name, for a buffer of ``nbytes`` bytes.

    Raises:
        ConfigError: it does not exist, or cannot run on this topology.
    """
    if name == DETERMINISTIC and collective is Collective.ALLREDUCE:
        return _deterministic(nbytes, topology)
    if name == VENDOR and collective is Collective.ALLREDUCE:
        if not vendor:
            raise ConfigError("algorithm 'mpi' takes ranks that talk over MPI")
        return Choice(VENDOR, "messages", "asked for by name")
    if name == NCCL and collective is Collective.ALLREDUCE:
        raise ConfigError("algorithm 'nccl' takes arrays in device memory")
    algorithm = algorithms.find(collective, name)
    if (why_not := algorithm.refuses(topology)) is not None:
        raise ConfigError(f"{collective.value} algorithm {name!r} cannot run here: {why_not}")
    transport = "messages"
    if topology.size == 1:
        transport = "self"
    elif through_mailboxes(name, nbytes, topology):
        transport = "shared"
    elif algorithm.cost(topology).touched:
        transport = "shared" if topology.single_node else "shared+messages"
    return Choice(name, transport, "asked for by name")


def _choose_on_one_node(nbytes: int, topology: Topology) -> Choice:
    limit = _ONE_SHOT_NBYTES if topology.size <= 2 else _ONE_SHOT_OF_MANY_NBYTES
    if nbytes <= limit:
        return Choice("one_shot", "shared", f"one node, at most {limit} bytes: one barrier")
    return Choice("two_shot", "shared", f"one node, over {limit} bytes: the least memory traffic")


def _choose_between_nodes(nbytes: int, topology: Topology) -> Choice:
    nodes = len(topology.nodes)
    if max(len(node) for node in topology.nodes) > 1:
        small = _DOUBLING_NBYTES * min(len(node) for node in topology.nodes)
        if nbytes <= small:
            return Choice(
                "hierarchical_doubling", "shared+messages", f"several nodes, at most {small} bytes: few rounds"
            )
        name, why = _fills_links(nodes)
        reason = f"several nodes, over {small} bytes: {why}, one lane per local rank"
        return Choice(_HIERARCHICAL[name], "shared+messages", reason)
    few_rounds, small = (
        ("double_tree", _TREE_NBYTES) if nodes & (nodes - 1) else ("recursive_doubling", _DOUBLING_NBYTES)
    )
    if nbytes <= small:
        return Choice(few_rounds, "messages", f"one rank per node, at most {small} bytes: few rounds")
    name, why = _fills_links(nodes)
    return Choice(name, "messages", f"one rank per node, over {small} bytes: {why}")


def _fills_links(nodes: int) -> tuple[str, str]:
    """Return the allreduce that keeps the links between so many nodes busy, and why."""
    if nodes & (nodes - 1) == 0:
        return "halving_doubling", "fills every link in the fewest rounds"
    if nodes <= _FEW_NODES:
        return "direct", f"at most {_FEW_NODES} nodes, two rounds fill every link"
    return "ring", "fills every link"


def _deterministic(nbytes: int, topology: Topology) -> Choice:
    """Choose among the algorithms in which one rank adds up all terms of an element, in the order of ranks."""
    if topology.size == 1:
        return Choice("one_shot", "self", "there is one rank")
    if topology.single_node:
        return _choose_on_one_node(nbytes, topology)
    return Choice("direct", "messages", "several nodes, deterministic: terms are added in the order of ranks")


def _choose_other(collective: Collective, topology: Topology) -> Choice:
    if topology.single_node:
        return Choice("load", "shared", "one node: every rank reads what it needs")
    name = {
        Collective.REDUCE_SCATTER: "ring",
        Collective.ALLGATHER: "ring",
        Collective.BROADCAST: "binomial",
        Collective.ALLTOALL: "pairwise",
    }[collective]
    return Choice(name, "messages", "several nodes")


def explain(
    collective: Collective, nbytes: int, topology: Topology, config: Config, *, vendor: bool, table: Table | None = None
) -> str:
    """Say what would run and why, and what else could; arguments as for `choose`."""
    choice = choose(collective, nbytes, topology, config, vendor=vendor, table=table)
    if table is not None and choice.reason == _MEASURED:
        choice = replace(choice, reason=table.explain(nbytes))
    others = [name for name in names(collective, topology, vendor=vendor) if name != choice.algorithm]
    return (
        f"{collective.value} of {nbytes} bytes on {topology.describe()}: {choice.algorithm} over {choice.transport} "
        f"({choice.reason}); also possible: {', '.join(others) or 'nothing else'}"
    )
