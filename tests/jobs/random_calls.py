"""Random calls of all collectives (programs/fuzz.py), by 1 to 4 ranks, on nodes of 1, 2 and all, by both conventions.

    python tests/jobs/random_calls.py --steps 20000 --seed 1

The steps are divided among these jobs. Each has a time limit; what is wrong, hangs or crashes is named with its seed.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product

from launching import PROGRAMS, run_job

PROGRAM = PROGRAMS / "fuzz.py"
START_S, STEP_S = 60, 1.0  # what a job may take


def run(ranks: int, node_size: str, conventions: str, steps: int, seed: int) -> str:
    """Run one job; return what it said, and after a failure why it has failed: empty if nothing was wrong."""
    settings = {"RINGREDUCE_NODE_SIZE": node_size, "RINGREDUCE_CONVENTIONS": conventions, "RINGREDUCE_TIMEOUT": "20"}
    limit_s = START_S + STEP_S * steps
    done = run_job(ranks, PROGRAM, "--steps", steps, "--seed", seed, limit_s=limit_s, **settings)
    print(
        f"{ranks} ranks, nodes of {node_size or 'all'}, {conventions}, seed {seed}: {done.stdout.strip()}", flush=True
    )
    return "" if done.returncode == 0 else f"status {done.returncode}\n{done.stderr}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="in all jobs together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the first job (default: %(default)s)")
    chosen = parser.parse_args()
    sizes = [(ranks, node) for ranks, node in product((1, 2, 3, 4), ("", "1", "2")) if node != "2" or ranks > 2]
    jobs = list(product([each for each in sizes if each[0] > 1 or not each[1]], ("chain_rule", "horovod")))
    failed = 0
    for number, ((ranks, node_size), conventions) in enumerate(jobs):
        wrong = run(ranks, node_size, conventions, -(-chosen.steps // len(jobs)), chosen.seed + number)
        failed += bool(wrong)
        if wrong:
            print(f"WRONG: {wrong}", file=sys.stderr, flush=True)
    print(f"{len(jobs) - failed} of {len(jobs)} jobs were well")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
