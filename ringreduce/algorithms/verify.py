"""Prove a schedule: carry it out for all ranks together, on symbols in place of numbers.

What `run` holds every schedule to:

* it computes the collective: after an allreduce each block holds every rank's term exactly once, and so on;
* a block of an allreduce, or of a reduction to a root without messages, is complete where an average is divided
  (`Schedule.last_reductions`), on every rank that has not got the divided one, and once;
* every rank of an allreduce gets the same bits: the terms are combined in the same order on all ranks, without relying
  on ``a op b == b op a``;
* it ends: messages between two ranks match first to first, with the same blocks at both ends. A step is complete only
  when all its messages have been taken (rendezvous), so nothing rests on a transport that buffers; no message is left;
* it has no race: in a step, no block that is sent or stored to is overwritten by a message as well; and between two
  barriers, no block of any rank's memory is touched by two ranks unless both only read it. A rank's own messages and
  its own side of loads and stores count as touching its memory.

`verify` also holds the schedules of an algorithm to the cost that the algorithm states.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from math import isclose
from typing import NamedTuple, TypeAlias

from ringreduce.algorithms.schedule import Algorithm, Collective, Schedule, Step, Transfer
from ringreduce.common.topology import Topology


class ScheduleError(AssertionError):
    """A schedule is wrong; the message and the attributes say where.

    Attributes:
        rank: whose schedule is wrong; None where no single rank's is.
        step: which of its steps, from 1; None where it is wrong as a whole.
        peer: the other rank, None where there is none.
        block: the first block concerned, None where there is none.
    """

    def __init__(
        self,
        problem: str,
        rank: int | None = None,
        step: int | None = None,
        peer: int | None = None,
        block: int | None = None,
    ) -> None:
        self.rank = rank
        self.step = step
        self.peer = peer
        self.block = block
        places = {"rank": rank, "step": step, "peer": peer, "block": block}
        where = ", ".join(f"{name} {number}" for name, number in places.items() if number is not None)
        super().__init__(f"{where}: {problem}" if where else problem)


class Kind(Enum):
    """How blocks move; the value is an arrow that `draw` uses, from who acts to whom."""

    MESSAGE = "->"
    LOAD = "<="
    STORE = "=>"


@dataclass(frozen=True, slots=True)
class Move:
    """Blocks that went from one rank to another.

    Attributes:
        kind: by message, or by whose access to memory.
        source: the rank they came from.
        blocks: which they were there.
        target: the rank they went to.
        into: which they became there.
        reduce: whether they were combined with what was there.
    """

    kind: Kind
    source: int
    blocks: range
    target: int
    into: range
    reduce: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened when the schedules of all ranks were carried out together.

    Attributes:
        rounds: the moves, round by round; each rank goes on in the round after its step is complete.
        sent: bytes that the rank sends which sends most, as a multiple of n (see `Cost`).
        touched: bytes that the rank loads and stores which does so most, as a multiple of n.
    """

    rounds: tuple[tuple[Move, ...], ...]
    sent: Fraction
    touched: Fraction


def verify(algorithm: Algorithm, topology: Topology, root: int = 0) -> Outcome:
    """Prove the schedules of ``algorithm`` for all ranks of ``topology``.

    Returns:
        What happened; `Outcome.rounds` can be drawn.

    Raises:
        ScheduleError: they are wrong, or their cost is not the stated one.
    """
    schedules = [algorithm.schedule(rank, topology, root) for rank in range(topology.size)]
    outcome = run(schedules, algorithm.collective, topology, root=root)
    cost = algorithm.cost(topology)
    for what, stated, counted in (
        ("steps", cost.steps, len(outcome.rounds)),
        ("bytes sent / n", cost.sent, float(outcome.sent)),
        ("bytes touched / n", cost.touched, float(outcome.touched)),
    ):
        if not isclose(stated, counted):
            raise ScheduleError(f"{algorithm.name} states {what} = {stated}, but has {counted}")
    return outcome


