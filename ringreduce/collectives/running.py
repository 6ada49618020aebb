"""Runs calls: repeats one that was made before, or checks it, chooses its algorithm and path, plans it and runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from time import perf_counter
from typing import Any

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import DTYPES, Operand, address_of, as_given, library_of, native
from ringreduce.buffers.same import same_memory, unchanged
from ringreduce.collectives.call import DETERMINISTIC, Call, CallKind, Choice, Path, Task
from ringreduce.collectives.choice.selection import Chooser
from ringreduce.collectives.comm_state import CallTimer, CommState
from ringreduce.collectives.compressed import CODED, Feedback
from ringreduce.collectives.context import Context
from ringreduce.collectives.operands import LEAST_SHARED_NBYTES, Operands, ResultArray, apart, flat
from ringreduce.collectives.plan import BoundCall, Place, RepeatedCall, constant
from ringreduce.collectives.plans.movements import plan_transfer
from ringreduce.collectives.plans.node_allreduce import plan_allreduce
from ringreduce.collectives.plans.node_movements import plan_loads
from ringreduce.collectives.plans.reductions import plan_reduction
from ringreduce.collectives.preparing import Prepared, prepare
from ringreduce.collectives.rows import agreed_part, received_rows
from ringreduce.common.arguments import shape_text
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.instruments import Tally
from ringreduce.common.reduce_ops import AVERAGE, SUM
from ringreduce.transport.shared.board import Signature

#: Those in which all ranks' arrays have the same shape.
_OF_ONE_SHAPE = (Collective.ALLREDUCE, Collective.REDUCE, Collective.BROADCAST)
#: Collectives by name: to call the enumeration takes half a microsecond.
_COLLECTIVES = {collective.value: collective for collective in Collective}
_FLOAT32 = DTYPES["float32"]
#: Addresses of results whose plans a repeated call remembers.
_RESULTS = 16


class Runner:
    """Runs the calls of one process set.

    Args:
        context: the ranks.
        state: whether calls may be made.
        operands: checks arrays, and makes those of results.
        chooser: chooses algorithms and paths.
        tallies: what the calls of each collective add up to, by its name.
    """

    def __init__(
        self,
        context: Context,
        state: CommState,
        operands: Operands,
        *,
        chooser: Chooser,
        tallies: Mapping[str, Tally],
    ) -> None:
        self._context = context
        self._state = state
        self._operands = operands
        self._chooser = chooser
        self._tallies = tallies
        self._plans = context.plans
        self._choices = context.plans.choices
        self._repeats = context.plans.repeats
        self._instruments = context.instruments
        library = context.node.loops.library
        self._is_same: Callable[[int], int] = _never_asked if library is None else library.is_same

    def run(self, call: Call) -> Any:
        """Make a call that is a value."""
        collective = call.collective.value
        if call.splits is None and not (call.deterministic or call.compression or call.weights):
            return self.make(collective, call.array, call.out, op=call.op, algorithm=call.algorithm, root=call.root)
        return self._state.call(collective, self._perform, call)

    def make(
        self, collective: str, array: Any, out: Any, op: Any = None, algorithm: str | None = None, root: Any = 0
    ) -> Any:
        """Make a call: repeat it if it was made with the same arrays before. Arguments are those of `Call`.

        Callers give them by position: names would take one percent of a small call that is repeated.
        """
        repeat = self._repeats.get((id(array), id(out), collective, root)) if type(root) is int else None
        instruments = self._instruments
        again: Any = False
        if repeat is not None and not instruments.observers and not self._plans.crowded:  # It may make plans, too.
            known_op, known_algorithm, is_array, is_out, found, run, tally, nbytes, counts_result, _, _ = repeat
            again = (
                known_op is op
                and known_algorithm is algorithm
                and (self._is_same(found) if found else is_array(array) and (is_out is None or is_out(out)))
            )
        if not again:
            call = Call(_COLLECTIVES[collective], array, out, op=op, root=root, algorithm=algorithm)
            return self._state.call(collective, self._perform, call)
        state = self._state
        begun = state.calls.counters[0]  # a property would be a call
        started = perf_counter()
        record: list[Any] = [started, 0.0, collective, nbytes]
        instruments.calls.append(record)
        try:
            repeated = state.quiet.run(run)
        except BaseException as error:
            state.end(collective, error, begun)
            raise
        result = repeated if out is None else out
        if counts_result:
            record[3] = nbytes = result.nbytes
        tally.calls += 1
        tally.nbytes += nbytes
        record[1] = ended = perf_counter()
        tally.seconds += ended - started
        return result

    def _perform(self, call: Call) -> Any:
        """Check, choose, plan and run a call; remember how to repeat it."""
        self._context.lifetime.require_open()
        if self._plans.crowded:
            self._plans.trim()
        prepared = prepare(self._context, self._operands, call)
        source = prepared.source
        result = prepared.result
        if prepared.carry_out is not None:
            assert result is not None
            prepared.carry_out(self, partial(self._timer, prepared))
            return result.out
        task = self.task(prepared.kind)
        timer = self._timer(prepared, task.choice.algorithm)
        with timer:
            if isinstance(source, Operand):
                again = self._run(prepared, task, source)
            else:
                follows = call.collective is Collective.BROADCAST and self._context.rank != task.kind.root
                with self._operands.on_host(source, fetch=not follows) as given:
                    again = self._run(prepared, task, given)
            if prepared.counts_result and result is not None:
                assert result.operand is not None
                timer.nbytes = result.operand.nbytes
        repeatable = call.splits is None and call.compression is None and not call.weights
        if again is not None and repeatable and self._context.lifetime.open:  # Another thread may have given up.
            plan, run = again
            self._keep(prepared, timer.nbytes, plan, run=run)
        if result is None:
            return None
        out = result.finish()
        if call.splits is not None and call.collective is Collective.ALLTOALL:
            return out, list(result.rows)
        return as_given(call.array, out) if call.out is None and call.array is not None else out

    def _run(self, prepared: Prepared, task: Task, given: Operand) -> tuple[BoundCall, Callable[[], Any]] | None:
        """Find or make the plan of a call, and run it.

        Args:
            prepared, task: the call.
            given: its input in host memory.

        Returns:
            The plan, and what makes the call again with the same arrays; None: it cannot be repeated.
        """
        result = prepared.result
        kind = task.kind
        target = None if result is None or result.operand is None else result.flat()
        source = flat(given)
        if kind.collective is Collective.BROADCAST and self._context.rank != kind.root:
            assert target is not None
            source = target  # The root sends from its result.
        elif target is not None and prepared.copies_overlap:
            source = apart(source, target, prepared.start)
        plan = self._plan_of(task, source, target, numbers=prepared.numbers, feedback=prepared.call.feedback)
        try:
            plan.run(source, prepared.place)
        finally:
            if not plan.reusable:
                plan.close()
        again = self._again(prepared, task, source, plan=plan)
        return None if again is None else (plan, again)

    def _timer(self, prepared: Prepared, algorithm: str) -> CallTimer:
        collective = prepared.call.collective.value
        tally = self._tallies[collective]
        fail = self._state.fail
        return CallTimer(self._instruments, tally, collective, algorithm=algorithm, nbytes=prepared.counted, fail=fail)

    # ---- tasks and plans ----

    def task(self, kind: CallKind) -> Task:
        """Return the task of a kind of call: choose algorithm and path if the kind is new. Local."""
        task: Task | None = self._choices.get(kind)
        if task is None:
            self._choices.make_room()
            task = self._choices[kind] = self._chosen(kind)
        return task

    def _chosen(self, kind: CallKind) -> Task:
        """Choose algorithm and path, and say what the ranks compare."""
        context = self._context
        shape = kind.shape
        problem = context.problem(kind.collective, kind.nbytes, kind.dtype, op=kind.op)
        if context.counts_decide and kind.collective in _OF_ONE_SHAPE and shape is not None:
            shape = (prod(shape),)
        asked = kind.algorithm if kind.codec is None else CODED
        if kind.weights:
            asked = DETERMINISTIC  # On one node one rank then reduces all terms of an element at once.
        choice = self._chooser.choice(problem, asked)
        assert isinstance(choice.path, Path)
        signature = _signature(kind, choice, shape)
        if kind.codec is not None:
            return Task(kind, choice, signature, dtype=_FLOAT32, op=kind.op, is_wide=kind.dtype is not _FLOAT32)
        reduced = choice.path.as_reduced(problem)
        return Task(kind, choice, signature, dtype=reduced.dtype, op=reduced.op or SUM, is_wide=reduced is not problem)

    def reduce_in_place(self, task: Task, array: Operand) -> None:
        """Reduce an array in flat host memory over all ranks, in place, as a part of a call. Collective.

        Args:
            task: of an allreduce of such arrays.
            array: of this rank.
        """
        plan = self._plan_of(task, array, array)
        plan.run(array, partial(constant, array))
        if not plan.reusable:
            plan.close()

    def _plan_of(
        self,
        task: Task,
        source: Operand,
        target: Operand | None,
        numbers: tuple[int, ...] = (),
        feedback: Feedback | None = None,
    ) -> BoundCall:
        """Find or make the plan of a task.

        Args:
            task: what to do.
            source: this rank's input, flat.
            target: its result, flat, where something is reduced; None on a rank that gets none.
            numbers: what it sends the others, where something is moved.
            feedback: of a call whose elements are encoded.
        """
        context = self._context
        path = task.choice.path
        if path is Path.ALONE:
            return _CopyPlan(task, numbers)
        if path is Path.ONE_SHOT or path is Path.SHARED:
            if task.kind.collective is not Collective.ALLREDUCE:
                return plan_loads(context, task, source, target=target, numbers=numbers)
            assert target is not None
            return plan_allreduce(context, task, source, target=target)
        if not task.kind.collective.reduces:
            return plan_transfer(context, task, source, numbers=numbers)
        return plan_reduction(context, task, source, target=target, feedback=feedback)

    # ---- calls that come again ----

    def _keep(self, prepared: Prepared, nbytes: int, plan: BoundCall, run: Callable[[], Any]) -> None:
        """Remember how to repeat a call, for as long as its arrays live."""
        call = prepared.call
        repeats = self._repeats
        collective = call.collective.value
        key = id(call.array), id(call.out), collective, call.root
        array = call.array
        out = call.out

        def forget(_: object) -> None:
            repeats.pop(key, None)

        counts_result = prepared.counts_result and call.out is None
        kept = None
        if self._is_same is not _never_asked and array is not None:
            kept = unchanged(array) if out is None or out is array else unchanged(array, out)
        repeats[key] = RepeatedCall(
            call.op,
            call.algorithm,
            is_array=same_memory(array, forget, written=out is array),
            is_out=None if out is None or out is array else same_memory(out, forget, written=True),
            unchanged=0 if kept is None else address_of(kept),
            run=run,
            tally=self._tallies[collective],
            nbytes=nbytes,
            counts_result=counts_result,
            plan=plan,
            kept=kept,
        )

    def _again(self, prepared: Prepared, task: Task, source: Operand, plan: BoundCall) -> Callable[[], Any] | None:
        """Return a function that makes a call again with the same arrays; None: the call cannot be repeated.

        Args:
            prepared: the call, which was made.
            task: its task.
            source: its input, as the plan has used it.
            plan: its plan.
        """
        call = prepared.call
        result = prepared.result
        collective = task.kind.collective
        follows = self._context.rank != task.kind.root and collective in (Collective.BROADCAST, Collective.SCATTER)
        lasts = call.array is None or isinstance(call.array, np.ndarray) or hasattr(call.array, "data_ptr")
        whole = prepared.source
        is_own = isinstance(whole, Operand) and whole.contiguous and not whole.is_copy and whole.nbytes > 0
        if not (plan.reusable and plan.settled and lasts and (follows or (is_own and whole.address == source.address))):
            return None
        given = source.unowned()
        if result is None:
            return partial(plan.run, given, prepared.place)
        operand = result.operand
        if not isinstance(operand, Operand) or not operand.contiguous or operand.nbytes == 0:
            return None
        if call.out is None:
            return self._into_new(prepared, task, given, plan=plan)
        if operand.is_copy:
            return None
        target = result.part(()) if collective is Collective.SCATTER else result.flat()
        into = given if target.address == given.address and target.nbytes == given.nbytes else target.unowned()
        return plan.repeated(given, into)

    def _into_new(self, prepared: Prepared, task: Task, given: Operand, plan: BoundCall) -> Callable[[], Any]:
        """Return a function that makes a call again, with a new array for the result."""
        # It must not keep the call alive, which has the arrays.
        array = prepared.call.array
        collective = task.kind.collective
        assert prepared.result is not None
        assert prepared.result.operand is not None
        shape = prepared.result.operand.shape
        dtype = prepared.result.operand.dtype
        if prepared.numbers:  # Other ranks decide the shape.
            make = self._operands.maker(0 if array is None else array)

            def again_by_rows() -> Any:
                result = ResultArray(self._operands, make, row=shape[1:], dtype=dtype)
                plan.run(given, result.part if collective is Collective.SCATTER else result.place)
                return result.out

            return again_by_rows
        library = "numpy" if array is None else library_of(array)
        count = prod(shape)
        into_any = plan.into_any(given) if count * dtype.itemsize < LEAST_SHARED_NBYTES else None
        if into_any is not None:

            def again_anywhere() -> Any:
                view = np.empty(shape, dtype.storage)
                into_any(view)
                return native(view, dtype, library)

            return again_anywhere
        follows = collective is Collective.BROADCAST and self._context.rank != task.kind.root
        plans = self._plans
        make_result = self._operands.host_maker(shape, dtype)
        bound: dict[int, tuple[int, Callable[[], object]]] = {}  # By the address of a result, which comes again.

        def again() -> Any:
            view, address = make_result()
            closed, run = bound.get(address, (-1, None))
            if run is None or closed != plans.closed:
                target = flat(Operand(view, dtype, address)).unowned()
                source = target if follows else given
                bound_call = self._plan_of(task, source, target)
                if not bound_call.reusable:
                    try:
                        bound_call.run(source, partial(constant, target))
                    finally:
                        bound_call.close()
                    return native(view, dtype, library)
                run = bound_call.repeated(source, target)
                if len(bound) >= _RESULTS:
                    bound.clear()
                bound[address] = plans.closed, run
            run()
            return native(view, dtype, library)

        return again

    # ---- persistent collectives ----

    def plan(self, call: Call) -> tuple[Call, str]:
        """See `Communicator.plan`."""
        name = f"{call.collective.value}_init"
        planned: tuple[Call, str] = self._state.call(name, self._plan, name, call)
        return planned

    def _plan(self, name: str, call: Call) -> tuple[Call, str]:
        self._context.lifetime.require_open()
        prepared = prepare(self._context, self._operands, call)
        result = prepared.result
        source = prepared.source
        if isinstance(source, Operand) and source.is_copy:
            raise UnsupportedBufferError(
                f"{name} takes an array, whose content may change from run to run; got a number, or a lazy conjugate"
            )
        text = self.task(prepared.kind).signature.text
        signature = Signature.of(name + text.removeprefix(call.collective.value), waits=False)
        try:
            self._context.rendezvous(signature)
            if prepared.numbers:
                everyone = self._perform(Call(Collective.ALLGATHER, np.array([prepared.numbers]))).tolist()
                rows = received_rows(signature.text, everyone, self._context.rank)
                if result is not None and result.operand is None:
                    result.place(rows)
        except BaseException as error:
            self._state.fail(error)
            raise
        return (call if result is None else call._replace(out=result.out)), text


def _never_asked(_: int) -> int:
    raise AssertionError


class _CopyPlan(BoundCall):
    """What a rank does that is alone: its input is its result."""

    reusable = False

    def __init__(self, task: Task, numbers: tuple[int, ...]) -> None:
        self._task = task
        self._numbers = numbers

    def run(self, source: Operand, place: Place) -> None:
        task = self._task
        rows = list[int]()
        if task.kind.collective is Collective.SCATTER:
            rows = agreed_part(task.signature.text, [self._numbers], 0)
        elif self._numbers:
            rows = received_rows(task.signature.text, [self._numbers], 0)
        target = place(rows)
        if target.address != source.address:
            np.copyto(target.view, source.view)


def _signature(kind: CallKind, choice: Choice, shape: tuple[object, ...] | None) -> Signature:
    """Return the signature of a call; it depends on nothing that may differ between ranks."""
    arguments = [kind.argument] if shape is None else [kind.argument, f"shape {shape_text(shape)}", kind.dtype.name]
    if kind.algorithm is not None:
        arguments.append(f"algorithm {kind.algorithm}")
    text = f"{kind.collective.value}({', '.join(filter(None, arguments))})"
    return Signature.of(text, waits=_waits(kind, choice, shape))


def _waits(kind: CallKind, choice: Choice, shape: tuple[object, ...] | None) -> bool:
    """Return whether no rank can end a call before all have come to it; see `Signature`."""
    if kind.collective in (Collective.GATHER, Collective.SCATTER):
        return True  # Each rank publishes how much it has, and reads the others' numbers.
    if kind.collective is Collective.REDUCE and kind.dtype.is_long and kind.op is AVERAGE and kind.nbytes:
        return True  # All ranks learn at the end whether sums could wrap around.
    if kind.collective.rooted or shape is None or choice.path is Path.LIBRARY or 0 in shape:
        return False  # A rank that has its data goes on without the others; for an empty array nobody waits.
    # With fewer rows than ranks, some ranks get nothing of a reduce-scatter.
    return kind.collective is not Collective.REDUCE_SCATTER or 0 not in kind.counts
