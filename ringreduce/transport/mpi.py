"""The MPI library in this process: how it starts and ends, which ranks survive, and its errors as ours.

MPI's exceptions are translated here and nowhere else.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

import mpi4py
import numpy as np

from ringreduce.common.errors import CollectiveTimeoutError, PeerLostError, TransportError, name_ranks
from ringreduce.common.launch import launch
from ringreduce.common.processes import at_exit, launcher_is_stopped
from ringreduce.transport.waiting import Waiter

# MPI is started and ended here, unless the program has settled that before. At its import mpi4py starts MPI with
# Python's lock held, and MPI waits there for all ranks of the job: no other thread could look at the time. And mpi4py
# ends MPI at the exit of every process that has it, also of those that a rank has forked, which would wait there for
# the other ranks. What mpi4py has registered once is a function of C, which runs after all of Python's and cannot be
# taken back.
_is_ours = "mpi4py.MPI" not in sys.modules and mpi4py.rc.initialize and mpi4py.rc.finalize is None
if _is_ours:
    mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402

#: How long ranks wait for each other where they part, or where one has given up already.
_PARTING_S = 1.0
#: On communicators that are not ours: one of the largest that there always are.
_STARTING_TAG = 32766
_WHO_IS_HERE = 0  # This and the next number are sent with that tag.
_I_AM = 1
#: Errors that mean that a rank has died, or that another one has seen that first.
_FAILED = {getattr(MPI, name, -1) for name in ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")}


class _Duplicate(NamedTuple):
    """A duplicate of a communicator, which can be used once the request is complete."""

    comm: MPI.Intracomm
    request: MPI.Request


#: By communicator (as Fortran knows it), the duplicates that were begun and not taken, in their order. MPI cannot take
#: back a collective call, so the next ones who ask for duplicates go on with them.
_begun: defaultdict[int, list[_Duplicate]] = defaultdict(list)
#: Notes sent while waiting for duplicates; MPI needs their memory until they are sent.
_sent_notes: list[tuple[MPI.Request, bytes]] = []
#: Where ranks run or ran, as errors say it, by number in the job.
_places: dict[int, str] = {}
#: The ranks of the job that have not failed; None: all.
_survivors: MPI.Intracomm | None = None


def world() -> MPI.Intracomm:
    """Return the communicator of all ranks, or of the survivors if some have failed, initialising MPI if need be."""
    if not MPI.Is_initialized():  # So it is with ``mpi4py.rc.initialize = False``.
        _start()
        at_exit(_finalize)
    return MPI.COMM_WORLD if _survivors is None else _survivors


def _start() -> None:
    """Start MPI as mpi4py does, but let other threads run meanwhile."""
    wanted = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    level = getattr(MPI, f"THREAD_{wanted.upper()}")
    code = ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    if code:
        raise MPI.Exception(code)
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)


def use_survivors(comm: MPI.Intracomm) -> None:
    """Set the ranks that `world` returns from now on: those of the job that have not failed."""
    global _survivors
    _survivors = comm


def _finalize() -> None:
    if MPI.Is_finalized() or launcher_is_stopped():
        return
    if not launch().survives_deaths or (_all_part() and _survivors is None):
        MPI.Finalize()


def _all_part() -> bool:
    """Wait until all ranks end; return False as soon as one of them has died.

    MPI_Finalize of Open MPI 5.0 waits for ever in one of ten jobs if a rank dies before it has come there. After a
    failure it sometimes does so in any case, so the survivors end by this barrier alone. A rank that dies between this
    barrier and the end of MPI_Finalize, a few milliseconds, may still keep the others.
    """
    comm = MPI.COMM_WORLD if _survivors is None else _survivors
    with suppress(MPI.Exception):
        barrier = comm.Ibarrier()
        if _survivors is not None:
            return soon(barrier.Test)
        ended = Waiter(math.inf)
        ended.until(lambda: barrier.Test() or _failed_ranks(comm), str)
        return barrier.Test() and not _failed_ranks(comm)
    return False


if _is_ours:
    world()


def library() -> str:
    """Return the name and version of the MPI library, e.g. ``Open MPI 5.0.11``."""
    text = MPI.Get_library_version().splitlines()[0]
    return text.split(",")[0].removesuffix("\x00").strip()


def soon(ready: Callable[[], object], crowded: bool = False) -> bool:
    """Return whether something holds within moments."""
    with suppress(CollectiveTimeoutError):
        Waiter(_PARTING_S, crowded).until(ready, str)
        return True
    return False


# ---- errors ----


@contextmanager
def translated(comm: MPI.Intracomm | None = None) -> Iterator[None]:
    """Turn MPI's errors into our own; ``comm``: where to look for failed ranks."""
    try:
        yield
    except MPI.Exception as error:
        raise translate(error, comm) from error


