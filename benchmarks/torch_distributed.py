"""Measure calls of torch.distributed on ringreduce and over Gloo, in turn, in one run.

    mpirun -np 2 python benchmarks/torch_distributed.py

Prints the median time of a call on rank 0, in microseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import ringreduce
from ringreduce.bench.peers import gloo_process_group

MIB = 1 << 20
ROUNDS = 3  # of both backends
SMALL, LARGE = 300, 30  # calls in each


def median_us(call: Callable[[], object], times: int) -> float:
    """Return the median time of a call in microseconds."""
    for _ in range(5):
        call()
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds) * 1e6


def cases(group: dist.ProcessGroup) -> dict[str, float]:
    """Return how long calls on a group take. Collective."""
    one, many = torch.ones(1), torch.ones(4 * MIB // 4)
    every = torch.ones(dist.get_world_size() * many.numel())
    return {
        "all_reduce 4 B": median_us(lambda: dist.all_reduce(one, group=group), SMALL),
        "all_reduce 4 MiB": median_us(lambda: dist.all_reduce(many, group=group), LARGE),
        "all_gather_single 4 MiB": median_us(lambda: dist.all_gather_single(every, many, group=group), LARGE),
        "reduce_scatter_single 4 MiB": median_us(lambda: dist.reduce_scatter_single(many, every, group=group), LARGE),
    }


def main() -> None:
    """Measure and print."""
    ringreduce.init()
    with gloo_process_group(ringreduce.world()):
        groups = {name: dist.new_group(backend=name) for name in ("ringreduce", "gloo")}  # type: ignore[no-untyped-call]
        rounds = [{name: cases(group) for name, group in groups.items()} for _ in range(ROUNDS)]
    if ringreduce.rank() == 0:
        print(f"{'':<30}{'ringreduce':>12}{'gloo':>12}")
        for case in rounds[0]["gloo"]:
            ours, theirs = (statistics.median(each[name][case] for each in rounds) for name in groups)
            print(f"{case:<30}{ours:>12.1f}{theirs:>12.1f}")
    ringreduce.shutdown()


if __name__ == "__main__":
    main()
