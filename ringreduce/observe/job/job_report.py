"""What a job's steps took, and why: the report at its end, and what differs between the reports of two jobs."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

from ringreduce.common.config import Config
from ringreduce.common.errors import ConfigError
from ringreduce.common.files import read_file, replace_file
from ringreduce.common.instruments import Pace
from ringreduce.common.quantities import format_seconds
from ringreduce.observe.job.verdicts import Figures, HostUse, Verdict, in_words, judge
from ringreduce.observe.seen.metrics import Metrics
from ringreduce.observe.seen.pace import Slow, find_slow
from ringreduce.observe.seen.step_clock import Lap

_log = logging.getLogger(__name__)

_ENOUGH = 16  # steps after the first one
#: A difference of medians by so many of its standard errors is no chance.
_BEYOND = 3.0
#: The standard error of a median, over that of a mean; and a standard deviation, over the median of deviations.
_OF_MEDIANS = 1.2533 * 1.4826
_SHOWN = 10  # times as long: what has grown by more was next to nothing
_PARTS = ("compute_s", "input_s", "waiting_s", "communication_s")


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the steps of a job took, and why.

    Attributes:
        figures: times, and what is known of ranks and hosts.
        found: what makes the job slow, or is odd; that which costs most first.
        laps_s: how long a step took, in equal numbers of steps one after the other (seconds).
        values: the last ones that this rank has reported, by name.
    """

    figures: Figures
    found: Sequence[Verdict]
    laps_s: Sequence[float]
    values: Mapping[str, float]

    @property
    def lines(self) -> list[str]:
        """The report for people; at most eight lines."""
        return in_words(self.figures, self.found)

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def to_json(self) -> str:
        """Return all of it as a JSON object, for ``ringreduce compare``."""
        figures = asdict(self.figures)
        slow = self.figures.slow
        return json.dumps(
            {
                **figures,
                "slow": None if slow is None else slow._asdict(),
                "found": [each._asdict() | {"speedup": _or_none(each.speedup)} for each in self.found],
                "laps_s": self.laps_s,
                "values": {name: _or_none(value) for name, value in self.values.items()},
                "lines": self.lines,
            },
            indent=1,
        )

    def write(self, path: str) -> None:
        """Write it to a file, as JSON.

        Raises:
            ConfigError: the file cannot be written.
        """
        text = self.to_json().encode()
        try:
            replace_file(Path(path), lambda file: file.write(text), durable=False)
        except OSError as error:
            raise ConfigError(f"the report cannot be written to {path}: {error.strerror}") from None


def _or_none(value: float) -> float | None:
    """Return a number, or None if JSON has none for it."""
    return value if math.isfinite(value) else None


def figures_of(
    metrics: Metrics,
    laps: Sequence[Lap],
    nodes: Sequence[Sequence[int]],
    began_s: float,
    made: int,
    hosts: Mapping[int, str] = {},
    uses: Sequence[HostUse] = (),
) -> Figures | None:
    """Return what is known of the steps of a job; None: there were too few.

    Args:
        metrics: of this rank; the paces in there are those of all ranks.
        laps: of this rank.
        nodes: the ranks of each node.
        began_s: when the world began, by `time.perf_counter`.
        made: steps that this rank has made; the last lap ends with an earlier one.
        hosts, uses: as in `Figures`.
    """
    if not laps or laps[-1].steps - laps[0].steps < _ENOUGH:
        return None
    first = laps[0]
    last = laps[-1]
    steps = last.steps - first.steps
    passed_s = last.moment_s - first.moment_s
    step_s = passed_s / steps
    spent = last.spent.since(first.spent)
    size = sum(map(len, nodes))
    input_s = min(spent.loading_s / steps, step_s)
    waiting_s = 0.0
    blocking_s = spent.blocking_s / steps
    reductions_s = spent.waited_s / steps
    paces = list(metrics.paces.values())
    if paces:
        own_s = fmean(each.own_s / each.steps for each in paces)
        input_s = min(fmean(each.loading_s / each.steps for each in paces), own_s)
        waiting_s = fmean(each.waited_s / each.steps for each in paces)
        waiting_s = min(waiting_s, max(step_s - own_s, 0.0))
        reductions_s = max(step_s - own_s - waiting_s, 0.0)
    communication_s = min(reductions_s + blocking_s, max(step_s - input_s - waiting_s, 0.0))
    return Figures(
        ranks=size,
        nodes=len(nodes),
        seconds=perf_counter() - began_s,
        start_s=first.moment_s - began_s,
        steps_s=passed_s,
        steps=made,
        samples_per_s=(last.samples - first.samples) * size / passed_s,
        step_s=step_s,
        compute_s=step_s - input_s - waiting_s - communication_s,
        input_s=input_s,
        waiting_s=waiting_s,
        communication_s=communication_s,
        crowded=_crowded(paces, spent.delayed_s / passed_s),
        queued_s=fmean(each.delayed_s / each.steps for each in paces) if paces else spent.delayed_s / steps,
        slow=find_slow(paces, *_places(nodes, list(metrics.paces))),
        crowds=_crowds(metrics.paces, nodes),
        hosts=hosts,
        uses=uses,
    )


