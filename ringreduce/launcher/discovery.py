"""Which hosts there are, by a script of the user's."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from ringreduce.common.errors import ConfigError
from ringreduce.launcher.hosts import parse_hosts
from ringreduce.launcher.job import say

_LOOK_EVERY_S = 1.0
_SCRIPT_S = 10.0  # that a script gets to print which hosts there are
_SCRIPT_NBYTES = 1 << 20  # that it may print
_SCRIPT_AGAIN_S = 0.02


class Discovery:
    """Runs a script, once or every second, and keeps its last good answer.

    A run fails if it takes more than 10 s, ends with another status than 0, or prints no hosts. Users see that, and
    the last good answer counts.

    Args:
        script: prints a line ``host`` or ``host:slots`` for each host.
        slots: slots of hosts without a number.
    """

    def __init__(self, script: str, slots: int) -> None:
        self._script = script
        self._slots = slots
        self._hosts: Mapping[str, int] = {}
        self._complaint = ""

    def hosts(self) -> Mapping[str, int]:
        """Return the slots by host of the last good answer; none before the first."""
        return self._hosts

    def ask_for_ever(self) -> None:
        """Run the script again and again."""
        while True:
            self.ask()
            time.sleep(_LOOK_EVERY_S)

    def ask(self) -> None:
        """Run the script once."""
        try:
            self._hosts = parse_hosts(_output(self._script), self._slots)
            complaint = ""
        except Exception as error:  # whatever a script does, the next answer may be good
            complaint = str(error) or type(error).__name__
        if complaint and complaint != self._complaint:  # once, however often it fails in the same way
            say(f"{self._script} failed, and its last answer counts: {complaint}")
        self._complaint = complaint


def _output(script: str) -> str:
    """Return what a script prints until it ends; then what is left of its session is killed.

    Raises:
        subprocess.TimeoutExpired, subprocess.CalledProcessError, ConfigError: it takes too long, fails, or prints more
            than any list of hosts.
    """
    # Its standard error is this process's, for the user to see.
    process = subprocess.Popen(
        [script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, bufsize=0
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    read: Callable[[int], bytes | None] = process.stdout.read  # None: there is nothing yet
    deadline = time.monotonic() + _SCRIPT_S
    output = b""
    ended = False
    try:
        while not ended:
            # Nobody takes note of its end before its session is killed, whose number is its own until then.
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            while piece := read(_SCRIPT_NBYTES):
                output += piece
                if len(output) > _SCRIPT_NBYTES:
                    raise ConfigError(f"it prints more than {_SCRIPT_NBYTES >> 20} MiB, which no list of hosts has")
            if not ended and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(script, _SCRIPT_S)
            if not ended:
                select.select([process.stdout] if piece is None else [], [], [], _SCRIPT_AGAIN_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # processes outside of the session may hold it for ever
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, script)
    return output.decode(errors="replace")
