"""Control notes: a few bytes from rank to rank, beside the data. In shared memory they are quicker than messages."""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import astuple
from typing import Protocol

import numpy as np

from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.shared.arena import Arena, Block, Location
from ringreduce.transport.shared.board import fence
from ringreduce.transport.shared.node import Node

_LINE = 64
_RING_NBYTES = 16 << 10
_PART_NBYTES = 2 * _LINE + _RING_NBYTES
_SHORT_NBYTES = 1 << 10  # longer notes do not go through the ring

_LENGTH = struct.Struct("<i")  # of the note that follows; negative: of one that is elsewhere,
_PLACE = struct.Struct("<q")  # namely here


class ControlChannel(Protocol):
    """Carries control notes between the ranks of a process set; `Messages` do so, too. Used by one thread at a time."""

    def post(self, note: bytes, peer: int) -> None:
        """Send a note; never blocks."""

    def poll(self) -> tuple[int, bytes] | None:
        """Return the next note and the rank that posted it, None if there is none; never blocks."""

    def close(self) -> None:
        """Give back what is held; local, and safe to call twice."""


class SharedControlChannel:
    """Carries control notes through shared memory: a ring of bytes from every rank to every other.

    Every rank owns a part for each peer, that only it writes: how many bytes it has put into its ring to that peer, how
    many it has taken out of the peer's ring to here, and the ring. The length of a note precedes it there. A long note
    is in a block of its own, and only its place goes through the ring. So a ring is full only if the peer does not poll
    while hundreds of notes come; further ones wait on this side for the next `post` or `poll`.

    Args:
        node: all ranks of the process set. Its arena is used by the thread that uses this.
        messages: for setting up. Collective.
    """

    def __init__(self, node: Node, messages: Messages) -> None:
        arena, rank = node.arena, messages.rank
        parts = arena.allocate(_PART_NBYTES * messages.size)
        for peer in range(messages.size):
            parts.memory[peer * _PART_NBYTES :][: 2 * _LINE] = 0
        places = exchange_json(messages, astuple(parts.location))
        self._streams: dict[int, _Stream] = {}
        for peer, place in enumerate(places):
            if peer != rank:
                theirs = arena.peer_view(peer, Location(*place), np.dtype(np.uint8), _PART_NBYTES * messages.size)
                mine = parts.memory[peer * _PART_NBYTES :].data
                self._streams[peer] = _Stream(arena, peer, mine, theirs[rank * _PART_NBYTES :].data)
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
        put_there: how many bytes the peer has put into its ring, as the peer says.
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
        self._laid_out: deque[tuple[int, Block]] = deque()  # until the peer has taken so many bytes
        self._fence = fence()

    def put(self, note: bytes) -> None:
        if len(note) <= _SHORT_NBYTES:
            self.waiting.append((_LENGTH.pack(len(note)) + note, None))
        else:
            block = self._arena.allocate(len(note))
            block.memory[: len(note)] = np.frombuffer(note, np.uint8)
            self.waiting.append((_LENGTH.pack(-len(note)) + _PLACE.pack(block.location.packed), block))
        self.flush()

    def flush(self) -> None:
        """Put into the ring what fits."""
        taken = self._taken_there[0]
        while self._laid_out and self._laid_out[0][0] <= taken:
            self._arena.release(self._laid_out.popleft()[1])
        while self.waiting and self._put + len(self.waiting[0][0]) - taken <= _RING_NBYTES:
            data, block = self.waiting.popleft()
            start = self._put % _RING_NBYTES
            first = data[: _RING_NBYTES - start]
            self._ring[start : start + len(first)] = first
            if len(first) < len(data):
                self._ring[: len(data) - len(first)] = data[len(first) :]
            self._put += len(data)
            if block is not None:
                self._laid_out.append((self._put, block))
        if self._fence is not None:
            self._fence()
        self._count_put[0] = self._put

    def take(self) -> list[bytes]:
        """Return the notes that are in the peer's ring."""
        put = self.put_there[0]
        if self._fence is not None:
            self._fence()
        start, count = self.taken % _RING_NBYTES, put - self.taken
        data = bytes(self._theirs[start : start + count])
        if start + count > _RING_NBYTES:
            data += bytes(self._theirs[: start + count - _RING_NBYTES])
        notes, position = [], 0
        while position < count:
            (length,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size
            if length >= 0:
                notes.append(data[position : position + length])
                position += length
            else:
                (place,) = _PLACE.unpack_from(data, position)
                notes.append(self._fetch(place, -length))
                position += _PLACE.size
        self.taken = put
        if self._fence is not None:
            self._fence()
        self._count_taken[0] = put
        return notes

    def _fetch(self, place: int, nbytes: int) -> bytes:
        view = self._arena.peer_view(self._peer, Location.unpack(place), np.dtype(np.uint8), nbytes)
        return view.tobytes()
