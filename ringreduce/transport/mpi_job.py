"""The ranks of an MPI job: which they are, how some of them make a world, and which survive when others fail."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import index
from typing import cast

import numpy as np

# First, as this decides how MPI ends.
from ringreduce.transport.mpi import library, note_hosts, translated, use_survivors, world

# isort: split

from mpi4py import MPI

from ringreduce.common import processes
from ringreduce.common.errors import CollectiveTimeoutError, ConfigError, TransportError, name_ranks
from ringreduce.common.launch import launch, own_host
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.mpi_messages import MpiMessages, revoke_all
from ringreduce.transport.waiting import Waiter

_log = logging.getLogger(__name__)

#: On communicators that are not ours, the largest tags that there always are; see `ringreduce.transport.mpi` for one.
_HERE_TAG = 32767
_GO_ON_TAG = 32765
_NOTICE_S = 2.0  # The library reports a death within 0.1 s.


class MpiRanks:
    """Ranks of the job as MPI connects them; see `ringreduce.runtime.bootstrap.Connection`.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._given = comm
        self._comm = comm  # The survivors' communicator.
        self._here: set[int] = set()  # Given ranks that have come to go on without the failed ones.
        self._awaited: dict[int, MPI.Request] = {}  # By rank, the note that it has come.
        self._processes: dict[int, int] = {}  # Processes of given ranks on this host.
        self._present = list(range(comm.size))  # Given ranks that have not failed.
        self._doubtful: list[int] = []  # Given ranks that may live though MPI counts them as dead.
        self._priority: int | None = None  # The order of the present ranks; None: they are the given ones.
        if launch().survives_deaths and comm.rank == 0 and MPI.Comm.Get_parent() != MPI.COMM_NULL:
            _log.warning(
                "other ranks have started these, by MPI_Comm_spawn: %s does not report when one of them dies, and"
                " others then wait until the time limit. `ringreduce run --elastic` starts ranks and adds to them, too",
                library(),
            )

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
        return MpiMessages(self._comm, waiter)

    def introduce(self, messages: Messages) -> None:
        if launch().survives_deaths and not self._processes:
            namespace = f"{processes.host_name()} {processes.pid_namespace()}"
            introduced = exchange_json(messages, (namespace, os.getpid(), own_host()))
            self._processes = {
                rank: pid
                for rank, (where, pid, _) in zip(self._numbers_in(self._given), introduced, strict=True)
                if where == namespace
            }
            hosts = [host for _, _, host in introduced]
            note_hosts(dict(zip(self._numbers_in(MPI.COMM_WORLD), hosts, strict=True)))
        if self._priority is not None:
            # MPI has compared these in the open, and rank 0 gives its state to the others.
            everyone = exchange_json(messages, [-self._priority, self._given.rank])
            if everyone != sorted(everyone):
                raise TransportError(
                    "the ranks that go on have got a wrong order: by which they are ordered has changed on its way"
                )

    def _numbers_in(self, comm: MPI.Intracomm) -> list[int]:
        """Return the numbers that these ranks have in a communicator."""
        return self._comm.Get_group().Translate_ranks(list(range(self._comm.size)), comm.Get_group())

    def messages_among(self, ranks: Sequence[int], waiters: Sequence[Waiter]) -> list[MpiMessages]:
        comm = _part(self._comm, ranks, waiters[0], purpose="make a group with this rank")
        messages = [MpiMessages(comm, waiter) for waiter in waiters]
        with translated():
            comm.Free()
        return messages

    def abort(self, code: int) -> None:
        if launch().survives_deaths:
            os.kill(os.getpid(), signal.SIGKILL)  # The others survive: only ends by a signal are reported to them.
        MPI.COMM_WORLD.Abort(code)

    def reconfigure(self, priority: int, waiter: Waiter) -> None:
        revoke_all()
        former = self._comm
        self._comm = self._given
        with translated():  # MPI knows of earlier deaths, too, and cannot say which is new
            if former != self._given:
                former.Revoke()
            self._rendezvous(waiter)
            with self._killing_who_stops(waiter.timeout_s):
                self._comm = self._shrink(priority)
        self._priority = priority
        self._here.clear()
        left = self._numbers_in(self._given)
        self._doubtful += [rank for rank in self._present if rank not in left and not self._is_dead(rank)]
        self._present = left
        if self._given in (world(), MPI.COMM_WORLD):
            use_survivors(self._comm)

    def _shrink(self, priority: int) -> MPI.Intracomm:
        """Return the survivors, in the order of their priority. Collective over these, without a time limit."""
        survivors = cast("MPI.Intracomm", self._given.Shrink())
        survivors.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            # Numbers, not objects, of which somebody could have one unpickled.
            everyone = np.zeros(survivors.size, np.int64)
            survivors.Allgather(np.array([priority]), everyone)
            key = np.count_nonzero(everyone > priority) * survivors.size + survivors.rank
            ordered = cast("MPI.Intracomm", survivors.Split(0, key))
        except MPI.Exception:
            survivors.Revoke()  # Others would wait in there for a rank that has an error.
            raise
        ordered.Set_errhandler(MPI.ERRORS_RETURN)
        survivors.Free()
        return ordered

    @contextmanager
    def _killing_who_stops(self, limit_s: float) -> Iterator[None]:
        """Kill ranks of this host that are stopped when a time limit has passed, and again after each further one."""
        over = threading.Event()

        def look() -> None:
            while not over.wait(limit_s):
                for peer, pid in self._processes.items():
                    if processes.is_stopped(pid):
                        self._kill(peer)

        threading.Thread(target=look, name="ringreduce looks who has stopped", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _is_dead(self, peer: int) -> bool:
        """Return whether a rank that MPI counts as dead can do nothing any more: on this host, see to it."""
        if peer not in self._processes:
            return not launch().doubts_silent
        until = time.monotonic() + _NOTICE_S
        while not processes.has_ended(self._processes[peer]):
            if time.monotonic() > until:
                self._kill(peer)
                break
            time.sleep(0.01)  # No call waits for the end of a process that is not a child of this one.
        return True

    def forget_doubtful(self) -> list[int]:
        doubtful, self._doubtful = self._doubtful, []
        return doubtful

    def _kill(self, peer: int) -> None:
        _log.warning("rank %d of the job does not respond, and is killed: process %d", peer, self._processes[peer])
        with suppress(ProcessLookupError):
            os.kill(self._processes[peer], signal.SIGKILL)

    def _rendezvous(self, waiter: Waiter) -> None:
        """Return when all survivors have come to shrink the communicator, which takes all and has no time limit.

        Ranks of this host that do not come in time are killed: the others cannot go on without knowing their fate.
        """
        comm = self._given
        waits: set[int] = set(range(comm.size)) - {comm.rank} - self._here
        for peer in range(comm.size):
            with suppress(MPI.Exception):  # That rank may have failed.
                if peer != comm.rank:
                    comm.Isend([b"", MPI.BYTE], peer, _GO_ON_TAG)
                    if peer not in self._awaited:
                        self._awaited[peer] = comm.Irecv([bytearray(), MPI.BYTE], peer, _GO_ON_TAG)
        quiet: dict[int, float] = {}  # Ranks whose process has ended, and when that was seen.

        def all_answered() -> bool:
            for peer in list(waits):
                if self._has_come(peer):
                    waits.discard(peer)
                    self._here.add(peer)  # It stays: from then on that rank waits for the others without a time limit.
            return not waits

        def check_unreported_ends() -> None:
            for peer in waits & self._processes.keys():
                if os.path.exists(f"/proc/{self._processes[peer]}"):
                    continue
                if time.monotonic() - quiet.setdefault(peer, time.monotonic()) > _NOTICE_S:
                    raise TransportError(
                        f"rank {peer} of the job has ended, but not by a signal, and {library()} reports no other ends:"
                        " the others cannot continue. `ringreduce run --elastic` turns all but good ends into signals"
                    )

        patient = Waiter(waiter.timeout_s, waiter.crowded)
        patient.watchers.append(check_unreported_ends)
        try:
            patient.until(all_answered, lambda: f"{name_ranks(sorted(waits))} of the job to continue")
        except CollectiveTimeoutError:
            for peer in waits & self._processes.keys():
                self._kill(peer)
            patient.timeout_s = 2 * _NOTICE_S
            patient.until(
                all_answered, lambda: f"{name_ranks(sorted(waits))} of the job to continue without those that died"
            )

    def _has_come(self, peer: int) -> bool:
        """Return whether a rank has said that it goes on, or has failed."""
        request = self._awaited.get(peer)
        try:
            if request is not None and not request.Test():
                return False
        except MPI.Exception:
            pass
        self._awaited.pop(peer, None)
        return True


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
    return _part(everyone, listed, waiter, purpose="call init")


def _part(comm: MPI.Intracomm, ranks: Sequence[int], waiter: Waiter, purpose: str) -> MPI.Intracomm:
    """Return a communicator of some ranks of another one; collective over these.

    Args:
        comm: the other one.
        ranks: of that, in the order of the new one.
        waiter: how to wait until all have come here.
        purpose: what they come to do, for the error.

    Raises:
        CollectiveTimeoutError: not all of them called this within the time limit.
    """
    # MPI would wait without limit for a rank that does not come. So all ranks exchange a note that they have come, and
    # then one that they have all notes.
    for _ in range(2):
        _await_all(comm, [rank for rank in ranks if rank != comm.rank], waiter, purpose=purpose)
    with translated():
        return comm.Create_group(comm.Get_group().Incl(list(ranks)))


def _await_all(comm: MPI.Intracomm, peers: Sequence[int], waiter: Waiter, purpose: str) -> None:
    with translated():
        sent = [comm.Isend([b"", MPI.BYTE], peer, _HERE_TAG) for peer in peers]
        answers = {peer: comm.Irecv([bytearray(), MPI.BYTE], peer, _HERE_TAG) for peer in peers}
        try:
            waiter.until(
                lambda: all(request.Test() for request in (*sent, *answers.values())),
                lambda: f"{name_ranks([peer for peer, each in answers.items() if not each.Test()])} to {purpose}",
            )
        except CollectiveTimeoutError:
            for each in answers.values():
                if not each.Test():
                    each.Cancel()
            raise
