"""Ranks that are actors of Ray: the actor, and the stand-in that mpirun has started in its place."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringreduce.common.errors import ConfigError
from ringreduce.common.processes import pid_namespace
from ringreduce.engines import engine
from ringreduce.launcher.connection import HostConnection
from ringreduce.launcher.stand_ins import become

_LOOK_EVERY_S = 0.2


class ActorProcess(NamedTuple):
    """The process of an actor: its number, which system's numbers those are, and its GPUs."""

    pid: int
    pids: str
    gpus: list[str]


@dataclass
class StandIn:
    """A process in a rank's place, as the program has it."""

    rank: int
    host: str
    pids: str
    said: dict[str, str]
    connection: HostConnection
    actor: Any = None
    leaves: bool = False
    has_ended: bool = False

    def kill_actor(self) -> None:
        """Kill the actor, if it has one and has ended before that: MPI counts the rank as dead."""
        if self.has_ended and self.actor is not None and not self.leaves:
            ray = engine("ray", "ray")
            if ray.is_initialized():  # else this would start Ray anew
                ray.kill(self.actor)


class StandIns:
    """The stand-ins of the jobs that the launcher starts, one job after the other.

    Attributes:
        all_ended: whether the launcher has ended.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._job = -1
        self._found: dict[int, StandIn] = {}  # those of that job which have come, and that nobody has taken
        self._since = time.monotonic()
        self.all_ended = threading.Event()

    def offer(self, request: Mapping[str, Any], connection: HostConnection) -> None:
        """Take one that has come, until it ends, or its host does not answer any more; then its actor is killed."""
        said = request["environ"]
        host, _, _ = request["host"].partition("/")
        each = StandIn(int(said["OMPI_COMM_WORLD_RANK"]), host, request["pids"], said, connection)
        job = int(said.get("RINGREDUCE_RESTART", 0))
        with self._changed:
            if job > self._job:
                self._job = job
                self._found = {}
                self._since = time.monotonic()
            self._found[each.rank] = each
            self._changed.notify_all()
        with suppress(OSError, EOFError):  # its host is lost, or it has ended
            connection.receive()
        with self._changed:
            each.has_ended = True
            self._changed.notify_all()
        each.kill_actor()

    def take(self, limit_s: float) -> dict[int, StandIn]:
        """Wait for the stand-ins of a job, and return them, by rank.

        Raises:
            ConfigError: some have not come so many seconds after the first, or the launcher has ended.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._missing(), _LOOK_EVERY_S)
                missing = self._missing()
                if not missing:
                    found = dict(sorted(self._found.items()))
                    self._found = {}
                    return found
                is_late = self._found.keys() != set() or self._job < 0
            if self.all_ended.is_set():
                raise ConfigError("the launcher of the ranks has ended; its output says why")
            if is_late and time.monotonic() > self._since + limit_s:
                raise ConfigError(f"ranks {missing} have not started within {limit_s:g} s")

    def _missing(self) -> list[int]:
        first = next(iter(self._found.values()), None)
        size = 1 if first is None else int(first.said["OMPI_COMM_WORLD_SIZE"])
        return sorted({*range(size)} - self._found.keys())

    def are_over(self, ranks: Sequence[StandIn]) -> bool:
        """Return whether a job has ended, by its ranks, or another has begun."""
        return bool(self._found) or all(each.has_ended for each in ranks)

    def begin_again(self, ranks: Sequence[StandIn], limit_s: float) -> bool:
        """Wait for another job once one has ended; return False if that goes on for so long, or no other comes."""
        with self._changed:
            if self._changed.wait_for(lambda: self.are_over(ranks), limit_s):
                self._changed.wait_for(lambda: self._found or self.all_ended.is_set())
            return bool(self._found)

    def end(self) -> None:
        """The launcher has ended."""
        with self._changed:
            self.all_ended.set()
            self._changed.notify_all()


class BeginsAgainError(Exception):
    """The launcher has started another job, for which there are to be new actors."""


class RankActor:
    """The actor. What it is given is unpickled when a method runs."""

    def process(self) -> ActorProcess:
        gpus = engine("ray", "ray").get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ActorProcess(os.getpid(), pid_namespace(), [str(each) for each in gpus])

    def become(self, environ: Mapping[str, str], modules: Sequence[str]) -> None:
        """Be the rank that mpirun has said this to."""
        become(environ)
        for name in modules:
            importlib.import_module(name)

    def make(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._executable = cls(*args, **kwargs)

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return fn(*args, **kwargs)

    def execute(self, fn: Callable[[Any], Any]) -> Any:
        return fn(getattr(self, "_executable", None))
