"""Deaths of ranks in elastic training, cell by cell: who dies, where, how, and what must come of it.

    python tests/jobs/faults.py                 # every cell, and a table in Markdown
    python tests/jobs/faults.py --cells 25      # as many, chosen by --seed
    python tests/jobs/faults.py --cluster rr    # those on two hosts of a virtual cluster that is up

What is compared: the attempts at steps that count, as the state says in the end, are made again in float64 by this
process alone, with the rows that the ranks have written down; the weights must agree, every row must have been trained
on in every epoch, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import launching
import numpy as np

from ringreduce.testing.toy import RATE

PROGRAM = Path(__file__).with_name("programs") / "faults.py"
RANKS = 4
STEP = 5
HOWS = ("exception", "MemoryError", "exit", "SIGKILL", "SIGSEGV", "SIGSTOP")
WHERES = ("idle", "forward", "overlap", "backward", "negotiation", "allreduce", "share", "commit")
VICTIMS = {"first": 0, "middle": 1, "last": RANKS - 1}
LAYOUTS = {"shared memory": {}, "messages": {"RINGREDUCE_NODE_SIZE": "1"}, "both": {"RINGREDUCE_NODE_SIZE": "2"}}
HOSTS = "two hosts"  # with two ranks each
CLUSTER = Path(__file__).parents[2] / "scripts" / "cluster"
TIMEOUT_S = 3  # of a wait for a rank that lives and does nothing
LIMIT_S = 60


class Cell(NamedTuple):
    """One job.

    Attributes:
        deaths: as the program takes them.
        layout: a key of `LAYOUTS`, or `HOSTS`.
        left: how many ranks reach the end; None: none, as the job ends.
        every: how many commits there are to one that copies the weights.
    """

    deaths: tuple[str, ...]
    layout: str
    left: int | None = RANKS - 1
    every: int = 1

    @property
    def name(self) -> str:
        return f"{' '.join(self.deaths)} ({self.layout}, weights copied every {self.every})"


def cells() -> list[Cell]:
    """Return all cells."""
    single = [
        Cell((f"{rank}@{STEP}:{where}:{how}",), layout)
        for how, where, rank, layout in itertools.product(HOWS, WHERES, VICTIMS.values(), LAYOUTS)
        # What an observer raises is logged, and ends nothing.
        if not (where in ("overlap", "negotiation", "allreduce", "share") and how in ("exception", "MemoryError"))
    ]
    several = [
        Cell(deaths, layout, left)
        for layout in LAYOUTS
        for deaths, left in [
            ((f"1@{STEP}:idle:SIGKILL", f"2@{STEP}:idle:SIGKILL"), RANKS - 2),
            ((f"0@{STEP}:backward:SIGKILL", f"3@{STEP}:forward:exit"), RANKS - 2),
            ((f"0@{STEP}:forward:SIGKILL", f"1@{STEP + 3}:backward:SIGKILL", f"2@{STEP + 6}:idle:exit"), RANKS - 3),
            ((f"1@{STEP}:idle:SIGKILL", f"0@{STEP}:recovery:SIGKILL"), RANKS - 2),
            ((f"1@{STEP}:idle:SIGKILL", f"2@{STEP}:recovery:exception"), RANKS - 2),
            ((f"0@{STEP}:idle:SIGKILL", f"1@{STEP}:broadcast:SIGKILL"), RANKS - 2),
            ((f"0@{STEP}:commit:SIGKILL", f"1@{STEP}:reset:SIGKILL"), RANKS - 2),
            (("1@0:broadcast:SIGKILL",), RANKS - 1),
            ((f"1@{STEP}:idle:launcher",), None),
        ]
    ]
    # Step 5 ends in commit 6: with 4, two others lie between it and the last whole copy.
    return [cell if cell.layout == "shared memory" else cell._replace(every=4) for cell in single + several] + [
        cell._replace(every=4) for cell in single if cell.layout == "shared memory" and "SIGKILL" in cell.deaths[0]
    ]


def cells_on_hosts() -> list[Cell]:
    """Return the cells for a virtual cluster; mpirun is on the first host."""
    single = [
        Cell((f"{rank}@{STEP}:{where}:{how}",), HOSTS, every=4)
        for how, where, rank in itertools.product(("exception", "exit", "SIGKILL", "SIGSTOP"), WHERES, VICTIMS.values())
        if not (where in ("overlap", "negotiation", "allreduce", "share") and how == "exception")
    ]
    return [
        *single,
        Cell((f"0@{STEP}:idle:SIGKILL", f"3@{STEP}:recovery:SIGKILL"), HOSTS, RANKS - 2, every=4),
        Cell((f"2@{STEP}:idle:SIGKILL", f"3@{STEP}:idle:SIGKILL"), HOSTS, RANKS - 2, every=4),  # all of a host
    ]


def run(cell: Cell, cluster: str = "") -> tuple[float, str]:
    """Run a cell; return how long it took (seconds), and what is wrong with it: nothing, if the text is empty.

    Args:
        cell: which.
        cluster: the name of a virtual cluster that is up, for a cell on `HOSTS`.
    """
    folder = Path(tempfile.mkdtemp(prefix="ringreduce-faults-"))
    program = [sys.executable, str(PROGRAM), str(folder), str(cell.every), *cell.deaths]
    command = [sys.executable, "-m", "ringreduce", "run", "--elastic", "-np", str(RANKS), *program]
    environment: dict[str, str | None] = {"TMPDIR": str(folder), "RINGREDUCE_TIMEOUT": str(TIMEOUT_S)}
    if cell.layout == HOSTS:
        hosts = ["-H", f"{cluster}-host0:{RANKS // 2},{cluster}-host1:{RANKS // 2}"]
        command = [str(CLUSTER), "--name", cluster, "exec", "0", *command[: -len(program)], *hosts, *program]
        environment |= settings_of_hosts(cluster)
    else:
        environment |= LAYOUTS[cell.layout]
    try:
        done = launching.run(*command, limit_s=LIMIT_S, **environment)
        wrong = left_behind(folder) or (_ended(done) if cell.left is None else _trained(folder, done, cell.left))
        return done.seconds, f"{wrong}\n{done.stdout}\n{done.stderr}" if wrong else ""
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def settings_of_hosts(cluster: str) -> dict[str, str | None]:
    """Return what MPI has to know of a virtual cluster; `scripts/cluster run` says it on a command line."""
    network = "10.113.0.0/24"
    return {
        "PRTE_MCA_plm_ssh_agent": f"{CLUSTER} --name {cluster} agent",
        "PRTE_MCA_prte_if_include": network,
        "OMPI_MCA_btl_tcp_if_include": network,
        "OMPI_MCA_btl": "self,tcp",
        "PRTE_MCA_rmaps_default_mapping_policy": None,  # all ranks would be on the first host
    }


def _ended(done: launching.Job) -> str:
    """Say if a job that is to fail did not, or not by itself."""
    return "" if done.returncode != 0 and done.seconds < LIMIT_S else f"the job ended with {done.returncode}"


def left_behind(folder: Path) -> str:
    """Return which processes of the job still run; a rank whose launcher is gone has some seconds to end."""
    end = time.monotonic() + 6
    while True:
        found = []
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(folder).encode() in each.read_bytes():
                    found.append(each.parent.name)
            except OSError:  # it has just ended
                continue
        if not found or time.monotonic() > end:
            return f"processes {', '.join(found)} are left" if found else ""
        time.sleep(0.1)


def whole_lines(path: Path) -> list[str]:
    """Return the lines of a file but what a rank was writing when it died."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _trained(folder: Path, done: launching.Job, left: int) -> str:
    """Compare a training with what its steps amount to."""
    if done.returncode != 0:
        return f"the job ended with {done.returncode}"
    return check([json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()], left)


