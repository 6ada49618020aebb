"""The board: flag lines in shared memory for rendezvous and barriers of the ranks of a node.

Every rank owns two pages of flags and texts that only it writes, and areas that its peers read (or write, between
barriers):

    line 0, 1   entry:   call number, signature hash, places of input and result, four more numbers, for even and odd
                calls
    line 2      barrier: how many barriers this rank has reached
    line 4      status: not 0 once the rank takes part in no further call; processors fetch lines in pairs, and nothing
                beside this one is ever written in a call
    line 6 ...  what this rank called, as text, written only when a mismatch was seen
    page 1      why this rank takes part in no further call, written before its status
    numbers     two of `_NUMBERS_NBYTES`: numbers published at entry that the line cannot hold, for even and odd calls
    mailboxes   two of `MAILBOX_NBYTES`: data of small collectives, for even and odd calls; in parts, if they are small
    staging     four of `STAGE_NBYTES`: pieces of private buffers on their way (two in, two out)

Counters are 64-bit and never reset. A rank may be one call ahead of its peers, never two: it passes the entry of
call n + 1 only after they have entered it, and they do so only after they are done with call n. Hence two lines.
"""

from __future__ import annotations

import json
import os
import platform
import threading
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ringreduce.buffers import Array
from ringreduce.common.call_sites import AbortReason, CallSite, disagreement
from ringreduce.common.errors import CollectiveError, PeerLostError, name_ranks
from ringreduce.transport.shared.arena import NOWHERE, Arena
from ringreduce.transport.waiting import Waiter

MAILBOX_NBYTES = 256 << 10
#: The mailboxes of a call depend on its number modulo this.
TURNS = 8
STAGE_NBYTES = 1 << 20

_LINE = 64  # The unit in bytes that the cores' caches pass to one another.
_PAGE = 4096
_BARRIER = 2
_STATUS = 4
_CALLED = slice(6 * _LINE, _PAGE)
_WHY = slice(_PAGE, 2 * _PAGE)
_NUMBERS = 2 * _PAGE
_NUMBERS_NBYTES = 2 * _PAGE  # Room for a number for each of a thousand members.
_MAILBOXES = _NUMBERS + 2 * _NUMBERS_NBYTES
_STAGES = _MAILBOXES + 2 * MAILBOX_NBYTES
_BOARD_NBYTES = _STAGES + 4 * STAGE_NBYTES

_POLLS = 100  # They take about 3 us.
_YIELDS = 200  # They take about 100 us, or as long as the ranks that share the core take.

_NUMBER, _SIGNATURE, _SOURCE, _TARGET, _PUBLISHED = range(5)
_NPUBLISHED = _LINE // 8 - _PUBLISHED

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


