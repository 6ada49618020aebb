"""Measure shares by speed beside even ones, alone and with late averages, where one rank takes twice as long a sample.

    mpirun -np 4 python benchmarks/shares.py

Ranks sleep for a time per sample, so that cores do not matter, and train a small model on synthetic data. Contenders
have turns, each in a world of its own, with the same start and the same global batches: the losses of both kinds of
shares are to be equal up to rounding. Shares settle in the first epochs, which are not timed; figures are medians of
the others.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

import ringreduce.torch as hvd

FEATURES, STEPS, SETTLING, TIMED = 64, 36, 4, 3
#: Shares and staleness, by the name of the contender.
CONTENDERS = {"even": ("even", 0), "speed": ("speed", 0), "even, staleness 4": ("even", 4)}


def data(count: int) -> tuple[Tensor, Tensor]:
    """Return samples and what a model is to say of them, the same on all ranks."""
    x = torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(1))
    return x, x[:, :8].sum(dim=1, keepdim=True).sin()


def train(shares: str, staleness: int, batch_size: int, sample_s: float) -> tuple[list[float], list[float], int]:
    """Train in a world of its own; return samples per second and losses of the epochs, and this rank's last batch."""
    hvd.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model, staleness=staleness)
    whole = data(STEPS * batch_size * hvd.size())
    sampler = hvd.DistributedSampler(whole[0], ends="drop", shares=shares, batch_size=batch_size)
    mine_s = sample_s * (2 if hvd.rank() == hvd.size() - 1 else 1)
    rates, losses, last = [], [], 0
    for epoch in range(SETTLING + TIMED):
        sampler.set_epoch(epoch)
        hvd.barrier()
        begin = time.perf_counter()
        for batch in sampler:
            time.sleep(mine_s * len(batch))
            optimizer.zero_grad()
            functional.mse_loss(model(whole[0][batch]), whole[1][batch]).backward()
            optimizer.step()
            last = len(batch)
        hvd.barrier()  # with staleness the slow rank is some steps behind the others
        rates.append(len(whole[0]) / (time.perf_counter() - begin))
        with torch.no_grad():
            losses.append(functional.mse_loss(model(whole[0]), whole[1]).item())
    del sampler
    hvd.shutdown()
    return rates, losses, last


def main() -> None:
    """Print rates and losses of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--batch", type=int, default=20, help="samples of a rank, on average")
    parser.add_argument("--sample-ms", type=float, default=4.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    losses: dict[str, list[float]] = {}
    lasts: dict[str, int] = {}
    for _ in range(arguments.turns):
        for name, found in rates.items():
            timed, losses[name], lasts[name] = train(*CONTENDERS[name], arguments.batch, arguments.sample_ms * 1e-3)
            found += timed[SETTLING:]
    hvd.init()
    counts = hvd.allgather_object(lasts["speed"])
    if hvd.rank() == 0:
        even = median(rates["even"])
        for name, found in rates.items():
            said = " ".join(f"{each:.6f}" for each in losses[name])
            print(f"{name:18} {median(found):6.0f} samples/s, {median(found) / even:.2f} of even; losses {said}")
        print(f"at most {(hvd.size() - 0.5) / hvd.size() * 2:.2f} is possible; batches by speed: {counts}")


if __name__ == "__main__":
    main()
