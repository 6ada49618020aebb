"""A program that trains without reducing anything is asked, at its end, whether the optimizer is wrapped."""

from __future__ import annotations

import sys

import launching
from launching import RINGREDUCE, needs

needs("torch")

PROGRAM = """
import torch, ringreduce.torch as hvd
hvd.init()
model = torch.nn.Linear(3, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
loss = model(torch.ones(2, 3)).sum()
loss.backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
hvd.allreduce(loss.detach())
"""


def test_a_program_that_reduces_no_gradients_is_asked() -> None:
    """In one line of rank 0, at a normal end; tests/parallel/test_usage.py has what else ends without it."""
    done = launching.run(RINGREDUCE, "run", "-np", 2, sys.executable, "-c", PROGRAM).well()
    (line,) = [line for line in done.stderr.splitlines() if "no gradients were reduced" in line]
    assert line.startswith("ringreduce: rank 0: warning: 1 optimizer steps were made on this rank")
