"""Slots that tasks of an engine hold on its nodes, for the daemons of mpirun, and the data that tasks give to ranks.

A task calls `hold`, which starts a process of `slot_process` beside it. That connects to the driver: its `Slots` send
it the commands that mpirun's agent asks for. A rank gets its data over `connection_to_task`.
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
from pathlib import Path
from typing import Any

from ringreduce.common.errors import CollectiveError, ConfigError
from ringreduce.common.launch import MESSAGES_HERE, messages_in
from ringreduce.engines import slot_process
from ringreduce.launcher import agent
from ringreduce.launcher import connection as connection_module
from ringreduce.launcher.agent_server import worker_environment
from ringreduce.launcher.call_server import VARIABLE
from ringreduce.launcher.connection import HostConnection, listening, served

_LOOK_EVERY_S = 0.2
_LIST_EVERY_S = 0.5  # the launcher asks every second
#: What slots get to end.
_END_S = 10.0


class Slots:
    """The slots of a job, by the name that mpirun has for each, as for a host.

    Args:
        ticket: by which tasks and ranks connect to this process.
        answers: the attribute.

    Attributes:
        ticket: the argument, a secret.
        answers: what answers further requests, by ``what`` these ask for.
        lost: names of those whose tasks have ended before the job.
    """

    def __init__(self, ticket: str, answers: dict[str, Callable[[dict[str, Any], HostConnection], object]]) -> None:
        self.ticket = ticket
        self.answers = answers
        self._changed = threading.Condition()
        self._connections: dict[str, HostConnection] = {}
        self._statuses: dict[int, int] = {}
        self._started = 0
        self._is_closed = False
        self._messages = ""
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

    def has(self, name: str) -> bool:
        """Return whether the slot of this name is held."""
        with self._changed:
            return name in self._connections

    def start(self, host: str, command: str) -> int:
        """Run a command of a shell in a slot; return its status.

        Raises:
            CollectiveError: the task of that slot has ended.
        """
        with self._changed:
            self._started = number = self._started + 1
            if host in self._connections:
                with suppress(OSError):
                    self._connections[host].send_json([number, command])
            self._changed.wait_for(lambda: number in self._statuses or host not in self._connections)
            if number not in self._statuses and host in self.lost:
                raise CollectiveError("the task there has ended")
            return self._statuses.pop(number, agent.UNREACHABLE)

    def pass_messages_to(self, folder: Path) -> None:
        """Write what ranks say to the FIFO of `ringreduce run` in a folder, from now on."""
        self._messages = messages_in(str(folder))

    def _pass_on(self, message: str) -> None:
        with suppress(OSError):  # The job has ended.
            fifo = os.open(self._messages, os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.set_blocking(fifo, True)
                os.write(fifo, f"{message}\n".encode())
            finally:
                os.close(fifo)

    def answer(self, request: Mapping[str, Any], connection: HostConnection) -> None:
        """Take what a slot says, until its connection ends."""
        name = request["name"]
        with self._changed:
            if self._is_closed or name in self._connections or name in self.lost:
                connection.send_json(slot_process.END)  # an engine runs tasks again that have failed
                return
            self._connections[name] = connection
            self._changed.notify_all()
        try:
            while True:
                number, status = connection.receive_json()
                if number == slot_process.MESSAGE:
                    self._pass_on(status)
                    continue
                with self._changed:
                    self._statuses[number] = status
                    self._changed.notify_all()
        finally:
            with self._changed:
                del self._connections[name]
                if not self._is_closed:
                    self.lost.append(name)
                self._changed.notify_all()

    def close(self) -> None:
        """Have all slots end, with all that runs in them, and wait until they have; not for what is lost."""
        with self._changed:
            if not self._is_closed:
                self._is_closed = True
                for connection in self._connections.values():
                    with suppress(OSError):
                        connection.send_json(slot_process.END)
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
        with listening(address, lambda request, connection: answers[request["what"]](request, connection)) as ticket:
            made = Slots(ticket, answers)
            answers[slot_process.SLOT] = made.answer
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
    folder = tempfile.mkdtemp(prefix="ringreduce-")  # which the process removes, as this one may be killed
    try:
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"{folder}/{slot_process.DATA}")
        server.listen()
        with (
            served(server, give),
            subprocess.Popen(
                [sys.executable, "-I", "-S", slot_process.__file__],
                stdin=subprocess.PIPE,
                env={
                    **os.environ,
                    **worker_environment(name),
                    slot_process.FOLDER: folder,
                    MESSAGES_HERE: folder,
                    VARIABLE: ticket,
                },
                start_new_session=True,
            ) as process,
        ):
            assert process.stdin is not None
            process.stdin.write(json.dumps([ticket, name, connection_module.__file__]).encode() + b"\n")
            process.stdin.flush()
            process.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # if the process was killed
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
    connection.connect(f"{os.environ[slot_process.FOLDER]}/{slot_process.DATA}")
    return connection
