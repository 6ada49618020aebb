"""What the checks on a GPU found, as plain values, and as text. Pure functions."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: How lines begin that tell why a process failed: exceptions, what Python's faulthandler, pytest and launchers say.
_ERROR = re.compile(
    r"([\w.]*(Error|Exception|Interrupt)|[\w.]+Exit|usage)\b"
    r"|Timeout \(|Fatal Python error|FAILED \S+::|.*\bon signal \d"
)
#: What a check of NCCL is called, and what its detail begins with where NCCL did the work.
NCCL, BY_NCCL = "NCCL by its name", "NCCL did it"


def ranks(number: int) -> str:
    """Say how many ranks."""
    return f"{number} rank{'s' * (number != 1)}"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what must hold, or what was measured.
        passed: whether it does, or the figure reached its target.
        detail: what was found, in words.
        figure: the number that was measured.
        target: the least that it must be; None: it is only stated.
        unit: of both.
    """

    name: str
    passed: bool
    detail: str = ""
    figure: float | None = None
    target: float | None = None
    unit: str = ""

    @classmethod
    def at_least(cls, name: str, figure: float, target: float, unit: str, detail: str = "") -> Check:
        """Compare a figure with its target; what is not a number has not reached it."""
        return cls(name, figure >= target, detail, figure, target, unit)

    @classmethod
    def stated(cls, name: str, figure: float, unit: str, detail: str = "") -> Check:
        """Give a figure that nothing depends on."""
        return cls(name, True, detail, figure, None, unit)


