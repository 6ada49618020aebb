"""Messages that are encrypted, so that nobody else can read them, change them or send some of his own.

docs/security.md describes the construction, and has its sources.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar, cast

from ringreduce.buffers import Array
from ringreduce.common.errors import ChangedMessageError, TransportError
from ringreduce.common.keys import KEY_NBYTES, Secret
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.checked import GuardedMessages, GuardedTransfer
from ringreduce.transport.messages import Messages
from ringreduce.transport.waiting import Waiter

P = ParamSpec("P")
T = TypeVar("T")

_Buffer = Any  # Bytes, or an array of bytes.

_SEAL_NBYTES = 16
_NONCE = struct.Struct(">IQ")  # A tag, and a counter: 96 bits.
_MOST = (1 << 64) - 1


class TagCounts:
    """Counts messages by tag, from 0; takes little memory for tags that are used one after the other, once each."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._below = 0  # All smaller tags were used once, but for those that have a count of their own.

    def next(self, tag: int) -> int:
        """Return how many messages of a tag there were before this one.

        Raises:
            TransportError: as many as can be counted.
        """
        counts = self._counts
        number = counts.get(tag)
        if number is None:
            number = int(tag < self._below)
        elif number > _MOST:
            raise TransportError(f"there were {number} messages of tag {tag}, and no more can be sealed")
        counts[tag] = number + 1
        if tag == self._below:
            self._advance()
        return number

    def _advance(self) -> None:
        while self._below in self._counts:
            if self._counts[self._below] == 1:
                del self._counts[self._below]
            self._below += 1


