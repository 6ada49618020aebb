"""``init`` and ``shutdown``, and the one world of this process: the only state that outlives a communicator."""

from __future__ import annotations

import atexit
import importlib.util
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective, names
from ringreduce.communicator import Communicator
from ringreduce.config import Config
from ringreduce.errors import ConfigError, MismatchError
from ringreduce.placement import Context
from ringreduce.reduce_ops import SUM, ReduceOp
from ringreduce.selection import VENDOR
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages
from ringreduce.transport.node import host_name, join
from ringreduce.transport.shared import MemfdSegments
from ringreduce.transport.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "config",
    "cross_rank",
    "cross_size",
    "empty",
    "explain",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "reduce_scatter",
    "shutdown",
    "size",
    "world",
]

_world: Communicator | None = None
_process = 0  # the one that called init; a process that it forks inherits the world and has no part in it


def init(comm: MPI.Intracomm | None = None) -> None:
    """Start the world: find the other ranks and set up what connects them. Collective; does nothing the second time.

    Under a launcher (mpirun, mpiexec, srun) the ranks are those of the job. Without one, or where it started one
    process, the world is this process alone, and neither MPI nor mpi4py is needed. From then on an uncaught exception
    on one rank ends the whole job, with that rank's traceback.

    Args:
        comm: an mpi4py communicator to use instead of all ranks of the job.

    Raises:
        ConfigError: a setting in the environment is wrong, or the job was started by a launcher and mpi4py is missing.
        CollectiveTimeoutError: a rank did not call this within the time limit.
        MismatchError: the ranks have different settings.
    """
    global _world, _process
    if _world is not None:
        return
    settings = Config.from_environ()
    _process = os.getpid()
    waiter = Waiter(settings.timeout_s)
    messages = _connect(comm, settings, waiter)
    _check_settings(messages, settings)
    if settings.algorithm is not None and settings.algorithm not in (*names(Collective.ALLREDUCE), VENDOR):
        known = ", ".join(names(Collective.ALLREDUCE))
        raise ConfigError(f"RINGREDUCE_ALGORITHM={settings.algorithm!r} in the environment: expected one of {known}")
    node = join(messages, waiter, settings, host_name(), MemfdSegments)
    _world = Communicator(Context(messages, waiter, node, settings))
    atexit.register(shutdown)


def shutdown() -> None:
    """End the world. Collective; does nothing if there is none. ``init`` may be called again afterwards.

    In a process that was forked it does nothing: that one is no rank.
    """
    global _world, _process
    if _world is not None and os.getpid() == _process:
        ending, _world, _process = _world, None, 0
        ending.close()
        atexit.unregister(shutdown)


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` not since."""
    return _world is not None


def world() -> Communicator:
    """Return the communicator of all ranks.

    Raises:
        ConfigError: `init` was not called.
    """
    if _world is None:
        raise ConfigError("ringreduce has not been initialized; call ringreduce.init() first")
    return _world


def config() -> Config:
    """Return the settings in force."""
    return world().config


def rank() -> int:
    """Return this process's number, 0 to ``size() - 1``."""
    return world().rank


def size() -> int:
    """Return the number of ranks."""
    return world().size


def local_rank() -> int:
    """Return this rank's number among those on its machine: which GPU to use, for example."""
    return world().hosts.local_rank(rank())


def local_size() -> int:
    """Return the number of ranks on this machine."""
    return len(world().hosts.node_of(rank()))


def cross_rank() -> int:
    """Return this rank's number among those with its local rank, one on each machine that has so many."""
    return world().hosts.cross_group(rank()).index(rank())


def cross_size() -> int:
    """Return the number of machines that have a rank with this local rank."""
    return len(world().hosts.cross_group(rank()))


def empty(shape: int | Sequence[int], dtype: Any = np.float32) -> npt.NDArray[Any]:
    """Return a communication buffer; see `Communicator.empty`."""
    return world().empty(shape, dtype)


def allreduce(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> Any:
    """Reduce arrays over all ranks; see `Communicator.allreduce`."""
    return (_world or world()).allreduce(array, op, out=out, algorithm=algorithm)


def reduce_scatter(array: Any, op: ReduceOp | str = SUM, *, out: Any = None, algorithm: str | None = None) -> Any:
    """Reduce arrays over all ranks and cut the result between them; see `Communicator.reduce_scatter`."""
    return world().reduce_scatter(array, op, out=out, algorithm=algorithm)


def allgather(array: Any, *, algorithm: str | None = None) -> Any:
    """Concatenate the ranks' arrays along the first dimension; see `Communicator.allgather`."""
    return world().allgather(array, algorithm=algorithm)


def broadcast(array: Any, root: int = 0, *, out: Any = None, algorithm: str | None = None) -> Any:
    """Give every rank the root's array; see `Communicator.broadcast`."""
    return world().broadcast(array, root, out=out, algorithm=algorithm)


def alltoall(array: Any, splits: Sequence[int] | None = None, *, algorithm: str | None = None) -> Any:
    """Send every rank its part and get one's own of all; see `Communicator.alltoall`."""
    return world().alltoall(array, splits, algorithm=algorithm)


def barrier() -> None:
    """Return when every rank has called it; see `Communicator.barrier`."""
    world().barrier()


def explain(nbytes: int, dtype: Any = np.float32, collective: str = "allreduce") -> str:
    """Say what would carry out a collective and why; see `Communicator.explain`."""
    return world().explain(nbytes, dtype, collective)


def _connect(comm: MPI.Intracomm | None, settings: Config, waiter: Waiter) -> Messages:
    """Return the message transport of the world: MPI where a launcher started several ranks, none otherwise."""
    launched = settings.launched_size
    if comm is None and launched in (None, 1):
        return MemoryWorld(1).messages(0)
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(
            f"a launcher started {launched} ranks, but mpi4py is missing: pip install 'ringreduce[mpi]', "
            "or pip install mpi4py for the MPI library of your site"
        )
    from ringreduce.transport import mpi

    ranks = mpi.world() if comm is None else comm
    if ranks.size > 1:
        _end_job_on_exceptions()  # from here on: what fails on one rank in init must not leave the others there
    elif comm is None:
        warnings.warn(
            f"the launcher started {launched} ranks, but {mpi.library()} sees one: every process trains alone. "
            "mpi4py uses another MPI library than this mpirun; use the mpirun that belongs to it",
            RuntimeWarning,
            stacklevel=3,
        )
    return mpi.MpiMessages(ranks, waiter)


def _check_settings(messages: Messages, settings: Config) -> None:
    """Settings steer algorithms, so ranks with different ones would wait for each other in vain."""
    common = repr(replace(settings, launched_size=None))
    everyone = [each.decode() for each in messages.exchange(common.encode())]
    if len(set(everyone)) > 1:
        raise MismatchError(dict(enumerate(everyone)))


def _end_job_on_exceptions() -> None:
    """Make an uncaught exception end all ranks: MPI's own exit handler would wait for the others, for ever."""
    from ringreduce.transport import mpi

    previous = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        is_rank = os.getpid() == _process
        if is_rank:
            sys.stderr.write(f"ringreduce: rank {mpi.world().rank} of {mpi.world().size} failed; ending the job\n")
        previous(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        if is_rank:
            mpi.abort(1)

    end_job.ringreduce = True  # type: ignore[attr-defined]  # installed once, however often init is called
    if not hasattr(previous, "ringreduce"):
        sys.excepthook = end_job
