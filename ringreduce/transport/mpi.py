"""Messages over MPI, through mpi4py: the only home of both. MPI's exceptions are translated here and nowhere else."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple, cast

import mpi4py
import numpy as np
import numpy.typing as npt

from ringreduce.config import survives_deaths
from ringreduce.errors import CollectiveTimeoutError, ConfigError, PeerLostError, TransportError, name_ranks
from ringreduce.processes import at_exit
from ringreduce.reduce_ops import ReduceOp
from ringreduce.transport.messages import Request, exchange_json
from ringreduce.transport.node import host_name
from ringreduce.transport.waiting import Waiter

# mpi4py ends MPI at the exit of every process that has it, those too that a rank has forked, and these would wait there
# for the other ranks. So it is done here, unless the program has settled that before: what mpi4py has registered then
# is a function of C, which runs after all of Python's and cannot be taken back.
_ends_mpi = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize and mpi4py.rc.finalize is None
if _ends_mpi:
    mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

__all__ = ["MpiMessages", "MpiRanks", "library", "subworld", "world", "world_ranks"]

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
_HERE_TAG, _STARTING_TAG, _LEFT_TAG = 32767, 32766, 32765
_WHO_IS_HERE, _I_AM = 0, 1  # what is said with the last of these
_PARTING_S = 1.0
_TOLD_S = 2.0  # the library tells of a death within 0.1 s
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
        with self._translated():
            self._posted = [each for each in self._posted if not each[0].Test()]
            self._posted.append((self._control.Isend([note, MPI.BYTE], peer, _NOTE_TAG), note))
        self._sent[peer] += 1

    def poll(self) -> tuple[int, bytes] | None:
        status = MPI.Status()
        with self._translated():
            message = self._control.Improbe(MPI.ANY_SOURCE, _NOTE_TAG, status)
            if message is None:
                return None
            note = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([note, MPI.BYTE])
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
        return _translated(None if self._data == MPI.COMM_NULL else self._data)

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
        self._unfinished.clear()
        if not (self._described or self._posted):
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
        self._posted = [each for each in self._posted if not each[0].Test()]
        return not self._posted


class MpiRanks:
    """Ranks of the job as MPI connects them; see `ringreduce.launch.Connection`.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._given = comm
        self._comm = comm  # those that are left
        self._heard: dict[int, MPI.Request] = {}  # of the given ones, that they look who is left
        self._processes: dict[int, int] = {}  # of the given ones that are on this host

    @property
    def name(self) -> str:
        return f"rank {self._comm.rank}"

    @property
    def who(self) -> str:
        job = world()
        if job.size == 1 and MPI.COMM_WORLD.size == 1:
            return ""
        in_job = f" (rank {job.rank} of {job.size} in the job)" if self._comm.size != job.size else ""
        return f"{self.name} of {self._comm.size}{in_job}"

    def messages(self, waiter: Waiter) -> MpiMessages:
        messages = MpiMessages(self._comm, waiter)
        if survives_deaths() and not self._processes:
            introduced = exchange_json(messages, (host_name(), os.getpid()))
            self._processes = {rank: pid for rank, (host, pid) in enumerate(introduced) if host == host_name()}
        return messages

    def abort(self, code: int) -> None:
        if survives_deaths():
            os.kill(os.getpid(), signal.SIGKILL)  # the others live on; of other ends they would not be told
        MPI.COMM_WORLD.Abort(code)

    def go_on(self, seniority: int, waiter: Waiter) -> None:
        global _left
        for each in list(_open):
            each.revoke()
        former, self._comm = self._comm, self._given
        with _translated(self._given):
            if former != self._given:
                former.Revoke()
            self._meet(waiter)
            left = cast("MPI.Intracomm", self._given.Shrink())
            left.Set_errhandler(MPI.ERRORS_RETURN)
            try:
                ordered = cast("MPI.Intracomm", left.Split(0, left.rank - seniority * left.size))
            except MPI.Exception:
                left.Revoke()  # or some would wait in there for those that it has failed for
                raise
            ordered.Set_errhandler(MPI.ERRORS_RETURN)
            left.Free()
        self._comm = ordered
        if self._given == MPI.COMM_WORLD:
            _left = ordered

    def _meet(self, waiter: Waiter) -> None:
        """Return when all that are left look who is left: to find out takes all of them, and knows no time limit.

        Ranks of this host that do not come in time are killed: nobody can go on while they might.
        """
        comm, notes = self._given, []
        waits: set[int] = set(range(comm.size)) - {comm.rank}
        for peer in waits:
            with suppress(MPI.Exception):  # that one is dead
                notes.append(comm.Isend([b"", MPI.BYTE], peer, _LEFT_TAG))
                if peer not in self._heard:
                    self._heard[peer] = comm.Irecv([bytearray(), MPI.BYTE], peer, _LEFT_TAG)
        quiet: dict[int, float] = {}  # ranks whose process has ended, and when that was seen

        def all_heard() -> bool:
            for peer in list(waits):
                request = self._heard.get(peer)
                try:
                    heard = request is None or request.Test()
                except MPI.Exception:  # it is dead
                    heard = True
                if heard:
                    waits.discard(peer)
                    self._heard.pop(peer, None)
            return not waits

        def told_of_deaths() -> None:
            for peer in waits & self._processes.keys():
                if os.path.exists(f"/proc/{self._processes[peer]}"):
                    continue
                if time.monotonic() - quiet.setdefault(peer, time.monotonic()) > _TOLD_S:
                    raise TransportError(
                        f"rank {peer} of the job has ended by itself, of which {library()} tells nobody, so the others "
                        "cannot go on without it; start the job with `ringreduce run --elastic`, where they can"
                    )

        patient = Waiter(waiter.timeout_s, waiter.crowded)
        patient.watchers.append(told_of_deaths)
        try:
            patient.until(all_heard, str)
        except CollectiveTimeoutError:
            for peer in waits & self._processes.keys():
                pid = self._processes[peer]
                _log.warning("rank %d of the job does not go on, and is killed: process %d", peer, pid)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            patient.timeout_s = 2 * _TOLD_S
            patient.until(all_heard, lambda: f"{name_ranks(sorted(waits))} of the job to go on without those that died")


