"""The arguments of calls, checked: before any other rank knows of the call, and without moving data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, DType, Operand, operand_of, require_host, require_op
from ringreduce.buffers.codecs import CODECS
from ringreduce.collectives.call import Call, CallKind
from ringreduce.collectives.context import Context
from ringreduce.collectives.operands import AnyOperand, HostReducer, Operands, ResultArray, Running, flat, with_rows
from ringreduce.collectives.plan import Place, constant
from ringreduce.collectives.rows import part_numbers
from ringreduce.common.arguments import real_number, row_counts, shown, whole_number
from ringreduce.common.errors import ConfigError, UnsupportedBufferError
from ringreduce.common.partition import Partition
from ringreduce.common.reduce_ops import INTEGER_OPS, ReduceOp


@dataclass(slots=True, eq=False)
class Prepared:
    """A call whose arguments are checked.

    Attributes:
        call: the call.
        source: this rank's input.
        result: where its result goes; None: it gets none.
        kind: what the call has in common with others.
        counted: the bytes of this call for tallies and observers.
        counts_result: whether these are the bytes of the result instead, once it is there: other ranks decide its size.
        numbers: what this rank sends the others when they begin; see `ringreduce.collectives.rows`.
        start: the element of the result at which the input may begin, where it may be a part of the result; None: it
            may not.
        copies_overlap: whether an input that shares other memory with the result is copied before; if not, the plan
            takes care.
        carry_out: makes the call in place of a plan, and stores its result; None: a plan does.
    """

    call: Call
    source: AnyOperand
    result: ResultArray | None
    kind: CallKind
    counted: int
    counts_result: bool = False
    numbers: tuple[int, ...] = ()
    start: int | None = 0
    copies_overlap: bool = True
    carry_out: Callable[[HostReducer, Running], None] | None = None

    @property
    def place(self) -> Place:
        """Where the result goes, for the plan."""
        if self.result is None:
            return partial(constant, Operand(np.empty(0, self.kind.dtype.storage), self.kind.dtype))
        return self.result.part if self.call.collective is Collective.SCATTER else self.result.place


def prepare(ranks: Context, operands: Operands, call: Call) -> Prepared:
    """Check the arguments of a call. Local.

    Raises:
        ConfigError, UnsupportedBufferError: what is wrong with them.
    """
    if not (call.algorithm is None or isinstance(call.algorithm, str)):
        raise ConfigError(f"algorithm must be a name, got {shown(call.algorithm)}")
    return _PREPARE[call.collective](ranks, operands, call)


def _root(ranks: Context, root: object) -> int:
    """Return the number of a rank.

    Raises:
        ConfigError: there is no such rank.
    """
    number = whole_number("root", root)
    if not 0 <= number < ranks.topology.size:
        raise ConfigError(f"root must be a rank, 0 to {ranks.topology.size - 1}, got {number}")
    return number


def _allreduce(ranks: Context, operands: Operands, call: Call) -> Prepared:
    source = operand_of(call.array)
    op = call.op if isinstance(call.op, ReduceOp) else ReduceOp.parse(call.op)
    if op in INTEGER_OPS:
        require_op(op, source.dtype)
    codec = None
    argument = op.value
    if call.deterministic:
        other = f"compression={call.compression!r}" if call.algorithm is None else f"algorithm={call.algorithm!r}"
        raise ConfigError(f"give deterministic=True or {other}, not both")
    if call.compression is not None:
        if call.algorithm is not None:
            either = f"compression={call.compression!r} or algorithm"
            raise ConfigError(f"a wire format is an algorithm of its own; give {either}, not both")
        _require_codec(call.compression, source.dtype, op, deterministic=ranks.config.deterministic)
        if not ranks.single_node:
            codec = call.compression
            argument = f"{op.value} as {codec}{'' if call.feedback is None else ' with feedback'}"
        elif call.feedback is not None:
            call.feedback.begin(0, 0)
    weights = tuple(real_number("weights", weight) for weight in call.weights) if call.weights else ()
    if weights:
        _require_weighable(ranks, call, source, op=op, weights=weights)
        argument = f"{argument}, weights {weights}"
    result = operands.result(call.array, source, source.shape, out=call.out)
    nbytes = source.nbytes
    kind = CallKind(
        call.collective,
        shape=source.shape,
        argument=argument,
        dtype=source.dtype,
        algorithm=call.algorithm,
        op=op,
        nbytes=nbytes,
        codec=codec,
        weights=weights,
    )
    carry_out = None
    if codec is None and not isinstance(source, Operand):
        carry_out = operands.reducer(source, result, kind)
    return Prepared(call, source, result, kind=kind, counted=nbytes, carry_out=carry_out)


def _require_weighable(ranks: Context, call: Call, source: AnyOperand, op: ReduceOp, weights: Sequence[float]) -> None:
    """Check a call with weights.

    Raises:
        ConfigError: of other arguments, or the number or the sum of weights, or because the ranks are on several nodes.
        UnsupportedBufferError: the array is in device memory, or its elements are no floats.
    """
    if not (ranks.single_node and op is ReduceOp.AVERAGE and call.algorithm is None and call.compression is None):
        raise ConfigError("weights are for averages on one node, without a named algorithm or wire format")
    if len(weights) != ranks.topology.size:
        raise ConfigError(f"an average of {ranks.topology.size} ranks takes as many weights, got {len(weights)}")
    if not abs(sum(weights) - 1.0) < 1e-6:
        raise ConfigError(f"the sum of weights must be 1, got {sum(weights)}")
    if require_host(source, "a weighted allreduce").dtype.kind not in ("float", "complex"):
        raise UnsupportedBufferError(f"weights are for floats, got {source.dtype.name}")


def _require_codec(compression: Any, dtype: DType, op: ReduceOp, *, deterministic: bool) -> None:
    """Check the format in which an allreduce is to travel.

    Raises:
        ConfigError: no format has this name, or settings forbid rounding, or the op does not allow it.
        UnsupportedBufferError: the elements are no floats.
    """
    if not (isinstance(compression, str) and compression in CODECS):
        raise ConfigError(f"unknown wire format {compression!r}; choose one of {', '.join(CODECS)}")
    if deterministic:
        raise ConfigError(f"RINGREDUCE_DETERMINISTIC is set, so compression={compression!r} cannot be asked for")
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise ConfigError(f"{op.value} of rounded values makes no sense; wire formats are for sums and averages")
    if dtype.kind != "float":
        raise UnsupportedBufferError(f"wire formats are for floats, got {dtype.name}")


def _reduce(ranks: Context, operands: Operands, call: Call) -> Prepared:
    root = _root(ranks, call.root)
    source = require_host(operand_of(call.array), "reduce")
    op = ReduceOp.parse(call.op)
    require_op(op, source.dtype)
    result = None
    if ranks.rank == root:
        result = operands.result(call.array, source, source.shape, out=call.out)
    argument = f"{op.value}, root {root}"
    nbytes = source.nbytes
    kind = CallKind(
        call.collective,
        shape=source.shape,
        argument=argument,
        dtype=source.dtype,
        algorithm=call.algorithm,
        op=op,
        root=root,
        nbytes=nbytes,
    )
    return Prepared(call, source, result, kind=kind, counted=nbytes)


def _reduce_scatter(ranks: Context, operands: Operands, call: Call) -> Prepared:
    source = with_rows(call.array, "reduce_scatter")
    op = ReduceOp.parse(call.op)
    require_op(op, source.dtype)
    rows = source.shape[0]
    row = prod(source.shape[1:])
    argument = op.value
    if call.splits is None:
        lengths = [part.stop - part.start for part in Partition.first_larger(rows, ranks.topology.size).segment]
    else:
        lengths = row_counts(call.splits, rows, ranks.topology.size)
        argument = f"{argument}, splits {lengths}"
    result = operands.result(call.array, source, (lengths[ranks.rank], *source.shape[1:]), out=call.out)
    counts = tuple([length * row for length in lengths])
    nbytes = source.nbytes
    kind = CallKind(
        call.collective,
        shape=source.shape,
        argument=argument,
        dtype=source.dtype,
        algorithm=call.algorithm,
        op=op,
        nbytes=nbytes,
        counts=counts,
    )
    return Prepared(call, source, result, kind=kind, counted=nbytes, start=-sum(counts[: ranks.rank]))


def _broadcast(ranks: Context, operands: Operands, call: Call) -> Prepared:
    root = _root(ranks, call.root)
    source = operand_of(call.array)
    result = operands.result(call.array, source, source.shape, out=call.out)
    nbytes = source.nbytes
    kind = CallKind(
        call.collective,
        shape=source.shape,
        argument=f"root {root}",
        dtype=source.dtype,
        algorithm=call.algorithm,
        root=root,
        nbytes=nbytes,
    )
    return Prepared(call, source, result, kind=kind, counted=nbytes)


def _allgather(ranks: Context, operands: Operands, call: Call) -> Prepared:
    prepared = _exchanging(operands, call, with_rows(call.array, "allgather"))
    prepared.counted *= ranks.topology.size
    return prepared


def _alltoall(ranks: Context, operands: Operands, call: Call) -> Prepared:
    source = with_rows(call.array, "alltoall")
    prepared = _exchanging(operands, call, source, rows=row_counts(call.splits, source.shape[0], ranks.topology.size))
    prepared.counts_result = False
    prepared.start = None
    prepared.copies_overlap = True
    return prepared


def _gather(ranks: Context, operands: Operands, call: Call) -> Prepared:
    root = _root(ranks, call.root)
    source = require_host(with_rows(call.array, "gather"), "gather")
    if ranks.rank == root:
        prepared = _exchanging(operands, call, source, root=root)
        prepared.counted *= ranks.topology.size
        return prepared
    return _exchanging(None, call, source, root=root)


def _exchanging(
    operands: Operands | None, call: Call, source: AnyOperand, rows: Sequence[int] = (), root: int | None = None
) -> Prepared:
    """Prepare a collective to which ranks give any number of rows.

    Args:
        operands: finds where the result goes; None: this rank gets none.
        call: the call.
        source: its input.
        rows: for each rank; empty: all of them, for every rank that gets a result.
        root: of the collective.
    """
    shape = ("*", *source.shape[1:])
    argument = "" if root is None else f"root {root}"
    result = None if operands is None else operands.result(call.array, source, shape, out=call.out)
    numbers = (-1 if result is None else result.room, *(rows or source.shape[:1]))
    kind = CallKind(
        call.collective,
        shape=shape,
        argument=argument,
        dtype=source.dtype,
        algorithm=call.algorithm,
        root=root or 0,
        row=prod(shape[1:]),
    )
    return Prepared(
        call,
        source,
        result,
        kind=kind,
        counted=source.nbytes,
        counts_result=result is not None,
        numbers=numbers,
        copies_overlap=False,
    )


def _scatter(ranks: Context, operands: Operands, call: Call) -> Prepared:
    root = _root(ranks, call.root)
    array = call.array
    given = None
    part = None
    if array is not None:
        given = require_host(with_rows(array, "scatter"), "scatter")
        rows = given.shape[0]
        size = ranks.topology.size
        if rows % size:
            raise ConfigError(f"scatter: {rows} rows do not divide into {size} equal parts")
        part = (rows // size, *given.shape[1:]), given.dtype
    elif ranks.rank == root:
        raise ConfigError("scatter: the root has to pass an array")
    result = ResultArray(operands, operands.maker(0 if array is None else array))
    if call.out is not None and given is not None and part is not None:
        result = operands.result(array, given, part[0], out=call.out)
    elif call.out is not None:
        target = require_host(operand_of(call.out), "scatter")
        target.require_writable()
        result = ResultArray(operands, out=call.out, operand=target)
        part = (target.shape, target.dtype)
    source = Operand(np.empty(0, np.uint8), DTYPES["uint8"])
    if given is not None and ranks.rank == root:
        whole = flat(given)
        is_copy = given.is_copy or not given.contiguous
        source = Operand(whole.view.view(np.uint8), DTYPES["uint8"], whole.address, is_copy=is_copy)
    counted = source.nbytes or (0 if part is None else prod(part[0]) * part[1].itemsize)
    kind = CallKind(
        call.collective, shape=None, argument=f"root {root}", dtype=source.dtype, algorithm=call.algorithm, root=root
    )
    return Prepared(
        call,
        source,
        result,
        kind=kind,
        counted=counted,
        counts_result=source.nbytes == 0,
        numbers=part_numbers(part),
        copies_overlap=False,
    )


_PREPARE: dict[Collective, Callable[[Context, Operands, Call], Prepared]] = {
    Collective.ALLREDUCE: _allreduce,
    Collective.REDUCE: _reduce,
    Collective.REDUCE_SCATTER: _reduce_scatter,
    Collective.BROADCAST: _broadcast,
    Collective.ALLGATHER: _allgather,
    Collective.GATHER: _gather,
    Collective.SCATTER: _scatter,
    Collective.ALLTOALL: _alltoall,
}
