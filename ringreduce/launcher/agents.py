"""The agents of a job: one on each other host that the launcher reaches; see `host_agent`.

Where hosts do not share the folder of a call of `ringreduce.run`, they bring the call there, and back what ranks leave,
as soon as it is whole: the folder here looks as if all ranks saw it.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import MESSAGES_HERE, messages_in
from ringreduce.launcher import host_agent
from ringreduce.launcher.agent_server import private_folder
from ringreduce.launcher.cargo import base_python
from ringreduce.launcher.hosts import UNNAMED, is_here
from ringreduce.launcher.marks import HEARTBEAT, Mark, RankMessages
from ringreduce.launcher.reach import (
    MARK,
    PIECE_NBYTES,
    Errand,
    HostProcess,
    HostRefusedError,
    ToAll,
    close_inputs,
    command_on,
    end_all,
    let_open,
    reaches,
)
from ringreduce.launcher.start import Start
from ringreduce.launcher.stderr import say

#: A host that does not answer for so long is lost, or cannot be reached; mpirun then says why.
_ANSWER_S = 12.0
#: How long a host may take to pass on the last messages of its ranks, and how long it may have said nothing before.
_PASS_ON_S = 5.0
_SILENT_S = 3.0
#: A host that sends results may say nothing for so long at the end.
_STALL_S = 60.0
#: How long a host may take to answer that is to have the call of `ringreduce.run`.
_CALL_S = 120.0
_RESULT = re.compile(rf"[0-9]{{1,9}}-[0-9]{{1,9}}({'|'.join(map(re.escape, host_agent.DONE))})")


class Incoming:
    """What an agent writes: lines, and files, each after a line that names it.

    Args:
        folder: where files go to.
        take: called with what lines say that name no file.
    """

    def __init__(self, folder: Path, take: Callable[[str, str], object]) -> None:
        self._folder = folder
        self._take = take
        self._line = b""
        self._path = folder
        self._file: IO[bytes] | None = None
        self._left_nbytes = 0

    def feed(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            OSError: they cannot be written.
            ValueError: a file has a name that no rank gives.
        """
        while piece:
            if self._file is not None:
                self._file.write(piece[: self._left_nbytes])
                piece, self._left_nbytes = piece[self._left_nbytes :], max(self._left_nbytes - len(piece), 0)
            else:
                line, end, piece = piece.partition(b"\n")
                self._line += line
                if not end:
                    return
                self._end_line()
                self._line = b""
            if self._file is not None and not self._left_nbytes:
                self.close()
                self._path.with_suffix(".coming").rename(self._path)

    def _end_line(self) -> None:
        if not self._line.startswith(MARK.encode()):  # what shells of the host write
            return
        what, value = json.loads(self._line[len(MARK) :])
        if what != "file":
            self._take(what, value)
            return
        name, nbytes = value
        if not _RESULT.fullmatch(name):
            raise ValueError(f"{name!r} is no result")
        self._path = self._folder / name
        self._file = self._path.with_suffix(".coming").open("xb")
        self._left_nbytes = nbytes

    def close(self) -> None:
        """Close the file that is coming, if one is."""
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass
class _Agent:
    """An agent that has answered, and how far its messages have come.

    Attributes:
        process: the connection to it.
        passed_on: the last request up to which all messages have come; infinite: it has ended.
        heard: when it was heard last.
    """

    process: HostProcess
    changed: threading.Condition = field(default_factory=threading.Condition)
    passed_on: float = 0
    heard: float = field(default_factory=time.monotonic)
    reader: threading.Thread | None = None

    def has_passed_on(self, number: int) -> Callable[[], bool]:
        """Return a function that returns whether no message from before a request is still to come."""
        return lambda: self.passed_on >= number

    def end(self) -> None:
        """End the connection at once, as to a host that is lost."""
        self.process.kill()
        self.drain(_PASS_ON_S)
        self.process.has_ended(_PASS_ON_S)

    def drain(self, stall_s: float) -> None:
        """Wait until all has come that it writes before its end, or nothing for too long."""
        self.heard = time.monotonic()
        while self.reader is not None and self.reader.is_alive() and time.monotonic() < self.heard + stall_s:
            self.reader.join(1.0)


