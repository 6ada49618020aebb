"""``init`` and ``shutdown``, and what programs ask of the world between them: the only state of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringreduce.audit.run_record import require_facts
from ringreduce.common.arguments import whole_number
from ringreduce.common.config import Config
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import CollectiveError, ConfigError, ForeignFileError
from ringreduce.common.launch import launch
from ringreduce.common.lifetime import Lifetime
from ringreduce.observe.job.job_report import JobReport
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.timeline import Program
from ringreduce.runtime.groups import Group
from ringreduce.runtime.process import PROCESS, Recovery
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.transport.messages import Messages

if TYPE_CHECKING:
    from mpi4py import MPI

_process = PROCESS

#: All ranks.
global_process_set = _process.everyone


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
    before this): the others then notice that the rank has ended when they wait for it.

    Once there is a world, this only registers process sets that are not registered yet. In a process that a rank has
    forked, or started by `multiprocessing`, it starts nothing: that process can ask for the rank's numbers but cannot
    communicate, unless ``RINGREDUCE_STANDALONE`` is set there. Other programs that a rank starts are worlds of their
    own.

    What a forked child writes to communication buffers and gradients stays its own; what the rank writes there later,
    the child may see. Where the program imports ``mpi4py.MPI`` before this is called, mpi4py ends MPI in forked
    children too, and hangs there: they should end by `os._exit`, as those of `multiprocessing` do, or the program
    should call this first.

    Args:
        comm: an mpi4py communicator, or a list of ranks of the job, to use instead of all of them; the other ranks may
            make worlds of their own.
        process_sets: sets to register at once, the same on all ranks. ``"dynamic"`` is understood and needless: sets
            can always be added later.

    Raises:
        ConfigError: an argument or a setting in the environment is wrong; a rank cannot begin the timeline that its
            environment asks for; mpi4py is missing; or several processes were started, and MPI does not connect them,
            so that each would be alone without knowing.
        CollectiveTimeoutError: a rank did not call this within the time limit. All may try again.
        MismatchError: the ranks have different settings, or different versions of ringreduce.
    """
    sets = _require_sets(process_sets)
    world = _process.start(comm)
    for process_set in sets:
        world.adopt(process_set)


def shutdown() -> None:
    """End the world. Collective; does nothing if there is none. ``init`` may be called again afterwards.

    Asynchronous operations that are under way end in a `ShutdownError`. In a process that a rank has started this does
    nothing: that one is no rank.
    """
    _process.shut_down()


def go_on(error: CollectiveError, seniority: int = 0) -> Recovery:
    """Leave a world in which a rank has failed, and start one of the surviving ranks. Collective over these.

    All collectives under way, in all threads and process sets, end in a `PeerLostError`. The survivors are renumbered
    in their former order; process sets can be registered again. If a living rank does not call this in time, the other
    ranks of its machine kill it. Works only where the launcher lets a job survive the death of a rank: under
    ``ringreduce run --elastic``, or Open MPI's ``mpirun --with-ft ulfm``.

    Args:
        error: what a collective has raised: that a rank has failed, or did not come within the time limit.
        seniority: at least 0, less than 2**63; ranks with a higher one get lower numbers.

    Returns:
        How long it took on this rank.

    Raises:
        PeerLostError: another rank has failed meanwhile; call this again.
        CollectiveTimeoutError: a rank did not call this in time, and no rank of its machine survives to kill it.
        TransportError: a rank has ended in a way that the launcher does not report to the others; or messages by which
            the ranks have agreed on their order were changed on their way.
        ConfigError: the launcher ends the job with any of its ranks.
    """
    if not launch().survives_deaths:
        raise ConfigError("the launcher ends this job with any of its ranks; see mpirun --with-ft ulfm of Open MPI")
    if not isinstance(error, CollectiveError):
        raise ConfigError(f"go_on takes the error that a collective has raised, got {error!r}")
    seniority = whole_number("seniority", seniority, 0)
    if seniority >= 1 << 63:
        raise ConfigError(f"seniority is less than 2**63, got {seniority}")
    return _process.reconfigure(error, seniority)


