"""Arrays from one rank to another: a note announces each, so that the receiver knows what comes before it comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, Final

import numpy as np

from ringreduce.buffers import Array, Operand
from ringreduce.common.errors import (
    CollectiveError,
    ConfigError,
    MismatchError,
    RingReduceError,
    ShutdownError,
    TransportError,
)
from ringreduce.common.lifetime import Lifetime
from ringreduce.native.layout import DONE, TAKEN, TAKING
from ringreduce.native.library import Library
from ringreduce.transport.array_notes import (
    HEAD,
    LAST_TAG,
    NUMBER,
    SMALL,
    SMALL_NEAR,
    TAG,
    ArrayKind,
    kind_of,
    small_kind_for,
)
from ringreduce.transport.control import AnnouncedNotes, NoteStream, RepeatedNotes, SharedControlChannel
from ringreduce.transport.messages import Messages, Prequest
from ringreduce.transport.waiting import Waiter

_PIECE = 1 << 30  # The most bytes of one message.
_UNREAD = 16 << 20  # Unread bytes of notes in shared memory before a send to that rank waits.
_POLLS = 300  # Looks for a note, before others may have the lock: about 10 us.


class NoRank(Enum):
    """The type of `PROC_NULL`."""

    PROC_NULL = "no rank"

    def __repr__(self) -> str:
        return "ringreduce.PROC_NULL"


#: In place of a neighbour, where there is none: to send to it does nothing, and to receive from it does not change the
#: array (MPI 4.1, section 3.10).
PROC_NULL: Final = NoRank.PROC_NULL


class PeerTransfer:
    """An array that is sent or received.

    Attributes:
        data: its memory, which belongs to the transfer until that is done; contiguous, unless it is small.
        kind: which must agree between sender and receiver.
        peer: the other rank, or `PROC_NULL`; None until a receive from any rank knows it.
        tag: which must agree, too.
        done: whether it has ended, well or not.
        error: why it has failed.
        then: called as soon as it has ended well; None: nothing is.
    """

    __slots__ = ("data", "done", "error", "is_send", "kind", "peer", "requests", "tag", "then")

    def __init__(self, data: Array, kind: ArrayKind, peer: int | NoRank | None, tag: int, *, is_send: bool) -> None:
        self.data = data
        self.kind = kind
        self.peer = peer
        self.tag = tag
        self.is_send = is_send
        self.done = peer is PROC_NULL
        self.error: BaseException | None = None
        self.requests: Sequence[Prequest] = ()
        self.then: Callable[[], object] | None = None

    def __str__(self) -> str:
        whom = "any rank" if self.peer is None else self.peer.value if self.peer is PROC_NULL else f"rank {self.peer}"
        return f"{'send to' if self.is_send else 'receive from'} {whom} ({self.kind.what}, tag {self.tag})"

    def end(self, error: BaseException | None = None) -> None:
        """Take note that it has ended."""
        self.error = error
        if error is None and self.then is not None:
            self.then()
        self.done = True


class PointToPoint:
    """Sends and receives between the ranks of one group. Thread-safe.

    Messages of one rank to another with one tag are received in the order in which they are sent. A send of more than
    4 KiB, 128 KiB within a node, is done when the data is sent, which may take until the other rank receives it.
    Messages under way progress whenever one of their ranks waits for anything with a waiter that calls `advance`.

    Args:
        messages: the ranks, on a channel that nobody else uses; closed with this.
        waiter: how a rank waits, and for how long at most; nobody else's.
        find_failed: returns the error about a rank that takes part in no further call; None: there is none.
        lifetime: of this; nothing else's.
        counts_decide: whether an array may be received into one of another shape that has as many elements.
        near: carries notes within a node, for this alone; None: the messages carry all.
        compiled: what sends and receives arrays that come again; None: Python does.

    Attributes:
        waiter: the argument.
        concurrent: whether several threads may be in here at once.
    """

    def __init__(
        self,
        messages: Messages,
        waiter: Waiter,
        find_failed: Callable[[str], CollectiveError | None],
        lifetime: Lifetime,
        *,
        counts_decide: bool = False,
        near: SharedControlChannel | None = None,
        compiled: Library | None = None,
    ) -> None:
        self._compiled = compiled
        self._counts_decide = counts_decide
        self._streams = {} if near is None else near.streams
        self._near = {} if counts_decide else self._streams
        self._repeated = RepeatedNotes(self._near)
        self._polls = [] if near is None else [near.poll]
        if len(self._streams) < messages.size - 1:
            self._polls.append(messages.poll)
        self._messages = messages
        self.concurrent = messages.concurrent
        self.waiter = waiter
        waiter.watchers.append(self._watch)
        self._find_failed = find_failed
        self._lock = threading.RLock()
        # By rank, numbers of the large arrays that it was sent.
        self._numbers = [count() for _ in range(messages.size)]
        self._announced = AnnouncedNotes(self._streams)
        self._awaited: list[PeerTransfer] = []  # Receives that nothing has come for yet.
        self._moving: list[PeerTransfer] = []
        self._lifetime = lifetime
        lifetime.listen_while_held("failed", self._end_all)
        lifetime.listen_while_held("forked", self._forked)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._moving or self._awaited)

    def send(self, source: Operand, peer: int | NoRank, tag: int) -> PeerTransfer:
        """Begin to send an array; it belongs to the transfer until that is done.

        Args:
            source: its memory, of any strides.
            peer: another rank, or `PROC_NULL`.
            tag: at least 0, at most 2^63 - 1.

        Raises:
            ConfigError: there is no such rank, or it is this one; or no such tag.
            CollectiveTimeoutError: the rank did not receive 16 MiB that it was sent before in time; this is not sent.
            PeerLostError: a rank of the group has failed.
        """
        _require(peer, tag, rank=self._messages.rank, size=self._messages.size)
        kind = kind_of(source.describe(by_count=self._counts_decide), source.nbytes)
        if peer is PROC_NULL:
            return PeerTransfer(source.view, kind, peer, tag=tag, is_send=True)
        is_small = kind.nbytes <= (SMALL_NEAR if peer in self._streams else SMALL)
        data = source.view if is_small or source.contiguous else source.flat()
        transfer = PeerTransfer(data, kind, peer, tag=tag, is_send=True)
        stream = self._streams.get(peer)
        if stream is not None and stream.grown:
            self._wait_for_room(stream, peer)
        with self._lock:
            self._lifetime.require_open("message")
            # No other array has this number, even if this one fails.
            number = 0 if is_small else next(self._numbers[peer])
            note = TAG.pack(tag) + kind.head + (data.tobytes() if is_small else NUMBER.pack(number))
            if stream is None:
                self._messages.post(note, peer)
            else:
                stream.put(note)
            if is_small:
                transfer.done = True
            else:
                self._start(transfer, peer, number)
        return transfer

    def send_now(self, array: Any, peer: Any, tag: Any) -> ArrayKind | None:
        """Send a small NumPy array to a rank of the node, in fewer steps than `send`.

        Args:
            array, peer, tag: of any type.

        Returns:
            Its kind; None: it was not sent, and `send` can send it or say why not.
        """
        key = True, id(array), peer, tag
        repeat = self._repeated.by_key.get(key) if type(peer) is type(tag) is int else None
        if repeat is not None and repeat.address and not repeat.stream.grown:
            assert self._compiled is not None
            with self._lock:
                if self._lifetime.open and repeat.address and self._compiled.put(repeat.address) == DONE:
                    return repeat.kind
        kind = small_kind_for(self._near, array, peer, tag)
        if kind is not None:
            stream = self._streams[peer]
            with self._lock:
                if stream.grown or not self._lifetime.open:
                    return None
                stream.put(TAG.pack(tag) + kind.head + array.tobytes())
                if self._compiled is not None and array.flags.c_contiguous:
                    self._repeated.remember(key, array, kind)
        return kind

    def recv_now(self, out: Any, peer: Any, tag: Any, kind: ArrayKind | None = None) -> ArrayKind | None:
        """Receive a small NumPy array from a rank of the node, if that is what comes next, and within moments.

        Args:
            out, peer, tag: of any type.
            kind: what `exchanged_kind` has returned for these; None: that was not called.

        Returns:
            Its kind; None: nothing was received, and `recv` can receive what comes.
        """
        key = False, id(out), peer, tag
        repeat = self._repeated.by_key.get(key) if type(peer) is type(tag) is int else None
        if repeat is not None and repeat.address:
            assert self._compiled is not None
            with self._lock:
                may_take = self._lifetime.open and not self._awaited and repeat.address
                if may_take and self._compiled.take(repeat.address) == DONE:
                    return repeat.kind
        if kind is None:
            kind = small_kind_for(self._near, out, peer, tag)
            if kind is None or not out.flags.carray:
                return None
        head = TAG.pack(tag) + kind.head
        stream = self._streams[peer]
        there = stream.put_there
        taken = stream.state[TAKEN]
        for _ in range(0 if self.waiter.crowded else _POLLS):
            if there[0] != taken:
                break
        with self._lock:
            if self._compiled is not None:
                self._repeated.remember(key, out, kind)
            if self._awaited or there[0] == stream.state[TAKEN] or not self._lifetime.open:
                return None
            try:
                note = stream.take()
            except TransportError:
                if stream.state[TAKING]:  # A signal handler has interrupted this.
                    raise
                return None
            if note is None:
                return None
            if note.startswith(head) and not self._announced.has(peer, tag):
                out[...] = np.ndarray(out.shape, out.dtype, note, kind.end)
                return kind
            (its_tag,) = TAG.unpack_from(note)
            self._announced.add(peer, its_tag, note)
        return None

    def exchanged_kind(self, array: Any, out: Any, peer: Any, tag: Any) -> ArrayKind | None:
        """Return the kind of ``out``, if `recv_now` may receive into it while ``array`` is sent; None: it may not."""
        kind = small_kind_for(self._near, out, peer, tag)
        if kind is None or not out.flags.carray or type(array) is not np.ndarray or np.may_share_memory(array, out):
            return None
        return kind

    def recv(self, target: Operand, peer: int | NoRank | None, tag: int) -> PeerTransfer:
        """Begin to receive into an array.

        Args, Raises:
            as for `send`, and peer None: from any rank; `UnsupportedBufferError`: the array is read-only.
        """
        _require(peer, tag, rank=self._messages.rank, size=self._messages.size)
        target.require_writable()
        kind = kind_of(target.describe(by_count=self._counts_decide), target.nbytes)
        in_place = target.contiguous or kind.nbytes <= SMALL
        data = target.view if in_place else np.empty(target.shape, target.dtype.storage)
        transfer = PeerTransfer(data, kind, peer, tag=tag, is_send=False)
        if peer is PROC_NULL:
            return transfer
        if not in_place:
            transfer.then = partial(np.copyto, target.view, data)
        with self._lock:
            self._lifetime.require_open("message")
            announced = self._announced.take(peer, tag)
            if announced is not None:
                self._receive(transfer, *announced)
                return transfer
            self._awaited.append(transfer)
            self.advance()
        return transfer

    def wait(self, transfer: PeerTransfer, timeout_s: float | None = None) -> None:
        """Return once a transfer is done.

        Args:
            transfer: any that was begun here.
            timeout_s: how long to wait; None: as long as the waiter does.

        Raises:
            MismatchError: what comes has another dtype or shape. What comes after it can still be received.
            CollectiveTimeoutError: it was not done in time, and is still under way.
            PeerLostError: a rank of the group has failed.
        """
        waiter = self.waiter
        if timeout_s is not None:
            waiter = Waiter(timeout_s, waiter.crowded)
            waiter.watchers = self.waiter.watchers

        def over() -> bool:
            self.advance()
            return transfer.done

        if not transfer.done:
            waiter.until(over, lambda: f"the other side of a {transfer}")
        if transfer.error is not None:
            raise transfer.error

    def wait_for_some(self, transfers: Sequence[PeerTransfer], changed: Callable[[], bool]) -> None:
        """Return once one of several transfers is done, or what is waited for has ``changed``; raises as `wait`."""

        def over() -> bool:
            if not any(transfer.done for transfer in transfers):
                self.advance()
            return any(transfer.done for transfer in transfers) or changed()

        self.waiter.until(over, lambda: f"the other side of a {transfers[0]}")

    def withdraw(self, transfer: PeerTransfer) -> None:
        """Receive into an array no more, unless that has begun."""
        with self._lock:
            if transfer in self._awaited:
                self._awaited.remove(transfer)

    def advance(self) -> None:
        """Do what can be done without waiting; does nothing while another thread does so."""
        if not (self._awaited or self._moving) or not self._lock.acquire(blocking=False):
            return
        try:
            for poll in tuple(self._polls):
                while self._awaited and (arrived := poll()) is not None:
                    self._take(*arrived)
                    if len(self._polls) > 1:  # The other comes first next time.
                        self._polls = [*(other for other in self._polls if other != poll), poll]
            if self._moving:
                for transfer in self._moving:
                    if not transfer.done and self._messages.test_all(transfer.requests):
                        self._messages.free(transfer.requests)
                        transfer.end()
                self._moving = [transfer for transfer in self._moving if not transfer.done]
        except RingReduceError as error:
            self.fail(self._find_failed("this rank waits for a message") or error)
        finally:
            self._lock.release()

    def _wait_for_room(self, stream: NoteStream, peer: int) -> None:
        """Return once a rank has received enough of what is in memory that the node shares."""
        self._watch("this rank sends messages")

        def over() -> bool:
            self.advance()
            return stream.unread <= _UNREAD or not self._lifetime.open

        self.waiter.until(over, lambda: f"rank {peer} to receive some of {stream.unread} bytes that it was sent")
        stream.grown = False

    def _watch(self, doing: str = "this rank waits for a message") -> None:
        """Raise if a rank of the group has failed; for the waiter."""
        failed = self._find_failed(doing)
        if failed is not None:
            self.fail(failed)
            raise failed

    def fail(self, error: BaseException) -> None:
        """End all that is under way, and all that is begun later, in an error. Local."""
        with self._lock:
            self._lifetime.fail(error)

    def close(self) -> None:
        """Give back what this holds. Collective, and safe to call twice."""
        with self._lock:
            if not self._lifetime.close():
                return
            error = "the group was destroyed, or the world shut down, while a message was under way"
            self._end_all(ShutdownError(error))
        with suppress(RingReduceError):
            self._messages.close()
        self.waiter.forget()

    def _end_all(self, error: BaseException) -> None:
        self._repeated.by_key.clear()
        ended = (*self._awaited, *self._moving)
        self._awaited = []
        self._moving = []
        for transfer in ended:
            if not transfer.done:
                transfer.end(error)  # MPI itself keeps alive what it still moves.

    def _forked(self) -> None:
        self._repeated.by_key.clear()
        self._lock = threading.RLock()  # The rank may hold the former one.
        self._moving = []
        self._awaited = []

    def _take(self, sender: int, note: bytes) -> None:
        """Take a note that has come."""
        (tag,) = TAG.unpack_from(note)
        for place, transfer in enumerate(self._awaited):
            if transfer.tag == tag and transfer.peer in (None, sender):
                del self._awaited[place]
                try:
                    self._receive(transfer, sender, note)
                except BaseException as error:
                    transfer.end(error)  # Nothing else ends it: it is in no list.
                    raise
                return
        self._announced.add(sender, tag, note)

    def _receive(self, transfer: PeerTransfer, sender: int, note: bytes) -> None:
        """Receive the array of a note."""
        transfer.peer = sender
        kind = transfer.kind
        most = SMALL_NEAR if sender in self._streams else SMALL
        data = transfer.data
        if note.startswith(kind.head, TAG.size):
            if kind.nbytes <= most:
                data[...] = np.ndarray(data.shape, data.dtype, note, kind.end)
                transfer.end()
            else:
                self._start(transfer, sender, *NUMBER.unpack_from(note, kind.end))
            return
        nbytes, length = HEAD.unpack_from(note, TAG.size)
        start = TAG.size + HEAD.size
        sent = kind_of(note[start : start + length].decode(), nbytes)
        if nbytes > most:
            dropped = PeerTransfer(np.empty(nbytes, np.uint8), sent, sender, transfer.tag, is_send=False)
            self._start(dropped, sender, *NUMBER.unpack_from(note, sent.end))
        rank = self._messages.rank
        values = {sender: f"send to rank {rank} ({sent.what}, tag {transfer.tag})", rank: str(transfer)}
        transfer.end(MismatchError(values))

    def _start(self, transfer: PeerTransfer, peer: int, number: int) -> None:
        """Start the messages of a large array; its number separates them from those of other arrays."""
        tag = number % self._messages.max_tag
        data = transfer.data.reshape(-1).view(np.uint8)
        describe = self._messages.send if transfer.is_send else self._messages.recv
        transfer.requests = [describe(data[low : low + _PIECE], peer, tag) for low in range(0, data.nbytes, _PIECE)]
        self._messages.start(transfer.requests)
        self._moving.append(transfer)


def _require(peer: int | NoRank | None, tag: int, rank: int, size: int) -> None:
    if not (peer is None or peer is PROC_NULL) and (not 0 <= peer < size or peer == rank):
        raise ConfigError(f"messages go to other ranks, 0 to {size - 1}; rank {rank} named {peer}")
    if not 0 <= tag <= LAST_TAG:
        raise ConfigError(f"tags are at least 0, and less than 2^63, got {tag}")
