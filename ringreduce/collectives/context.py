"""What every collective of one process set needs: the ranks, their transports, and their rendezvous."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NoReturn, Protocol, TypeVar

import numpy as np

from ringreduce.algorithms import Collective, Schedule, schedule_for
from ringreduce.buffers import DTYPES, Kernels, kernels_for
from ringreduce.collectives.plan import STREAMS, Coding, Memory, Plan
from ringreduce.common.call_sites import Called, GivenUp
from ringreduce.common.cleanup import close_all
from ringreduce.common.config import Config
from ringreduce.common.errors import MismatchError
from ringreduce.common.instruments import Instruments
from ringreduce.common.partition import Segment
from ringreduce.common.reduce_ops import MAX
from ringreduce.common.topology import Topology
from ringreduce.transport.agreement import Agreement
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.shared.arena import NOWHERE, Arena, Location
from ringreduce.transport.shared.board import Arrival, Board, signature_hash
from ringreduce.transport.shared.node import Node
from ringreduce.transport.waiting import Waiter

__all__ = ["Cache", "Context", "Signature"]


@dataclass(frozen=True, slots=True)
class Signature:
    """What must agree between the ranks in a call.

    Attributes:
        text: for people.
        code: for flags and tags.
        arrival: the same for a board, where no memory is touched.
        waits: whether no rank can end the call before all have come to it. Then ranks of several nodes need not compare
            a call that all have made before: messages of different calls do not match.
    """

    text: str
    code: int
    arrival: Arrival
    waits: bool

    @classmethod
    def of(cls, text: str, *, waits: bool = True) -> Signature:
        code = signature_hash(text)
        return cls(text, code, Arrival(text, code), waits)


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks of a process set and what connects them.

    Attributes:
        messages: carries messages between any two ranks.
        waiter: how a rank waits.
        node: the ranks that share memory with this one.
        config: equal on all ranks.
        called: says what this rank calls, and where, to ranks that call something else.
        counts_decide: whether arrays of different shapes are the same to an allreduce, a reduce and a broadcast, if
            they have as many elements.
        agreement: compares signatures over messages, where not all ranks meet at one board.
        single_node: whether all ranks meet at one board.
        instruments: who is told of collectives and their steps.
        barriers: of calls that do not wait for all ranks themselves, by the code of their signature.
    """

    messages: Messages
    waiter: Waiter
    node: Node
    config: Config
    called: Callable[[str], Called] = Called.here
    counts_decide: bool = False
    agreement: Agreement = field(init=False)
    single_node: bool = field(init=False)
    instruments: Instruments = field(default_factory=Instruments)
    barriers: Cache[Plan] = field(default_factory=lambda: Cache())

    def __post_init__(self) -> None:
        object.__setattr__(self, "single_node", self.topology.single_node)
        object.__setattr__(self, "agreement", Agreement(self.messages, self.waiter, self.called))
        self.board.called = self.called
        if not self.single_node:
            self.waiter.watchers.append(self.agreement.watch)

    @property
    def rank(self) -> int:
        return self.messages.rank

    @property
    def topology(self) -> Topology:
        return self.node.topology

    @property
    def arena(self) -> Arena:
        return self.node.arena

    @property
    def board(self) -> Board:
        return self.node.board

    def schedule(self, collective: Collective, algorithm: str, root: int = 0) -> Schedule:
        """Return this rank's steps."""
        return schedule_for(collective, algorithm, self.rank, self.topology, root)

    def plan(
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
    ) -> Plan:
        """Return this rank's steps bound to memory, with messages; arguments as for `Plan`."""
        return Plan(
            self.rank,
            self.schedule(collective, algorithm, root),
            segments,
            memory,
            kernels,
            self.messages,
            self.waiter,
            signature.text,
            # The first of a few tags that stand for a signature, so that messages of two calls never match.
            1 + signature.code % ((self.messages.max_tag - 1) // STREAMS - 1) * STREAMS,
            instruments=self.instruments if observed else None,
            coding=coding,
            absent=self.agreement.absent,
        )

    @property
    def calls(self) -> Board | Agreement:
        """What counts the calls that this rank has begun, as its ``number``."""
        return self.board if self.single_node else self.agreement

    def meet(self, signature: Signature) -> None:
        """Make sure that all ranks call this, before any data is sent as messages.

        Raises:
            MismatchError: they do not.
        """
        if self.single_node:
            self.node.board.arrive(signature.arrival)
        else:
            self._enter(signature)

    def refuse(self, reason: str) -> NoReturn:
        """Meet the others in a call that this rank cannot make, so that it ends for all.

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
        """Begin a call of several nodes; where it does not wait for all ranks itself, wait for them."""
        if not (self.agreement.enter(signature.text) or signature.waits):
            self.barriers.get(signature.code, partial(self._barrier, signature)).run()
            if self.instruments.observers:
                self.instruments.step("meet")

    def _barrier(self, signature: Signature) -> Plan:
        """Return an allreduce of one byte, which no rank can end before all have begun it."""
        memory, kernels = Memory(np.zeros(1, np.uint8)), kernels_for(DTYPES["uint8"], MAX, self.topology.size)
        segments, kind = [(slice(0, 1),)], Collective.ALLREDUCE
        return self.plan(kind, "recursive_doubling", segments, memory, kernels, signature, observed=False)

    def recover(self, mismatch: MismatchError, number: int) -> None:
        """Go on after a mismatch between nodes: end the messages under way, and count calls alike. Collective.

        Args:
            mismatch: the error, which says that the ranks are in step. If one of them had already left the call when it
                heard of the mismatch, they are not, and from now on the error says so.
            number: of the call that this rank was in.

        Raises:
            TransportError: one of its kinds; the ranks did not come, or what is under way does not end.
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
        """Tell the others that this rank takes part in no further call; no failure: because it shuts down."""
        why = GivenUp.after(failure)
        self.board.leave(why)
        if not self.single_node:
            self.agreement.leave(why)

    def abandon(self) -> None:
        """Give back, after a failure, what no message under way may still be written to."""
        self.waiter.forget()
        self.arena.close()

    def close(self) -> None:
        """Give everything back; arrays that users still hold stay valid."""
        self.board.close()
        self.waiter.forget()
        self.barriers.close()
        self.messages.close()
        self.arena.close()


class _Closable(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=_Closable)


class Cache(Generic[T]):
    """Plans by what they are bound to; the one unused for longest is closed when there are too many."""

    def __init__(self, limit: int = 256) -> None:
        self._limit = limit
        self._plans: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the plan of ``key``; make it if there is none."""
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            return plan
        plan = self._plans[key] = make()
        if len(self._plans) > self._limit:
            self._plans.popitem(last=False)[1].close()
        return plan

    def close(self) -> None:
        plans = list(reversed(self._plans.values()))
        self._plans.clear()
        close_all(*(plan.close for plan in plans))