@dataclass(frozen=True)
class Outcome:
    """What became of one part.

    Attributes:
        name: of the part.
        problem: why it did not come to its end; empty if it did.
        seconds: that it took.
        checks: what it found, as far as it came.
        versions: package or library -> version, as seen in the part.
        way: how allreduces of arrays on the GPU went there, in words; empty if there were none.
    """

    name: str
    problem: str
    seconds: float
    checks: tuple[Check, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    way: str = ""

    @property
    def passed(self) -> bool:
        """Whether it came to its end, looked at something, and found nothing wrong."""
        return not self.problem and bool(self.checks) and all(check.passed for check in self.checks)


def judge(name: str, returncode: int | None, seconds: float, found: str | None, said: str) -> Outcome:
    """Make an outcome of how a part's processes ended.

    Args:
        name: of the part.
        returncode: their exit status; None: they were ended by the time limit.
        seconds: that they took.
        found: the JSON that they left, if they did.
        said: the end of their output.
    """
    content: dict[str, Any] = {}
    problem = ""
    try:
        content = json.loads(found) if found else {}
    except ValueError:
        problem = "its report is cut off"
    last = _reason(said)
    if returncode is None:
        problem = f"did not end in time: {last}"
    elif returncode != 0:
        problem = f"exit status {returncode}: {last}"
    elif not content and not problem:
        problem = "left no report"
    checks = tuple(Check(**each) for each in content.get("checks", ()))
    return Outcome(name, problem, seconds, checks, content.get("versions", {}), content.get("way", ""))


def _reason(said: str) -> str:
    """Return the line that tells why a part failed: the first error's, or the last before what its launcher says."""
    lines = [line.strip() for line in said.splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    frame = next((number for number, line in enumerate(lines) if re.fullmatch("-{9,}", line)), len(lines))
    own, launchers = ([line for line in part if line.strip("-")] for part in (lines[:frame], lines[frame:]))
    return (errors[:1] or own[-1:] or launchers[-1:] or ["it said nothing"])[0]


def allreduce_bound_s(nbytes: int, nranks: int, copy_rate: float) -> float:
    """Return the least time of an allreduce on one GPU: n bytes of each rank are read, and n written.

    Args:
        nbytes: n, of each rank.
        nranks: P, all on that GPU.
        copy_rate: of its memory in bytes per second, bytes read and bytes written both counted.
    """
    return 2 * nranks * nbytes / copy_rate


def staged_bound_s(nbytes: int, nranks: int, rate: float) -> float:
    """Return the least time of an allreduce through host memory, whose ranks share one link to the GPU.

    Args:
        nbytes: of each rank, each of which comes down once and goes up once.
        nranks: on that GPU.
        rate: bytes per second between the GPU and pinned memory, each way, while both are under way.
    """
    return nranks * nbytes / rate


def not_run(outcomes: Sequence[Outcome], ngpus: int, parts: Sequence[str]) -> list[str]:
    """Return what these outcomes do not show.

    Args:
        outcomes: of the parts so far.
        ngpus: of this machine.
        parts: the names of all parts there are.
    """
    ways = [each.way for each in outcomes]
    left = [] if ngpus > 1 else ["several GPUs in one machine, and peer access between them"]
    if not any("kernels that meet" in way for way in ways):
        left.append("the one-shot and two-shot kernels with more than one rank, which take a GPU for each rank")
    asked = [check for each in outcomes for check in each.checks if check.name.startswith(NCCL)]
    if not any(check.detail.startswith(BY_NCCL) for check in asked):
        left.append(f"NCCL{' beyond its refusal here' if asked else ''}")
    if not any("CUDA-aware MPI moves" in way for way in ways):
        said = [each.versions["CUDA-aware MPI"] for each in outcomes if "CUDA-aware MPI" in each.versions]
        left.append(f"CUDA-aware MPI; this MPI: {said[0] if said else 'not asked'}")
    left.append("several nodes")
    became = {each.name: each.problem for each in outcomes}
    for name in parts:
        if name not in became or became[name].startswith("not run"):
            left.append(f"the part {name}: {became.get(name, 'not asked for, or not yet')}")
    return left


def slug(name: str) -> str:
    """Return the name of a GPU as part of a file name: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def as_json(outcomes: Sequence[Outcome], machine: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Return the report for programs; ``missing`` is what was not run."""
    parts = [{**dataclasses.asdict(each), "passed": each.passed} for each in outcomes]
    passed = bool(outcomes) and all(each.passed for each in outcomes)
    return json.dumps({"passed": passed, "machine": machine, "parts": parts, "not_run": missing}, indent=1) + "\n"


def as_markdown(outcomes: Sequence[Outcome], machine: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Return the report for readers; ``missing`` is what was not run."""
    good = sum(each.passed for each in outcomes)
    lines = [f"# Checks on {machine['gpu']}, {machine['date']}", ""]
    lines += [f"{good} of {len(outcomes)} parts passed.", ""]
    lines += _table(("part", "verdict", "checks", "s"), (_row(each) for each in outcomes))
    lines += ["", "## Figures", ""]
    measured = [check for each in outcomes for check in each.checks if check.figure is not None]
    lines += _table(("what", "measured", "target", "verdict", "how"), (_figure(check) for check in measured))
    wrong = [(each, check) for each in outcomes for check in each.checks if not check.passed]
    if wrong or not all(each.passed for each in outcomes):
        lines += ["", "## What failed", ""]
        lines += [f"- {each.name}: {each.problem}" for each in outcomes if each.problem]
        lines += [f"- {each.name}: {check.name}: {check.detail or 'see above'}" for each, check in wrong]
    lines += ["", "## Where", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items() if name not in ("gpu", "date")]
    lines += ["", "## What was not run here", "", *(f"- {each}" for each in missing)]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> tuple[str, ...]:
    good = sum(check.passed for check in outcome.checks)
    verdict = "passed" if outcome.passed else "FAILED"
    return outcome.name, verdict, f"{good} of {len(outcome.checks)}", f"{outcome.seconds:.0f}"


def _figure(check: Check) -> tuple[str, ...]:
    target = "" if check.target is None else f"≥ {check.target:g} {check.unit}"
    verdict = "" if check.target is None else "reached" if check.passed else "MISSED"
    return check.name, f"{check.figure:.4g} {check.unit}", target, verdict, check.detail


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *rows]
    return ["| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in line) + " |" for line in lines]
