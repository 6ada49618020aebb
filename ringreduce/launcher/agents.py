"""The agents of a job: one on each other host that the launcher reaches; see `host_agent`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import MESSAGES_HERE, messages_in
from ringreduce.launcher import host_agent
from ringreduce.launcher.agent_server import private_folder
from ringreduce.launcher.cargo import base_python
from ringreduce.launcher.hosts import UNNAMED, is_here
from ringreduce.launcher.marks import HEARTBEAT, Mark, RankMessages
from ringreduce.launcher.reach import (
    MARK,
    Errand,
    HostProcess,
    HostRefusedError,
    close_inputs,
    command_on,
    end_all,
    let_open,
)
from ringreduce.launcher.start import Start
from ringreduce.launcher.stderr import say

#: A host that does not answer for so long is lost, or cannot be reached; mpirun then says why.
_ANSWER_S = 12.0
#: How long a host may take to pass on the last messages of its ranks, and how long it may have said nothing before.
_PASS_ON_S = 5.0
_SILENT_S = 3.0


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
        if self.reader is not None:
            self.reader.join(_PASS_ON_S)
        self.process.has_ended(_PASS_ON_S)


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
        python = base_python() if start.spec.ship else sys.executable
        self._errand = Errand("ringreduce run", python, "the Python of the agent", host_agent)
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
            with suppress(ConfigError):
                begun.append(self._errand.begin(name, {"folder": str(self._messages.folder)}, self._start))
        deadline = time.monotonic() + _ANSWER_S
        for process in begun:
            try:
                process.answer(max(deadline - time.monotonic(), 0.1))
            except ConfigError as error:  # where a host is not reached, mpirun says why
                if isinstance(error, HostRefusedError):
                    say(f"{error}; until then nothing is heard of commits and deaths there")
                process.kill()
                process.has_ended(_ANSWER_S)
                continue
            agent = self._agents[process.name] = _Agent(process)
            name = f"ringreduce hears {process.name}"
            agent.reader = threading.Thread(target=self._hear, args=(agent,), name=name, daemon=True)
            agent.reader.start()
        return self._agents.keys() >= {*names}

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
        begin = MARK.encode()
        rest = agent.process.rest
        output = agent.process.output.fileno()
        with suppress(OSError, ValueError):
            while piece := os.read(output, 1 << 16):
                agent.heard = time.monotonic()
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    if line.startswith(begin):
                        self._take(agent, *json.loads(line[len(begin) :]))
        with agent.changed:
            agent.passed_on = math.inf
            agent.changed.notify_all()

    def _take(self, agent: _Agent, what: str, value: str) -> None:
        if what == "message":
            os.write(self._fifo, f"{value}\n".encode())
        elif what == "lives":
            os.write(self._fifo, f"{HEARTBEAT.format(host=agent.process.name)}\n".encode())
        elif what == "passed on":
            with agent.changed:
                agent.passed_on = int(value)
                agent.changed.notify_all()

    def close(self) -> None:
        """End all agents; nothing is heard any more."""
        processes = [agent.process for agent in self._agents.values()]
        close_inputs(processes, self._start)
        for agent in self._agents.values():
            if agent.reader is not None:
                agent.reader.join(_PASS_ON_S)
        end_all(processes, self._start)
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
