"""Control notes: a few bytes from rank to rank, beside the data. In shared memory they are quicker than messages."""

from __future__ import annotations

import struct
from collections import deque
from typing import Protocol

import numpy as np

from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.shared.arena import NOWHERE, Arena, Block
from ringreduce.transport.shared.board import fence
from ringreduce.transport.shared.node import Node

_LINE = 64
_SLOTS = 32
_SLOT_NBYTES = 1 << 10
_PART_NBYTES = 2 * _LINE + _SLOTS * _SLOT_NBYTES

_HEAD = struct.Struct("<qq")  # of a slot: the length of a note, and its place; `NOWHERE`: it follows


class ControlChannel(Protocol):
    """Carries control notes between the ranks of a process set; `Messages` do so, too. Used by one thread at a time."""

    def post(self, note: bytes, peer: int) -> None:
        """Send a note; never blocks."""

    def poll(self) -> tuple[int, bytes] | None:
        """Return the next note and the rank that posted it, None if there is none; never blocks."""

    def abandon(self) -> None:
        """Let the others know that this rank does not close it. Local."""

    def close(self) -> None:
        """Give back what is held; local, and safe to call twice."""


class SharedControlChannel:
    """Carries control notes through shared memory: a ring of slots from every rank to every other.

    Every rank owns a part for each peer, that only it writes: how many notes it has put into its ring to that peer, how
    many it has taken out of the peer's ring to here, and the ring. A note that is too long for a slot is in a block of
    its own, and only its place goes through the ring. A ring is full if the peer does not poll while so many notes
    come; further ones wait on this side for the next `post` or `poll`.

    Args:
        node: all ranks of the process set. Its arena is used by the thread that uses this.
        messages: for setting up. Collective.
    """

    def __init__(self, node: Node, messages: Messages) -> None:
        arena = node.arena
        rank = messages.rank
        parts = arena.allocate(_PART_NBYTES * messages.size)
        for peer in range(messages.size):
            parts.memory[peer * _PART_NBYTES :][: 2 * _LINE] = 0
        places = exchange_json(messages, parts.place)
        self._streams: dict[int, _Stream] = {}
        for peer, place in enumerate(places):
            if peer != rank:
                theirs = arena.peer_view(peer, place, np.dtype(np.uint8), count=_PART_NBYTES * messages.size)
                mine = parts.memory[peer * _PART_NBYTES :].data
                self._streams[peer] = _Stream(arena, peer, mine, theirs=theirs[rank * _PART_NBYTES :].data)
        self._all = tuple(self._streams.items())
        self._arrived: deque[tuple[int, bytes]] = deque()

    def post(self, note: bytes, peer: int) -> None:
        self._streams[peer].put(note)

    def poll(self) -> tuple[int, bytes] | None:
        if not self._arrived:
            for peer, stream in self._all:
                if stream.waiting:
                    stream.flush()
                if stream.put_there[0] != stream.taken:
                    self._arrived.extend((peer, note) for note in stream.take())
        return self._arrived.popleft() if self._arrived else None

    def abandon(self) -> None:
        """Nobody waits for a rank that does not close it."""

    def close(self) -> None:
        """Nothing to give back: the memory goes with the arena, and a peer may still read what was posted last."""


class _Stream:
    """Both directions between two ranks.

    Args:
        arena: where long notes are laid out.
        peer: the other rank.
        mine: this rank's part for the peer.
        theirs: the peer's part for this rank.

    Attributes:
        put_there: how many notes the peer has put into its ring, as the peer says.
        taken: how many of them were taken out.
        waiting: what did not fit into this rank's ring.
    """

    def __init__(self, arena: Arena, peer: int, mine: memoryview, theirs: memoryview) -> None:
        self._arena = arena
        self._peer = peer
        self._count_put = mine[:8].cast("q")
        self._count_taken = mine[_LINE : _LINE + 8].cast("q")
        self._ring = mine[2 * _LINE : _PART_NBYTES]
        self.put_there = theirs[:8].cast("q")
        self._taken_there = theirs[_LINE : _LINE + 8].cast("q")
        self._theirs = theirs[2 * _LINE : _PART_NBYTES]
        self._put = 0
        self.taken = 0
        self.waiting: deque[tuple[bytes, Block | None]] = deque()
        self._laid_out: deque[tuple[int, Block]] = deque()  # until the peer has taken so many notes
        self._fence = fence()

    def put(self, note: bytes) -> None:
        block = None
        if len(note) > _SLOT_NBYTES - _HEAD.size:
            block = self._arena.allocate(len(note))
            block.memory[: len(note)] = np.frombuffer(note, np.uint8)
        self.waiting.append((note, block))
        self.flush()

    def flush(self) -> None:
        """Put into the ring what fits."""
        taken = self._taken_there[0]
        while self._laid_out and self._laid_out[0][0] <= taken:
            self._arena.release(self._laid_out.popleft()[1])
        while self.waiting and self._put - taken < _SLOTS:
            note, block = self.waiting.popleft()
            start = self._put % _SLOTS * _SLOT_NBYTES
            self._put += 1
            _HEAD.pack_into(self._ring, start, len(note), NOWHERE if block is None else block.place)
            if block is None:
                self._ring[start + _HEAD.size : start + _HEAD.size + len(note)] = note
            else:
                self._laid_out.append((self._put, block))
        if self._fence is not None:
            self._fence()
        self._count_put[0] = self._put

    def take(self) -> list[bytes]:
        """Return the notes that are in the peer's ring."""
        put = self.put_there[0]
        notes = list[bytes]()
        if self._fence is not None:
            self._fence()
        for number in range(self.taken, put):
            start = number % _SLOTS * _SLOT_NBYTES
            nbytes, place = _HEAD.unpack_from(self._theirs, start)
            if place == NOWHERE:
                notes.append(bytes(self._theirs[start + _HEAD.size : start + _HEAD.size + nbytes]))
            else:
                notes.append(self._arena.peer_view(self._peer, place, np.dtype(np.uint8), count=nbytes).tobytes())
        self.taken = put
        if self._fence is not None:
            self._fence()
        self._count_taken[0] = put
        return notes
