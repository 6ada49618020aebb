"""Measure allreduces beside a loop that does the same with NumPy and two flags alone, in turn, in one run.

    mpirun -np 2 python benchmarks/loops.py
    mpirun -np 4 python benchmarks/loops.py 64K 64M

The loop has no signatures, checks or time limits. Each rank sums one block of all arrays, in pieces that fit in its
cache, and copies the sums to the other ranks' results. It sets a flag before and after that, and waits for the flags
of the others. Where ringreduce takes as long, only another algorithm would be quicker. Beside them are exact sums,
which the loop cannot make, of normally distributed numbers into another array.

Arrays are float32 in memory that the ranks share, which are on one node. Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import ringreduce
from ringreduce.bench.measure import Contender, iterations_for, time_in_turn
from ringreduce.common.quantities import format_nbytes, parse_nbytes

SIZES = ("4K", "64K", "1M", "16M")
RESULTS = ("in place", "another", "new")
PIECE = 64 << 10  # elements that are summed at a time
LINE = 64  # bytes
ARRAYS = 3  # of a rank: what it gives, and two results that it takes in turn

Array = npt.NDArray[np.float32]


class Loop:
    """Allreduces by NumPy's calls.

    Args:
        nbytes: of an array.
    """

    def __init__(self, nbytes: int) -> None:
        comm = MPI.COMM_WORLD
        count = nbytes // 4
        window = MPI.Win.Allocate_shared(ARRAYS * nbytes + LINE, comm=comm)
        memory: list[Any] = [window.Shared_query(rank)[0] for rank in range(comm.size)]
        self._arrays = [  # by number, of all ranks
            [np.frombuffer(part, np.float32, count, number * nbytes) for part in memory] for number in range(ARRAYS)
        ]
        self._flags = [memoryview(part)[ARRAYS * nbytes :][:8].cast("q") for part in memory]
        self._mine = self._flags[comm.rank]
        self._mine[0] = 0
        self._crowded = comm.size > (os.cpu_count() or 1)
        begin, end = (count * number // comm.size for number in (comm.rank, comm.rank + 1))
        self._pieces = [slice(first, min(first + PIECE, end)) for first in range(begin, end, PIECE)]
        given, result = (arrays[comm.rank] for arrays in self._arrays[:2])
        given[:] = 1
        comm.Barrier()
        self.run(1)
        assert (result == comm.size).all()
        given[:] = 0
        comm.Barrier()

    def run(self, number: int) -> None:
        """Sum all ranks' first arrays into arrays of this number; 0: in place."""
        left, right, *more = self._arrays[0]
        first, *others = self._arrays[number]
        self._meet()
        for piece in self._pieces:
            total = first[piece]
            np.add(left[piece], right[piece], out=total)
            for source in more:
                np.add(total, source[piece], out=total)
            for other in others:
                other[piece] = total
        self._meet()

    def _meet(self) -> None:
        """Wait until all ranks are here."""
        mine = self._mine
        mine[0] = number = mine[0] + 1
        for flag in self._flags:
            while flag[0] < number:
                if self._crowded:
                    os.sched_yield()


def measure(nbytes: int) -> tuple[list[float], list[float]]:
    """Return microseconds of the loop and of ringreduce, each for all `RESULTS`, and of an exact sum. Collective."""
    loop = Loop(nbytes)
    array, other, normal = (ringreduce.empty(nbytes // 4, np.float32) for _ in range(3))
    array[:] = 0
    normal[:] = np.random.default_rng(ringreduce.rank()).standard_normal(normal.size)
    calls: list[Callable[[], object]] = [
        *(partial(next, map(loop.run, numbers)) for numbers in (repeat(0), repeat(1), cycle((1, 2)))),
        partial(ringreduce.allreduce, array, out=array),
        partial(ringreduce.allreduce, array, out=other),
        partial(ringreduce.allreduce, array),
        partial(ringreduce.reproducible_allreduce, ringreduce.world(), normal, out=other),
    ]
    contenders = [Contender("allreduce", array, call) for call in calls]
    times = time_in_turn(ringreduce.world(), contenders, 4 * iterations_for(nbytes), warmup=10)
    found: list[float] = (np.median(times, axis=1) * 1e6).tolist()
    return found[: len(RESULTS)], found[len(RESULTS) :]


def ratios(size: str, loop: list[float], ours: list[float]) -> dict[str, float]:
    """Return how long calls take, over the loop and over the call in place."""
    over_loop = {f"{kind}/loop {size}": call / alone for kind, alone, call in zip(RESULTS, loop, ours, strict=False)}
    others = zip((*RESULTS[1:], "exact"), ours[1:], strict=True)
    return over_loop | {f"{kind}/in place {size}": call / ours[0] for kind, call in others}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("sizes", nargs="*", default=SIZES, help="of arrays, as in 64K")
    parser.add_argument("-J", "--output_file", type=Path, help="write the JSON report there")
    arguments = parser.parse_args()
    ringreduce.init()
    found: dict[str, float] = {}
    if ringreduce.rank() == 0:
        print(f"{'us':<10}" + "".join(f"{kind:>11}: loop{'call':>10}" for kind in RESULTS) + f"{'exact':>11}")
    for nbytes in map(parse_nbytes, arguments.sizes):
        loop, ours = measure(nbytes)
        size = format_nbytes(nbytes)
        found |= ratios(size, loop, ours)
        if ringreduce.rank() == 0:
            row = "".join(f"{alone:>17.1f}{call:>10.1f}" for alone, call in zip(loop, ours, strict=False))
            print(f"{size:<10}{row}{ours[-1]:>11.1f}", flush=True)
    if ringreduce.rank() == 0 and arguments.output_file:
        arguments.output_file.write_text(json.dumps({"ratios": found}, indent=1) + "\n", encoding="utf-8")
    ringreduce.shutdown()


if __name__ == "__main__":
    main()
