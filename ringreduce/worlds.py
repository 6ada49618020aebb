"""A world: the ranks that work together, their process sets, and what is done for all of them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any, NoReturn

from ringreduce import processes
from ringreduce.calls import GivenUp, refusal
from ringreduce.communicator import Communicator
from ringreduce.config import Config, several_processes
from ringreduce.errors import CollectiveTimeoutError, ConfigError, MismatchError
from ringreduce.instruments import Instruments
from ringreduce.metrics import Metrics
from ringreduce.paths import close_all
from ringreduce.process_sets import Parts, ProcessSet, connect
from ringreduce.timeline import Clock, Timeline, Track
from ringreduce.topology import Topology
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.waiting import Waiter

__all__ = ["RankAbove", "World"]


@dataclass(frozen=True, slots=True)
class RankAbove:
    """What a process that is or was a rank lets those know that it starts.

    Attributes:
        rank: which one it is.
        nodes: of its world, the ranks that run on one machine; none while it is in no world.
        proof: what proved to it that a launcher has started several processes.
    """

    rank: int
    nodes: tuple[tuple[int, ...], ...]
    proof: str | None

    @classmethod
    def of(cls, world: World | None) -> RankAbove:
        """Return what this process, which is in this world or was in one, has to say."""
        return cls(0, (), _proof()) if world is None else cls(world.rank, world.hosts.nodes, _proof())

    @classmethod
    def find(cls) -> RankAbove | None:
        """Return what the rank says that has started this process; None: no rank has."""
        announced = processes.rank_above()
        if announced is None:
            return None
        rank, nodes, proof = json.loads(announced)
        return cls(rank, tuple(map(tuple, nodes)), proof)

    def announce(self) -> processes.Announcement:
        """Let processes that this one starts `find` it."""
        return processes.Announcement(json.dumps(astuple(self)).encode())

    @property
    def bequeaths(self) -> bool:
        """Whether what the launcher has said to that rank is all that the environment says to this process.

        Then this is a program that the rank has started, and no rank of a job of its own.
        """
        return self.proof == _proof()


class World:
    """What `init` makes and `shutdown` ends.

    A process that a rank has started, and that is no rank, has a world too: one that knows where that rank is, and in
    which nothing can be communicated.

    Args:
        everyone: the set of all ranks, which this registers.
        rank: of this process, or of the rank above it.
        hosts: which ranks run on one machine.
        config: the settings in force.
        barred: why this process takes part in nothing; empty for a rank.

    Attributes:
        rank, hosts, config, barred: the arguments.
        sets: the process sets that are registered, by number.
    """

    def __init__(self, everyone: ProcessSet, rank: int, hosts: Topology, config: Config, barred: str = "") -> None:
        self.rank = rank
        self.hosts = hosts
        self.config = config
        self.barred = barred
        self.sets: dict[int, ProcessSet] = {}
        self._everyone = everyone
        self._last_set = -1
        self._messages: Messages | None = None  # between all ranks, for what concerns them all
        self._communicator: Communicator | None = None
        self._clock: Clock | None = None
        self._timeline: Timeline | None = None
        self._timelines = 0  # that were started, or tried to; ranks that write to one file count alike
        self._stopped = True  # whether `stop_timeline` was called since
        self._tracks: list[tuple[Instruments, Track]] = []  # of the timeline, and where they are attached
        if barred:
            self._register([(everyone, list(range(hosts.size)), None)])

    @classmethod
    def connected(
        cls, everyone: ProcessSet, messages: Messages, make: Callable[[Waiter], Messages], config: Config
    ) -> World:
        """Set up a world of ranks. Collective.

        Args:
            everyone: as for the class.
            messages: between all ranks; the world's from now on.
            make: makes more of these, given how their collective calls wait.
            config: equal on all ranks.
        """
        parts = connect(make, config)
        with ExitStack() as undo:
            undo.callback(parts.close)
            world = cls(everyone, messages.rank, parts.communicator.hosts, config)
            world._clock = Clock.agree(messages)
            undo.pop_all()
        world._messages, world._communicator = messages, parts.communicator
        world._register([(everyone, list(range(messages.size)), parts)])
        return world

    @classmethod
    def above(cls, everyone: ProcessSet, rank: int, hosts: Topology, config: Config) -> World:
        """Return the world of the rank that has started this process."""
        barred = f"this process was started by rank {rank} of {hosts.size} and is no rank itself{_REMEDY}"
        return cls(everyone, rank, hosts, config, barred)

    @property
    def size(self) -> int:
        return self.hosts.size

    @property
    def communicator(self) -> Communicator:
        """Blocking collectives of all ranks.

        Raises:
            ConfigError: this process is no rank.
        """
        if self._communicator is None:
            self._raise_barred()
        return self._communicator

    # ---- process sets ----

    def add(self, process_set: ProcessSet | Sequence[int]) -> ProcessSet:
        """Register a process set, or several that have no rank in common; see `ringreduce.add_process_set`."""
        if self.barred:  # it can be asked who is in it, and that is all
            made = _as_set(process_set)
            self._register([(made, made.ranks or list(range(self.size)), None)])
            return made
        messages = self._all_ranks()
        try:
            made, refused = _as_set(process_set), None
            mine = made.ranks or list(range(self.size))
            if mine[-1] >= self.size:
                raise ConfigError(f"there is no rank {mine[-1]}; the world has ranks 0 to {self.size - 1}")
            if any(each.ranks == mine for each in self.sets.values()):
                raise ConfigError(f"a process set of ranks {mine} is registered already")
        except Exception as error:
            mine, refused = [], error
        sets = self._agree("add_process_set", mine, refused)
        # Every rank takes part, members or not.
        channels = [messages.subset(mine, Waiter(self.config.timeout_s)) for _ in range(3)]
        parts = None
        if self.rank in mine:
            ready = iter(channels)
            parts = connect(lambda waiter: _present(next(ready)), self.config)
            for needless in ready:
                _present(needless).close()
        messages.exchange(b"")  # nobody may use it, or remove it, before all have it
        self._register([(made, mine, parts) if ranks == mine else (ProcessSet(ranks), ranks, None) for ranks in sets])
        return made

    def adopt(self, process_set: ProcessSet) -> None:
        """Let a set that is equal to a registered one stand for it; register it if there is none. Collective."""
        ranks = process_set.ranks or list(range(self.size))
        known = next((each for each in self.sets.values() if each.ranks == ranks), None)
        if known is None:
            self.add(process_set)
        elif known is not process_set:
            known.share(process_set)

    def remove(self, process_set: ProcessSet | Any) -> bool:
        """Give back a process set, or several, as they were added; see `ringreduce.remove_process_set`."""
        if self.barred:
            self._raise_barred()
        refused, mine = None, []
        if isinstance(process_set, ProcessSet):
            mine = process_set.ranks or list(range(self.size))
        else:
            refused = ConfigError(f"remove_process_set takes what add_process_set returned, got {process_set!r}")
        removed = False
        for ranks in self._agree("remove_process_set", mine, refused):
            number = next((number for number, each in self.sets.items() if number and each.ranks == ranks), None)
            if number is None:  # also where there are no such ranks
                continue
            parts = self.sets.pop(number).unregister()
            if ranks == mine:
                process_set.unregister()  # which may be an equal one
                removed = True
            if parts is not None:
                parts.close()
        return removed

    def _agree(self, call: str, mine: list[int], refused: Exception | None) -> list[list[int]]:
        """Return the sets that the ranks speak of: one that all have named, or each member's own. Collective.

        Raises:
            MismatchError: they have named different ones.
            Exception: ``refused``, which is why this rank has named none.
        """
        try:
            said = exchange_json(self._all_ranks(), mine if refused is None else refusal(call, refused))
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{call}({mine}): {error}") from None
        if refused is not None:
            raise refused
        refusals = [rank for rank, each in enumerate(said) if isinstance(each, str)]
        if not refusals:
            sets = sorted({tuple(each) for each in said})
            if len(sets) == 1 or all(_is_own(rank, said) for rank in range(len(said))):
                return [list(each) for each in sets]
        raise MismatchError({rank: each if rank in refusals else f"{call}({each})" for rank, each in enumerate(said)})

    def _register(self, sets: Sequence[tuple[ProcessSet, list[int], Parts | None]]) -> None:
        for process_set, ranks, parts in sets:
            self._last_set += 1
            process_set.register(self._last_set, ranks, self.rank, parts, self.barred)
            self.sets[self._last_set] = process_set
            self._watch(process_set)

    def _all_ranks(self) -> Messages:
        if self._messages is None:
            self._raise_barred()
        return self._messages

    def _raise_barred(self) -> NoReturn:
        raise ConfigError(self.barred)

    # ---- what is seen of it ----

    def start_timeline(self, path: str | os.PathLike[str], *, mark_batches: bool) -> None:
        """Begin to write a trace; see `ringreduce.start_timeline`."""
        if self._clock is None:
            self._raise_barred()
        if self._timeline is not None:
            raise ConfigError("a timeline is being written already; call stop_timeline() first")
        if self._stopped:  # else it is the last one that is tried again on this rank
            self._timelines, self._stopped = self._timelines + 1, False
        self._timeline = Timeline(
            path, self._clock, self._timelines, self.rank, platform.node(), mark_batches=mark_batches
        )
        for each in self.sets.values():
            self._watch(each)

    def stop_timeline(self) -> None:
        """Finish the trace; does nothing if there is none."""
        self._stopped = True
        if self._timeline is not None:
            self._detach()
            ending, self._timeline = self._timeline, None
            ending.flush()

    def flush_timeline(self) -> None:
        """Write what this rank has seen so far to the trace, if there is one."""
        if self._timeline is not None:
            self._timeline.flush()

    def metrics(self) -> Metrics:
        """Return what this rank's calls add up to."""
        return Metrics.of(self.sets.values())

    def _watch(self, process_set: ProcessSet) -> None:
        """Let the timeline, if there is one, see what this rank does as a member of a set."""
        if self._timeline is None or not process_set.included():
            return
        name = "world" if process_set is self._everyone else f"process set {process_set.process_set_id}"
        for communicator, kind in (
            (process_set.communicator, "blocking"),
            (process_set.engine.communicator, "asynchronous"),
        ):
            track = self._timeline.track(f"{name}: {kind}")
            communicator.instruments.add(track)
            self._tracks.append((communicator.instruments, track))

    def _detach(self) -> None:
        for instruments, track in self._tracks:
            instruments.remove(track)
        self._tracks.clear()

    # ---- its end ----

    def leave(self, reason: str) -> bool:
        """Let the ranks of the node know that this one ends; return whether it is the first of them that does so."""
        why = GivenUp(reason, self.rank)
        first = [each.communicator.leave(why) for each in self.sets.values() if each.connected]
        return all(first)

    def disown(self, reason: str) -> None:
        """Take part in nothing any more: this is a process that the rank has forked. Takes no lock, and waits for none.

        What this process writes to memory that the ranks share stays its own.
        """
        self.barred = reason + _REMEDY
        self._detach()
        self._timeline = self._messages = self._clock = None
        for each in self.sets.values():
            each.disown(self.barred)

    def close(self) -> None:
        """End the world. Collective."""
        self.stop_timeline()
        messages, self._messages, self._communicator = self._messages, None, None
        self.barred = "ringreduce was shut down; call init() to start a new world"
        registered = [each.unregister() for _, each in sorted(self.sets.items(), reverse=True)]
        self.sets.clear()
        closing = [parts.close for parts in registered if parts is not None]
        close_all(*closing, *([] if messages is None else [messages.close]))


_REMEDY = (
    ": it can ask for ranks and sizes, but not communicate. Communicate in the ranks, or start more of them with the "
    "launcher"
)


def _proof() -> str | None:
    """Return what proves that this process was started beside others."""
    several = several_processes()
    return None if several is None else several[1]


def _as_set(process_set: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    return process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)


def _is_own(rank: int, said: Sequence[Sequence[int]]) -> bool:
    """Return whether a rank has named a set that it belongs to, and whose other members have named it, too."""
    named = said[rank]
    return rank in named and all(peer < len(said) and said[peer] == named for peer in named)


def _present(messages: Messages | None) -> Messages:
    assert messages is not None, "a member gets a transport"
    return messages
