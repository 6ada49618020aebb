"""Starts and ends of torch jobs on a machine that is busy with other things; how long each takes to end.

    python tests/jobs/endings.py --jobs 200 --load 30

In a job of three ranks one ends in the middle of the training: by ``sys.exit(0)``, a segmentation fault, an exception
or SIGKILL; or all end as they should. What is measured is the time from there until no process of the job is left. A
job is wrong if that takes longer than its ending may take (`LIMITS_S`) on a machine that is as busy as this one: each
limit counts as many times as there are processes for each core.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

from faults import end_all, left_behind

#: What each ending may take where every rank has a core: mpirun kills ranks two seconds after it has asked them to end;
#: where all end by themselves, they leave MPI and Python.
LIMITS_S = {"sys.exit(0)": 5.0, "segfault": 5.0, "exception": 5.0, "SIGKILL": 5.0, "well": 5.0}
HOWS = tuple(LIMITS_S)
RANKS = 3
START_S = 300.0  # on a busy machine
PROGRAM = textwrap.dedent("""\
    import ctypes, os, pathlib, signal, sys, time
    import torch
    import ringreduce.torch as hvd

    folder, how, victim, last = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    hvd.init()
    model = torch.nn.Linear(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for step in range(last + 1):
        if step == last and (hvd.rank() == victim or how == "well"):
            (folder / "ended").touch()
            if how == "sys.exit(0)":
                sys.exit(0)
            if how == "segfault":
                ctypes.string_at(0)
            if how == "exception":
                raise ValueError("this rank fails, as drawn")
            if how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
    """)

#: Computes for as long as its parent lives.
COMPUTES = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def limit_s(how: str, load: int) -> float:
    """Return how long an ending may take beside so many processes that compute."""
    return LIMITS_S[how] * max(1.0, (RANKS + load) / len(os.sched_getaffinity(0)))


def run(how: str, victim: int, last: int, elastic: bool, limit_s: float) -> tuple[float, str]:
    """Run one job; return the seconds from its ending to its end, and what was wrong; empty: nothing."""
    folder = Path(tempfile.mkdtemp(prefix="ringreduce-endings-"))
    program = folder / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "ringreduce", "run", *(["--elastic"] if elastic else []), "-np", str(RANKS)]
    command += [sys.executable, str(program), str(folder), how, str(victim), str(last)]
    with (folder / "said").open("w") as said:
        launcher = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(folder)}, stdout=said, stderr=said)
    begin = time.monotonic()
    while not (folder / "ended").exists() and launcher.poll() is None and time.monotonic() < begin + START_S:
        time.sleep(0.02)
    ended = time.monotonic()
    wrong = "" if (folder / "ended").exists() else "the training has not come so far"
    try:
        launcher.wait(limit_s)
    except subprocess.TimeoutExpired:
        wrong = wrong or f"the job does not end within {limit_s:.0f} s"
    seconds = time.monotonic() - ended
    wrong = wrong or left_behind(folder, patience_s=10)
    if wrong:
        end_all(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    launcher.wait()
    return seconds, f"{wrong}; see {folder}" if wrong else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--load", type=int, default=30, help="processes that compute meanwhile (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of who ends how (default: %(default)s)")
    arguments = parser.parse_args()
    busy = [subprocess.Popen([sys.executable, "-c", COMPUTES]) for _ in range(arguments.load)]
    chance = random.Random(arguments.seed)
    took: dict[str, list[float]] = {how: [] for how in HOWS}
    failed = 0
    try:
        for number in range(arguments.jobs):
            how = HOWS[number % len(HOWS)]
            seconds, wrong = run(
                how,
                chance.randrange(RANKS),
                chance.randrange(1, 20),
                chance.random() < 0.3,
                limit_s(how, arguments.load),
            )
            took[how].append(seconds)
            failed += bool(wrong)
            print(f"{number}: {how}: {f'WRONG: {wrong}' if wrong else 'ended'} after {seconds:.1f} s", flush=True)
    finally:
        for each in busy:
            each.send_signal(signal.SIGKILL)
            each.wait()
    for how, all_s in took.items():
        all_s.sort()
        print(f"{how}: {len(all_s)} jobs, median {all_s[len(all_s) // 2]:.1f} s, longest {all_s[-1]:.1f} s")
    print(f"{arguments.jobs - failed} of {arguments.jobs} jobs ended with all their processes")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
