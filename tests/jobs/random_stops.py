"""Random stops of loaders (programs/stopped_loaders.py): what goes on gets each sample once, in the order of before.

    python tests/jobs/random_stops.py --stops 300 --seed 1

It draws loaders, workers, places and ranks; prints how often each came, and what is wrong with its seed. Each job has a
time limit.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence

from launching import PROGRAMS, RINGREDUCE, run, run_job

PROGRAM = PROGRAMS / "stopped_loaders.py"
RANKS = [(2, 2), (4, 2), (2, 4), (3, 3), (3, 1)]
START_S, STOP_S = 60.0, 8.0


def stop(ranks: tuple[int, int], seeds: Sequence[int]) -> Counter[str]:
    """Stop and go on, for each seed; return how often which loaders went on in which way.

    Raises:
        AssertionError: something is wrong, or takes too long.
    """
    limit_s = START_S + STOP_S * len(seeds)
    with tempfile.TemporaryDirectory(prefix="stops-") as folder:
        for what, size in zip(("run", "go-on"), ranks, strict=True):
            done = run_job(size, PROGRAM, what, folder, *seeds, limit_s=limit_s, RINGREDUCE_TIMEOUT="60")
            assert done.returncode == 0, f"{what} by {size} of {ranks} ranks: status {done.returncode}: {done.stderr}"
    return _came(done.stdout)


def die(size: int, seed: int) -> Counter[str]:
    """Let a rank of an elastic job die in the middle of an epoch; return as `stop` does."""
    with tempfile.TemporaryDirectory(prefix="stops-") as folder:
        done = run(RINGREDUCE, "run", "--elastic", "-np", size, sys.executable, PROGRAM, "die", folder, seed)
    sentences = (
        "the loader cannot go on in the middle of epoch",
        "StatefulDataLoader goes on with the ranks that have used",
    )
    refused = any(each in done.stderr for each in sentences)
    assert (done.returncode == 0) != refused, f"{size} ranks, seed {seed}: status {done.returncode}: {done.stderr}"
    return Counter(["after a death, refused"]) if refused else _came(done.stdout, "after a death, ")


def _came(said: str, begin: str = "") -> Counter[str]:
    found = re.findall(r"^seed \d+: ([^,]*), ([^,]*), (\d) workers: (right elsewhere|right|refused)", said, re.M)
    return Counter(
        f"{begin}{word}" for kind, way, workers, how in found for word in (kind, way, f"{workers} workers", how)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=300, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="the first (default: %(default)s)")
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.stops)
    deaths = seeds[:: max(1, chosen.stops // 20)]
    drawn, failed = Counter[str](), 0
    jobs = [(lambda ranks=ranks, part=part: stop(ranks, part)) for ranks, part in _parts([*seeds])]
    jobs += [(lambda seed=seed: die(2 + seed % 3, seed)) for seed in deaths]
    for job in jobs:
        try:
            drawn += job()
        except AssertionError as error:
            failed += 1
            print(error, flush=True)
    print(", ".join(f"{name} {number}" for name, number in sorted(drawn.items())))
    print(f"{len(jobs) - failed} of {len(jobs)} jobs were right")
    return int(failed > 0)


def _parts(seeds: Sequence[int]) -> list[tuple[tuple[int, int], Sequence[int]]]:
    """Return pairs of ranks, each with its part of the seeds."""
    return [(ranks, seeds[number :: len(RANKS)]) for number, ranks in enumerate(RANKS)]


if __name__ == "__main__":
    sys.exit(main())
