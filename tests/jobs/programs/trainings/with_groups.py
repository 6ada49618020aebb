"""Random trainings on the backend of torch.distributed: DistributedDataParallel and FSDP2."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringreduce.torch.distributed  # noqa: F401  (registers the backend)
from trainings import episodes
from trainings.episodes import RANK, SIZE, Episode
from trainings.with_torch import OPTIMIZERS, begin  # noqa: F401 which fuzz_training.py calls


class Model(nn.Module):
    """Layers of which a pass may leave out one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.side, self.head = nn.Linear(3, width), nn.Linear(3, width), nn.Linear(width, 2)
        self.double()

    def forward(self, x: torch.Tensor, *, side: bool) -> torch.Tensor:
        """Return two numbers for each row."""
        hidden = torch.tanh(self.body(x))
        return self.head(hidden + self.side(x) if side else hidden)


class Training(episodes.Training):
    """One model over the ranks, by `DistributedDataParallel` or `fully_shard`, and the same in one process."""

    def __init__(self, episode: Episode, way: str, number: int) -> None:
        draw = self.draw = episode.draw
        self.episode, self.way = episode, way
        torch.manual_seed(draw.randrange(1 << 30))
        inner = Model(draw.choice([1, 5, 40]))
        self.alone = copy.deepcopy(inner)
        name = draw.choice(["SGD", "momentum", "Adam", "RMSprop"])
        self.options: dict[str, Any] = {}
        if way == "ddp":
            episode.drawn["DDP"] += 1
            self.options["gradient_as_bucket_view"] = draw.chance(0.5)
            self.options["bucket_cap_mb"] = draw.choice([None, 1e-4])
            self.options["find_unused_parameters"] = draw.chance(0.5)
            self.model: Any = DistributedDataParallel(inner, **self.options)
        else:
            episode.drawn["FSDP2"] += 1
            self.options["reshard_after_forward"] = draw.chance(0.5)
            mesh = init_device_mesh("cpu", (SIZE,))
            for layer in (inner.body, inner.side) if draw.chance(0.5) else ():
                fully_shard(layer, mesh=mesh, **self.options)
            self.model = fully_shard(inner, mesh=mesh, **self.options)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.reference = OPTIMIZERS[name](self.alone.parameters())
        episode.say(f"model {number}: {way} {name} {self.options}")

    def train(self) -> None:
        """Make one step, of several passes perhaps, and compare."""
        draw = self.draw
        passes = draw.choice([1, 1, 2]) if self.way == "ddp" else 1
        leaves_out = self.options.get("find_unused_parameters", False) and passes == 1 and draw.chance(0.5)
        self.optimizer.zero_grad()
        self.reference.zero_grad()
        self.episode.hold()
        for turn in range(passes):
            for rank, rng in enumerate(self.episode.numbers()):
                # A parameter that no rank uses keeps no gradient, so the last rank uses all.
                side = not leaves_out or rank == SIZE - 1
                x, y = (torch.from_numpy(rng.normal(size=(4, width))) for width in (3, 2))
                if rank == RANK:
                    with self.model.no_sync() if turn < passes - 1 else nullcontext():
                        (self.model(x, side=side) - y).square().mean().backward()
                ((self.alone(x, side=side) - y).square().mean() / SIZE).backward()
        self.optimizer.step()
        self.reference.step()
        self.compare()

    def finish(self) -> None:
        """Compare."""
        self.compare()

    def compare(self) -> None:
        """Compare weights."""
        found = {name.removeprefix("module."): _whole(p) for name, p in self.model.named_parameters()}
        right = {name: p.detach().numpy() for name, p in self.alone.named_parameters()}
        self.episode.compare(found, right, 1e-8)


def _whole(p: Any) -> np.ndarray:
    return (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy()


def train(episode: Episode, way: str, folder: Path | None) -> int:
    """Train one or two models in turn, in a process group of their own; return the number of steps."""
    dist.init_process_group("ringreduce")
    trainings = [Training(episode, way, number) for number in range(episode.draw.choice([1, 1, 2]))]
    steps = episodes.train_in_turn(episode, trainings, None, None)
    del trainings
    dist.destroy_process_group()
    return steps
