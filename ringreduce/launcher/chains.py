"""The processes between mpirun and the ranks of this host: what to do if one of them alone dies, or is stopped.

mpirun notices that a process which it has started ends. It does not notice that a rank goes on when the shell over it
was killed, nor that a shell or a rank is stopped, and would then wait for ever, as would `ringreduce run`. Open MPI 5's
notices nothing any more once it has killed a rank that was just connecting to it, as another host's had failed: its
threads then wait for each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ringreduce.common.processes import ProcessStat, is_launcher

#: So many looks are taken soon after each other at most, at the start.
_FIRST_LOOKS = 100
_SHELLS = {"sh", "ash", "bash", "busybox", "dash", "ksh", "mksh", "zsh"}
#: At so many looks an mpirun that runs has not taken note of the end of a process of its own: it never will.
_STUCK_LOOKS = 15
#: In the environment of a rank, and of the shell over it.
_RANKS = (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")


class SeenProcess(ProcessStat):
    """A process at the last look."""

    __slots__ = ()

    @property
    def is_shell(self) -> bool:
        """Whether it is a shell, which may be the parent of a rank."""
        return self.name in _SHELLS

    @property
    def program(self) -> str:
        """The first 15 characters of the name of its file; that of the interpreter where it is a script."""
        try:
            return os.path.basename(os.readlink(f"/proc/{self.pid}/exe"))[:15]
        except OSError:  # it has ended
            return ""

    def children(self) -> list[SeenProcess]:
        """Return its present children."""
        found: list[int] = []
        with suppress(OSError):  # The process has ended.
            for thread in os.listdir(f"/proc/{self.pid}/task"):
                with suppress(OSError):  # That thread has ended.
                    path = Path(f"/proc/{self.pid}/task/{thread}/children")
                    found += map(int, path.read_text(encoding="ascii").split())
        return [each for each in map(SeenProcess.read, found) if each is not None]

    def command_line(self) -> list[str]:
        """Return its words; none if it has ended."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        return []

    def rank(self) -> int | None:
        """Return its rank, None if it belongs to no rank."""
        variables = variables_of(self.pid)
        rank = next(filter(None, map(variables.get, _RANKS)), b"")
        return int(rank) if rank.isdigit() else None


@dataclass
class _Chain:
    """The process that mpirun has started as a rank.

    Attributes:
        rank: number of the rank.
        top: the process.
        under: its children at the last look.
        stopped: number of looks in a row at which the rank was stopped.
        missed: number of looks at which the top was gone and had reported no end.
    """

    rank: int
    top: SeenProcess
    under: list[SeenProcess] = field(default_factory=list)
    stopped: int = 0
    missed: int = 0


