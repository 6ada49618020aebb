"""Random trainings (programs/fuzz_training.py) in all frameworks, by 1 to 4 ranks, on nodes of 1, 2 and all.

    python tests/jobs/random_trainings.py --steps 20000 --seed 1
    python tests/jobs/random_trainings.py --steps 500 keras-jax tensorflow     # these alone

The steps are divided among the jobs. The last line says how often what has hidden faults was drawn.
Each job has a time limit; what is wrong, hangs or crashes is named with its seed.
Jobs in torch save their last training, and the next one goes on from it, among other ranks and in another way.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from launching import PROGRAMS, run_job
from programs.trainings import SOUGHT

from ringreduce.common.keys import write_secret

PROGRAM = PROGRAMS / "fuzz_training.py"
TORCH = ["torch", "shard", "late", "samples", "local", "ddp", "fsdp"]
OTHERS = ["tensorflow", "keras-tensorflow", "keras-jax", "keras-torch", "jax"]
START_S, STEP_S = 120, 1.5  # what a job may take


def run(
    ways: Sequence[str],
    ranks: int,
    node_size: str,
    steps: int,
    seed: int,
    folder: Path,
    drawn: Counter[str] | None = None,
) -> bool:
    """Run one job, with steps in each of some ways; print what it said, or why it failed; return if all was right.

    What the job has drawn is added to ``drawn``. The seed decides whether the job ends by a stop, and what its
    environment asks for.
    """
    draw = random.Random(seed)
    stops = draw.random() < 0.7
    names = [way.partition("-")[0] for way in ways]
    backend = ways[0].partition("-")[2]
    settings = {"RINGREDUCE_NODE_SIZE": node_size or None, "RINGREDUCE_TIMEOUT": "30", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend:
        settings["KERAS_BACKEND"] = backend
    every, finite = draw.choice([(None, None), (None, None), ("3", None), ("5", "2")])
    settings |= {"RINGREDUCE_CHECK": every, "RINGREDUCE_CHECK_FINITE": finite}
    settings["RINGREDUCE_DETERMINISTIC"] = draw.choice([None, None, "1"])
    if draw.random() < 0.3 and find_spec("cryptography"):
        key = folder / "key"
        if not key.exists():
            write_secret(key)
        settings["RINGREDUCE_KEY_FILE"] = str(key)
    how = "--steps", steps, "--seed", seed, *(("--folder", folder) if {*names} <= {*TORCH} else ())
    how = *how, *(["--stop"] if stops else [])
    done = run_job(ranks, PROGRAM, *names, *how, limit_s=START_S + STEP_S * steps * len(ways), **settings)
    is_right = done.returncode == (os.EX_TEMPFAIL if stops else 0) and "drawn: " in done.stdout
    said, _, counts = done.stdout.strip().rpartition("drawn: ")
    words = said.strip() if is_right else f"status {done.returncode}\n{done.stdout}{done.stderr}"
    print(f"{' '.join(ways)}, {ranks} ranks, nodes of {node_size or 'all'}, seed {seed}: {words}", flush=True)
    if is_right and drawn is not None:
        drawn.update(json.loads(counts))
    return is_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices = [*TORCH, *OTHERS, []]
    parser.add_argument("ways", nargs="*", choices=choices, help="which (default: all that can be imported)")
    parser.add_argument("--steps", type=int, default=20_000, help="in all jobs together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first job (default: %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="how many (default: 1 2 3 4)")
    chosen = parser.parse_args()
    # Plain trainings have the most to draw, and only those of JAX draw helpers that are called twice.
    others = [*OTHERS, "jax"] if find_spec("tensorflow") and find_spec("jax") else []
    ways = chosen.ways or ["torch"] * 4 + [*TORCH, *others]
    sizes = [(ranks, node) for ranks, node in product(chosen.ranks, ("", "1", "2")) if not node or ranks > int(node)]
    jobs = list(product(ways, sizes))
    random.Random(chosen.seed).shuffle(jobs)  # so that a training goes on in another way
    failed, drawn = 0, Counter(dict.fromkeys(SOUGHT, 0))
    with tempfile.TemporaryDirectory(prefix="trainings-") as folder:
        for number, (way, (ranks, node_size)) in enumerate(jobs):
            steps = -(-chosen.steps // len(jobs))
            failed += not run([way], ranks, node_size, steps, chosen.seed + number, Path(folder), drawn)
    print("drawn:", ", ".join(f"{name} {count}" for name, count in drawn.items()))
    print(f"{len(jobs) - failed} of {len(jobs)} jobs were right")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
