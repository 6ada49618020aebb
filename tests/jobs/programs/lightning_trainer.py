"""Trains with Lightning on ringreduce, and once more on Gloo with Lightning's own strategy: all must be equal.

Usage: lightning_trainer.py FOLDER
"""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import ringreduce
import ringreduce.torch.lightning
import ringreduce.torch.lightning.pytorch_lightning
from ringreduce.torch.lightning import RingreduceStrategy

TRAIN, TEST = 37, 11  # no multiples of ranks or batches
FOLDER = Path(sys.argv[1])


class CountedWrites(TorchCheckpointIO):
    """Counts the checkpoints that this rank writes."""

    written = 0

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.written += 1
        super().save_checkpoint(*args, **options)


def module(package: ModuleType) -> Any:
    """Return a regression in float64, as a LightningModule of a package."""

    class Regression(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 1)).double()
            self.error = MeanMetric().set_dtype(torch.float64)
            self.history: list[tuple[str, float]] = []
            self.seen: list[float] = []

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            self.seen += batch[1].flatten().tolist()
            loss = (self.model(batch[0]) - batch[1]).square().mean()
            self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def validation_step(self, batch: list[Tensor], _: int) -> None:
            error = (self.model(batch[0]) - batch[1]).abs()
            self.error.update(error)
            self.log("error", self.error)
            self.log("worst", error.max(), sync_dist=True, reduce_fx="max")

        def on_train_epoch_end(self) -> None:
            metrics = self.trainer.callback_metrics
            self.history += [(name, metrics[name].item()) for name in ("loss", "error", "worst")]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    return Regression()


def fit(package: ModuleType, strategy: Any, folder: str, epochs: int = 2, resume: Path | None = None, **options: Any):
    """Train; return the trainer and the module."""
    package.seed_everything(3, verbose=False)
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(TRAIN + TEST, 5, generator=draw, dtype=torch.float64)
    data = inputs, inputs.sum(1, keepdim=True).sin()
    train = DataLoader(TensorDataset(*(each[:TRAIN] for each in data)), batch_size=4, shuffle=True)
    test = DataLoader(TensorDataset(*(each[TRAIN:] for each in data)), batch_size=3)
    checkpoints = package.callbacks.ModelCheckpoint(FOLDER / folder, "{epoch}", save_top_k=-1)
    trainer = package.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=epochs,
        gradient_clip_val=0.1,
        callbacks=[checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = module(package)
    trainer.fit(model, train, test, ckpt_path=resume)
    return trainer, model


def assert_equal(model: Any, expected: Any, epochs: slice = slice(None)) -> None:
    """Compare losses, metrics and weights."""
    assert model.history == expected.history[epochs], (model.history, expected.history)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


def refused(words: str, **options: Any) -> None:
    """A Trainer that contradicts MPI is an error that says so."""
    with pytest.raises(ringreduce.ConfigError, match=words):
        lightning.pytorch.Trainer(strategy="ringreduce", accelerator="cpu", **options)


def check_sharding(shard: Any) -> None:
    """With shards losses and weights are those of DDP, also where gradients of several batches add up."""
    for options in {}, {"accumulate_grad_batches": 2}:
        name = "-".join(["sharded", shard, *options])
        _, expected = fit(lightning.pytorch, "ringreduce", f"{name}-not", **options)
        fit_sharded = partial(fit, lightning.pytorch, **options)
        _, model = fit_sharded(RingreduceStrategy(shard=shard), name)
        saved = FOLDER / name / "epoch=0.ckpt"
        _, resumed = fit_sharded(RingreduceStrategy(shard=shard), f"{name}-resumed", resume=saved)
        losses = [value for name, value in expected.history if name == "loss"]
        assert losses == [value for name, value in model.history if name == "loss"]
        assert losses[1:] == [value for name, value in resumed.history if name == "loss"]
        for weights in zip(*(each.parameters() for each in (expected, model, resumed)), strict=True):
            assert all(torch.equal(each, weights[0]) for each in weights)


def main() -> None:
    # Lightning's own way comes first, and its ranks are the reference.
    environment = MPIEnvironment()
    gloo = DDPStrategy(process_group_backend="gloo", cluster_environment=environment)
    _, expected = fit(lightning.pytorch, gloo, "gloo", devices=environment.world_size())
    assert dist.get_backend() == "gloo"
    dist.destroy_process_group()

    writes = CountedWrites()
    trainer, model = fit(lightning.pytorch, "ringreduce", "ours", plugins=[writes])
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "ringreduce"
    assert_equal(model, expected)

    weights: list[Any] = [None] * size
    dist.all_gather_object(weights, [each.tolist() for each in model.parameters()])
    assert all(each == weights[0] for each in weights)

    # Ranks, machines and devices are those of MPI.
    assert (trainer.global_rank, trainer.world_size) == (environment.global_rank(), environment.world_size())
    assert (trainer.local_rank, trainer.node_rank) == (environment.local_rank(), environment.node_rank())
    assert (trainer.num_nodes, trainer.num_devices, trainer.is_global_zero) == (1, size, rank == 0)

    # Each rank has had its share of the data, and the sampler has filled up what is uneven.
    assert len(model.seen) == 2 * -(-TRAIN // size)
    seen: list[Any] = [None] * size
    dist.all_gather_object(seen, model.seen)
    assert len(set(chain.from_iterable(seen))) == TRAIN

    # Checkpoints are written by rank 0 alone, one an epoch; training goes on from one as if it had not ended.
    assert writes.written == 2 * (rank == 0)
    _, resumed = fit(lightning.pytorch, RingreduceStrategy(), "resumed", resume=FOLDER / "ours" / "epoch=0.ckpt")
    assert_equal(resumed, expected, slice(3, None))

    # The older name of the package has strategies of its own.
    _, older = fit(pytorch_lightning, "ringreduce", "older")
    assert_equal(older, expected)

    check_sharding("node")

    refused("devices=3", devices=3)
    refused("num_nodes=2", num_nodes=2)
    strategy = RingreduceStrategy()
    with pytest.raises(ringreduce.ConfigError, match='accelerator="cpu"'):
        strategy.parallel_devices = [torch.device("cuda", 0)]

    dist.destroy_process_group()
    ringreduce.shutdown()
    os.environ["RINGREDUCE_NODE_SIZE"] = "1"  # each rank has a part of the state, and no other one can see it
    check_sharding("all")
    assert len(ringreduce.world().topology.nodes) == size
    print("done")


if __name__ == "__main__":
    main()
