"""Who is slow, why, and what helps: read from how all ranks went through some steps of training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from statistics import fmean
from typing import NamedTuple

from ringreduce.common.errors import name_ranks
from ringreduce.common.instruments import Pace

_ENOUGH = 64  # steps: with fewer, no rank is called slow
_COSTS = 0.1  # of a step's time: shorter waits are not reported
_EXPLAINS = 0.8  # of all waits: the rank that is charged with them is named
_RARELY = 0.2  # of all steps: of fewer, what a rank does on average says nothing
_LESS = 0.9  # of the core that others have
_DELAYED = 0.5  # of the time without a core: that others have it is the reason
_FAULT_S = 1e-6  # what the system takes for one, if not for reading a disk

# What makes slowness last. Two ranks of which either is last by chance have one of them last in three of four of 128
# steps once in 10^8 times; more ranks, more rarely. What else a machine does for some seconds is no property of a rank.
_REPORTS = 8
_LONG_S = 10.0
_MOST = 0.75  # of the steps of all reports
_OF_A_REPORT = 0.5  # of the steps of each report
_SUBSTANTIAL = 0.2  # of a step's time

_FEWER = "give it fewer samples"
#: What helps against each cause.
_CURES = {
    "data": "let its loader read further ahead, with more workers, or from faster storage",
    "faults": "reuse memory instead of allocating it in each step, and see whether the machine swaps",
    "shared": "give each rank cores of its own (--bind-to core), or start fewer ranks there",
    "crowded": "stop what else runs on its cores, or limit its threads (OMP_NUM_THREADS)",
    "waiting": "find what it waits for, as with a profiler",
    "work": _FEWER,
    "unknown": _FEWER,
}
_RARE = "look at these steps alone, as with RINGREDUCE_TIMELINE"
_RARER = "let ranks wait less often, by LocalSGD, DiLoCo or staleness, where these go with the optimizer"


class Slow(NamedTuple):
    """The rank for which the others wait.

    Attributes:
        rank: which; -1: none alone, they wait for several in turn or at once.
        kind: ``"always"``: the waits with which this rank is charged explain at least 80 % of all waits; ``"rarely"``:
            and these are in less than 20 % of steps; ``"sometimes"``: no rank explains as much.
        part: in which part of the steps this rank, or any, is last.
        late_s: how much later than the last but one it comes then (seconds).
        reason: why it is late, as far as can be seen.
        cause: the same in a word: ``"data"``, ``"faults"``, ``"shared"`` and ``"crowded"`` (its cores), ``"waiting"``,
            ``"work"``, or ``"unknown"``.
    """

    rank: int
    kind: str
    part: float
    late_s: float
    reason: str
    cause: str = "unknown"

    @property
    def remedy(self) -> str:
        """What helps, in words."""
        return {"always": _CURES[self.cause], "sometimes": _RARER, "rarely": _RARE}[self.kind]

    @property
    def lateness(self) -> str:
        """How often and how much it is late, and why."""
        part = f"{self.part:.0%}" if self.part >= 0.1 else f"{self.part:.1%}"
        late = f"last in {part} of steps, by {self.late_s * 1e3:.3g} ms"
        return f"{late}: {self.reason}" if self.reason else late

    def words(self, name: str = "") -> str:
        """Return who is late, how often and why, as a sentence; ``name``: what the rank is called."""
        if self.rank < 0:
            return f"several ranks are late, in turn or at once: one is {self.lateness}"
        return f"{name or f'rank {self.rank}'} is {self.lateness}"

    def __str__(self) -> str:
        return f"{self.words()}; {self.remedy}; see docs/slow.md"

    def warning(self, fewer: str | None) -> str:
        """Return what is said of a rank that is late for long.

        Args:
            fewer: how a program gives a rank fewer samples; None: it cannot.
        """
        cure = _CURES[self.cause]
        if cure == _FEWER:
            cure = "give it less work" if fewer is None else f"{_FEWER}, by {fewer}"
        return f"rank {self.rank} is {self.lateness}. To speed all ranks up, {cure}; see docs/slow.md"


class Lasting(NamedTuple):
    """The rank that was last in most steps, report after report; of none after the first that differs.

    Attributes:
        rank: which; -1: none.
        reports: how many reports in a row.
        steps, last: the steps of these, and in how many of them it was last.
        own_s, late_s: how long its own parts took, and how long the others have waited for it (seconds).
    """

    rank: int = -1
    reports: int = 0
    steps: int = 0
    last: int = 0
    own_s: float = 0.0
    late_s: float = 0.0

    def after(self, window: Sequence[Pace]) -> Lasting:
        """Return what is known after one more report: the paces of all ranks in its steps."""
        rank = max(range(len(window)), key=lambda each: window[each].late_s)
        slow = window[rank]
        if slow.last <= _OF_A_REPORT * slow.steps or slow.late_s < _COSTS * slow.own_s:
            return Lasting()
        before = self if rank == self.rank else Lasting(rank)
        return Lasting(
            rank,
            before.reports + 1,
            steps=before.steps + slow.steps,
            last=before.last + slow.last,
            own_s=before.own_s + slow.own_s,
            late_s=before.late_s + slow.late_s,
        )

    @property
    def is_enough(self) -> bool:
        """Whether it is no chance, lasts, and costs the others a substantial part of their time."""
        lasts = self.reports >= _REPORTS and self.own_s >= _LONG_S
        return lasts and self.last >= _MOST * self.steps and self.late_s >= _SUBSTANTIAL * self.own_s

    def slow(self, windows: Sequence[Sequence[Pace]], nodes: Sequence[Sequence[int]]) -> Slow | None:
        """Return what to warn of, given the last reports; None: nothing, or the reason is unknown or changes."""
        if not self.is_enough:
            return None
        half = len(windows) // 2
        early, late, both = (
            _describe(self.rank, [reduce(add, paces) for paces in zip(*part, strict=True)], nodes, range(len(part[0])))
            for part in (windows[:half], windows[half:], windows)
        )
        return both if early.cause == late.cause != "unknown" else None


def find_slow(
    paces: Sequence[Pace],
    nodes: Sequence[Sequence[int]],
    ranks: Sequence[int] | None = None,
    *,
    enough: int = _ENOUGH,
) -> Slow | None:
    """Return for whom the others wait; None: they hardly wait, or there were not enough steps.

    All that names a slow rank asks this: the verdict, `ringreduce top`, the page of a job, and the report of a trace.

    Args:
        paces: of all ranks, in the same steps.
        nodes: the ranks of each node, as places among ``paces``.
        ranks: what they are called; None: by their places.
        enough: with fewer steps, nobody is called slow.
    """
    if len(paces) < 2 or paces[0].steps < enough:
        return None
    others = len(paces) - 1
    waited_s = sum(each.waited_s for each in paces)
    if waited_s < _COSTS * others * max(each.own_s for each in paces):
        return None
    rank = max(range(len(paces)), key=lambda each: paces[each].late_s)
    if paces[rank].late_s * others >= _EXPLAINS * waited_s:
        return _describe(rank, paces, nodes=nodes, names=range(len(paces)) if ranks is None else ranks)
    last = sum(each.last for each in paces)
    late_s = sum(each.late_s for each in paces) / max(last, 1)
    return Slow(-1, "sometimes", last / paces[0].steps, late_s, reason="")


def _describe(rank: int, paces: Sequence[Pace], nodes: Sequence[Sequence[int]], names: Sequence[int]) -> Slow:
    """Return how slow a rank is, which was last in some steps."""
    slow = paces[rank]
    steps = paces[rank].steps
    part = slow.last / steps
    late_s = slow.late_s / slow.last
    if part < _RARELY:
        return Slow(names[rank], "rarely", part, late_s, reason="in few steps, of which the average says nothing")
    cause, reason = _reason(rank, paces, nodes=nodes, late_s=slow.late_s / steps, names=names)
    return Slow(names[rank], "always", part, late_s=late_s, reason=reason, cause=cause)


def _reason(
    rank: int, paces: Sequence[Pace], nodes: Sequence[Sequence[int]], late_s: float, names: Sequence[int]
) -> tuple[str, str]:
    """Return why a rank is late, by so much per step: in a word, and in words."""
    slow = paces[rank]
    others = [each for number, each in enumerate(paces) if number != rank]
    loading = slow.loading_s / slow.steps
    usual = fmean(each.loading_s / each.steps for each in others)
    if loading - usual > late_s / 2:
        return "data", f"it waits {loading * 1e3:.0f} ms a step for data, the others {usual * 1e3:.0f} ms"
    if not all(each.sampled_s > 0.0 for each in paces):
        return "unknown", "why, was not measured"
    faults = _faults(slow)
    usual = fmean(map(_faults, others))
    if (faults - usual) * _FAULT_S > late_s / 2:
        return "faults", f"it has {faults:.0f} page faults a step, the others {usual:.0f}"
    cores = _cores(slow)
    most = max(map(_cores, others))
    if cores >= _LESS * most:
        return "work", f"it computes all the time, with {cores:.0%} of a core: it has more work, or a slower core"
    if slow.delayed_s < _DELAYED * (slow.sampled_s - slow.processor_s):
        used = f"it used {cores:.0%} of a core, the others up to {most:.0%}"
        return "waiting", f"{used}: it waits for a disk, a device or a lock"
    cause, why = _sharing(rank, paces, nodes=nodes, names=names)
    return cause, f"it had {cores:.0%} of a core, {why}"


def _sharing(rank: int, paces: Sequence[Pace], nodes: Sequence[Sequence[int]], names: Sequence[int]) -> tuple[str, str]:
    """Return who else wants the cores of a rank: in a word, and in words."""
    cores = paces[rank].cores
    node = next(node for node in nodes if rank in node)
    sharing = [each for each in node if each != rank and paces[each].cores == cores]
    if not cores or len(sharing) < len(cores):
        return "crowded", "as other processes, or its own threads, use the rest"
    same = "one" if len(cores) == 1 else str(len(cores))
    named = name_ranks([names[each] for each in sharing])
    return "shared", f"as {named} {'has' if len(sharing) == 1 else 'have'} the same {same}"


def _cores(pace: Pace) -> float:
    """Return how many cores a rank has used, while it made its own part of steps."""
    return pace.processor_s / pace.sampled_s


def _faults(pace: Pace) -> float:
    """Return the page faults of a step."""
    return pace.faults / pace.sampled_s * pace.own_s / pace.steps
