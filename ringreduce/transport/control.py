"""Control notes: a few bytes from rank to rank, beside the data. In shared memory they are quicker than messages."""

from __future__ import annotations

import struct
import weakref
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import numpy as np

from ringreduce.buffers import Array, address_of
from ringreduce.buffers.same import unchanged
from ringreduce.common.errors import TransportError
from ringreduce.native.layout import (
    ANNOUNCED,
    COME_FLAG,
    HELD_NOTE_POLLS,
    NOTE_POLLS,
    PUT_BASE,
    PUT_END,
    PUT_FLAG,
    PUTTING,
    STREAM_FIELDS,
    TAKE_BASE,
    TAKEN,
    TAKING,
)
from ringreduce.transport.array_notes import TAG, ArrayKind
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.shared.arena import Arena, Block
from ringreduce.transport.shared.board import fence
from ringreduce.transport.shared.node import Node

_LINE = 64
_BUFFER_NBYTES = 32 << 10
_LARGER_NBYTES = 2 << 20  # A buffer of larger notes has room for 64, up to so many bytes;
_NOTES = 8  # or for so many of them.
_PART_NBYTES = 2 * _LINE + _BUFFER_NBYTES
_HELD_POLLS = 100  # Of a compiled receive: about 3 us with the interpreter's lock,
_POLLS = 5000  # and 100 us without.

_MOST_REPEATED = 256
_MOST_ANNOUNCED = 16 << 20  # Of notes of a rank that were taken for others behind them; then that rank waits.
_ANNOUNCED_NBYTES = 4096  # Shorter notes do not count.
_TRIES = 3  # So often Python sends or receives an array; then compiled code does.

_LENGTH = struct.Struct("<q")  # Length of the note that follows.
_TURN = struct.Struct("<qq")  # In place of a length: the bytes of the next buffer, negative, and its place.


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
    """Carries control notes between the ranks of a node: through buffers of each rank for each other.

    A rank has a part for each peer: how many bytes it has put; where the peer's current buffer begins, plus one, so
    that 0 means: still in the first; and its own first buffer. Notes follow one another in a buffer. Where one does not
    fit, its writer turns to a buffer that the peer has read, or to a new one: no note waits for the peer, nor for
    another call of the writer.

    Args:
        node: the ranks. Its arena is used by the thread that uses this.
        messages: all ranks of the process set, for setting up. Collective.

    Attributes:
        streams: to and from each of the others.
    """

    def __init__(self, node: Node, messages: Messages) -> None:
        arena = node.arena
        members = node.board.members
        index = node.board.index
        nbytes = _PART_NBYTES * len(members)
        parts = arena.allocate(nbytes)
        for start in range(0, nbytes, _PART_NBYTES):
            parts.memory[start : start + 2 * _LINE] = 0
        places = exchange_json(messages, parts.place)
        self.streams: dict[int, NoteStream] = {}
        patient = not node.board.waiter.crowded
        for number, peer in enumerate(members):
            if number != index:
                mine = parts.view[number * _PART_NBYTES :][:_PART_NBYTES]
                theirs = arena.peer_view(peer, places[peer], np.dtype(np.uint8), count=nbytes)
                place = parts.place + number * _PART_NBYTES
                part = theirs[index * _PART_NBYTES :].data
                self.streams[peer] = NoteStream(arena, peer, mine, place, part, patient=patient)
        self._all = tuple(self.streams.items())

    def post(self, note: bytes, peer: int) -> None:
        self.streams[peer].put(note)

    def poll(self) -> tuple[int, bytes] | None:
        for place, (peer, stream) in enumerate(self._all, 1):
            waits = stream.put_there[0] != stream.state[TAKEN] and not stream.state[TAKING]
            if waits and (note := stream.take()) is not None:
                self._all = self._all[place:] + self._all[:place]  # Turned, so that no rank is always served first.
                return peer, note
        return None

    def abandon(self) -> None:
        """Nobody waits for a rank that does not close it."""

    def close(self) -> None:
        """Nothing to give back: the memory goes with the arena, and a peer may still read what was posted last."""


class _NoteBuffer(NamedTuple):
    """Memory that notes are put into.

    Attributes:
        memory, place: where it is.
        block: of the arena; None: it is that of the part.
        first: of all bytes of the stream, the one that it begins with.
    """

    memory: memoryview
    place: int
    block: Block | None
    first: int


