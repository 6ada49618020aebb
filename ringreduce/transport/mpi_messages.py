"""Messages over MPI, through mpi4py."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np

from ringreduce.buffers import Array
from ringreduce.common.errors import ChangedMessageError, CollectiveTimeoutError, TransportError, name_ranks
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.messages import Prequest, exchange_json
from ringreduce.transport.mpi import duplicates, library, peers_in, soon, translate, translated
from ringreduce.transport.waiting import Waiter

# isort: split

from mpi4py import MPI  # Imported after ringreduce.transport.mpi, which decides how MPI ends.

#: What the library reduces; mpi4py finds MPI's names for them.
_TYPES = frozenset(("float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))))
_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVERAGE: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.BAND: MPI.BAND,
    ReduceOp.BOR: MPI.BOR,
    ReduceOp.BXOR: MPI.BXOR,
    ReduceOp.LAND: MPI.LAND,
    ReduceOp.LOR: MPI.LOR,
    ReduceOp.LXOR: MPI.LXOR,
}
_NOTE_TAG = 0
_LAST_TAG = 1
_GIVEN_UP_TAG = 2
_REFUSAL = -1  # Sent in place of a number of notes.
_NO_COMM = cast("MPI.Intracomm", MPI.COMM_NULL)

#: Transports that were not closed, or had transfers under way then: MPI may still use the memory which these name, so
#: it must stay, and the transport with it.
_open: set[MpiMessages] = set()


def revoke_all() -> None:
    """Revoke all transports of this process."""
    for messages in list(_open):
        messages.revoke()


class _DescribedMessage(NamedTuple):
    """A message that was described."""

    request: MPI.Prequest
    is_send: bool
    peer: int
    tag: int
    nbytes: int


class MpiMessages:
    """Messages on communicators of our own, so that nothing the user sends can be taken for them.

    Args:
        comm: the ranks; duplicated, collectively.
        waiter: how the collective calls made here wait, those of the constructor too.

    Raises:
        CollectiveTimeoutError: not all ranks of ``comm`` made one of these. They may try again, all of them.
    """

    name = "mpi"

    def __init__(self, comm: MPI.Intracomm, waiter: Waiter) -> None:
        self._waiter = waiter
        # A request that is under way when its call fails is not freed: MPI may still write to the memory it names.
        self._described: dict[int, _DescribedMessage] = {}
        self._given_up: list[_DescribedMessage] = []
        self._to_free: list[MPI.Prequest] = []  # Persistent requests that are to be freed.
        self._data, control = duplicates(comm, waiter, 2)
        self._control = _Control(control, waiter)
        self.post = self._control.post
        self.poll = self._control.poll
        self.exchange = self._control.exchange
        self.rank = self._data.rank
        self.size = self._data.size
        tag_limit = self._data.Get_attr(MPI.TAG_UB)
        self.max_tag = 32767 if tag_limit is None else int(tag_limit)
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.library = library()
        _open.add(self)

    def send(self, data: Array, peer: int, tag: int) -> Prequest:
        try:
            request = self._data.Send_init([data.view(np.uint8), MPI.BYTE], peer, tag)
        except MPI.Exception as error:
            raise translate(error, self._data) from error
        self._described[id(request)] = _DescribedMessage(request, is_send=True, peer=peer, tag=tag, nbytes=data.nbytes)
        return request

    def recv(self, data: Array, peer: int, tag: int) -> Prequest:
        try:
            request = self._data.Recv_init([data.view(np.uint8), MPI.BYTE], peer, tag)
        except MPI.Exception as error:
            raise translate(error, self._data) from error
        self._described[id(request)] = _DescribedMessage(request, is_send=False, peer=peer, tag=tag, nbytes=data.nbytes)
        return request

    def start(self, requests: Sequence[Prequest]) -> None:
        try:
            MPI.Prequest.Startall(cast("list[MPI.Prequest]", requests))
        except MPI.Exception as error:
            raise translate(error, self._data) from error

    def test_all(self, requests: Sequence[Prequest]) -> bool:
        try:
            if len(requests) == 1:
                return cast("MPI.Request", requests[0]).Test()
            return MPI.Request.Testall(cast("list[MPI.Request]", requests))
        except MPI.Exception as error:
            raise translate(error, self._data) from error

    def test_some(self, requests: Sequence[Prequest]) -> Sequence[int]:
        try:
            return MPI.Request.Testsome(cast("list[MPI.Request]", requests)) or ()
        except MPI.Exception as error:
            raise translate(error, self._data) from error

    def free(self, requests: Sequence[Prequest]) -> None:
        given_up = {id(message.request) for message in self._given_up}
        try:
            for request in cast("Sequence[MPI.Prequest]", requests):
                if id(request) in given_up:
                    self._to_free.append(request)
                elif self._described.pop(id(request), None) is not None:  # Otherwise `revoke` has taken it.
                    request.Free()
        except MPI.Exception as error:
            raise translate(error, self._data) from error

    def offers_allreduce(self, count: int, dtype: str, op: ReduceOp) -> bool:
        # MPI leaves open what MIN and MAX make of a NaN, and this package does not.
        exact = op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT) or not dtype.startswith("float")
        return dtype in _TYPES and exact and count <= np.iinfo(np.int32).max

    def allreduce(self, data: Array, op: ReduceOp) -> None:
        # Neither the blocking form, which waits for ever for a failed rank, nor the persistent one: Open MPI 5.0 never
        # frees the memory that this takes, as much as the data.
        with translated(self._data):
            request = self._data.Iallreduce(MPI.IN_PLACE, data, _OPS[op])
            self._control.unfinished.append((request, data))  # They stay if a rank does not come.
            self._waiter.until(request.Test, lambda: "all ranks in the MPI library's own allreduce")
            self._control.unfinished.pop()

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> MpiMessages | None:
        self.exchange(b"")  # The exchange has a time limit; splitting has none.
        with translated(self._data):
            part = self._control.comm.Split(ranks[0] if self.rank in ranks else MPI.UNDEFINED, self.rank)
        if part == MPI.COMM_NULL:
            return None
        messages = MpiMessages(cast("MPI.Intracomm", part), waiter)
        part.Free()
        return messages

    def give_up(self, requests: Sequence[Prequest]) -> None:
        self._given_up += [self._described[id(request)] for request in requests]

    def renew(self) -> None:
        given_up = self._given_up
        self._given_up = []
        sent = [(message.peer, message.tag, message.nbytes) for message in given_up if message.is_send]
        sends = exchange_json(self, sent, self._may_be_sends)
        # Of one sender and tag, messages and receives match in their order. So of messages coming to this rank, or
        # of its receives, the last ones are too many.
        coming: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for peer, theirs in enumerate(sends):
            for receiver, tag, nbytes in theirs:
                if receiver == self.rank:
                    coming[peer, tag].append(nbytes)
        receives: defaultdict[tuple[int, int], list[MPI.Prequest]] = defaultdict(list)
        for each in given_up:
            if not each.is_send:
                receives[each.peer, each.tag].append(each.request)
        # A request may have been started twice, after its first message was complete.
        left: list[MPI.Request] = list({id(message.request): message.request for message in given_up}.values())
        with translated(self._data):
            for source, mine in receives.items():
                for request in mine[len(coming[source]) :]:
                    request.Cancel()
            for (peer, tag), sizes in coming.items():
                for nbytes in sizes[len(receives[peer, tag]) :]:
                    left.append(self._data.Irecv([bytearray(nbytes), MPI.BYTE], peer, tag))
            self._control.unfinished.append((left, given_up))
            self._waiter.until(lambda: MPI.Request.Testall(left), lambda: "messages of a call that was given up")
            self._control.unfinished.pop()
        self.exchange(b"")  # No rank may send before all receives that were given up have ended.
        freeing = self._to_free
        self._to_free = []
        self.free(freeing)

    def _may_be_sends(self, value: Any) -> bool:
        """Return whether what a rank says of messages that it has started can be so; it is not sealed."""
        return isinstance(value, list) and all(
            isinstance(item, list)
            and len(item) == 3
            and all(type(number) is int and 0 <= number < 1 << 31 for number in item)
            and item[1] <= self.max_tag
            for item in value
        )

    def revoke(self) -> None:
        comms = self._data, self._control.comm
        # They are not freed: later communicators would get their numbers, and their messages.
        self._data = self._control.comm = _NO_COMM
        for comm in comms:
            if comm != MPI.COMM_NULL:
                with suppress(MPI.Exception):
                    comm.Revoke()
        for message in list(self._described.values()):
            if _ends(message.request):
                del self._described[id(message.request)]
                message.request.Free()
        control = self._control
        control.posted = [note for note in control.posted if not _ends(note[0])]
        control.unfinished = [requests for requests in control.unfinished if not _all_end(requests[0])]
        self._forget()

    def abandon(self) -> None:
        if self._data != MPI.COMM_NULL and not MPI.Is_finalized():
            self._control.refuse_to_part()

    def close(self) -> None:
        if self._data == MPI.COMM_NULL or MPI.Is_finalized():
            return
        with translated(self._data):
            if self._control.part():
                self._data.Free()
                self._control.comm.Free()
            else:  # A later communicator must not get messages that are under way.
                self._data = self._control.comm = _NO_COMM
        self._forget()

    def _forget(self) -> None:
        """Keep this, and the memory it names, no longer, unless MPI may still use that."""
        if not (self._control.posted or self._control.unfinished or self._described):
            _open.discard(self)


class _Control:
    """The control notes and exchanges of a transport, on a communicator of their own.

    Attributes:
        comm: that one.
        posted: notes whose sends may not be complete.
        unfinished: requests (one, or several) that were given up, and memory that MPI may use as long as they last.
    """

    def __init__(self, comm: MPI.Intracomm, waiter: Waiter) -> None:
        self.comm = comm
        self.posted: list[tuple[MPI.Request, bytes]] = []
        self.unfinished: list[tuple[object, ...]] = []
        self._waiter = waiter
        self._peers = peers_in(comm)
        self._exchanges = 0
        self._gave_up = ""  # Why the ranks do not exchange anything any more.
        self._sent, self._received = np.zeros((2, comm.size), np.int64)

    def post(self, note: bytes, peer: int) -> None:
        try:
            for each in [each for each in self.posted if each[0].Test()]:
                self.posted.remove(each)
            posted = self.comm.Isend([note, MPI.BYTE], peer, _NOTE_TAG), note
            self.posted.append(posted)  # Kept before the test, which may raise while MPI still reads the note.
            self._sent[peer] += 1
            if posted[0].Test():  # Nearly all are done at once.
                self.posted.remove(posted)
        except MPI.Exception as error:
            raise translate(error, self.comm) from error

    def poll(self) -> tuple[int, bytes] | None:
        status = MPI.Status()  # Each call has its own: a signal handler may communicate in the middle of it.
        try:
            message = self.comm.Improbe(MPI.ANY_SOURCE, _NOTE_TAG, status)
            if message is None:
                return None
            note = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([note, MPI.BYTE])
        except MPI.Exception as error:
            raise translate(error, self.comm) from error
        source = status.Get_source()
        self._received[source] += 1
        return source, bytes(note)

    def exchange(self, payload: bytes) -> list[bytes]:
        if self._gave_up:
            raise TransportError(f"an earlier exchange between the ranks was given up: {self._gave_up}")
        self._exchanges += 1
        sizes = np.zeros(self.comm.size, np.int64)
        with translated(self.comm):
            own = np.array([len(payload)], np.int64)
            self._finish(self.comm.Iallgather(own, sizes), own, sizes)
            if sizes.min() < 0 or sizes.max() >= 1 << 31:  # MPI counts in 31 bits.
                raise ChangedMessageError(f"ranks exchange {sizes.tolist()} bytes: a number has changed on its way")
            gathered = bytearray(int(sizes.sum()))
            counts = sizes.tolist()
            request = self.comm.Iallgatherv([payload, MPI.BYTE], [gathered, (counts, None), MPI.BYTE])
            self._finish(request, payload, gathered)
        bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        return [bytes(gathered[low:high]) for low, high in pairwise(bounds)]

    def _finish(self, request: MPI.Request, *memory: object) -> None:
        """Wait for an exchange; if not all ranks come in time, let those that have come know who is missing.

        If it fails, ``memory``, which the exchange reads and writes, stays, since the others may yet complete it.
        """
        self.unfinished.append((request, *memory))
        gone: set[int] = set()  # Ranks that have given it up.
        status = MPI.Status()
        number = np.zeros(1, np.int64)

        def over() -> bool:
            while self.comm.Iprobe(MPI.ANY_SOURCE, _GIVEN_UP_TAG, status):
                self.comm.Recv(number, status.Get_source(), _GIVEN_UP_TAG)
                if 1 <= number[0] <= self._exchanges:  # A rank that has given up one takes part in no later one either.
                    gone.add(status.Get_source())
            return bool(gone) or request.Test()

        begun = time.monotonic()
        with suppress(CollectiveTimeoutError):
            self._waiter.until(over, str)
        seconds = time.monotonic() - begun
        complete = request.Test()
        if complete and not gone:
            self.unfinished.pop()
            return
        peers = self._peers
        mine = np.array([self._exchanges])
        self.unfinished.append(([self.comm.Isend(mine, peer, _GIVEN_UP_TAG) for peer in peers], mine))
        soon(lambda: over() and len(gone) == len(peers))  # All ranks that have come give it up.
        missing = [rank for rank in peers if rank not in gone]
        if complete or not missing:
            self._gave_up = f"{name_ranks(sorted(gone))} had stopped waiting for this rank to join an exchange"
        else:
            self._gave_up = f"waited {seconds:.3g} s for {name_ranks(missing)} to join an exchange"
        raise CollectiveTimeoutError(self._gave_up)

    def refuse_to_part(self) -> None:
        """Tell the others not to wait for this rank in `part`."""
        refusal = np.array([_REFUSAL])
        for peer in self._peers:
            with suppress(MPI.Exception):  # This rank may have died.
                self.unfinished.append((self.comm.Isend([refusal, MPI.INT64_T], peer, _LAST_TAG), refusal))

    def part(self) -> bool:
        """Tell the others how many notes they were sent, and wait a little for theirs; return whether all have come."""
        expected = np.zeros(self.comm.size, np.int64)
        requests = [self.comm.Irecv([expected[peer:], 1, MPI.INT64_T], peer, _LAST_TAG) for peer in self._peers]
        requests += [self.comm.Isend([self._sent[peer:], 1, MPI.INT64_T], peer, _LAST_TAG) for peer in self._peers]

        def together() -> bool:
            while self.poll() is not None:
                pass
            return MPI.Request.Testall(requests) and bool((self._received >= expected).all())

        def refused() -> bool:
            return bool((expected == _REFUSAL).any())

        self.unfinished.append((requests, expected))
        if not soon(lambda: together() or refused(), self._waiter.crowded) or refused():
            return False
        self.unfinished.pop()
        self.posted = [note for note in self.posted if not note[0].Test()]
        return not self.posted


def _all_end(requests: Any) -> bool:
    """Return whether a request of a revoked communicator, or all of several, are over, as they are within moments."""
    return all(map(_ends, requests)) if isinstance(requests, list) else _ends(requests)


def _ends(request: MPI.Request) -> bool:
    try:
        return soon(request.Test)
    except MPI.Exception:
        return True
