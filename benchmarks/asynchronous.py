"""Measure named asynchronous allreduces of torch tensors: the latency of one of 4 B, and 160 of 64 KiB together.

    mpirun -np 2 python benchmarks/asynchronous.py

A time is from the first submission to the last result. Programs do not wait for each other between such operations, so
there is no barrier before each one. Figures are those of the rank with the largest.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ringreduce
import ringreduce.torch as hvd


def measure(operations: int, nbytes: int, iterations: int) -> dict[str, Any]:
    """Return the times of so many operations that are submitted together, in microseconds. Collective."""
    start = hvd.allreduce_async if operations == 1 else hvd.allreduce_async_
    tensors = [torch.empty(nbytes // 4) for _ in range(operations)]
    names = [f"{nbytes} bytes, {index}" for index in range(operations)]
    results = tensors
    times = np.empty(iterations)
    ringreduce.barrier()
    for iteration in range(-max(10, iterations // 5), iterations):  # the first make names known and the plan agreed
        for tensor in tensors:
            tensor.fill_(1.0 + ringreduce.rank())
        begin = time.perf_counter()
        handles = [start(tensor, name=name, op=hvd.Sum) for tensor, name in zip(tensors, names, strict=True)]
        results = [hvd.synchronize(handle) for handle in handles]
        if iteration >= 0:
            times[iteration] = time.perf_counter() - begin
    total = ringreduce.size() * (ringreduce.size() + 1) / 2
    assert all((result == total).all() for result in results), "wrong sums"
    slowest = ringreduce.allreduce(np.percentile(times, [0, 50, 95]) * 1e6, ringreduce.MAX)
    names_of_times = ("min_us", "median_us", "p95_us")
    return {"operations": operations, "nbytes": nbytes, **dict(zip(names_of_times, slowest.tolist(), strict=True))}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-n", "--iters", type=int, help="timed iterations (2000 and 100)")
    parser.add_argument("-J", "--output_file", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    ringreduce.init()
    torch.set_num_threads(1)
    results = [
        measure(operations=1, nbytes=4, iterations=arguments.iters or 2000),
        measure(operations=160, nbytes=64 << 10, iterations=arguments.iters or 100),
    ]
    if ringreduce.rank() == 0:
        print("".join(f"{head:>12}" for head in ("operations", "bytes each", "min us", "median us", "p95 us")))
        for result in results:
            print("".join(f"{value:12.5g}" for value in result.values()))
        if arguments.output_file:
            arguments.output_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    ringreduce.shutdown()


if __name__ == "__main__":
    main()
