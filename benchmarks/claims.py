"""Measure the figures that docs/benchmarks.md states, and say which hold; claims.toml lists them.

Run it as scripts/claims, which has the environment it needs:

    scripts/claims                    measure all, print a table; exit status 1 if one does not hold
    scripts/claims shared-2 mlp-2     only the claims of these runs
    scripts/claims --markdown         print the tables for the document, measure nothing
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce.common.quantities import parse_nbytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest where Python has no tomllib

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = Path(__file__).with_name("claims.toml")
HEAD = f"{'claim':<40}{'limit':>10}  {'measured':>10}  {'of bound':>8}"
SIZE = re.compile(r"\d+ [KM]?i?B")
FIGURE = re.compile(r"(?P<sign>[≥≤]) (?P<number>[0-9.]+) ?(?P<unit>x|%|us)")


@dataclass(frozen=True, slots=True)
class Claim:
    """One figure of a run; claims.toml explains the fields."""

    row: str
    column: str
    measure: str
    figure: str

    def holds(self, value: float) -> bool:
        """Whether a measured value keeps the limit."""
        found = FIGURE.fullmatch(self.figure)
        assert found is not None, f"{self.figure!r} is no limit"
        limit = float(found["number"]) / (100 if found["unit"] == "%" else 1)
        return value >= limit if found["sign"] == "≥" else value <= limit

    def value(self, report: Mapping[str, Any]) -> float:
        """Take the claimed figure out of the JSON report of its run."""
        kind, _, name = self.measure.partition(" ")
        if kind == "ratio":
            return float(report["ratios"][name])
        if kind == "format_speedup":
            return float(report["formats"][name]["speedup"])
        result = self._result(report)
        ours = result["time_us"]["median"]
        _, size, *others = self.measure.split()
        if kind == "bound_share":
            return float(result["bound_share"])
        if kind == "link_share":
            hosts = report["hosts"]
            return float(2 * (hosts - 1) / hosts * parse_nbytes(size) * 8e-3 / report["stream_gbit_s"] / ours)
        if kind == "type_ratio":
            return float(ours / result_of(report, size, "float")["time_us"]["median"])
        peer = result["vs"][others[0]]
        if kind == "speedup":
            return float(peer["speedup"])
        assert kind == "excess_us", f"nobody measures {self.measure!r}"
        return float(ours - peer["median_us"])

    def share(self, report: Mapping[str, Any]) -> float | None:
        """Return which share of its bound the call of the figure reached; None where the report has no bound."""
        if self.measure.startswith(("ratio", "format_speedup")):
            return None
        found: float | None = self._result(report)["bound_share"]
        return found

    def _result(self, report: Mapping[str, Any]) -> Mapping[str, Any]:
        kind, size, *others = self.measure.split()
        return result_of(report, size, others[0] if kind == "type_ratio" else "float")


def result_of(report: Mapping[str, Any], size: str, type_name: str) -> Mapping[str, Any]:
    """Find the result of this size and type in a report of ``bench``: in place, if there are any such."""
    nbytes = parse_nbytes(size)
    results: list[Mapping[str, Any]] = [
        each for each in report["results"] if each["size"] == nbytes and each["type"] == type_name
    ]
    found = [each for each in results if each["in_place"]] or results
    assert len(found) == 1, f"{len(found)} results of size {size}, type {type_name}"
    return found[0]


@dataclass(frozen=True, slots=True)
class Run:
    """One command; claims.toml explains the fields."""

    id: str
    ranks: int
    timeout_s: int
    command: str
    claims: Sequence[Claim]
    hosts: int = 1
    rate: str = ""
    environment: str = ".venv"
    native: bool = True

    @property
    def launcher(self) -> str:
        """What stands before the command."""
        if self.hosts == 1:
            return f"{'' if self.native else 'RINGREDUCE_NATIVE=0 '}mpirun -np {self.ranks} python"
        return f"scripts/cluster run -np {self.ranks} python"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a claim: a measured value and its share of the bound, or the reason why there is none."""

    claim: Claim
    value: float | None
    share: float | None = None
    trouble: str = ""

    @property
    def holds(self) -> bool:
        return self.value is not None and self.claim.holds(self.value)


def load(path: Path = CLAIMS) -> dict[str, Run]:
    """Read the list of runs, by id, each with its claims."""
    runs = {}
    for name, fields in tomllib.loads(path.read_text(encoding="utf-8")).items():
        claims = [Claim(*cells) for cells in fields.pop("claims")]
        runs[name] = Run(name, claims=claims, **fields)
    return runs


