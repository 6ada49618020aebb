"""Which hosts are lost, as they are silent or mpirun does not reach them, and which of these answer again.

A host that loses its power, its network or its kernel sends nothing, so that nothing else says so: TCP notices when it
has sent something, and gives up after a quarter of an hour. So the agent of each host sends a heartbeat every second.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial

from ringreduce.common.errors import name_ranks
from ringreduce.common.processes import end_with_parent
from ringreduce.launcher import failures
from ringreduce.launcher.hosts import UNNAMED, Hosts, fill, is_here
from ringreduce.launcher.marks import COME, DIED, DIED_UNSAID, ENDED_WELL, LIVES, NO_PACKAGE, STOPPED, WARNED, Mark
from ringreduce.launcher.start import Start
from ringreduce.launcher.stderr import say

_LOOK_EVERY_S = 1.0
_ASK_EVERY_S = 5.0
_ANSWER_S = 30.0  # that a host has to answer: a login may hang
LOGIN_S = 10.0  # the same where a job waits for it
_CONNECT_S = 15.0  # that a daemon has to connect to mpirun, before it is asked for whether its host can
#: Where mpirun waits for its daemons: in the command line of each; see PRRTE's ``prte_hnp_uri``.
_AWAITS = re.compile(r"tcp://([0-9.,]+):([0-9]+):")
#: On another host: ends with this status if no address of this one lets it connect to a port.
_NO_WAY = 9
_CONNECTS = f"""
import socket, sys
port, *addresses = sys.argv[1:]
for each in addresses:
    try:
        sys.exit(socket.create_connection((each, int(port)), 6 / len(addresses)).close())
    except OSError:
        pass
