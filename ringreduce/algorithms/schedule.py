"""What a schedule is made of: the `Step`, the `Schedule`, and the `Algorithm` that makes one for each rank.

A schedule says, for one rank, which blocks go where. It is pure data: `verify` proves it, `execute` runs it, `draw`
shows it. The meaning of a step is exact:

* messages: ``sends`` carry the blocks' values as they stand when the step begins; what ``recvs`` bring is applied when
  all messages of the step have been moved, in the order in which ``recvs`` lists them: mine = mine op received
  (or in the order of ranks, see `Step.by_rank`).
* direct access (ranks that share memory): ``loads`` combine or copy a peer's blocks into one's own, then ``stores``
  copy one's own blocks into a peer's. A schedule with direct accesses runs between two barriers over the ranks that
  share memory, and everything between them counts as simultaneous: no block of any rank may be touched by two ranks
  unless both only read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ringreduce.common.topology import Topology


class Collective(Enum):
    """The operations that have schedules, and the blocks each works on (P = number of ranks).

    | collective     | blocks before                  | blocks after                                       |
    |----------------|--------------------------------|----------------------------------------------------|
    | allreduce      | any number, all of them mine   | every block reduced over all ranks                 |
    | reduce_scatter | P, all of them mine            | block ``rank`` reduced over all ranks, rest: scratch |
    | allgather      | P, block ``rank`` is mine      | block ``q`` is rank q's                            |
    | broadcast      | any number, mine at the root   | all the root's                                     |
    | alltoall       | P to send, P to receive (1)    | block ``P + q`` is what q had in its block ``rank`` |
    | reduce         | any number, all of them mine   | at the root, every block reduced; rest: scratch    |
    | gather         | P, block ``rank`` is mine      | at the root, block ``q`` is rank q's; rest: scratch |
    | scatter        | P, mine at the root            | block ``rank`` is the root's; rest: scratch        |

    (1) block ``P + rank``, what a rank sends to itself, is filled by the caller: no schedule moves it.
    """

    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALLGATHER = "allgather"
    BROADCAST = "broadcast"
    ALLTOALL = "alltoall"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"

    @property
    def rooted(self) -> bool:
        """Whether one rank, the root, has another part in it than the others."""
        return self in (Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER)

    @property
    def reduces(self) -> bool:
        """Whether values of several ranks are combined."""
        return self in (Collective.ALLREDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)

    def before_and_after(
        self, rank: int, size: int, nblocks: int, root: int
    ) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
        """Return the table above for one rank; what is not mentioned holds nothing before, and anything afterwards.

        Returns:
            By place, which of the rank's own blocks is there before; and whose terms, as a bit mask of ranks, of which
            block have to be there afterwards.
        """
        at_root = rank == root
        everyone = (1 << size) - 1
        everything = {block: block for block in range(nblocks)}
        own = {rank: rank}
        gathered = {peer: (1 << peer, peer) for peer in range(size)}
        reduced = {block: (everyone, block) for block in everything}
        sent = {block: (1 << rank, block) for block in range(size)}
        received = {size + peer: (1 << peer, rank) for peer in range(size)}
        return {
            Collective.ALLREDUCE: (everything, reduced),
            Collective.REDUCE_SCATTER: (everything, {rank: (everyone, rank)}),
            Collective.ALLGATHER: (own, gathered),
            Collective.BROADCAST: (everything if at_root else {}, {block: (1 << root, block) for block in everything}),
            Collective.ALLTOALL: ({**{block: block for block in sent}, size + rank: rank}, {**sent, **received}),
            Collective.REDUCE: (everything, reduced if at_root else {}),
            Collective.GATHER: (own, gathered if at_root else {}),
            Collective.SCATTER: (everything if at_root else {}, {rank: (1 << root, rank)}),
        }[self]


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks that move between this rank and ``peer``.

    Attributes:
        peer: the other rank.
        blocks: consecutive blocks of this rank's buffer (a range with step 1).
        reduce: for receives and loads: combine with what is there rather than overwrite it.
        peer_blocks: for loads and stores: the peer's blocks, where they are not the same as ``blocks``.
    """

    peer: int
    blocks: range
    reduce: bool = False
    peer_blocks: range | None = None

    @property
    def remote(self) -> range:
        """The peer's blocks of a direct access."""
        return self.blocks if self.peer_blocks is None else self.peer_blocks


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one round; see the module's docstring for the exact meaning.

    A step either exchanges messages or touches memory, not both.

    Attributes:
        sends: messages to peers.
        recvs: messages from peers.
        loads: reads of peers' memory.
        stores: writes into peers' memory.
        by_rank: combine in the order of the ranks that the terms come from, this rank's own value in its own place,
            rather than own value first: with terms of ranks p < q < mine < s that is ``((p op q) op mine) op s``.
            Ranks that combine the same terms on their own then get the same bits, even where ``a op b`` and
            ``b op a`` differ (NaN payloads, the sign of the zero of min and max). Of a step with loads, all are reduced
            where this is set, and none where it is not.
    """

    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    loads: tuple[Transfer, ...] = ()
    stores: tuple[Transfer, ...] = ()
    by_rank: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """One rank's part in a collective: its steps over a buffer of ``nblocks`` blocks."""

    nblocks: int
    steps: tuple[Step, ...]

    @property
    def direct(self) -> bool:
        """Whether any step touches a peer's memory."""
        return any(step.loads or step.stores for step in self.steps)

    def last_reductions(self) -> list[frozenset[int]]:
        """Return for each step the blocks that it reduces and that no later step of this rank changes.

        In an allreduce, such a block is complete then: no term is missing. `verify` proves it.
        """
        stale: list[frozenset[int]] = []
        changed: set[int] = set()
        for step in reversed(self.steps):
            incoming = (*step.recvs, *step.loads)
            stale.append(frozenset(block for move in incoming if move.reduce for block in move.blocks) - changed)
            changed.update(block for move in incoming for block in move.blocks)
        return stale[::-1]

    def kept_sends(self) -> list[frozenset[Transfer]]:
        """Return for each step what it sends that neither it nor a later step of this rank changes.

        Only the end of the schedule waits until such a message is sent.
        """
        unchanged: list[frozenset[Transfer]] = []
        changed: set[int] = set()
        for step in reversed(self.steps):
            changed.update(block for transfer in (*step.recvs, *step.loads) for block in transfer.blocks)
            unchanged.append(frozenset(transfer for transfer in step.sends if changed.isdisjoint(transfer.blocks)))
        return unchanged[::-1]


