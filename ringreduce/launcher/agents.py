"""The agents of a job: one on each other host that the launcher reaches; see `host_agent`.

They bring the files of ``--ship`` to their hosts before the job begins. Where hosts do not share the folder of a call
of `ringreduce.run`, they bring the call there, and back what ranks leave, as soon as it is whole: the folder here looks
as if all ranks saw it.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import MESSAGES_HERE, messages_in
from ringreduce.common.networks import FILES, own_text, own_to_each, read_interfaces
from ringreduce.launcher import host_agent
from ringreduce.launcher.agent_server import private_folder
from ringreduce.launcher.hosts import UNNAMED, is_here
from ringreduce.launcher.marks import Mark, RankMessages, pass_on
from ringreduce.launcher.reach import (
    END_S,
    PIECE_NBYTES,
    STALL_S,
    Agent,
    agent_line,
    command_on,
    let_open,
    others,
    reaches,
)
from ringreduce.launcher.schedulers import slurm_job, slurm_step
from ringreduce.launcher.ship import Shipment, base_python
from ringreduce.launcher.start import Start
from ringreduce.launcher.stderr import say

#: A host that does not answer for so long is lost, or cannot be reached; mpirun then says why.
_ANSWER_S = 12.0
#: The same of one that is to have a call or a copy: another job may copy the same.
_WANTED_S = 120.0
#: How long a host may take to pass on the last messages of its ranks, and how long it may have said nothing before.
_PASS_ON_S = 5.0
_SILENT_S = 3.0
#: What Open MPI leaves out anyway, unless it is told something else.
_ANYWAY = "127.0.0.1/8,sppp"
#: Shows a bar with a text; within it, the function is called with the bytes that were copied so far, and with all.
Progress = Callable[[str], AbstractContextManager[Callable[[int, int], object]]]


class Agents:
    """Starts agents on the hosts of jobs, and writes what ranks there say to the FIFO of this host.

    Args:
        start: of the jobs.
        messages: the FIFO; on other hosts the folder has the same path.
        by_engine: whether an engine passes messages on, from the hosts where it runs mpirun's daemons.
        progress: shows how much is copied.
    """

    def __init__(self, start: Start, messages: RankMessages, *, by_engine: bool, progress: Progress) -> None:
        self._start = start
        self._messages = messages
        self._hosts: list[str] = []
        self._by_engine = by_engine
        self._progress = progress
        self._shipment: Shipment | None = None
        results = start.spec.results if reaches(start) else None
        self._results = None if results is None else Path(results)
        self._request: dict[str, Any] = {"folder": str(messages.folder), "results": results, "files": FILES}
        self._name = "ringreduce run"
        self._python = sys.executable
        self._python_is = "the Python of the agent"
        if self._results is not None:
            self._request["token"] = f"shared-{secrets.token_hex(8)}"
            (self._results / self._request["token"]).touch()
            self._name = "ringreduce.run"
            self._python = start.spec.program[0]
            self._python_is = "the Python that ranks need"
        self._has_to_come = self._results is not None  # an agent that is asked for now; else mpirun says why not
        self._changed = threading.Condition()
        self._agents: dict[str, Agent] = {}
        self._asked: set[str] = set()  # hosts that were asked before the first job
        self._hanging: set[str] = set()
        self._dropped: set[str] = set()  # hosts whose agents were lost
        self._fifo = messages_in(str(messages.folder))
        self._number = 0

    def prepare(self) -> Start:
        """Give the hosts that a job may use at first what they are to have; return what starts the job then.

        Open MPI leaves out interfaces whose address two hosts share, unless users choose networks.

        Raises:
            ConfigError: a host cannot take a copy, in whatever way; nothing is left then.
        """
        start = self._start
        spec = start.spec
        names = others(start)
        is_open_mpi = start.mpirun.kind == "Open MPI"
        if self._by_engine:
            return start
        if spec.ship and names:
            if not is_open_mpi or start.mpirun.major < 5:
                raise ConfigError(f"--ship takes Open MPI 5; {start.mpirun.path} says {start.mpirun.said!r}")
            self._shipment = Shipment(spec)
            self._name = "--ship"
            self._python = base_python()
            self._python_is = "the Python that this environment was made by"
            self._has_to_come = True
            start = self._shipment.start(start)
        # Slurm signals to the steps of a job, and not to its batch script: a job on one host has no step of its own.
        step = slurm_step() if spec.requeue and slurm_job(os.environ) else []
        if step or self._shipment is not None:
            # This host comes first: others may be this one by another name, and have the files then.
            self._reach([os.uname().nodename], before=step)
        chosen = spec.interfaces or any("_if_" in word for word in (*os.environ, *spec.more))
        looks = is_open_mpi and not chosen and reaches(start)
        if not names or not (self._shipment is not None or looks):
            return start
        self._reach(names)
        self._has_to_come = self._results is not None
        self._asked = {*names}
        texts = [own_text(), *(self._agents[name].value["texts"] for name in names if name in self._agents)]
        own = ",".join(own_to_each([read_interfaces(text) for text in texts]))
        if not own or not looks:
            return start
        daemons = "PRTE_MCA_prte_if_exclude" if start.mpirun.major >= 5 else "OMPI_MCA_oob_tcp_if_exclude"
        return replace(start, networks={"OMPI_MCA_btl_tcp_if_exclude": f"{_ANYWAY},{own}", daemons: own})

    def begin(self, hosts: Iterable[str], variables: dict[str, str]) -> bool:
        """Start an agent on each host that has none; see `Hearing`."""
        self._messages.begin(hosts, variables)
        self._hosts = [*hosts]
        if self._by_engine:
            return True
        names = [host for host in self._hosts if host != UNNAMED and not is_here(host, self._start.here)]
        self._pass_on(names)
        self._hanging &= self._asked
        self._reach([name for name in names if name not in self._asked])
        self._asked = set()
        # No rank comes to a host whose logins hang, so nothing of it is missed.
        return self._agents.keys() | self._hanging >= {*names}

    # ---- beginning agents ----

    def _reach(self, names: Iterable[str], *, before: Sequence[str] | None = None) -> None:
        """Start agents on those of some hosts that have none.

        Args:
            names: of the hosts.
            before: words that start a program on this host, which is the only one; it has all files already.

        Raises:
            ConfigError: one cannot be started, and its host is to have a call or a copy.
        """
        missing = [name for name in names if name not in self._agents]
        let_open(len(missing))
        begun = []
        for name in missing:
            try:
                begun.append(self._begun(name, before))
            except ConfigError:
                if self._has_to_come:
                    raise
        self._await(begun)
        if wanting := [agent for agent in begun if agent.answer == "wants"]:
            self._copy(wanting)
        has_copy = [agent.name for agent in begun if agent not in wanting and self._shipment and before is None]
        if has_copy:
            say(f"--ship: {' and '.join(has_copy)} {'has' if len(has_copy) == 1 else 'have'} this version already")
        for agent in begun:
            self._require(agent)
        calls = [agent for agent in begun if agent.name in self._agents and not agent.value["has call"]]
        if calls and self._results is not None:
            self._send(calls, json.dumps([host_agent.CALL, ""]).encode())
            with (self._results / host_agent.CALL).open("rb") as file:
                while piece := file.read(PIECE_NBYTES):
                    self._send(calls, piece)
            self._send(calls, b"")
            number = self._ask_to_pass_on(calls)
            for agent in calls:  # it has the call then
                self._wait(partial(agent.has_passed_on, number), _WANTED_S)

    def _begun(self, name: str, before: Sequence[str] | None) -> Agent:
        line, texts = agent_line(self._python)
        there = command_on(name, line, self._start) if before is None else [*before, *line]
        copy = None
        if self._shipment is not None:
            copy = self._shipment.request(leads_here=before is not None, keep=self._start.spec.keep)
        request = json.dumps({**self._request, "copy": copy})
        try:
            agent = self._agents[name] = Agent(
                name,
                there,
                texts + request.encode() + b"\n",
                changed=self._changed,
                take=lambda what, value: pass_on(self._fifo, what, value, name),
                folder=self._results or self._messages.folder,
                lost=partial(self._lose, name),
            )
        except OSError as error:
            raise ConfigError(f"{self._name}: cannot run {there[0]}: {error.strerror}") from None
        return agent

    def _await(self, agents: Sequence[Agent]) -> None:
        limit_s = _WANTED_S if self._has_to_come else _ANSWER_S
        self._wait(lambda: all(agent.answer for agent in agents), limit_s)

    def _wait(self, is_so: Callable[[], bool], limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(is_so, max(limit_s, 0.0))

    def _require(self, agent: Agent) -> None:
        """Do without an agent that is not ready.

        Raises:
            ConfigError: its host is to have a call or a copy.
        """
        if agent.answer == "ready":
            return
        why = agent.why_not(self._python, self._python_is)
        if agent.hangs:
            self._hanging.add(agent.name)
        agent.kill()
        agent.has_ended(_ANSWER_S)
        del self._agents[agent.name]
        if self._has_to_come:
            raise ConfigError(f"{self._name}: {why}")
        if agent.answer == "failed":  # where a host is not reached, mpirun says why
            say(f"{self._name}: {why}; until then nothing is heard of commits and deaths there")

    def _send(self, agents: Sequence[Agent], frame: bytes) -> None:
        """Send a frame to several agents.

        Raises:
            ConfigError: one has ended, or takes nothing for too long.
        """
        for agent in agents:
            try:
                agent.connection.send(frame)
            except BlockingIOError:
                raise ConfigError(f"{self._name}: {agent.name} has taken nothing for {STALL_S} s") from None
            except OSError:
                agent.drain(END_S)  # it says why
                self._require(agent)
                raise

    def _copy(self, agents: Sequence[Agent]) -> None:
        """Send the files to the hosts that do not have them."""
        assert self._shipment is not None, "nobody else wants anything"
        names = " and ".join(agent.name for agent in agents)
        total_nbytes = self._shipment.nbytes
        sent_nbytes = 0
        began = time.monotonic()
        with self._progress(f"copying to {names}") as show:

            def write(piece: bytes) -> None:
                nonlocal sent_nbytes
                self._send(agents, piece)
                sent_nbytes += len(piece)
                show(min(sent_nbytes, total_nbytes), total_nbytes)

            for agent in agents:
                agent.answer = ""
            self._shipment.write(write)
            self._send(agents, b"")
            self._await(agents)
        if all(agent.answer == "ready" for agent in agents):
            say(f"--ship: {total_nbytes / 1e6:.0f} MB copied to {names} in {time.monotonic() - began:.1f} s")

    # ---- messages ----

    def fileno(self) -> int:
        """Return the descriptor of the FIFO, for `select`."""
        return self._messages.fileno()

    def read(self) -> list[Mark]:
        """Return the messages that have come."""
        return self._messages.read()

    def last(self) -> list[Mark]:
        """Wait for what ranks of other hosts have said, for some seconds; return the last messages."""
        if self._by_engine:
            # An engine passes on the messages of a host before it says that a command has ended there.
            limit = ["timeout", "--kill-after=1", f"{_PASS_ON_S:g}"]
            lines = [[*limit, *command_on(host, ["true"], self._start)] for host in self._hosts if host != UNNAMED]
            nowhere = subprocess.DEVNULL
            for process in [subprocess.Popen(line, stdout=nowhere, stderr=nowhere) for line in lines]:
                process.wait()
        else:
            self._pass_on(self._hosts)
        return self._messages.read()

    def _ask_to_pass_on(self, agents: Sequence[Agent]) -> int:
        self._number += 1
        for agent in agents:
            with suppress(OSError):
                agent.connection.send_json(["pass on", self._number])
        return self._number

    def _pass_on(self, names: Iterable[str]) -> None:
        asked = [self._agents[name] for name in names if name in self._agents and not self._start.has_lost(name)]
        number = self._ask_to_pass_on(asked)
        deadline = time.monotonic() + _PASS_ON_S
        for agent in asked:
            limit = min(deadline, agent.connection.heard + _SILENT_S)  # of a host that is lost nothing comes any more
            self._wait(partial(agent.has_passed_on, number), limit - time.monotonic())
            if not number <= agent.passed_on < math.inf:
                self._dropped.add(agent.name)
                del self._agents[agent.name]
                agent.kill()
                agent.drain(_PASS_ON_S)
                agent.has_ended(_PASS_ON_S)

    def _lose(self, name: str, error: Exception) -> None:
        if self._results is not None and not self._start.has_lost(name):
            say(f"{self._name}: what ranks on {name} return is lost: {error}")

    def close(self) -> None:
        """End all agents, and take what they still send; nothing is heard any more."""
        for name, agent in self._agents.items():
            if self._start.has_lost(name):
                agent.kill()
            agent.close_input()
        for agent in self._agents.values():
            agent.drain(_PASS_ON_S if self._results is None else STALL_S)
        deadline = time.monotonic() + END_S
        ended = {name: agent.has_ended(max(deadline - time.monotonic(), 0.1)) for name, agent in self._agents.items()}
        hosts = sorted(self._dropped | ended.keys())
        late = [name for name in hosts if not ended.get(name, False) or self._start.has_lost(name)]
        left = self._results if self._shipment is None else os.path.dirname(self._shipment.store)
        if late and left:
            say(f"{self._name}: {' and '.join(late)} may still have {left}")


@contextmanager
def with_agents(start: Start, progress: Progress) -> Iterator[tuple[Start, Agents]]:
    """Receive the messages of ranks as long as this context lasts, and have on their hosts what they need.

    Args:
        start: of the jobs.
        progress: shows how much is copied.

    Yields:
        What starts the jobs then, and what hears of their ranks.

    Raises:
        ConfigError: a host cannot take a copy, in whatever way; nothing is left then.
    """
    engines = os.environ.pop(MESSAGES_HERE, None)  # nor do other jobs that a rank starts send messages there
    with ExitStack() as stack:
        folder = stack.enter_context(private_folder()) if engines is None else Path(engines)
        messages = RankMessages(folder)
        stack.callback(messages.close)
        agents = Agents(start, messages, by_engine=engines is not None, progress=progress)
        stack.callback(agents.close)
        yield agents.prepare(), agents
