"""Who is slow, why, and what helps: read from how all ranks went through some steps of training."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from ringreduce.common.errors import name_ranks
from ringreduce.common.instruments import Pace

__all__ = ["Slow", "find_slow"]

_ENOUGH = 64  # steps: with fewer, no rank is called slow
_COSTS = 0.1  # of a step's time: shorter waits are not reported
_ALWAYS, _SOMETIMES = 0.8, 0.2  # of all steps
_LESS = 0.9  # of the core that others have
_CROWDED = 0.1  # who wants a core has more of one, even if others want it, too
_PREEMPTED_S = 0.02  # the longest that others have a core before the system gives it back
_FAULT_S = 1e-6  # what the system takes for one, if not for reading a disk

_REMEDIES = {
    "always": 'give it fewer samples, by DistributedSampler(..., shares="speed")',
    "sometimes": "let ranks wait less often: by LocalSGD or DiLoCo, or by staleness=1",
    "rarely": "nothing need be done",
}


class Slow(NamedTuple):
    """The rank for which the others wait most.

    Attributes:
        rank: which.
        kind: ``"always"``: it is last in at least 80 % of steps; ``"sometimes"``: some rank is last in at least 20 %;
            ``"rarely"``.
        part: in which part of the steps this rank is last.
        late_s: how long the others wait for it then (seconds).
        reason: why it is late, as far as can be seen.
    """

    rank: int
    kind: str
    part: float
    late_s: float
    reason: str

    @property
    def remedy(self) -> str:
        """What helps, in words."""
        return _REMEDIES[self.kind]

    @property
    def lateness(self) -> str:
        """How often and how much it is late, and why."""
        return f"last in {self.part:.0%} of steps, by {self.late_s * 1e3:.0f} ms: {self.reason}"

    def __str__(self) -> str:
        helps = f"{self.kind.capitalize()} late: {self.remedy}; see docs/recipes/speeds.md"
        return f"rank {self.rank} is {self.lateness}. {helps}"


def find_slow(paces: Sequence[Pace], nodes: Sequence[Sequence[int]], ranks: Sequence[int] | None = None) -> Slow | None:
    """Return the rank for which the others wait most; None: they hardly wait, or there were not enough steps.

    Args:
        paces: of all ranks, in the same steps.
        nodes: the ranks of each node, as places among ``paces``.
        ranks: what they are called; None: by their places.
    """
    if not paces or paces[0].steps < _ENOUGH:
        return None
    if sum(each.late_s for each in paces) < _COSTS * max(each.own_s for each in paces):
        return None
    rank = max(range(len(paces)), key=lambda each: paces[each].late_s)
    slow, steps = paces[rank], paces[rank].steps
    kind = "rarely"
    if slow.last >= _ALWAYS * steps:
        kind = "always"
    elif sum(each.last for each in paces) >= _SOMETIMES * steps:
        kind = "sometimes"
    late_s = slow.late_s / slow.last
    names = range(len(paces)) if ranks is None else ranks
    reason = _reason(rank, paces, nodes, late_s * slow.last / steps, names)
    return Slow(names[rank], kind, slow.last / steps, late_s, reason)


def _reason(
    rank: int, paces: Sequence[Pace], nodes: Sequence[Sequence[int]], late_s: float, names: Sequence[int]
) -> str:
    """Return why a rank is late, by so much per step."""
    slow, others = paces[rank], [each for number, each in enumerate(paces) if number != rank]
    loading, usual = slow.loading_s / slow.steps, fmean(each.loading_s / each.steps for each in others)
    if loading - usual > late_s / 2:
        return f"it waits {loading * 1e3:.0f} ms a step for data, the others {usual * 1e3:.0f} ms"
    if not all(each.sampled_s > 0.0 for each in paces):
        return "why, was not measured"
    faults, usual = _faults(slow), fmean(map(_faults, others))
    if (faults - usual) * _FAULT_S > late_s / 2:
        return f"it has {faults:.0f} page faults a step, the others {usual:.0f}"
    cores, most = _cores(slow), max(map(_cores, others))
    if cores >= _LESS * most:
        return f"it computes all the time, with {cores:.0%} of a core: it has more work, or a slower core"
    if cores < _CROWDED or slow.switches * _PREEMPTED_S < slow.sampled_s - slow.processor_s:
        return f"it used {cores:.0%} of a core, the others up to {most:.0%}: it waits for a disk, a device or a lock"
    return f"it had {cores:.0%} of a core, {_sharing(rank, paces, nodes, names)}"


def _sharing(rank: int, paces: Sequence[Pace], nodes: Sequence[Sequence[int]], names: Sequence[int]) -> str:
    """Return who else wants the cores of a rank."""
    cores = paces[rank].cores
    node = next(node for node in nodes if rank in node)
    sharing = [each for each in node if each != rank and paces[each].cores == cores]
    if not cores or len(sharing) < len(cores):
        return "as other processes, or its own threads, use the rest"
    same = "one" if len(cores) == 1 else str(len(cores))
    named = name_ranks([names[each] for each in sharing])
    return f"as {named} {'has' if len(sharing) == 1 else 'have'} the same {same}"


def _cores(pace: Pace) -> float:
    """Return how many cores a rank has used, while it made its own part of steps."""
    return pace.processor_s / pace.sampled_s


def _faults(pace: Pace) -> float:
    """Return the page faults of a step."""
    return pace.faults / pace.sampled_s * pace.own_s / pace.steps
