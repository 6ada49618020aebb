"""How the world of this process begins, goes on after ranks have failed, and ends."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from ringreduce.common import logs, processes
from ringreduce.common.config import Config
from ringreduce.common.conventions import Conventions
from ringreduce.common.errors import CollectiveError, CollectiveTimeoutError, ConfigError, RingReduceError
from ringreduce.common.launch import launch, renew_rank_variables
from ringreduce.common.lifetime import Lifetime
from ringreduce.engine import ReentrancyGuard
from ringreduce.observe.seen.timeline import Program
from ringreduce.runtime.bootstrap import Connection, ParentRank, StartLimit, connect, job_connection
from ringreduce.runtime.process_sets import ProcessSet
from ringreduce.runtime.reductions_made import Usage
from ringreduce.runtime.stop import StopRequest
from ringreduce.runtime.termination import Termination
from ringreduce.runtime.worlds import OwnWorld, World
from ringreduce.transport.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger(__name__)

#: How far apart ranks arrive that have all waited, up to their time limit, for the same rank.
_GRACE_S = 10.0


class Recovery(NamedTuple):
    """How long `go_on` took, in seconds, and what it knows of the others.

    Attributes:
        connected_s: until the surviving ranks had found each other.
        begun_s: from then on, until their world had begun.
        doubtful: the numbers, in the job, of the ranks without which these go on, and which may live, as far as this
            rank knows: those of other hosts, where MPI takes silence for death.
    """

    connected_s: float
    begun_s: float
    doubtful: tuple[int, ...] = ()


class Process:
    """This process: the world that it is in, and how that begins and ends.

    Attributes:
        world: its own, if it is a rank; else that of the rank that has started it; None: there is none.
        everyone: the set of all ranks, whatever the world.
        conventions: of the next world, unless the environment says otherwise.
        termination: how the process ends, once it was a rank among several.
        recoveries: how often it has gone on after ranks had failed, or tried to.
        followers: of traces; see `Observer`.
        stop: what asks this process to stop.
        usage: what its worlds were used for.
    """

    def __init__(self) -> None:
        self.world: World | None = None
        self.everyone = ProcessSet.of_world(self.find)
        self.conventions = Conventions.CHAIN_RULE
        self.termination: Termination | None = None
        self.recoveries = 0
        self.followers: list[Callable[[Program | None], object]] = []
        self.stop = StopRequest(lambda: (own := self.own()) is not None and own.lifetime.open)
        self.usage = Usage()
        # Connects the ranks of the world that this process is or was in last.
        self._connection: Connection | None = None
        self._entrance = ReentrancyGuard()  # No thread starts or ends a world in the midst of doing so.
        self._starting = threading.Lock()  # One thread at a time starts a world.
        self._announcement = processes.Announcement(processes.RANK)  # Holds a `ParentRank`.
        self._forking: dict[int, processes.Forked] = {}  # By thread.
        self._is_restartable = False  # Whether the launcher starts the job again when there are other hosts.
        self._shuts_down: int | None = None  # The process that ends its world when it ends.

    # ---- the world there is ----

    def find(self) -> World | None:
        """Return the world; a process that a rank has started by `multiprocessing` looks for that rank's first."""
        if self.world is None and processes.is_multiprocessing_child():
            with self._starting:
                if self.world is None:
                    self.world = self._of_parent(self._settings())
        return self.world

    def here(self) -> World:
        """Return the world.

        Raises:
            ConfigError: there is none.
        """
        world = self.find()
        if world is None:
            raise ConfigError("ringreduce has not been initialized; call ringreduce.init() first")
        return world

    def own(self) -> OwnWorld | None:
        """Return the world if this process is a rank of it."""
        return self.world if isinstance(self.world, OwnWorld) else None

    def rank_here(self) -> OwnWorld:
        """Return the world, of which this process is a rank.

        Raises:
            ConfigError: there is none, or this process is no rank of it.
        """
        world = self.here()
        if not isinstance(world, OwnWorld):
            world.lifetime.require_open()
            raise AssertionError("the world of a process that is no rank is forked")
        return world

    def _settings(self) -> Config:
        return Config.from_environ(conventions=self.conventions)

    # ---- its begin ----

    def start(self, comm: MPI.Intracomm | Sequence[int] | None) -> World:
        """Return the world; start one if there is none, here or in the rank that has started this process."""
        with self._entrance, self._starting:
            if not isinstance(self.world, OwnWorld):
                settings = self._settings()
                if settings.standalone and self.world is not None:
                    self.world.close()
                    self.world = None
                self.world = self.world or self._of_parent(settings) or self._started(comm, settings)
            return self.world

    def _started(self, comm: MPI.Intracomm | Sequence[int] | None, settings: Config) -> OwnWorld:
        """Start a world. Collective."""
        logs.set_up(settings.log_level, "")
        try:
            self._connection = connect(comm, settings)
        except RingReduceError:
            job = job_connection()
            if job is not None:
                self._end_with(job, Lifetime())  # Otherwise MPI would wait at the exit of this process for the others.
                self._take_part_in_ends_and_forks()
            raise
        return self._begun(self._connection, settings, StartLimit.of_init(settings))

    def _begun(self, connection: Connection, settings: Config, limit: StartLimit) -> OwnWorld:
        """Begin a world of connected ranks, in `init` and after a recovery. Collective."""
        logs.set_up(settings.log_level, connection.name)
        lifetime = Lifetime()
        # Set before the rest: a failure on one rank must not leave the others waiting.
        self._end_with(connection, lifetime)
        self._take_part_in_ends_and_forks()
        if settings.dump is not None:
            _dump_on_request(self.own)
        self._is_restartable = launch().is_restartable
        world = OwnWorld.start(
            self.everyone, connection, settings, limit, self.followers, lifetime, recoveries=self.recoveries
        )
        self._announcement.replace(ParentRank(world.rank, world.hosts.nodes).to_json())
        return world

    def reconfigure(self, error: CollectiveError, priority: int) -> Recovery:
        """Leave a world in which ranks have failed, and begin one of the survivors. Collective over these."""
        started = perf_counter()
        with self._entrance, self._starting:
            self.recoveries += 1  # Counted first: where a recovery fails on some ranks, all of them try again.
            own = self.own()
            self.world = None
            if own is not None:
                self.usage.reduced = True  # Whether or not it was: that a rank has failed is what matters.
                own.abandon(error)
            connection = self._connection
            if connection is None:
                raise ConfigError("ringreduce has not been initialized; call ringreduce.init() first")
            settings = self._settings()
            late = isinstance(error, CollectiveTimeoutError)  # After a time-out the others have had their time, too.
            connection.reconfigure(priority, Waiter(min(settings.timeout_s, _GRACE_S) if late else settings.timeout_s))
            connected = perf_counter()
            self.world = world = self._begun(connection, settings, StartLimit.usual(settings))
        mine = next(node for node in world.hosts.nodes if world.rank in node)
        renew_rank_variables(world.rank, world.size, mine.index(world.rank), len(mine))
        return Recovery(connected - started, perf_counter() - connected, tuple(connection.forget_doubtful()))

    def hosts_changed(self) -> bool:
        """Return whether the launcher has said since the last time that other hosts are to be used."""
        # It has the signal blocked in all that it starts, so it waits here, whatever threads there are.
        return self._is_restartable and signal.sigtimedwait({signal.SIGUSR2}, 0) is not None

    def _of_parent(self, settings: Config) -> World | None:
        """Return the world of the rank that has started this process by `multiprocessing`; None: there is none."""
        if settings.standalone or not processes.is_multiprocessing_child():
            return None
        parent = ParentRank.find()
        if parent is None or not parent.nodes:
            return None
        logs.set_up(settings.log_level, f"process {os.getpid()} of rank {parent.rank}")
        return World.of_parent(parent, self.everyone, settings)

    def _end_with(self, connection: Connection, lifetime: Lifetime) -> None:
        """Let the job end with this rank from now on, if there are others in it, and this rank with its launcher."""
        if not connection.who:
            return
        new = self.termination is None
        if self.termination is None:
            self.termination = Termination(connection.abort, self.own, others_go_on=launch().survives_deaths)
        self.termination.who = connection.who
        self.termination.lifetime = lifetime
        if new:
            self.termination.install()

    def _take_part_in_ends_and_forks(self) -> None:
        """Be called when this process ends or forks; does nothing the second time."""
        if self._shuts_down is None:
            os.register_at_fork(
                before=self._before_fork, after_in_parent=self._after_fork_here, after_in_child=self._after_fork
            )
        if self._shuts_down != os.getpid():
            self._shuts_down = os.getpid()
            processes.at_exit(self._at_exit)

    # ---- its end ----

    def shut_down(self) -> None:
        """End the world if it is this process's own. Collective."""
        with self._entrance, self._starting:
            own = self.own()
            if own is None:
                return
            self.world = None
            self.usage.add(own)
            try:
                own.close()
            finally:
                own.lifetime.close()
                self._announcement.replace(ParentRank().to_json())

    def _at_exit(self) -> None:
        if self.termination is None or self.termination.at_exit():
            own = self.own()
            failed = getattr(sys, "last_value", None) is not None
            if own is not None and failed:
                own.flush()  # This process is alone; the termination reports the failures of others.
            self.shut_down()
            if not failed and (warning := self.usage.warning()) is not None:
                _log.warning("%s", warning)

    def _before_fork(self) -> None:
        own = self.own()
        if own is not None:
            forked = self._forking[threading.get_ident()] = processes.Forked()
            own.lifetime.forking(forked)  # The child has all that other threads drop until the fork.

    def _after_fork_here(self) -> None:
        own = self.own()
        forked = self._forking.pop(threading.get_ident(), None)
        if forked is not None:
            forked.in_parent()
            if own is not None:
                own.lifetime.forking(forked)

    def _after_fork(self) -> None:
        """See the world as a process that is no rank."""
        forked = self._forking.pop(threading.get_ident(), None)
        if forked is not None:
            forked.in_child()
        self._entrance, self._starting = ReentrancyGuard(), threading.Lock()
        own = self.own()
        if own is None and self.termination is not None:
            self.termination.lifetime.fork("this process was forked while there was no world")
        if own is not None:
            self.world = own.in_child()
            logs.set_up(None, f"process {os.getpid()} of rank {own.rank}")


def _dump_on_request(own: Callable[[], OwnWorld | None]) -> None:
    """Write down what this rank has done last when it gets SIGUSR1, unless the program handles that."""
    writing = threading.Lock()

    def dump(number: int, frame: object) -> None:
        world = own()
        if world is None or world.config.dump is None or not writing.acquire(blocking=False):
            return  # Signals come in each other's midst: the first one writes.
        with suppress(OSError):
            world.observer.recorder.dump(world.config.dump)
        writing.release()

    here = threading.current_thread() is threading.main_thread()
    if here and not processes.handles(os.getpid(), signal.SIGUSR1):
        signal.signal(signal.SIGUSR1, dump)


#: This process.
PROCESS = Process()
