"""Timing: many calls of several contenders in turn, what one says about a list of times, and noise.

Noise is the time of the machines that other processes took while something was measured.
"""

from __future__ import annotations

import gc
import math
import os
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.errors import name_ranks
from ringreduce.common.reduce_ops import MAX

Array = npt.NDArray[Any]


class Stopwatch(Protocol):
    """What takes the time of a call."""

    def ready(self) -> None:
        """Return when nothing is under way that could count as part of the next call."""

    def time(self, call: Callable[[], object]) -> float:
        """Make the call, and return the seconds until all of it was done."""


@dataclass(frozen=True, slots=True)
class CallStopwatch:
    """A stopwatch for calls that are done when they return.

    Attributes:
        now: returns seconds since some time or other.
    """

    now: Callable[[], float] = time.perf_counter

    def ready(self) -> None:
        pass

    def time(self, call: Callable[[], object]) -> float:
        begin = self.now()
        call()
        return self.now() - begin


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that can be timed beside others on the same job.

    Attributes:
        name: who it is, e.g. ``"ringreduce"``, ``"mpi"``.
        source: where its input has to be put before a call; in-place ones overwrite it.
        call: does the job once and returns the result, None where this rank gets none; all ranks call it together.
        output: where the result goes, if that is neither the source nor new each time.
        prepare: is called before each timed call, outside its time.
    """

    name: str
    source: Array
    call: Callable[[], Any]
    output: Array | None = None
    prepare: Callable[[], object] = lambda: None

    def repeated(self, times: int) -> Contender:
        """Return one that does the job so often in a row."""
        if times == 1:
            return self
        call = self.call

        def several() -> Any:
            for _ in range(times - 1):
                call()
            return call()

        return replace(self, call=several)


@dataclass(frozen=True, slots=True)
class Summary:
    """Times of the iterations of one case in microseconds, each the slowest rank's."""

    iterations: int
    min: float
    median: float
    mean: float
    p90: float
    p95: float
    p99: float
    max: float
    deviation: float

    @classmethod
    def of_seconds(cls, seconds: Array, parts: int = 1) -> Summary:
        """Summarise a vector of at least one time in seconds, each of so many equal parts: what one of these takes."""
        us = np.asarray(seconds, np.float64) * 1e6 / parts
        low, median, p90, p95, p99, high = np.percentile(us, [0, 50, 90, 95, 99, 100]).tolist()
        return cls(us.size, low, median, float(us.mean()), p90, p95, p99, high, float(us.std()))

    @property
    def variation(self) -> float:
        """The coefficient of variation in percent."""
        return 100 * self.deviation / self.mean if self.mean else math.nan


def iterations_for(nbytes: int) -> int:
    """Return how many iterations give a steady median at this size without taking long: 300, and 16 from 64 MiB up."""
    return max(16, min(300, (1 << 30) // max(1, nbytes)))


def warmup_for(iterations: int) -> int:
    """Return how many calls to make before the timed ones: libraries that set up fast paths do so within 10."""
    return 10 if iterations > 50 else 3


def turn_for(iterations: int) -> int:
    """Return how many iterations a contender has in a row: about eight turns each, but of no less than eight."""
    return max(8, iterations // 8)


def time_in_turn(
    world: Communicator,
    contenders: Sequence[Contender],
    iterations: int,
    warmup: int,
    watch: Stopwatch = CallStopwatch(),
) -> list[Array]:
    """Time the contenders in short turns, one after the other, so that noise of the machine touches all of them.

    A turn begins with two calls that are not timed: they bring back what the others drove out of the caches, as if each
    ran alone. A barrier goes before each call, the clock runs around it, and the slowest rank's time counts. Calls that
    return before they are done take a ``watch`` that knows when they are. The garbage collector rests, as in `timeit`.

    Returns:
        For each contender its ``iterations`` times in seconds, the same on every rank.
    """
    for contender in contenders:
        for _ in range(warmup):
            contender.call()
    times = np.empty((len(contenders), iterations))
    turn = turn_for(iterations)
    collects = gc.isenabled()
    gc.disable()
    try:
        for first in range(0, iterations, turn):
            for row, contender in zip(times, contenders, strict=True):
                contender.call()
                contender.call()
                for iteration in range(first, min(first + turn, iterations)):
                    contender.prepare()
                    watch.ready()
                    world.barrier()
                    row[iteration] = watch.time(contender.call)
    finally:
        if collects:
            gc.enable()
    return list(world.allreduce(times, MAX))


#: Cores. What a machine does for itself takes a few hundredths; a process that computes takes a half at least, also
#: where it has to share its core with a rank.
_TOLERATED = 0.2
#: Of the ranks' own time: so far two ways to count the same time may differ.
_TOLERATED_SHARE = 0.01
_SEEN_S = 1.0  # from which on a look at other processes says something: the system counts in hundredths of a second


class ProcessorTimes(NamedTuple):
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


def usage() -> ProcessorTimes:
    """Read what the system says now.

    Interrupts are left out, as those of the ranks' own messages are among them.
    """
    try:
        user, nice, system = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=4)[1:4]
        everyone = (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except (OSError, ValueError):
        everyone = float("nan")
        machine = socket.gethostname()
    return ProcessorTimes(time.monotonic(), everyone, own=time.process_time(), machine=zlib.crc32(machine.encode()))


class NoiseFound(NamedTuple):
    """What was seen so far on the machine where other processes took the most; equal on all ranks.

    Attributes:
        cores: how many cores the others took on average; 0.0 if that is little, or seen for less than a second.
        text: this in words; empty if they are 0.0.
    """

    cores: float
    text: str


class Noise:
    """Noise from now on. Collective, like `look`.

    Args:
        communicator: all ranks that are measured.
        read: reads the time, for tests.
    """

    def __init__(self, communicator: Communicator, read: Callable[[], ProcessorTimes] = usage) -> None:
        self._communicator = communicator
        self._read = read
        communicator.barrier()
        self._begin = read()

    def look(self) -> NoiseFound:
        """Return what the others took. Collective."""
        self._communicator.barrier()  # so that the ranks of a machine look at the same time
        now = self._read()
        spent = [now.at - self._begin.at, now.everyone - self._begin.everyone, now.own - self._begin.own]
        rows = self._communicator.allgather(np.array([[*spent, float(now.machine)]]))
        worst = NoiseFound(0.0, "")
        for machine in np.unique(rows[:, 3]):
            ranks = np.flatnonzero(rows[:, 3] == machine)
            elapsed, everyone = rows[ranks, :2].max(axis=0).tolist()
            own = float(rows[ranks, 2].sum())
            others = everyone - own
            tolerated = _TOLERATED * elapsed + _TOLERATED_SHARE * own
            if elapsed >= _SEEN_S and others > max(tolerated, worst.cores * elapsed):  # NaN is too little
                text = f"on the machine of {name_ranks(ranks.tolist())}, other processes took {others / elapsed:.2f} "
                text += f"cores on average, and the ranks {own / elapsed:.2f}"
                worst = NoiseFound(others / elapsed, text)
        return worst