def world() -> MPI.Intracomm:
    """Return the communicator of all ranks, of those that are left if some have died, initialising MPI if need be."""
    if not MPI.Is_initialized():  # as with ``mpi4py.rc.initialize = False``
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        at_exit(_finalize)
    return MPI.COMM_WORLD if _left is None else _left


def _finalize() -> None:
    if MPI.Is_finalized():
        return
    if _left is None:
        MPI.Finalize()
        return
    # After a death, Open MPI 5.0 now and then waits in there for ever. So the ranks that are left part by themselves.
    with suppress(MPI.Exception, CollectiveTimeoutError):
        Waiter(_PARTING_S).until(_left.Ibarrier().Test, str)


def _ends(request: MPI.Request) -> bool:
    """Return whether a request of a revoked communicator is over, as it is within moments."""
    try:
        Waiter(_PARTING_S).until(request.Test, str)
    except CollectiveTimeoutError:
        return False
    except MPI.Exception:
        pass
    return True


if _ends_mpi:
    at_exit(_finalize)


def world_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator as ranks of the job."""
    group = comm.Get_group()
    return group.Translate_ranks(list(range(group.size)), world().Get_group())


def subworld(ranks: Sequence[int], waiter: Waiter) -> MPI.Intracomm:
    """Return a communicator of some ranks of the job; collective over these.

    Raises:
        ConfigError: there are no such ranks, or this is none of them.
        CollectiveTimeoutError: not all of them called this within the time limit.
    """
    everyone = world()
    listed = [index(rank) for rank in ranks]
    if everyone.rank not in listed or not set(listed) <= set(range(everyone.size)) or len(set(listed)) < len(listed):
        raise ConfigError(
            f"a world can be made of different ranks of the job, 0 to {everyone.size - 1}, and by these; "
            f"got {listed} on rank {everyone.rank}"
        )
    # MPI would wait without limit for a rank that does not come. So all hear from all that they have come, and then
    # that they have heard from all.
    for _ in range(2):
        _hear_from_all(everyone, [rank for rank in listed if rank != everyone.rank], waiter)
    return everyone.Create_group(everyone.Get_group().Incl(listed))


def _hear_from_all(comm: MPI.Intracomm, peers: Sequence[int], waiter: Waiter) -> None:
    with _translated():
        sent = [comm.Isend([b"", MPI.BYTE], peer, _HERE_TAG) for peer in peers]
        heard = {peer: comm.Irecv([bytearray(), MPI.BYTE], peer, _HERE_TAG) for peer in peers}
        try:
            waiter.until(
                lambda: all(each.Test() for each in (*sent, *heard.values())),
                lambda: f"{name_ranks([peer for peer, each in heard.items() if not each.Test()])} to call init",
            )
        except CollectiveTimeoutError:
            for each in heard.values():
                if not each.Test():
                    each.Cancel()
            raise


def library() -> str:
    """Return the name and version of the MPI library, e.g. ``Open MPI 5.0.11``."""
    text = MPI.Get_library_version().splitlines()[0]
    return text.split(",")[0].removesuffix("\x00").strip()


@contextmanager
def _translated(comm: MPI.Intracomm | None = None) -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        raise _translate(error, comm) from error


def _translate(error: MPI.Exception, comm: MPI.Intracomm | None = None) -> TransportError:
    text = error.Get_error_string()
    kind = error.Get_error_class()
    # A test of several messages leaves it to the status of one of them to say that a rank has died.
    if kind in _LOST or (kind == MPI.ERR_IN_STATUS and survives_deaths()):
        lost = [] if comm is None else _lost(comm)
        return PeerLostError(lost[0] if lost else -1, f"MPI reports {text}")
    return TransportError(f"MPI reports {text}")


def _lost(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator of which MPI knows that they have died."""
    with suppress(MPI.Exception, NotImplementedError):
        failed = comm.Get_failed()
        return sorted(failed.Translate_ranks(list(range(failed.size)), comm.Get_group()))
    return []
