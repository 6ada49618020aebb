"""Measure a training step with ringreduce's optimizer beside its alternatives, in turn, in one run.

    mpirun -np 2 python benchmarks/training.py                # 24 x 1024x1024 linear layers, 25 M parameters
    mpirun -np 2 python benchmarks/training.py --model cnn    # 80 convolutions, 162 small tensors
    mpirun -np 2 python benchmarks/training.py --device cuda  # on GPUs, which several ranks may share
    mpirun -np 2 python benchmarks/training.py --contenders plain,ringreduce,no-overlap,gloo
    mpirun -np 2 python benchmarks/training.py --contenders ddp,ddp-shared,gloo,gloo-views,fsdp,fsdp-gloo

Contenders, each with a copy of the same model on the same data:

    plain       no communication: what the step costs without its peers
    ringreduce  ringreduce.torch.DistributedOptimizer, which between hosts tries overlap out in its first 40 steps or so
    overlap     the same with overlap=True
    no-overlap  the same with overlap=False
    backward    the same with reduce_in="backward"
    mpi         by hand: flatten the gradients, one MPI_Allreduce, copy them back
    ddp         torch's DistributedDataParallel on ringreduce as a backend of torch.distributed
    gloo        the same over Gloo
    ddp-shared  DDP whose gradients are views of its buckets, on ringreduce, with the hook of
                ringreduce.torch.distributed.ddp
    gloo-views  DDP whose gradients are views of its buckets, over Gloo
    fsdp        torch's fully_shard, each linear layer or convolution on its own, on ringreduce
    fsdp-gloo   the same over Gloo

A step is zero_grad, forward, backward and optimizer.step; its time is the slowest rank's, the figure the median over
the steps. The processor's time is the mean over steps and ranks, of all threads. The contenders take short turns. A
turn begins with a heap like that of a process of its own: nobody holds gradients, and free memory has gone back to the
kernel. Otherwise one contender's heap would keep memory at hand for the next, and gradients that are allocated anew in
every step would cost none of the page faults that they cost in a training script. At the end the ranks' weights must be
bitwise equal, and the contenders' equal within rounding; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import ctypes
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mnist import choose_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import ringreduce
import ringreduce.torch as hvd
from ringreduce.bench.cases import plural
from ringreduce.bench.peers import gloo_process_group, mpi_library
from ringreduce.torch.distributed.ddp import AllreduceState, allreduce_hook

LEARNING_RATE = 0.001  # the deep CNN diverges from 0.01
TURN = 5  # steps of a contender that are timed in a row
LEAD = 2  # steps before them that are not

Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Contender:
    """A model that is being trained: ``step`` does all of one step, forward to update; ``cpu_s`` is what it took."""

    name: str
    model: nn.Module
    step: Callable[[torch.Tensor, torch.Tensor], None]
    cpu_s: float = 0.0


def mlp() -> tuple[nn.Module, tuple[int, ...], tuple[int, ...]]:
    """Return 24 layers of 1024 x 1024 and the shapes of a sample and of its target."""
    layers = [layer for _ in range(24) for layer in (nn.Linear(1024, 1024), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers), (1024,), (1024,)


def cnn() -> tuple[nn.Module, tuple[int, ...], tuple[int, ...]]:
    """Return 80 convolutions of 32 channels and a linear layer, 162 tensors; and the shapes of sample and target."""
    layers = [layer for _ in range(80) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True))]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), (32, 4, 4), (10,)


MODELS = {"mlp": mlp, "cnn": cnn}


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Do one step; whatever communicates does so inside backward or step."""
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that all contenders use."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def plain(model: nn.Module) -> Contender:
    """Train every rank on its own."""
    optimizer = sgd(model)
    return Contender("plain", model, lambda x, y: descend(model, optimizer, x, y))


def distributed_optimizer(name: str, model: nn.Module, **options: Any) -> Contender:
    """Train with the optimizer wrapped by ringreduce."""
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(), **options)
    return Contender(name, model, lambda x, y: descend(model, optimizer, x, y))