class Cipher:
    """AES-256-GCM with one key, in one direction: who seals with it never opens with it.

    Args:
        key: 32 bytes, of nothing else.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        cipher = AESGCM(key)
        self._encrypt = cipher.encrypt_into
        self._decrypt = cipher.decrypt_into
        self._invalid = InvalidTag

    def seal(self, nonce: tuple[int, int], plain: _Buffer, sealed: _Buffer) -> None:
        """Encrypt.

        Args:
            nonce: a tag and a number, which this key must not have seen before.
            plain: what to encrypt.
            sealed: where to, 16 bytes more.
        """
        self._encrypt(_NONCE.pack(*nonce), plain, None, sealed)

    def open(self, nonce: tuple[int, int], sealed: _Buffer, plain: _Buffer) -> bool:
        """Decrypt; return whether it is what was sealed with this key and nonce. If not, ``plain`` is undefined.

        Args:
            nonce: of what is to come.
            sealed: what has come.
            plain: where to, 16 bytes less; empty, if less than 16 bytes have come.
        """
        try:
            self._decrypt(_NONCE.pack(*nonce), sealed, None, plain)
        except self._invalid:  # So it is, too, if less than 16 bytes have come.
            return False
        return True


class _SealedStream:
    """What one rank sends another, or all others: its cipher, and how many messages there were, by tag."""

    def __init__(self, cipher: Cipher) -> None:
        self.begin(cipher)

    def begin(self, cipher: Cipher) -> None:
        """Count from 0, with another key."""
        self.cipher = cipher
        self.counts = TagCounts()


def sealed(inner: Messages, key: Secret, name: str) -> Messages:
    """Return messages like others, but that all are encrypted. Collective.

    Args:
        inner: what moves the bytes.
        key: that all ranks have, and nobody else.
        name: of these messages, among all that are made of this key.
    """
    # Each rank's part makes the key a new one for this rank, whatever has come in place of the other parts.
    mine = os.urandom(KEY_NBYTES)
    fresh = inner.exchange(mine)
    fresh[inner.rank] = mine
    for rank, part in enumerate(fresh):
        if len(part) != KEY_NBYTES:  # Otherwise other parts could make the same key together.
            raise _not_opened(f"part of rank {rank} in a new key ({len(part)} bytes)")
    return cast("Messages", SealedMessages(inner, Secret(key.derive(name, b"".join(fresh)))))


def _in_turn(method: Callable[Concatenate[SealedMessages, P], T]) -> Callable[Concatenate[SealedMessages, P], T]:
    """Let one thread at a time run a method that numbers messages, so that no two get one number."""

    @wraps(method)
    def run(self: SealedMessages, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._lock:
            if self._busy:
                raise _interrupted()
            self._busy = True
            try:
                return method(self, *args, **kwargs)
            finally:
                self._busy = False

    return run


class SealedMessages(GuardedMessages):
    """See `sealed`, and there for the arguments; but the key belongs to these messages alone."""

    def __init__(self, inner: Messages, key: Secret) -> None:
        super().__init__(inner, _SEAL_NBYTES)
        self._key = key
        self._lock = threading.RLock()
        self._busy = False  # Whether a message is being numbered.
        self._streams: dict[tuple[str, int, bool], _SealedStream] = {}
        self._renewals = 0
        self._subsets = 0

    def _stream(self, kind: str, peer: int, *, is_send: bool) -> _SealedStream:
        """Return what is under way of a kind, to a peer or from it. Each has a key of its own."""
        stream = self._streams.get((kind, peer, is_send))
        if stream is None:
            stream = self._streams[kind, peer, is_send] = _SealedStream(self._cipher(kind, peer, is_send=is_send))
        return stream

    def _cipher(self, kind: str, peer: int, *, is_send: bool) -> Cipher:
        what = f"data {self._renewals}" if kind == "data" else kind
        sender, receiver = (self._inner.rank, peer) if is_send else (peer, self._inner.rank)
        to = "all" if kind == "exchange" else receiver
        return Cipher(self._key.derive(f"{what} from {sender} to {to} of {self._inner.size}"))

    # ---- messages ----

    @_in_turn
    def describe(self, transfer: GuardedTransfer) -> None:
        transfer.stream = self._stream("data", transfer.route.peer, is_send=transfer.route.is_send)

    def start(self, requests: Sequence[Any]) -> None:
        with self._lock:  # Like `_in_turn`, with fewer calls: small messages notice them.
            if self._busy:
                raise _interrupted()
            self._busy = True
            try:
                GuardedMessages.start(self, requests)
            finally:
                self._busy = False

    def begin(self, transfer: GuardedTransfer, room: memoryview) -> None:
        stream: _SealedStream = transfer.stream
        number = transfer.number = stream.counts.next(transfer.tag)
        if transfer.is_send:
            stream.cipher.seal((transfer.tag, number), transfer.data, room)

    def unpack(self, transfer: GuardedTransfer, room: memoryview) -> None:
        if not transfer.stream.cipher.open((transfer.tag, transfer.number), room, transfer.data):
            _, peer, tag, nbytes = transfer.route
            transfer.data[:] = bytes(nbytes)  # Until here it holds what somebody else has made of it.
            raise _not_opened(f"message {transfer.number} of tag {tag} from rank {peer} ({nbytes} bytes)")

    def renew(self) -> None:
        """See `Messages.renew`; as ranks may have counted different messages by now, they go on with new keys."""
        super().renew()
        self._take_new_keys()

    @_in_turn
    def _take_new_keys(self) -> None:
        self._renewals += 1
        for (kind, peer, is_send), stream in self._streams.items():
            if kind == "data":
                stream.begin(self._cipher(kind, peer, is_send=is_send))

    def allreduce(self, data: Array, op: ReduceOp) -> NoReturn:
        raise AssertionError("not offered")

    # ---- control notes and exchanges ----

    @_in_turn
    def post(self, note: bytes, peer: int) -> None:
        self._inner.post(self._sealed("notes", peer, note), peer)

    def poll(self) -> tuple[int, bytes] | None:
        arrived = self._inner.poll()
        return None if arrived is None else (arrived[0], self._opened("notes", *arrived))

    def exchange(self, payload: bytes) -> list[bytes]:
        rank = self._inner.rank
        arrived = self._inner.exchange(self._part(payload))
        return [payload if peer == rank else self._opened("exchange", peer, each) for peer, each in enumerate(arrived)]

    @_in_turn
    def _part(self, payload: bytes) -> bytes:
        return self._sealed("exchange", self._inner.rank, payload)

    def _sealed(self, kind: str, peer: int, plain: bytes) -> bytes:
        stream = self._stream(kind, peer, is_send=True)
        room = bytearray(len(plain) + _SEAL_NBYTES)
        stream.cipher.seal((0, stream.counts.next(0)), plain, room)
        return bytes(room)

    @_in_turn
    def _opened(self, kind: str, peer: int, arrived: bytes) -> bytes:
        stream = self._stream(kind, peer, is_send=False)
        number = stream.counts.next(0)
        room = bytearray(max(0, len(arrived) - _SEAL_NBYTES))
        if not stream.cipher.open((0, number), arrived, room):
            what = "control note" if kind == "notes" else "part of exchange"
            raise _not_opened(f"{what} {number} from rank {peer} ({len(room)} bytes)")
        return bytes(room)

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> Messages | None:
        part = self._inner.subset(ranks, waiter)
        self._subsets += 1
        if part is None:
            return None
        return sealed(part, self._key, f"subset {self._subsets} of ranks {list(ranks)}")


def _interrupted() -> TransportError:
    return TransportError("a signal handler communicates while the thread that it has interrupted does so")


def _not_opened(what: str) -> ChangedMessageError:
    text = f"{what} does not open: it has changed on its way, or something else has come in its place"
    return ChangedMessageError(text)
