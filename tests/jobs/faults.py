"""Deaths of ranks in elastic training, cell by cell: who dies, where, how, and what must come of it.

    python tests/jobs/faults.py                 # every cell, and a table in Markdown
    python tests/jobs/faults.py --cells 25      # as many, chosen by --seed
    python tests/jobs/faults.py --cluster rr    # those on two hosts of a virtual cluster that is up

The others go on, with weights that one process computes from the steps that count, and nothing is left behind; see
`elastic_trainings.py`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys

from elastic_trainings import HOSTS, Drawn, run

RANKS = 4
STEP = 5
HOWS = ("exception", "MemoryError", "os._exit", "SIGKILL", "SIGSEGV", "SIGSTOP")
WHERES = ("begin", "forward", "overlap", "backward", "negotiation", "allreduce", "share", "commit")
VICTIMS = (0, 1, RANKS - 1)
LAYOUTS = {"shared memory": "", "messages": "1", "both": "2", "two hosts": HOSTS}


def cell(layout: str, *deaths: str, copy: int = 1) -> Drawn:
    """Return a job of the toy; one of ``copy`` commits copies its weights."""
    return Drawn("toy", "ranks", RANKS, LAYOUTS[layout], deaths, copy=copy)


def single(layout: str, hows: tuple[str, ...] = HOWS) -> list[Drawn]:
    """Return the cells in which one rank dies: not by what an observer raises, which is logged, and ends nothing."""
    return [
        cell(layout, f"{rank}@{STEP}:{where}:{how}", copy=1 if layout == "shared memory" else 4)
        for how, where, rank in itertools.product(hows, WHERES, VICTIMS)
        if not (where in ("overlap", "negotiation", "allreduce", "share") and how in ("exception", "MemoryError"))
    ]


def cells() -> list[Drawn]:
    """Return all cells. Step 5 ends in commit 6: with a copy in 4, two others lie between it and the last one."""
    here = [layout for layout in LAYOUTS if layout != "two hosts"]
    several = [
        cell(layout, *deaths, copy=1 if layout == "shared memory" else 4)
        for layout in here
        for deaths in [
            (f"1@{STEP}:begin:SIGKILL", f"2@{STEP}:begin:SIGKILL"),
            (f"0@{STEP}:backward:SIGKILL", f"3@{STEP}:forward:os._exit"),
            (f"0@{STEP}:forward:SIGKILL", f"1@{STEP + 3}:backward:SIGKILL", f"2@{STEP + 6}:begin:os._exit"),
            (f"1@{STEP}:begin:SIGKILL", f"0@{STEP}:recovery:SIGKILL"),
            (f"1@{STEP}:begin:SIGKILL", f"2@{STEP}:recovery:exception"),
            (f"0@{STEP}:begin:SIGKILL", f"1@{STEP}:broadcast:SIGKILL"),
            (f"0@{STEP}:commit:SIGKILL", f"1@{STEP}:reset:SIGKILL"),
            ("1@0:broadcast:SIGKILL",),
        ]
    ]
    alone = [each for layout in here for each in single(layout)]
    return alone + several + [each._replace(copy=4) for each in single("shared memory", ("SIGKILL",))]


def cells_on_hosts() -> list[Drawn]:
    """Return the cells for a virtual cluster; mpirun is on the first host."""
    return [
        *single("two hosts", ("exception", "os._exit", "SIGKILL", "SIGSTOP")),
        cell("two hosts", f"0@{STEP}:begin:SIGKILL", f"3@{STEP}:recovery:SIGKILL", copy=4),
        cell("two hosts", f"2@{STEP}:begin:SIGKILL", f"3@{STEP}:begin:SIGKILL", copy=4),  # all of a host
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, help="how many to run; all if not given")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--cluster", default="", help="of two hosts; see scripts/cluster up")
    arguments = parser.parse_args()
    chosen = cells_on_hosts() if arguments.cluster else cells()
    if arguments.cells is not None:
        chosen = random.Random(arguments.seed).sample(chosen, arguments.cells)
    failed = 0
    print("| deaths: rank@step:where:how | nodes of | weights copied every | left | s |  |\n|---|---|--:|--:|--:|---|")
    for each in chosen:
        seconds, wrong = run(each, arguments.cluster)
        failed += bool(wrong)
        verdict = "as promised" if not wrong else f"WRONG: {wrong.splitlines()[0]}"
        told = [", ".join(each.deaths), each.node_size or "all", each.copy, each.left, f"{seconds:.1f}", verdict]
        print(f"| {' | '.join(map(str, told))} |", flush=True)
        if wrong:
            print(wrong, file=sys.stderr, flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} cells ended as promised")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
