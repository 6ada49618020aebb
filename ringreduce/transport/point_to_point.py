"""Arrays from one rank to another: a note announces each, so that the receiver knows what comes before it comes."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from ringreduce.buffers import Array, Operand
from ringreduce.common.errors import CollectiveError, ConfigError, MismatchError, RingReduceError, ShutdownError
from ringreduce.common.lifetime import Lifetime
from ringreduce.common.serial import SerialTask
from ringreduce.transport.messages import Messages, Prequest
from ringreduce.transport.waiting import Waiter

_HEAD = struct.Struct("<qqqH")  # the tag, the number, bytes, and how long the description is
_SMALL = 4096  # bytes that travel in the note itself
_PIECE = 1 << 30  # bytes of one message


class PeerTransfer:
    """An array that is sent or received.

    Attributes:
        data: its bytes; they belong to the transfer until it is done.
        what: the dtype and shape, which must agree between sender and receiver.
        peer: the other rank; None until a receive from any rank knows it.
        tag: which must agree, too.
        done: whether it has ended, well or not.
        error: why it has failed.
        then: called as soon as it has ended well; None: nothing is.
    """

    def __init__(self, data: Array, what: str, peer: int | None, tag: int, *, is_send: bool) -> None:
        self.data = data
        self.what = what
        self.peer = peer
        self.tag = tag
        self.is_send = is_send
        self.done = False
        self.error: BaseException | None = None
        self.requests: list[Prequest] = []
        self.then: Callable[[], object] | None = None

    def __str__(self) -> str:
        whom = "any rank" if self.peer is None else f"rank {self.peer}"
        return f"{'send to' if self.is_send else 'receive from'} {whom} ({self.what}, tag {self.tag})"

    def end(self, error: BaseException | None = None) -> None:
        """Take note that it has ended."""
        self.error = error
        if error is None and self.then is not None:
            self.then()
        self.done = True


class PointToPoint:
    """Sends and receives between the ranks of one group. Thread-safe.

    Messages of one rank to another with one tag are received in the order in which they are sent. A send of more than
    4 KiB is done when the data is sent, which may take until the other rank receives it. Messages under way progress
    whenever one of their ranks waits for anything with a waiter that calls `advance`.

    Args:
        messages: the ranks, on a channel that nobody else uses; closed with this.
        waiter: how a rank waits, and for how long at most; nobody else's.
        find_failed: returns the error about a rank that takes part in no further call; None: there is none.
        lifetime: of this; nothing else's.
        counts_decide: whether an array may be received into one of another shape that has as many elements.
    """

    def __init__(
        self,
        messages: Messages,
        waiter: Waiter,
        find_failed: Callable[[str], CollectiveError | None],
        lifetime: Lifetime,
        *,
        counts_decide: bool = False,
    ) -> None:
        self._counts_decide = counts_decide
        self._messages = messages
        self.waiter = waiter
        waiter.watchers.append(self._watch)
        self._find_failed = find_failed
        self._lock = threading.RLock()
        self._numbers = [0] * messages.size  # of the large arrays that each rank was sent
        self._announced: list[tuple[int, int, bytes]] = []  # sender, tag and note, in the order in which they came
        self._awaited: list[PeerTransfer] = []  # receives that nothing has come for yet
        self._moving: list[PeerTransfer] = []
        self._lifetime = lifetime
        lifetime.listen_while_held("failed", self._end_all)
        lifetime.listen_while_held("forked", self._forked)

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._moving or self._awaited)

    def send(self, source: Operand, peer: int, tag: int) -> PeerTransfer:
        """Begin to send an array; it belongs to the transfer until that is done.

        Args:
            source: its memory, of any strides.
            peer: another rank.
            tag: at least 0, at most 2^63 - 1.

        Raises:
            ConfigError: there is no such rank, or it is this one; or no such tag.
        """
        self._require(peer, tag)
        what = source.describe(by_count=self._counts_decide)
        data = source.flat().view(np.uint8)
        transfer = PeerTransfer(data, what, peer, tag=tag, is_send=True)
        with self._lock:
            self._lifetime.require_open("message")
            text = what.encode()
            number = self._numbers[peer]
            head = _HEAD.pack(tag, number, data.nbytes, len(text)) + text
            if data.nbytes <= _SMALL:
                self._messages.post(head + data.tobytes(), peer)
                transfer.end()
                return transfer
            self._numbers[peer] += 1
            self._messages.post(head, peer)
            self._start(transfer, data, number)
        return transfer

    def recv(self, target: Operand, peer: int | None, tag: int) -> PeerTransfer:
        """Begin to receive into an array.

        Args, Raises:
            as for `send`, and peer None: from any rank; `UnsupportedBufferError`: the array is read-only.
        """
        self._require(peer, tag)
        target.require_writable()
        room = target.view if target.contiguous else np.empty(target.shape, target.dtype.storage)
        what = target.describe(by_count=self._counts_decide)
        transfer = PeerTransfer(room.reshape(-1).view(np.uint8), what, peer, tag=tag, is_send=False)
        if not target.contiguous:
            transfer.then = partial(np.copyto, target.view, room)
        with self._lock:
            self._lifetime.require_open("message")
            self._awaited.append(transfer)
            self._advance()
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
            if not transfer.done:
                self.advance()
            return transfer.done

        if not transfer.done:
            waiter.until(over, lambda: f"the other side of a {transfer}")
        if transfer.error is not None:
            raise transfer.error

    def wait_for_some(self, transfers: Sequence[PeerTransfer], changed: Callable[[], bool]) -> None:
        """Return once one of several transfers is done, or what is waited for has ``changed``; raises as `wait`."""

        def over() -> bool:
            if not any(each.done for each in transfers):
                self.advance()
            return any(each.done for each in transfers) or changed()

        self.waiter.until(over, lambda: f"the other side of a {transfers[0]}")

    def withdraw(self, transfer: PeerTransfer) -> None:
        """Receive into an array no more, unless that has begun."""
        with self._lock:
            if transfer in self._awaited:
                self._awaited.remove(transfer)

    def advance(self) -> None:
        """Do what can be done without waiting; does nothing while another thread does so."""
        if self.busy and self._lock.acquire(blocking=False):
            try:
                self._advance()
            finally:
                self._lock.release()

    def _watch(self) -> None:
        """Raise if a rank of the group has failed; for the waiter."""
        failed = self._find_failed("this rank waits for a message")
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
        ended = (*self._awaited, *self._moving)
        self._awaited = []
        self._moving = []
        for each in ended:
            if not each.done:
                each.end(error)  # what MPI still moves it keeps alive itself

    def _forked(self) -> None:
        self._lock = threading.RLock()  # the rank may hold it
        self._moving = []
        self._awaited = []

    def _require(self, peer: int | None, tag: int) -> None:
        rank = self._messages.rank
        size = self._messages.size
        if peer is not None and (not 0 <= peer < size or peer == rank):
            raise ConfigError(f"messages go to other ranks, 0 to {size - 1}; rank {rank} named {peer}")
        if not 0 <= tag < 1 << 63:
            raise ConfigError(f"tags are at least 0, got {tag}")

    def _advance(self) -> None:
        try:
            while (note := self._messages.poll()) is not None:
                sender, text = note
                self._announced.append((sender, _HEAD.unpack_from(text)[0], text))
            if self._announced:
                self._awaited = [each for each in self._awaited if not self._matched(each)]
            if self._moving:
                for each in self._moving:
                    if not each.done and self._messages.test_all(each.requests):
                        self._messages.free(each.requests)
                        each.end()
                self._moving = [each for each in self._moving if not each.done]
        except RingReduceError as error:
            self.fail(error)

    def _matched(self, transfer: PeerTransfer) -> bool:
        """Return whether what a receive waits for was announced; then it is received."""
        tag = transfer.tag
        source = transfer.peer
        found = next((each for each in self._announced if each[1] == tag and source in (None, each[0])), None)
        if found is None:
            return False
        self._announced.remove(found)
        sender, _, note = found
        transfer.peer = sender
        _, number, nbytes, length = _HEAD.unpack_from(note)
        text = note[_HEAD.size : _HEAD.size + length].decode()
        data = note[_HEAD.size + length :]
        agrees = text == transfer.what
        if nbytes <= _SMALL:
            if agrees:
                transfer.data[:] = np.frombuffer(data, np.uint8)
                transfer.end()
        else:
            room = transfer.data if agrees else np.empty(nbytes, np.uint8)
            moving = transfer if agrees else PeerTransfer(room, text, sender, tag=tag, is_send=False)
            self._start(moving, room, number, sender=sender)
        if not agrees:
            rank = self._messages.rank
            values = {sender: f"send to rank {rank} ({text}, tag {tag})", rank: str(transfer)}
            transfer.end(MismatchError(values))
        return True

    def _start(self, transfer: PeerTransfer, data: Array, number: int, sender: int | None = None) -> None:
        """Start the messages of a large array; its number separates them from those of other arrays."""
        tag = number % self._messages.max_tag
        pieces = [data[low : low + _PIECE] for low in range(0, data.nbytes, _PIECE)]
        if sender is None:
            assert transfer.peer is not None
            transfer.requests = [self._messages.send(each, transfer.peer, tag) for each in pieces]
        else:
            transfer.requests = [self._messages.recv(each, sender, tag) for each in pieces]
        self._messages.start(transfer.requests)
        self._moving.append(transfer)


class Deliveries:
    """Ends a task for each transfer when that is done, in whatever order this happens. Thread-safe.

    One thread waits for all of them, which begins with the first and sleeps while there are none.

    Args:
        name: of that thread.
        messages: of the transfers.
        lifetime: of what they belong to; closed before this is.
        threads: whether there may be one; without it, to add a transfer is to wait for it.
    """

    def __init__(self, name: str, messages: PointToPoint, lifetime: Lifetime, *, threads: bool) -> None:
        self._name = name
        self._lifetime = lifetime
        self._messages = messages
        self._threads = threads
        self._changed = threading.Condition()
        self._added: list[tuple[PeerTransfer, SerialTask]] = []  # which the thread has not seen
        self._thread: threading.Thread | None = None

    def add(self, transfer: PeerTransfer) -> SerialTask:
        """Return what ends when a transfer does, with its error; or with why it cannot be waited for any longer."""
        task = SerialTask(lambda: self._messages.wait(transfer), str(transfer))
        if not self._threads:
            task.run()
            return task
        with self._changed:
            self._lifetime.require_open()
            self._added.append((transfer, task))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return task

    def close(self) -> None:
        """Return when all have ended; the messages are closed by then, which ends all transfers."""
        with self._changed:
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        waiting: list[tuple[PeerTransfer, SerialTask]] = []
        while True:
            with self._changed:
                if not waiting:
                    self._changed.wait_for(lambda: self._added or self._lifetime.closed)
                waiting = waiting + self._added
                self._added = []
            if not waiting:
                return
            try:
                self._messages.wait_for_some([each for each, _ in waiting], lambda: bool(self._added))
            except Exception as error:  # nothing has come for so long, or never will
                for _, task in waiting:
                    task.end(error)
                waiting = []
            for transfer, task in waiting:
                if transfer.done:
                    task.end(transfer.error)
            waiting = [each for each in waiting if not each[0].done]
