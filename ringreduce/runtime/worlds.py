"""Worlds: the ranks that work together, their process sets, and what is done for all of them."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ringreduce.audit.run_record import record_no_begin
from ringreduce.collectives.choice.tuning import Key, Table
from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import AbortReason, refusal
from ringreduce.common.config import VERSION, Config
from ringreduce.common.errors import (
    ChangedMessageError,
    CollectiveError,
    CollectiveTimeoutError,
    ConfigError,
    MismatchError,
    RingReduceError,
)
from ringreduce.common.launch import announce_stop, launch
from ringreduce.common.lifetime import Lifetime, close_all
from ringreduce.common.reduce_ops import MAX
from ringreduce.common.topology import Topology
from ringreduce.observe.job.job_report import JobReport
from ringreduce.observe.observer import Observer
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.step_clock import Spent, StepClock
from ringreduce.observe.seen.timeline import JobClock, Program
from ringreduce.observe.watchers import Beginning
from ringreduce.runtime.bootstrap import Connection, ParentRank, StartLimit, check_settings, check_versions
from ringreduce.runtime.groups import Group
from ringreduce.runtime.process_sets import Membership, ProcessSet, connect
from ringreduce.runtime.recording import Recording
from ringreduce.runtime.sealing import Handshake, SealedConnection
from ringreduce.transport.messages import Messages, exchange_json
from ringreduce.transport.waiting import Waiter

_log = logging.getLogger(__name__)

_WHEN_REMOVED = "this process set was removed, or ringreduce was shut down; add it again"


class World:
    """The ranks that work together, as a process sees them that a rank has forked or started: it cannot communicate.

    Args:
        everyone: the set of all ranks.
        rank: this process's number, or that of the rank that has started it.
        hosts: which ranks run on one machine.
        config: the settings in force.
        lifetime: of the world.

    Attributes:
        rank, hosts, config, lifetime: the arguments.
        sets: the process sets that are registered, by number.
    """

    def __init__(
        self, everyone: ProcessSet, rank: int, hosts: Topology, config: Config, lifetime: Lifetime | None = None
    ) -> None:
        self.rank = rank
        self.hosts = hosts
        self.config = config
        self.lifetime = Lifetime() if lifetime is None else lifetime
        self.sets: dict[int, ProcessSet] = {}
        self._everyone = everyone
        self._last_set = -1
        self._groups: list[Group] = []

    @classmethod
    def of_parent(cls, parent: ParentRank, everyone: ProcessSet, config: Config) -> World:
        """Return the world of a rank that has started this process by `multiprocessing`."""
        world = cls(everyone, parent.rank, Topology(parent.nodes), config=config)
        world._fork("started")
        world._register(everyone, list(range(world.size)), None)
        return world

    def _fork(self, how: str) -> None:
        self.lifetime.fork(
            f"this process was {how} by rank {self.rank} of {self.size} and is no rank itself: it can ask for ranks "
            "and sizes, but not communicate. Communicate in the ranks, or start more of them with the launcher"
        )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts.size

    @cached_property  # Cached, as all calls of a program begin here.
    def communicator(self) -> Communicator:
        """Blocking collectives of all ranks; they raise in a forked process.

        Raises:
            ConfigError: this process was started by a rank.
        """
        return self._everyone.communicator

    def add(self, process_set: ProcessSet | Sequence[int]) -> ProcessSet:
        """Register a process set, or several that have no rank in common; see `ringreduce.add_process_set`."""
        new_set = _as_set(process_set)
        self._register(new_set, new_set.ranks or list(range(self.size)), None)
        return new_set

    def close(self) -> None:
        """Forget it. Local."""
        self._unregister_all()

    def adopt(self, process_set: ProcessSet) -> None:
        """Let a set that is equal to a registered one stand for it; register it if there is none. Collective."""
        ranks = process_set.ranks or list(range(self.size))
        equal_set = next((other for other in self.sets.values() if other.ranks == ranks), None)
        if equal_set is None:
            self.add(process_set)
        elif equal_set is not process_set:
            equal_set.share(process_set)

    def metrics(self) -> Metrics:
        """Return what this rank's calls add up to."""
        members = [process_set for process_set in self.sets.values() if process_set.included()]
        communicators = [member.communicator for member in members]
        communicators += [group.communicator for group in self._groups if group.lifetime.open]
        communicators += [member.engine.communicator for member in members]
        engines = [
            (member.engine.tally, member.engine.waited_s, member.ranks or [], member.engine.communicator.topology.nodes)
            for member in members
        ]
        return Metrics.of(communicators, engines)

    def _register(self, process_set: ProcessSet, ranks: list[int], parts: Membership | None) -> None:
        self._last_set += 1
        process_set.register(self._last_set, ranks, self.rank, parts=parts, lifetime=self.lifetime)
        self.sets[self._last_set] = process_set

    def _unregister_all(self) -> list[Membership]:
        registered = [process_set.unregister() for _, process_set in sorted(self.sets.items(), reverse=True)]
        self.sets.clear()
        return [parts for parts in registered if parts is not None]


