"""Measure how many images per second a small residual network trains on: made-up ones, so that nothing else counts.

    mpirun -np 2 python -m ringreduce.horovod examples/synthetic_benchmark.py
    mpirun -np 2 python -m ringreduce.horovod examples/synthetic_benchmark.py --fp16-allreduce --model resnet20

A script for Horovod as it stands: it says ``import horovod.torch``, and runs there too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn import functional

#: Residual blocks in each of the three stages.
MODELS = {"resnet8": 1, "resnet20": 3, "resnet56": 9}
CLASSES = 10


def main() -> None:
    args = parse_args()
    hvd.init()
    cuda = torch.cuda.is_available() and not args.no_cuda
    device = torch.device("cuda", hvd.local_rank()) if cuda else torch.device("cpu")

    model = ResNet(MODELS[args.model]).to(device)
    # Adasum adapts the size of steps to how much the ranks agree; an average of more gradients allows larger ones.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (1 if args.use_adasum else hvd.size()), momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(args.batch_size, 3, 32, 32, device=device)
    labels = torch.randint(CLASSES, (args.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"Model: {args.model}, {count:,} parameters")
    say(f"Batch size: {args.batch_size} per rank, {hvd.size()} rank(s) on {device.type.upper()}")
    for _ in range(args.num_warmup_batches):
        step()
    rates = []
    for index in range(args.num_iters):
        rates.append(args.batch_size * args.num_batches_per_iter / seconds(step, args.num_batches_per_iter, cuda))
        say(f"Iter #{index}: {rates[-1]:.1f} img/sec per rank")
    totals = hvd.allreduce(torch.tensor(rates, dtype=torch.float64), op=hvd.Sum, name="rates").tolist()
    say(f"Img/sec per rank: {spread(rates)}")
    say(f"Total img/sec on {hvd.size()} rank(s): {spread(totals)}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure the training of a small residual network on made-up images.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--model", choices=MODELS, default="resnet8", help="what to train")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--num-warmup-batches", type=int, default=5, help="steps that are not measured")
    parser.add_argument("--num-batches-per-iter", type=int, default=5, help="steps in one measurement")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements")
    parser.add_argument("--use-adasum", action="store_true", help="combine gradients by Adasum in place of averaging")
    parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU")
    return parser.parse_args()


def seconds(step: Callable[[], None], times: int, cuda: bool) -> float:
    """Return how long so many steps take, all of their work on the device included."""
    begin = time.perf_counter()
    for _ in range(times):
        step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def spread(rates: list[float]) -> str:
    """Write the mean and what 95 % of normally distributed measurements lie within."""
    return f"{statistics.mean(rates):.1f} +-{1.96 * statistics.pstdev(rates):.1f}"


def say(line: str) -> None:
    if hvd.rank() == 0:
        print(line, flush=True)


class Block(nn.Module):
    """Two convolutions, added to what came in."""

    def __init__(self, before: int, channels: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(before, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.shortcut = nn.Identity() if before == channels else nn.Conv2d(before, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """A residual network for images of 32 x 32: three stages, each with half the resolution and twice the channels.

    He, Zhang, Ren and Sun, Deep Residual Learning for Image Recognition, 2015, section 4.2.
    """

    def __init__(self, blocks: int) -> None:
        stages = [
            Block(before if index == 0 else channels, channels, stride if index == 0 else 1)
            for before, channels, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2))
            for index in range(blocks)
        ]
        super().__init__(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )


if __name__ == "__main__":
    main()
