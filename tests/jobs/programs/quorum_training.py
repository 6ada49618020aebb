"""Train with DiLoCo and a quorum while replicas freeze, thaw and die.

    quorum_training.py FOLDER QUORUM STEPS [RANK@STEP:freeze:UNTIL | RANK@STEP:kill ...]

A rank that freezes goes on once another has made outer step UNTIL; rank 0, without which no step is made, soon after.
With deaths it is for `ringreduce run --elastic`. Each rank prints a line of JSON at its end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

import ringreduce.torch as hvd

folder, quorum, steps, events = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]

THAW = """
import os, pathlib, signal, sys, time
pid, until, marks = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
for _ in range(20 if until < 0 else 6000):
    time.sleep(0.01)
    if until >= 0 and any(int(each.name.partition("-")[2]) >= until for each in marks.glob("step-*")):
        break
os.kill(pid, signal.SIGCONT)
"""

hvd.init()
me = hvd.rank()  # the first number of this rank
torch.manual_seed(1)
target = torch.randn(20, 3)
model = torch.nn.Linear(20, 3)
how = {"period": 4, "replica": "rank", "quorum": quorum, "outer_momentum": 0.5}
optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.05), model, **how)
hvd.broadcast_parameters(model)
jumps = []


def happen() -> None:
    """Freeze or die, once, if this rank's time has come."""
    for event in events:
        who, what, *until = event.split(":")
        rank, step = map(int, who.split("@"))
        mark = folder / f"{what}-{rank}"
        if rank != me or optimizer.outer_steps < step or mark.exists():
            continue
        mark.touch()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        thaws = -1 if me == 0 else int(until[0])
        subprocess.Popen([sys.executable, "-c", THAW, str(os.getpid()), str(thaws), str(folder)])
        os.kill(os.getpid(), signal.SIGSTOP)


def train(state=None):
    before = optimizer.outer_steps
    for number in range(100_000):
        if optimizer.outer_steps >= steps:
            break
        happen()
        x = torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * me + number))
        optimizer.zero_grad()
        (model(x) - x @ target).square().mean().backward()
        optimizer.step()
        if state is not None and number < 12:  # Commits are of all ranks, so equally many.
            state.commit()
        if optimizer.outer_steps != before:
            jumps.append(optimizer.outer_steps - before)
            before = optimizer.outer_steps
            (folder / f"step-{before}").touch()
    optimizer.synchronize()


if any(event.endswith(":kill") for event in events):
    hvd.elastic.run(train)(hvd.elastic.TorchState(model, optimizer))
else:
    train()
weights = torch.cat([each.detach().flatten() for each in model.parameters()])
error = float((model.weight.detach() - target.T).square().mean())
print(
    json.dumps(
        {"rank": me, "steps": optimizer.outer_steps, "jumps": jumps, "error": error, "weights": weights.tolist()}
    )
)