def flat_mpi(model: nn.Module) -> Contender:
    """Average the gradients by hand, in one buffer and one call of the MPI library."""
    from mpi4py import MPI

    optimizer, comm = sgd(model), MPI.COMM_WORLD.Dup()
    parameters = list(model.parameters())
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    host = torch.zeros_like(flat, device="cpu", pin_memory=True) if flat.is_cuda else flat
    parts = [part.view(p.shape) for part, p in zip(flat.split(sizes), parameters, strict=True)]

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        gradients = [p.grad for p in parameters]
        torch.cat([gradient.view(-1) for gradient in gradients], out=flat)
        if host is not flat:
            host.copy_(flat)
        comm.Allreduce(MPI.IN_PLACE, host.numpy(), MPI.SUM)
        if host is not flat:
            flat.copy_(host)
        flat.div_(comm.size)
        torch._foreach_copy_(gradients, parts)
        optimizer.step()

    return Contender("mpi", model, step)


def ddp(name: str, backend: str, model: nn.Module, *, views: bool = False) -> Contender:
    """Train the model wrapped by torch; ``views``: gradients are views of buckets, on ringreduce in shared memory."""
    optimizer = sgd(model)
    group = dist.new_group(backend=backend)  # type: ignore[no-untyped-call]
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
    if views and backend == "ringreduce":
        wrapped.register_comm_hook(AllreduceState(group), allreduce_hook)
    return Contender(name, model, lambda x, y: descend(wrapped, optimizer, x, y))


def fsdp(name: str, backend: str, model: nn.Module) -> Contender:
    """Train the model sharded by torch."""
    group = dist.new_group(backend=backend)  # type: ignore[no-untyped-call]
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = sgd(model)
    return Contender(name, model, lambda x, y: descend(model, optimizer, x, y))


CONTENDERS: dict[str, Callable[[nn.Module], Contender]] = {
    "plain": plain,
    "ringreduce": partial(distributed_optimizer, "ringreduce"),
    "overlap": partial(distributed_optimizer, "overlap", overlap=True),
    "no-overlap": partial(distributed_optimizer, "no-overlap", overlap=False),
    "backward": partial(distributed_optimizer, "backward", reduce_in="backward"),
    "mpi": flat_mpi,
    "ddp": partial(ddp, "ddp", "ringreduce"),
    "gloo": partial(ddp, "gloo", "gloo"),
    "ddp-shared": partial(ddp, "ddp-shared", "ringreduce", views=True),
    "gloo-views": partial(ddp, "gloo-views", "gloo", views=True),
    "fsdp": partial(fsdp, "fsdp", "ringreduce"),
    "fsdp-gloo": partial(fsdp, "fsdp-gloo", "gloo"),
}


def measure(contenders: list[Contender], batches: Iterator[Batch], steps: int) -> Any:
    """Return the slowest rank's time (seconds) of ``steps`` steps of every contender, shape (contenders, steps)."""
    times = np.empty((len(contenders), steps))
    for first in range(0, steps, TURN):
        turn = range(first, min(first + TURN, steps))
        lead, timed = [next(batches) for _ in range(LEAD)], [next(batches) for _ in turn]
        for row, contender in zip(times, contenders, strict=True):
            empty_heap(contenders)
            for x, y in lead:
                contender.step(x, y)
            for step, (x, y) in zip(turn, timed, strict=True):
                finish(x)
                ringreduce.barrier()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                contender.step(x, y)
                finish(x)
                row[step] = time.perf_counter() - begin
                contender.cpu_s += (time.process_time() - cpu_begin) / steps
    return ringreduce.allreduce(times, "max")


def finish(tensor: torch.Tensor) -> None:
    """Return when the GPU has done what it was given, if the tensor is on one."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def empty_heap(contenders: list[Contender]) -> None:
    """Drop all gradients, and give free memory back to the kernel where the C library can."""
    for each in contenders:
        each.model.zero_grad()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def endless_batches(
    batch: int, sample: tuple[int, ...], target: tuple[int, ...], device: torch.device
) -> Iterator[Batch]:
    """Yield batches that differ between ranks and steps."""
    random = torch.Generator().manual_seed(1000 + ringreduce.rank())
    while True:
        x, y = torch.randn(batch, *sample, generator=random), torch.randn(batch, *target, generator=random)
        yield x.to(device), y.to(device)


def weights_agree(contenders: list[Contender]) -> bool:
    """Check that weights are bitwise equal over the ranks, and equal within rounding among who communicates."""
    trained = [each for each in contenders if each.name != "plain"]
    weights = [[whole(p) for p in each.model.parameters()] for each in trained]
    sums = [zlib.crc32(p.cpu().contiguous().numpy()) for each in weights for p in each]
    everyone = ringreduce.allgather(np.array(sums, np.int64)[None])
    same = bool((everyone == everyone[0]).all())
    for other in weights[1:]:
        pairs = zip(weights[0], other, strict=True)
        same = same and all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)
    return same


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter as it is without shards. Collective."""
    weight: torch.Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return weight.detach()


