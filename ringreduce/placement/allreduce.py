"""The allreduce: from two operands to a plan, over mailboxes, shared buffers, staging areas or messages.

Plans are kept for memory that is ours (the arena), never for the caller's: a kept plan would keep the array alive. A
private array of moderate size travels through a buffer of the plan; a large one gets a plan for the one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ringreduce import selection
from ringreduce.algorithms import Collective
from ringreduce.algorithms.execute import Memory, Plan
from ringreduce.algorithms.fused import OneShot, Staged
from ringreduce.buffers import (
    Call,
    DType,
    Operand,
    divide,
    divide_toward_zero,
    kernels_for,
    narrow,
    widen,
    wider,
)
from ringreduce.partition import Partition, segments_of_buffer
from ringreduce.placement.context import Cache, Context, Signature
from ringreduce.reduce_ops import ReduceOp
from ringreduce.selection import Choice
from ringreduce.transport.board import MAILBOX_NBYTES, NOWHERE
from ringreduce.transport.shared import Location

__all__ = ["Allreduce", "OperandReducer", "TwoShot", "peer_views"]

Array = npt.NDArray[Any]
#: Reduces a source into a target.
OperandReducer = Callable[[Operand, Operand], object]

#: A private array of up to this many bytes is copied into a plan's own buffer, so that the plan can be kept.
_OWN_BUFFER_NBYTES = 1 << 20
#: Blocks of the two-shot begin on cache lines: a line that two ranks write would travel between their cores.
_LINE_NBYTES = 64


class Allreduce:
    """Carries out allreduces of one process set; validated operands of equal shape and dtype come in."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._one_shots: Cache[OneShot] = Cache()
        self._two_shots: Cache[TwoShot] = Cache()
        self._message_plans: Cache[_MessagePlan] = Cache()

    def run(self, source: Operand, target: Operand, op: ReduceOp, choice: Choice, signature: Signature) -> None:
        """Reduce ``source`` over all ranks into ``target``, which is the same memory or apart from it.

        Raises:
            MismatchError, CollectiveTimeoutError, TransportError: see the communicator.
        """
        dtype = source.dtype
        if choice.transport == "self":
            np.copyto(target.view, source.view)
        elif _averages_integers(op, dtype):
            self._widened(source, target, ReduceOp.SUM, choice, signature)
        elif self.goes_through_mailbox(choice):
            self.one_shot(dtype, source.shape, op, signature).run(source.view, target.view)
        elif choice.transport == "shared":
            self._two_shot(source, target, op, signature)
        elif dtype.half:
            self._widened(source, target, op, choice, signature)
        elif choice.algorithm == selection.VENDOR:
            self._by_library(source, target, op, choice, signature)
        else:
            self._over_messages(source, target, op, choice, signature)

    def reducer(
        self, dtype: DType, shape: tuple[int, ...], op: ReduceOp, choice: Choice, signature: Signature
    ) -> OperandReducer:
        """Return what does what `run` does, for operands of this dtype and shape."""
        if self.goes_through_mailbox(choice) and not _averages_integers(op, dtype):
            plan = self.one_shot(dtype, shape, op, signature)
            return lambda source, target: plan.run(source.view, target.view)
        return lambda source, target: self.run(source, target, op, choice, signature)

    def repetition(
        self, array: Any, target: Operand, op: ReduceOp, choice: Choice, signature: Signature
    ) -> Callable[[Any], object] | None:
        """Return what repeats this in-place call with everything looked up, None if that is not worth it.

        It must not hold on to the array, or the array would never be freed.
        """
        if choice.transport == "self" or _averages_integers(op, target.dtype):
            return None
        if choice.transport != "shared":
            return self._repetition_over_messages(array, target, op, choice, signature)
        if self.goes_through_mailbox(choice):
            plan = self.one_shot(target.dtype, target.shape, op, signature)
            if array is target.view:
                return lambda same: plan.run(same, same)
            if isinstance(array, np.ndarray):  # bfloat16: a view of it that is kept would keep the array
                return None
            view = target.view
            return lambda _: plan.run(view, view)
        location = self.locate(target)
        two_shot = self.two_shot(target.dtype, target.count, location, op, signature)
        if location is not None:
            return two_shot.run_located
        if array is target.view and target.contiguous:

            def run(same: npt.NDArray[Any]) -> None:
                flat = same.reshape(-1)
                two_shot.run_private(flat, flat)

            return run
        return None

    def _repetition_over_messages(
        self, array: Any, target: Operand, op: ReduceOp, choice: Choice, signature: Signature
    ) -> Callable[[Any], object] | None:
        if target.dtype.half or choice.algorithm == selection.VENDOR:
            return None
        messages = self._messages(target, op, choice, signature)
        if messages.located:
            return lambda _: messages.run(None, None)
        if array is target.view:
            return lambda same: messages.run(same, same)
        return None

    def close(self) -> None:
        for plans in (self._one_shots, self._two_shots, self._message_plans):
            plans.close()

    # ---- one node ----

    def goes_through_mailbox(self, choice: Choice) -> bool:
        """Return whether this is an allreduce for `one_shot`."""
        return choice.algorithm == "one_shot" and choice.transport == "shared"

    def one_shot(self, dtype: DType, shape: tuple[int, ...], op: ReduceOp, signature: Signature) -> OneShot:
        """Return the plan for small arrays of this signature; it takes the arrays when it runs."""

        def make() -> OneShot:
            kernels = kernels_for(dtype, op, self._context.topology.size)
            context = self._context
            return OneShot(context.board, context.instruments, signature.text, dtype.storage, shape, kernels)

        return self._one_shots.get(signature.code, make)

    def _two_shot(self, source: Operand, target: Operand, op: ReduceOp, signature: Signature) -> None:
        """Reduce in place where every rank's buffer can be reached, else through the staging areas."""
        location = self.locate(target)
        plan = self.two_shot(source.dtype, source.count, location, op, signature)
        if location is not None:
            if source.address != target.address:
                np.copyto(target.view, source.view)
            plan.run_located()
            return
        flat = source.flat()
        if source.dtype.half and not flat.flags.writeable:
            flat = flat.copy()  # torch, which has the fast kernels, knows no read-only memory
        result = target.flat() if target.contiguous else np.empty_like(flat)
        plan.run_private(flat, result)
        if not target.contiguous:
            np.copyto(target.view, result.reshape(target.shape))

    def locate(self, operand: Operand) -> Location | None:
        """Return where the operand lies in the arena, None if peers cannot reach it as it is."""
        if not operand.contiguous:
            return None
        return self._context.arena.locate(operand.address, operand.nbytes)

    def two_shot(
        self, dtype: DType, count: int, location: Location | None, op: ReduceOp, signature: Signature
    ) -> TwoShot:
        """Return the plan for ``count`` elements of the arena, or (``location`` None) of any private memory."""
        context = self._context
        return self._two_shots.get(
            (signature.code, location), lambda: TwoShot(context, dtype, count, location, op, signature)
        )

    # ---- several nodes, or an algorithm that was asked for ----

    def _widened(self, source: Operand, target: Operand, op: ReduceOp, choice: Choice, signature: Signature) -> None:
        """Reduce in a wider type: exact averages of integers, one rounding of 16-bit floats."""
        wide = widen(source.view, source.dtype)
        operand = Operand(wide, wider(source.dtype))
        if self.goes_through_mailbox(choice) and operand.nbytes > MAILBOX_NBYTES:
            choice = replace(choice, algorithm="two_shot")  # the same bits, from buffers of any size
        self.run(operand, operand, op, choice, signature)
        if source.dtype.kind != "float":
            divide_toward_zero(wide, self._context.topology.size)
        narrow(wide, target.dtype, target.view)

    def _by_library(self, source: Operand, target: Operand, op: ReduceOp, choice: Choice, signature: Signature) -> None:
        """Let the MPI library reduce, where it can; it compares nothing, so the ranks do each time."""
        context, dtype = self._context, target.dtype
        if not context.messages.offers_allreduce(target.count, dtype.name, op):
            ours = replace(choice, algorithm="recursive_doubling")
            self._over_messages(source, target, op, ours, signature)
            return
        context.meet(signature)
        flat = target.flat() if target.contiguous else np.empty(target.count, dtype.storage)
        if source.address != target.address or not target.contiguous:
            np.copyto(flat.reshape(source.shape), source.view)
        context.messages.allreduce(flat, dtype.name, op)
        if context.instruments.observers:
            context.instruments.step("the library's own allreduce")
        if op is ReduceOp.AVERAGE:
            divide(flat, context.topology.size)
        if not target.contiguous:
            np.copyto(target.view, flat.reshape(target.shape))

    def _over_messages(
        self, source: Operand, target: Operand, op: ReduceOp, choice: Choice, signature: Signature
    ) -> None:
        messages = self._messages(target, op, choice, signature)
        if messages.located and source.address == target.address:
            messages.run(None, None)
        elif messages.located:
            messages.run(source.view, None)
        else:
            messages.run(source.view, target.view)

    def _messages(self, target: Operand, op: ReduceOp, choice: Choice, signature: Signature) -> _OverMessages:
        location = self.locate(target)
        plans = self._message_plans if location is not None or target.nbytes <= _OWN_BUFFER_NBYTES else None
        make = partial(_MessagePlan, self._context, choice, target.dtype, target.count, location, op, signature)
        return _OverMessages(self._context, choice, signature, location, plans, make)


