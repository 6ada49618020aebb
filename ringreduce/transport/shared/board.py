"""The board: flag lines in shared memory for rendezvous and barriers of the ranks of a node.

`ringreduce.transport.shared.board_memory` says what lies where. Counters are 64-bit and never reset. A rank may be one
call ahead of its peers, never two: it passes the entry of call n + 1 only after they have entered it, and they do so
only after they are done with call n. Hence two lines.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, NoReturn

import numpy as np

from ringreduce.common.call_sites import AbortReason, CallSite, disagreement
from ringreduce.common.errors import CollectiveError, PeerLostError, name_ranks
from ringreduce.native.layout import BARRIER_LINE, BARRIERS, CALLS, NUMBER, SIGNATURE, WRITTEN
from ringreduce.transport.shared.arena import NOWHERE, Arena
from ringreduce.transport.shared.board_memory import (
    CLEARED_NBYTES,
    COUNTERS_LINE,
    PART_NBYTES,
    SOURCE,
    STATUS_LINE,
    TARGET,
    BoardMemory,
    read_text,
    write_text,
)
from ringreduce.transport.waiting import Waiter

_BYTE = np.dtype(np.uint8)
_POLLS = 100  # They take about 3 us.
_YIELDS = 200  # They take about 100 us, or as long as the ranks that share the core take.

#: What a rank publishes in place of the hash of a signature, which is never negative, for a call that it cannot make.
_REFUSED = -1


def signature_hash(signature: str) -> int:
    """Return 63 bits of a hash of a signature; the same in every process."""
    return int.from_bytes(blake2b(signature.encode(), digest_size=8).digest(), "little") >> 1


class Signature(NamedTuple):
    """What must agree between the ranks in a call; and what a rank publishes to its node when it enters the call.

    To enter is quickest where the same object is used again.

    Attributes:
        text: for people.
        code: `signature_hash` of that, for flags and tags.
        source: the place of this rank's input, see `ringreduce.transport.shared.arena`.
        target: the place of its result.
        waits: whether no rank can end the call before all have begun it. Then ranks of several nodes need not compare a
            call that all have made before: if the calls differ, their messages do not match, and no rank ends.
        numbers: what the others must know of this rank's arrays besides; as many on all ranks.
    """

    text: str
    code: int
    source: int = NOWHERE
    target: int = NOWHERE
    waits: bool = True
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, *, waits: bool = True) -> Signature:
        return cls(text, signature_hash(text), waits=waits)


def allocate_part(arena: Arena) -> int:
    """Make this rank's part of a board; every member does, and publishes where, before any makes a `Board`."""
    block = arena.allocate(PART_NBYTES)
    block.memory[:CLEARED_NBYTES] = 0
    return block.place


