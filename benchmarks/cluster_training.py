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
from pathlib import Path
from typing import Any

import mnist
import numpy as np
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from training import LEAD, TURN, Contender, measure

import ringreduce
import ringreduce.torch as hvd
from ringreduce.bench.peers import gloo_process_group

LEARNING_RATE = 0.02


def contender(name: str, model: nn.Module, errors: list[float]) -> Contender:
    """Return what trains ``model`` in the way of that name, and lists the errors of compressing gradients."""
    optimizer, forward = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9), model
    if name.startswith("ddp"):
        forward = nn.parallel.DistributedDataParallel(model)
        if name == "ddp-fp16":
            forward.register_comm_hook(None, fp16_compress_hook)
    else:
        named, made = model.named_parameters(), compression(name)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=made)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        cross_entropy(forward(images), labels).backward()
        optimizer.step()
        errors.append(getattr(optimizer, "compression_error", 0.0))

    return Contender(name, model, step)


def compression(name: str) -> Any:
    """Return one of `hvd.Compression`, with settings where it takes some."""
    kind, _, without = name.partition("-")
    made: Any = getattr(hvd.Compression, kind)
    if kind in ("powersgd", "topk"):
        settings = {"rank": 4} if kind == "powersgd" else {}
        return made(**settings, error_feedback=not without)
    return type(f"{kind}_without", (made,), {"error_feedback": False}) if without else made


def train(contenders: list[Contender], epochs: int, batch: int, seed: int) -> Any:
    """Train them all, in turns; return the seconds of the steps that were timed, a row for each contender."""
    images, labels = mnist.load_digits(seed)
    images, labels = images[mnist.TEST_COUNT :], labels[mnist.TEST_COUNT :]
    batches = [each for epoch in range(epochs) for each in mnist.batches(images, labels, batch, seed + epoch)]
    return measure(contenders, iter(batches), len(batches) // (LEAD + TURN) * TURN)


def report(contenders: list[Contender], times: Any, errors: list[list[float]], seed: int) -> list[dict[str, Any]]:
    """Return the figures of each contender; collective."""
    images, labels = mnist.load_digits(seed)
    share = slice(hvd.rank(), mnist.TEST_COUNT, hvd.size())
    worst = ringreduce.allreduce(np.median(errors, axis=1), "max")
    return [
        {
            "name": each.name,
            "median_ms": float(np.median(row)) * 1e3,
            "min_ms": float(row.min()) * 1e3,
            "accuracy": mnist.evaluate(each.model, images[share], labels[share]),
            "error": float(error),
            "same_weights": mnist.same_weights(each.model),
        }
        for each, row, error in zip(contenders, times, worst, strict=True)
    ]


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
    # The network of the demo with more channels and a hidden layer.
    model = mnist.make_model(32, nn.Linear(98 * 32, 1600), nn.ReLU(), nn.Linear(1600, 10))
    with contextlib.ExitStack() as stack:
        stack.enter_context(gloo_process_group(ringreduce.world()))
        names = arguments.contenders.split(",")
        errors: list[list[float]] = [[] for _ in names]
        contenders = [contender(name, copy.deepcopy(model), each) for name, each in zip(names, errors, strict=True)]
        times = train(contenders, arguments.epochs, arguments.batch, arguments.seed)
        rows = report(contenders, times, errors, arguments.seed)
    if ringreduce.rank() == 0:
        print(table(rows, times.shape[1]), flush=True)
        if arguments.output_file:
            arguments.output_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    ringreduce.barrier()
    ringreduce.shutdown()
    return 0 if all(row["same_weights"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
