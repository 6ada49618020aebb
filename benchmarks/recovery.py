"""Measure how long it takes until the others go on when a rank is killed: the last one, until one is left.

    ringreduce run --elastic -np 4 python benchmarks/recovery.py

Times are in milliseconds, on the slowest of the ranks that are left: "detected": from the signal to the error of the
allreduce of 1 MiB that the rank was in; "connected": from there until the ranks that are left were connected; "begun":
from there until their world had begun; "next step": from there to the end of the next allreduce; "total": all together.
"files" and "MiB" are what rank 0 has open then, and its memory.
"""

from __future__ import annotations

import gc
import os
import signal
import time

import numpy as np

import ringreduce
from ringreduce import runtime
from ringreduce.observe.seen.resources import resident_nbytes

COUNT = 1 << 18  # elements: 1 MiB of float32
CALM_S = 0.2  # before a rank is killed
HEADS = ("left", "detected", "connected", "begun", "next step", "total", "files", "MiB")


def kill_last() -> list[float]:
    """Kill the last rank, and return what took how long, in milliseconds. Collective."""
    data = np.ones(COUNT, np.float32)
    is_last = ringreduce.rank() == ringreduce.size() - 1
    when = float(ringreduce.broadcast(np.array([time.monotonic() + CALM_S]))[0])  # one clock for all of a machine
    try:
        while True:
            ringreduce.allreduce(data, ringreduce.SUM, out=data)
            data[:] = 1
            if is_last and time.monotonic() > when:
                os.kill(os.getpid(), signal.SIGKILL)
    except ringreduce.PeerLostError as error:
        detected = time.monotonic()
        recovery = runtime.go_on(error)
    begun = time.monotonic()
    data[:] = 1
    ringreduce.allreduce(data, ringreduce.SUM, out=data)
    ended = time.monotonic()
    assert (data == ringreduce.size()).all()
    # The rank dies within a call after that moment, of some 0.1 ms.
    times = [detected - when, recovery.connected_s, recovery.begun_s, ended - begun, ended - when]
    return (1e3 * ringreduce.allreduce(np.array(times), ringreduce.MAX)).tolist()


def main() -> None:
    """Measure and print."""
    ringreduce.init()
    if ringreduce.rank() == 0:
        print("".join(f"{head:>11}" for head in HEADS))
    while ringreduce.size() > 1:
        times = kill_last()
        gc.collect()  # the error's traceback holds the old world
        if ringreduce.rank() == 0:
            files = len(os.listdir("/proc/self/fd"))
            figures = (ringreduce.size(), *times, files, resident_nbytes() / 2**20)
            print("".join(f"{figure:11.4g}" for figure in figures), flush=True)
    ringreduce.shutdown()


if __name__ == "__main__":
    main()