def failure() -> BaseException | None:
    """Return the first error of this world after which some ranks could not communicate any more; None: there is none.

    Frameworks that pass errors through C++ change their types; this returns the original.
    """
    own = _process.own()
    return None if own is None else own.observer.recorder.failure


def recoveries() -> int:
    """Return how often this process has called `go_on`, with success or not; the same on all ranks."""
    return _process.recoveries


def hosts_changed() -> bool:
    """Return whether ``ringreduce run`` has announced other hosts to this rank since the last call."""
    return _process.hosts_changed()


def stopping() -> bool:
    """Return whether the job is to stop: whether a rank was asked to before it called this. Collective over the world.

    The answer is the same on all ranks, so that all save the same step and end: with the status `os.EX_TEMPFAIL` (75),
    by which the launcher, or whoever has started the job, knows that it is to be run again. Once the answer was true,
    ``sys.exit(os.EX_TEMPFAIL)`` ends this rank alone, and the job when all have done so.

    The first call, if it is on the main thread, lets SIGTERM and SIGUSR1 ask this rank, unless the program handles
    them: then its handler calls `request_stop`. The second SIGTERM, three seconds or more after the first, ends the
    rank at once. Until the first call, signals do what they did before, and SIGTERM after `shutdown`, too, unless
    the answer was true: then none that comes while the program exits ends this rank.

    Raises:
        ConfigError: `init` was not called, or this process is no rank.
    """
    own = _process.rank_here()
    _process.stop.listen()
    stops = own.agree_to_stop(_process.stop.made)
    if stops:
        _process.stop.agree()
    return stops


def request_stop() -> None:
    """Ask this rank to stop: from its next call on, `stopping` is true on all ranks. Local; signal handlers may."""
    _process.stop.made = True


def listen_for_stops() -> None:
    """Let signals ask this rank to stop, as the first call of `stopping` does. Local."""
    _process.stop.listen()


def is_initialized() -> bool:
    """Return whether there is a world: of this process or, if a rank has started it, of that rank."""
    return _process.find() is not None


def set_conventions(conventions: Conventions | str) -> None:
    """Choose whose numbers come out where Horovod's differ from the chain rule's; see `ringreduce.common.conventions`.

    It holds for the worlds that `init` starts from now on in this process, and must agree on all ranks, as `init`
    checks. ``RINGREDUCE_CONVENTIONS``, where it is set, overrides it. ``import ringreduce.horovod`` chooses
    ``"horovod"``.

    Args:
        conventions: ``"chain_rule"`` or ``"horovod"``.

    Raises:
        ConfigError: there are no such conventions, or a world has begun with others.
    """
    chosen = Conventions.parse(conventions)
    if _process.world is not None and _process.world.config.conventions is not chosen:
        raise ConfigError(
            f"the world has begun with the conventions {_process.world.config.conventions.value}; "
            "choose others before init(), or after shutdown()"
        )
    _process.conventions = chosen


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
    return _process.here().add(process_set)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Give a process set back, or several, as they were added. Collective over all ranks of the world.

    Returns:
        Whether it was registered. The set of all ranks cannot be removed.

    Raises:
        MismatchError: the ranks named different sets.
    """
    return _process.rank_here().remove(process_set)


def group(ranks: Sequence[int] | None = None, timeout_s: float | None = None) -> Group:
    """Connect some ranks as a group of their own. Collective over these alone, who name them in the same order.

    Args:
        ranks: of the world, in the order of the group; None: all.
        timeout_s: how long any wait for a peer may last in it; None: as the settings say. Must agree.

    Raises:
        ConfigError: this rank is none of them, or there is no such rank.
        CollectiveTimeoutError: not all of them called this within the time limit.
    """
    here = _process.rank_here()
    return here.group(range(here.size) if ranks is None else ranks, timeout_s)


def transport() -> tuple[Messages, Lifetime]:
    """Return a transport between all ranks for one purpose, and how long it can be used. Collective."""
    here = _process.rank_here()
    return here.transport(), here.lifetime


def when_shut_down(call: Callable[[], object]) -> None:
    """Have a function called on this rank once all ranks have ended the world. Local."""
    _process.rank_here().lifetime.listen("closed", call)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to write a trace of what this rank does; see `ringreduce.timeline`.

    Every rank that is to be seen calls it, as often as the others, with the same path; none waits for another.

    Args:
        file_path: a JSON file for Perfetto; it is overwritten.
        mark_cycles: whether to mark the moments at which asynchronous operations start. (Horovod has cycles.)

    Raises:
        ConfigError: a trace is being written already, or the file cannot be written.
    """
    try:
        _process.rank_here().observer.start_timeline(file_path, mark_batches=mark_cycles)
    except ForeignFileError as error:
        record_refusal("start_timeline", error)
        raise