class NoteStream:
    """Both directions between two ranks.

    One store ends `put` and `take`, so that whatever interrupts them leaves a whole stream.

    Args:
        arena: where more buffers come from.
        peer: the other rank.
        mine: this rank's part for the peer.
        place: of that.
        theirs: the peer's part for this rank.
        patient: whether a compiled `take` looks for a note for long.

    Attributes:
        put_there: how many bytes the peer has put, as the peer says.
        announced_nbytes: how much of what was taken is still to be received, see `AnnouncedNotes`.
        grown: whether it took more memory to put notes, as the peer had not read enough; whoever looks resets it.
        state: what compiled code knows of this, see `ringreduce.native.layout`.
    """

    def __init__(
        self, arena: Arena, peer: int, mine: memoryview, place: int, theirs: memoryview, *, patient: bool
    ) -> None:
        self._arena = arena
        self._peer = peer
        self._fence = fence()
        self.announced_nbytes = 0
        self.grown = False
        self._put_here = mine[:8].cast("q")
        self._turned_here = mine[_LINE : _LINE + 8].cast("q")
        self.put_there = theirs[:8].cast("q")
        self._turned_there = theirs[_LINE : _LINE + 8].cast("q")
        self._full: deque[tuple[int, _NoteBuffer]] = deque()  # The buffers before, each with where the next one begins.
        self.state = np.zeros(STREAM_FIELDS, np.int64).data
        self.state[PUT_FLAG] = _address(self._put_here)
        self.state[COME_FLAG] = _address(self.put_there)
        if patient:
            self.state[HELD_NOTE_POLLS] = _HELD_POLLS
            self.state[NOTE_POLLS] = _POLLS
        self._put_into(_NoteBuffer(mine[2 * _LINE :], place + 2 * _LINE, None, first=0))
        self._take_from(theirs[2 * _LINE : _PART_NBYTES], 0)

    @property
    def unread(self) -> int:
        """How many bytes the peer has not read, except that it does not tell what it has read of its current buffer."""
        return self._put_here[0] - max(self._turned_there[0] - 1, 0)

    def put(self, note: bytes) -> None:
        """Hand the peer a note.

        Raises:
            TransportError: a signal handler does so where it has interrupted this, or there is no more memory to share.
        """
        if self.state[PUTTING]:
            raise _interrupted()
        self.state[PUTTING] = 1
        try:
            put = self._put_here[0]
            buffer = self._buffer
            start = put - buffer.first
            end = start + _LENGTH.size + len(note)
            if end > len(buffer.memory) - _LINE:  # The last line is for the note that says where the next buffer is.
                buffer = self._turn(put, len(note))
                end -= start
                start = 0
            buffer.memory[start:end] = _LENGTH.pack(len(note)) + note
            if self._fence is not None:
                self._fence()
            self._put_here[0] = buffer.first + -(-end // _LINE) * _LINE
        finally:
            self.state[PUTTING] = 0

    def _turn(self, put: int, nbytes: int) -> _NoteBuffer:
        """Go on in another buffer, in which a note of so many bytes fits; return that."""
        nbytes += 2 * _LINE
        usual = _BUFFER_NBYTES
        if nbytes > _BUFFER_NBYTES // 4:
            usual = max(min(64 * nbytes, _LARGER_NBYTES), _NOTES * nbytes)
        target = None
        while self._full and self._full[0][0] < self._turned_there[0]:
            _, buffer = self._full.popleft()
            if target is None and len(buffer.memory) >= usual:
                target = buffer._replace(first=put)
            elif buffer.block is not None:
                self._arena.release(buffer.block)
        if target is None:
            block = self._arena.allocate(usual)
            target = _NoteBuffer(block.view, block.place, block, first=put)
            self.grown = True
        _TURN.pack_into(self._buffer.memory, put - self._buffer.first, -len(target.memory), target.place)
        last = put, self._buffer
        self._put_into(target)  # Comes first: an exception of a signal handler must not leave it among the full ones.
        self._full.append(last)
        return target

    def _put_into(self, buffer: _NoteBuffer) -> None:
        """Put notes into a buffer from now on."""
        self.state[PUT_END] = 0
        self._buffer = buffer
        self.state[PUT_BASE] = _address(buffer.memory) - buffer.first
        self.state[PUT_END] = buffer.first + len(buffer.memory) - _LINE

    def take(self) -> bytes | None:
        """Return the peer's next note; None: there is none, or too much of what was taken is still to be received.

        Raises:
            TransportError: a signal handler does so where it has interrupted this, or the memory cannot be reached.
        """
        if self.state[TAKING]:
            raise _interrupted()
        self.state[TAKING] = 1
        try:
            if self._fence is not None:
                self._fence()
            taken = self.state[TAKEN]
            if self.put_there[0] == taken or self.announced_nbytes > _MOST_ANNOUNCED:
                return None
            memory, first = self._theirs
            (nbytes,) = _LENGTH.unpack_from(memory, taken - first)
            if nbytes < 0:
                while nbytes < 0:
                    _, place = _TURN.unpack_from(memory, taken - first)
                    memory = self._arena.peer_view(self._peer, place, np.dtype(np.uint8), count=-nbytes).data
                    first = taken
                    (nbytes,) = _LENGTH.unpack_from(memory, 0)
                self._take_from(memory, first)
                self._turned_here[0] = taken + 1
            start = taken - first + _LENGTH.size
            end = start + nbytes
            note = bytes(memory[start:end])
            self.state[TAKEN] = first + -(-end // _LINE) * _LINE
            return note
        finally:
            self.state[TAKING] = 0

    def _take_from(self, memory: memoryview, first: int) -> None:
        """Take notes out of a buffer of the peer's that begins with this byte of the stream."""
        self.state[TAKE_BASE] = 0
        self._theirs = memory, first
        self.state[TAKE_BASE] = _address(memory) - first

    def message(self, head: bytes, array: Array) -> Array | None:
        """Return what `Library.put` and `Library.take` take, to exchange notes of a head and this array; None: nothing.

        It does not keep the array, and must not be used once that is freed.
        """
        known = unchanged(array)
        if known is None:
            return None
        fields = [_address(self.state), address_of(array), array.nbytes, len(head)]
        padded = head + bytes(-len(head) % 8)
        return np.concatenate([np.array(fields, np.int64), np.frombuffer(padded, np.int64), known])


class AnnouncedNotes:
    """Notes of arrays that came before others which were asked for, in the order in which they came.

    Args:
        streams: by rank; others have none.
    """

    def __init__(self, streams: Mapping[int, NoteStream]) -> None:
        self._streams = streams
        self._notes: list[tuple[int, int, bytes]] = []  # Sender, tag and note.

    def add(self, sender: int, tag: int, note: bytes) -> None:
        """Keep a note until somebody asks for it."""
        self._notes.append((sender, tag, note))
        self._count(sender, 1, note)

    def take(self, peer: int | None, tag: int) -> tuple[int, bytes] | None:
        """Return the first note of a rank, None: any, with a tag, and its sender; None: there is none."""
        for place, (sender, its_tag, note) in enumerate(self._notes):
            if its_tag == tag and peer in (None, sender):
                del self._notes[place]
                self._count(sender, -1, note)
                return sender, note
        return None

    def has(self, peer: int, tag: int) -> bool:
        """Return whether there is a note of a rank with a tag."""
        return bool(self._notes) and any(note[:2] == (peer, tag) for note in self._notes)

    def _count(self, sender: int, sign: int, note: bytes) -> None:
        stream = self._streams.get(sender)
        if stream is not None:
            stream.state[ANNOUNCED] += sign
            stream.announced_nbytes += sign * (len(note) if len(note) > _ANNOUNCED_NBYTES else 0)


class RepeatedNote:
    """A small array that comes again, to or from one rank with one tag.

    Attributes:
        array: it.
        stream: its notes.
        kind: of the array.
        times: how often it came by Python since compiled code was last made for it.
        message: what compiled code takes; None: it was not made.
        address: of that; 0: there is none.
    """

    __slots__ = ("address", "array", "kind", "message", "stream", "times")

    def __init__(self, array: weakref.ref[Array], stream: NoteStream, kind: ArrayKind) -> None:
        self.array = array
        self.stream = stream
        self.kind = kind
        self.times = 1
        self.message: Array | None = None
        self.address = 0


class RepeatedNotes:
    """Notes of small arrays that come again, for compiled code; see `NoteStream.message`.

    Args:
        streams: by rank.

    Attributes:
        by_key: by direction (whether it is sent), identity of the array, rank and tag, for as long as the array lives.
    """

    def __init__(self, streams: Mapping[int, NoteStream]) -> None:
        self._streams = streams
        self.by_key: dict[tuple[bool, int, int, int], RepeatedNote] = {}

    def remember(self, key: tuple[bool, int, int, int], array: Array, kind: ArrayKind) -> None:
        """Take note that Python exchanges an array; the third time, let compiled code do it from now on.

        One that is new each time would not be worth it. The caller holds the lock under which messages are exchanged.

        Args:
            key: see ``by_key``.
            array: C-contiguous, of NumPy.
            kind: of it.
        """
        notes = self.by_key
        note = notes.get(key)
        if note is None:
            if len(notes) >= _MOST_REPEATED:  # With a tag for each message, for example.
                notes.clear()
            notes[key] = RepeatedNote(weakref.ref(array, lambda _: notes.pop(key, None)), self._streams[key[2]], kind)
            return
        note.times += 1
        if note.times >= _TRIES:
            note.times = 0
            message = note.stream.message(TAG.pack(key[3]) + kind.head, array)
            address = 0 if message is None else address_of(message)
            note.kind = kind
            # No call in between, in which a signal handler could use the address of what is freed.
            note.address = address
            note.message = message


def _address(memory: memoryview) -> int:
    return address_of(np.frombuffer(memory, np.uint8))


def _interrupted() -> TransportError:
    return TransportError("a signal handler communicates while the thread that it has interrupted does so")
