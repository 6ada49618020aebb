"""Slots that tasks of an engine hold on its nodes, for the daemons of mpirun, and the data that tasks give to ranks.

A task calls `hold`, which starts the agent of its host beside it. That connects to the driver: its `Slots` send it the
commands that mpirun asks for, and take what ranks say and return. A rank gets its data over `connection_to_task`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.common.launch import MESSAGES_HERE, messages_in
from ringreduce.launcher import agent, host_agent
from ringreduce.launcher.agent_server import TICKET, private_folder, worker_environment
from ringreduce.launcher.connection import HostConnection, listening, served
from ringreduce.launcher.marks import LIVES, pass_on
from ringreduce.launcher.reach import agent_line, hear

#: The variable with the folder of an agent, which belongs to the node: mpirun passes it on to no other.
_FOLDER = "_RINGREDUCE_SLOT"
#: In that folder: the socket at which the task gives data to ranks, and the folder of the call and its results.
_DATA = "data"
_RESULTS = "results"
_LOOK_EVERY_S = 0.2
_LIST_EVERY_S = 0.5  # the launcher asks every second
#: What slots get to end.
_END_S = 10.0


class Slots:
    """The slots of a job, by the name that mpirun has for each, as for a host.

    Args:
        ticket: by which tasks and ranks connect to this process.
        answers: the attribute.
        folder: of this user alone.

    Attributes:
        ticket: the argument, a secret.
        folder: where the messages of ranks and what they return go to.
        call: of a function, which each slot gets before its first command; empty: none.
        answers: what answers further requests, by ``what`` these ask for.
        lost: names of those whose tasks have ended before the job.
    """

    def __init__(
        self, ticket: str, answers: dict[str, Callable[[dict[str, Any], HostConnection], object]], folder: Path
    ) -> None:
        self.ticket = ticket
        self.folder = folder
        self.call = b""
        self.answers = answers
        self._changed = threading.Condition()
        self._connections: dict[str, HostConnection] = {}
        self._statuses: dict[int, int] = {}
        self._have_call: set[str] = set()
        self._started = 0
        self._is_closed = False
        self.lost: list[str] = []

    def held(self) -> list[str]:
        """Return the names of the slots that are held, the first that came first."""
        with self._changed:
            return [*self._connections]

    def wait(self, names: Sequence[str] | int, limit_s: float, look: Callable[[], object]) -> None:
        """Wait for slots.

        Args:
            names: of the slots; or how many, whichever come.
            limit_s: for so many seconds.
            look: called from time to time; may raise why they will not come.

        Raises:
            ConfigError: some have not come.
        """
        count = names if isinstance(names, int) else len(names)

        def missing() -> list[str]:
            if isinstance(names, int):
                return ["another"] * (count - len(self._connections))
            return [name for name in names if name not in self._connections]

        deadline = time.monotonic() + limit_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not missing(), _LOOK_EVERY_S)
                late = missing()
            look()
            if not late:
                return
            if time.monotonic() > deadline:
                which = "" if isinstance(names, int) else f": {', '.join(late)}"
                raise ConfigError(
                    f"{len(late)} of {count} tasks have not started within {limit_s:g} s, as there was no room for "
                    f"them, or could not connect to this process{which}"
                )

    def start(self, host: str, command: str) -> int:
        """Run a command of a shell in a slot; return its status.

        Raises:
            CollectiveError: the task of that slot has ended.
        """
        with self._changed:
            self._started = number = self._started + 1
            connection = self._connections.get(host)
        if connection is not None:
            with suppress(OSError), connection.sending:
                if self.call and host not in self._have_call:
                    self._have_call.add(host)
                    connection.send_json([host_agent.CALL, ""])
                    connection.send_content(self.call)
                connection.send_json([host_agent.RUN, [number, command]])
        with self._changed:
            self._changed.wait_for(lambda: number in self._statuses or host not in self._connections)
            if number not in self._statuses and host in self.lost:
                raise CollectiveError("the task there has ended")
            return self._statuses.pop(number, agent.UNREACHABLE)

    def answer(self, request: Mapping[str, Any], connection: HostConnection) -> None:
        """Take what the agent of a slot says, until its connection ends."""
        name = request["name"]
        with self._changed:
            if self._is_closed or name in self._connections or name in self.lost:
                connection.send_json([host_agent.END, ""])  # an engine runs tasks again that have failed
                return
            self._connections[name] = connection
            self._changed.notify_all()
        try:
            hear(connection, self.folder, partial(self._take, name))
        finally:
            with self._changed:
                del self._connections[name]
                if not self._is_closed:
                    self.lost.append(name)
                self._changed.notify_all()

    def _take(self, name: str, what: str, value: Any) -> None:
        if what == "ended":
            number, status = value
            with self._changed:
                self._statuses[number] = status
                self._changed.notify_all()
        elif what in ("message", LIVES):
            pass_on(messages_in(str(self.folder)), what, value, name)

    def close(self) -> None:
        """Have all slots end, with all that runs in them, and wait until they have; not for what is lost."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                for connection in self._connections.values():
                    with suppress(OSError), connection.sending:
                        connection.send_json([host_agent.END, ""])
            self._changed.wait_for(lambda: not self._connections, _END_S)


