"""Measure calls of torch.distributed on ringreduce and over Gloo, in turn, in one run.

    mpirun -np 2 python benchmarks/torch_distributed.py

Prints the median time of a call, on the slowest rank, in microseconds.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

import ringreduce
from ringreduce.bench.measure import Contender, time_in_turn
from ringreduce.bench.peers import gloo_process_group

COUNT = 1 << 20  # elements: 4 MiB
SMALL, LARGE = 900, 90  # calls


def cases(group: dist.ProcessGroup) -> dict[str, tuple[Callable[[], object], int]]:
    """Return calls on a group, and how many of each are timed. Collective."""
    one, many = torch.ones(1), torch.ones(COUNT)
    every = torch.ones(dist.get_world_size() * COUNT)
    return {
        "all_reduce 4 B": (lambda: dist.all_reduce(one, group=group), SMALL),
        "all_reduce 4 MiB": (lambda: dist.all_reduce(many, group=group), LARGE),
        "all_gather_single 4 MiB": (lambda: dist.all_gather_single(every, many, group=group), LARGE),
        "reduce_scatter_single 4 MiB": (lambda: dist.reduce_scatter_single(many, every, group=group), LARGE),
    }


def main() -> None:
    """Measure and print."""
    ringreduce.init()
    found = []
    with gloo_process_group(ringreduce.world()):
        ours, theirs = (cases(dist.new_group(backend=name)) for name in ("ringreduce", "gloo"))  # type: ignore[no-untyped-call]
        for name, (call, iterations) in ours.items():
            contenders = [Contender("", np.empty(0), each) for each in (call, theirs[name][0])]
            times = time_in_turn(ringreduce.world(), contenders, iterations, 5)
            found.append(f"{name:<30}" + "".join(f"{each:>12.1f}" for each in np.median(times, axis=1) * 1e6))
    if ringreduce.rank() == 0:
        print("\n".join([f"{'':<30}{'ringreduce':>12}{'gloo':>12}", *found]))
    ringreduce.shutdown()


if __name__ == "__main__":
    main()
