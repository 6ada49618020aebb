"""Process sets: some of the ranks of a world, with collectives of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from ringreduce.collectives import Context
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.arguments import whole_number
from ringreduce.common.call_sites import CallSite
from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.lifetime import Lifetime, close_all
from ringreduce.common.processes import host_name
from ringreduce.engine import Engine
from ringreduce.gpu.devices import Gpu
from ringreduce.observe.seen.recorder import Observed
from ringreduce.transport.checked import checked
from ringreduce.transport.control import SharedControlChannel
from ringreduce.transport.memory import MemoryWorld
from ringreduce.transport.messages import Messages
from ringreduce.transport.shared.node import join
from ringreduce.transport.shared.segments import MemfdSegments
from ringreduce.transport.waiting import Waiter


@dataclass(frozen=True, slots=True)
class Membership:
    """What a rank has as a member of a registered process set.

    Attributes:
        communicator: blocking collectives.
        engine: named asynchronous operations, on a communicator of its own.
    """

    communicator: Communicator
    engine: Engine

    def close(self) -> None:
        """Give everything back. Collective."""
        close_all(self.engine.close, self.communicator.close)


def _world_set() -> ProcessSet:
    from ringreduce.runtime import global_process_set

    return global_process_set


def _registered_set(number: int | None) -> ProcessSet | None:
    from ringreduce.runtime import _process

    world = _process.find()
    return None if number is None or world is None else world.sets.get(number)


class ProcessSet:
    """Some ranks of the world, ascending, that work together; sets may overlap.

    It can be used once it is registered, by `init` or `add_process_set`, on all ranks of the world.

    Args:
        ranks: of the world, in any order, or an mpi4py communicator of them.

    Attributes:
        process_set_id: 0 for all ranks, a number of its own for every other set, None while it is not registered. A set
            that is not registered can be given the number of one that is, and stands for that then; with the number of
            none it raises `ConfigError` wherever it is used.

    Raises:
        ConfigError: no rank, or one twice.
    """

    def __init__(self, ranks: Iterable[int] | Any) -> None:
        if hasattr(ranks, "Get_group"):
            from ringreduce.transport import mpi_job

            ranks = mpi_job.world_ranks(cast(Any, ranks))
        if not isinstance(ranks, Iterable):
            raise ConfigError(f"a process set is made of a list of ranks, got {ranks!r}")
        listed = [whole_number("a rank of a process set", rank) for rank in ranks]
        if not listed or min(listed) < 0 or len(set(listed)) < len(listed):
            raise ConfigError(f"a process set is made of one or more ranks, each once; got {listed}")
        self._ranks: list[int] | None = sorted(listed)
        self._world_rank: int | None = None
        self._parts: Membership | None = None
        self._lifetime = Lifetime()  # The lifetime of the world.
        self._sharing: list[ProcessSet] = []  # Equal sets that stand for this one.
        self._number: int | None = None
        self._find_world: Callable[[], object] | None = None

    @classmethod
    def of_world(cls, find_world: Callable[[], object]) -> ProcessSet:
        """Return the set of all ranks, however many there will be.

        Args:
            find_world: registers it if this process has a world without having started one; called while it has none.
        """
        process_set = cls([0])
        process_set._ranks = None
        process_set._find_world = find_world
        return process_set

    def __deepcopy__(self, memo: object) -> ProcessSet:
        return self  # It refers to processes, of which there are no copies.

    def __reduce__(self) -> tuple[Any, ...]:
        # The set of all ranks is that of the process that reads it; any other is to be registered there.
        return (_world_set, ()) if self._find_world is not None else (ProcessSet, (self._ranks,))

    @property
    def process_set_id(self) -> int | None:
        self._look()
        return self._number

    @process_set_id.setter
    def process_set_id(self, number: int | None) -> None:
        if self.registered:
            if number == self._number:
                return
            raise ConfigError(f"this process set is registered as {self._number}: call remove_process_set first")
        self._number = None if number is None else whole_number("process_set_id", number, 0)
        if (registered := _registered_set(self._number)) is not None:
            registered.share(self)

    @property
    def registered(self) -> bool:
        """Whether it belongs to a world."""
        self._look()
        return self._number is not None and self._world_rank is not None

    @property
    def ranks(self) -> list[int] | None:
        """The members, ascending; None for all ranks while there is no world."""
        self._look()
        return None if self._ranks is None else list(self._ranks)

    def included(self) -> bool:
        """Return whether this process is a member, or was started by one.

        Raises:
            ConfigError: the set is not registered.
        """
        self._require_registered()
        return self._world_rank in (self._ranks or ())

    def size(self) -> int:
        """Return the number of members.

        Raises:
            ConfigError: the set is not registered.
        """
        self._require_registered()
        return len(self._ranks or ())

    def rank(self) -> int:
        """Return this process's number among the members, or that of the member that has started it.

        Raises:
            ConfigError: it is no member, or the set is not registered.
        """
        self._require_registered()
        return self.rank_of(self._world_rank or 0)

    def rank_of(self, world_rank: int) -> int:
        """Return a member's number among the members.

        Raises:
            ConfigError: that rank of the world is no member, or no whole number.
        """
        self._require_registered()
        world_rank = whole_number("the root", world_rank)
        if world_rank not in (self._ranks or ()):
            raise ConfigError(f"rank {world_rank} does not belong to the process set of ranks {self._ranks}")
        return (self._ranks or []).index(world_rank)

    def observed(self) -> Observed:
        """Return what is seen of it; of one that is `connected`."""
        name = f"process set {self._number}" if self._number else "world"
        communicators = {"blocking": self.communicator, "asynchronous": self.engine.communicator}
        return Observed(self._number or 0, name, self._ranks or (), communicators, lambda: self.connected)

    @property
    def communicator(self) -> Communicator:
        """Blocking collectives of the members.

        Raises:
            ConfigError: this process is no member, or the set is not registered.
        """
        return (self._parts or self._member_parts()).communicator

    @property
    def engine(self) -> Engine:
        """Asynchronous operations of the members.

        Raises:
            ConfigError: this process is no member, or the set is not registered.
        """
        return (self._parts or self._member_parts()).engine

    @property
    def connected(self) -> bool:
        """Whether this process has a `communicator` and an `engine`."""
        return self._parts is not None

    def register(
        self, number: int, ranks: list[int], world_rank: int, parts: Membership | None, lifetime: Lifetime
    ) -> None:
        """Make the set usable; for `ringreduce.runtime.worlds`.

        Args:
            number: the same on all ranks.
            ranks: the members.
            world_rank: this process's, or that of the rank that has started it.
            parts: what it has as a member.
            lifetime: of the world.
        """
        self._number = number
        self._ranks = ranks
        self._world_rank = world_rank
        self._parts = parts
        self._lifetime = lifetime

    def share(self, other: ProcessSet) -> None:
        """Let another set of the same ranks stand for this one, for as long as this is registered."""
        assert self._number is not None and self._ranks is not None and self._world_rank is not None
        other.register(self._number, self._ranks, self._world_rank, parts=self._parts, lifetime=self._lifetime)
        self._sharing.append(other)

    def unregister(self) -> Membership | None:
        """Make the set unusable; return what is to be closed."""
        parts = self._parts
        self._parts = None
        self._world_rank = None
        if self._number == 0:
            self._ranks = None
        self._number = None
        for other in self._sharing:
            other.unregister()
        self._sharing.clear()
        return parts

    def _member_parts(self) -> Membership:
        if self._parts is None:
            self.rank()  # Raises where this process is no member.
            self._lifetime.require_open()
            raise AssertionError("a member has its parts while its world is open")
        return self._parts

    def _require_registered(self) -> None:
        self._look()
        if self._number is None:
            if self._ranks is None:
                raise ConfigError("ringreduce has not been initialized; call ringreduce.init() first")
            raise ConfigError(f"the process set of ranks {self._ranks} is not registered; call add_process_set first")
        if self._world_rank is None:
            raise ConfigError(f"there is no process set {self._number}; call add_process_set")

    def _look(self) -> None:
        """Find the world, if this set is all of it and is not registered."""
        if self._number is None and self._find_world is not None:
            self._find_world()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessSet) and self._ranks == other._ranks

    def __hash__(self) -> int:
        return hash(tuple(self._ranks or ()))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self._ranks})"


def require_process_set(process_set: object) -> ProcessSet:
    """Return a process set as it is; raise `ConfigError` for anything else."""
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(
            f"process_set must be a ProcessSet, as add_process_set([0, 1]) returns it, got {process_set!r}"
        )
    return process_set


def connect(
    make: Callable[[Waiter], Messages], settings: Config, lifetime: Lifetime, when_closed: str | None = None
) -> Membership:
    """Set up what the members of a set need. Collective.

    Args:
        make: makes a new transport between them, given how its collective calls wait; called up to four times, as
            often on all of them.
        settings: equal on all of them.
        lifetime: of the world.
        when_closed: what errors say of calls after the end of the set; None: of that of the world.
    """
    blocking_context = context_of(make, settings, CallSite.here, lifetime=lifetime, when_closed=when_closed)
    # The engine's calls are in one order on all ranks, wherever in the program they come from. It has compared shapes,
    # and a rank may reduce an array where it is while another reduces it in a buffer.
    context = context_of(
        make, settings, CallSite, lifetime=lifetime, when_closed=when_closed, warn=False, counts_decide=True
    )
    shared = context.topology.single_node and context.topology.size > 1
    channel = SharedControlChannel(context.node, context.messages) if shared else make(Waiter(settings.timeout_s))
    between_two = make(Waiter(settings.timeout_s))
    blocking = Communicator(blocking_context, between_two, Gpu)
    asynchronous = Communicator(context, devices=Gpu)
    engine = Engine(asynchronous, channel, find_failed=context.board.find_failed, threads=context.messages.concurrent)
    return Membership(blocking, engine)


def alone(settings: Config) -> Membership:
    """Set up the same for this process without any other, in a lifetime of its own."""
    return connect(lambda waiter: MemoryWorld(1).messages(0), settings, Lifetime())


def context_of(
    make: Callable[[Waiter], Messages],
    settings: Config,
    called: Callable[[str], CallSite],
    lifetime: Lifetime,
    when_closed: str | None = None,
    *,
    warn: bool = True,
    counts_decide: bool = False,
) -> Context:
    """Set up what a communicator needs. Collective over its ranks.

    Args:
        make: makes a new transport between them, given how its collective calls wait.
        settings: equal on all of them.
        called: says what this rank calls, and where; see `Context`.
        lifetime: of what it belongs to.
        when_closed: as for `Lifetime.child`.
        warn: whether to say why ranks of one machine cannot share memory.
        counts_decide: see `Context`.
    """
    waiter = Waiter(settings.timeout_s)
    messages = checked(make(waiter)) if settings.checksum else make(waiter)
    node = join(messages, waiter, settings, host=host_name(), make_segments=MemfdSegments, warn=warn)
    return Context(messages, waiter, node, settings, called, counts_decide, lifetime.child(when_closed))