class Chains:
    """Watches the processes of a job on this host: every second, and more often until they are `known`.

    Args:
        pid: process id of mpirun, or of a script of the site in its place, which runs it.
        has_mpirun: whether that is so; if not, the only rank runs without.
        on_death: called with a rank whose shell has died without a word. None: there is no shell over each rank, and
            mpirun notices the ends of ranks.
        say: tells users.
        patience: seconds for which a rank may be stopped before it is killed (counted in looks); what a debugger
            stops does not count.
        ranks: how many there are on this host, at least.
    """

    def __init__(
        self,
        pid: int,
        on_death: Callable[[int], object] | None,
        say: Callable[[str], object],
        patience: float,
        *,
        has_mpirun: bool = True,
        ranks: int = 1,
    ) -> None:
        self._pid = pid
        self._ranks = ranks
        self._known = False
        self._has_mpirun = has_mpirun
        started = SeenProcess.read(pid)
        assert started is not None, "nobody has waited for it"
        self._started = started
        self._mpirun: SeenProcess | None = None  # once it is known
        self._on_death = on_death
        self._say = say
        self._patience = patience
        self._chains: dict[tuple[int, int], _Chain] = {}
        self._told: set[int] = set()  # the ranks whose shells have said how they ended
        self._looks = 0
        self._stopped: set[tuple[int, int]] = set()  # at the last look: mpirun and shells
        # Ended children of mpirun, and at how many looks they were there.
        self._unnoticed: dict[tuple[int, int], int] = {}

    @property
    def known(self) -> bool:
        """Whether the processes of ranks were found, those under shells as well, or there will be none of this host."""
        if self._known:
            return True
        chains = self._chains.values()
        found = len(chains) >= self._ranks and all(each.under or not each.top.is_shell for each in chains)
        self._known = found or self._looks >= _FIRST_LOOKS
        return self._known

    @property
    def mpirun(self) -> SeenProcess:
        """The mpirun, also when it has ended; until it is known, what was started: a script in its place."""
        if self._mpirun is None and self._has_mpirun:
            self._mpirun = _launcher_under(self._started)
        return self._mpirun or self._started

    @property
    def is_stuck(self) -> bool:
        """Whether mpirun runs, but notices nothing any more."""
        return max(self._unnoticed.values(), default=0) > _STUCK_LOOKS

    def ranks(self) -> list[SeenProcess]:
        """Return the processes that mpirun has started as ranks, now and below it."""
        top = SeenProcess.read(self._pid)
        found = {} if top is None else self._find(top)
        return [chain.top for chain in found.values() if chain.top.lives]

    def logins(self) -> list[list[str]]:
        """Return the command lines by which mpirun starts daemons; a login stays until its daemon has connected."""
        return [each.command_line() for each in self.mpirun.children() if each.name == "ssh"]

    def has_told(self, rank: int) -> None:
        """Note that the shell over a rank has reported its end."""
        self._told.add(rank)

    def look(self) -> None:
        """Continue what is stopped and would keep the job from ending, and end what is left of a chain that is torn."""
        self._looks += 1
        top = SeenProcess.read(self._pid)
        if top is None or not top.lives:
            return
        stopped: dict[tuple[int, int], tuple[SeenProcess, str]] = {}
        for mpirun in filter(None, (top, SeenProcess.read(self.mpirun.pid))):
            if mpirun.state == "T":  # then nothing of the ranks' output passes, and none of their ends is noticed
                stopped[mpirun.pid, mpirun.began] = mpirun, "mpirun"
        self._look_at_mpirun()
        there = self._find(top)
        for key, chain in self._chains.items():  # the kernel may leave out children while others end
            if key not in there and is_there(chain.top):
                there[key] = chain
        for key, chain in there.items():
            under = [SeenProcess.read(each.pid) for each in chain.under]
            is_left = not any(each and each.lives for each in under)
            if chain.top.state == "T" and chain.top.is_shell and is_left:
                stopped[key] = chain.top, f"the shell over rank {chain.rank}"
            self._look_at_rank(chain)
        for key in self._stopped & stopped.keys():
            process, what = stopped[key]
            self._say(f"{what} (process {process.pid}) is stopped; it is continued, so that the job can end")
            send(process, signal.SIGCONT)
        self._stopped = set(stopped)
        for key in [*self._chains]:
            if key not in there:
                self._look_at_rest(key, others=bool(there))
        self._chains |= there

    def _look_at_mpirun(self) -> None:
        """Count the looks at which an ended child of mpirun is there; not the first, which follow each other soon."""
        mpirun = SeenProcess.read(self.mpirun.pid)
        if self.known and mpirun is not None and mpirun.state not in "Tt":
            ended = [(each.pid, each.began) for each in mpirun.children() if not each.lives]
            self._unnoticed = {key: self._unnoticed.get(key, 0) + 1 for key in ended}

    def _find(self, parent: SeenProcess) -> dict[tuple[int, int], _Chain]:
        """Return the chains that there are, those known with what was known; daemons of the launcher are gone through.

        A process that has just been made is still that of its parent, and has no number yet.
        """
        found: dict[tuple[int, int], _Chain] = {}
        for top in parent.children():
            key = top.pid, top.began
            known = self._chains.get(key)
            rank = top.rank() if known is None else known.rank
            if rank is not None:
                chain = known or _Chain(rank, top)
                chain.top, chain.under = top, top.children() or chain.under
                found[key] = chain
            elif top.lives:
                found |= self._find(top)
        return found

    def _look_at_rank(self, chain: _Chain) -> None:
        is_shell = chain.top.is_shell
        stopped = [each for each in (chain.under if is_shell else [chain.top]) if each.state == "T"]
        chain.stopped = chain.stopped + 1 if stopped else 0
        if chain.stopped > self._patience:
            for each in stopped:
                self._say(
                    f"rank {chain.rank} (process {each.pid}) has been stopped for {chain.stopped} s and is killed: "
                    "the others wait no longer than RINGREDUCE_TIMEOUT"
                )
                send(each, signal.SIGKILL)
            chain.stopped = 0

    def _look_at_rest(self, key: tuple[int, int], others: bool) -> None:
        """Look at a chain whose top has ended: what that has started ends with it, and nobody else has said so.

        ``others``: whether other ranks go on here; else the job ends.
        """
        chain = self._chains[key]
        if self._on_death is None:
            del self._chains[key]
            return
        left = [each for each in chain.under if is_there(each)]
        if left and chain.rank not in self._told:
            self._say(f"the shell over rank {chain.rank} (process {chain.top.pid}) has died, and the rank is killed")
        for each in left:
            send(each, signal.SIGKILL)
        chain.missed += 1
        if chain.rank in self._told:
            del self._chains[key]
        elif chain.missed > 1:  # what it has said would have come by now
            del self._chains[key]
            if others:
                self._on_death(chain.rank)


def variables_of(pid: int) -> dict[bytes, bytes]:
    """Return the environment with which a process was started; nothing if it has ended, or is somebody else's."""
    with suppress(OSError):
        pairs = (each.partition(b"=") for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        return {name: value for name, _, value in pairs}
    return {}


def _launcher_under(top: SeenProcess) -> SeenProcess | None:
    """Return the first process, from one downwards, whose file is that of a launcher, and no script; None: none is."""
    waiting = [top]
    for each in waiting:
        if is_launcher(each.program):
            return each
        if each.rank() is None:
            waiting += each.children()
    return None


def is_there(process: SeenProcess) -> bool:
    """Return whether a process runs on, and no other one has its number now."""
    now = SeenProcess.read(process.pid)
    return now is not None and now.began == process.began and now.lives


def send(process: SeenProcess, number: signal.Signals) -> None:
    """Send a signal to a process that runs on."""
    if is_there(process):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, number)