def translate(error: MPI.Exception, comm: MPI.Intracomm | None = None) -> TransportError:
    """Return our own error for one of MPI's; ``comm`` as for `translated`."""
    text = error.Get_error_string()
    kind = error.Get_error_class()
    # A test of several messages leaves it to the status of one of them to say that a rank has died.
    if kind in _FAILED or (kind == MPI.ERR_IN_STATUS and launch().survives_deaths):
        failed = [] if comm is None or comm == MPI.COMM_NULL else _failed_ranks(comm)
        if not failed or comm is None:
            return PeerLostError(-1, f"MPI reports {text}")
        (in_job,) = comm.Get_group().Translate_ranks(failed[:1], MPI.COMM_WORLD.Get_group())
        return PeerLostError(failed[0], f"MPI reports {text}{_places.get(in_job, '')}")
    return TransportError(f"MPI reports {text}")


def note_hosts(hosts: Mapping[int, str]) -> None:
    """Have errors name the host of a rank that has failed; not if there is one alone.

    Args:
        hosts: by number in the job; a negative one is of another job.
    """
    if len({*hosts.values()}) > 1:
        _places.update({rank: f" (on {host})" for rank, host in hosts.items() if rank >= 0})


def _failed_ranks(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks of a communicator that MPI knows to have failed."""
    with suppress(MPI.Exception, NotImplementedError):
        failed = comm.Get_failed()
        return sorted(failed.Translate_ranks(list(range(failed.size)), comm.Get_group()))
    return []


# ---- duplicates of a communicator, within a time limit ----


def peers_in(comm: MPI.Intracomm) -> list[int]:
    """Return the other ranks of a communicator."""
    return [rank for rank in range(comm.size) if rank != comm.rank]


def duplicates(comm: MPI.Intracomm, waiter: Waiter, count: int) -> list[MPI.Intracomm]:
    """Return duplicates of a communicator. Collective.

    Raises:
        CollectiveTimeoutError: not all ranks called this within the time limit. They may try again, all of them.
    """
    begun = _begun[comm.py2f()]
    with translated():
        for number in range(count):
            if number == len(begun):
                copy, request = comm.Idup()  # Dup would wait without limit for a rank that does not come.
                begun.append(_Duplicate(copy, request))
            _finish(comm, begun[number].request, waiter)
    copies = [copy for copy, _ in _begun.pop(comm.py2f())]
    for duplicate in copies:
        duplicate.Set_errhandler(MPI.ERRORS_RETURN)
    return copies


def _finish(comm: MPI.Intracomm, request: MPI.Request, waiter: Waiter) -> None:
    """Return when a duplicate is complete, for which all ranks have to come."""
    try:
        waiter.until(lambda: _answer(comm) and request.Test(), str)
    except CollectiveTimeoutError:
        missing = _missing(comm)
        if not request.Test():
            raise CollectiveTimeoutError(
                f"waited {waiter.timeout_s:g} s for {name_ranks(missing)} to start ringreduce"
            ) from None


def _missing(comm: MPI.Intracomm) -> list[int]:
    """Return the ranks that do not answer at once that they wait for a duplicate, too; all others if all do."""
    peers = peers_in(comm)
    here = set[int]()
    for peer in peers:
        _send_note(comm, _WHO_IS_HERE, peer)
    soon(lambda: _answer(comm, here) and len(here) == len(peers))
    return [peer for peer in peers if peer not in here] or peers


def _answer(comm: MPI.Intracomm, here: set[int] | None = None) -> bool:
    """Answer ranks that ask whether this one waits for a duplicate, and record in ``here`` which do; always true.

    An answer of a rank that has given up since does no harm: the others go on waiting, as all may try again.
    """
    status = MPI.Status()
    note = np.zeros(1, np.int64)
    while comm.Iprobe(MPI.ANY_SOURCE, _STARTING_TAG, status):
        peer = status.Get_source()
        comm.Recv(note, peer, _STARTING_TAG)
        if here is not None:
            here.add(peer)
        if note[0] == _WHO_IS_HERE:
            _send_note(comm, _I_AM, peer)
    return True


def _send_note(comm: MPI.Intracomm, what: int, peer: int) -> None:
    note = np.array([what], np.int64).tobytes()
    _sent_notes.append((comm.Isend([note, MPI.BYTE], peer, _STARTING_TAG), note))