def stop_timeline() -> None:
    """Finish the trace; does nothing if there is none. Once all ranks have, the file holds all that they did."""
    own = _process.own()
    if own is not None:
        own.observer.traces.stop()


def follow_timelines(follow: Callable[[Program | None], object]) -> None:
    """Have a function called when this process begins to write a trace, and with None before that ends.

    For bindings of frameworks, which show what the program does. If a trace is being written, it is called at once.
    """
    own = _process.own()
    _process.followers.append(follow)
    if own is not None and (program := own.observer.traces.program()) is not None:
        follow(program)


def count(steps: int = 0, samples: int = 0) -> int:
    """Tell `ringreduce top` what this rank has done since the last time. Local.

    Steps of torch's optimizers, reductions of gradients in TensorFlow, Keras and JAX, and samples of
    `ringreduce.torch.DistributedSampler`, are counted without this.

    Returns:
        The steps of this rank since `init`; 0 without a world.
    """
    own = _process.own()
    if own is None:
        return 0
    own.observer.recorder.count(steps, samples)
    return own.observer.recorder.steps


def trains(nbytes: int) -> None:
    """Take note that an optimizer updates so much: who reduces less in all has not averaged its gradients. Local."""
    _process.usage.trained_nbytes = max(_process.usage.trained_nbytes, nbytes)


def metrics() -> Metrics:
    """Return what this rank's calls add up to since `init`: numbers, bytes, seconds, overlap, and who was late."""
    return _process.here().metrics()


def report() -> JobReport | None:
    """Return what the steps of this job took until now, and why; ``print`` shows it. Local.

    Times are those of this rank, and those of steps of which ranks have told each other: every 16 steps. At the end of
    a job, `ringreduce run` has rank 0 show it.

    Returns:
        None if there were fewer than 17 steps.
    """
    return _process.rank_here().report()


def report_value(name: str, value: Any) -> None:
    """Report a value of the program, such as its loss, to all that shows this rank. Local; waits for nothing.

    A value in device memory is read later, by another thread: the array must not be written to meanwhile.

    Args:
        name: for people.
        value: a number, or an array of one element, of any framework.

    Raises:
        ConfigError: it is none of these, or the name is no text.
    """
    own = _process.own()
    if own is not None:
        own.observer.recorder.values.add(name, value)


def busy(what: str) -> AbstractContextManager[None]:
    """Return a context in which this rank does something that makes no steps, such as an evaluation. Local.

    ``RINGREDUCE_WATCHDOG``, or ``ringreduce run --watchdog``, takes no job for stalled meanwhile.

    Args:
        what: a word for people.
    """
    own = _process.own()
    return nullcontext() if own is None else own.observer.recorder.activity.busy(what)


