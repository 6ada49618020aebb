"""Measure a training step with ringreduce's optimizer beside its alternatives, in turn, in one run.

    mpirun -np 2 python benchmarks/training.py                # 24 x 1024x1024 linear layers, 25 M parameters
    mpirun -np 2 python benchmarks/training.py --model cnn    # 80 convolutions, 162 small tensors
    mpirun -np 2 python benchmarks/training.py --device cuda  # on GPUs, which several ranks may share
    mpirun -np 2 python benchmarks/training.py --contenders plain,ringreduce,no-overlap,gloo
    mpirun -np 2 python benchmarks/training.py --contenders ddp,ddp-shared,gloo,gloo-views,fsdp,fsdp-gloo
    scripts/cluster run -np 4 python benchmarks/training.py --model digits --contenders gloo-fp16,int8,powersgd

Contenders, each with a copy of the same model on the same data:

    plain       no communication: what the step costs without its peers
    ringreduce  ringreduce.torch.DistributedOptimizer, which between hosts tries overlap out in its first 40 steps or so
    overlap     the same with overlap=True
    no-overlap  the same with overlap=False
    backward    the same with reduce_in="backward"
    shard       the same with shard="node"; benchmarks/sharding.py measures more of it
    shard-all   the same with shard="all"
    mpi         by hand: flatten the gradients, one MPI_Allreduce, copy them back
    ddp         torch's DistributedDataParallel on ringreduce as a backend of torch.distributed
    gloo        the same over Gloo
    ddp-shared  DDP whose gradients are views of its buckets, on ringreduce, with the hook of
                ringreduce.torch.distributed.ddp
    gloo-views  DDP whose gradients are views of its buckets, over Gloo
    fsdp        torch's fully_shard, each linear layer or convolution on its own, on ringreduce
    fsdp-gloo   the same over Gloo
    gloo-fp16   DDP over Gloo with its hook that sends gradients as float16
    zero        DDP over Gloo with torch's ZeroRedundancyOptimizer
    NAME        DistributedOptimizer with Compression.NAME; powersgd has rank 4, topk sends 1 %
    NAME-plain  the same without error feedback

A step is zero_grad, forward, backward and optimizer.step; its time is the slowest rank's, the figure the median over
the steps. The processor's time is the mean over steps and ranks, of all threads. The contenders take short turns. A
turn begins with a heap like that of a process of its own: nobody holds gradients, and free memory has gone back to the
kernel. Otherwise one contender's heap would keep memory at hand for the next, and gradients that are allocated anew in
every step would cost none of the page faults that they cost in a training script. At the end the ranks' weights must be
bitwise equal, and the contenders' equal within rounding, unless they compress; else the exit status is 1.

The model "digits" is the CNN of the demo on its digits, scaled up to 5 million parameters. The accuracy is that on
digits that were never trained on: with 1000 of them, one per cent is noise.
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
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import mnist
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, mse_loss

import ringreduce
import ringreduce.torch as hvd
from ringreduce.bench.peers import gloo_process_group, mpi_library
from ringreduce.common.quantities import plural
from ringreduce.torch.distributed.ddp import adopt

COMPRESSIONS = ("fp16", "bf16", "fp8", "int8", "int4", "powersgd", "topk")
TURN = 5  # steps of a contender that are timed in a row
LEAD = 2  # steps before them that are not

Batch = tuple[torch.Tensor, torch.Tensor]
Make = Callable[..., torch.optim.Optimizer]  # of parameters


@dataclass
class Contender:
    """A model that is being trained.

    Attributes:
        name: as the command line and the report call it.
        model: as it was before anything wrapped it.
        step: does all of one step, forward to update, and returns the seconds after the backward pass.
        optimizer: as it is after what wraps it.
        cpu_s: seconds of the processor that a step has taken.
    """

    name: str
    model: nn.Module
    step: Callable[[torch.Tensor, torch.Tensor], float]
    optimizer: torch.optim.Optimizer
    cpu_s: float = 0.0


class Problem(NamedTuple):
    """What is trained: the model, the batches of this rank (of how many samples), and the options of SGD."""

    model: nn.Module
    batches: Callable[[int], Iterator[Batch]]
    options: dict[str, float]


def mlp(width: int = 1024, depth: int = 24) -> Problem:
    """Return so many linear layers of width x width."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU(inplace=True))]
    return Problem(nn.Sequential(*layers), partial(random_batches, (width,), (width,)), {"lr": 0.001})


def cnn() -> Problem:
    """Return 80 convolutions of 32 channels and a linear layer, 162 tensors; it diverges from a rate of 0.01."""
    layers = [layer for _ in range(80) for layer in (nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(inplace=True))]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return Problem(model, partial(random_batches, (32, 4, 4), (10,)), {"lr": 0.001})


def random_batches(sample: tuple[int, ...], target: tuple[int, ...], batch: int) -> Iterator[Batch]:
    """Yield batches that differ between ranks and steps."""
    random = torch.Generator().manual_seed(1000 + ringreduce.rank())
    while True:
        yield torch.randn(batch, *sample, generator=random), torch.randn(batch, *target, generator=random)


