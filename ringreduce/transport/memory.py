"""Ranks that are threads of one process: the transport of tests, and of a world of one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ringreduce.buffers import Array
from ringreduce.common.errors import CollectiveTimeoutError
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.messages import Prequest
from ringreduce.transport.shared.segments import Segments
from ringreduce.transport.waiting import Waiter


class MemoryWorld:
    """What the threads of one world share."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        # The queues need no lock of their own: deque.append and popleft are atomic, and so is dict.setdefault, while a
        # defaultdict may give two threads a queue each.
        self.queues: dict[tuple[int, int, int], deque[_MemoryTransfer]] = {}
        self.notes: list[deque[tuple[int, bytes]]] = [deque() for _ in range(size)]
        self.segments: dict[tuple[int, int], Array] = {}
        self.payloads: list[bytes] = [b""] * size
        self.meeting = threading.Barrier(size)
        self.subworlds: dict[tuple[int, ...], MemoryWorld] = {}

    def messages(self, rank: int) -> MemoryMessages:
        return MemoryMessages(self, rank)


@dataclass(slots=True)
class _MemoryTransfer:
    """A described message.

    Attributes:
        queue: where it goes through.
        data: what is sent, or where it is received.
        is_send: which of the two.
        done: whether it is complete, or was never started.
        copy: what was sent; None once it was received.
    """

    queue: deque[_MemoryTransfer]
    data: Array
    is_send: bool
    done: bool = field(default=True)
    copy: Array | None = None


class MemoryMessages:
    """Messages through queues: a send is complete when it was received, a receive when something is in its queue.

    Memory that is sent must stay as it is until then; here that is checked.
    """

    name = "memory"
    library = "none"
    max_tag = (1 << 31) - 1
    offers_allreduce = None
    concurrent = True

    def __init__(self, world: MemoryWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self._subsets = 0

    def send(self, data: Array, peer: int, tag: int) -> Prequest:
        return _MemoryTransfer(self._queue(self.rank, peer, tag), data, is_send=True)

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        return _MemoryTransfer(self._queue(peer, self.rank, tag), data, is_send=False)

    def _queue(self, sender: int, receiver: int, tag: int) -> deque[_MemoryTransfer]:
        return self._world.queues.setdefault((sender, receiver, tag), deque())

    def start(self, requests: Sequence[Prequest]) -> None:
        for request in requests:
            assert isinstance(request, _MemoryTransfer) and request.done, "a transfer was started twice"
            request.done = False
            if request.is_send:
                request.copy = request.data.copy()
                request.queue.append(request)

    def test_all(self, requests: Sequence[Prequest]) -> bool:
        self.test_some(requests)
        for request in requests:
            assert isinstance(request, _MemoryTransfer)
            if not request.done:
                return False
        return True

    def test_some(self, requests: Sequence[Prequest]) -> Sequence[int]:
        finished = []
        for index, request in enumerate(requests):
            assert isinstance(request, _MemoryTransfer)
            if request.done or (request.copy is not None if request.is_send else not request.queue):
                continue
            if not request.is_send:
                sent = request.queue.popleft()
                assert sent.copy is not None
                assert sent.copy.nbytes == request.data.nbytes, f"{sent.copy.nbytes} bytes, not {request.data.nbytes}"
                assert sent.copy.tobytes() == sent.data.tobytes(), "what was sent has changed on its way"
                np.copyto(request.data, sent.copy)
                sent.copy = None
            request.done = True
            finished.append(index)
        return finished

    def free(self, requests: Sequence[Prequest]) -> None:
        pass

    def allreduce(self, data: Array, op: ReduceOp) -> None:
        raise AssertionError("not offered")

    def post(self, note: bytes, peer: int) -> None:
        self._world.notes[peer].append((self.rank, note))

    def poll(self) -> tuple[int, bytes] | None:
        notes = self._world.notes[self.rank]
        return notes.popleft() if notes else None

    def exchange(self, payload: bytes) -> list[bytes]:
        self._world.payloads[self.rank] = payload
        self._rendezvous()
        payloads = list(self._world.payloads)
        self._rendezvous()
        return payloads

    def _rendezvous(self) -> None:
        try:
            self._world.meeting.wait(self._world.timeout_s)
        except threading.BrokenBarrierError:
            raise CollectiveTimeoutError(f"rank {self.rank}: another rank did not join the exchange") from None

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> MemoryMessages | None:
        self._subsets += 1
        world = self._world.subworlds.setdefault(  # An atomic call: the first to come makes it.
            (self._subsets, *ranks), MemoryWorld(len(ranks), self._world.timeout_s)
        )
        return world.messages(ranks.index(self.rank)) if self.rank in ranks else None

    def give_up(self, requests: Sequence[Prequest]) -> None:
        for request in requests:
            assert isinstance(request, _MemoryTransfer)
            request.done = True

    def renew(self) -> None:
        self._rendezvous()  # From here on nobody sends.
        for (_, receiver, _), queue in list(self._world.queues.items()):
            if receiver == self.rank:
                queue.clear()
        self._rendezvous()

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


class MemorySegments(Segments):
    """Segments that are plain arrays, for threads have one memory anyway."""

    def __init__(self, world: MemoryWorld, rank: int) -> None:
        self._world = world
        self._rank = rank
        self._made = 0

    def create(self, nbytes: int) -> tuple[int, Array]:
        self._made += 1
        segment = np.zeros(nbytes + 4096, np.uint8)
        skip = -segment.__array_interface__["data"][0] % 4096
        segment = segment[skip : skip + nbytes]
        self._world.segments[self._rank, self._made] = segment
        return self._made, segment

    def discard(self, segment_id: int, offset: int, nbytes: int) -> None:
        self._world.segments[self._rank, segment_id][offset : offset + nbytes] = 0

    def open(self, rank: int, segment_id: int) -> Array:
        return self._world.segments[rank, segment_id]

    create_kept = create
    open_kept = open

    def alive(self, rank: int) -> bool:
        return True

    def close(self) -> None:
        pass
