"""Messages of ranks, and of the shells over them, to `ringreduce run`: lines in a FIFO of their host.

The FIFO is in a folder of this user's alone, so no other user writes there, and nothing that a program prints is a
message. The launcher reads that of its own host; an agent reads that of each other host, and passes the lines on.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from ringreduce.common.errors import ConfigError
from ringreduce.common.launch import messages_in

_LINE = re.compile(rb"(\S*) ([0-9]{1,9}) (\S{1,255}) ([a-z ]{1,20})")
_READ_NBYTES = 1 << 16


# What a mark says. Ranks and shells write these words, not the names. The shell over a rank:
COME = "has come"  # to a host that mpirun reaches: the rank begins
NO_PACKAGE = "has no package there"  # its host does not have ringreduce where the launcher has it
ENDED_WELL = "has ended well"
STOPPED = "has stopped"  # with the status of a job that is to be run again
DIED = "has died"
# The rank:
BEGUN = "has begun"  # to look for the others
CONNECTED = "is connected"  # to all others by MPI, which reports deaths to it
COMMIT = "has a commit"  # it has written one to disk
AGREES = "agrees to stop"  # as all ranks of its world do
BEGINS_AGAIN = "begins again"  # its commit is on disk, and it ends for a start on other hosts
GONE_ON = "has gone on"  # after some of the others have failed
STALLS = "stalls"  # none has gone on for long, and the job is to be ended
# The agent of a host, every second:
LIVES = "lives"
# The same agent, where it is in a step of Slurm that gets SIGUSR1 or SIGTERM:
WARNED = "is warned"
# The launcher itself, of a rank that has died with the shell over it:
DIED_UNSAID = "is gone"

#: What an agent says of itself, by the name of its host in the list of hosts: of no launch, and of no rank.
_OF_AGENT = "- 0 {host} {what}"


def pass_on(path: str, what: str, text: str, host: str) -> None:
    """Write what the agent of a host says to the FIFO of the launcher; nothing if that has ended.

    Args:
        path: of the FIFO.
        what: it is: ``"message"`` of a rank; or what the agent says of itself, which is left out while nobody reads.
        text: of the message.
        host: by its name in the list of hosts.
    """
    is_message = what == "message"
    with suppress(OSError):
        fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.set_blocking(fifo, is_message)
            os.write(fifo, f"{text if is_message else _OF_AGENT.format(host=host, what=what)}\n".encode())
        finally:
            os.close(fifo)


class Mark(NamedTuple):
    """A message of a rank, or of the shell that has started it, to the launcher.

    Attributes:
        what: one of the words above.
        rank: which.
        host: on which it runs, by its name there.
    """

    what: str
    rank: int
    host: str


class Hearing(Protocol):
    """What a job hears of its ranks by."""

    def begin(self, hosts: Iterable[str], variables: dict[str, str]) -> bool:
        """Prepare for the ranks of a job; return whether all that they say will come.

        Args:
            hosts: of the job, as mpirun gets them.
            variables: of the job; gets those by which ranks send messages.
        """

    def fileno(self) -> int:
        """Return a descriptor that is ready when messages have come."""

    def read(self) -> list[Mark]:
        """Return the messages that have come."""

    def last(self) -> list[Mark]:
        """Return the last messages of a job whose mpirun has ended; waits for those under way, for some seconds."""


class RankMessages:
    """Receives the messages of ranks of this host.

    Args:
        folder: of this user alone, by the same path on all hosts, for the FIFO.

    Attributes:
        folder: the argument.

    Raises:
        ConfigError: there can be no FIFO.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fence = ""  # of the launch whose messages count: ranks of a former one may live on
        path = messages_in(str(folder))
        try:
            os.mkfifo(path, 0o600)
        except OSError as error:
            raise ConfigError(
                f"cannot make a FIFO in {folder}: {error.strerror}; set TMPDIR to a local folder"
            ) from None
        # Open for writing as well, so that the FIFO does not end when no rank has it open.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)  # an agent on this host then leaves it alone
        self._rest = b""

    def begin(self, hosts: Iterable[str], variables: dict[str, str]) -> bool:
        """Prepare for the ranks of a job, all of this host; see `Hearing`."""
        self._fence = variables["RINGREDUCE_FENCE"]
        variables["RINGREDUCE_MESSAGES"] = str(self.folder)
        return True

    def fileno(self) -> int:
        """Return the descriptor of the FIFO, for `select`."""
        return self._descriptor

    def read(self) -> list[Mark]:
        """Return the messages that have come; other lines, and what ranks of another launch say, are dropped."""
        try:
            self._rest += os.read(self._descriptor, _READ_NBYTES)
        except BlockingIOError:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        parsed = [_LINE.fullmatch(line) for line in lines]
        return [
            Mark(line[4].decode(), int(line[2]), line[3].decode(errors="replace"))
            for line in parsed
            if line is not None and line[1] in (self._fence.encode(), b"-")
        ]

    def last(self) -> list[Mark]:
        """Return the last messages: ranks of this host have written them before mpirun saw these end."""
        return self.read()

    def close(self) -> None:
        """Read no messages any more."""
        os.close(self._descriptor)
