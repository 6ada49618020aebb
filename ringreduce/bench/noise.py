"""Noise: the time of the machines that other processes took while something was measured."""

from __future__ import annotations

import os
import socket
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import name_ranks

__all__ = ["Found", "Noise", "Usage", "usage"]

#: Cores. What a machine does for itself takes a few hundredths; a process that computes takes a half at least, also
#: where it has to share its core with a rank.
_TOLERATED = 0.2
#: Of the ranks' own time: so far two ways to count the same time may differ.
_TOLERATED_SHARE = 0.01
_SEEN_S = 1.0  # from which on a look at other processes says something: the system counts in hundredths of a second


class Usage(NamedTuple):
    """What one rank reads of the time that processors spent, all in seconds.

    Attributes:
        at: when; since some time or other.
        everyone: what all processes of the machine have taken so far; NaN where that is not known.
        own: what this process has taken of it.
        machine: a number that identifies the machine, from 0 to 2^32 - 1.
    """

    at: float
    everyone: float
    own: float
    machine: int


def usage() -> Usage:
    """Read what the system says now.

    Interrupts are left out, as those of the ranks' own messages are among them.
    """
    try:
        user, nice, system = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=4)[1:4]
        everyone = (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except (OSError, ValueError):
        everyone, machine = float("nan"), socket.gethostname()
    return Usage(time.monotonic(), everyone, time.process_time(), zlib.crc32(machine.encode()))


class Found(NamedTuple):
    """What was seen so far on the machine where other processes took the most; equal on all ranks.

    Attributes:
        elapsed_s: over how long.
        cores: how many cores the others took on average; 0.0 if that is little, or seen for less than a second.
        text: this in words; empty if they are 0.0.
    """

    elapsed_s: float
    cores: float
    text: str


class Noise:
    """Noise from now on. Collective, like `look`.

    Args:
        communicator: all ranks that are measured.
        read: reads the time, for tests.
    """

    def __init__(self, communicator: Communicator, read: Callable[[], Usage] = usage) -> None:
        self._communicator = communicator
        self._read = read
        communicator.barrier()
        self._begin = read()

    def look(self) -> Found:
        """Return what the others took. Collective."""
        self._communicator.barrier()  # so that the ranks of a machine look at the same time
        now = self._read()
        spent = [now.at - self._begin.at, now.everyone - self._begin.everyone, now.own - self._begin.own]
        rows = self._communicator.allgather(np.array([[*spent, float(now.machine)]]))
        worst = Found(float(rows[:, 0].max()), 0.0, "")
        for machine in np.unique(rows[:, 3]):
            ranks = np.flatnonzero(rows[:, 3] == machine)
            elapsed, everyone = rows[ranks, :2].max(axis=0).tolist()
            own = float(rows[ranks, 2].sum())
            others, tolerated = everyone - own, _TOLERATED * elapsed + _TOLERATED_SHARE * own
            if elapsed >= _SEEN_S and others > max(tolerated, worst.cores * elapsed):  # NaN is too little
                text = f"on the machine of {name_ranks(ranks.tolist())}, other processes took {others / elapsed:.2f} "
                text += f"cores on average, and the ranks {own / elapsed:.2f}"
                worst = worst._replace(cores=others / elapsed, text=text)
        return worst