sys.exit({_NO_WAY})
"""


class Losses:
    """Notices hosts that are lost, and those that answer again.

    Silence is counted in looks, not in time: a launcher that was stopped could not hear, and loses no host. Where no
    rank runs on this host and all hosts are silent, it is this host that hears nothing, and no host is lost.

    Args:
        start: of the jobs, whose mpirun reaches hosts in the same manner.
        clock: returns seconds.

    Attributes:
        ranks: number of ranks of the job by host.
        places: the hosts of ranks, where there may be several.
        without_package: hosts that do not have ringreduce in the folder where this one has it.
    """

    def __init__(self, start: Start, clock: Callable[[], float]) -> None:
        self._start = start
        self._clock = clock
        self._looks = round(start.spec.host_timeout_s / _LOOK_EVERY_S)
        self._has_said = False
        self._asked: dict[str, subprocess.Popen[bytes]] = {}
        self._asked_at = -math.inf
        self._checked: dict[str, subprocess.Popen[bytes]] = {}
        self.begin({}, hears_all=False)

    def begin(self, ranks: Mapping[str, int], *, hears_all: bool) -> None:
        """A job begins, with so many ranks by host, of which nothing was heard yet.

        Args:
            ranks: by host.
            hears_all: whether all that ranks of other hosts say comes here, and each agent was started; if not, the
                silence of a host does not count.
        """
        spec = self._start.spec
        hears = self._start.is_remote(ranks) and hears_all
        self.ranks = ranks
        self._own_names: dict[str, set[str]] = {}  # hosts of the list, by their names in the operating system
        self._to_come = set(range(sum(ranks.values()))) if hears else set()
        self._late_at = self._clock() + spec.start_timeout_s
        self._checked_at = self._clock() + _CONNECT_S
        self._checked.clear()
        self.places: dict[int, str] = {}
        self.without_package: set[str] = set()
        self._counts_silence = hears and spec.elastic and bool(spec.host_timeout_s)
        self._living: dict[int, str] = {}  # the hosts of ranks that have come, and have not ended
        self._silent: dict[str, int] = {}  # for how many looks, by the host
        self._deaf = 0  # for how many looks nobody was heard
        self._looked = -math.inf

    def hear(self, mark: Mark, host: str) -> None:
        """A rank of a host, or its agent, has said something."""
        if mark.what in (LIVES, WARNED):
            self._silent[mark.host] = 0
            return
        self._own_names.setdefault(mark.host, set()).add(host)
        if mark.what == COME:
            self._to_come.discard(mark.rank)
            self._living[mark.rank] = self.places[mark.rank] = host
        elif mark.what == NO_PACKAGE:
            self.without_package.add(mark.host)
        elif mark.what in (DIED, DIED_UNSAID, STOPPED, ENDED_WELL):
            self._living.pop(mark.rank, None)

    @property
    def by_ssh(self) -> list[str]:
        """The hosts of this job that mpirun reaches by ssh."""
        start = self._start
        named = self.ranks.keys() - {UNNAMED} or fill(start.slots, sum(self.ranks.values())).keys()
        return [host for host in sorted(named) if not is_here(host, start.here)] if start.by_ssh else []

    def silent(self) -> list[str]:
        """Return the hosts that have become silent, once each; to be called every second, or more often."""
        if not self._counts_silence or self._clock() < self._looked + _LOOK_EVERY_S:
            return []
        self._looked = self._clock()
        hosts = {*self._living.values()}
        expected = {_short(host) for host in hosts}
        self._silent = {host: looks + 1 if _short(host) in expected else 0 for host, looks in self._silent.items()}
        counted = [looks for host, looks in self._silent.items() if _short(host) in expected]
        is_deaf = bool(counted) and min(counted) > self._looks / 2
        if is_deaf and not any(is_here(host, self._start.here) for host in hosts):
            self._deaf += 1
            if self._deaf > self._looks / 2 and not self._has_said:
                self._has_said = True
                say(
                    f"every host has said nothing for {self._start.spec.host_timeout_s:g} s: this host may have lost "
                    "its network; no host counts as lost"
                )
            return []
        if self._deaf:  # All are heard again, but not in the same second.
            self._deaf = 0
            self._silent = dict.fromkeys(self._silent, 0)
        lost = [host for host, looks in self._silent.items() if looks > self._looks]
        for host in lost:
            del self._silent[host]
        return lost

    def by_mpirun(self, hosts: Hosts, written: str) -> list[str]:
        """Return the hosts that mpirun has lost, by their names there.

        Hosts that are parts of one machine have one name there: the number of the daemon says which is lost.

        Args:
            hosts: of the job.
            written: what mpirun has written.
        """
        here = self._start.here
        names = failures.find_lost_hosts(written)
        known = [name for name in names if hosts.known_as(name)]
        if known or not any(is_here(name, here) or len(self._own_names.get(name, ())) > 1 for name in names):
            return known or names
        others = [host for host in dict.fromkeys(hosts.places) if not is_here(host, here) and not _is_own_address(host)]
        by_number = dict(enumerate(others, 1))
        return [by_number[number] for number in failures.find_lost_daemons(written) if number in by_number] or names

    def answering(self, hosts: Hosts) -> list[str]:
        """Ask lost hosts by ssh, now and then and without waiting; return those that have answered, once each."""
        awaited = hosts.returning() if self._start.asks_lost_hosts else []
        ended = [host for host, process in self._asked.items() if process.poll() is not None]
        found = [host for host in ended if self._asked.pop(host).returncode == 0 and host in awaited]
        left = set(awaited) - {*found}
        if left and self._clock() >= self._asked_at + _ASK_EVERY_S:
            self._asked_at = self._clock()
            for host in left - self._asked.keys():
                self._asked[host] = self._call(host, _ANSWER_S)
        return found

    def are_late(self) -> str:
        """Return which ranks have not come to their hosts in time, as a sentence, once; empty: none."""
        if not self._to_come or self._clock() < self._late_at:
            return ""
        late = name_ranks(sorted(self._to_come))
        self._to_come = set()
        return (
            f"{late} of {sum(self.ranks.values())} did not come to their hosts within "
            f"{self._start.spec.start_timeout_s:g} s (--start-timeout); the job is ended"
        )

    def are_cut_off(self, logins: Callable[[], list[list[str]]]) -> str:
        """Return which hosts let us log in, and cannot connect to mpirun here, as a sentence, once; empty: none.

        While no rank has come to its host: a daemon that cannot connect tries for minutes.

        Args:
            logins: returns the command lines by which mpirun starts daemons.
        """
        count = sum(self.ranks.values())
        if not self._start.by_ssh or len(self._to_come) < max(count, 1):
            return ""
        cut_off = sorted(host for host, process in self._checked.items() if process.poll() == _NO_WAY)
        if cut_off:
            self._to_come = set()
            return (
                f"{' and '.join(cut_off)} cannot connect to mpirun on this host, though a login by ssh succeeds: a "
                "firewall is between them, or --network-interface is to name another network; the job is ended"
            )
        if self._clock() >= self._checked_at:
            self._checked_at = self._clock() + _CONNECT_S
            for words in logins():
                host = next((each for each in self.by_ssh if each in words), None)
                awaits = _AWAITS.search(" ".join(words))
                if host is None or awaits is None:
                    continue
                if host not in self._checked or self._checked[host].poll() is not None:
                    test = [sys.executable, "-I", "-S", "-c", _CONNECTS, awaits[2], *awaits[1].split(",")]
                    self._checked[host] = self._call(host, _ANSWER_S, shlex.join(test))
        return ""

    def silent_logins(self) -> list[str]:
        """Return the hosts of this job that do not answer to ssh within 10 s."""
        asked = {host: self._call(host, LOGIN_S) for host in self.by_ssh}
        return [host for host, process in asked.items() if process.wait()]

    def _call(self, host: str, limit_s: float, command: str = "true") -> subprocess.Popen[bytes]:
        """Begin to log in to a host and out; the status is 0 if that, and a command there, succeeds."""
        limit = ["timeout", "--kill-after=1", f"{limit_s:g}"]
        return subprocess.Popen(
            [*limit, *self._start.mpirun.ssh_to(host, self._start.spec, os.environ), command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
        )

    def close(self) -> None:
        """Ask no host any more."""
        for process in (*self._asked.values(), *self._checked.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _short(host: str) -> str:
    """Return the name of a host without its domain; an address as it is."""
    return host if host[:1].isdigit() else host.partition(".")[0]


def _is_own_address(host: str) -> bool:
    """Return whether a host is given by an address of this machine."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(there)  # which sends nothing
    except OSError:
        return False
    return True
