"""Elastic jobs, one after the other, in which random processes die at random times; each must end as documented.

    python tests/jobs/random_deaths.py --jobs 100 --seed 1

A rank dies before `init` (an exception, an exit, SIGKILL), while all start, in the training, or within a tenth of a
second of another death, so in the recovery; or the launcher dies. After deaths of ranks the job goes on or begins
again, and its weights are those of the steps that count, as in `tests/jobs/faults.py`. After a death of the launcher
every process is gone within seconds.
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
from typing import NamedTuple

import faults

PROGRAM = Path(__file__).with_name("programs") / "random_deaths.py"
RESTARTS = 20
LIMIT_S = 90.0  # for a whole job; most take five
HOWS = ("ImportError", "exit", "SIGKILL")
#: Seconds after the launch of the job in which ranks import, connect and begin to train.
STARTING_S = 2.5
#: Seconds between two deaths, so that the second one falls into the recovery from the first.
RECOVERING_S = 0.1


class Job(NamedTuple):
    """What happens to one job.

    Attributes:
        ranks: how many it begins with.
        before: ``RANK:HOW`` of ranks that die before `init`, in the first attempt.
        deaths: when ranks are killed: ``start`` (while the job starts), ``train`` or ``recovery``.
        launcher: when the launcher is killed, or empty, and by which signal.
        node_size: how many ranks count as a node; 0: all.
    """

    ranks: int
    before: tuple[str, ...]
    deaths: tuple[str, ...]
    launcher: str
    launcher_signal: str
    node_size: int

    @classmethod
    def drawn(cls, chance: random.Random) -> Job:
        ranks = chance.randint(2, 6)
        before = [
            f"{rank}:{chance.choice(HOWS)}" for rank in chance.sample(range(ranks), chance.choice((0, 0, 1, 1, 2)))
        ]
        deaths = [chance.choice(("start", "train", "train", "recovery")) for _ in range(chance.randint(0, 3))]
        launcher = chance.choice(("start", "train")) if chance.random() < 0.2 else ""
        by = chance.choice(("SIGKILL", "SIGTERM", "SIGHUP"))
        return cls(ranks, tuple(before), tuple(deaths), launcher, by if launcher else "", chance.choice((0, 1, 2)))

    def __str__(self) -> str:
        deaths = [f"before init: {', '.join(self.before)}"] if self.before else []
        deaths += [f"killed: {', '.join(self.deaths)}"] if self.deaths else []
        deaths += [f"launcher: {self.launcher} by {self.launcher_signal}"] if self.launcher else []
        return f"{self.ranks} ranks, node size {self.node_size or 'all'}; {'; '.join(deaths) or 'no death'}"


def run(job: Job, seed: int) -> tuple[float, str]:
    """Run a job; return how long it took (seconds), and what is wrong; empty: nothing."""
    folder = Path(tempfile.mkdtemp(prefix="ringreduce-random-"))
    command = [sys.executable, "-m", "ringreduce", "run", "--elastic", "--min-np", "2", "-np", str(job.ranks)]
    command += ["--max-restarts", str(RESTARTS), sys.executable, str(PROGRAM), str(folder), *job.before]
    environment = {**os.environ, "TMPDIR": str(folder), "RINGREDUCE_TIMEOUT": "5"}
    if job.node_size:
        environment["RINGREDUCE_NODE_SIZE"] = str(job.node_size)
    begin = time.monotonic()
    with (folder / "said").open("w") as said:
        launcher = subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True)
    try:
        wrong = _carry_out(job, random.Random(seed), launcher, folder, begin)
    finally:
        launcher.kill()
        launcher.wait()
    wrong = wrong or faults.left_behind(folder)
    if wrong:
        wrong += f"; see {folder}"
        faults.end_all(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return time.monotonic() - begin, wrong


def _carry_out(job: Job, chance: random.Random, launcher: subprocess.Popen[bytes], folder: Path, begin: float) -> str:
    """Let everybody die as drawn, wait for the end, and return what is wrong."""
    deaths = sorted(job.deaths, key=("start", "train", "recovery").index)
    to_kill = [(each, None) for each in deaths] + ([(job.launcher, job.launcher_signal)] if job.launcher else [])
    if job.launcher == "start":
        to_kill.sort(key=lambda each: each[0] != "start")
    for when, by in to_kill:
        if when == "start":
            _sleep_until(begin + chance.uniform(0, STARTING_S), launcher)
        elif when == "train":
            _wait_for_training(folder, launcher, begin)
            time.sleep(chance.uniform(0, 0.5))
        else:
            time.sleep(chance.uniform(0, RECOVERING_S))
        if by is not None:
            launcher.send_signal(getattr(signal, by))
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(6)
            return "" if launcher.poll() is not None else f"the launcher lives on after {by}"
        ranks = _ranks(folder)
        if ranks and launcher.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(ranks), signal.SIGKILL)
    _wait_for_training(folder, launcher, begin)
    (folder / "enough").touch()
    try:
        code = launcher.wait(max(begin + LIMIT_S - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        return "the job does not end"
    if code:
        return f"the job ended with {code}"
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in faults.whole_lines(path)]
    return faults.check(lines, len([each for each in lines if "done" in each]))


def _sleep_until(when: float, launcher: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(max(when - time.monotonic(), 0))


def _wait_for_training(folder: Path, launcher: subprocess.Popen[bytes], begin: float) -> None:
    """Wait until all ranks that live have made a step."""
    while launcher.poll() is None and time.monotonic() < begin + LIMIT_S / 2:
        alive = [each for each in folder.glob("pid-*") if Path(f"/proc/{each.name.removeprefix('pid-')}").exists()]
        if alive and len(alive) >= len(_ranks(folder)):
            return
        time.sleep(0.02)


def _ranks(folder: Path) -> list[int]:
    """Return the process ids of the ranks: what runs the program and is not above a rank."""
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            words = (each / "cmdline").read_bytes().split(b"\0")
            parent = int((each / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has just ended
            continue
        if str(folder).encode() in words and b"ringreduce" not in words and str(PROGRAM).encode() == words[1]:
            found[int(each.name)] = parent
    return sorted(each for each in found if each not in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=100, help="how many to run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="which ones (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one (default: %(default)s)")
    arguments = parser.parse_args()
    failed = 0
    for number in range(arguments.first, arguments.first + arguments.jobs):
        chance = random.Random(f"{arguments.seed}-{number}")
        job = Job.drawn(chance)
        seconds, wrong = run(job, chance.randrange(2**32))
        failed += bool(wrong)
        print(f"{number}: {job}: {f'WRONG: {wrong}' if wrong else 'as promised'}, {seconds:.1f} s", flush=True)
    print(f"{arguments.jobs - failed} of {arguments.jobs} jobs ended as promised")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