def audit(event: str, /, **facts: Any) -> None:
    """Have facts of the program's own recorded: which data it reads, which choices it has made. Local.

    Rank 0 appends a line to the file that ``RINGREDUCE_AUDIT`` names; see `ringreduce.audit.run_record` for what that
    holds. What another rank says, and no other one has said, gets a line at the next commit of an elastic state, or
    when that rank ends, if it runs on rank 0's host; of 1000 lines that wait, the last ones stay. Without that setting,
    the facts are checked and nothing is done.

    Args:
        event: a word for it. ``ringreduce reproduce`` shows ``configuration`` and ``data``.
        **facts: what JSON can say; of arrays, files and folders `ringreduce.fingerprint`.

    Raises:
        ConfigError: JSON cannot say it, or the event is one of ringreduce's own.
    """
    require_facts(event, facts)
    record(event, facts)


def record(event: str, facts: Mapping[str, Any]) -> None:
    """Have recorded what happens in ringreduce itself; see `audit`."""
    own = _process.own()
    if own is not None and own.recording.record is not None:
        own.recording.record.append(event, facts)


def record_refusal(what: str, error: Exception) -> None:
    """Have recorded that ringreduce has refused something; see `audit`."""
    own = _process.own()
    if own is not None:
        own.recording.refuse(what, error)


def collect_records(gather: Callable[[Any], list[Any]]) -> None:
    """Let rank 0 record what other ranks have said; does nothing in a world without a record. Collective.

    Args:
        gather: gives an object to all ranks and returns everyone's, in rank order.
    """
    own = _process.own()
    if own is not None and own.recording.record is not None:
        own.recording.record.collect(gather, own.observer.recorder.values.last())


def audited() -> bool:
    """Return whether this rank, rank 0, keeps an audit record: whether to find out what is the same on all ranks."""
    own = _process.own()
    return own is not None and own.rank == 0 and own.recording.record is not None


def dump(folder: str | os.PathLike[str]) -> Path:
    """Write what this rank has done last and does now to a file, and return its path. Local.

    See `ringreduce.observe.seen.recorder`.
    """
    own = _process.own()
    if own is None:
        raise ConfigError("there is nothing to write down: this process is no rank, or init() was not called")
    return own.observer.recorder.dump(folder)


def config() -> Config:
    """Return the settings in force."""
    return _process.here().config


def rank() -> int:
    """Return this process's number, 0 to ``size() - 1``."""
    return _process.here().rank


def size() -> int:
    """Return the number of ranks."""
    return _process.here().size


def rank_and_size() -> tuple[int, int]:
    """Return this rank and how many there are; 0 and 1 while there is no world, as for a program that is alone."""
    return (rank(), size()) if is_initialized() else (0, 1)


def local_rank() -> int:
    """Return this rank's number among those on its machine: which GPU to use, for example."""
    here = _process.here()
    return here.hosts.local_rank(here.rank)


def local_size() -> int:
    """Return the number of ranks on this machine."""
    here = _process.here()
    return len(here.hosts.node_of(here.rank))


def cross_rank() -> int:
    """Return this rank's number among those with its local rank, one on each machine that has so many."""
    here = _process.here()
    return here.hosts.cross_group(here.rank).index(here.rank)


def cross_size() -> int:
    """Return the number of machines that have a rank with this local rank."""
    here = _process.here()
    return len(here.hosts.cross_group(here.rank))


def is_homogeneous() -> bool:
    """Return whether every machine has the same number of ranks."""
    return _process.here().hosts.homogeneous


def _require_sets(given: Any) -> list[ProcessSet]:
    """Return the process sets that `init` is to register."""
    if given is None or given == "dynamic":
        return []
    sets = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    for process_set in sets:
        if not isinstance(process_set, ProcessSet):
            raise ConfigError(f'init takes a list of process sets, or "dynamic"; got {process_set!r} in {given!r}')
    return sets
