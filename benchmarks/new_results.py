"""Measure allreduces into new arrays beside those in place, in turn, in one run.

    mpirun -np 2 python benchmarks/new_results.py

Arrays are float32 in memory that the ranks of a node share. Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np

import ringreduce
from ringreduce.bench.measure import Contender, iterations_for, time_in_turn
from ringreduce.common.quantities import format_nbytes

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20)  # bytes


def measure(nbytes: int) -> tuple[float, float]:
    """Return microseconds of an allreduce of this size into a new array, and of one in place. Collective."""
    array = ringreduce.empty(nbytes // 4, np.float32)
    array[:] = 0
    calls = (partial(ringreduce.allreduce, array), partial(ringreduce.allreduce, array, out=array))
    contenders = [Contender("allreduce", array, call) for call in calls]
    times = time_in_turn(ringreduce.world(), contenders, iterations_for(nbytes), warmup=10)
    new, in_place = (np.median(times, axis=1) * 1e6).tolist()
    return new, in_place


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-J", "--output_file", type=Path, help="write the JSON report there")
    arguments = parser.parse_args()
    ringreduce.init()
    found = {format_nbytes(nbytes): measure(nbytes) for nbytes in SIZES}
    if ringreduce.rank() == 0:
        print(f"{'':<8}{'new (us)':>12}{'in place (us)':>16}{'ratio':>8}")
        for size, (new, in_place) in found.items():
            print(f"{size:<8}{new:>12.1f}{in_place:>16.1f}{new / in_place:>8.2f}", flush=True)
        if arguments.output_file:
            ratios = {f"new/in place {size}": new / in_place for size, (new, in_place) in found.items()}
            arguments.output_file.write_text(json.dumps({"ratios": ratios}, indent=1) + "\n", encoding="utf-8")
    ringreduce.shutdown()


if __name__ == "__main__":
    main()
