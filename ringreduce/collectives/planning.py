"""From a call to its plan: checks the arguments, chooses algorithm and path, finds or makes the plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, DType, Operand, operand_of, require_host
from ringreduce.buffers.codecs import Codec
from ringreduce.collectives.call import NCCL, Call, Choice, Problem, Signature, Task
from ringreduce.collectives.compressed import CompressedAllreduce, codec_for
from ringreduce.collectives.context import Context
from ringreduce.collectives.messages import VendorPath
from ringreduce.collectives.operands import AnyOperand, Maker, Operands, Result, flat, with_rows
from ringreduce.collectives.paths import PATHS
from ringreduce.collectives.plan import Place, Plan
from ringreduce.collectives.rows import part_numbers
from ringreduce.collectives.selection import BY_NAME, choose
from ringreduce.collectives.tuning import Table
from ringreduce.common.arguments import row_counts, shape_text, whole_number
from ringreduce.common.errors import ConfigError
from ringreduce.common.partition import Partition
from ringreduce.common.reduce_ops import SUM, ReduceOp

__all__ = ["Planner", "Prepared"]

#: Those in which all ranks' arrays have the same shape.
_OF_ONE_SHAPE = (Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST)


@dataclass(slots=True, eq=False)
class Prepared:
    """A call whose arguments are checked.

    Attributes:
        call: the call.
        source: this rank's input.
        result: where its result goes; None: it gets none.
        shape: as the signature has it, with a star where ranks may differ; None: not all ranks know shape and dtype.
        argument: what else the signature says.
        dtype: of the elements that are reduced or moved.
        op: how they are reduced.
        root: of the collective.
        nbytes: of the array; 0 where ranks may have arrays of different sizes.
        counted: the bytes of this call for tallies and observers.
        counts_result: whether these are the bytes of the result instead, once it is there: other ranks decide its size.
        numbers: what this rank tells the others when they begin; see `ringreduce.collectives.rows`.
        counts: of a reduce-scatter, the elements for each rank.
        row: elements in a row.
        start: the element of the result at which the input may begin, where it may be a part of the result; None: it
            may not.
        is_apart: whether an input that shares other memory with the result is copied before; if not, the path does so.
        codec: of the wire format; None: elements travel as they are.
        again: set once the call was made: repeats it; None: it cannot be repeated.
    """

    call: Call
    source: AnyOperand
    result: Result | None
    shape: tuple[Any, ...] | None
    argument: str
    dtype: DType
    op: ReduceOp = SUM
    root: int = 0
    nbytes: int = 0
    counted: int = 0
    counts_result: bool = False
    numbers: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    row: int = 1
    start: int | None = 0
    is_apart: bool = True
    codec: Codec | None = None
    again: Callable[[], Any] | None = None

    @property
    def place(self) -> Place:
        """Where the result goes, for the plan."""
        if self.result is None:
            return partial(_nowhere, Operand(np.empty(0, self.dtype.storage), self.dtype))
        return self.result.part if self.call.collective is Collective.SCATTER else self.result.place


def _nowhere(nothing: Operand, rows: Sequence[int]) -> Operand:
    return nothing


class Planner:
    """Plans the calls of one process set.

    Args:
        context: the ranks.
        operands: checks arrays.
    """

    def __init__(self, context: Context, operands: Operands) -> None:
        self._context, self._operands = context, operands
        self._rank, self._size = context.rank, context.topology.size
        self._paths: dict[object, Any] = {path: path(context) for path in PATHS}
        self._library = context.messages.offers_allreduce if context.messages.has_allreduce else None
        #: By collective: checks the arguments of a call, and raises what is wrong with them. Local.
        self.prepare: dict[Collective, Callable[[Call], Prepared]] = {
            Collective.ALLREDUCE: self._allreduce,
            Collective.REDUCE: self._reduce,
            Collective.REDUCE_SCATTER: self._reduce_scatter,
            Collective.BROADCAST: self._broadcast,
            Collective.ALLGATHER: self._allgather,
            Collective.GATHER: self._gather,
            Collective.SCATTER: self._scatter,
            Collective.ALLTOALL: self._alltoall,
        }
        self.table: Table | None = None

    # ---- choosing ----

    def problem(self, collective: Collective, nbytes: int, dtype: DType, op: ReduceOp) -> Problem:
        """Return a problem of these ranks; ``op`` matters where something is reduced."""
        reduced = op if collective.reduces else None
        return Problem(collective, nbytes, self._context.topology, dtype, reduced, self._library)

    def choose(self, problem: Problem, algorithm: str | None = None) -> Choice:
        """Return the choice for a problem; ``algorithm``: what the call asks for, None for the best known."""
        return choose(problem, self._context.config, algorithm, self.table)

    def task(self, prepared: Prepared) -> Task:
        """Return the task of a call; all calls of the same kind share it."""
        call = prepared.call
        kind = (
            *(call.collective, prepared.argument, call.algorithm, prepared.shape, prepared.dtype.name),
            *(prepared.root, prepared.nbytes),
        )
        return self._context.plans.choice(kind, lambda: self._chosen(prepared))

    def _chosen(self, prepared: Prepared) -> Task:
        call = prepared.call
        problem = self.problem(call.collective, prepared.nbytes, prepared.dtype, prepared.op)
        choice = self.choose(problem, call.algorithm)
        return self._task(prepared, problem, choice, prepared.shape, prepared.argument)

    def _task(
        self, prepared: Prepared, problem: Problem, choice: Choice, shape: tuple[Any, ...] | None, argument: str
    ) -> Task:
        by_count = self._context.counts_decide and problem.collective in _OF_ONE_SHAPE
        agreed = (prod(shape),) if by_count and shape is not None else shape
        signature = _signature(problem, choice, prepared.call.algorithm, agreed, argument)
        reduced = self._paths[choice.path].as_reduced(problem)
        return Task(
            *(choice, signature, problem, reduced.dtype, reduced.op or SUM),
            *(prepared.root, prepared.counts, prepared.row, reduced is not problem),
        )

    def segment(self, prepared: Prepared, count: int, usual: int) -> Task:
        """Return the task of reducing, in host memory, a segment of an array in device memory.

        Its signature says all that must agree about the whole array, so that a mismatch is seen at the first segment. A
        shorter last segment has a signature of its own, as plans are found by signatures.

        Args:
            prepared: the call.
            count: elements of the segment.
            usual: those of the first one.
        """
        call, dtype = prepared.call, prepared.dtype
        by_nccl = call.algorithm == NCCL
        if by_nccl and self._context.config.deterministic:
            raise ConfigError("RINGREDUCE_DETERMINISTIC is set, so algorithm='nccl' cannot be asked for")
        last = "" if count == usual else f", its last {count} elements"
        argument = f"{prepared.op.value} in device memory{' by nccl' if by_nccl else ''}{last}"

        def chosen() -> Task:
            problem = self.problem(Collective.ALLREDUCE, count * dtype.itemsize, dtype, prepared.op)
            choice = self.choose(problem, None if by_nccl else call.algorithm)
            return self._task(prepared, problem, choice, prepared.shape, argument)

        kind = "segment", argument, call.algorithm, prepared.shape, dtype.name, count
        return self._context.plans.choice(kind, chosen)

    def compressed(self, prepared: Prepared, codec: Codec) -> Task:
        """Return the task of an allreduce whose floats travel in the format of a codec."""
        feedback = "" if prepared.call.feedback is None else " with feedback"
        argument = f"{prepared.op.value} as {codec.name}{feedback}"

        def chosen() -> Task:
            problem = self.problem(Collective.ALLREDUCE, prepared.nbytes, prepared.dtype, prepared.op)
            choice = Choice(f"direct as {codec.name}", CompressedAllreduce, BY_NAME)
            signature = _signature(problem, choice, None, prepared.shape, argument)
            return Task(choice, signature, problem, DTYPES["float32"], prepared.op)

        return self._context.plans.choice(("compressed", argument, prepared.shape, prepared.dtype.name), chosen)

    # ---- planning ----

    def plan(self, task: Task, source: Operand, target: Operand | None, numbers: tuple[int, ...] = ()) -> Plan:
        """Find or make the plan of a task.

        Args:
            task: what to do.
            source: this rank's input, flat.
            target: its result, flat, where something is reduced; None on a rank that gets none.
            numbers: what it tells the others, where something is moved.
        """
        path = self._paths[task.choice.path]
        plan: Plan
        if task.problem.op is not None:
            plan = path.reduction(task, source, target)
        else:
            plan = path.movement(task, source, numbers)
        return plan

    def again(self, prepared: Prepared, task: Task, source: Operand, plan: Plan) -> Callable[[], Any] | None:
        """Return a function that makes a call again with the same arrays; None: the call cannot be repeated.

        Args:
            prepared: the call, which was made.
            task: its task.
            source: its input, as the plan has used it.
            plan: its plan.
        """
        call, result = prepared.call, prepared.result
        reads = self._rank == prepared.root or call.collective not in (Collective.BROADCAST, Collective.SCATTER)
        known = call.array is None or isinstance(call.array, np.ndarray) or hasattr(call.array, "data_ptr")
        if not (plan.reusable and known) or (reads and not _is_all_of(prepared.source, source)):
            return None
        given = source.unowned()
        if result is None:
            return partial(plan.run, given, prepared.place)
        operand = result.operand
        if not isinstance(operand, Operand) or not operand.contiguous or operand.nbytes == 0:
            return None
        if call.out is None:
            return self._into_new(prepared, task, given, plan, operand)
        if operand.is_copy:
            return None
        target = result.part(()) if call.collective is Collective.SCATTER else result.flat()
        into = given if target.address == given.address and target.nbytes == given.nbytes else target.unowned()
        return partial(plan.run, given, partial(_constant, into))

    def _into_new(self, prepared: Prepared, task: Task, given: Operand, plan: Plan, made: Operand) -> Callable[[], Any]:
        """Return a function that makes a call again, with a new array for the result."""
        # These functions must not keep the call alive, which has the arrays.
        collective, array = prepared.call.collective, prepared.call.array
        make: Maker = self._operands.maker(0 if array is None else array)
        shape, dtype = made.shape, made.dtype

        def reduce() -> Any:  # the plan is bound to the memory of the result, too
            out, operand = make(shape, dtype)
            assert isinstance(operand, Operand)
            target = flat(operand)
            self.plan(task, given, target).run(given, partial(_constant, target))
            return out

        def follow() -> Any:  # what the root sends is received in the result
            out, operand = make(shape, dtype)
            assert isinstance(operand, Operand)
            target = flat(operand)
            self.plan(task, target, None).run(target, partial(_constant, target))
            return out

        def move() -> Any:
            result = Result(self._operands, make, row=shape[1:], dtype=dtype)
            if collective is Collective.BROADCAST:
                result.make(shape, dtype)
            plan.run(given, result.part if collective is Collective.SCATTER else result.place)
            return result.out

        if task.problem.op is not None:
            return reduce
        return follow if collective is Collective.BROADCAST and self._rank != prepared.root else move

    # ---- what each collective needs ----

    def _root(self, root: object) -> int:
        """Return the number of a rank.

        Raises:
            ConfigError: there is no such rank.
        """
        number = whole_number("root", root)
        if not 0 <= number < self._size:
            raise ConfigError(f"root must be a rank, 0 to {self._size - 1}, got {number}")
        return number

    def _allreduce(self, call: Call) -> Prepared:
        op = call.op if isinstance(call.op, ReduceOp) else ReduceOp.parse(call.op)
        source, codec = operand_of(call.array), None
        if call.deterministic:
            other = f"wire={call.compression!r}" if call.algorithm is None else f"algorithm={call.algorithm!r}"
            raise ConfigError(f"give deterministic=True or {other}, not both")
        if call.compression is not None:
            wire, deterministic = call.compression, self._context.config.deterministic
            if call.algorithm is not None:
                raise ConfigError(
                    f"a wire format is an algorithm of its own; give wire={wire!r} or algorithm, not both"
                )
            codec = codec_for(wire, source.dtype, op, deterministic=deterministic)
        result, nbytes = self._operands.result(call.array, source, source.shape, call.out), source.nbytes
        return Prepared(
            *(call, source, result, source.shape, op.value, source.dtype, op),
            nbytes=nbytes,
            counted=nbytes,
            codec=codec,
        )

    def _reduce(self, call: Call) -> Prepared:
        root, op = self._root(call.root), ReduceOp.parse(call.op)
        source = require_host(operand_of(call.array), "reduce")
        result = None
        if self._rank == root:
            result = self._operands.result(call.array, source, source.shape, call.out)
        self._operands.require_usable(source)
        nbytes, argument = source.nbytes, f"{op.value}, root {root}"
        return Prepared(
            call, source, result, source.shape, argument, source.dtype, op, root, nbytes=nbytes, counted=nbytes
        )

    def _reduce_scatter(self, call: Call) -> Prepared:
        op, source = ReduceOp.parse(call.op), with_rows(call.array, "reduce_scatter")
        parts, row = Partition.first_larger(source.shape[0], self._size).segment, prod(source.shape[1:])
        lengths = [part.stop - part.start for part in parts]
        shape = (lengths[self._rank], *source.shape[1:])
        result, nbytes = self._operands.result(call.array, source, shape, call.out), source.nbytes
        counts = tuple([each * row for each in lengths])
        return Prepared(
            *(call, source, result, source.shape, op.value, source.dtype, op),
            nbytes=nbytes,
            counted=nbytes,
            counts=counts,
            start=-sum(counts[: self._rank]),
        )

    def _broadcast(self, call: Call) -> Prepared:
        root, source = self._root(call.root), operand_of(call.array)
        result, nbytes = self._operands.result(call.array, source, source.shape, call.out), source.nbytes
        return Prepared(
            *(call, source, result, source.shape, f"root {root}", source.dtype),
            root=root,
            nbytes=nbytes,
            counted=nbytes,
        )

    def _allgather(self, call: Call) -> Prepared:
        source = with_rows(call.array, "allgather")
        result = self._operands.rows(call.array, source, call.out)
        return self._exchanging(call, source, result, (source.shape[0],), counted=source.nbytes * self._size)

    def _alltoall(self, call: Call) -> Prepared:
        source = with_rows(call.array, "alltoall")
        result = self._operands.rows(call.array, source, call.out)
        rows = tuple(row_counts(call.splits, source.shape[0], self._size))
        prepared = self._exchanging(call, source, result, rows, counted=source.nbytes)
        prepared.counts_result, prepared.start, prepared.is_apart = False, None, True
        return prepared

    def _gather(self, call: Call) -> Prepared:
        root, source = self._root(call.root), require_host(with_rows(call.array, "gather"), "gather")
        am_root = self._rank == root
        self._operands.require_usable(source)
        result = self._operands.rows(call.array, source, call.out) if am_root else None
        counted = source.nbytes * (self._size if am_root else 1)
        prepared = self._exchanging(call, source, result, (source.shape[0],), counted=counted)
        prepared.argument, prepared.root, prepared.counts_result = f"root {root}", root, am_root
        return prepared

    def _exchanging(
        self, call: Call, source: AnyOperand, result: Result | None, rows: tuple[int, ...], *, counted: int
    ) -> Prepared:
        """Prepare a collective to which ranks give any number of rows: one number for all, or one for each."""
        return Prepared(
            *(call, source, result, ("*", *source.shape[1:]), "", source.dtype),
            counted=counted,
            counts_result=True,
            numbers=(-1 if result is None else result.room, *rows),
            row=prod(source.shape[1:]),
            is_apart=False,
        )

    def _scatter(self, call: Call) -> Prepared:
        root, operands, array = self._root(call.root), self._operands, call.array
        given, part = None, None
        if array is not None:
            given = require_host(with_rows(array, "scatter"), "scatter")
            rows = given.shape[0]
            if rows % self._size:
                raise ConfigError(f"scatter: {rows} rows do not divide into {self._size} equal parts")
            part = (rows // self._size, *given.shape[1:]), given.dtype
        elif self._rank == root:
            raise ConfigError("scatter: the root has to pass an array")
        result = Result(operands, operands.maker(0 if array is None else array))
        if call.out is not None and given is not None and part is not None:
            result = operands.result(array, given, part[0], call.out)
        elif call.out is not None:
            target = require_host(operand_of(call.out), "scatter")
            target.require_writable()
            result, part = Result(operands, out=call.out, operand=target), (target.shape, target.dtype)
        source = Operand(np.empty(0, np.uint8), DTYPES["uint8"])
        if given is not None and self._rank == root:
            whole, is_copy = flat(given), given.is_copy or not given.contiguous
            source = Operand(whole.view.view(np.uint8), DTYPES["uint8"], whole.address, is_copy=is_copy)
        counted = source.nbytes or (0 if part is None else prod(part[0]) * part[1].itemsize)
        return Prepared(
            *(call, source, result, None, f"root {root}", source.dtype),
            root=root,
            counted=counted,
            counts_result=source.nbytes == 0,
            numbers=part_numbers(part),
            is_apart=False,
        )


def _is_all_of(given: AnyOperand, used: Operand) -> bool:
    """Return whether the input was used where the caller has it, without a copy, and has elements."""
    own = isinstance(given, Operand) and given.contiguous and not given.is_copy and given.nbytes > 0
    return own and isinstance(given, Operand) and given.address == used.address


def _constant(target: Operand, rows: Sequence[int]) -> Operand:
    return target


def _signature(
    problem: Problem, choice: Choice, algorithm: str | None, shape: tuple[object, ...] | None, argument: str
) -> Signature:
    """Return the signature of a call; it depends on nothing that may differ between ranks."""
    arguments = [argument] if shape is None else [argument, f"shape {shape_text(shape)}", problem.dtype.name]
    if algorithm is not None:
        arguments.append(f"algorithm {algorithm}")
    text = f"{problem.collective.value}({', '.join(filter(None, arguments))})"
    return Signature.of(text, waits=_waits(problem, choice, shape))


def _waits(problem: Problem, choice: Choice, shape: tuple[object, ...] | None) -> bool:
    """Return whether no rank can end a call before all have come to it; see `Signature`."""
    if problem.collective in (Collective.GATHER, Collective.SCATTER):
        return True  # all say how much they have, and hear it of all
    if problem.collective.rooted or shape is None or choice.path is VendorPath or 0 in shape:
        return False  # a rank that has its data goes on without the others; for an empty array nobody waits
    size = problem.topology.size
    rows = shape[0] if problem.collective is Collective.REDUCE_SCATTER else size
    return isinstance(rows, int) and rows >= size  # with fewer, some ranks get nothing