class Board:
    """The flag lines of one process set's ranks on one node.

    Args:
        arena: where this rank's own part is allocated.
        members: the ranks on this node, ascending, as numbers of the process set.
        places: of each member's part; see `Board.allocate`.
        rank: this rank.
        waiter: how to wait, and the watchers that may end a wait.

    Attributes:
        peers: the other members, ascending.
        number: the calls that this rank has begun.
        epoch: the barriers that it has reached.
        called: says what this rank calls, and where, to members that call something else.
    """

    def __init__(self, arena: Arena, members: Sequence[int], places: Sequence[int], rank: int, waiter: Waiter) -> None:
        self.members = tuple(members)
        self.peers = [member for member in members if member != rank]
        self.index = self.members.index(rank)
        self._rank = rank
        self._segments = arena.segments
        self._waiter = waiter
        self._parts = [
            arena.view(place, np.dtype(np.uint8), _BOARD_NBYTES)
            if member == rank
            else arena.peer_view(member, place, np.dtype(np.uint8), count=_BOARD_NBYTES)
            for member, place in zip(members, places, strict=True)
        ]
        lines = [[part[line * _LINE :][:_LINE].data.cast("q") for line in range(5)] for part in self._parts]
        self._mine = lines[self.index]
        self._others = [(member, lines[i]) for i, member in enumerate(members) if member != rank]
        # What `enter` and `barrier` walk through: the peers' lines, by parity.
        self._entries = tuple(tuple(line[parity] for _, line in self._others) for parity in (0, 1))
        self._barriers = tuple(line[_BARRIER] for _, line in self._others)
        # Numbers that a line cannot hold, by parity and member.
        self._longer = tuple(
            [part[_NUMBERS + parity * _NUMBERS_NBYTES :][:_NUMBERS_NBYTES].data.cast("q") for part in self._parts]
            for parity in (0, 1)
        )
        self._published: list[Signature | None] = [None, None]  # What the entry lines hold, by parity.
        self.number = 0
        self.epoch = 0
        self.called: Callable[[str], CallSite] = CallSite.here
        self._waiting: tuple[Sequence[memoryview], int, str] | None = None
        self._fence = fence()
        waiter.watchers.append(self._watch)

    @staticmethod
    def allocate(arena: Arena) -> int:
        """Make this rank's part; every member does, and publishes where, before any makes a `Board`."""
        block = arena.allocate(_BOARD_NBYTES)
        block.memory[:_MAILBOXES] = 0
        return block.place

    def mailboxes(self, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> list[Array]:
        """Return every member's mailbox in a call as an array, in the order of ``members``.

        Calls take parts of a mailbox in turn: a line that another core has just read is written more slowly.

        Args:
            number: of the call.
            dtype, shape: of the array.
        """
        nbytes = dtype.itemsize * prod(shape)
        assert nbytes <= MAILBOX_NBYTES
        room = -(-nbytes // _LINE) * _LINE
        parts = 4 if 4 * room <= MAILBOX_NBYTES else 2 if 2 * room <= MAILBOX_NBYTES else 1
        offset = _MAILBOXES + (number & 1) * MAILBOX_NBYTES + (number >> 1) % parts * room
        return [part[offset : offset + nbytes].view(dtype).reshape(shape) for part in self._parts]

    def stages(self, dtype: np.dtype[Any]) -> list[list[Array]]:
        """Return every member's four staging areas as flat arrays: by area, in the order of ``members``."""
        starts = range(_STAGES, _BOARD_NBYTES, STAGE_NBYTES)
        return [[part[start : start + STAGE_NBYTES].view(dtype) for part in self._parts] for start in starts]

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
        number = self.number = self.number + 1
        parity = number & 1
        line = self._mine[parity]
        if self._published[parity] is not mine:  # Peers poll this line: each store makes it travel.
            if mine.numbers:
                self._publish(parity, mine.numbers)
            _, line[_SIGNATURE], line[_SOURCE], line[_TARGET], _, _ = self._published[parity] = mine
        if self._fence is not None:
            self._fence()
        line[_NUMBER] = number
        lines = self._entries[parity]
        for peer in lines:
            if peer[_NUMBER] < number and not self._soon(peer, number):
                self._wait(lines, number, mine.text)
        if self._fence is not None:
            self._fence()
        places: list[int] = []
        code = mine.code
        numbers = mine.numbers
        for peer in lines:
            if peer[_SIGNATURE] != code:
                self._disagree(mine.text)
            if not numbers:
                places.append(peer[_SOURCE])
                places.append(peer[_TARGET])
        return self._with_numbers(parity, len(numbers)) if numbers else places

    def refuse(self, reason: str) -> NoReturn:
        """Come to a call that this rank cannot make, so that it is over for all members.

        Args:
            reason: what the others get instead of a signature.

        Raises:
            MismatchError: on every member.
            CollectiveTimeoutError, PeerLostError: a member did not come.
        """
        self.enter(Signature(reason, _REFUSED))
        self._disagree(reason)  # All have refused.

    def barrier(self, signature: str, *, wait: bool = True) -> None:
        """Wait until every member has reached its n-th barrier, as this rank reaches its own.

        A rank whose wait fails takes back that it came: its arrays are the program's again then, so a member that still
        loads from them must not believe what it loaded, and finds that out when it comes here itself.

        Args:
            signature: what this rank calls.
            wait: whether this rank waits; if not, it lets the others go on alone.
        """
        epoch = self.epoch = self.epoch + 1
        if self._fence is not None:
            self._fence()
        mine = self._mine[_BARRIER]
        mine[0] = epoch
        if not wait:
            return
        try:
            for line in self._barriers:
                if line[0] < epoch and not self._soon(line, epoch):
                    self._wait(self._barriers, epoch, signature)
        except BaseException:
            mine[0] = epoch - 1
            if self._fence is not None:
                self._fence()
            raise
        if self._fence is not None:
            self._fence()

    def resume(self, number: int, epoch: int) -> None:
        """Count on from the most calls and barriers that any member has reached, after a call that not all came to.

        No member may be on its way through a call; the same numbers on all.
        """
        self.number = number
        self.epoch = epoch

    def detach(self, why: AbortReason) -> bool:
        """Let nobody wait for this rank in vain; return whether it is the first member that does so."""
        if not self._mine[_STATUS][0]:
            _write(self._parts[self.index][_WHY], json.dumps(why).encode())
            if self._fence is not None:
                self._fence()
            self._mine[_STATUS][0] = 1
        return not any(line[_STATUS][0] for _, line in self._others)

    def close(self) -> None:
        """Stop watching; the memory goes with the arena."""
        self._waiter.watchers.remove(self._watch)

    def _publish(self, parity: int, numbers: tuple[int, ...]) -> None:
        """Let the other members read numbers once this rank has entered the call."""
        if len(numbers) > _NPUBLISHED:
            self._longer[parity][self.index][: len(numbers)] = array("q", numbers)
        else:
            self._mine[parity][_PUBLISHED : _PUBLISHED + len(numbers)] = array("q", numbers)

    def _with_numbers(self, parity: int, count: int) -> list[int]:
        """Return source, target and numbers of each of the other members in a call that all have entered."""
        published: list[int] = []
        if count <= _NPUBLISHED:
            for line in self._entries[parity]:
                published += line[_SOURCE : _PUBLISHED + count].tolist()
            return published
        longer = [area for index, area in enumerate(self._longer[parity]) if index != self.index]
        for line, area in zip(self._entries[parity], longer, strict=True):
            published += line[_SOURCE:_PUBLISHED].tolist()
            published += area[:count].tolist()
        return published

    def _soon(self, line: memoryview, number: int) -> bool:
        """Poll a flag, then give the core away some times: ranks in step are not further apart than that.

        The long way round, `Waiter`, watches the peers and the clock, and takes longer than most waits.
        """
        tries = _POLLS if self._waiter.crowded else 0
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
            self._waiter.until(everyone, missing)
        finally:
            self._waiting = None

    def require_present(self, position: int, signature: str) -> None:
        """Raise what ends this rank's call if a member has detached.

        Args:
            position: of the member among ``peers``.
            signature: what this rank calls.
        """
        if self._others[position][1][_STATUS][0]:
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
        flag = self._others[position][1][_STATUS][0]
        if flag and self._fence is not None:
            self._fence()
        return bool(flag)

    def _why(self, position: int) -> AbortReason:
        return AbortReason(*json.loads(_read(self._parts[self.members.index(self.peers[position])][_WHY])))

    def _watch(self) -> None:
        """Raise if a member that this rank waits for has detached or failed."""
        if self._waiting is None:
            return
        lines, number, signature = self._waiting
        late = [position for position, flag in enumerate(lines) if flag[0] < number]
        failed = self.find_failed(f"this rank called {signature}", late)
        if failed is not None:
            raise failed

    def _disagree(self, signature: str) -> NoReturn:
        """Exchange with the others what each called, and raise."""
        _write(self._parts[self.index][_CALLED], self.called(signature).to_json())
        self.barrier(signature)
        calls = [CallSite.from_json(_read(part[_CALLED])) for part in self._parts]
        self.barrier(signature)
        raise disagreement(dict(zip(self.members, calls, strict=True)))


def _write(area: Array, text: bytes) -> None:
    """Write a text that the others read once a flag is set."""
    assert 8 + len(text) <= len(area)
    area[8 : 8 + len(text)] = np.frombuffer(text, np.uint8)
    area[:8].view(np.int64)[0] = len(text)


def _read(area: Array) -> bytes:
    return area[8 : 8 + int(area[:8].view(np.int64)[0])].tobytes()


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
