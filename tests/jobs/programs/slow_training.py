"""Trains a small model on all ranks, of which one may be slow: ``slow_training.py KIND STEPS``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import torch

import ringreduce as rr
import ringreduce.torch as hvd

KIND, STEPS = sys.argv[1], int(sys.argv[2])
SLOW_S = 0.06


def batches() -> Iterator[torch.Tensor]:
    for _ in range(STEPS):
        if KIND == "loader":
            time.sleep(SLOW_S)  # stands for a disk that is read
        yield torch.randn(256, 256)


hvd.init()
rank = hvd.rank()
last = hvd.size() - 1
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
hvd.broadcast_parameters(model)
for x in hvd.loading(batches()):
    optimizer.zero_grad()
    for _ in range(20 if KIND == "healthy" else 1):
        loss = model(x).square().mean()
    if KIND == "function" and rank == last:
        time.sleep(SLOW_S)  # stands for a function that waits for something
    loss.backward()
    optimizer.step()
    rr.report_value("loss", loss)
print("done")
