"""Measure the update of `torch.optim.Muon` on several ranks: split among them, and with each rank updating all.

    mpirun -np 2 python benchmarks/split_updates.py              # 8 matrices of 1024 x 1024
    mpirun -np 4 python benchmarks/split_updates.py --width 512
    mpirun -np 1 python benchmarks/split_updates.py              # one rank, which has all cores to itself

An update is `optimizer.step()` with gradients that are already reduced, from the moment at which the last rank is ready
until the last rank is done; each rank has one thread. "one" is a rank that updates all while the others wait: what the
update costs without its peers. The three take turns, and the figures are medians. The weights and the state must be
bitwise equal on all ranks and for all contenders, else the exit status is 1.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import ringreduce
import ringreduce.torch as hvd

NAMES = ["split", "whole", "one"]
WARM_UP = 2  # turns that are not counted


def timed(update: Callable[[], object]) -> float:
    """Return how long an update takes on all ranks, in seconds. Collective."""
    ringreduce.barrier()
    begin_s = perf_counter()
    update()
    ringreduce.barrier()
    return perf_counter() - begin_s


def same_bits(models: list[Any], optimizers: list[Any]) -> bool:
    """Return whether all ranks have the same weights and momentum, in all models. Collective."""
    said = [
        [(parameter.detach(), optimizer.state[parameter]["momentum_buffer"]) for parameter in model.parameters()]
        for model, optimizer in zip(models, optimizers, strict=True)
        if optimizer.state
    ]
    first = hvd.broadcast_object(said[0], root_rank=0)
    mine = all(
        torch.equal(a, b)
        for each in said
        for pair, other in zip(each, first, strict=True)
        for a, b in zip(pair, other, strict=True)
    )
    return all(hvd.allgather_object(mine))


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the report, the same on all ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same weights everywhere
    layers = (torch.nn.Linear(arguments.width, arguments.width, bias=False) for _ in range(arguments.layers))
    models = [model := torch.nn.Sequential(*layers), copy.deepcopy(model), copy.deepcopy(model)]
    torch.manual_seed(1 + ringreduce.rank())
    plain = [torch.optim.Muon(each.parameters(), lr=1e-3) for each in models]
    split, whole = (
        hvd.DistributedOptimizer(optimizer, each, split_updates=wanted)
        for optimizer, each, wanted in zip(plain, models, (True, False), strict=False)
    )
    updates = [split.step, whole.step, plain[2].step if ringreduce.rank() == 0 else lambda: None]
    times = np.empty((len(NAMES), arguments.steps + WARM_UP))
    for step in range(arguments.steps + WARM_UP):
        for parameters in zip(*(each.parameters() for each in models), strict=True):
            gradient = torch.randn_like(parameters[0])
            for each in parameters:
                each.grad = gradient.clone()
        split.synchronize()
        whole.synchronize()
        for parameter, reduced in zip(models[2].parameters(), models[1].parameters(), strict=True):
            parameter.grad = reduced.grad
        for number, update in enumerate(updates):
            with split.skip_synchronize(), whole.skip_synchronize():
                times[number, step] = timed(update)
    medians, least = (
        dict(zip(NAMES, (of(times[:, WARM_UP:], axis=1) * 1e3).tolist(), strict=True)) for of in (np.median, np.min)
    )
    return {
        "config": {**vars(arguments), "output_file": None, "ranks": ringreduce.size(), "torch": torch.__version__},
        "update_ms": medians,
        "least_ms": least,
        "ratios": {f"{one}/{other}": medians[one] / medians[other] for one in NAMES for other in NAMES if one != other},
        "same_bits": same_bits(models, plain),
    }


def main() -> int:
    """Measure and print; return the exit status, the same on all ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=1024, help="of a matrix (1024)")
    parser.add_argument("--layers", type=int, default=8, help="how many (8)")
    parser.add_argument("--steps", type=int, default=15, help="timed updates of each contender (15)")
    parser.add_argument("-J", "--output_file", type=Path, help="write the JSON report there")
    arguments = parser.parse_args()
    hvd.init()
    found = measure(arguments)
    if hvd.rank() == 0:
        print(f"{arguments.layers} matrices of {arguments.width} x {arguments.width}, {hvd.size()} ranks, Muon")
        print("update, median and least, each over that of one rank")
        for name in NAMES:
            cells = [(found[title][name], found[title]["one"]) for title in ("update_ms", "least_ms")]
            print(f"{name:<8}" + "".join(f"{ms:>10.1f} ms{ms / one:>7.2f}" for ms, one in cells))
        print(f"same bits: {'yes' if found['same_bits'] else 'NO'}", flush=True)
        if arguments.output_file:
            arguments.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if found["same_bits"] else 1


if __name__ == "__main__":
    sys.exit(main())