def run(
    schedules: Sequence[Schedule], collective: Collective, topology: Topology | None = None, root: int = 0
) -> Outcome:
    """Carry out ``schedules[rank]`` for all ranks together and check that they compute ``collective``.

    Args:
        schedules: one per rank.
        collective: what they are to compute.
        topology: who shares memory with whom; by default all ranks do.
        root: of a rooted collective.

    Raises:
        ScheduleError: they do not, or may not.
    """
    topology = Topology.uniform(1, len(schedules)) if topology is None else topology
    if len(schedules) != topology.size:
        raise ScheduleError(f"{len(schedules)} schedules for {topology.size} ranks")
    for rank, schedule in enumerate(schedules):
        _check_form(rank, schedule, schedules[0].nblocks, collective=collective, topology=topology)
    _check_races(schedules)
    world = _SymbolicRanks(schedules, collective, root)
    rounds = world.run()
    world.check()
    ntotal = schedules[0].nblocks // (2 if collective is Collective.ALLTOALL else 1)
    return Outcome(
        rounds,
        sent=Fraction(max(_volume(s, "sends") for s in schedules), ntotal),
        touched=Fraction(max(_volume(s, "loads", "stores") for s in schedules), ntotal),
    )


def _volume(schedule: Schedule, *directions: str) -> int:
    """Count the blocks that a rank moves in the given directions."""
    return sum(
        len(transfer.blocks) for step in schedule.steps for name in directions for transfer in getattr(step, name)
    )


# --- form: what can be seen in one rank's steps alone ---------------------------------------------------------------


def _check_form(rank: int, schedule: Schedule, nblocks: int, collective: Collective, topology: Topology) -> None:
    if schedule.nblocks != nblocks:
        raise ScheduleError(f"has {schedule.nblocks} blocks where rank 0 has {nblocks}", rank)
    last = schedule.last_reductions()
    for number, step in enumerate(schedule.steps, start=1):
        if (step.sends or step.recvs) and (step.loads or step.stores):
            raise ScheduleError("exchanges messages and touches memory in one step", rank, number)
        for transfer in (*step.sends, *step.recvs, *step.loads, *step.stores):
            if not 0 <= transfer.peer < topology.size or transfer.peer == rank:
                raise ScheduleError("is not another rank", rank, number, peer=transfer.peer)
            for blocks in (transfer.blocks, transfer.remote):
                if blocks.step != 1 or not 0 <= blocks.start < blocks.stop <= nblocks:
                    raise ScheduleError(f"{blocks} are not blocks of the buffer", rank, number, peer=transfer.peer)
            if len(transfer.blocks) != len(transfer.remote):
                raise ScheduleError("the two sides of a transfer differ in length", rank, number, peer=transfer.peer)
        for transfer in (*step.sends, *step.stores):
            if transfer.reduce:
                raise ScheduleError("only what comes in can be reduced", rank, number, peer=transfer.peer)
        for transfer in (*step.sends, *step.recvs):
            if transfer.peer_blocks is not None:
                raise ScheduleError("a message has no say in the peer's blocks", rank, number, peer=transfer.peer)
        for transfer in (*step.loads, *step.stores):
            if transfer.peer not in topology.node_of(rank):
                raise ScheduleError("shares no memory with this rank", rank, number, peer=transfer.peer)
        for transfer in (*step.recvs, *step.loads) if collective in (Collective.ALLREDUCE, Collective.REDUCE) else ():
            if transfer.reduce and len({block in last[number - 1] for block in transfer.blocks}) > 1:
                raise ScheduleError(
                    "completes only a part of the blocks that it reduces", rank, number, peer=transfer.peer
                )
        _check_overwrites(rank, number, step)


