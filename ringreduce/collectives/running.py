"""Runs calls: repeats one that was made before, or checks, plans and runs a new one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from ringreduce.algorithms import Collective
from ringreduce.buffers import Operand, as_given
from ringreduce.buffers.codecs import Codec
from ringreduce.buffers.device_arrays import DeviceOperand
from ringreduce.collectives.call import Call, Signature, Task
from ringreduce.collectives.compressed import CompressedAllreduce
from ringreduce.collectives.context import Context
from ringreduce.collectives.devices import Devices, SegmentReducer
from ringreduce.collectives.messaging import CallTimer
from ringreduce.collectives.operands import Operands, apart, flat
from ringreduce.collectives.planning import Planner, Prepared
from ringreduce.collectives.rows import received_rows
from ringreduce.collectives.state import CommState
from ringreduce.common.errors import UnsupportedBufferError
from ringreduce.common.instruments import Tally

__all__ = ["MISSED", "Runner"]

#: What `Runner.repeat` returns, in place of a result, where it has nothing to repeat.
MISSED: Any = object()


class Runner:
    """Runs the calls of one process set.

    Args:
        context: the ranks.
        state: whether calls may be made.
        gpu: this rank's device memory.
        tallies: what the calls of each collective add up to, by its name.

    Attributes:
        operands: checks arrays and makes those of results.
        planner: plans the calls.
    """

    def __init__(self, context: Context, state: CommState, gpu: Devices, tallies: Mapping[str, Tally]) -> None:
        self._context, self._state, self._gpu, self._tallies = context, state, gpu, tallies
        self._plans, self._repeats, self._instruments = context.plans, context.plans.repeats, context.instruments
        self.operands = Operands(gpu, context.arena, shares_results=context.topology.size > 1)
        self.planner = Planner(context, self.operands)
        self._compressed = CompressedAllreduce(context)

    def run(self, call: Call) -> Any:
        """Make a call that is a value; see `make`."""
        collective = call.collective.value
        if call.splits is None and call.compression is None:
            repeated = self.repeat(collective, call.array, call.out, call.op, call.algorithm, call.root)
            if repeated is not MISSED:
                return repeated
        return self._state.call(collective, self.perform, call)

    def make(
        self, collective: str, array: Any, out: Any, op: Any = None, algorithm: str | None = None, root: Any = 0
    ) -> Any:
        """Make a call: repeat it if it was made with the same arrays before. Arguments are those of `Call`."""
        if type(root) is int:
            repeated = self.repeat(collective, array, out, op, algorithm, root)
            if repeated is not MISSED:
                return repeated
        call = Call(Collective(collective), array, out, op, root, None, algorithm)
        return self._state.call(collective, self.perform, call)

    def repeat(self, collective: str, array: Any, out: Any, op: Any, algorithm: str | None, root: Any = 0) -> Any:
        """Make a call again that was made with the same arrays before; return `MISSED` if none was."""
        repeat, instruments = self._repeats.get((id(array), id(out), collective, root)), self._instruments
        if (
            repeat is None
            or repeat.op is not op
            or repeat.algorithm is not algorithm
            or not repeat.is_array(array)
            or not (repeat.is_out is None or repeat.is_out(out))
            or instruments.observers
            or self._plans.crowded  # a repeat into a new array makes plans, too
        ):
            return MISSED
        state, tally, nbytes = self._state, repeat.tally, repeat.nbytes
        begun = state.calls.number
        started = perf_counter()
        record: list[Any] = [started, 0.0, collective, nbytes]
        instruments.calls.append(record)
        try:
            made = state.quiet.run(repeat.run)
        except BaseException as error:
            state.end(collective, error, begun)
            raise
        result = made if out is None else out
        if repeat.counts_result:
            record[3] = nbytes = result.nbytes
        tally.calls += 1
        tally.nbytes += nbytes
        record[1] = ended = perf_counter()
        tally.seconds += ended - started
        return result

    def perform(self, call: Call) -> Any:
        """Check, choose, plan and run a call; remember how to repeat it."""
        self._state.require_open()
        if self._plans.crowded:
            self._plans.trim()
        prepared = self.planner.prepare[call.collective](call)
        source = prepared.source
        if prepared.codec is not None:
            if not self._context.topology.single_node:
                return self._reduce_compressed(prepared, prepared.codec)
            if call.feedback is not None:
                call.feedback.begin(0, 0)
        if isinstance(source, DeviceOperand) and call.collective is Collective.ALLREDUCE:
            return self._reduce_on_device(prepared, source)
        task = self.planner.task(prepared)
        timer = self._timer(prepared, task.choice.algorithm)
        follows = call.collective is Collective.BROADCAST and self._context.rank != prepared.root
        with timer:
            if isinstance(source, Operand):
                self._run(prepared, task, source, follows=follows)
            else:
                with self.operands.on_host(source, fetch=not follows) as given:
                    self._run(prepared, task, given, follows=follows)
            if prepared.counts_result and prepared.result is not None:
                assert prepared.result.operand is not None
                timer.nbytes = prepared.result.operand.nbytes
        return self._finish(prepared)

    def _run(self, prepared: Prepared, task: Task, given: Operand, *, follows: bool) -> None:
        """Find or make the plan of a call, and run it.

        Args:
            prepared, task: the call.
            given: its input in host memory.
            follows: whether it is a broadcast of another rank: then its result takes the place of its input.
        """
        planner, result = self.planner, prepared.result
        target = None if result is None or result.operand is None else result.flat()
        source = flat(given)
        if follows:
            assert target is not None
            source = target
        elif target is not None and prepared.is_apart:
            source = apart(source, target, prepared.start)
        plan = planner.plan(task, source, target, prepared.numbers)
        try:
            plan.run(source, prepared.place)
        finally:
            if not plan.reusable:
                plan.close()
        prepared.again = planner.again(prepared, task, source, plan)

    def _finish(self, prepared: Prepared) -> Any:
        """Return the result of a call that has run, and remember how to repeat it."""
        call, result = prepared.call, prepared.result
        counted, counts_result = prepared.counted, prepared.counts_result and call.out is None
        if prepared.counts_result and result is not None and result.operand is not None:
            counted = result.operand.nbytes
        repeatable = call.splits is None and call.compression is None
        if prepared.again is not None and repeatable and self._state.open:  # another thread may have given up
            tally = self._tallies[call.collective.value]
            self._plans.keep(call, prepared.again, tally, counted, counts_result=counts_result)
        if result is None:
            return None
        out = result.finish()
        if call.splits is not None:
            return out, list(result.rows)
        return as_given(call.array, out) if call.out is None and call.array is not None else out

    def _timer(self, prepared: Prepared, algorithm: str) -> CallTimer:
        collective = prepared.call.collective.value
        tally, fail = self._tallies[collective], self._state.fail
        return CallTimer(self._instruments, tally, collective, algorithm, prepared.counted, fail)

    def _reduce_compressed(self, prepared: Prepared, codec: Codec) -> Any:
        result, task = prepared.result, self.planner.compressed(prepared, codec)
        assert result is not None
        with self._timer(prepared, task.choice.algorithm), self.operands.on_host(prepared.source) as given:
            target = result.flat()
            source = apart(flat(given), target)
            self._compressed.allreduce(codec, task, source, target, prepared.call.feedback)
        return self._finish(prepared)

    def _reduce_on_device(self, prepared: Prepared, source: DeviceOperand) -> Any:
        result, call = prepared.result, prepared.call
        assert result is not None
        assert isinstance(result.operand, DeviceOperand)
        timer = partial(self._timer, prepared)
        reducers = partial(self._segment_reducers, prepared)
        self._gpu.allreduce(source, result.operand, prepared.op, call.algorithm, reducers, timer)
        return result.out

    def _segment_reducers(self, prepared: Prepared, parts: Sequence[slice]) -> dict[int, SegmentReducer]:
        """Return, by their number of elements, what reduces segments of an array in device memory, in host memory."""
        lengths = dict.fromkeys(part.stop - part.start for part in (parts[0], parts[-1]))
        usual = next(iter(lengths))
        tasks = {count: self.planner.segment(prepared, count, usual) for count in lengths}
        return {
            count: SegmentReducer(task.choice, task.signature, partial(self._reduce_segment, task))
            for count, task in tasks.items()
        }

    def _reduce_segment(self, task: Task, segment: Operand) -> None:
        """Reduce a segment, in place, of an array in device memory that was copied to host memory."""
        plan = self.planner.plan(task, segment, segment)
        plan.run(segment, lambda rows: segment)
        if not plan.reusable:
            plan.close()

    # ---- persistent collectives ----

    def plan(self, call: Call) -> tuple[Call, str]:
        """See `Communicator.plan`."""
        name = f"{call.collective.value}_init"
        planned: tuple[Call, str] = self._state.call(name, self._plan, name, call)
        return planned

    def _plan(self, name: str, call: Call) -> tuple[Call, str]:
        self._state.require_open()
        prepared = self.planner.prepare[call.collective](call)
        result, source = prepared.result, prepared.source
        if isinstance(source, Operand) and source.is_copy:
            raise UnsupportedBufferError(
                f"{name} takes an array, whose content may change from run to run; got a number, or a lazy conjugate"
            )
        text = self.planner.task(prepared).signature.text
        signature = Signature.of(name + text.removeprefix(call.collective.value), waits=False)
        try:
            self._context.meet(signature)
            if prepared.numbers:
                told = self.perform(Call(Collective.ALLGATHER, np.array([prepared.numbers]))).tolist()
                rows = received_rows(signature.text, told, self._context.rank)
                if result is not None and result.operand is None:
                    result.place(rows)
        except BaseException as error:
            self._state.fail(error)
            raise
        return (call if result is None else call._replace(out=result.out)), text
