"""Check and measure ringreduce on this machine's GPU; see scripts/gpu_check, which runs it.

Parts run one after the other, each as a process group of its own under a time limit; one that fails does not stop the
others. The exit status is 0 if all passed, 1 if not, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu import report
from gpu.launching import find_mpirun, run
from gpu.report import Check, Outcome

from ringreduce.buffers.cuda.inventory import Inventory, take_inventory

ROOT = Path(__file__).parents[1]
#: Seconds that all parts may take together.
LIMIT_S = 465.0


@dataclass(frozen=True)
class Part:
    """One part of the checks.

    Attributes:
        name: of it.
        worker: the function of `work` that does it, ``"mnist"`` for the example.
        ranks: that it takes; 0: no launcher.
        limit_s: seconds that it may take.
    """

    name: str
    worker: str
    ranks: int
    limit_s: float


PARTS = (
    Part("kernels", "kernels", 0, 150),
    Part("collectives-1", "collectives", 1, 60),
    Part("collectives-2", "collectives", 2, 75),
    Part("collectives-4", "collectives", 4, 90),
    Part("mnist-2", "mnist", 2, 60),
    Part("mnist-4", "mnist", 4, 75),
    Part("pack", "pack", 0, 30),
    Part("leader", "leader", 4, 90),
    Part("staged", "staged", 2, 60),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="PART", choices=[part.name for part in PARTS], help="run one part")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the reports")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{part.name}: {max(1, part.ranks)} ranks, {part.limit_s:g} s at most" for part in PARTS))
        return 0
    if options.worker:
        return work(options.worker, options.found)
    inventory = take_inventory()
    if not inventory.devices:
        why = inventory.problem or ("CuPy is not installed" if not inventory.packages else "CuPy finds none")
        print(f"no GPU can be used here, so nothing was checked: {why}", file=sys.stderr)
        return 2
    return check([part for part in PARTS if options.only in (None, part.name)], inventory, options.results)


def check(parts: Sequence[Part], inventory: Inventory, folder: Path) -> int:
    """Run parts, write the reports and return the exit status."""
    deadline = time.monotonic() + LIMIT_S
    environment = dict(os.environ)
    mpirun = find_mpirun(environment)
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="ringreduce-gpu-") as scratch:
        for part in parts:
            print(f"=== {part.name} ===", flush=True)
            outcomes.append(run_part(part, mpirun, environment, Path(scratch), deadline - time.monotonic()))
            good = sum(each.passed for each in outcomes[-1].checks)
            print(f"{good} of {len(outcomes[-1].checks)} checks passed, {outcomes[-1].problem or 'to the end'}")
    machine = describe(inventory, outcomes, mpirun)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{machine['date']}-{report.slug(machine['gpu'])}"
    if len(parts) < len(PARTS):
        stem += "-" + "-".join(part.name for part in parts)  # and the full report stays
    text = report.as_markdown(outcomes, machine)
    (folder / f"{stem}.md").write_text(text, encoding="utf-8")
    (folder / f"{stem}.json").write_text(report.as_json(outcomes, machine), encoding="utf-8")
    print(f"\n{text}\nwritten to {folder / stem}.md and .json")
    return 0 if outcomes and all(each.passed for each in outcomes) else 1


def run_part(part: Part, mpirun: str | None, environment: dict[str, str], scratch: Path, left_s: float) -> Outcome:
    """Run one part, print the end of what it says, and judge it."""
    if left_s < 5:
        return Outcome(part.name, "not run: the time was up", 0.0)
    if part.ranks > 1 and mpirun is None:
        return Outcome(part.name, "not run: there is no mpirun", 0.0)
    if part.worker == "mnist" and "--device" not in (ROOT / "examples" / "mnist.py").read_text(encoding="utf-8"):
        return Outcome(part.name, "not run: examples/mnist.py has no --device", 0.0)
    found, log = scratch / f"{part.name}.json", scratch / f"{part.name}.log"
    returncode, seconds = run(command(part, mpirun, found), min(part.limit_s, left_s), environment, log)
    said = log.read_text(encoding="utf-8", errors="replace")
    print("\n".join(said.splitlines()[-40:]), flush=True)
    if part.worker == "mnist" and returncode == 0:
        found.write_text(json.dumps({"checks": [asdict(weights_check(said))]}), encoding="utf-8")
    return report.judge(
        part.name, returncode, seconds, found.read_text(encoding="utf-8") if found.exists() else None, said
    )


def command(part: Part, mpirun: str | None, found: Path) -> list[str]:
    """Return the command line of a part."""
    own = [sys.executable, str(Path(__file__).resolve()), "--worker", part.worker, "--found", str(found)]
    if part.worker == "mnist":
        own = [sys.executable, str(ROOT / "examples" / "mnist.py"), "--device", "cuda", "--epochs", "2"]
    return own if part.ranks <= 1 or mpirun is None else [mpirun, "-np", str(part.ranks), *own]


def weights_check(said: str) -> Check:
    """Judge the example by its last lines."""
    lines = [line.strip() for line in said.splitlines() if line.startswith(("weights:", "test accuracy:"))]
    same = any(line.startswith("weights: bitwise identical") for line in lines)
    return Check("weights are bitwise equal on all ranks", same, "; ".join(lines))


def work(name: str, found: Path) -> int:
    """Do one part on this rank; rank 0 writes what was found, bit by bit."""
    from gpu import workers

    checks: list[Check] = []

    def note(check: Check) -> None:
        checks.append(check)
        if not leads():
            return
        print(f"{'ok    ' if check.passed else 'WRONG '} {check.name}  {check.detail}", flush=True)
        content = {"checks": [asdict(each) for each in checks], "versions": workers.versions()}
        beside = found.with_suffix(".part")
        beside.write_text(json.dumps(content), encoding="utf-8")
        os.replace(beside, found)  # whole at any time, as the part may be ended at any time

    def leads() -> bool:
        return workers.rank() == 0

    workers.WORKERS[name](note)
    return 0


def describe(inventory: Inventory, outcomes: Sequence[Outcome], mpirun: str | None) -> dict[str, str]:
    """Say where this ran."""
    gpu = inventory.devices[0]
    versions: dict[str, str] = {}
    for each in outcomes:
        versions |= each.versions
    return {
        "gpu": gpu.name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "GPUs": f"{len(inventory.devices)}, compute capability {gpu.capability / 10}, {gpu.nbytes / 2**30:.0f} GiB",
        "driver": f"{inventory.driver}, CUDA {inventory.driver_cuda // 1000}.{inventory.driver_cuda % 1000 // 10}",
        "CuPy": ", ".join(inventory.packages),
        "launcher": "none" if mpirun is None else "mpirun",
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **versions,
    }


if __name__ == "__main__":
    sys.exit(main())