class _OverMessages:
    """An allreduce over messages, of whatever memory; finds or makes its plan in each call.

    Attributes:
        located: whether the target's own memory is reduced in place; otherwise what is reduced is copied in and out.
    """

    def __init__(
        self,
        context: Context,
        choice: Choice,
        signature: Signature,
        location: Location | None,
        plans: Cache[_MessagePlan] | None,
        make: Callable[[], _MessagePlan],
    ) -> None:
        self._context = context
        self._meets = choice.transport == "messages"  # otherwise at the board of the node
        self._signature = signature
        self._key = signature.code, location
        self._plans = plans
        self._make = make
        self.located = location is not None

    def run(self, source: Array | None, target: Array | None) -> None:
        """Reduce; ``source`` is copied in first and the result copied to ``target``, unless these are None."""
        if self._meets:
            self._context.meet(self._signature)
        plans = self._plans
        plan = plans.get(self._key, self._make) if plans is not None else self._make()
        try:
            if source is not None:
                np.copyto(plan.memory.reshape(source.shape), source)
            plan.run()
            if target is not None:
                np.copyto(target, plan.memory.reshape(target.shape))
        finally:
            if plans is None:
                plan.close()


class TwoShot:
    """The two-shot on one node: in place where all ranks' buffers lie in the arena, else through the staging areas.

    Bound to this rank's location; bound again when a peer's buffer lies elsewhere than in the last call.
    """

    def __init__(
        self,
        context: Context,
        dtype: DType,
        count: int,
        location: Location | None,
        op: ReduceOp,
        signature: Signature,
    ) -> None:
        self._context = context
        self._board = context.board
        self._location = NOWHERE if location is None else location.packed
        self._text, self._code = signature.text, signature.code
        self._kernels = kernels_for(dtype, op, context.topology.size)
        self._instruments = context.instruments
        self._staged = cache(
            lambda: Staged(context.board, context.instruments, signature.text, dtype.storage, count, self._kernels)
        )
        self._mine = None if location is None else context.arena.view(location, dtype.storage, count)
        self._others: list[int] = []
        self._calls: list[Call] | None = None

    def run_located(self, _: object = None) -> None:
        """Reduce what lies at the location, in place."""
        board = self._board
        others = board.arrive(self._text, self._code, self._location)
        if others != self._others:
            self._bind(others)
        instruments = self._instruments
        if instruments.observers:
            instruments.step("meet")
        if self._calls is None:
            self._run_mixed()
            return
        for call in self._calls:
            call()
        if instruments.observers:
            instruments.step("reduce and store")
        board.barrier(self._text)
        if instruments.observers:
            instruments.step("barrier")

    def run_private(self, source: Array, target: Array) -> None:
        """Reduce the flat ``source`` into the flat ``target``, which peers cannot reach."""
        board, staged = self._board, self._staged()
        staged.copy_in(source)
        others = board.arrive(self._text, self._code)
        if max(others) != NOWHERE:
            board.barrier(self._text)  # a rank whose buffer is located stages only now
        if self._instruments.observers:
            self._instruments.step("stage and meet")
        staged.run(source, target)

    def _run_mixed(self) -> None:
        """Stage what lies at the location, as the peers do whose buffers are private."""
        assert self._mine is not None
        staged = self._staged()
        staged.copy_in(self._mine)
        self._board.barrier(self._text)
        staged.run(self._mine, self._mine)

    def _bind(self, others: list[int]) -> None:
        context, mine = self._context, self._mine
        assert mine is not None
        self._others = others
        self._calls = None
        if min(others) == NOWHERE:
            return
        schedule = context.schedule(Collective.ALLREDUCE, "two_shot")
        plan = Plan(
            rank=context.rank,
            schedule=schedule,
            segments=[Partition.even(mine.size, schedule.nblocks, _LINE_NBYTES // mine.itemsize).segment],
            memory=Memory(mine, peer_views(context, others, mine.dtype, mine.size)),
            kernels=self._kernels,
            messages=None,
            waiter=context.waiter,
            signature=self._text,
            instruments=context.instruments,
        )
        self._calls = plan.calls

    def close(self) -> None:
        """Forget the views; a caller who still holds the plan makes it bind again."""
        self._calls, self._others = None, []


class _MessagePlan:
    """An allreduce with messages, on a location of the arena or in a buffer of its own."""

    def __init__(
        self,
        context: Context,
        choice: Choice,
        dtype: DType,
        count: int,
        location: Location | None,
        op: ReduceOp,
        signature: Signature,
    ) -> None:
        self._context = context
        self._choice = choice
        self._dtype = dtype
        self._op = op
        self._signature = signature
        self._own = context.arena.allocate(count * dtype.itemsize) if location is None else None
        self._location = self._own.location if self._own is not None else location
        assert self._location is not None
        self.memory = context.arena.view(self._location, dtype.storage, count)
        self.shared = choice.transport == "shared+messages"
        self._others: list[int] | None = None
        self._plan: Plan | None = None

    def run(self) -> None:
        context = self._context
        if self.shared:
            others = context.meet_at_board(self._signature, self._location)
            if others != self._others:
                self._unbind()
                self._others = others
        if self._plan is None:
            self._plan = self._bind()
        self._plan.run()
        if self.shared:
            context.board.barrier(self._signature.text)
        if self._op is ReduceOp.AVERAGE:
            divide(self.memory, context.topology.size)

    def _bind(self) -> Plan:
        context = self._context
        summing = ReduceOp.SUM if self._op is ReduceOp.AVERAGE else self._op
        schedule = context.schedule(Collective.ALLREDUCE, self._choice.algorithm)
        limit = max(1, context.config.segment_nbytes // self._dtype.itemsize)
        return Plan(
            rank=context.rank,
            schedule=schedule,
            segments=segments_of_buffer(self.memory.size, schedule.nblocks, limit),
            memory=Memory(self.memory, peer_views(context, self._others or [], self.memory.dtype, self.memory.size)),
            kernels=kernels_for(self._dtype, summing, context.topology.size),
            messages=context.messages,
            waiter=context.waiter,
            signature=self._signature.text,
            tag=context.tag(self._signature),
            instruments=context.instruments,
        )

    def _unbind(self) -> None:
        if self._plan is not None:
            self._plan.close()
            self._plan = None

    def close(self) -> None:
        self._unbind()
        if self._own is not None:
            self._context.arena.release(self._own)
            self._own = None


def _averages_integers(op: ReduceOp, dtype: DType) -> bool:
    return op is ReduceOp.AVERAGE and dtype.kind in ("int", "uint", "bool")


def peer_views(context: Context, others: list[int], storage: np.dtype[Any], count: int) -> dict[int, Array]:
    """Return the buffers of the other ranks of the node, by rank."""
    return {
        peer: context.arena.peer_view(peer, Location.unpack(place), storage, count)
        for peer, place in zip(context.board.peers, others, strict=False)
    }
