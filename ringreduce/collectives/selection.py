"""Which algorithm carries out a collective, on which path, and why: the same answer on every rank.

The rules come from measurements (docs/benchmarks.md); a table that ``ringreduce tune`` made on the same machine takes
their place, where there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from ringreduce import algorithms
from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, DType, Operand
from ringreduce.buffers.codecs import Codec
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives import (
    DETERMINISTIC,
    NCCL,
    VENDOR,
    Call,
    Choice,
    Chosen,
    Context,
    Formats,
    Paths,
    Signature,
    close_all,
    path_for,
)
from ringreduce.collectives.messages import Library, Messages
from ringreduce.collectives.operands import AnyOperand
from ringreduce.collectives.path import Task
from ringreduce.collectives.shared import SharedMemory
from ringreduce.collectives.tuning import Table
from ringreduce.common.arguments import shape_text
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.common.topology import Topology

__all__ = ["Selection", "choose", "explain", "forced", "names"]

_BY_NAME = "asked for by name"
_IN_ORDER = "several nodes, deterministic: terms are added in the order of ranks"
_MEASURED = "as the tuning table has it"

#: Up to this size one barrier with the data beside the flags beats two barriers without a copy: for two ranks, and for
#: more, whose barriers cost more.
_ONE_SHOT_NBYTES = 16 << 10
_ONE_SHOT_OF_MANY_NBYTES = 32 << 10
#: Up to so many bytes of all ranks together, the root has reduced them before the ranks could meet once more.
_READ_BY_ROOT_NBYTES = 256 << 10
#: Between nodes, up to this size for each lane, the fewest rounds win: recursive doubling's, for 2^k nodes and wherever
#: nodes have several ranks; for other numbers of nodes with single ranks, those of a tree.
_DOUBLING_NBYTES = 24 << 10
_TREE_NBYTES = 48 << 10
#: Between nodes, a broadcast of more than this for each rank that data is handed on by goes along a chain.
_BINOMIAL_NBYTES = 128 << 10
#: Between nodes of several ranks, in a reduce-scatter of up to this size all send to all at once.
_DIRECT_NBYTES = 64 << 10
#: An allreduce between nodes -> the same with lanes.
_HIERARCHICAL = {"halving_doubling": "hierarchical_halving", "direct": "hierarchical_direct", "ring": "hierarchical"}
#: Up to so many nodes may send to one at once: switches can buffer that, and ranks can have as many messages under way.
_FEW_NODES = 16

#: The reduction to a root between nodes in which one rank adds up all terms of an element, in the order of ranks.
_IN_ORDER_TO_ROOT = "direct"

_FEW_AT_ONCE = f"at most {_FEW_NODES} nodes, all at once"
_REMEMBERED = 4096  # kinds of calls


def names(collective: Collective, topology: Topology, *, vendor: bool) -> list[str]:
    """Return the algorithms that can run ``collective`` here.

    Args:
        collective: which.
        topology: on which ranks.
        vendor: whether the transport has an allreduce of its own.
    """
    ours = list(algorithms.names(collective, topology))
    return [*ours, VENDOR] if vendor and collective is Collective.ALLREDUCE else ours


def choose(call: Call, config: Config, algorithm: str | None = None, table: Table | None = None) -> Choice:
    """Choose what carries out a call.

    Args:
        call: all that decides.
        config: may name an algorithm.
        algorithm: what the call asks for; None or ``"auto"``: nothing.
        table: what was measured on these ranks; the same on all of them.

    Raises:
        ConfigError: there is no such algorithm, or it cannot run here.
    """
    reduces = call.collective is Collective.ALLREDUCE
    if config.deterministic and call.collective is Collective.REDUCE:
        if algorithm not in (None, "auto", _IN_ORDER_TO_ROOT):
            raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so algorithm={algorithm!r} cannot be asked for")
        if not call.topology.single_node:
            return _choice(call, _IN_ORDER_TO_ROOT, _IN_ORDER)
    if algorithm not in (None, "auto"):
        assert algorithm is not None
        if config.deterministic and reduces and algorithm != DETERMINISTIC:
            raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so algorithm={algorithm!r} cannot be asked for")
        return forced(call, algorithm)
    if call.topology.size == 1:
        return _choice(call, "one_shot" if reduces else "load", "there is one rank")
    if not reduces:
        return _choice(call, *_rule_of_others(call))
    if config.deterministic:
        return _choice(call, *_deterministic(call))
    possible = _names(call)
    if config.algorithm is not None:
        if config.algorithm in possible:
            return forced(call, config.algorithm)
        if config.algorithm not in (VENDOR, NCCL):
            algorithms.find(call.collective, config.algorithm)  # it may not run here, but it must exist
    nbytes = _nbytes_reduced(call)
    if table is not None and (measured := table.choose(nbytes).algorithm) in possible:
        return _choice(call, measured, _MEASURED)
    return _choice(call, *_rule(call))


def explain(call: Call, config: Config, table: Table | None = None) -> str:
    """Say what would run and why, and what else could; arguments as for `choose`."""
    choice = choose(call, config, table=table)
    why = choice.reason
    if table is not None and why.startswith(_MEASURED):
        why = table.explain(_nbytes_reduced(call)) + why.removeprefix(_MEASURED)
    others = [name for name in _names(call) if name != choice.algorithm]
    return (
        f"{call.collective.value} of {call.nbytes} bytes on {call.topology.describe()}: {choice.algorithm} over "
        f"{choice.transport} ({why}); also possible: {', '.join(others) or 'nothing else'}"
    )


def forced(call: Call, name: str) -> Choice:
    """Return the choice of an algorithm by name.

    Raises:
        ConfigError: it does not exist, or cannot run on this topology.
    """
    if call.collective is Collective.ALLREDUCE:
        if name == DETERMINISTIC:
            return _choice(call, *_deterministic(call))
        if name == VENDOR:
            if call.library is None:
                raise ConfigError("algorithm 'mpi' takes ranks that talk over MPI")
            return _choice(call, VENDOR, _BY_NAME)
        if name == NCCL:
            raise ConfigError("algorithm 'nccl' takes arrays in device memory")
    algorithm = algorithms.find(call.collective, name)
    if (why_not := algorithm.refuses(call.topology)) is not None:
        raise ConfigError(f"{call.collective.value} algorithm {name!r} cannot run here: {why_not}")
    return _choice(call, name, _BY_NAME)


def _names(call: Call) -> list[str]:
    return names(call.collective, call.topology, vendor=call.library is not None)


def _choice(call: Call, name: str, reason: str) -> Choice:
    """Complete the choice of an algorithm: add the path, and say what is reduced in a wider type."""
    if name == VENDOR and call.topology.size > 1 and not Library.takes(name, call):
        assert call.op is not None
        name = "recursive_doubling"
        reason = f"{reason}; the MPI library's own takes no {call.op.value} of {call.dtype.name}"
    path = path_for(name, call)
    reduced = path.as_reduced(call)
    if reduced is not call:
        reason = f"{reason}; reduced as {reduced.nbytes} bytes of {reduced.dtype.name}"
    return Choice(name, path, reason)


def _nbytes_reduced(call: Call) -> int:
    """Return the bytes that are reduced, which may be more than those of the array."""
    path = SharedMemory if call.topology.single_node else Messages
    return path.as_reduced(call).nbytes


def _rule(call: Call) -> tuple[str, str]:
    """Return the algorithm of an allreduce on several ranks, and why."""
    if call.topology.single_node:
        return _rule_on_one_node(call)
    nbytes, nodes = _nbytes_reduced(call), len(call.topology.nodes)
    if max(len(node) for node in call.topology.nodes) > 1:
        small = _DOUBLING_NBYTES * min(len(node) for node in call.topology.nodes)
        if nbytes <= small:
            return "hierarchical_doubling", f"several nodes, at most {small} bytes: few rounds"
        name, why = _fills_links(nodes)
        return _HIERARCHICAL[name], f"several nodes, over {small} bytes: {why}, one lane per local rank"
    few_rounds, small = (
        ("double_tree", _TREE_NBYTES) if nodes & (nodes - 1) else ("recursive_doubling", _DOUBLING_NBYTES)
    )
    if nbytes <= small:
        return few_rounds, f"one rank per node, at most {small} bytes: few rounds"
    name, why = _fills_links(nodes)
    return name, f"one rank per node, over {small} bytes: {why}"


def _rule_on_one_node(call: Call) -> tuple[str, str]:
    limit = _ONE_SHOT_NBYTES if call.topology.size <= 2 else _ONE_SHOT_OF_MANY_NBYTES
    if _nbytes_reduced(call) <= limit:
        return "one_shot", f"one node, at most {limit} bytes: one barrier"
    return "two_shot", f"one node, over {limit} bytes: the least memory traffic"


def _fills_links(nodes: int) -> tuple[str, str]:
    """Return the allreduce that keeps the links between so many nodes busy, and why."""
    if nodes & (nodes - 1) == 0:
        return "halving_doubling", "fills every link in the fewest rounds"
    if nodes <= _FEW_NODES:
        return "direct", f"at most {_FEW_NODES} nodes, two rounds fill every link"
    return "ring", "fills every link"


def _deterministic(call: Call) -> tuple[str, str]:
    """Choose among the algorithms in which one rank adds up all terms of an element, in the order of ranks."""
    if call.topology.size == 1:
        return "one_shot", "there is one rank"
    if call.topology.single_node:
        return _rule_on_one_node(call)
    return "direct", _IN_ORDER


def _rule_of_others(call: Call) -> tuple[str, str]:
    """Return the algorithm of another collective on several ranks, and why."""
    if call.collective is Collective.REDUCE:
        return _rule_of_reduce(call)
    if call.topology.single_node:
        return "load", "one node: every rank reads what it needs"
    if call.collective is Collective.BROADCAST:
        limit = _BINOMIAL_NBYTES * (call.topology.size - 1)
        if call.nbytes > limit:
            return "chain", f"several nodes, over {limit} bytes: fills every link"
        return "binomial", f"several nodes, at most {limit} bytes: few rounds"
    nodes = len(call.topology.nodes)
    if call.collective in (Collective.GATHER, Collective.SCATTER):
        return ("direct", _FEW_AT_ONCE) if nodes <= _FEW_NODES else ("binomial", "many nodes: few rounds")
    if call.collective is Collective.ALLTOALL:
        return ("direct", _FEW_AT_ONCE) if nodes <= _FEW_NODES else ("pairwise", "several nodes")
    if nodes <= _FEW_NODES and nodes == call.topology.size:
        return "direct", f"{_FEW_AT_ONCE}, one rank per node"
    if call.collective is Collective.REDUCE_SCATTER and call.nbytes <= _DIRECT_NBYTES:
        return "direct", f"several nodes, at most {_DIRECT_NBYTES} bytes: one round"
    return "ring", "several nodes: each block crosses each link once"


def _rule_of_reduce(call: Call) -> tuple[str, str]:
    """Return the algorithm of a reduction to a root on several ranks, and why."""
    if call.topology.single_node:
        limit = _READ_BY_ROOT_NBYTES // call.topology.size
        if call.nbytes <= limit:
            return "load", f"one node, at most {limit} bytes: the root reads and reduces them"
        return "two_shot", f"one node, over {limit} bytes: every rank reduces a part"
    lanes, *others = {len(node) for node in call.topology.nodes}
    nodes = call.topology.size if others else len(call.topology.nodes)
    limit = _BINOMIAL_NBYTES * (nodes - 1) * (1 if others else lanes)
    prefix = "" if others or lanes == 1 else "hierarchical_"
    if call.nbytes > limit:
        return f"{prefix}chain", f"several nodes, over {limit} bytes: fills every link"
    return f"{prefix}binomial", f"several nodes, at most {limit} bytes: few rounds"


class Selection:
    """Chooses for the calls of one process set, and keeps what it chose, ready to run.

    Args:
        context: the ranks.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._paths = Paths(context)
        self._formats = Formats(context)
        self._chosen: dict[tuple[object, ...], Chosen] = {}
        self._table: Table | None = None
        self._library = context.messages.offers_allreduce if context.messages.has_allreduce else None

    def use(self, table: Table | None) -> None:
        """Choose from a tuning table from now on, None: by the built-in rules. All ranks must use the same."""
        self._table = table
        self.forget()

    def forget(self) -> None:
        """Look everything up again."""
        self._chosen.clear()

    def close(self) -> None:
        """Give the plans back."""
        self.forget()
        close_all(self._paths.close, self._formats.close)

    # ---- for people ----

    def call(self, collective: Collective, nbytes: int, dtype: DType, op: ReduceOp) -> Call:
        """Return a call of these ranks; ``op`` matters where something is reduced."""
        reduced = op if collective.reduces else None
        return Call(collective, nbytes, self._context.topology, dtype, reduced, self._library)

    def choose(self, call: Call, algorithm: str | None = None) -> Choice:
        """Return what would carry out a call that asks for this algorithm."""
        return choose(call, self._context.config, algorithm, self._table)

    def explain(self, call: Call) -> str:
        """Say in words what would carry out a call, why, and what else could."""
        return explain(call, self._context.config, self._table)

    def names(self, collective: Collective) -> list[str]:
        """Return the names of the algorithms that can run here."""
        return names(collective, self._context.topology, vendor=self._library is not None)

    # ---- for calls ----

    def reduction(self, source: Operand, op: ReduceOp, algorithm: str | None) -> Chosen:
        """Return what reduces arrays like this one in host memory."""
        shape = source.view.shape
        key = op, algorithm, shape, source.dtype.name
        if (found := self._chosen.get(key)) is not None:
            return found
        call = self.call(Collective.ALLREDUCE, source.nbytes, source.dtype, op)
        return self._keep(key, self._reduction(call, algorithm, shape, shape, op.value))

    def in_format(self, source: AnyOperand, op: ReduceOp, codec: Codec, *, feedback: bool) -> Chosen:
        """Return what reduces arrays like this one in a wire format; ``feedback``: whether what is lost is kept."""
        key = codec.name, op, source.shape, source.dtype.name, feedback
        if (found := self._chosen.get(key)) is not None:
            return found
        call = self.call(Collective.ALLREDUCE, source.nbytes, source.dtype, op)
        choice = Choice(f"direct as {codec.name}", Formats, _BY_NAME)
        argument = f"{op.value} as {codec.name}{' with feedback' if feedback else ''}"
        signature = _signature(call, choice, None, source.shape, argument)
        task = Task(Formats.algorithm, DTYPES["float32"], op, signature)
        return self._keep(key, Chosen(choice, signature, partial(self._formats.allreduce, codec, task)))

    def segments(
        self, source: DeviceOperand, parts: Sequence[slice], op: ReduceOp, algorithm: str | None
    ) -> dict[int, Chosen]:
        """Return, by length, what reduces the segments of an array in device memory, in place in host memory.

        Their signature says all that must agree about the whole array, so that a mismatch is seen at the first segment.
        A shorter last segment has a signature of its own, as plans go by signatures, and by lengths.
        """
        lengths = dict.fromkeys(part.stop - part.start for part in (parts[0], parts[-1]))
        return {count: self._segment(source, count, next(iter(lengths)), op, algorithm) for count in lengths}

    def _segment(self, source: DeviceOperand, count: int, usual: int, op: ReduceOp, algorithm: str | None) -> Chosen:
        key = "staged", op, algorithm, source.shape, source.dtype.name, count
        if (found := self._chosen.get(key)) is not None:
            return found
        last = "" if count == usual else f", its last {count} elements"
        by_nccl = algorithm == NCCL
        if by_nccl and self._context.config.deterministic:
            raise ConfigError("RINGREDUCE_DETERMINISTIC is set, so algorithm='nccl' cannot be asked for")
        argument = f"{op.value} in device memory{' by nccl' if by_nccl else ''}{last}"
        call = self.call(Collective.ALLREDUCE, count * source.dtype.itemsize, source.dtype, op)
        asked = None if by_nccl else algorithm
        return self._keep(key, self._reduction(call, asked, (count,), source.shape, argument))

    def other(
        self,
        collective: Collective,
        dtype: DType,
        shape: tuple[object, ...] | None,
        algorithm: str | None,
        argument: str = "",
        op: ReduceOp = ReduceOp.SUM,
        nbytes: int = 0,
    ) -> Chosen:
        """Return what carries out a collective other than the allreduce.

        Args:
            collective: which.
            dtype: of the elements.
            shape: as the signature says it; a star where ranks may differ; None: not all know it, and the dtype.
            algorithm: what is asked for.
            argument: for the signature.
            op: where something is reduced.
            nbytes: of the array, where all ranks know how large it is.
        """
        key = collective.value, argument, algorithm, shape, dtype.name
        if (found := self._chosen.get(key)) is not None:
            return found
        call = self.call(collective, nbytes, dtype, op)
        choice = self.choose(call, algorithm)
        signature = _signature(call, choice, algorithm, self._agreed(collective, shape), argument)
        return self._keep(key, Chosen(choice, signature, self._paths.bind(call, choice, signature)))

    def _reduction(
        self, call: Call, algorithm: str | None, shape: tuple[int, ...], whole: tuple[int, ...], argument: str
    ) -> Chosen:
        choice = self.choose(call, algorithm)
        signature = _signature(call, choice, algorithm, self._agreed(call.collective, whole), argument)
        reduction = self._paths.reduction(call, choice, shape, signature)
        return Chosen(choice, signature, reduction.run, reduction)

    def _agreed(self, collective: Collective, shape: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        """Return what the signature says of a shape."""
        by_count = self._context.counts_decide and collective in _OF_ONE_SHAPE
        return (prod(shape),) if by_count and shape is not None else shape

    def _keep(self, key: tuple[object, ...], chosen: Chosen) -> Chosen:
        if len(self._chosen) > _REMEMBERED:
            self._chosen.clear()
        self._chosen[key] = chosen
        return chosen


#: Those in which all ranks' arrays have the same shape.
_OF_ONE_SHAPE = (Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST)


def _signature(
    call: Call, choice: Choice, algorithm: str | None, shape: tuple[object, ...] | None, argument: str
) -> Signature:
    """Return the signature of a call; it depends on nothing that may differ between ranks."""
    arguments = [argument] if shape is None else [argument, f"shape {shape_text(shape)}", call.dtype.name]
    if algorithm is not None:
        arguments.append(f"algorithm {algorithm}")
    text = f"{call.collective.value}({', '.join(filter(None, arguments))})"
    return Signature.of(text, waits=_waits(call, choice, shape))


def _waits(call: Call, choice: Choice, shape: tuple[object, ...] | None) -> bool:
    """Return whether no rank can end a call before all have come to it; see `Signature`."""
    if call.collective in (Collective.GATHER, Collective.SCATTER):
        return True  # all say how much they have, and hear it of all
    if call.collective.rooted or shape is None or choice.path is Library or 0 in shape:
        return False  # a rank that has its data goes on without the others; for an empty array nobody waits
    size = call.topology.size
    rows = shape[0] if call.collective is Collective.REDUCE_SCATTER else size
    return isinstance(rows, int) and rows >= size  # with fewer, some ranks get nothing
