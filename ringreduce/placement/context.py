"""What every collective of one process set needs: the ranks, their transports, and the way they meet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

from ringreduce.algorithms import Collective, Schedule, schedule_for
from ringreduce.algorithms.execute import STREAMS
from ringreduce.config import Config
from ringreduce.errors import MismatchError
from ringreduce.instruments import Instruments
from ringreduce.placement.ending import close_all
from ringreduce.topology import Topology
from ringreduce.transport.agreement import Agreement
from ringreduce.transport.board import NOWHERE, Board, after_refusals, signature_hash
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.node import Node
from ringreduce.transport.shared import Arena, Location
from ringreduce.transport.waiting import Waiter

__all__ = ["Cache", "Context", "Signature"]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a rank calls, as text for people and as a number for flags and tags."""

    text: str
    code: int

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, text: str) -> Signature:
        return cls(text, signature_hash(text))


_BARRIER = Signature.of("barrier")


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks of a process set and what connects them.

    Attributes:
        messages: carries messages between any two ranks.
        waiter: how a rank waits.
        node: the ranks that share memory with this one.
        config: equal on all ranks.
        agreement: compares signatures over messages, where not all ranks meet at one board.
        instruments: who is told of collectives and their steps.
    """

    messages: Messages
    waiter: Waiter
    node: Node
    config: Config
    agreement: Agreement = field(init=False)
    instruments: Instruments = field(default_factory=Instruments)

    def __post_init__(self) -> None:
        object.__setattr__(self, "agreement", Agreement(self.messages, self.waiter))
        if not self.topology.single_node:
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

    def meet(self, signature: Signature) -> None:
        """Make sure that all ranks call this, before any data is sent as messages.

        Raises:
            MismatchError: they do not.
        """
        if self.topology.single_node:
            self.board.arrive(signature.text, signature.code)
        else:
            self._agree(signature)

    def _agree(self, signature: Signature) -> None:
        self.agreement.enter(after_refusals(signature.text, self.board.refused))

    def meet_at_board(self, signature: Signature, location: Location | None) -> list[int]:
        """Meet, and let the others of the node know where this rank's buffer lies.

        Returns:
            Where the buffers of the other ranks of the node lie, packed, in the order of ``board.peers``; `NOWHERE`
            for one in private memory.

        Raises:
            MismatchError: not all ranks call this.
        """
        if not self.topology.single_node:
            self._agree(signature)
        try:
            return self.board.arrive(signature.text, signature.code, NOWHERE if location is None else location.packed)
        except MismatchError:
            if not self.topology.single_node:
                self.agreement.settle()  # the other nodes must hear of it, and say what they call
            raise

    def barrier(self) -> None:
        """Return when all ranks have called this."""
        if self.topology.single_node:
            self.meet(_BARRIER)
        else:
            self.agreement.enter(_BARRIER.text, meet=True)

    def renew(self) -> None:
        """Go on after a mismatch between nodes: leave behind what is under way and count calls alike. Collective."""
        self.messages.renew()
        reached = [self.agreement.call, self.board.number, self.board.epoch]
        everyone = exchange_json(self.messages, reached)
        self.agreement.resume(max(call for call, _, _ in everyone))
        members = [everyone[member] for member in self.board.members]
        self.board.resume(max(number for _, number, _ in members), max(epoch for _, _, epoch in members))

    def tag(self, signature: Signature) -> int:
        """Return the first of a few tags that stand for a signature, so that messages of two calls never match."""
        room = (self.messages.max_tag - 1) // STREAMS - 1
        return 1 + signature.code % room * STREAMS

    def leave(self) -> None:
        """Tell the others that this rank takes part in no further call."""
        self.board.leave()
        if not self.topology.single_node:
            self.agreement.leave()

    def close(self) -> None:
        """Give everything back; arrays that users still hold stay valid."""
        self.board.close()
        self.waiter.watchers.clear()
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