class Agents:
    """Starts agents on the hosts of jobs, and writes what ranks there say to the FIFO of this host.

    Args:
        start: of the jobs.
        messages: the FIFO; on other hosts the folder has the same path.
        by_engine: whether an engine passes messages on, from the hosts where it runs mpirun's daemons.
    """

    def __init__(self, start: Start, messages: RankMessages, *, by_engine: bool) -> None:
        self._start = start
        self._messages = messages
        self._hosts: list[str] = []
        self._by_engine = by_engine
        spec = start.spec
        self._request: dict[str, Any] = {"folder": str(messages.folder), "results": spec.results}
        self._results: Path | None = None
        if spec.results is None or not reaches(start):
            self._request["results"] = None
            python = base_python() if spec.ship else sys.executable
            self._errand = Errand("ringreduce run", python, "the Python of the agent", host_agent)
        else:
            self._results = Path(spec.results)
            token = f"shared-{secrets.token_hex(8)}"
            (self._results / token).touch()
            self._request |= {"token": token, "nbytes": (self._results / host_agent.CALL).stat().st_size}
            python = base_python() if spec.ship else spec.program[0]
            self._errand = Errand("ringreduce.run", python, "the Python that ranks need", host_agent)
        self._agents: dict[str, _Agent] = {}
        self._fifo = os.open(messages_in(str(messages.folder)), os.O_WRONLY | os.O_CLOEXEC)
        self._asked = 0

    def begin(self, hosts: Iterable[str], variables: dict[str, str]) -> bool:
        """Start an agent on each host that has none; see `Hearing`."""
        self._messages.begin(hosts, variables)
        self._hosts = [*hosts]
        if self._by_engine:
            return True
        names = [host for host in self._hosts if host != UNNAMED and not is_here(host, self._start.here)]
        self._pass_on(names)
        missing = [name for name in names if name not in self._agents]
        let_open(len(missing))
        begun = []
        for name in missing:
            with suppress(ConfigError) if self._results is None else nullcontext():
                begun.append(self._errand.begin(name, self._request, self._start))
        deadline = time.monotonic() + (_ANSWER_S if self._results is None else _CALL_S)
        answers = {process: self._answer_of(process, deadline) for process in begun}
        wanting = [process for process, answer in answers.items() if answer == "wants"]
        if wanting and self._results is not None:
            stream = ToAll(self._errand, wanting)
            with (self._results / host_agent.CALL).open("rb") as file:
                while piece := file.read(PIECE_NBYTES):
                    stream.write(piece)
            stream.flush()
            for process in wanting:
                self._answer_of(process, deadline)
        # No rank comes to a host whose logins hang, so nothing of it is missed.
        hanging = {process.name for process, answer in answers.items() if answer == "hangs"}
        return self._agents.keys() | hanging >= {*names}

    def _answer_of(self, process: HostProcess, deadline: float) -> str:
        """Return what a new agent answers; hear it from then on if it is ready.

        ``"hangs"``: it does not answer; empty: it cannot.

        Raises:
            ConfigError: it does not answer, and its host is to have a call.
        """
        try:
            answer = process.answer(max(deadline - time.monotonic(), 0.1))
        except ConfigError as error:
            answer = "hangs" if process.hangs else ""
            process.kill()
            process.has_ended(_ANSWER_S)
            if self._results is not None:
                raise
            if isinstance(error, HostRefusedError):  # where a host is not reached, mpirun says why
                say(f"{error}; until then nothing is heard of commits and deaths there")
                return ""
            return answer
        if answer == "ready":
            agent = self._agents[process.name] = _Agent(process)
            name = f"ringreduce hears {process.name}"
            agent.reader = threading.Thread(target=self._hear, args=(agent,), name=name, daemon=True)
            agent.reader.start()
        return answer

    def fileno(self) -> int:
        """Return the descriptor of the FIFO, for `select`."""
        return self._messages.fileno()

    def read(self) -> list[Mark]:
        """Return the messages that have come."""
        return self._messages.read()

    def last(self) -> list[Mark]:
        """Wait for what ranks of other hosts have said, for some seconds; return the last messages."""
        if self._by_engine:
            self._run_on_all([host for host in self._hosts if host != UNNAMED])
        else:
            self._pass_on(self._hosts)
        return self._messages.read()

    def _run_on_all(self, hosts: Iterable[str]) -> None:
        # An engine passes on the messages of a host before it says that a command has ended there.
        running = [
            subprocess.Popen(
                command_on(host, ["true"], self._start), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for host in hosts
        ]
        deadline = time.monotonic() + _PASS_ON_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
            process.kill()
            process.wait()

    def _pass_on(self, names: Iterable[str]) -> None:
        self._asked = number = self._asked + 1
        asked = {name: self._agents[name] for name in names if name in self._agents and not self._start.has_lost(name)}
        for agent in asked.values():
            with suppress(OSError):
                agent.process.input.write(f"{number}\n".encode())
        deadline = time.monotonic() + _PASS_ON_S
        for name, agent in asked.items():
            with agent.changed:
                limit = min(deadline, agent.heard + _SILENT_S)  # of a host that is lost nothing comes any more
                agent.changed.wait_for(agent.has_passed_on(number), max(limit - time.monotonic(), 0.0))
            if not number <= agent.passed_on < math.inf:
                self._agents.pop(name).end()

    def _hear(self, agent: _Agent) -> None:
        """Take what an agent writes, until it ends."""
        incoming = Incoming(self._results or self._messages.folder, partial(self._take, agent))
        piece = agent.process.rest
        try:
            incoming.feed(piece)
            while piece := os.read(agent.process.output.fileno(), PIECE_NBYTES):
                agent.heard = time.monotonic()
                incoming.feed(piece)
        except (OSError, ValueError) as error:
            if self._results is not None and not self._start.has_lost(agent.process.name):
                say(f"{self._errand.name}: what ranks on {agent.process.name} return is lost: {error}")
        incoming.close()
        with agent.changed:
            agent.passed_on = math.inf
            agent.changed.notify_all()

    def _take(self, agent: _Agent, what: str, value: str) -> None:
        if what == "message":
            os.write(self._fifo, f"{value}\n".encode())
        elif what == "lives" and select.select([], [self._fifo], [], 0)[1]:  # nobody reads while no mpirun runs
            os.write(self._fifo, f"{HEARTBEAT.format(host=agent.process.name)}\n".encode())
        elif what == "passed on":
            with agent.changed:
                agent.passed_on = int(value)
                agent.changed.notify_all()

    def close(self) -> None:
        """End all agents, and take what they still send; nothing is heard any more."""
        processes = [agent.process for agent in self._agents.values()]
        close_inputs(processes, self._start)
        for agent in self._agents.values():
            agent.drain(_PASS_ON_S if self._results is None else _STALL_S)
        late = end_all(processes, self._start)
        if late and self._results is not None:
            say(f"{self._errand.name}: {' and '.join(late)} may still have {self._results}")
        os.close(self._fifo)


@contextmanager
def with_agents(start: Start) -> Iterator[Agents]:
    """Receive the messages of ranks as long as this context lasts."""
    engines = os.environ.pop(MESSAGES_HERE, None)  # nor do other jobs that a rank starts send messages there
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder()) if engines is None else Path(engines)
        messages = RankMessages(folder)
        stack.callback(messages.close)
        agents = Agents(start, messages, by_engine=engines is not None)
        stack.callback(agents.close)
        yield agents