def _check_overwrites(rank: int, number: int, step: Step) -> None:
    """Within a step, a block that is overwritten must take no other part (a store of what was loaded is later)."""
    incoming = (*step.recvs, *step.loads)
    busy = {block for transfer in incoming if transfer.reduce for block in transfer.blocks}
    busy.update(block for transfer in step.sends for block in transfer.blocks)
    for transfer in incoming:
        for block in () if transfer.reduce else transfer.blocks:
            if block in busy:
                raise ScheduleError(
                    "is overwritten while it is sent, reduced or overwritten",
                    rank,
                    number,
                    peer=transfer.peer,
                    block=block,
                )
            busy.add(block)
    stored = [(store.peer, block) for store in step.stores for block in store.remote]
    for place, (peer, block) in enumerate(stored):
        if (peer, block) in stored[:place]:
            raise ScheduleError("is stored to twice", rank, number, peer=peer, block=block)


# --- races: what may happen at the same time as what ----------------------------------------------------------------


def _accesses(rank: int, step: Step) -> Iterator[tuple[int, int, bool]]:
    """Yield (whose memory, block, whether it is written to) for what ``rank`` touches in a step."""
    for transfers, writes in ((step.sends, False), (step.recvs, True), (step.loads, True), (step.stores, False)):
        yield from ((rank, block, writes) for transfer in transfers for block in transfer.blocks)
    for transfers, writes in ((step.loads, False), (step.stores, True)):
        yield from ((transfer.peer, block, writes) for transfer in transfers for block in transfer.remote)


def _check_races(schedules: Sequence[Schedule]) -> None:
    """No block of any memory may be touched by two ranks unless both only read it."""
    if not any(schedule.direct for schedule in schedules):
        return
    # (whose memory, block) -> (who has touched it, whether it wrote) -> in which step
    touched: defaultdict[tuple[int, int], dict[tuple[int, bool], int]] = defaultdict(dict)
    for rank, schedule in enumerate(schedules):
        for number, step in enumerate(schedule.steps, start=1):
            for owner, block, writes in _accesses(rank, step):
                before = touched[owner, block]
                for (other, wrote), when in before.items():
                    if other != rank and (wrote or writes):
                        here, there = ("written" if is_write else "read" for is_write in (writes, wrote))
                        problem = f"rank {owner}'s memory is {here} here and {there} by the peer in its step {when}"
                        raise ScheduleError(problem, rank, number, peer=other, block=block)
                before.setdefault((rank, writes), number)


# --- values ---------------------------------------------------------------------------------------------------------

_Tree: TypeAlias = "int | tuple[_Tree, _Tree]"
"""In which order terms were combined: a rank, or two trees."""


class _Value(NamedTuple):
    """What a block holds: terms of several ranks for one and the same block.

    Attributes:
        block: which block of the ranks' buffers it was at the beginning.
        ranks: whose terms are in it, as a bit mask.
        tree: how they were combined.
        divided: whether an average is divided already.
    """

    block: int
    ranks: int
    tree: _Tree
    divided: bool = False

    def describe(self) -> str:
        ranks = ", ".join(str(rank) for rank in range(self.ranks.bit_length()) if self.ranks >> rank & 1)
        return f"block {self.block} of {ranks}"


# --- messages -------------------------------------------------------------------------------------------------------


class _Post(NamedTuple):
    """One end of a message that waits for the other end."""

    rank: int
    step: int
    place: int
    transfer: Transfer
    values: tuple[_Value, ...]