#: ``(rank, topology, root) -> steps``; only those of rooted collectives look at ``root``.
Steps: TypeAlias = Callable[[int, Topology, int], Iterator[Step]]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule costs the rank that does most, for n bytes in equal blocks (alltoall: n in the blocks to send).

    Attributes:
        steps: rounds until all are done, when every step takes one round and waits for its messages: what the
            latency is multiplied by.
        sent: bytes sent to other ranks as messages, as a multiple of n.
        touched: bytes loaded from and stored to other ranks' memory, as a multiple of n.
    """

    steps: int
    sent: float = 0.0
    touched: float = 0.0


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How a collective is carried out: an entry of the table in `ringreduce.algorithms`.

    Attributes:
        name: the name users give, e.g. ``"ring"``.
        collective: what it computes.
        summary: one line: what it is and when it wins.
        steps: of each rank, without empty ones.
        cost: ``topology -> Cost``, exact for equal blocks; `verify` holds the steps to it.
        nblocks: ``topology -> number of blocks``; one for each rank if nothing is said.
        refuses: ``topology -> why it cannot run there``, or None where it can.
    """

    name: str
    collective: Collective
    summary: str
    steps: Steps
    cost: Callable[[Topology], Cost]
    nblocks: Callable[[Topology], int] = lambda topology: topology.size
    refuses: Callable[[Topology], str | None] = lambda topology: None

    def schedule(self, rank: int, topology: Topology, root: int = 0) -> Schedule:
        """Return the steps of ``rank``; pure, so callers may cache it."""
        steps = self.steps(rank, topology, root)
        moving = (step for step in steps if step.sends or step.recvs or step.loads or step.stores)
        return Schedule(self.nblocks(topology), tuple(moving))
