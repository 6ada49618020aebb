"""Chooses the algorithm and the path for a problem, and says why: the same answer on every rank.

`RULES` is data: the first row that applies to a problem names its algorithm. The limits come from measurements
(docs/benchmarks.md); a table that ``ringreduce tune`` made on the same machine takes their place for allreduces. The
functions choose for any problem, `Chooser` for the calls of one process set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.buffers import DType
from ringreduce.collectives.call import DETERMINISTIC, NCCL, VENDOR, Choice, Path, Problem, is_in_library, path_for
from ringreduce.collectives.choice.tuning import Table
from ringreduce.collectives.context import Context
from ringreduce.collectives.operands import Devices, ordinal
from ringreduce.common.arguments import whole_number
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import SUM, ReduceOp
from ringreduce.common.topology import Topology

BY_NAME = "asked for by name"
_MEASURED = "as the tuning table has it"

_ALLREDUCE = frozenset({Collective.ALLREDUCE})
_REDUCE = frozenset({Collective.REDUCE})
_BROADCAST = frozenset({Collective.BROADCAST})
_ALLTOALL = frozenset({Collective.ALLTOALL})
_REDUCE_SCATTER = frozenset({Collective.REDUCE_SCATTER})
_PARTS = frozenset({Collective.GATHER, Collective.SCATTER})
_BLOCKS = frozenset({Collective.ALLGATHER, Collective.REDUCE_SCATTER})
_ALL = frozenset(Collective)

#: Up to so many nodes may send to one at once: switches can buffer that, and ranks can have as many messages under way.
_FEW_NODES = 16


class SizeLimit(NamedTuple):
    """The largest size that a rule takes.

    Attributes:
        nbytes: of it.
        per: what multiplies it: ``"call"``: nothing; ``"lane"``: the ranks of the smallest node; ``"hop"``: the ranks
            that send data on, which are all but one; ``"lane hop"``: the nodes but one, and the ranks of a node;
            ``"share"``: the number of ranks divides it.
    """

    nbytes: int
    per: str = "call"

    def of(self, topology: Topology) -> int:
        """Return the limit for these ranks, in bytes."""
        if self.per == "share":
            return self.nbytes // topology.size
        if self.per == "lane":
            return self.nbytes * topology.lanes
        if self.per == "hop":
            return self.nbytes * (topology.size - 1)
        if self.per == "lane hop":
            return self.nbytes * (len(topology.nodes) - 1) * topology.lanes
        return self.nbytes


class Rule(NamedTuple):
    """An algorithm, and the problems for which it is chosen.

    Attributes:
        collectives: which.
        where: conditions on the topology, all of which hold; see `_CONDITIONS`.
        algorithm: the name.
        reason: why; ``{up_to}`` and ``{over}`` are replaced by the limit, in words.
        limit: the largest size; None: any.
        in_order: whether one rank adds up all terms of an element, in the order of ranks. Deterministic allreduces and
            reductions are chosen among these rules alone.
    """

    collectives: frozenset[Collective]
    where: str
    algorithm: str
    reason: str
    limit: SizeLimit | None = None
    in_order: bool = False


_CONDITIONS: dict[str, Callable[[Topology], bool]] = {
    "alone": lambda topology: topology.size == 1,
    "node": lambda topology: topology.single_node,
    "two": lambda topology: topology.size <= 2,
    "lanes": lambda topology: max(len(node) for node in topology.nodes) > 1,
    "equal": lambda topology: topology.homogeneous,
    "power": lambda topology: len(topology.nodes) & (len(topology.nodes) - 1) == 0,
    "few": lambda topology: len(topology.nodes) <= _FEW_NODES,
    "single": lambda topology: len(topology.nodes) == topology.size,
}

#: What a call may name where results must be deterministic.
_IN_ORDER_BY_NAME = {Collective.ALLREDUCE: DETERMINISTIC, Collective.REDUCE: "direct"}
_IN_ORDER = "several nodes, deterministic: terms are added in the order of ranks"
_FEW_AT_ONCE = f"at most {_FEW_NODES} nodes, all at once"
_FILLS_HALVING = "fills every link in the fewest rounds"
_FILLS_DIRECT = f"at most {_FEW_NODES} nodes, two rounds fill every link"
_FILLS_RING = "fills every link"
_LANES = "several nodes, {over}: %s, one lane per local rank"
_SINGLE = "one rank per node, {over}: %s"

#: Up to this size one barrier, with a copy of the data beside the flags, is faster than two barriers without a copy:
#: for two ranks; and for more, whose barriers cost more.
_ONE_SHOT = SizeLimit(2 << 10)
_ONE_SHOT_OF_MANY = SizeLimit(32 << 10)
#: Up to so many bytes of all ranks together, the root reduces them in less time than a second barrier takes.
_READ_BY_ROOT = SizeLimit(256 << 10, "share")
#: Between nodes, up to this size for each lane, the fewest rounds are fastest: recursive doubling, for 2^k nodes and
#: where nodes have several ranks; a tree, for other numbers of nodes with one rank each.
_DOUBLING = SizeLimit(24 << 10)
_DOUBLING_IN_LANES = SizeLimit(24 << 10, "lane")
_TREE = SizeLimit(48 << 10)
#: Between nodes, more than this for each rank that sends data on goes along a chain.
_BINOMIAL = SizeLimit(128 << 10, "hop")
_BINOMIAL_IN_LANES = SizeLimit(128 << 10, "lane hop")
#: Between nodes of several ranks, in a reduce-scatter of up to this size all send to all at once.
_DIRECT = SizeLimit(64 << 10)

#: In columns: collectives, where, algorithm, reason, limit.
RULES: tuple[Rule, ...] = (
    Rule(_ALLREDUCE, "alone", "one_shot", "there is one rank", in_order=True),
    Rule(_ALL, "alone", "load", "there is one rank", in_order=True),
    Rule(_ALLREDUCE, "node two", "one_shot", "one node, {up_to}: one barrier", _ONE_SHOT, in_order=True),
    Rule(_ALLREDUCE, "node not-two", "one_shot", "one node, {up_to}: one barrier", _ONE_SHOT_OF_MANY, in_order=True),
    Rule(_ALLREDUCE, "node", "two_shot", "one node, {over}: the least memory traffic", in_order=True),
    Rule(_REDUCE, "node", "load", "one node, {up_to}: the root reads and reduces them", _READ_BY_ROOT, in_order=True),
    Rule(_REDUCE, "node", "two_shot", "one node, {over}: every rank reduces a part", in_order=True),
    Rule(_ALL, "node", "load", "one node: every rank reads what it needs"),
    Rule(_ALLREDUCE, "lanes", "hierarchical_doubling", "several nodes, {up_to}: few rounds", _DOUBLING_IN_LANES),
    Rule(_ALLREDUCE, "lanes power", "hierarchical_halving", _LANES % _FILLS_HALVING),
    Rule(_ALLREDUCE, "lanes few", "hierarchical_direct", _LANES % _FILLS_DIRECT),
    Rule(_ALLREDUCE, "lanes", "hierarchical", _LANES % _FILLS_RING),
    Rule(_ALLREDUCE, "power", "recursive_doubling", "one rank per node, {up_to}: few rounds", _DOUBLING),
    Rule(_ALLREDUCE, "not-power", "double_tree", "one rank per node, {up_to}: few rounds", _TREE),
    Rule(_ALLREDUCE, "power", "halving_doubling", _SINGLE % _FILLS_HALVING),
    Rule(_ALLREDUCE, "few", "direct", _SINGLE % _FILLS_DIRECT),
    Rule(_ALLREDUCE, "", "ring", _SINGLE % _FILLS_RING),
    Rule(_REDUCE, "equal lanes", "hierarchical_binomial", "several nodes, {up_to}: few rounds", _BINOMIAL_IN_LANES),
    Rule(_REDUCE, "equal lanes", "hierarchical_chain", "several nodes, {over}: fills every link"),
    Rule(_REDUCE | _BROADCAST, "", "binomial", "several nodes, {up_to}: few rounds", _BINOMIAL),
    Rule(_REDUCE | _BROADCAST, "", "chain", "several nodes, {over}: fills every link"),
    Rule(_PARTS | _ALLTOALL, "few", "direct", _FEW_AT_ONCE),
    Rule(_PARTS, "", "binomial", "many nodes: few rounds"),
    Rule(_ALLTOALL, "", "pairwise", "several nodes"),
    Rule(_BLOCKS, "few single", "direct", f"{_FEW_AT_ONCE}, one rank per node"),
    Rule(_REDUCE_SCATTER, "", "direct", "several nodes, {up_to}: one round", _DIRECT),
    Rule(_BLOCKS, "", "ring", "several nodes: each block crosses each link once"),
    Rule(_ALLREDUCE | _REDUCE, "", "direct", _IN_ORDER, in_order=True),
)


def names(collective: Collective, topology: Topology, *, vendor: bool) -> list[str]:
    """Return the algorithms that can run ``collective`` here.

    Args:
        collective: which.
        topology: on which ranks.
        vendor: whether the transport has an allreduce of its own.
    """
    ours = list(algorithms.names(collective, topology))
    return [*ours, VENDOR] if vendor and collective is Collective.ALLREDUCE else ours


def choose(problem: Problem, config: Config, algorithm: str | None = None, table: Table | None = None) -> Choice:
    """Choose algorithm and path for a problem.

    Args:
        problem: of the call.
        config: may name an algorithm.
        algorithm: what the call asks for; None or ``"auto"``: nothing.
        table: measured on these ranks; the same on all of them. None: there is none.

    Raises:
        ConfigError: there is no such algorithm, or it cannot run here.
    """
    reduces = problem.collective in (Collective.ALLREDUCE, Collective.REDUCE)
    in_order = config.deterministic and reduces
    if algorithm not in (None, "auto"):
        assert algorithm is not None
        if in_order and algorithm != _IN_ORDER_BY_NAME[problem.collective]:
            raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so algorithm={algorithm!r} cannot be asked for")
        if not (in_order and problem.collective is Collective.REDUCE and not problem.topology.single_node):
            return forced(problem, algorithm)
    if in_order or problem.collective is not Collective.ALLREDUCE or problem.topology.size == 1:
        return _ruled(problem, in_order=in_order)
    possible = names(problem.collective, problem.topology, vendor=problem.library is not None)
    if config.algorithm is not None:
        if config.algorithm in possible:
            return forced(problem, config.algorithm)
        if config.algorithm not in (VENDOR, NCCL):
            # Raises if there is none; it need not be able to run here.
            algorithms.find(problem.collective, config.algorithm)
    if table is not None and (measured := table.choose(_nbytes_reduced(problem)).algorithm) in possible:
        return _choice(problem, measured, _MEASURED)
    return _ruled(problem)


def with_times(choice: Choice, problem: Problem, table: Table | None) -> Choice:
    """Return a choice whose reason gives the times of the table, if it was made from ``table``."""
    if table is None or not choice.reason.startswith(_MEASURED):
        return choice
    times = table.explain(_nbytes_reduced(problem))
    return replace(choice, reason=times + choice.reason.removeprefix(_MEASURED))


def explain(problem: Problem, config: Config, table: Table | None = None) -> str:
    """Say what would run and why, and what else could; arguments as for `choose`."""
    choice = with_times(choose(problem, config, table=table), problem, table)
    possible = names(problem.collective, problem.topology, vendor=problem.library is not None)
    others = [name for name in possible if name != choice.algorithm]
    return (
        f"{problem.collective.value} of {problem.nbytes} bytes on {problem.topology.describe()}: {choice.algorithm} "
        f"over {choice.transport} ({choice.reason}); also possible: {', '.join(others) or 'nothing else'}"
    )


def forced(problem: Problem, name: str) -> Choice:
    """Return the choice of an algorithm by name.

    Raises:
        ConfigError: it does not exist, or cannot run on this topology.
    """
    if problem.collective is Collective.ALLREDUCE:
        if name == DETERMINISTIC:
            return _ruled(problem, in_order=True)
        if name == VENDOR:
            if problem.library is None:
                raise ConfigError("algorithm 'mpi' takes ranks that talk over MPI")
            return _choice(problem, VENDOR, BY_NAME)
        if name == NCCL:
            raise ConfigError("algorithm 'nccl' takes arrays in device memory")
    algorithm = algorithms.find(problem.collective, name)
    if (why_not := algorithm.refuses(problem.topology)) is not None:
        raise ConfigError(f"{problem.collective.value} algorithm {name!r} cannot run here: {why_not}")
    return _choice(problem, name, BY_NAME)


def _ruled(problem: Problem, *, in_order: bool = False) -> Choice:
    """Choose by the first rule that applies."""
    topology = problem.topology
    nbytes = _nbytes_reduced(problem)
    for rule, limit in _applicable(problem.collective, topology, in_order):
        if rule.limit is None or nbytes <= limit:
            reason = rule.reason.format(up_to=f"at most {limit} bytes", over=f"over {limit} bytes")
            return _choice(problem, rule.algorithm, reason)
    raise AssertionError(f"no rule for {problem.collective.value} on {topology.describe()}")


@lru_cache(maxsize=1024)
def _applicable(collective: Collective, topology: Topology, in_order: bool) -> list[tuple[Rule, int]]:
    """Return the rules that may apply to these ranks, each with the last size limit up to it, in bytes."""
    rules = []
    limit = 0
    for rule in RULES:
        if collective not in rule.collectives or (in_order and not rule.in_order):
            continue
        if all(_holds(condition, topology) for condition in rule.where.split()):
            limit = limit if rule.limit is None else rule.limit.of(topology)
            rules.append((rule, limit))
    return rules


def _holds(condition: str, topology: Topology) -> bool:
    name = condition.removeprefix("not-")
    return _CONDITIONS[name](topology) == (name == condition)


def _choice(problem: Problem, name: str, reason: str) -> Choice:
    """Return the choice of an algorithm with its path, and say so if it is reduced in a wider type."""
    if name == VENDOR and problem.topology.size > 1 and not is_in_library(problem):
        assert problem.op is not None
        name = "recursive_doubling"
        reason = f"{reason}; the MPI library's own takes no {problem.op.value} of {problem.dtype.name}"
    path = path_for(name, problem)
    reduced = path.as_reduced(problem)
    if reduced is not problem:
        reason = f"{reason}; reduced as {reduced.nbytes} bytes of {reduced.dtype.name}"
    return Choice(name, path, reason)


def _nbytes_reduced(problem: Problem) -> int:
    """Return the bytes that are reduced, which may be more than those of the array."""
    if problem.collective is not Collective.ALLREDUCE:
        return problem.nbytes
    path = Path.SHARED if problem.topology.single_node else Path.MESSAGES
    return path.as_reduced(problem).nbytes


class Chooser:
    """Says which algorithm and path the calls of one process set take, and why.

    `choice` is for the calls themselves. The other methods are those of `Communicator` with the same names, which
    describes their arguments, results and errors.

    Args:
        context: the ranks.
        gpu: this rank's device memory.
    """

    def __init__(self, context: Context, gpu: Devices) -> None:
        self._context = context
        self._gpu = gpu
        self._table: Table | None = None

    def choice(self, problem: Problem, algorithm: str | None) -> Choice:
        """Return the choice for a problem.

        Args:
            problem: of the call, in host memory.
            algorithm: what the call asks for; None or ``"auto"``: nothing.

        Raises:
            ConfigError: there is no such algorithm, or it cannot run here.
        """
        return choose(problem, self._context.config, algorithm, table=self._table)

    def algorithms(self, collective: Collective | str, *, device: str | None) -> list[str]:
        """Return the names of the algorithms that can run ``collective`` here."""
        kind = _collective(collective)
        ours = names(kind, self._context.topology, vendor=self._context.messages.offers_allreduce is not None)
        on_device = device not in (None, "cpu") and kind is Collective.ALLREDUCE
        return [*ours, NCCL] if on_device else ours

    def use(self, table: Table | None) -> None:
        """Choose from a tuning table from now on, None: by the built-in rules."""
        self._table = table
        self._context.plans.forget()

    def choose(
        self, collective: Collective | str, nbytes: int, dtype: Any, *, algorithm: str | None, op: ReduceOp | str
    ) -> Choice:
        """Return what would carry out ``collective`` on arrays in host memory, and why."""
        problem = self._problem(collective, nbytes, dtype, op=op)
        return with_times(self.choice(problem, algorithm), problem, self._table)

    def path_on_device(self, dtype: Any, op: ReduceOp | str, algorithm: str | None) -> Choice:
        """Return what carries out an allreduce of arrays in device memory, once there was one."""
        if self._context.topology.size == 1:
            return self.choose(Collective.ALLREDUCE, 0, dtype, algorithm=None, op=op)
        return self._gpu.choice(DType.of(dtype), ReduceOp.parse(op), algorithm)

    def transport_name(self, algorithm: str, collective: Collective | str) -> str:
        """Return what moves the bytes of ``algorithm`` here."""
        if algorithm == "messages":
            return self._context.messages.name
        if algorithm == NCCL:
            return algorithm
        choice = forced(self._problem(collective, 1), algorithm)
        return choice.transport.replace("messages", self._context.messages.name)

    def explain(
        self, nbytes: int, dtype: Any, collective: Collective | str, *, op: ReduceOp | str, device: str | None
    ) -> str:
        """Say in words what would carry out ``collective``, why, and what else could."""
        problem = self._problem(collective, nbytes, dtype, op=op)
        if device not in (None, "cpu"):
            ordinal(device)
            where = f"in device memory on {problem.topology.describe()}"
            on_device = self._gpu.explain(problem.collective)
            return f"{problem.collective.value} of {problem.nbytes} bytes {where}: {on_device}"
        why = explain(problem, self._context.config, self._table)
        if problem.topology.single_node and problem.topology.size > 1:
            loops = self._context.node.loops
            why += f"; NumPy copies and adds, as {loops.why_not}" if loops.why_not else "; its loops are compiled"
        return why + self._gpu.remark(problem.collective)

    def _problem(
        self, collective: Collective | str, nbytes: int, dtype: Any = np.float32, *, op: ReduceOp | str = SUM
    ) -> Problem:
        kind = _collective(collective)
        count = whole_number("nbytes", nbytes, 0)
        return self._context.problem(kind, count, dtype=DType.of(dtype), op=ReduceOp.parse(op))


def _collective(name: Collective | str) -> Collective:
    try:
        return Collective(name)
    except ValueError:
        listed = ", ".join(kind.value for kind in Collective)
        raise ConfigError(f"unknown collective {name!r}; choose one of {listed}") from None