def digits() -> Problem:
    """Return the network of the demo with more channels and a hidden layer."""
    images, labels = (each[mnist.TEST_COUNT :] for each in mnist.load_digits(seed=1))
    model = mnist.make_model(32, nn.Linear(98 * 32, 1600), nn.ReLU(), nn.Linear(1600, 10))

    def batches(batch: int) -> Iterator[Batch]:
        for epoch in count():
            yield from mnist.batches(images, labels, batch, epoch)

    return Problem(model, batches, {"lr": 0.02, "momentum": 0.9})


PROBLEMS = {"mlp": mlp, "cnn": cnn, "digits": digits}


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add up the gradients of a batch whose targets are classes or numbers."""
    loss = mse_loss if y.is_floating_point() else cross_entropy
    loss(model(x), y).backward()


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """Do one step; whatever communicates does so inside backward or step. Return the seconds of the latter."""
    optimizer.zero_grad()
    backward(model, x, y)
    begin = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - begin


def plain(model: nn.Module, make: Make) -> Contender:
    """Train every rank on its own."""
    optimizer = make(model.parameters())
    return Contender("plain", model, lambda x, y: descend(model, optimizer, x, y), optimizer)


def distributed_optimizer(name: str, model: nn.Module, make: Make, **options: Any) -> Contender:
    """Train with the optimizer wrapped by ringreduce."""
    optimizer = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **options)
    return Contender(name, model, lambda x, y: descend(model, optimizer, x, y), optimizer)


def flat_mpi(model: nn.Module, make: Make) -> Contender:
    """Average the gradients by hand, in one buffer and one call of the MPI library."""
    from mpi4py import MPI

    parameters = list(model.parameters())
    optimizer, comm = make(parameters), MPI.COMM_WORLD.Dup()
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes), device=parameters[0].device)
    host = torch.zeros_like(flat, device="cpu", pin_memory=True) if flat.is_cuda else flat
    parts = [part.view(p.shape) for part, p in zip(flat.split(sizes), parameters, strict=True)]

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        backward(model, x, y)
        begin = time.perf_counter()
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
        return time.perf_counter() - begin

    return Contender("mpi", model, step, optimizer)


def ddp(
    name: str,
    backend: str,
    model: nn.Module,
    make: Make,
    *,
    views: bool = False,
    half: bool = False,
    zero: bool = False,
) -> Contender:
    """Train the model wrapped by torch.

    Args:
        name: of the contender.
        backend: of its process group.
        model: what to train.
        make: makes the optimizer.
        views: gradients are views of buckets, on ringreduce in shared memory.
        half: gradients travel as float16.
        zero: each rank has the state of some parameters, and updates these; ``make`` is a `partial` then.
    """
    group = dist.new_group(backend=backend)  # type: ignore[no-untyped-call]
    if zero:
        assert isinstance(make, partial)
        make = partial(ZeroRedundancyOptimizer, optimizer_class=make.func, process_group=group, **make.keywords)
    optimizer = make(model.parameters())
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=views)
    if views and backend == "ringreduce":
        adopt(wrapped)
    if half:
        wrapped.register_comm_hook(group, fp16_compress_hook)
    return Contender(name, model, lambda x, y: descend(wrapped, optimizer, x, y), optimizer)


def fsdp(name: str, backend: str, model: nn.Module, make: Make) -> Contender:
    """Train the model sharded by torch."""
    group = dist.new_group(backend=backend)  # type: ignore[no-untyped-call]
    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make(model.parameters())
    return Contender(name, model, lambda x, y: descend(model, optimizer, x, y), optimizer)


def compressing(name: str, model: nn.Module, make: Make) -> Contender:
    """Train with the optimizer wrapped by ringreduce, and a compression."""
    kind, _, without = name.partition("-")
    made: Any = getattr(hvd.Compression, kind)
    if kind in ("powersgd", "topk"):
        made = made(**({"rank": 4} if kind == "powersgd" else {}), error_feedback=not without)
    elif without:
        made = type(f"{kind}_without", (made,), {"error_feedback": False})
    return distributed_optimizer(name, model, make, compression=made)


LOSSY = [f"{kind}{without}" for kind in COMPRESSIONS for without in ("", "-plain")]
CONTENDERS: dict[str, Callable[[nn.Module, Make], Contender]] = {
    "plain": plain,
    "ringreduce": partial(distributed_optimizer, "ringreduce"),
    "overlap": partial(distributed_optimizer, "overlap", overlap=True),
    "no-overlap": partial(distributed_optimizer, "no-overlap", overlap=False),
    "backward": partial(distributed_optimizer, "backward", reduce_in="backward"),
    "shard": partial(distributed_optimizer, "shard", shard="node"),
    "shard-all": partial(distributed_optimizer, "shard-all", shard="all"),
    "mpi": flat_mpi,
    "ddp": partial(ddp, "ddp", "ringreduce"),
    "gloo": partial(ddp, "gloo", "gloo"),
    "ddp-shared": partial(ddp, "ddp-shared", "ringreduce", views=True),
    "gloo-views": partial(ddp, "gloo-views", "gloo", views=True),
    "fsdp": partial(fsdp, "fsdp", "ringreduce"),
    "fsdp-gloo": partial(fsdp, "fsdp-gloo", "gloo"),
    "gloo-fp16": partial(ddp, "gloo-fp16", "gloo", half=True),
    "zero": partial(ddp, "zero", "gloo", zero=True),
    **{name: partial(compressing, name) for name in LOSSY},
}


def measure(contenders: list[Contender], batches: Iterator[Batch], steps: int) -> Any:
    """Return seconds of ``steps`` steps of every contender, shape (2, contenders, steps), the same on all ranks.

    They are those of the slowest rank for whole steps, and those from the end of the last rank's backward pass to the
    end of the last rank's step.
    """
    times = np.empty((2, len(contenders), steps))
    for first in range(0, steps, TURN):
        turn = range(first, min(first + TURN, steps))
        lead, timed = [next(batches) for _ in range(LEAD)], [next(batches) for _ in turn]
        for row, contender in zip(times.swapaxes(0, 1), contenders, strict=True):
            empty_heap(contenders)
            for x, y in lead:
                contender.step(x, y)
            for step, (x, y) in zip(turn, timed, strict=True):
                finish(x)
                ringreduce.barrier()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                after = contender.step(x, y)
                finish(x)
                whole_s = time.perf_counter() - begin
                row[:, step] = whole_s, whole_s - after
                contender.cpu_s += (time.process_time() - cpu_begin) / steps
    steps_s, backward_s = ringreduce.allreduce(times, "max")
    return np.stack([steps_s, steps_s - backward_s])


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


def weights_agree(contenders: list[Contender]) -> bool:
    """Check that weights are bitwise equal over the ranks, and equal within rounding among who sends all of them."""
    weights = {each.name: [whole(p) for p in each.model.parameters()] for each in contenders if each.name != "plain"}
    sums = [zlib.crc32(p.cpu().contiguous().numpy()) for each in weights.values() for p in each]
    everyone = ringreduce.allgather(np.array(sums, np.int64)[None])
    same = bool((everyone == everyone[0]).all())
    first, *others = [weights[name] for name in weights if name not in ("gloo-fp16", *LOSSY)] or [[]]
    for other in others:
        pairs = zip(first, other, strict=True)
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
        "ratios": {f"{one}/{other}": medians[one] / medians[other] for one in medians for other in medians},
        "accuracy": accuracy(contenders) if arguments.model == "digits" else {},
        "weights_agree": agree,
    }


def accuracy(contenders: list[Contender]) -> dict[str, float]:
    """Return the share of right answers of each contender. Collective."""
    images, labels = (each[ringreduce.rank() : mnist.TEST_COUNT : ringreduce.size()] for each in mnist.load_digits(1))
    return {each.name: mnist.evaluate(each.model, images, labels) for each in contenders}


def table(found: dict[str, Any]) -> str:
    """Write the report for the eye."""
    config = found["config"]
    lines = [
        f"{config['model']}: {config['parameters'] / 1e6:.2f} M parameters in {config['tensors']} tensors, "
        f"batch {config['batch']} per rank, SGD; {config['placement']}, {plural(config['cores'], 'core')}, "
        f"{config['threads']} threads per rank",
        f"median of {config['steps']} steps, contenders in turns of {TURN}",
        "",
        f"{'contender':<12}{'median (ms)':>12}{'min (ms)':>12}{'cpu (ms)':>12}{'ringreduce /':>14}"
        + "  accuracy" * bool(found["accuracy"]),
    ]
    for name, ms in found["median_ms"].items():
        ratio = found["ratios"].get(f"ringreduce/{name}", math.nan)
        least, cpu = found["min_ms"][name], found["cpu_ms"][name]
        right = f"{found['accuracy'][name]:>10.1%}" if found["accuracy"] else ""
        lines.append(f"{name:<12}{ms:>12.2f}{least:>12.2f}{cpu:>12.2f}{ratio:>14.2f}{right}")
    lines += ["", f"weights agree: {'yes' if found['weights_agree'] else 'NO'}"]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=PROBLEMS, default="mlp")
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
    model, endless, options = PROBLEMS[arguments.model]()
    device = mnist.choose_device(arguments.device)
    model.to(device)
    make = partial(torch.optim.SGD, **options)
    with contextlib.ExitStack() as stack:
        stack.enter_context(gloo_process_group(ringreduce.world()))
        contenders = [CONTENDERS[name](copy.deepcopy(model), make) for name in arguments.contenders]
        batches = ((x.to(device), y.to(device)) for x, y in endless(arguments.batch))
        times, _ = measure(contenders, batches, arguments.steps)
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