class Board:
    """The flag lines of one process set's ranks on one node.

    Args:
        arena: has this rank's own part.
        members: the ranks on this node, ascending, as numbers of the process set.
        places: of each member's part; see `allocate_part`.
        rank: this rank.
        waiter: how to wait, and the watchers that may end a wait.

    Attributes:
        peers: the other members, ascending.
        memory: what lies where.
        counters: how many calls this rank has begun, and barriers; see there.
        waiter: how to wait.
        called: says what this rank calls, and where, to members that call something else.
    """

    def __init__(self, arena: Arena, members: Sequence[int], places: Sequence[int], rank: int, waiter: Waiter) -> None:
        self.members = tuple(members)
        self.peers = [member for member in members if member != rank]
        self.index = self.members.index(rank)
        self.waiter = waiter
        parts = [
            arena.view(place, _BYTE, PART_NBYTES)
            if member == rank
            else arena.peer_view(member, place, _BYTE, count=PART_NBYTES)
            for member, place in zip(members, places, strict=True)
        ]
        self.memory = BoardMemory(parts, self.index)
        lines = self.memory.lines
        self._segments = arena.segments
        self._mine = lines[self.index]
        self.counters = self._mine[COUNTERS_LINE]
        self._others = [(member, lines[i]) for i, member in enumerate(members) if member != rank]
        # What `enter` and `barrier` walk through: the peers' lines, by parity.
        self._entries = tuple(tuple(line[parity] for _, line in self._others) for parity in (0, 1))
        self._barriers = tuple(line[BARRIER_LINE] for _, line in self._others)
        self._published: list[Signature | None] = [None, None]  # What the entry lines hold, by parity.
        self.called: Callable[[str], CallSite] = CallSite.here
        self._waiting: tuple[Sequence[memoryview], int, str] | None = None
        self._fence = fence()
        waiter.watchers.append(self._watch)

    @property
    def number(self) -> int:
        """The calls that this rank has begun."""
        return self.counters[CALLS]

    @property
    def epoch(self) -> int:
        """The barriers that it has reached."""
        return self.counters[BARRIERS]

    def enter(self, mine: Signature) -> list[int]:
        """Begin a call together with the other members: the barrier before any data is touched.

        Args:
            mine: what this rank publishes.

        Returns:
            Source, target and numbers of each of the other members, in the order of `peers`.

        Raises:
            MismatchError: on every member, if any called something else.
            CollectiveTimeoutError, PeerLostError: a member did not come.
        """
        counters = self.counters
        counters[CALLS] = number = counters[CALLS] + 1
        parity = number & 1
        line = self._mine[parity]
        # Peers poll this line: each store makes it travel.
        if self._published[parity] is not mine or counters[WRITTEN + parity]:
            counters[WRITTEN + parity] = 0
            if mine.numbers:
                self.memory.publish(parity, mine.numbers)
            _, line[SIGNATURE], line[SOURCE], line[TARGET], _, _ = self._published[parity] = mine
        if self._fence is not None:
            self._fence()
        line[NUMBER] = number
        lines = self._entries[parity]
        for peer in lines:
            if peer[NUMBER] < number and not self._soon(peer, number):
                self._wait(lines, number, mine.text)
        if self._fence is not None:
            self._fence()
        places: list[int] = []
        code = mine.code
        numbers = mine.numbers
        for peer in lines:
            if peer[SIGNATURE] != code:
                self.disagree(mine.text)
            if not numbers:
                places.append(peer[SOURCE])
                places.append(peer[TARGET])
        return self.memory.published(parity, len(numbers)) if numbers else places

    def refuse(self, reason: str) -> NoReturn:
        """Come to a call that this rank cannot make, so that it is over for all members.

        Args:
            reason: what the others get instead of a signature.

        Raises:
            MismatchError: on every member.
            CollectiveTimeoutError, PeerLostError: a member did not come.
        """
        self.enter(Signature(reason, _REFUSED))
        self.disagree(reason)  # All have refused.

    def barrier(self, signature: str, *, wait: bool = True) -> None:
        """Wait until every member has reached its n-th barrier, as this rank reaches its own.

        A rank whose wait fails takes back that it came: its arrays are the program's again then, so a member that still
        loads from them must not believe what it loaded, and finds that out when it comes here itself.

        Args:
            signature: what this rank calls.
            wait: whether this rank waits; if not, it lets the others go on alone.
        """
        counters = self.counters
        counters[BARRIERS] = epoch = counters[BARRIERS] + 1
        if self._fence is not None:
            self._fence()
        mine = self._mine[BARRIER_LINE]
        mine[0] = epoch
        if not wait:
            return
        try:
            for line in self._barriers:
                if line[0] < epoch and not self._soon(line, epoch):
                    self._wait(self._barriers, epoch, signature)
        except BaseException:
            self.take_back()
            raise
        if self._fence is not None:
            self._fence()

    def take_back(self) -> None:
        """Take back that this rank has reached a barrier, as its wait there has failed; see `barrier`."""
        self._mine[BARRIER_LINE][0] = self.counters[BARRIERS] - 1
        if self._fence is not None:
            self._fence()

    def barrier_again(self, signature: str) -> None:
        """Wait, as `barrier` does, at the barrier that this rank has reached by compiled code."""
        self.counters[BARRIERS] -= 1
        self.barrier(signature)

    def wait_for_entries(self, signature: str) -> None:
        """Wait until every member has entered the call that this rank has; see `enter`."""
        number = self.number
        lines = self._entries[number & 1]
        if any(line[NUMBER] < number for line in lines):
            self._wait(lines, number, signature)

    def resume(self, number: int, epoch: int) -> None:
        """Count on from the most calls and barriers that any member has reached, after a call that not all came to.

        No member may be on its way through a call; the same numbers on all.
        """
        self.counters[CALLS] = number
        self.counters[BARRIERS] = epoch

    def detach(self, why: AbortReason) -> bool:
        """Let nobody wait for this rank in vain; return whether it is the first member that does so."""
        if not self._mine[STATUS_LINE][0]:
            write_text(self.memory.why[self.index], json.dumps(why).encode())
            if self._fence is not None:
                self._fence()
            self._mine[STATUS_LINE][0] = 1
        return not any(line[STATUS_LINE][0] for _, line in self._others)

    def close(self) -> None:
        """Stop watching; the memory goes with the arena."""
        self.waiter.watchers.remove(self._watch)

    def _soon(self, line: memoryview, number: int) -> bool:
        """Poll a flag, then give the core away some times: ranks in step are not further apart than that.

        The long way round, `Waiter`, watches the peers and the clock, and takes longer than most waits.
        """
        tries = _POLLS if self.waiter.crowded else 0
        while line[0] < number:
            if tries >= _POLLS:
                if tries == _POLLS + _YIELDS:
                    return False
                os.sched_yield()
            tries += 1
        return True

    def _wait(self, lines: Sequence[memoryview], number: int, signature: str) -> None:
        def missing() -> str:
            late = [member for (member, _), line in zip(self._others, lines, strict=True) if line[0] < number]
            return f"{name_ranks(late)} in {signature}"

        def everyone() -> bool:
            return all(line[0] >= number for line in lines)

        self._waiting = lines, number, signature
        try:
            self.waiter.until(everyone, missing)
        finally:
            self._waiting = None

    def require_present(self, position: int, signature: str) -> None:
        """Raise what ends this rank's call if a member has detached.

        Args:
            position: of the member among ``peers``.
            signature: what this rank calls.
        """
        if self._others[position][1][STATUS_LINE][0]:
            raise self._why(position).error(self._others[position][0], f"this rank called {signature}")

    def find_failed(self, doing: str, among: Sequence[int] | None = None) -> CollectiveError | None:
        """Return the error about a member that takes part in no further call, None if there is none.

        A member whose process has ended without detaching comes first: others may have ended because of it.

        Args:
            doing: what this rank does, for the error.
            among: positions in ``peers``; None: all but those that have shut down.
        """
        reached = range(len(self._others)) if among is None else among
        detached = {position: self._why(position) for position in reached if self._has_detached(position)}
        for position in reached:
            member = self._others[position][0]
            if position not in detached and not self._segments.alive(member) and not self._has_detached(position):
                return PeerLostError(member, f"its process has ended; {doing}")
        for position, why in detached.items():
            if why.reason or among is not None:
                return why.error(self._others[position][0], doing)
        return None

    def _has_detached(self, position: int) -> bool:
        flag = self._others[position][1][STATUS_LINE][0]
        if flag and self._fence is not None:
            self._fence()
        return bool(flag)

    def _why(self, position: int) -> AbortReason:
        return AbortReason(*json.loads(read_text(self.memory.why[self.members.index(self.peers[position])])))

    def _watch(self) -> None:
        """Raise if a member that this rank waits for has detached or failed."""
        if self._waiting is None:
            return
        lines, number, signature = self._waiting
        late = [position for position, flag in enumerate(lines) if flag[0] < number]
        failed = self.find_failed(f"this rank called {signature}", late)
        if failed is not None:
            raise failed

    def disagree(self, signature: str) -> NoReturn:
        """Exchange with the others what each called, and raise."""
        write_text(self.memory.called[self.index], self.called(signature).to_json())
        self.barrier(signature)
        calls = [CallSite.from_json(read_text(area)) for area in self.memory.called]
        self.barrier(signature)
        raise disagreement(dict(zip(self.members, calls, strict=True)))


def fence(machine: str = platform.machine()) -> Callable[[], object] | None:
    """Return what orders data and flags: None on x86, where they stay in order; a lock's barriers elsewhere.

    Releasing orders what was done before, acquiring what comes after: in this order, on one lock, a full fence. Each
    fence has a lock of its own, as a signal handler may interrupt it, and raise or make another.
    """
    if machine in ("x86_64", "AMD64", "i686"):
        return None

    def order() -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.release()
        lock.acquire()

    return order