class _SymbolicRanks:
    """All ranks, their memory and the messages between them."""

    def __init__(self, schedules: Sequence[Schedule], collective: Collective, root: int) -> None:
        self.schedules = schedules
        self.collective = collective
        self.size = len(schedules)
        nblocks = schedules[0].nblocks
        ranks = range(self.size)
        states = [collective.before_and_after(rank, self.size, nblocks, root=root) for rank in ranks]
        self.memory = [
            {place: _Value(block, 1 << rank, rank) for place, block in states[rank][0].items()} for rank in ranks
        ]
        self._wanted = [after for _, after in states]
        self._done = [0] * self.size
        self._arrived: list[dict[int, tuple[_Value, ...]]] = [{} for _ in schedules]
        self._waiting = [0] * self.size
        self._sends: defaultdict[tuple[int, int], deque[_Post]] = defaultdict(deque)
        self._recvs: defaultdict[tuple[int, int], deque[_Post]] = defaultdict(deque)
        self._moves: list[Move] = []
        self._last = [schedule.last_reductions() for schedule in schedules]
        messages = any(step.sends for schedule in schedules for step in schedule.steps)
        # Reductions to a root with messages take sums, as plans do.
        self._divides = collective is Collective.ALLREDUCE or (collective is Collective.REDUCE and not messages)

    def run(self) -> tuple[tuple[Move, ...], ...]:
        """Carry out all steps; return the moves of each round."""
        rounds: list[tuple[Move, ...]] = []
        ready = list(range(self.size))
        while any(self._step(rank) for rank in range(self.size)):
            for rank in ready:
                self._start(rank)
            self._match()
            ready = [rank for rank in range(self.size) if self._step(rank) and not self._waiting[rank]]
            if not ready:
                raise self._stuck()
            for rank in ready:
                self._finish(rank)
            rounds.append(tuple(self._moves))
            self._moves.clear()
        return tuple(rounds)

    def _step(self, rank: int) -> Step | None:
        """Return the step that ``rank`` is in or about to begin, None at the end."""
        steps = self.schedules[rank].steps
        return steps[self._done[rank]] if self._done[rank] < len(steps) else None

    def _start(self, rank: int) -> None:
        """Post the messages of the next step; what is sent are the values of this moment."""
        step = self._step(rank)
        number = self._done[rank] + 1
        if step is None:
            return
        self._arrived[rank].clear()
        self._waiting[rank] = len(step.sends) + len(step.recvs)
        for index, send in enumerate(step.sends):
            values = tuple(self._read(rank, block, rank, number=number, peer=send.peer) for block in send.blocks)
            self._sends[rank, send.peer].append(_Post(rank, step=number, place=index, transfer=send, values=values))
        for index, recv in enumerate(step.recvs):
            self._recvs[recv.peer, rank].append(_Post(rank, step=number, place=index, transfer=recv, values=()))

    def _match(self) -> None:
        """Bring messages together, first to first between each two ranks."""
        for pair, sends in self._sends.items():
            recvs = self._recvs[pair]
            while sends and recvs:
                send = sends.popleft()
                recv = recvs.popleft()
                self._check_same_sizes(recv.rank, recv.step, recv.transfer, remote=send.transfer.blocks)
                self._arrived[recv.rank][recv.place] = send.values
                self._waiting[send.rank] -= 1
                self._waiting[recv.rank] -= 1
                blocks = send.transfer.blocks
                into = recv.transfer.blocks
                reduce = recv.transfer.reduce
                self._moves.append(
                    Move(Kind.MESSAGE, source=send.rank, blocks=blocks, target=recv.rank, into=into, reduce=reduce)
                )

    def _check_same_sizes(self, rank: int, number: int, transfer: Transfer, remote: range) -> None:
        mine = [self._extent(rank, block) for block in transfer.blocks]
        if mine != [self._extent(transfer.peer, block) for block in remote]:
            problem = f"{transfer.blocks} here and {remote} there may differ in size"
            raise ScheduleError(problem, rank, number, peer=transfer.peer, block=transfer.blocks.start)

    def _extent(self, rank: int, block: int) -> tuple[int, ...]:
        """Return what determines the size of a block: blocks with different extents may differ in size."""
        if self.collective is not Collective.ALLTOALL:
            return (block,)
        return (rank, block) if block < self.size else (block - self.size, rank)

    def _finish(self, rank: int) -> None:
        """Apply what came in to the memory of ``rank``, and its stores to that of its peers."""
        step = self._step(rank)
        number = self._done[rank] + 1
        assert step is not None
        incoming = [(recv, self._arrived[rank][index]) for index, recv in enumerate(step.recvs)]
        for access in (*step.loads, *step.stores):
            self._check_same_sizes(rank, number, access, remote=access.remote)
        for load in step.loads:
            incoming.append(
                (load, tuple(self._read(load.peer, b, rank, number=number, peer=load.peer) for b in load.remote))
            )
            self._moves.append(
                Move(Kind.LOAD, source=load.peer, blocks=load.remote, target=rank, into=load.blocks, reduce=load.reduce)
            )
        self._absorb(rank, number, incoming, by_rank=step.by_rank)
        for store in step.stores:
            for block, remote in zip(store.blocks, store.remote, strict=True):
                self.memory[store.peer][remote] = self._read(rank, block, rank, number=number, peer=store.peer)
            self._moves.append(
                Move(Kind.STORE, source=rank, blocks=store.blocks, target=store.peer, into=store.remote, reduce=False)
            )
        self._done[rank] += 1

    def _absorb(
        self, rank: int, number: int, incoming: list[tuple[Transfer, tuple[_Value, ...]]], by_rank: bool
    ) -> None:
        """Overwrite or combine the blocks of ``rank`` with what came in."""
        terms: defaultdict[int, list[tuple[int, _Value]]] = defaultdict(list)
        for transfer, values in incoming:
            for block, value in zip(transfer.blocks, values, strict=True):
                if transfer.reduce:
                    terms[block].append((transfer.peer, value))
                else:
                    self.memory[rank][block] = value
        for block, others in terms.items():
            ordered = [(rank, self._read(rank, block, rank, number=number, peer=others[0][0])), *others]
            if by_rank:
                ordered.sort(key=lambda pair: pair[0])
            result = ordered[0][1]
            for peer, value in ordered[1:]:
                if result.block != value.block or result.ranks & value.ranks:
                    problem = f"combines {result.describe()} with {value.describe()}"
                    raise ScheduleError(problem, rank, number, peer=peer, block=block)
                if result.divided or value.divided:
                    raise ScheduleError("combines what an average has divided", rank, number, peer=peer, block=block)
                result = _Value(result.block, result.ranks | value.ranks, (result.tree, value.tree))
            if self._divides and block in self._last[rank][number - 1]:
                result = result._replace(divided=True)
            self.memory[rank][block] = result

    def _read(self, owner: int, block: int, rank: int, number: int, peer: int) -> _Value:
        value = self.memory[owner].get(block)
        if value is None:
            raise ScheduleError(
                f"uses rank {owner}'s block, in which nothing is yet", rank, number, peer=peer, block=block
            )
        return value

    def _stuck(self) -> ScheduleError:
        """Say which message waits in vain; first one whose other end is past its last step."""
        posts = [(post, "sends") for queue in self._sends.values() for post in queue]
        posts += [(post, "waits for") for queue in self._recvs.values() for post in queue]
        posts.sort(key=lambda item: (self._step(item[0].transfer.peer) is not None, item[0].rank, item[0].place))
        post, verb = posts[0]
        peer = post.transfer.peer
        where = "past its last step" if self._step(peer) is None else f"stuck in its step {self._done[peer] + 1}"
        problem = f"{verb} {post.transfer.blocks}, but the peer is {where}"
        return ScheduleError(problem, post.rank, post.step, peer=peer, block=post.transfer.blocks.start)

    def check(self) -> None:
        """Raise unless all ranks hold what the collective gives them, combined in the same order."""
        for rank, (memory, wanted) in enumerate(zip(self.memory, self._wanted, strict=True)):
            for block, (ranks, origin) in wanted.items():
                value = memory.get(block)
                if value is None or (value.ranks, value.block) != (ranks, origin):
                    held = "nothing" if value is None else value.describe()
                    problem = f"ends with {held}, not with {_Value(origin, ranks, 0).describe()}"
                    raise ScheduleError(problem, rank, block=block)
                if self._divides and self.size > 1 and not value.divided:
                    raise ScheduleError("ends with a sum where an average is divided", rank, block=block)
                if self.collective is Collective.ALLREDUCE and value.tree != self.memory[0][block].tree:
                    reference = self.memory[0][block].tree
                    problem = f"is combined in the order {value.tree}, on rank 0 in the order {reference}"
                    raise ScheduleError(problem, rank, block=block)