def report_of(figures: Figures | None, laps: Sequence[Lap], values: Mapping[str, float]) -> JobReport | None:
    """Return the report of a job; None: it has made too few steps."""
    if figures is None:
        return None
    return JobReport(
        figures,
        judge(figures),
        [(lap.moment_s - before.moment_s) / (lap.steps - before.steps) for before, lap in pairwise(laps)],
        values,
    )


def _crowded(paces: Sequence[Pace], delayed: float) -> float:
    """Return in which share of the time in which they compute ranks waited for a core.

    Args:
        paces: of all ranks; empty: they are not known.
        delayed: the share of all time in which this rank did.
    """
    delayed_s = sum(each.delayed_s for each in paces)
    wanted_s = delayed_s + sum(each.processor_s for each in paces)
    return delayed_s / wanted_s if wanted_s else min(delayed, 1.0)


def _places(nodes: Sequence[Sequence[int]], ranks: Sequence[int]) -> tuple[list[list[int]], Sequence[int]]:
    """Return the nodes as places among some ranks, and these ranks."""
    place = {rank: number for number, rank in enumerate(ranks)}
    return [[place[rank] for rank in node if rank in place] for node in nodes], ranks


def _crowds(paces: Mapping[int, Pace], nodes: Sequence[Sequence[int]]) -> list[tuple[list[int], int]]:
    """Return the ranks of a node that may run on the same cores, and how many these are, if there are fewer cores."""
    found = []
    for node in nodes:
        cores: dict[tuple[int, ...], list[int]] = {}
        for rank in node:
            if rank in paces and paces[rank].cores:
                cores.setdefault(paces[rank].cores, []).append(rank)
        found += [(ranks, len(same)) for same, ranks in cores.items() if len(ranks) > len(same)]
    return found


# ---- of two jobs ----


def load(path: str) -> dict[str, Any]:
    """Return a report that `Report.write` has written.

    Raises:
        ConfigError: the file holds none.
    """
    try:
        found = json.loads(read_file(path, most_nbytes=64 << 20))
        for name in ("ranks", "nodes", "step_s", *_PARTS):
            float(found[name])
        laps_s = [float(each) for each in found["laps_s"]]
        names = [(each["name"], each["says"]) for each in found["found"]]
        if not laps_s or min(laps_s) <= 0 or not all(isinstance(each, str) for pair in names for each in pair):
            raise ValueError
    except (ConfigError, OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(f"{path} is no report of `ringreduce run --report`") from None
    return dict(found)


def figures_in(report: Mapping[str, Any]) -> Figures:
    """Return the figures of a report that `JobReport.to_json` has written."""
    slow = report["slow"]
    found = {each.name: report[each.name] for each in fields(Figures)} | {
        "hosts": {int(rank): host for rank, host in report["hosts"].items()},
        "slow": None if slow is None else Slow(**slow),
        "uses": [HostUse(**each) for each in report["uses"]],
    }
    return Figures(**found)


def say(found: JobReport | None, config: Config) -> None:
    """Write a report to the file for it, and to standard error, as the settings ask; None: there is none."""
    path = config.report
    if path is not None:
        try:
            if found is None:
                raise ConfigError(f"{path} is not written: a report is about 17 steps or more")
            found.write(path)
        except ConfigError as error:
            _log.error("%s", error)
    if found is not None and config.verdict:
        with suppress(OSError, ValueError):  # its reader has ended, or the program has closed it
            sys.stderr.write("".join(f"ringreduce: {line}\n" for line in found.lines))
            sys.stderr.flush()


def compare(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> tuple[list[str], bool]:
    """Return what differs between the reports of two jobs, for people, and whether steps have become slower.

    Args:
        before, after: what `Report.to_json` has written of them.
        tolerance: steps may take so much longer, 0.05 for 5 %.
    """
    was_s = median(before["laps_s"])
    is_s = median(after["laps_s"])
    noise_s = _BEYOND * math.hypot(_error_s(before["laps_s"]), _error_s(after["laps_s"]))
    is_noise = abs(is_s - was_s) <= noise_s
    is_slower = not is_noise and is_s > was_s * (1 + tolerance)
    said = f"{_change(was_s, is_s)}; noise is {noise_s / was_s:.1%}"
    if is_slower:
        said += f": slower than {tolerance:.0%} allow"
    lines = [f"a step: {said}"]
    for name in _PARTS:
        if abs(after[name] - before[name]) > max(noise_s, tolerance * was_s):
            lines.append(f"{name.removesuffix('_s')}: {_change(before[name], after[name])}")
    there, here = ({each["name"]: each["says"] for each in report["found"]} for report in (before, after))
    lines += [f"new: {says}" for name, says in here.items() if name not in there]
    lines += [f"gone: {says}" for name, says in there.items() if name not in here]
    for name in ("ranks", "nodes"):
        if before[name] != after[name]:
            lines.append(f"{name}: {before[name]} -> {after[name]}, so these jobs are not alike")
    return lines, is_slower


def _error_s(laps_s: Sequence[float]) -> float:
    middle = median(laps_s)
    return _OF_MEDIANS * median(abs(each - middle) for each in laps_s) / math.sqrt(len(laps_s))


def _change(was_s: float, is_s: float) -> str:
    share = f" ({is_s / was_s - 1:+.1%})" if is_s < _SHOWN * was_s else ""
    return f"{format_seconds(was_s)} -> {format_seconds(is_s)}{share}"