class OwnWorld(World):
    """The world of a rank: what `init` makes and `shutdown` ends.

    Args:
        everyone: the set of all ranks.
        connection: connects the ranks.
        messages: between all ranks, for what concerns them all; closed with the world.
        parts: what this rank has as a member of the set of all ranks; closed with the world.
        clock: the job's.
        config: equal on all ranks.
        followers: of traces; see `Observer`.
        lifetime: of the world.

    Attributes:
        observer: what is seen of this rank from outside.
        stops: whether the ranks have agreed to stop.
    """

    def __init__(
        self,
        everyone: ProcessSet,
        connection: Connection,
        messages: Messages,
        parts: Membership,
        clock: JobClock,
        config: Config,
        followers: Sequence[Callable[[Program | None], object]],
        lifetime: Lifetime,
    ) -> None:
        super().__init__(everyone, messages.rank, parts.communicator.hosts, config=config, lifetime=lifetime)
        self._messages = messages
        self._connection = connection
        self.stops = False
        self._asked = np.zeros(1)
        self._numbers: Counter[tuple[int, ...]] = Counter()  # How many groups were made, by their ranks.
        self.recording = Recording()
        neighbours = parts.communicator.neighbours()
        self.observer = Observer(self.rank, self.size, clock, config, neighbours, followers, [self.recording])
        lifetime.listen_while_held("failed below", self.note_refusal)
        self._register(everyone, list(range(messages.size)), parts)
        self.observer.recorder.step_clock = StepClock(self._spent)

    @classmethod
    def start(
        cls,
        everyone: ProcessSet,
        connection: Connection,
        config: Config,
        limit: StartLimit,
        followers: Sequence[Callable[[Program | None], object]],
        lifetime: Lifetime,
        recoveries: int = 0,
    ) -> OwnWorld:
        """Connect the ranks and agree on all that must agree. Collective.

        Args:
            everyone, connection, config, followers, lifetime: of the world.
            limit: how long to wait until all ranks have come here.
            recoveries: how often there was a world before, in which ranks have failed.

        Raises:
            what `init` raises.
        """
        with limit.waiter() as waiter:
            messages = connection.messages(waiter)
        waiter.timeout_s = config.timeout_s
        parts: Membership | None = None
        world: OwnWorld | None = None
        try:
            handshake = Handshake(config, messages.rank, messages.size)
            key = handshake.conclude(messages, check_versions(messages, handshake.greeting))
            if key is not None:
                connection = SealedConnection(connection, key)
                messages = connection.seal(messages)
            connection.introduce(messages)
            check_settings(messages, config)
            parts = connect(connection.messages, config, lifetime)
            clock = JobClock.agree(messages)
            world = cls(everyone, connection, messages, parts, clock, config, followers, lifetime)
            _log_choices(world, is_sealed=key is not None)
            world._use_table()
            world.observer.begin(
                Beginning(
                    config=config,
                    messages=messages,
                    library=world.communicator.library,
                    metrics=world.metrics,
                    values=world.observer.last_values,
                    nodes=len(world.hosts.nodes),
                    recoveries=recoveries,
                    abort=connection.abort,
                )
            )
            # Not earlier: files are sealed by a key that the ranks have agreed on.
            world.observer.watch(everyone.observed())
        except Exception as error:
            if config.audit is not None and isinstance(error, (ConfigError, MismatchError, ChangedMessageError)):
                record_no_begin(messages, config, error)
            with suppress(Exception):  # Only the first error is reported.
                if isinstance(error, CollectiveError) and not isinstance(error, MismatchError):
                    # Others may wait for this rank. What it leaves open, `Connection.reconfigure` ends for them, too.
                    messages.abandon()
                    if world is not None:
                        world.abandon(error)
                    elif parts is not None:
                        _abandon(parts, error)
                elif world is not None:
                    world.close()
                else:
                    close_all(*([] if parts is None else [parts.close]), messages.close)
            raise
        return world

    # ---- process sets ----

    @property
    def divided(self) -> bool:
        """Whether it has, or had, groups or more process sets than that of all ranks."""
        return bool(self._numbers) or self._last_set > 0

    def add(self, process_set: ProcessSet | Sequence[int]) -> ProcessSet:
        try:
            new_set = _as_set(process_set)
            refused = None
            mine = new_set.ranks or list(range(self.size))
            if mine[-1] >= self.size:
                raise ConfigError(f"there is no rank {mine[-1]}; the world has ranks 0 to {self.size - 1}")
            if any(other.ranks == mine for other in self.sets.values()):
                raise ConfigError(f"a process set of ranks {mine} is registered already")
        except Exception as error:
            mine = []
            refused = error
        sets = self._agree("add_process_set", mine, refused)
        # Every rank takes part, members or not.
        channels = [self._messages.subset(mine, Waiter(self.config.timeout_s)) for _ in range(4)]
        parts = None
        if self.rank in mine:
            ready = filter(None, channels)
            parts = connect(lambda waiter: next(ready), self.config, self.lifetime, when_closed=_WHEN_REMOVED)
            for needless in ready:
                needless.close()
        self._messages.exchange(b"")  # Nobody may use it, or remove it, before all have it.
        for ranks in sets:
            added, its_parts = (new_set, parts) if ranks == mine else (ProcessSet(ranks), None)
            self._register(added, ranks, its_parts)
            if added.connected:
                self.observer.watch(added.observed())
        return new_set

    def remove(self, process_set: ProcessSet | Any) -> bool:
        """Give back a process set, or several, as they were added; see `ringreduce.remove_process_set`."""
        refused = None
        mine = []
        if isinstance(process_set, ProcessSet):
            mine = process_set.ranks or list(range(self.size))
        else:
            refused = ConfigError(f"remove_process_set takes what add_process_set returned, got {process_set!r}")
        removed = False
        for ranks in self._agree("remove_process_set", mine, refused):
            number = next((number for number, old in self.sets.items() if number and old.ranks == ranks), None)
            if number is None:  # There may be no such set on any rank.
                continue
            parts = self.sets.pop(number).unregister()
            if ranks == mine:
                process_set.unregister()  # It may be an equal set.
                removed = True
            if parts is not None:
                parts.close()
        return removed

    def group(self, ranks: Sequence[int], timeout_s: float | None = None) -> Group:
        """Connect some ranks as a group. Collective over these alone; see `Group`."""
        listed = list(ranks)
        if self.rank not in listed or len(set(listed)) < len(listed) or not set(listed) <= set(range(self.size)):
            raise ConfigError(
                f"a group is made by its members, each once, out of ranks 0 to {self.size - 1}; rank {self.rank} got "
                f"{listed}"
            )
        self._groups = [other for other in self._groups if other.lifetime.open]
        group = Group(self._connection, listed, self.config, timeout_s, self._advance, self.lifetime)
        self._groups.append(group)
        self._numbers[tuple(listed)] += 1
        self.observer.watch(group.observed(self._numbers[tuple(listed)]))
        return group

    def transport(self) -> Messages:
        """Return a transport between all ranks that nothing else uses, and that the caller closes. Collective."""
        messages = self._messages.subset(range(self.size), Waiter(self.config.timeout_s))
        assert messages is not None
        return messages

    def agree_to_stop(self, asked: bool) -> bool:
        """Return whether any rank was asked to stop. Collective."""
        self._asked[0] = asked
        if self.size > 1:
            self.communicator.allreduce(self._asked, MAX, out=self._asked)  # Always the same array: its plan is known.
        if self._asked[0] and not self.stops:
            self.stops = True
            announce_stop()
        return bool(self._asked[0])

    def metrics(self) -> Metrics:
        return replace(super().metrics(), values=self.observer.recorder.values.last())

    def report(self) -> JobReport | None:
        """Return what the steps took, and why; None: there were too few. Local."""
        return self.observer.report(self.metrics(), self.hosts.nodes)

    def _spent(self) -> Spent:
        engines = [process_set.engine for process_set in self.sets.values() if process_set.included()]
        return self.observer.recorder.spent(
            sum(engine.waited_s for engine in engines), sum(engine.pacemaker.loading_s for engine in engines)
        )

    def _advance(self) -> None:
        """Move on the messages of all groups: while this rank waits, peers may wait for these."""
        for group in self._groups:
            group.advance()

    def _agree(self, call: str, mine: list[int], refused: Exception | None) -> list[list[int]]:
        """Return the sets that the ranks speak of: one that all have named, or each member's own. Collective.

        Raises:
            MismatchError: they have named different ones.
            Exception: ``refused``, which is why this rank has named none.
        """
        try:
            everyone = exchange_json(self._messages, mine if refused is None else refusal(call, refused))
        except CollectiveTimeoutError as error:
            raise CollectiveTimeoutError(f"{call}({mine}): {error}") from None
        if refused is not None:
            raise refused
        refusals = [rank for rank, answer in enumerate(everyone) if isinstance(answer, str)]
        if not refusals:
            sets = sorted({tuple(answer) for answer in everyone})
            if len(sets) == 1 or all(_is_own(rank, everyone) for rank in range(len(everyone))):
                return [list(ranks_of_set) for ranks_of_set in sets]
        calls = {rank: answer if rank in refusals else f"{call}({answer})" for rank, answer in enumerate(everyone)}
        raise MismatchError(calls)

    # ---- its begin ----

    def _use_table(self) -> None:
        """Choose from the table that ``ringreduce tune`` left for these ranks, if there is one: rank 0 reads it."""
        if self.size == 1:
            return
        text = ""
        if self.rank == 0 and self.config.tuning is not None:
            key = Key(self.communicator.topology, self.communicator.library)
            path = Path(self.config.tuning) / key.file_name
            try:
                # Unlike this, Path.exists raises where the folder may not be looked into.
                text = Table.load(path, key).to_json() if os.path.exists(path) else ""
            except ConfigError as error:
                _log.warning("going on without a tuning table: %s", error)
            else:
                _log.info("tuning table: %s", path if text else f"none for these ranks ({path.parent})")
        text = self._messages.exchange(text.encode())[0].decode()
        if text:
            table = Table.from_json(text)
            for communicator in (self.communicator, self._everyone.engine.communicator):
                communicator.use(table)

    # ---- its end ----

    def note_refusal(self, error: BaseException) -> None:
        """Record an error if it says that a message has changed on its way, to this rank or another one."""
        if isinstance(error, ChangedMessageError):
            self.recording.refuse("message", error)

    def detach(self, reason: str) -> bool:
        """Let the ranks of the node know that this one ends; return whether it is the first of them that does so."""
        self.recording.end(reason)
        why = AbortReason(reason, self.rank)
        first = [process_set.communicator.detach(why) for process_set in self.sets.values() if process_set.connected]
        first += [group.communicator.detach(why) for group in self._groups if group.lifetime.open]
        return all(first)

    def flush(self) -> None:
        """Save what is only in memory, for people who look into why the job has ended; and leave no file besides."""
        error = getattr(sys, "last_value", None)
        self.observer.recorder.end_status()
        self.observer.traces.flush()
        # If no reason was given, another rank ends the job.
        self.recording.end("the process was ended" if error is None else f"{type(error).__name__}: {error}")

    def in_child(self) -> World:
        """Return the world of this process, which the rank has forked. Takes no lock, and waits for none.

        What this process writes to memory that the ranks share stays its own.
        """
        self.observer.forked()
        self._fork("forked")
        inherited = World(self._everyone, self.rank, self.hosts, config=self.config, lifetime=self.lifetime)
        inherited.sets = self.sets
        inherited._last_set = self._last_set
        return inherited

    def abandon(self, error: CollectiveError) -> None:
        """End the world after the loss of a rank. Local: what the other ranks have under way fails later."""
        self.note_refusal(error)
        with suppress(ConfigError, OSError):  # Only the trace cannot be written.
            self.recording.end(str(error))
            self.observer.end(str(error))
        for group in self._groups:
            group.abort(error)
            with suppress(RingReduceError):
                group.close()
        for parts in self._unregister_all():
            _abandon(parts, error)

    def close(self) -> None:
        """End the world. Collective."""
        self.observer.conclude(self.report)
        self.recording.end(None)
        self.observer.end()
        groups = (group.close for group in reversed(self._groups))
        close_all(*groups, *(parts.close for parts in self._unregister_all()), self._messages.close)