def measure(run: Run) -> dict[str, Any] | str:
    """Carry out one run in a process group of its own and return its report, or what went wrong in a line."""
    if run.hosts == 1:
        return launch(run, "mpirun")
    cluster = [str(ROOT / "scripts" / "cluster"), "--name", "claims"]
    made = subprocess.run([*cluster, "up", str(run.hosts), "--rate", run.rate], check=False, capture_output=True)
    if made.returncode != 0:
        return made.stderr.decode().strip().removeprefix("cluster: ")
    try:
        stream = subprocess.run([*cluster, "stream"], check=True, capture_output=True, text=True)
        report = launch(run, *cluster, "run")
        if isinstance(report, str):
            return report
        return {**report, "hosts": run.hosts, "stream_gbit_s": float(stream.stdout)}
    finally:
        subprocess.run([*cluster, "down"], check=True)


def launch(run: Run, *launcher: str) -> dict[str, Any] | str:
    """Start the ranks of a run in its environment; return as `measure` does."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "report.json")
        within = ["bash", "-c", '. scripts/_env >/dev/null && use "$0" && exec "$@"', run.environment]
        command = [*launcher, "-np", str(run.ranks), "python", *shlex.split(run.command), "-J", str(output)]
        # Where ranks outnumber cores the library must not spin, or the comparison would flatter us.
        yielding = str(int(run.ranks > len(os.sched_getaffinity(0))))
        variables = {**os.environ, "OMPI_MCA_mpi_yield_when_idle": yielding}
        variables["RINGREDUCE_NATIVE"] = str(int(run.native))
        limited = ["timeout", "--kill-after=10", str(run.timeout_s), *within, *command]
        done = subprocess.run(limited, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            late = " (time limit)" if done.returncode == 124 else ""
            return f"exit status {done.returncode}{late}"
        report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return report


def judge(claims: Iterable[Claim], report: Mapping[str, Any] | str) -> list[Verdict]:
    """Hold the claims of one run against its report."""
    if isinstance(report, str):
        return [Verdict(claim, None, trouble=report) for claim in claims]
    return [Verdict(claim, claim.value(report), claim.share(report)) for claim in claims]


def line(verdict: Verdict) -> str:
    """Write a verdict as a line of the table."""
    claim = verdict.claim
    measured = verdict.trouble if verdict.value is None else f"{verdict.value:.2f}"
    share = "" if verdict.share is None else f"{verdict.share:.0%}"
    end = "holds" if verdict.holds else "DOES NOT HOLD"
    return f"{claim.measure:<40}{claim.figure:>10}  {measured:>10}  {share:>8}  {end}"


def markdown(claims: Sequence[Claim]) -> str:
    """Return the tables that the document carries: columns that have a row in common are in one table."""
    figures: dict[str, dict[str, str]] = {}  # by column and row
    for claim in claims:
        figures.setdefault(claim.column, {})[claim.row] = claim.figure
    tables: list[list[str]] = []  # the columns of each
    for column in figures:
        related = [table for table in tables if any(figures[column].keys() & figures[name].keys() for name in table)]
        tables = [table for table in tables if table not in related] + [[*itertools.chain(*related), column]]
    tables.sort(key=lambda columns: [*figures].index(columns[0]))
    text = []
    for columns in tables:
        names = list(dict.fromkeys(name for column in columns for name in figures[column]))
        if all(map(SIZE.fullmatch, names)):
            names.sort(key=lambda name: parse_nbytes(name.replace(" ", "")))
        rows = [[name, *(figures[column].get(name, "") for column in columns)] for name in names]
        lines = [f"| {' | '.join(cells)} |\n" for cells in [["", *columns], *rows]]
        text.append("".join([lines[0], "|---|" + "--:|" * len(columns) + "\n", *lines[1:]]))
    return "\n".join(text)


def stated(document: str, row: str, column: str) -> str | None:
    """Return what stands in a Markdown document's tables under ``column`` in the row that begins with ``row``."""
    heads: list[str] = []
    for text in document.splitlines():
        if not text.lstrip().startswith("|"):
            heads = []
            continue
        cells = [cell.strip() for cell in text.strip().strip("|").split("|")]
        if not heads:
            heads = cells
        elif cells[0] == row and column in heads:
            return cells[heads.index(column)]
    return None


def main() -> int:
    """Measure and print; return the exit status."""
    runs = load()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"only these of {', '.join(runs)}")
    parser.add_argument("--markdown", action="store_true", help="print the tables for the document, measure nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.runs) - set(runs):
        parser.error(f"no such run: {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
    if arguments.markdown:
        print(markdown([claim for run in runs.values() for claim in run.claims]), end="")
        return 0
    verdicts = []
    print(HEAD)
    for run in (each for each in runs.values() if each.id in (arguments.runs or runs)):
        if not (ROOT / run.environment).exists():
            kind = run.environment.removeprefix(".venv-")
            print(f"# {run.id}: skipped, as scripts/install {kind} has not made {run.environment}", flush=True)
            continue
        print(f"# {run.id}, {run.environment}: {run.launcher} {run.command}", flush=True)
        for verdict in judge(run.claims, measure(run)):
            verdicts.append(verdict)
            print(line(verdict), flush=True)
    holding = sum(verdict.holds for verdict in verdicts)
    print(f"{holding} of {len(verdicts)} claims hold")
    return 0 if holding == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
