"""Functions that tests of Ray call on ranks. Workers of Ray import this module, too."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr


def digits() -> tuple[int, int, str, float]:
    """Train a softmax of ten kinds of random pictures; return rank, size, a hash of the weights, and the loss."""
    rr.init()
    rng = np.random.default_rng(7)  # the same on all ranks
    pictures = rng.standard_normal((640, 64)).astype(np.float32)
    kinds = (pictures @ rng.standard_normal((64, 10)).astype(np.float32)).argmax(1)
    mine, labels = pictures[rr.rank() :: rr.size()], kinds[rr.rank() :: rr.size()]
    weights = np.zeros((64, 10), np.float32)
    loss = 0.0
    for _ in range(30):
        scores = np.exp(mine @ weights)
        chances = scores / scores.sum(1, keepdims=True)
        loss = float(-np.log(chances[np.arange(len(mine)), labels]).mean())
        chances[np.arange(len(mine)), labels] -= 1
        weights -= 0.5 * rr.allreduce(mine.T @ chances / len(mine))
    return rr.rank(), rr.size(), hashlib.sha256(weights.tobytes()).hexdigest(), loss


def torch_digits() -> tuple[int, str]:
    """Train a small network by torch; return the rank and a hash of the weights."""
    import torch

    import ringreduce.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    mine = torch.Generator().manual_seed(hvd.rank())
    for _ in range(20):
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=mine)).square().mean().backward()
        optimizer.step()
    flat = torch.cat([each.detach().flatten() for each in model.parameters()])
    return hvd.rank(), hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class Counter:
    """State of a rank that lives from call to call."""

    def __init__(self, first: int) -> None:
        rr.init()
        self.count = first
        self.process = os.getpid()

    def add(self, number: int) -> tuple[int, int, int]:
        self.count += int(rr.allreduce(np.array([number]), op=rr.SUM)[0])
        return rr.rank(), self.count, self.process


def total() -> float:
    """Add up ones over all ranks; go on without ranks that died, in an elastic job."""
    rr.init()
    try:
        return float(rr.allreduce(np.ones(4), op=rr.SUM)[0])
    except rr.PeerLostError as error:
        rr.go_on(error)
        return float(rr.allreduce(np.ones(4), op=rr.SUM)[0])


def fail(rank: int) -> int:
    """Raise an error on one rank."""
    rr.init()
    if rr.rank() == rank:
        raise KeyError("on purpose")
    return rr.rank()


def wait_for(rank: int) -> None:
    """Have all ranks wait for one that never comes."""
    rr.init()
    if rr.rank() != rank:
        rr.barrier()
    else:
        time.sleep(1000)  # it is killed before


def die(rank: int) -> None:
    """Kill one rank, while the others wait for it."""
    rr.init()
    if rr.rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    rr.barrier()


def echo(array: Any) -> Any:
    """Return what was given."""
    return array


def train(folder: str) -> tuple[int, float, int, list[int]]:
    """Train until the folder has a file ``finish``; each step takes 1 from a weight.

    Returns:
        The rank, the weight, how many steps were made, and the numbers of ranks that have made them, in their order.
    """
    import torch

    import ringreduce.torch as hvd

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())

    @hvd.elastic.run
    def repeat(state: Any) -> None:
        while not hvd.broadcast_object(Path(folder, "finish").exists()):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            state.steps += 1
            if state.sizes[-1:] != [hvd.size()]:
                state.sizes = [*state.sizes, hvd.size()]
            Path(folder, f"trains-{hvd.size()}").touch()
            state.commit()
            time.sleep(0.01)  # leaves cores to what the test does

    state = hvd.elastic.TorchState(model, optimizer, steps=0, sizes=[])
    state.keep_on_disk(f"{folder}/commits", every=5)
    repeat(state)
    return hvd.rank(), model.weight.item(), state.steps, state.sizes
