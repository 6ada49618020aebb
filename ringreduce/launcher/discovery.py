"""A script that prints which hosts a job may use, run repeatedly beside the job."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping

from ringreduce.launcher.hosts import parse_hosts
from ringreduce.launcher.job import say

__all__ = ["Discovery"]

_EVERY_S = 1.0
_LIMIT_S = 10.0


class Discovery:
    """Runs a script; once started on a thread, every second, for as long as this process lives.

    A run fails that takes more than 10 s, ends with another status than 0, or prints what is no host. That is said, and
    what the last good one has printed counts.

    Args:
        script: prints a line ``host`` or ``host:slots`` for each host.
        slots: of hosts that come without a number.
    """

    def __init__(self, script: str, slots: int) -> None:
        self._script, self._slots = script, slots
        self._hosts: Mapping[str, int] = {}
        self._complaint = ""

    def start(self) -> None:
        """Ask from now on."""
        threading.Thread(target=self._ask_for_ever, name="ringreduce asks for hosts", daemon=True).start()

    def hosts(self) -> Mapping[str, int]:
        """Return the slots by host of the last good answer; none before the first."""
        return self._hosts

    def _ask_for_ever(self) -> None:
        between = threading.Event()
        while True:
            self.ask()
            between.wait(_EVERY_S)

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
    """Return what a script prints.

    If that takes too long, it and the processes of its session are killed.
    """
    # Its standard error is this process's, for the user to see.
    process = subprocess.Popen([script], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()  # processes outside of the session may hold it for ever
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, script)
    return output.decode(errors="replace")