def report(arguments: argparse.Namespace, contenders: list[Contender], times: Any, agree: bool) -> dict[str, Any]:
    """Return the JSON report. Collective."""
    cpu = ringreduce.allreduce(np.array([each.cpu_s for each in contenders]) * 1e3, "average")
    medians = {each.name: float(np.median(row)) * 1e3 for each, row in zip(contenders, times, strict=True)}
    model = contenders[0].model
    return {
        "config": {
            "model": arguments.model,
            "device": arguments.device,
            "parameters": sum(p.numel() for p in model.parameters()),
            "tensors": sum(1 for _ in model.parameters()),
            "batch": arguments.batch,
            "steps": arguments.steps,
            "ranks": ringreduce.size(),
            "placement": ringreduce.world().topology.describe(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "ringreduce": ringreduce.__version__,
            "torch": torch.__version__,
            "mpi_library": mpi_library(),
        },
        "median_ms": medians,
        "min_ms": {each.name: float(row.min()) * 1e3 for each, row in zip(contenders, times, strict=True)},
        "cpu_ms": dict(zip(medians, cpu.tolist(), strict=True)),
        "ratios": {
            f"ringreduce/{name}": medians["ringreduce"] / ms for name, ms in medians.items() if "ringreduce" in medians
        },
        "weights_agree": agree,
    }


def table(found: dict[str, Any]) -> str:
    """Write the report for the eye."""
    config = found["config"]
    lines = [
        f"{config['model']}: {config['parameters'] / 1e6:.2f} M parameters in {config['tensors']} tensors, "
        f"batch {config['batch']} per rank, SGD; {config['placement']}, {plural(config['cores'], 'core')}, "
        f"{config['threads']} threads per rank",
        f"median of {config['steps']} steps, contenders in turns of {TURN}",
        "",
        f"{'contender':<12}{'median (ms)':>12}{'min (ms)':>12}{'cpu (ms)':>12}{'ringreduce /':>14}",
    ]
    for name, ms in found["median_ms"].items():
        ratio = found["ratios"].get(f"ringreduce/{name}", math.nan)
        least, cpu = found["min_ms"][name], found["cpu_ms"][name]
        lines.append(f"{name:<12}{ms:>12.2f}{least:>12.2f}{cpu:>12.2f}{ratio:>14.2f}")
    lines += ["", f"weights agree: {'yes' if found['weights_agree'] else 'NO'}"]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to train (cpu)")
    parser.add_argument("--batch", type=int, default=16, help="samples per rank and step (16)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each contender (30)")
    names = ",".join(CONTENDERS)
    parser.add_argument(
        "--contenders", default="plain,ringreduce,mpi,gloo", help=f"some of {names} (plain,ringreduce,mpi,gloo)"
    )
    parser.add_argument("-J", "--output_file", type=Path, help="write the JSON report there")
    arguments = parser.parse_args()
    arguments.contenders = list(dict.fromkeys(arguments.contenders.split(",")))
    if unknown := set(arguments.contenders) - set(CONTENDERS):
        parser.error(f"--contenders: {', '.join(sorted(unknown))} is none of {names}")
    return arguments


def main() -> int:
    """Measure and print; return the exit status, the same on all ranks."""
    arguments = parse_arguments()
    ringreduce.init()
    torch.manual_seed(0)  # the same initial weights on all ranks
    model, sample, target = MODELS[arguments.model]()
    device = choose_device(arguments.device)
    model.to(device)
    with contextlib.ExitStack() as stack:
        stack.enter_context(gloo_process_group(ringreduce.world()))
        contenders = [CONTENDERS[name](copy.deepcopy(model)) for name in arguments.contenders]
        batches = endless_batches(arguments.batch, sample, target, device)
        times = measure(contenders, batches, arguments.steps)
        found = report(arguments, contenders, times, weights_agree(contenders))
    if ringreduce.rank() == 0:
        print(table(found), flush=True)
        if arguments.output_file:
            arguments.output_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    ringreduce.barrier()
    ringreduce.shutdown()
    return 0 if found["weights_agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
