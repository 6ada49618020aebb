"""How the ranks of a world find each other: which processes a launcher has started, and what connects them."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

from ringreduce.algorithms import Collective, names
from ringreduce.collectives import NCCL, VENDOR
from ringreduce.common import networks, processes
from ringreduce.common.config import VERSION, Config, ignored_variables
from ringreduce.common.errors import CollectiveTimeoutError, ConfigError, MismatchError, name_ranks
from ringreduce.common.launch import TORCHRUN, Launch, Launcher, launch, notify_launcher, report_begin
from ringreduce.common.libraries import INSTALL_MPI
from ringreduce.common.settings import rows
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)

_STANDARD_ERROR = 2
_LOOK_EVERY_S = 1.0
_SAME_JOB_S = 60.0  # The ranks of a host start within this time.
_LATE = 69  # The exit code of a rank that others keep waiting: EX_UNAVAILABLE of sysexits.h.


class Connection(Protocol):
    """The ranks of a world, as one transport connects them.

    Attributes:
        name: of this rank, ``rank 1``; empty if nothing was launched.
        who: what to call it when it ends the job, ``rank 1 of 4``; empty if the job is this process alone.
    """

    @property
    def name(self) -> str: ...

    @property
    def who(self) -> str: ...

    def messages(self, waiter: Waiter) -> Messages:
        """Return messages between the ranks, given how their collective calls wait. Collective."""

    def messages_among(self, ranks: Sequence[int], waiters: Sequence[Waiter]) -> Sequence[Messages]:
        """Return messages between some of the ranks, one for each waiter. Collective over these ranks alone.

        Args:
            ranks: in any order, this one among them; the first becomes rank 0.
            waiters: how the collective calls of each wait.
        """

    def introduce(self, messages: Messages) -> None:
        """Let the ranks know each other's processes, as far as `reconfigure` needs that. Collective.

        Args:
            messages: between all ranks.
        """

    def abort(self, code: int) -> None:
        """End all processes of the job at once, with an exit code; where it survives deaths, this process alone."""

    def reconfigure(self, priority: int, waiter: Waiter) -> None:
        """Connect the ranks that survive after some have failed, and renumber them. Collective over these.

        Messages and collectives under way between them end in an error, on all of them.

        Args:
            priority: at least 0; ranks with a higher one come first, equal ones in their former order.
            waiter: how to wait until all have come here.

        Raises:
            PeerLostError: another rank has failed meanwhile. All survivors may try again.
            CollectiveTimeoutError: a rank that lives did not come.
        """

    def forget_doubtful(self) -> list[int]:
        """Return the ranks, by their numbers in the job, that `reconfigure` has left and that may live; once each."""


class StartLimit(NamedTuple):
    """How long to wait for ranks that have not come, and what sets that."""

    seconds: float
    option: str

    @classmethod
    def of_init(cls, settings: Config) -> StartLimit:
        """Return how long `init` waits until all ranks have called it."""
        start_s = launch().start_timeout_s
        return cls.usual(settings) if start_s is None else cls(start_s, "--start-timeout")

    @classmethod
    def usual(cls, settings: Config) -> StartLimit:
        """Return how long everything else waits."""
        return cls(settings.timeout_s, "RINGREDUCE_TIMEOUT")

    @contextmanager
    def waiter(self) -> Iterator[Waiter]:
        """Give a waiter of this limit; the error of one that has waited in vain says what sets it."""
        try:
            yield Waiter(self.seconds)
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{error}; {self.option} sets this limit{_networks_said(launch())}") from None


@dataclass(frozen=True, slots=True)
class ParentRank:
    """What a process that is or was a rank announces to the processes that it starts.

    Attributes:
        rank: its number.
        nodes: of its world, the ranks that run on one machine; none while it is in no world.
        proof: the variable that proved to it that a launcher has started several processes.
    """

    rank: int = 0
    nodes: tuple[tuple[int, ...], ...] = ()
    proof: str = field(default_factory=lambda: launch().proof)

    @classmethod
    def find(cls) -> ParentRank | None:
        """Return what the rank announces that has started this process; None: no rank has."""
        announced = processes.rank_above()
        if announced is None:
            return None
        rank, nodes, proof = json.loads(announced)
        return cls(rank, tuple(map(tuple, nodes)), proof)

    def to_json(self) -> bytes:
        """Return the text that processes `find` which this one starts."""
        return json.dumps(astuple(self)).encode()


def connect(comm: MPI.Intracomm | Sequence[int] | None, settings: Config) -> Connection:
    """Connect the ranks of the world that this process is to be in. Collective.

    Args:
        comm: as for `init`.
        settings: the settings in force.

    Raises:
        ConfigError: several processes were started, and nothing connects them.
    """
    report_begin()
    parent = ParentRank.find()
    launched = launch()
    # One that has its launcher's variables from a rank is no rank of a job of its own.
    if settings.standalone or (parent is not None and parent.proof == launched.proof):
        return _Alone()
    ranks = comm if isinstance(comm, (list, tuple)) else None
    if launched.size in (None, 1) and launched.launcher in (None, TORCHRUN):
        if comm is None and launched.launcher is not None:
            raise ConfigError(_unconnected(launched, launched.launcher, None))
        if comm is None or ranks is not None:
            return _Alone()
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"a launcher started {launched.size} ranks, but mpi4py is missing: {INSTALL_MPI}")
    with _awaiting_all(launched, settings):
        from ringreduce.transport import mpi, mpi_job

        job = mpi.world()
    notify_launcher("is connected")
    if comm is None:
        if job.size == 1 and launched.launcher is not None:
            raise ConfigError(_unconnected(launched, launched.launcher, mpi.library()))
        return mpi_job.MpiRanks(job)
    if ranks is not None:
        with StartLimit.of_init(settings).waiter() as waiter:
            return mpi_job.MpiRanks(mpi_job.subworld(ranks, waiter))
    return mpi_job.MpiRanks(cast("MPI.Intracomm", comm))


def job_connection() -> Connection | None:
    """Return the connection of all ranks of the job; None: MPI was not started."""
    if "ringreduce.transport.mpi" not in sys.modules:
        return None
    from ringreduce.transport import mpi, mpi_job

    return mpi_job.MpiRanks(mpi.world())


class _Alone:
    """A world of one process."""

    name = who = ""

    def messages(self, waiter: Waiter) -> Messages:
        return MemoryWorld(1).messages(0)

    def messages_among(self, ranks: Sequence[int], waiters: Sequence[Waiter]) -> list[Messages]:
        return [self.messages(waiter) for waiter in waiters]

    def introduce(self, messages: Messages) -> None:
        """There is no other rank."""

    def abort(self, code: int) -> None:
        os._exit(code)

    def reconfigure(self, priority: int, waiter: Waiter) -> None:
        """There is no other rank that could fail."""

    def forget_doubtful(self) -> list[int]:
        return []


@contextmanager
def _awaiting_all(launched: Launch, settings: Config) -> Iterator[None]:
    """End this process if MPI cannot start, or takes too long: it waits for all ranks of the job, without limit."""
    limit_s, name = StartLimit.of_init(settings)
    over = threading.Event()

    def look() -> None:
        size = launched.size or 1
        left_s = limit_s
        while not over.wait(min(left_s, _LOOK_EVERY_S)):
            left_s -= _LOOK_EVERY_S
            gone = _ended(launched)
            if gone:
                _end(f"rank {launched.rank} of {size} ends: {name_ranks(gone)} ended before init()")
            if left_s <= 0:
                waited = f"rank {launched.rank} of {size} has waited {limit_s:g} s in init() for {_absent(launched)}"
                _end(f"{waited}; {name} sets this limit{_networks_said(launched)}")

    with suppress(OSError):
        for mine in _came(launched, launched.rank):
            mine.touch()
    threading.Thread(target=look, name="ringreduce waits for all ranks", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _end(why: str) -> NoReturn:
    with suppress(OSError):  # Its reader may have ended.
        os.write(_STANDARD_ERROR, f"ringreduce: {why}\n".encode())
    os._exit(_LATE)


def _ended(launched: Launch) -> list[int]:
    """Return the ranks of this host that have ended and never called `init`, as far as that can be seen."""
    mine = _process(launched, launched.rank)
    if mine is None or mine[0] not in (os.getpid(), *(pid for pid, _ in processes.ancestors())):
        return []  # A container counts processes in its own way.
    ended = []
    for rank in range(launched.size or 1):
        theirs = _process(launched, rank)
        # Files that are older are of a job that was killed.
        if theirs is not None and abs(theirs[1] - mine[1]) < _SAME_JOB_S and processes.has_ended(theirs[0]):
            ended += [rank] * (not any(file.exists() for file in _came(launched, rank)))
    return ended


def _process(launched: Launch, rank: int) -> tuple[int, float] | None:
    """Return which process `ringreduce run` has started as a rank of this host, and when; None: that is not known."""
    if launched.job_folder is None:
        return None
    with suppress(OSError, ValueError), Path(launched.job_folder, f"ringreduce-process-{rank}").open() as file:
        return int(file.read()), os.fstat(file.fileno()).st_mtime
    return None


def _came(launched: Launch, *ranks: int) -> list[Path]:
    """Return the files of this job that say which ranks of this host have called `init`; none: there is no place."""
    folder = launched.job_folder
    return [] if folder is None else [Path(folder, f"ringreduce-init-{rank}") for rank in ranks]


def _absent(launched: Launch) -> str:
    """Name the ranks that have not called `init`, as far as that can be seen from this host."""
    size = launched.size or 1
    files = _came(launched, *range(size))
    if not files:
        return "the other ranks: at least one has not called it"
    missing = [rank for rank, file in enumerate(files) if not file.exists()]
    elsewhere = " of this host, or for those of other hosts" if launched.local_size not in (None, size) else ""
    return f"{name_ranks(missing)}{elsewhere} to call it" if missing else "MPI to start"


def _networks_said(launched: Launch) -> str:
    """Say which networks messages between hosts go over, as these may not join the hosts; nothing on one host."""
    is_one_host = launched.local_size in (None, launched.size)
    over = "" if is_one_host else networks.in_use(launched.networks, launched.other_networks)
    if not over:
        return ""
    return (
        f". Between hosts, messages go over {over}: if ranks do not find each other there, name the network that joins "
        "the hosts, as in ringreduce run --network-interface eth0"
    )


def _unconnected(launched: Launch, launcher: Launcher, library: str | None) -> str:
    """Say that each of several processes would take itself for the whole job, and what to do about it.

    Args:
        launched: what the launcher says.
        launcher: has started them.
        library: the MPI library, which sees one process; None: it was not asked.
    """
    script = os.path.basename(sys.argv[0]) or "script.py"
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else "mpirun"
    seen = "MPI is not what connects them" if library is None else f"{library}, which mpi4py uses, sees only this one"
    if launcher.name == "srun":
        command = f"srun --mpi=pmix python {script} (srun --mpi=list says what there is)"
    elif launcher is TORCHRUN:
        size = launched.proof.rpartition("=")[2]
        here = launched.local_size
        hosts = f"-H HOST1:{here},HOST2:{here},... " if here is not None and str(here) != size else ""
        command = f"ringreduce run -np {size} {hosts}python {script}"
    else:
        command = f"{mpirun} -np N python {script}: the launcher must be that of the MPI library"
    return (
        f"{launcher.name} has started several processes ({launched.proof}), but {seen}: each would be a world of one, "
        f"and train alone. Start them with {command}. If each is to be a world of its own, set RINGREDUCE_STANDALONE=1"
    )


def check_versions(messages: Messages, greeting: Any) -> list[Any]:
    """Return what all ranks give to all in their first exchange; ranks of different versions speak other languages.

    Args:
        messages: the ranks.
        greeting: of this one; None: it has no key, and may say more about itself.

    Returns:
        Of each rank its version, its host, and its greeting.
    """

    def fits(answer: Any) -> bool:
        return isinstance(answer, list) and len(answer) == 3 and isinstance(answer[0], str)

    mine = [VERSION, platform.node() if greeting is None else "a host", greeting]
    everyone = exchange_json(messages, mine, fits)
    if len({version for version, _, _ in everyone}) > 1:
        raise MismatchError(
            {rank: f"ringreduce {version} on {host}" for rank, (version, host, _) in enumerate(everyone)}
        )
    return everyone


def check_settings(messages: Messages, settings: Config) -> None:
    """Settings steer algorithms, so ranks with different ones would wait for each other in vain."""
    common = [(name, row) for name, _, row in rows(Config) if not row.may_differ]
    mine = [f"{row.variable}={getattr(settings, name)!r}" for name, row in common]
    everyone = exchange_json(messages, mine)
    if different := [column for column in zip(*everyone, strict=True) if len(set(column)) > 1]:
        raise MismatchError({rank: ", ".join(column) for rank, column in enumerate(zip(*different, strict=True))})
    if settings.algorithm is not None and settings.algorithm not in (*names(Collective.ALLREDUCE), VENDOR, NCCL):
        listed = ", ".join((*names(Collective.ALLREDUCE), VENDOR, NCCL))
        raise ConfigError(f"RINGREDUCE_ALGORITHM={settings.algorithm!r} in the environment: expected one of {listed}")
    ignored = ignored_variables()
    if ignored and messages.rank == 0:
        _log.warning("these variables have no meaning here: %s", ", ".join(ignored))
