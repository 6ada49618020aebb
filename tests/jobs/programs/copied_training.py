"""Train in one of the bindings, each host with a folder of its own for commits; let the job be killed in the midst.

    mpirun -np 3 copied_training.py FOLDER WAY RANK@STEP[:MICROSECONDS]

Consecutive ranks, as many as RINGREDUCE_NODE_SIZE says, are a host, whose disk is a folder in FOLDER. Unless a job has
begun again with a commit, RANK kills itself in STEP: when all that was committed is written, or so long after that step
has begun. In the end each rank writes the bits of its weights to FOLDER, and
the commit with which it has begun.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import elastic_training as program
import numpy as np
import stopped_training

import ringreduce as rr
from ringreduce.training.data.generators import Generators, seed_of_rank


def main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    who, _, when = sys.argv[3].partition("@")
    at, _, delay = when.partition(":")
    rr.init()
    np.random.seed(seed_of_rank(5) % (1 << 32))
    me = rr.rank()
    host = me // int(os.environ["RINGREDUCE_NODE_SIZE"])
    binding, _, option = name.partition("-")
    way = stopped_training.WAYS[binding](option)
    state = way.make_state(number=0, generators=Generators())
    begun = state.keep_on_disk(folder / f"disk-{host}", replicas=2)
    while state.number < program.STEPS:
        if begun is None and state.number == int(at):
            if not delay:
                state._disk.settle()
                rr.barrier()
            if me == int(who):
                threading.Timer(int(delay or 0) / 1e6, os.kill, [os.getpid(), signal.SIGKILL]).start()
            if not delay:
                threading.Event().wait()  # for the end
        if state.number in (1, int(at) - 1):  # commit 1 is whole, and the one before the end is not skipped
            state._disk.settle()
            rr.barrier()
        inputs, targets = program.batch(state.number, me)
        way.step(inputs * np.float32(np.random.rand()), targets)  # the generator that is kept
        state.number += 1
        state.commit()
    state._disk.settle()
    way.finish()
    (folder / f"weights-{me}").write_bytes(b"".join(each.tobytes() for each in way.weights()))
    (folder / f"begun-{me}").write_text(str(begun))


if __name__ == "__main__":
    main()
