"""A job that trains at random, and compares each step with one process that has the data of all ranks.

    . scripts/_env && launch 3 600 python tests/jobs/programs/fuzz_training.py torch --steps 300 --seed 7

All ranks draw the same trainings from the seed, and the data of all ranks, so that each can compute by itself what must
come out. Exit code 0 and a line of counts: all weights were right, with the same bits on all ranks, and nothing raised
an error. Else standard error has the seed and the number of the training, for ``--only``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from trainings import episodes

MODULES = {
    "torch": "with_torch",
    "shard": "with_torch",
    "late": "with_torch",
    "samples": "with_torch",
    "local": "with_local",
    "ddp": "with_groups",
    "fsdp": "with_groups",
    "tensorflow": "with_tensorflow",
    "keras": "with_keras",
    "jax": "with_jax",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+", choices=MODULES, help="how steps are made: in one way after the other")
    parser.add_argument("--steps", type=int, default=200, help="of each way, at least so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all draws (default: %(default)s)")
    parser.add_argument("--only", type=int, default=None, help="the one training to make again")
    parser.add_argument("--stop", action="store_true", help="end by a stop that one rank was asked for, with status 75")
    parser.add_argument("--folder", type=Path, default=None, help="go on from what another job has left there")
    chosen = parser.parse_args()
    drawn: Counter[str] = Counter()
    for way in chosen.ways:
        module = importlib.import_module(f"trainings.{MODULES[way]}")
        module.begin()
        train = partial(module.train, way=way, folder=chosen.folder)
        drawn += episodes.run(train, chosen.seed, chosen.steps, chosen.only)
    if chosen.stop:
        episodes.stop(train, chosen.seed)
        drawn["stop"] += 1
    episodes.say_drawn(drawn)
    return os.EX_TEMPFAIL if chosen.stop else 0


if __name__ == "__main__":
    sys.exit(main())
