"""Measures ranks that are actors of Ray, beside the same under mpirun: `python benchmarks/engines.py [RANKS]`.

In the environment of `scripts/install engines`, where nothing else runs. Starts Ray on this machine, unless RAY_ADDRESS
names a cluster.
"""

from __future__ import annotations

import os
import sys
import time
from statistics import median

import numpy as np

import ringreduce as rr

STARTS = 5
CALLS = 200
ROUNDS = 5
NBYTES = (4, 1 << 16, 1 << 20, 16 << 20)


def nothing() -> None:
    """Do nothing."""


def allreduce_us() -> dict[int, float]:
    """Return microseconds of an allreduce in place, by bytes: the median of this rank."""
    rr.init()
    found = {}
    for nbytes in NBYTES:
        array = np.zeros(nbytes // 4, np.float32)
        times = []
        for _ in range(min(1000, max(20, (64 << 20) // nbytes))):
            rr.barrier()
            begin = time.perf_counter()
            rr.allreduce(array, op=rr.SUM, out=array)
            times.append(time.perf_counter() - begin)
        found[nbytes] = median(times) * 1e6
    return found


def main(ranks: int) -> None:
    """Measure, and print."""
    import ray

    from ringreduce.ray import RayExecutor

    # Else Ray has its workers yield to all other processes.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # Ray's own name
    ray.init(num_cpus=None if "RAY_ADDRESS" in os.environ else 2 * ranks, include_dashboard=False, log_to_driver=False)
    starts = []
    ends = []
    for _ in range(STARTS):
        executor = RayExecutor(num_workers=ranks)
        begin = time.perf_counter()
        executor.start()
        starts.append(time.perf_counter() - begin)
        executor.run(nothing)
        begin = time.perf_counter()
        executor.shutdown()
        ends.append(time.perf_counter() - begin)
    print(f"start of {ranks} ranks: {median(starts):.2f} s (first {starts[0]:.2f} s); end: {median(ends):.2f} s")
    inside: dict[int, list[float]] = {nbytes: [] for nbytes in NBYTES}
    beside: dict[int, list[float]] = {nbytes: [] for nbytes in NBYTES}
    executor.start()
    calls = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        executor.run(nothing)
        calls.append(time.perf_counter() - begin)
    print(
        f"call of an empty function on {ranks} ranks: {median(calls) * 1e3:.1f} ms, slowest {max(calls) * 1e3:.1f} ms"
    )
    for _ in range(ROUNDS):  # interleaved
        for found, times in ((inside, executor.run(allreduce_us)), (beside, rr.run(allreduce_us, np=ranks))):
            for nbytes in NBYTES:
                found[nbytes].append(max(each[nbytes] for each in times))
    executor.shutdown()
    for nbytes in NBYTES:
        on_ray, under_mpirun = median(inside[nbytes]), median(beside[nbytes])
        print(f"allreduce of {nbytes:>9} B: {on_ray:9.1f} us on Ray, {under_mpirun:9.1f} us under mpirun")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 4)
