"""What the collectives of one process set share: ranks, transports, plans, scratch, the rendezvous before each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import numpy as np

from ringreduce.algorithms import Collective, Schedule, schedule_for
from ringreduce.buffers import DTYPES, Array, Call, DType, Kernels, Operand, WeightedKernels, kernels_for, unowned
from ringreduce.collectives.call import Problem, Task
from ringreduce.collectives.plan import BoundCall, Plans
from ringreduce.collectives.plans.bound import (
    STREAMS,
    BlockMemory,
    BoundSchedule,
    Coding,
    Elements,
    Link,
    segment_limit,
)
from ringreduce.common.call_sites import AbortReason, CallSite
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError
from ringreduce.common.instruments import Instruments
from ringreduce.common.lifetime import Lifetime
from ringreduce.common.partition import Segment
from ringreduce.common.reduce_ops import MAX, ReduceOp
from ringreduce.common.topology import Topology
from ringreduce.transport.agreement import Agreement
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.shared.arena import Arena, Block
from ringreduce.transport.shared.board import Board, Signature
from ringreduce.transport.shared.compiled import (
    BARRIER,
    ENTER,
    CompiledCall,
    CompiledKernels,
    Instruction,
    compile_call,
    expect,
)
from ringreduce.transport.shared.direct import INNER_NBYTES
from ringreduce.transport.shared.node import Node
from ringreduce.transport.waiting import Waiter

#: Blocks begin on cache lines: a line that two ranks write would travel between their cores.
LINE_NBYTES = 64
#: Places of the other ranks' arrays that a plan is bound to at once.
BINDINGS = 256


class _CallScratch:
    """Memory that calls use one after the other: kernels with theirs, copies of private memory of other ranks."""

    def __init__(self) -> None:
        self.kernels: dict[tuple[str, ReduceOp], Kernels] = {}
        self.weighted: dict[str, Any] = {}
        self._copies: dict[int, Array] = {}
        self._block = self._shared = np.empty(0, np.uint8)

    def shared(self, arena: Arena, nbytes: int, kept_nbytes: int) -> Array:
        """Return memory of the arena; new memory, if it is more than is kept."""
        if nbytes > kept_nbytes:
            return arena.array(nbytes)
        if self._shared.nbytes < max(1, nbytes):
            # Plans keep the former array, which they were bound to.
            self._shared = arena.array(1 << max(0, nbytes - 1).bit_length())
        return self._shared[:nbytes]

    def copies(self, peer: int) -> Array:
        """Return where a piece of a peer's private memory is copied, to be reduced."""
        if peer not in self._copies:
            self._copies[peer] = np.empty(INNER_NBYTES, np.uint8)
        return self._copies[peer]

    def block(self, dtype: np.dtype[Any], count: int) -> Array:
        """Return memory in which a block is reduced before it is stored in a peer's private memory."""
        nbytes = count * dtype.itemsize
        if self._block.nbytes < nbytes:
            self._block = np.empty(nbytes, np.uint8)
        return self._block[:nbytes].view(dtype)


