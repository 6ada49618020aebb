"""Messages over MPI, through mpi4py. MPI's exceptions are translated here and nowhere else."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from typing import Any, NamedTuple, cast

import mpi4py
import numpy as np
import numpy.typing as npt

from ringreduce.common.errors import CollectiveTimeoutError, PeerLostError, TransportError, name_ranks
from ringreduce.common.launch import launch
from ringreduce.common.processes import at_exit
from ringreduce.common.reduce_ops import ReduceOp
from ringreduce.transport.messages import Request, exchange_json
from ringreduce.transport.waiting import Waiter

# mpi4py starts MPI at its import, with Python's lock held, and MPI waits there for all ranks of the job: no other
# thread could look at the time. And it ends MPI at the exit of every process that has it, those too that a rank has
# forked, and these would wait there for the other ranks. So both are done here, unless the program has settled that
# before: what mpi4py has registered then is a function of C, which runs after all of Python's and cannot be taken back.
_is_ours = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize and mpi4py.rc.finalize is None
if _is_ours:
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

__all__ = ["HERE_TAG", "LEFT_TAG", "MpiMessages", "keep_left", "library", "revoke_all", "translated", "world"]

Array = npt.NDArray[Any]

_log = logging.getLogger(__name__)

#: What the library reduces; mpi4py finds MPI's names for them.
_TYPES = frozenset(("float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))))
_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.AVERAGE: MPI.SUM,
    ReduceOp.PRODUCT: MPI.PROD,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
}
_NOTE_TAG, _LAST_TAG, _GIVEN_UP_TAG = 0, 1, 2
#: On communicators that are not ours: the largest that there always are.
HERE_TAG, _STARTING_TAG, LEFT_TAG = 32767, 32766, 32765
_WHO_IS_HERE, _I_AM = 0, 1  # what is said with the last of these
_PARTING_S = 1.0
#: Errors that mean that a rank has died, or that another one has seen that first.
_LOST = {getattr(MPI, name, -1) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")}

#: Transports that were not closed, or had transfers under way then: MPI may still use the memory which these name, so
#: it must stay, and the transport with it.
_open: set[MpiMessages] = set()
#: By communicator (as Fortran knows it), the copies that a transport on it began to make and was not made of, in their
#: order. MPI cannot take back a collective call, so the next transport goes on with them.
_begun: defaultdict[int, list[_Copy]] = defaultdict(list)
#: The ranks of the job that have not died; None: all.
_left: MPI.Intracomm | None = None


class _Transfer(NamedTuple):
    """A message that was described."""

    request: MPI.Prequest
    is_send: bool
    peer: int
    tag: int
    nbytes: int


class _Copy(NamedTuple):
    """A duplicate of a communicator, which can be used once the request is complete."""

    comm: MPI.Intracomm
    request: MPI.Request


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
        self._posted: list[tuple[MPI.Request, bytes]] = []
        self._unfinished: list[tuple[object, ...]] = []  # collective requests that were given up, and their memory
        # A request that is under way when its call fails is not freed: MPI may still write to the memory it names.
        self._described: dict[int, _Transfer] = {}
        self._given_up: list[_Transfer] = []
        self._to_free: list[MPI.Prequest] = []  # of those
        self._exchanges = 0
        self._gave_up = ""  # why the ranks do not exchange anything any more
        _open.add(self)
        self._data = self._control = cast("MPI.Intracomm", MPI.COMM_NULL)
        self._data = self._duplicate(comm, 0)
        self._control = self._duplicate(comm, 1)
        del _begun[comm.py2f()]
        self.rank = self._data.rank
        self.size = self._data.size
        tag_limit = self._data.Get_attr(MPI.TAG_UB)
        self.max_tag = 32767 if tag_limit is None else int(tag_limit)
        self.has_allreduce = True
        self._sent = np.zeros(self.size, np.int64)
        self._received = np.zeros(self.size, np.int64)
        self.concurrent = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.library = library()

    def send(self, data: Array, peer: int, tag: int) -> Request:
        with self._translated():
            return self._keep(self._data.Send_init([data.view(np.uint8), MPI.BYTE], peer, tag), True, data, peer, tag)

    def recv(self, data: Array, peer: int, tag: int) -> Request:
        with self._translated():
            return self._keep(self._data.Recv_init([data.view(np.uint8), MPI.BYTE], peer, tag), False, data, peer, tag)

    def _keep(self, request: MPI.Prequest, is_send: bool, data: Array, peer: int, tag: int) -> MPI.Prequest:
        self._described[id(request)] = _Transfer(request, is_send, peer, tag, data.nbytes)
        return request

    def start(self, requests: Sequence[Request]) -> None:
        try:
            MPI.Prequest.Startall(cast("list[MPI.Prequest]", requests))
        except MPI.Exception as error:
            raise _translate(error, self._data) from error

    def test_all(self, requests: Sequence[Request]) -> bool:
        try:
            if len(requests) == 1:
                return cast("MPI.Request", requests[0]).Test()
            return MPI.Request.Testall(cast("list[MPI.Request]", requests))
        except MPI.Exception as error:
            raise _translate(error, self._data) from error

    def test_some(self, requests: Sequence[Request]) -> Sequence[int]:
        try:
            return MPI.Request.Testsome(cast("list[MPI.Request]", requests)) or ()
        except MPI.Exception as error:
            raise _translate(error, self._data) from error

    def free(self, requests: Sequence[Request]) -> None:
        given_up = {id(each.request) for each in self._given_up}
        with self._translated():
            for request in cast("Sequence[MPI.Prequest]", requests):
                if id(request) in given_up:
                    self._to_free.append(request)
                elif self._described.pop(id(request), None) is not None:  # else `revoke` has taken it
                    request.Free()

    def offers_allreduce(self, count: int, dtype: str, op: ReduceOp) -> bool:
        # MPI leaves open what MIN and MAX make of a NaN, and this package does not.
        exact = op in (ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.PRODUCT) or not dtype.startswith("float")
        return dtype in _TYPES and exact and count <= np.iinfo(np.int32).max

    def allreduce(self, data: Array, op: ReduceOp) -> None:
        # Neither the blocking form, which waits for ever for a rank that is lost, nor the persistent one: Open MPI 5.0
        # never gives back the memory that this takes, as much as the data.
        with self._translated():
            request = self._data.Iallreduce(MPI.IN_PLACE, data, _OPS[op])
            self._unfinished.append((request, data))  # which stay if a rank does not come
            self._waiter.until(request.Test, lambda: "all ranks in the MPI library's own allreduce")
            self._unfinished.pop()

    def post(self, note: bytes, peer: int) -> None:
        try:
            self._posted = [each for each in self._posted if not each[0].Test()]
            self._posted.append((self._control.Isend([note, MPI.BYTE], peer, _NOTE_TAG), note))
        except MPI.Exception as error:
            raise _translate(error, self._data) from error
        self._sent[peer] += 1

    def poll(self) -> tuple[int, bytes] | None:
        status = MPI.Status()
        try:
            message = self._control.Improbe(MPI.ANY_SOURCE, _NOTE_TAG, status)
            if message is None:
                return None
            note = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([note, MPI.BYTE])
        except MPI.Exception as error:
            raise _translate(error, self._data) from error
        source = status.Get_source()
        self._received[source] += 1
        return source, bytes(note)

    def exchange(self, payload: bytes) -> list[bytes]:
        if self._gave_up:
            raise TransportError(f"an earlier exchange between the ranks was given up: {self._gave_up}")
        self._exchanges += 1
        sizes = np.zeros(self.size, np.int64)
        with self._translated():
            own = np.array([len(payload)], np.int64)
            self._meet(self._control.Iallgather(own, sizes), own, sizes)
            gathered = bytearray(int(sizes.sum()))
            counts = sizes.tolist()
            request = self._control.Iallgatherv([payload, MPI.BYTE], [gathered, (counts, None), MPI.BYTE])
            self._meet(request, payload, gathered)
        bounds = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        return [bytes(gathered[low:high]) for low, high in pairwise(bounds)]

    def _meet(self, request: MPI.Request, *memory: object) -> None:
        """Wait for an exchange; if not all ranks come in time, let those that have come know who is missing.

        If it fails, ``memory``, which the exchange reads and writes, stays, since the others may yet complete it.
        """
        self._unfinished.append((request, *memory))
        gone: set[int] = set()  # ranks that have given it up
        status, said = MPI.Status(), np.zeros(1, np.int64)

        def over() -> bool:
            while self._control.Iprobe(MPI.ANY_SOURCE, _GIVEN_UP_TAG, status):
                self._control.Recv(said, status.Get_source(), _GIVEN_UP_TAG)
                if 1 <= said[0] <= self._exchanges:  # who has given up one takes part in no later one either
                    gone.add(status.Get_source())
            return bool(gone) or request.Test()

        begun = time.monotonic()
        with suppress(CollectiveTimeoutError):
            self._waiter.until(over, str)
        seconds, complete = time.monotonic() - begun, request.Test()
        if complete and not gone:
            self._unfinished.pop()
            return
        peers = self._peers(self._control)
        mine = np.array([self._exchanges])
        self._unfinished.append(([self._control.Isend(mine, peer, _GIVEN_UP_TAG) for peer in peers], mine))
        with suppress(CollectiveTimeoutError):  # all that have come give it up, within moments
            Waiter(_PARTING_S).until(lambda: over() and len(gone) == len(peers), str)
        missing = [rank for rank in peers if rank not in gone]
        if complete or not missing:
            self._gave_up = f"{name_ranks(sorted(gone))} had stopped waiting for this rank to join an exchange"
        else:
            self._gave_up = f"waited {seconds:.3g} s for {name_ranks(missing)} to join an exchange"
        raise CollectiveTimeoutError(self._gave_up)

    @staticmethod
    def _peers(comm: MPI.Intracomm) -> list[int]:
        return [rank for rank in range(comm.size) if rank != comm.rank]

    def subset(self, ranks: Sequence[int], waiter: Waiter) -> MpiMessages | None:
        self.exchange(b"")  # which has a time limit; splitting has none
        with self._translated():
            part = self._control.Split(ranks[0] if self.rank in ranks else MPI.UNDEFINED, self.rank)
        if part == MPI.COMM_NULL:
            return None
        messages = MpiMessages(cast("MPI.Intracomm", part), waiter)
        part.Free()
        return messages

    def give_up(self, requests: Sequence[Request]) -> None:
        self._given_up += [self._described[id(each)] for each in requests]

    def renew(self) -> None:
        given_up, self._given_up = self._given_up, []
        sends = exchange_json(self, [(each.peer, each.tag, each.nbytes) for each in given_up if each.is_send])
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
        left: list[MPI.Request] = [each.request for each in given_up]
        with self._translated():
            for source, mine in receives.items():
                for request in mine[len(coming[source]) :]:
                    request.Cancel()
            for (peer, tag), sizes in coming.items():
                for nbytes in sizes[len(receives[peer, tag]) :]:
                    left.append(self._data.Irecv([bytearray(nbytes), MPI.BYTE], peer, tag))
            self._unfinished.append((left, given_up))
            self._waiter.until(lambda: MPI.Request.Testall(left), lambda: "messages of a call that was given up")
            self._unfinished.pop()
        self.exchange(b"")  # nobody may send before the receives are gone that were given up
        freeing, self._to_free = self._to_free, []
        self.free(freeing)

    def _translated(self) -> AbstractContextManager[None]:
        return translated(None if self._data == MPI.COMM_NULL else self._data)

    def revoke(self) -> None:
        comms = [each for each in (self._data, self._control) if each != MPI.COMM_NULL]
        self._data = self._control = cast("MPI.Intracomm", MPI.COMM_NULL)
        for comm in comms:
            with suppress(MPI.Exception):
                comm.Revoke()
        left = [each for each in self._described.values() if not _ends(each.request)]
        for each in self._described.values():
            if each not in left:
                each.request.Free()
        self._described = {id(each.request): each for each in left}
        self._posted = [each for each in self._posted if not _ends(each[0])]
        self._unfinished = [each for each in self._unfinished if not _all_end(each[0])]
        if not (self._described or self._posted or self._unfinished):
            _open.discard(self)
        # They are not freed: later ones would get their numbers, and messages that are on their way.

    def _duplicate(self, comm: MPI.Intracomm, number: int) -> MPI.Intracomm:
        """Make the first or second copy of a communicator, or finish making it. Collective."""
        begun = _begun[comm.py2f()]
        with self._translated():
            if number == len(begun):
                begun.append(_Copy(*comm.Idup()))  # not Dup, which waits without limit for a rank that does not come
            copy, request = begun[number]
            try:
                self._waiter.until(lambda: self._answer(comm) and request.Test(), str)
            except CollectiveTimeoutError:
                missing = self._missing(comm)
                if not request.Test():
                    raise CollectiveTimeoutError(
                        f"waited {self._waiter.timeout_s:g} s for {name_ranks(missing)} to start ringreduce"
                    ) from None
            copy.Set_errhandler(MPI.ERRORS_RETURN)
        return copy

    def _missing(self, comm: MPI.Intracomm) -> list[int]:
        """Return who does not answer, within moments, that it waits for a copy as well; all others if all do."""
        peers, here = self._peers(comm), set[int]()
        for peer in peers:
            self._tell(comm, _WHO_IS_HERE, peer)
        with suppress(CollectiveTimeoutError):
            Waiter(_PARTING_S).until(lambda: self._answer(comm, here) and len(here) == len(peers), str)
        return [peer for peer in peers if peer not in here] or peers

    def _answer(self, comm: MPI.Intracomm, here: set[int] | None = None) -> bool:
        """Answer ranks that ask whether this one waits for a copy, and take down who says so; always true.

        What somebody said who has given up since does no harm: whoever waits goes on to wait, as all may try again.
        """
        status, said = MPI.Status(), np.zeros(1, np.int64)
        while comm.Iprobe(MPI.ANY_SOURCE, _STARTING_TAG, status):
            peer = status.Get_source()
            comm.Recv(said, peer, _STARTING_TAG)
            if here is not None:
                here.add(peer)
            if said[0] == _WHO_IS_HERE:
                self._tell(comm, _I_AM, peer)
        return True

    def _tell(self, comm: MPI.Intracomm, what: int, peer: int) -> None:
        note = np.array([what], np.int64).tobytes()
        self._posted.append((comm.Isend([note, MPI.BYTE], peer, _STARTING_TAG), note))

    def close(self) -> None:
        if self._data == MPI.COMM_NULL or MPI.Is_finalized():
            return
        with self._translated():
            if self._part():
                self._data.Free()
                self._control.Free()
            else:  # what is still under way to this rank must not be taken for a message of a later communicator
                self._data = self._control = cast("MPI.Intracomm", MPI.COMM_NULL)
        if not (self._posted or self._unfinished or self._described):
            _open.discard(self)

    def _part(self) -> bool:
        """Tell the others how many notes they were sent, and wait a little for theirs; return whether all have come."""
        peers = self._peers(self._control)
        expected = np.zeros(self.size, np.int64)
        requests = [self._control.Irecv([expected[peer:], 1, MPI.INT64_T], peer, _LAST_TAG) for peer in peers]
        requests += [self._control.Isend([self._sent[peer:], 1, MPI.INT64_T], peer, _LAST_TAG) for peer in peers]

        def together() -> bool:
            while self.poll() is not None:
                pass
            return MPI.Request.Testall(requests) and bool((self._received >= expected).all())

        parting = Waiter(_PARTING_S, self._waiter.crowded)
        try:
            parting.until(together, lambda: "the others to part")
        except CollectiveTimeoutError:
            self._unfinished += [(request, expected) for request in requests]
            return False
        except MPI.Exception:
            self._unfinished += [(request, expected) for request in requests]
            raise
        self._posted = [each for each in self._posted if not each[0].Test()]
        return not self._posted


def world() -> MPI.Intracomm:
    """Return the communicator of all ranks, of those that are left if some have died, initialising MPI if need be."""
    if not MPI.Is_initialized():  # as with ``mpi4py.rc.initialize = False``
        _start()
        at_exit(_finalize)
    return MPI.COMM_WORLD if _left is None else _left


def _start() -> None:
    """Start MPI as mpi4py does, but let other threads run meanwhile."""
    wanted = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    level = getattr(MPI, f"THREAD_{wanted.upper()}")
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    if code:
        raise MPI.Exception(code)
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)


def keep_left(comm: MPI.Intracomm) -> None:
    """Take note of the ranks of the job that have not died."""
    global _left
    _left = comm


def revoke_all() -> None:
    """Revoke all transports of this process."""
    for each in list(_open):
        each.revoke()


def _finalize() -> None:
    if MPI.Is_finalized():
        return
    if _left is None and not (launch().survives_deaths and _lost(MPI.COMM_WORLD)):
        MPI.Finalize()
        return
    # After a death, Open MPI 5.0 now and then waits in there for ever. So the ranks that are left part by themselves.
    with suppress(MPI.Exception, CollectiveTimeoutError):
        if _left is not None:
            Waiter(_PARTING_S).until(_left.Ibarrier().Test, str)


def _all_end(requests: Any) -> bool:
    """Return whether a request, or all of several, are over."""
    return all(map(_ends, requests if isinstance(requests, list) else [requests]))


def _ends(request: MPI.Request) -> bool:
    """Return whether a request of a revoked communicator is over, as it is within moments."""
    try:
        Waiter(_PARTING_S).until(request.Test, str)
    except CollectiveTimeoutError:
        return False
    except MPI.Exception:
        pass
    return True


if _is_ours:
    world()


def library() -> str:
    """Return the name and version of the MPI library, e.g. ``Open MPI 5.0.11``."""
    text = MPI.Get_library_version().splitlines()[0]
    return text.split(",")[0].removesuffix("\x00").strip()


@contextmanager
def translated(comm: MPI.Intracomm | None = None) -> Iterator[None]:
    """Turn MPI's errors into our own; ``comm``: where to look who was lost, if somebody was."""
    try:
        yield
    except MPI.Exception as error:
        raise _translate(error, comm) from error


def _translate(error: MPI.Exception, comm: MPI.Intracomm | None = None) -> TransportError:
    text = error.Get_error_string()
    kind = error.Get_error_class()
    # A test of several messages leaves it to the status of one of them to say that a rank has died.
    if kind in _LOST or (kind == MPI.ERR_IN_STATUS and launch().survives_deaths):
        lost = [] if comm is None else _lost(comm)
        return PeerLostError(lost[0] if lost else -1, f"MPI reports {text}")
    return TransportError(f"MPI reports {text}")


def _lost(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator of which MPI knows that they have died."""
    with suppress(MPI.Exception, NotImplementedError):
        failed = comm.Get_failed()
        return sorted(failed.Translate_ranks(list(range(failed.size)), comm.Get_group()))
    return []