def check(lines: list[dict[str, Any]], left: int) -> str:
    """Return what is wrong with a training of which the ranks have written these lines; nothing: empty.

    Args:
        lines: of all ranks, also those that have died.
        left: how many ranks have to be there in the end.
    """
    ends = [each for each in lines if "done" in each]
    if len(ends) != left or {each["size"] for each in ends} != {left}:
        return f"{len(ends)} ranks have reached the end, in worlds of {[each['size'] for each in ends]}, not {left}"
    if any(each["weights"] != ends[0]["weights"] or each["attempts"] != ends[0]["attempts"] for each in ends):
        return "the ranks have different weights"
    attempts: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for each in lines:
        if "indices" in each:
            attempts[each["step"], each["began_ns"]].append(each)
    counted = [attempts[number] for number in enumerate(ends[0]["attempts"])]
    for step, ranks in enumerate(counted):
        if len(ranks) != ranks[0]["size"]:
            return f"step {step} counts, and was begun by {len(ranks)} of {ranks[0]['size']} ranks"
    wanted = _weights(counted)
    far = max(np.abs(np.array(mine) - each).max() for mine, each in zip(ends[0]["weights"], wanted, strict=True))
    # Rounding in float32 makes some 1e-5 of the largest; a batch that is left out or comes twice, 1e-2.
    if far > 1e-4 * max(np.abs(each).max() for each in wanted):
        return f"the weights differ by up to {far:.3g}"
    return _every_row(counted)


