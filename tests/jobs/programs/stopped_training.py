"""Train in one of the bindings, elastically, and ask one rank to stop.

    ringreduce run -np 2 stopped_training.py FOLDER WAY RANK@STEP:HOW ...

HOW: "SIGTERM" or "SIGUSR1", which the rank sends itself in that step; "launcher SIGTERM" and the like, which it sends
to a process above it; "handler": its own handler of SIGTERM calls `request_stop`; "twice": two SIGTERMs at once;
"after SECONDS": SIGTERM from another thread, wherever the rank is by then, but within that step or the next. Each
happens once, also in a job that begins again. After each step, a rank writes its number to a file of its own in
FOLDER; in the end, rank 0 writes the bits of its weights.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import elastic_training as program

import ringreduce as rr
from ringreduce.common import processes
from ringreduce.elastic.handlers import HandlingState

EVERY = 1000  # commits are written when the job stops alone


def in_numpy(name: str) -> program.Way:
    """Return a way that imports no framework."""
    kept: list[Any] = []

    def step(inputs: Any, targets: Any) -> None:
        (state,) = kept
        error = 2 * (inputs @ state.matrix + state.bias - targets) / targets.size
        state.matrix = state.matrix - program.RATE * rr.allreduce(inputs.T @ error, "average")
        state.bias = state.bias - program.RATE * rr.allreduce(error.sum(0), "average")

    def make_state(**more: Any) -> Any:
        matrix, bias = program.beginning()
        kept.append(HandlingState(matrix=matrix, bias=bias, **more))
        return kept[0]

    return program.Way(step, lambda: [kept[0].matrix, kept[0].bias], lambda: None, make_state)


sending: list[threading.Timer] = []  # what sends a signal later
WAYS = {**program.WAYS, "numpy": in_numpy}


def warn(how: str) -> None:
    """Send a signal, to this rank or a process above it."""
    who, _, name = how.rpartition(" ")
    if who == "after":
        sending.append(threading.Timer(float(name), os.kill, (os.getpid(), signal.SIGTERM)))
        sending[-1].start()
        return
    if how == "handler":
        signal.signal(signal.SIGTERM, lambda number, frame: rr.request_stop())
    if how == "twice":
        os.kill(os.getpid(), signal.SIGTERM)
    pids = {"": os.getpid()}
    if who:
        above = dict(processes.ancestors())
        pids["mpirun"] = program.mpirun()
        over = list(above)[list(above).index(pids["mpirun"]) + 1 :]
        pids["launcher"] = next(pid for pid in over if above[pid] not in ("mpirun", "sh"))  # a script in its place
    os.kill(pids[who], getattr(signal, name, signal.SIGTERM))


def warn_once(folder: Path, me: int, step: int) -> None:
    """Send the signals that are due on this rank in this step, and wait for those of the step before."""
    for timer in sending:
        timer.join()
    for each in sys.argv[3:]:
        place, _, how = each.partition(":")
        mark = folder / f"warned-{place}"
        if place == f"{me}@{step}" and not mark.exists():
            mark.touch()
            warn(how)


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    rr.init()
    me = rr.rank()
    binding, _, option = name.partition("-")
    way = WAYS[binding](option)
    state = way.make_state(number=0)
    state.keep_on_disk(str(folder / "commits"), every=EVERY)
    waits = any(" SIG" in each for each in sys.argv[3:]) and not list(folder.glob("warned-*"))

    @rr.elastic.run
    def train(state: Any) -> None:
        with open(folder / f"steps-{me}", "a") as steps:
            while state.number < program.STEPS:
                warn_once(folder, me, state.number)
                way.step(*program.batch(state.number, me))
                steps.write(f"{state.number}\n")
                steps.flush()
                state.number += 1
                state.commit()
            while waits:  # for a signal from outside, which takes its time, in commits that change nothing
                state.commit()

    train(state)
    way.finish()
    if me == 0:
        (folder / "weights").write_bytes(b"".join(each.tobytes() for each in way.weights()))


if __name__ == "__main__":
    main()
