"""Random trainings (programs/fuzz_training.py) in all frameworks, by 1 to 4 ranks, on nodes of 1, 2 and all.

    python tests/jobs/random_trainings.py --steps 20000 --seed 1
    python tests/jobs/random_trainings.py --steps 500 keras-jax tensorflow     # these alone

The steps are divided among the jobs. Each has a time limit; what is wrong, hangs or crashes is named with its seed.
Jobs in torch save their last training, and the next one goes on from it, among other ranks and in another way.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from launching import PROGRAMS, run_job

PROGRAM = PROGRAMS / "fuzz_training.py"
TORCH = ["torch", "shard", "late", "samples", "local"]
OTHERS = ["tensorflow", "keras-tensorflow", "keras-jax", "keras-torch", "jax"]
START_S, STEP_S = 120, 1.5  # what a job may take


def run(ways: Sequence[str], ranks: int, node_size: str, steps: int, seed: int, folder: Path) -> bool:
    """Run one job, with steps in each of some ways; print what it said, or why it failed; return if all was right."""
    names = [way.partition("-")[0] for way in ways]
    backend = ways[0].partition("-")[2]
    settings = {"RINGREDUCE_NODE_SIZE": node_size or None, "RINGREDUCE_TIMEOUT": "30", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend:
        settings["KERAS_BACKEND"] = backend
    how = "--steps", steps, "--seed", seed, *(("--folder", folder) if {*names} <= {*TORCH} else ())
    done = run_job(ranks, PROGRAM, *names, *how, limit_s=START_S + STEP_S * steps * len(ways), **settings)
    said = done.stdout.strip() if done.returncode == 0 else f"status {done.returncode}\n{done.stderr}"
    print(f"{' '.join(ways)}, {ranks} ranks, nodes of {node_size or 'all'}, seed {seed}: {said}", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*TORCH, *OTHERS, []]
    parser.add_argument("ways", nargs="*", choices=choices, help="which (default: all that can be imported)")
    parser.add_argument("--steps", type=int, default=20_000, help="in all jobs together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first job (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="how many (default: 1 2 3 4)")
    chosen = parser.parse_args()
    ways = chosen.ways or [*TORCH, *(OTHERS if find_spec("tensorflow") and find_spec("jax") else [])]
    sizes = [(ranks, node) for ranks, node in product(chosen.ranks, ("", "1", "2")) if not node or ranks > int(node)]
    jobs = list(product(ways, sizes))
    random.Random(chosen.seed).shuffle(jobs)  # so that a training goes on in another way
    failed = 0
    with tempfile.TemporaryDirectory(prefix="trainings-") as folder:
        for number, (way, (ranks, node_size)) in enumerate(jobs):
            steps = -(-chosen.steps // len(jobs))
            failed += not run([way], ranks, node_size, steps, chosen.seed + number, Path(folder))
    print(f"{len(jobs) - failed} of {len(jobs)} jobs were right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