def _log_choices(world: OwnWorld, *, is_sealed: bool) -> None:
    """Log, on rank 0, what the job runs on, so that a log says by itself what happened."""
    if world.rank != 0 or not _log.isEnabledFor(logging.INFO):
        return
    versions = f"ringreduce {VERSION}, Python {platform.python_version()}, NumPy {np.__version__}"
    if "torch" in sys.modules:
        versions += f", torch {sys.modules['torch'].__version__}"
    launcher = launch().launcher
    shares = "shared memory" if max(map(len, world.communicator.topology.nodes)) > 1 else "no shared memory"
    _log.info("%s", versions)
    between = world.communicator.library if world.size > 1 else "nothing"
    if is_sealed:
        between += " (sealed)"
    ranks = f"{world.hosts.describe()}, started by {'no launcher' if launcher is None else launcher.name}"
    _log.info("%s; %s within nodes, %s between them", ranks, shares, between)
    standard = Config(launched_size=world.config.launched_size, tuning=world.config.tuning, caches=world.config.caches)
    settings = {field.name: getattr(world.config, field.name) for field in fields(Config)}
    changed = [f"{name}={value}" for name, value in settings.items() if value != getattr(standard, name)]
    _log.info("settings: %s", ", ".join(changed) or "as they come")


def _abandon(parts: Membership, error: CollectiveError) -> None:
    parts.communicator.abort(error)
    parts.engine.fail(error)
    with suppress(RingReduceError):
        parts.close()


def _as_set(process_set: ProcessSet | Sequence[int] | Any) -> ProcessSet:
    return process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)


def _is_own(rank: int, everyone: Sequence[Sequence[int]]) -> bool:
    """Return whether a rank has named a set that it belongs to, and whose other members have named it, too."""
    named = everyone[rank]
    return rank in named and all(peer < len(everyone) and everyone[peer] == named for peer in named)