@dataclass(slots=True, eq=False)
class Context:
    """The ranks of a process set and what connects them.

    Attributes:
        messages: carries messages between any two ranks.
        waiter: how a rank waits.
        node: the ranks that share memory with this one.
        config: equal on all ranks.
        called: returns what this rank calls and from which line, for ranks that call something else.
        lifetime: of what makes these calls.
        counts_decide: whether allreduce, reduce and broadcast take arrays of different shapes with as many elements.
        instruments: the observers of collectives and their steps.
        plans: of the calls of these ranks.
        scratch: of these calls.
        rank: this rank.
        topology: which ranks share memory.
        arena: the memory that this rank shares with its node.
        board: the rendezvous of the ranks of the node.
        single_node: whether all ranks are on one node.
        agreement: compares signatures over messages, where there are several nodes.
        calls: counts the calls that this rank has begun, as its ``number``.
    """

    messages: Messages
    waiter: Waiter
    node: Node
    config: Config
    called: Callable[[str], CallSite] = CallSite.here
    counts_decide: bool = False
    lifetime: Lifetime = field(default_factory=Lifetime)
    instruments: Instruments = field(default_factory=Instruments)
    plans: Plans = field(default_factory=Plans)
    scratch: _CallScratch = field(default_factory=_CallScratch)
    rank: int = field(init=False)
    topology: Topology = field(init=False)
    arena: Arena = field(init=False)
    board: Board = field(init=False)
    single_node: bool = field(init=False)
    agreement: Agreement = field(init=False)
    calls: Board | Agreement = field(init=False)

    def __post_init__(self) -> None:
        self.rank = self.messages.rank
        self.topology = self.node.topology
        self.arena = self.node.arena
        self.board = self.node.board
        self.single_node = self.topology.single_node
        self.agreement = Agreement(self.messages, self.waiter, self.called)
        self.calls = self.board if self.single_node else self.agreement
        self.board.called = self.called
        self.lifetime.listen("forking", self.arena.forked)
        # What a forked process writes to its buffers stays its own.
        self.lifetime.listen("forked", self.arena.segments.after_fork_in_child)
        if not self.single_node:
            self.waiter.watchers.append(self.agreement.watch)

    def problem(self, collective: Collective, nbytes: int, dtype: DType, op: ReduceOp) -> Problem:
        """Return a problem of these ranks; ``op`` matters where something is reduced."""
        library = self.messages.offers_allreduce
        return Problem(
            collective, nbytes, self.topology, dtype=dtype, op=op if collective.reduces else None, library=library
        )

    # ---- binding ----

    def schedule(self, collective: Collective, algorithm: str, root: int = 0) -> Schedule:
        """Return this rank's steps."""
        return schedule_for(collective, algorithm, self.rank, topology=self.topology, root=root)

    def steps(self, task: Task) -> Schedule:
        """Return this rank's steps in a task."""
        return self.schedule(task.kind.collective, task.choice.algorithm, task.kind.root)

    def kernels(self, dtype: DType, op: ReduceOp, weights: Sequence[float] = ()) -> Kernels:
        """Return what reduces such elements, with ``weights`` of the ranks if any, with scratch of its own."""
        if weights:
            return WeightedKernels(dtype, weights, self.scratch.weighted)
        key = dtype.name, op
        kernels = self.scratch.kernels.get(key)
        if kernels is None:
            library = self.node.loops.library
            size = self.topology.size
            kernels = kernels_for(dtype, op, size)
            if library is not None and (dtype.name, op.value) in library.kernels:
                kernels = CompiledKernels(library, dtype.name, op.value, size=size, by_numpy=kernels)
            self.scratch.kernels[key] = kernels
        return kernels

    def compiled(
        self, entry: Signature, nbytes: int, instructions: Callable[[], Sequence[Instruction]], mailed_nbytes: int = 0
    ) -> CompiledCall | None:
        """Return a compiled call on this node, see `compile_call`; None: NumPy's path is to be used."""
        library = self.node.loops.library
        if library is None:
            return None
        return compile_call(
            library, self.board, entry, nbytes, instructions(), mailed_nbytes=mailed_nbytes, threads=self.node.threads
        )

    def link(self, signature: Signature) -> Link:
        """Return how this rank sends, waits and reports in a call.

        The tags follow from the signature, so that messages of two calls never match.
        """
        tag = 1 + signature.code % ((self.messages.max_tag - 1) // STREAMS - 1) * STREAMS
        return Link(
            self.rank,
            self.waiter,
            signature.text,
            messages=self.messages,
            tag=tag,
            instruments=self.instruments,
            absent=self.agreement.absent,
        )

    def bind(
        self,
        task: Task,
        segments: Sequence[Segment],
        memory: BlockMemory,
        kernels: Kernels | None = None,
        coding: Coding | None = None,
    ) -> BoundSchedule:
        """Bind this rank's steps in a task to memory, with messages; arguments as for `BoundSchedule`."""
        return BoundSchedule(
            self.steps(task), segments, memory, kernels=kernels, link=self.link(task.signature), coding=coding
        )

    def bind_on_node(self, task: Task, algorithm: str, segment: Segment, memory: BlockMemory) -> list[Call]:
        """Bind this rank's direct loads and stores; return the calls that carry them out."""
        schedule = self.schedule(task.kind.collective, algorithm, task.kind.root)
        link = Link(self.rank, self.waiter, task.signature.text)
        return BoundSchedule(
            schedule, [segment], memory, kernels=self.kernels(task.dtype, task.op, task.kind.weights), link=link
        ).calls

    def segment_limit(self, data: Elements, largest: int) -> int:
        """Return how many elements of a block of ``data`` travel at once, see `segment_limit`."""
        return segment_limit(self.config.segment_nbytes // data.itemsize, largest)

    # ---- the rendezvous ----

    def rendezvous(self, signature: Signature) -> None:
        """Wait until all ranks are known to make this call, before any data is sent as messages.

        Raises:
            MismatchError: they do not.
        """
        if self.single_node:
            self.board.enter(signature)
        else:
            self._enter(signature)

    def refuse(self, reason: str) -> NoReturn:
        """Enter a call with the reason why this rank cannot make it, so that it ends for all.

        Args:
            reason: what they get in place of a signature, the collective first.

        Raises:
            MismatchError: on all ranks.
        """
        self.calls.refuse(reason)

    def rendezvous_at_board(self, signature: Signature) -> list[int]:
        """Do what `rendezvous` does, and publish to the node where this rank's buffer is, which the signature says.

        Returns:
            The places of the buffers of the other ranks of the node, in the order of ``board.peers``.

        Raises:
            MismatchError: not all ranks call this.
        """
        if not self.single_node:
            self._enter(signature)
        try:
            return self.board.enter(signature)[::2]
        except MismatchError:
            if not self.single_node:
                self.agreement.settle()  # Compares between the nodes, too, so that all get the mismatch.
            raise

    def _enter(self, signature: Signature) -> None:
        """Begin a call of several nodes; wait for all ranks, unless the call itself does so."""
        if not (self.agreement.enter(signature.text) or signature.waits):
            self.any_rank(signature, False)
            if self.instruments.observers:
                self.instruments.step("barrier between nodes")

    def any_rank(self, signature: Signature, answer: bool) -> bool:
        """Return whether an answer is true on any rank. Collective; no rank has it before all have come.

        Args:
            signature: of the call that all ranks are in.
            answer: of this rank.
        """
        plan = self.plans.get(("any rank", signature.code), partial(_AnyRank, self, signature))
        return plan.run(answer)

    def recover(self, mismatch: MismatchError, number: int) -> None:
        """Go on after a mismatch between nodes: end the messages under way, agree on the count of calls. Collective.

        Args:
            mismatch: the error, which says that the ranks are in step. If one had already ended the call when it got
                the mismatch, they are not in step, and the error is changed to say so.
            number: of the call that this rank was in.

        Raises:
            TransportError, or a class derived from it: ranks did not come, or messages under way do not end.
        """
        reached = [number, self.board.number, self.board.epoch]
        everyone = exchange_json(self.messages, reached)
        if len({facts[0] for facts in everyone}) > 1:
            mismatch.in_step = False
            return
        members = [everyone[member] for member in self.board.members]
        self.messages.renew()
        self.agreement.resume(number)
        self.board.resume(max(member[1] for member in members), max(member[2] for member in members))

    # ---- the end ----

    def detach(self, failure: BaseException | None = None) -> None:
        """Tell the others that this rank takes part in no further call. ``failure``: why; None: it shuts down."""
        why = AbortReason.after(failure)
        self.board.detach(why)
        if not self.single_node:
            self.agreement.detach(why)

    def abandon(self) -> None:
        """Give back, after a failure, all that messages under way cannot write to."""
        self.waiter.forget()
        self.messages.abandon()
        self.node.threads.close()
        self.arena.segments.close()

    def close(self) -> None:
        """Give everything back; arrays that users still hold stay valid."""
        self.plans.close()
        self.board.close()
        self.waiter.forget()
        self.messages.close()
        self.node.threads.close()
        self.arena.segments.close()


class _AnyRank:
    """An allreduce of one byte."""

    reusable = True

    def __init__(self, context: Context, signature: Signature) -> None:
        self._byte = np.zeros(1, np.uint8)
        self._schedule = BoundSchedule(
            context.schedule(Collective.ALLREDUCE, "recursive_doubling"),
            [(slice(0, 1),)],
            BlockMemory(self._byte),
            kernels=context.kernels(DTYPES["uint8"], MAX),
            link=context.link(signature)._replace(instruments=None),
        )

    def run(self, answer: bool) -> bool:
        self._byte[0] = answer
        self._schedule.run()
        return bool(self._byte[0])

    def close(self) -> None:
        self._schedule.close()


class NodeSchedule:
    """A schedule on a buffer of this rank; bound again when a peer's buffer has moved since the last call.

    Args:
        context: the ranks.
        task: what to do.
        memory: this rank's buffer. It is kept, so it must not keep an array of the caller's alive.
        segments: of the buffer.
        coding: how blocks travel, see `BoundSchedule`; it divides averages itself.
    """

    def __init__(
        self, context: Context, task: Task, memory: Array, segments: Sequence[Segment], coding: Coding | None = None
    ) -> None:
        self._context = context
        self._task = task
        self._memory = memory
        self._segments = segments
        self._coding = coding
        self._others: list[int] = []
        self._bound: BoundSchedule | None = None

    def run(self, others: list[int]) -> None:
        """Run it. ``others``: the places of the buffers of the node's other ranks; empty if none is touched."""
        if self._bound is None or others != self._others:
            self.close()
            self._bound = self._bind(others)
            self._others = others
        self._bound.run()

    def close(self) -> None:
        """Give back the messages."""
        if self._bound is not None:
            self._bound.close()
            self._bound = None

    def _bind(self, others: list[int]) -> BoundSchedule:
        context = self._context
        task = self._task
        memory = self._memory
        at_root = task.op is ReduceOp.AVERAGE and task.kind.collective is Collective.REDUCE
        op = ReduceOp.SUM if at_root or self._coding is not None else task.op
        peers = {
            peer: context.arena.peer_view(peer, place, memory.dtype, count=memory.size)
            for peer, place in zip(context.board.peers, others, strict=False)
        }
        kernels = context.kernels(task.dtype, op)
        return context.bind(task, self._segments, BlockMemory(memory, peers), kernels=kernels, coding=self._coding)


class NodePlan(BoundCall):
    """A plan for an input of this rank, which the others of the node read where it is.

    Args:
        context: the ranks.
        task: what to do.
        source: the input; it is not kept.
        entry: what this rank publishes.
    """

    def __init__(self, context: Context, task: Task, source: Operand, entry: Signature) -> None:
        self._context = context
        self._task = task
        self._board = context.board
        self._instruments = context.instruments
        self._text = task.signature.text
        self._source = unowned(source.view, source.address)
        self._entry = entry
        #: What was bound, by the places of the arrays and what else that depends on.
        self._bound: dict[tuple[int, ...], Any] = {}
        self._others: list[int] = []  # What the others have published in the last call.
        self._tried = False  # Whether it was tried to compile the call for that.
        self._compiled: CompiledCall | None = None  # The call for that, compiled.

    def _enter(self) -> list[int] | None:
        """Enter the call, and carry it out if it is compiled; return what the others publish; None: it is done."""
        compiled = self._compiled
        if compiled is None or self._instruments.observers:
            return self._board.enter(self._entry)
        return None if compiled.run() else self._board.memory.published(self._board.number & 1, 0)

    def _carry_out(self, others: list[int], calls: list[Call], *, stays: bool = True) -> None:
        """Carry out what is bound to places, up to a barrier; ``stays``: whether this rank's are as before."""
        if others != self._others:
            self._others = others
            self._compiled = None
            self._tried = False
        elif stays and not self._tried:  # It may come a third time.
            self._tried = True
            self._compiled = self._context.compiled(
                self._entry,
                self._source.nbytes,
                lambda: [ENTER, expect(self._board, others), *calls, BARRIER],
            )
        observed = self._instruments.observers
        for call in calls:
            call()
        if observed:
            self._instruments.step("load and store")
        self._board.barrier(self._text)
        if observed:
            self._instruments.step("barrier")

    def _keep(self, key: tuple[int, ...], bound: Any) -> Any:
        if len(self._bound) >= BINDINGS:
            self._bound.clear()
        self._bound[key] = bound
        return bound

    def _block(self) -> tuple[Block, Array]:
        """Return memory in the arena that is as large as the input, also as an array."""
        arena = self._context.arena
        block = arena.allocate(self._source.nbytes)
        return block, arena.view(block.place, self._source.dtype, self._source.size)

    def close(self) -> None:
        """Forget what was bound; to run it again binds again."""
        self._bound.clear()
        self._others = []
        self._compiled = None