def _weights(steps: list[list[dict[str, Any]]]) -> list[Any]:
    """Return what these steps of steepest descent make of the weights in one process, in float64."""
    from programs import faults as program

    inputs, targets = (each.astype(np.float64) for each in program.data())
    matrix, bias, more = np.zeros((program.FEATURES, program.OUTPUTS)), *np.zeros((2, program.OUTPUTS))
    for ranks in steps:
        slopes, offsets = [], []
        for each in ranks:
            rows = inputs[each["indices"]]
            error = rows @ matrix + bias + more - targets[each["indices"]]
            slopes.append(rows.T @ error / len(error))
            offsets.append(error.mean(0))
        matrix = matrix - RATE * np.mean(slopes, axis=0)
        bias, more = bias - RATE * np.mean(offsets, axis=0), more - RATE * np.mean(offsets, axis=0)
    return [matrix, bias, more]


def _every_row(steps: list[list[dict[str, Any]]]) -> str:
    """Return which rows an epoch lacks, or has had more often than dividing it among the ranks takes."""
    from programs import faults as program

    epochs: defaultdict[int, Counter[int]] = defaultdict(Counter)
    most = max((ranks[0]["size"] for ranks in steps), default=0)  # a job may end before its first step
    for ranks in steps:
        for each in ranks:
            epochs[each["epoch"]].update(each["indices"])
    for epoch, rows in epochs.items():
        if lacking := set(range(program.ROWS)) - set(rows):
            return f"epoch {epoch} lacks rows {sorted(lacking)}"
        twice = sum(rows.values()) - program.ROWS
        if twice > most - 1:
            return f"epoch {epoch} has {twice} rows too many"
    return ""


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
    print("| deaths: rank@step:where:how | over | weights copied every | left | s |  |\n|---|---|--:|--:|--:|---|")
    for cell in chosen:
        seconds, wrong = run(cell, arguments.cluster)
        failed += bool(wrong)
        verdict = "as promised" if not wrong else f"WRONG: {wrong.splitlines()[0]}"
        left = "none" if cell.left is None else cell.left
        told = [", ".join(cell.deaths), cell.layout, cell.every, left, f"{seconds:.1f}", verdict]
        print(f"| {' | '.join(map(str, told))} |", flush=True)
        if wrong:
            print(wrong, file=sys.stderr, flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} cells ended as promised")
    return int(failed > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
