"""Train the demo's CNN, scaled up to 5 million parameters, over slow links: compressions beside torch's own.

    scripts/virtual_cluster up 4 --rate 200mbit
    scripts/virtual_cluster run -np 4 python benchmarks/cluster_training.py

Contenders, each with a copy of the same model, trained on the same digits in the same order:

    ddp          torch's DistributedDataParallel over Gloo
    ddp-fp16     the same with its hook that sends gradients as float16
    NAME         ringreduce.torch.DistributedOptimizer with Compression.NAME; powersgd has rank 4, topk sends 1 %
    NAME-without the same without error feedback

A step is zero_grad, forward, backward and optimizer.step; its time is the slowest rank's, the figure the median over
the steps. The contenders take turns of a few steps, the first of which are not timed. Accuracy is that at the end, on
digits that were never trained on: with 1000 of them, one per cent is noise.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mnist
import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy

import ringreduce
import ringreduce.torch as hvd
from ringreduce.bench.peers import gloo_process_group

TURN = 8  # steps of a contender in a row
LEAD = 2  # of them, how many are not timed
LEARNING_RATE = 0.02


@dataclass
class Contender:
    """A model that is being trained.

    Attributes:
        backward: computes the gradients of one batch.
        step: makes use of them; what communicates does so in either.
        times_s: of the steps that were timed.
        errors: of compressing gradients, relative, in each step; empty where nothing says so.
    """

    name: str
    model: nn.Module
    optimizer: Any
    forward: Callable[[torch.Tensor], torch.Tensor]
    times_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Do one step."""
        self.optimizer.zero_grad()
        cross_entropy(self.forward(images), labels).backward()
        self.optimizer.step()


def make_model() -> nn.Module:
    """Return the demo's network with more channels and a hidden layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 1600),
        nn.ReLU(),
        nn.Linear(1600, 10),
    )


def contender(name: str, model: nn.Module) -> Contender:
    """Return what trains ``model`` in the way of that name."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    if name.startswith("ddp"):
        wrapped = nn.parallel.DistributedDataParallel(model)
        if name == "ddp-fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        return Contender(name, model, optimizer, wrapped)
    distributed = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression(name)
    )
    return Contender(name, model, distributed, model)


def compression(name: str) -> Any:
    """Return one of `hvd.Compression`, with settings where it takes some."""
    kind, _, without = name.partition("-")
    made: Any = getattr(hvd.Compression, kind)
    if kind in ("powersgd", "topk"):
        settings = {"rank": 4} if kind == "powersgd" else {}
        return made(**settings, error_feedback=not without)
    return type(f"{kind}_without", (made,), {"error_feedback": False}) if without else made


def train(contenders: list[Contender], epochs: int, batch: int, seed: int) -> None:
    """Train them all, in turns."""
    images, labels = mnist.load_digits(seed)
    images, labels = images[mnist.TEST_COUNT :], labels[mnist.TEST_COUNT :]
    everything = [each for epoch in range(epochs) for each in mnist.batches(images, labels, batch, seed + epoch)]
    for first in range(0, len(everything), TURN):
        for each in contenders:
            for number, (x, y) in enumerate(everything[first : first + TURN]):
                ringreduce.barrier()
                begin = time.perf_counter()
                each.step(x, y)
                if number >= LEAD:
                    each.times_s.append(time.perf_counter() - begin)
                each.errors.append(getattr(each.optimizer, "compression_error", 0.0))


def report(contenders: list[Contender], seed: int) -> list[dict[str, Any]]:
    """Return the figures of each contender; collective."""
    images, labels = mnist.load_digits(seed)
    share = slice(hvd.rank(), mnist.TEST_COUNT, hvd.size())
    rows = []
    for each in contenders:
        times = ringreduce.allreduce(np.array(each.times_s), "max")
        error = ringreduce.allreduce(np.array([np.median(each.errors)]), "max")[0]
        rows.append(
            {
                "name": each.name,
                "median_ms": float(np.median(times)) * 1e3,
                "min_ms": float(times.min()) * 1e3,
                "accuracy": mnist.evaluate(each.model, images[share], labels[share]),
                "error": float(error),
                "same_weights": mnist.same_weights(each.model),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], steps: int) -> str:
    """Write the report for the eye."""
    placement = ringreduce.world().topology.describe()
    lines = [
        f"{placement}; median of {steps} steps",
        "",
        f"{'contender':<18}{'median (ms)':>12}{'min (ms)':>10}{'/ first':>9}{'accuracy':>10}{'error':>9}",
    ]
    for row in rows:
        ratio = row["median_ms"] / rows[0]["median_ms"]
        lines.append(
            f"{row['name']:<18}{row['median_ms']:>12.1f}{row['min_ms']:>10.1f}{ratio:>9.2f}{row['accuracy']:>10.1%}"
            f"{row['error']:>9.2g}"
        )
    lines += ["", f"weights are equal on all ranks: {'yes' if all(row['same_weights'] for row in rows) else 'NO'}"]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--contenders", default="ddp-fp16,bf16,int8,powersgd", help="which, separated by commas")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the 4000 training digits (3)")
    parser.add_argument("--batch", type=int, default=16, help="digits per rank and step (16)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and order (1)")
    parser.add_argument("-J", "--output_file", type=Path, help="write the figures there, as JSON")
    return parser.parse_args()


def main() -> int:
    """Measure and print; return the exit status, the same on all ranks."""
    arguments = parse_arguments()
    ringreduce.init()
    torch.manual_seed(arguments.seed)
    model = make_model()
    with contextlib.ExitStack() as stack:
        stack.enter_context(gloo_process_group(ringreduce.world()))
        contenders = [contender(name, copy.deepcopy(model)) for name in arguments.contenders.split(",")]
        train(contenders, arguments.epochs, arguments.batch, arguments.seed)
        rows = report(contenders, arguments.seed)
    if ringreduce.rank() == 0:
        print(table(rows, len(contenders[0].times_s)), flush=True)
        if arguments.output_file:
            arguments.output_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    ringreduce.barrier()
    ringreduce.shutdown()
    return 0 if all(row["same_weights"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
