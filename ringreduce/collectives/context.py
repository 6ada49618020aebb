"""What the collectives of one process set share: ranks, transports, plans, and the rendezvous before each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

import numpy as np

from ringreduce.algorithms import Collective, Schedule, schedule_for
from ringreduce.buffers import DTYPES, Kernels, kernels_for
from ringreduce.collectives.call import Signature
from ringreduce.collectives.execution import STREAMS, BoundSchedule
from ringreduce.collectives.memory import Coding, Memory
from ringreduce.collectives.plan import Plans
from ringreduce.common.call_sites import AbortReason, CallSite
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError
from ringreduce.common.instruments import Instruments
from ringreduce.common.partition import Segment
from ringreduce.common.reduce_ops import MAX
from ringreduce.common.topology import Topology
from ringreduce.transport.agreement import Agreement
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.shared.arena import NOWHERE, Arena, Location
from ringreduce.transport.shared.board import Arrival, Board
from ringreduce.transport.shared.node import Node
from ringreduce.transport.waiting import Waiter

__all__ = ["Context"]


@dataclass(slots=True, eq=False)
class Context:
    """The ranks of a process set and what connects them.

    Attributes:
        messages: carries messages between any two ranks.
        waiter: how a rank waits.
        node: the ranks that share memory with this one.
        config: equal on all ranks.
        called: returns what this rank calls and from which line, for ranks that call something else.
        counts_decide: whether allreduce, reduce and broadcast take arrays of different shapes with as many elements.
        instruments: the observers of collectives and their steps.
        plans: of the calls of these ranks.
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
    instruments: Instruments = field(default_factory=Instruments)
    plans: Plans = field(default_factory=Plans)
    rank: int = field(init=False)
    topology: Topology = field(init=False)
    arena: Arena = field(init=False)
    board: Board = field(init=False)
    single_node: bool = field(init=False)
    agreement: Agreement = field(init=False)
    calls: Board | Agreement = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.topology = self.messages.rank, self.node.topology
        self.arena, self.board = self.node.arena, self.node.board
        self.single_node = self.topology.single_node
        self.agreement = Agreement(self.messages, self.waiter, self.called)
        self.calls = self.board if self.single_node else self.agreement
        self.board.called = self.called
        if not self.single_node:
            self.waiter.watchers.append(self.agreement.watch)

    def schedule(self, collective: Collective, algorithm: str, root: int = 0) -> Schedule:
        """Return this rank's steps."""
        return schedule_for(collective, algorithm, self.rank, self.topology, root)

    def bind(
        self,
        collective: Collective,
        algorithm: str,
        segments: Sequence[Segment],
        memory: Memory,
        kernels: Kernels | None,
        signature: Signature,
        *,
        root: int = 0,
        coding: Coding | None = None,
        observed: bool = True,
    ) -> BoundSchedule:
        """Bind this rank's steps to memory, with messages; arguments as for `BoundSchedule`."""
        return BoundSchedule(
            self.rank,
            self.schedule(collective, algorithm, root),
            segments,
            memory,
            kernels,
            self.messages,
            self.waiter,
            signature.text,
            # The first of `STREAMS` tags. They follow from the signature, so that messages of two calls never match.
            1 + signature.code % ((self.messages.max_tag - 1) // STREAMS - 1) * STREAMS,
            instruments=self.instruments if observed else None,
            coding=coding,
            absent=self.agreement.absent,
        )

    def meet(self, signature: Signature) -> None:
        """Wait until it is known that all ranks make this call, before any data is sent as messages.

        Raises:
            MismatchError: they do not.
        """
        if self.single_node:
            self.node.board.arrive(signature.arrival)
        else:
            self._enter(signature)

    def refuse(self, reason: str) -> NoReturn:
        """Tell the others, in place of a call, that this rank cannot make it, so that it ends for all.

        Args:
            reason: what they hear in place of a signature, the collective first.

        Raises:
            MismatchError: on all ranks.
        """
        self.calls.refuse(reason)

    def meet_at_board(self, signature: Signature, location: Location | None) -> list[int]:
        """Do what `meet` does, and tell the others of the node where this rank's buffer is.

        Returns:
            Where the buffers of the other ranks of the node are, packed, in the order of ``board.peers``; `NOWHERE`
            for one in private memory.

        Raises:
            MismatchError: not all ranks call this.
        """
        if not self.single_node:
            self._enter(signature)
        try:
            place = NOWHERE if location is None else location.packed
            return self.board.arrive(Arrival(signature.text, signature.code, place))[::2]
        except MismatchError:
            if not self.single_node:
                self.agreement.settle()  # the other nodes must hear of it, and say what they call
            raise

    def _enter(self, signature: Signature) -> None:
        """Begin a call of several nodes; wait for all ranks, unless the call itself does so."""
        if not (self.agreement.enter(signature.text) or signature.waits):
            self.plans.get(("barrier", signature.code), partial(self._barrier, signature)).run()
            if self.instruments.observers:
                self.instruments.step("meet")

    def _barrier(self, signature: Signature) -> BoundSchedule:
        """Bind an allreduce of one byte, which no rank can end before all have begun it."""
        memory, kernels = Memory(np.zeros(1, np.uint8)), kernels_for(DTYPES["uint8"], MAX, self.topology.size)
        segments, kind = [(slice(0, 1),)], Collective.ALLREDUCE
        return self.bind(kind, "recursive_doubling", segments, memory, kernels, signature, observed=False)

    def recover(self, mismatch: MismatchError, number: int) -> None:
        """Go on after a mismatch between nodes: end the messages under way, agree on the count of calls. Collective.

        Args:
            mismatch: the error, which says that the ranks are in step. If one had already ended the call when it heard
                of the mismatch, they are not in step, and the error is changed to say so.
            number: of the call that this rank was in.

        Raises:
            TransportError, or a class derived from it: ranks did not come, or messages under way do not end.
        """
        reached = [number, self.board.number, self.board.epoch]
        everyone = exchange_json(self.messages, reached)
        if len({each[0] for each in everyone}) > 1:
            mismatch.in_step = False
            return
        members = [everyone[member] for member in self.board.members]
        self.messages.renew()
        self.agreement.resume(number)
        self.board.resume(max(each[1] for each in members), max(each[2] for each in members))

    def leave(self, failure: BaseException | None = None) -> None:
        """Tell the others that this rank takes part in no further call. ``failure``: why; None: it shuts down."""
        why = AbortReason.after(failure)
        self.board.leave(why)
        if not self.single_node:
            self.agreement.leave(why)

    def abandon(self) -> None:
        """Give back, after a failure, all that messages under way cannot write to."""
        self.waiter.forget()
        self.arena.close()

    def close(self) -> None:
        """Give everything back; arrays that users still hold stay valid."""
        self.plans.close()
        self.board.close()
        self.waiter.forget()
        self.messages.close()
        self.arena.close()
