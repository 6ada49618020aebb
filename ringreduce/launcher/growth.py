"""The growth of jobs: which hosts there are, for how long one counts as failing, and why ranks begin again."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ringreduce.common.errors import ConfigError

_LOOK_EVERY_S = 1.0
_SCRIPT_S = 10.0  # that a script gets to print which hosts there are
_SCRIPT_NBYTES = 1 << 20  # that it may print
_SCRIPT_AGAIN_S = 0.02
_MOST_DOUBLINGS = 64
#: After so long without an answer, users see what may be wrong.
ANSWER_S = 30.0
UNANSWERED = (
    f"no rank has begun again {ANSWER_S:g} s after they were asked to: they do with the next state.commit() or "
    "state.check_host_updates()"
)


@dataclass(frozen=True, slots=True)
class Cooldown:
    """How long a host counts as failing after a death, in seconds: doubled by each further death of it.

    Attributes:
        least_s: seconds after the first death.
        most_s: seconds at most.
    """

    least_s: float
    most_s: float

    @classmethod
    def parse(cls, text: str) -> Cooldown:
        """Read ``60``, or ``60 600``.

        Raises:
            ValueError: it is neither.
        """
        try:
            numbers = [float(each) for each in text.split()]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, 2) or not 0 <= numbers[0] <= numbers[-1] < float("inf"):
            raise ValueError('expected seconds, or the least and the most, as in "60 600"')
        return cls(numbers[0], numbers[-1])

    def __call__(self, deaths: int) -> float:
        """Return the seconds after a number of deaths, at least one."""
        return float(min(self.least_s * 2 ** min(deaths - 1, _MOST_DOUBLINGS), self.most_s))


def reason_to_change(living: Mapping[str, int], listed: Mapping[str, int], then: int) -> str:
    """Return the reason to begin again on other hosts; empty if there is none.

    Args:
        living: number of living ranks by host.
        listed: number of slots by host.
        then: number of ranks that would begin now; 0: too few.
    """
    lives = sum(living.values())
    if not then or not lives:
        return ""
    gone = [host for host, count in living.items() if count and host not in listed]
    less = [host for host, count in living.items() if count > listed.get(host, count)]
    reasons = [f"{_all(gone, 'is', 'are')} no longer listed"] if gone else []
    reasons += [f"{_all(less, 'has', 'have')} fewer slots than ranks"] if less else []
    if not reasons and then > lives:
        reasons = [f"there are slots for {then} ranks, and {lives} live"]
    return "; ".join(reasons)


def _all(hosts: list[str], does: str, do: str) -> str:
    return f"{' and '.join(hosts)} {does if len(hosts) == 1 else do}"


class Discovery:
    """Runs a script, once or every second, and keeps its last good answer.

    A run fails if it takes more than 10 s, ends with another status than 0, or prints no hosts. Users see that, and
    the last good answer counts.

    Args:
        script: prints a line ``host`` or ``host:slots`` for each host.
        read: returns the slots by host of such a text; raises a `ConfigError` if it is none.
        say: tells users.
    """

    def __init__(self, script: str, read: Callable[[str], Mapping[str, int]], say: Callable[[str], object]) -> None:
        self._script = script
        self._read = read
        self._say = say
        self._hosts: Mapping[str, int] = {}
        self._complaint = ""

    def begin(self) -> None:
        """Run the script again and again from now on."""
        threading.Thread(target=self.ask_for_ever, name="ringreduce asks for hosts", daemon=True).start()

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
            self._hosts = self._read(_output(self._script))
            complaint = ""
        except Exception as error:  # whatever a script does, the next answer may be good
            complaint = str(error) or type(error).__name__
        if complaint and complaint != self._complaint:  # once, however often it fails in the same way
            self._say(f"{self._script} failed, and its last answer counts: {complaint}")
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
