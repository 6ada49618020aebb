"""A long elastic training in which random ranks are killed at random times, and what must come of it.

    python tests/jobs/soak.py --kills 200 --ranks 8

When two ranks are left, the next death ends the job, and `ringreduce run` begins it again, with all its ranks, from the
last commit on disk. In the end, the steps that count are done again in one process, as for `elastic_trainings.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from elastic_trainings import compare, left_behind

PROGRAM = Path(__file__).with_name("programs") / "soak.py"
LEAST = 2
#: Seconds between a death and the next.
PAUSES_S = (0.1, 1.0)
PATIENCE_S = 90.0


class Soak(NamedTuple):
    """What came of it.

    Attributes:
        wrong: what was wrong; empty: nothing.
        kills: how many ranks were killed.
        restarts: how often the job began again.
        steps: of the training, that count.
        growth_nbytes: of the memory of a rank, for each death that it has survived; the median of the ranks that have
            survived the most.
        descriptors: the most that a rank had open after the first death that it survived, and after the last.
        seconds: of the whole.
    """

    wrong: str
    kills: int
    restarts: int
    steps: int
    growth_nbytes: float
    descriptors: tuple[int, int]
    seconds: float


def run(kills: int, ranks: int, seed: int) -> Soak:
    """Kill so many ranks in one job, and check what it has computed."""
    folder = Path(tempfile.mkdtemp(prefix="ringreduce-soak-"))
    command = [sys.executable, "-m", "ringreduce", "run", "--elastic", "--min-np", str(LEAST), "-np", str(ranks)]
    command += ["--max-restarts", str(kills), sys.executable, str(PROGRAM), str(folder)]
    begin = time.monotonic()
    with (folder / "errors").open("w") as errors:
        job = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.DEVNULL, stderr=errors
        )
    killed, code = 0, None
    try:
        killed = _kill(job, folder, kills, random.Random(seed))
        (folder / "enough").touch()
        with suppress(subprocess.TimeoutExpired):
            code = job.wait(PATIENCE_S)
    finally:
        job.kill()
        job.wait()
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in _whole_lines(path)]
    wrong, steps = _wrong(killed, kills, code, folder)
    growth, descriptors = _growth(lines)
    done = Soak(
        f"{wrong}; what the ranks have written down is in {folder}" if wrong else "",
        killed,
        max((each["restart"] for each in lines), default=0),
        steps,
        growth,
        descriptors,
        time.monotonic() - begin,
    )
    if not wrong:
        shutil.rmtree(folder)
    return done


def _kill(job: subprocess.Popen[bytes], folder: Path, kills: int, chance: random.Random) -> int:
    """Kill ranks, each after all that live have made a step since the last death; return how many."""
    killed = 0
    dead: set[str] = set()
    while killed < kills and job.poll() is None:
        patience = time.monotonic() + PATIENCE_S
        while not (ready := _ready(folder, dead)):
            if job.poll() is not None or time.monotonic() > patience:
                return killed
            time.sleep(0.02)
        time.sleep(chance.uniform(*PAUSES_S))
        chosen = chance.choice(ready)
        with suppress(ProcessLookupError):
            os.kill(int(chosen.removeprefix("pid-")), signal.SIGKILL)
            killed += 1
        dead |= {each.name for each in folder.glob("pid-*") if each.name == chosen or len(ready) <= LEAST}
    return killed


def _ready(folder: Path, dead: set[str]) -> list[str]:
    """Return the files of the ranks of the present world if all of these train; each says how many there are."""
    found = [each for each in folder.glob("pid-*") if each.name not in dead]
    alive = [each for each in found if Path(f"/proc/{each.name.removeprefix('pid-')}").exists()]
    said = [each.read_text() for each in alive]
    return sorted(each.name for each in alive) if set(said) == {str(len(alive))} else []


def _whole_lines(path: Path) -> list[str]:
    """Return the lines of a file but what a rank was writing when it died."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _wrong(killed: int, kills: int, code: int | None, folder: Path) -> tuple[str, int]:
    """Return what is wrong, and how many steps count."""
    if killed < kills or code is None:
        ended = f"after {killed} kills the job has ended with {code}" if code is not None else "the job does not end"
        return ended, 0
    wrong, members = compare(folder, len([*folder.glob("end-*.json")]), "toy")
    return left_behind(folder) or (f"the job ended with {code}" if code else "") or wrong, len(members)


def _growth(lines: list[dict[str, Any]]) -> tuple[float, tuple[int, int]]:
    """Return bytes per death that a rank has survived, and descriptors after its first death and its last."""
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for each in lines:
        by_rank.setdefault(each["pid"], []).append(each)
    longest = sorted(by_rank.values(), key=len)[-5:]
    rates = [(each[-1]["nbytes"] - each[1]["nbytes"]) / (len(each) - 2) for each in longest if len(each) > 2]
    rates.sort()
    first = max((each[1]["descriptors"] for each in longest if len(each) > 2), default=0)
    last = max((each[-1]["descriptors"] for each in longest if len(each) > 2), default=0)
    return rates[len(rates) // 2] if rates else 0.0, (first, last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how many ranks are killed (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=8, help="that the job begins with (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of who dies when")
    arguments = parser.parse_args()
    done = run(arguments.kills, arguments.ranks, arguments.seed)
    print(f"{done.kills} kills, {done.restarts} restarts, {done.steps} steps that count, {done.seconds:.0f} s")
    first, last = done.descriptors
    print(f"each death takes {done.growth_nbytes / 2**20:.2f} MiB of the memory of a rank that survives it")
    print(f"descriptors: {first} after the first death that a rank has survived, {last} after the last")
    print(done.wrong or "the weights are those of the steps that count")
    return int(bool(done.wrong))


if __name__ == "__main__":
    sys.exit(main())