@contextmanager
def listed(hosts: Callable[[], Mapping[str, int]], folder: Path) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Have a program print the slots by host, as they change in this context.

    Args:
        hosts: returns them.
        folder: for the program.

    Yields:
        The path of the program, and what has it print the slots of now.
    """
    ended = threading.Event()
    listing = folder / "hosts"
    writing = threading.Lock()

    def write() -> None:
        # An engine may not answer, as while its head starts again: the last list counts.
        with writing, suppress(Exception):
            coming = listing.with_suffix(".coming")
            coming.write_text("".join(f"{host}:{count}\n" for host, count in hosts().items()))
            coming.rename(listing)

    def go_on() -> None:
        while not ended.wait(_LIST_EVERY_S):
            write()

    write()
    program = folder / "discover"
    program.write_text(f"#!/bin/sh\nexec cat '{listing}'\n")
    program.chmod(0o700)
    thread = threading.Thread(target=go_on, name="ringreduce lists slots", daemon=True)
    thread.start()
    try:
        yield program, write
    finally:
        ended.set()
        thread.join()


@contextmanager
def slots(address: str) -> Iterator[Slots]:
    """Listen for slots, as long as this context lasts; at its end they end.

    Args:
        address: of this process, by which nodes reach it.

    Raises:
        ConfigError: this machine has no such address.
    """
    answers: dict[str, Callable[[dict[str, Any], HostConnection], object]] = {}
    try:
        with (
            private_folder() as folder,
            listening(address, lambda request, connection: answers[request["what"]](request, connection)) as ticket,
        ):
            made = Slots(ticket, answers, folder)
            answers[host_agent.AGENT] = made.answer
            try:
                yield made
            finally:
                made.close()
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}, where the engine says that this process is: {error}") from error


@contextmanager
def why_failed(look: Callable[[], object]) -> Iterator[None]:
    """Raise what a function raises, in place of an error of ranks, which does not say that tasks have ended."""
    try:
        yield
    except CollectiveError:
        look()
        raise


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches a host.

    Raises:
        ConfigError: there is none.
    """
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # which sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"this machine cannot reach {host}: {error}") from None


# ---- in a task, on a node ----


def hold(ticket: str, name: str, give: Callable[[socket.socket], object] = lambda connection: None) -> None:
    """Hold a slot until its job ends.

    Args:
        ticket: as `slots` returned it.
        name: of the slot.
        give: called with a connection to the rank there, on a thread of its own, when it asks for data.

    Raises:
        ChildProcessError: somebody has killed the process that runs mpirun's daemon.
        ConnectionError: that could not connect to the driver, or the connection was lost.
    """
    folder = tempfile.mkdtemp(prefix="ringreduce-")  # which the agent removes, as this process may be killed
    line, texts = agent_line(sys.executable)
    request: dict[str, Any] = {
        "folder": folder,
        "results": f"{folder}/{_RESULTS}",
        "token": "",
        "files": [],
        "copy": None,
    }
    environ = {**os.environ, **worker_environment(name), _FOLDER: folder, MESSAGES_HERE: folder, TICKET: ticket}
    try:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/{_DATA}")
        server.listen()
        with (
            served(server, give),
            subprocess.Popen(line, stdin=subprocess.PIPE, env=environ, start_new_session=True) as process,
        ):
            assert process.stdin is not None
            process.stdin.write(texts + json.dumps({**request, "ticket": ticket, "name": name}).encode() + b"\n")
            process.stdin.flush()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # if the agent was killed
    # The task fails, for the engine to run it again.
    if process.returncode < 0:
        raise ChildProcessError(f"the process that runs mpirun's daemon was ended by signal {-process.returncode}")
    if process.returncode:
        raise ConnectionError(
            f"no connection to the driver at {ticket.partition('|')[0]}: there never was one, or it was lost"
        )


# ---- in a rank ----


def connection_to_task() -> socket.socket:
    """Return a connection to the task that holds the slot of this rank."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"{os.environ[_FOLDER]}/{_DATA}")
    return connection


def folder_of_call() -> Path:
    """Return the folder with the call that this rank is to make, for what it returns."""
    return Path(os.environ[_FOLDER], _RESULTS)
