"""Why a job is slow: a table of rules on the figures of its steps, each with what its remedy brings at most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringreduce.common.errors import name_ranks
from ringreduce.common.quantities import format_seconds, plural
from ringreduce.observe.seen.pace import Slow

_SLOW = 0.1  # of a step that the others wait for a slow rank; see `ringreduce.observe.seen.pace`
_SUBSTANTIAL = 0.2  # of a step: less is usual
_FULL = 0.8  # of the speed of a network, or of the time of a disk
_ALIKE = 0.9  # of the largest figure of any host
_LOST = 0.05  # of the time: less is no news
_NARROWER = 4  # bytes of float32 for one of int8
_SWAPPED = 256  # pages: a megabyte
_RESENT = 0.01  # of segments of TCP: fewer slow no connection down
_MEMORY = 0.8  # of its limit: a full cache of files that were read once alone is no fault
_FAULTS = 10.0  # a second that read a disk
_LEAST_S = 60.0  # of steps: what a machine does for a shorter time is no property of the job
_LEAST_STEP_S = 5e-3  # of a shorter step, what an operating system does beside it is a large part


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """What a host's parts did while steps were made; shares are of time, or of what is possible, 0 to 1.

    Attributes:
        host: its name.
        interface, network: the one that was used most of its speed, and that share.
        disk, busy: the device that was busy for the longest, and that share.
        throttled, stolen: shares in which a control group, or the machine below a virtual one, withheld processors.
        collecting: of the rank that collected garbage for the longest.
        swapped: pages.
        resent: share of segments of TCP that were sent again, of a thousand or more.
        memory, faults: share of the limit in use, and page faults a second that read a disk.
    """

    host: str
    interface: str = ""
    network: float = 0.0
    disk: str = ""
    busy: float = 0.0
    throttled: float = 0.0
    stolen: float = 0.0
    collecting: float = 0.0
    swapped: float = 0.0
    resent: float = 0.0
    memory: float = 0.0
    faults: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What is known of the steps of a job. Times are seconds of one step, on average.

    Attributes:
        ranks, nodes: how many.
        seconds: since the world began.
        start_s: of that, until the end of the first step, which sets up, compiles and warms up; no figure counts it.
        steps_s: from there to the end of the last step that is counted; rates of hosts are of this time.
        steps: how many this rank has made.
        samples_per_s: of all ranks, if the others have as many as this one; 0: they are not counted.
        step_s: a whole step. Its parts, of an average rank, add up to it:
        compute_s: all that is none of the others.
        input_s: waiting for data.
        waiting_s: for the rank that comes last; 0 where that is not known apart from communication.
        communication_s: what else reductions and other collectives take.
        crowded: share of the time of computing in which ranks waited for a core that others had, 0 to 1.
        queued_s: how long a rank waited for a core in a step; None: unknown. Programs that sleep compute for longer.
        slow: for whom the others wait, in all steps; None: they hardly wait.
        crowds: ranks that may run on the same few cores, and how many these are.
        hosts: names by rank, as far as they are known.
        uses: of hosts, as far as they are known.
    """

    ranks: int
    nodes: int
    seconds: float
    start_s: float
    steps_s: float
    steps: int
    samples_per_s: float
    step_s: float
    compute_s: float
    input_s: float
    waiting_s: float
    communication_s: float
    crowded: float = 0.0
    queued_s: float | None = None
    slow: Slow | None = None
    crowds: Sequence[tuple[Sequence[int], int]] = ()
    hosts: Mapping[int, str] = field(default_factory=dict)
    uses: Sequence[HostUse] = ()

    def name(self, rank: int) -> str:
        """Return what a rank is called: with its host, if there are several."""
        return f"rank {rank}" + (f" of {self.hosts[rank]}" if self.nodes > 1 and rank in self.hosts else "")

    def worst(self, part: str) -> HostUse:
        """Return the use of the host where one of its attributes is largest; of about equal ones, the slow rank's host.

        Hosts that are containers of one machine see the same disks.
        """
        late = None if self.slow is None else self.hosts.get(self.slow.rank)
        least = _ALIKE * max((getattr(each, part) for each in self.uses), default=0.0)
        alike = [each for each in self.uses if getattr(each, part) >= least]
        return max(alike, key=lambda each: (each.host == late, getattr(each, part)), default=HostUse(host=""))


class VerdictRule(NamedTuple):
    """Something that makes steps slow, or is odd.

    Attributes:
        name: in a word or two.
        applies: returns whether it is so.
        says: returns what is so, in words.
        remedy: returns what helps, in words.
        saves_s: returns how much shorter a step becomes by that at most (seconds); 0: nobody knows.
    """

    name: str
    applies: Callable[[Figures], bool]
    says: Callable[[Figures], str]
    remedy: Callable[[Figures], str]
    saves_s: Callable[[Figures], float] = lambda figures: 0.0


class Verdict(NamedTuple):
    """A rule that applies.

    Attributes:
        name, says, remedy: of the rule.
        saves_s: of a step, at most (seconds).
        speedup: how many times as fast steps become at most; 1: nobody knows.
    """

    name: str
    says: str
    remedy: str
    saves_s: float
    speedup: float


def _waits(figures: Figures, least: float, *, in_turn: bool) -> bool:
    slow = figures.slow
    return slow is not None and (slow.rank < 0) == in_turn and figures.waiting_s >= least * figures.step_s


def _slow(figures: Figures) -> Slow:
    assert figures.slow is not None
    return figures.slow


def _is_long(figures: Figures, part_s: float) -> bool:
    return part_s >= _SUBSTANTIAL * figures.step_s


def _is_full(figures: Figures) -> bool:
    is_long = figures.nodes > 1 and _is_long(figures, figures.communication_s)
    return is_long and figures.worst("network").network >= _FULL


def _is_lossy(figures: Figures) -> bool:
    return figures.nodes > 1 and figures.worst("resent").resent >= _RESENT


def _repeating_s(figures: Figures) -> float:
    """Return how long lost segments delay communication at most; on a full network it is bytes that take long."""
    is_long = _is_long(figures, figures.communication_s) and not _is_full(figures)
    return figures.communication_s if is_long else 0.0


def _communicates(figures: Figures) -> bool:
    """Return whether communication takes long by itself; on crowded cores it lasts until all ranks have one again."""
    is_long = figures.ranks > 1 and _is_long(figures, figures.communication_s)
    return is_long and not _is_full(figures) and not _is_lossy(figures) and figures.crowded < _SUBSTANTIAL


def _crowding_s(figures: Figures) -> float:
    """Return how long ranks wait for cores; communication that waits for the network does not become shorter."""
    if figures.crowded < _SUBSTANTIAL:
        return 0.0
    waits = _is_full(figures) or _is_lossy(figures)
    found = figures.crowded * (figures.compute_s + (0.0 if waits else figures.communication_s))
    return found if figures.queued_s is None else min(found, figures.queued_s)


def _evening_s(figures: Figures) -> float:
    """Return how much shorter steps become with even ranks."""
    return max(figures.waiting_s, _crowding_s(figures) if _slow(figures).cause == "crowded" else 0.0)


def _reading_s(figures: Figures, part: str) -> float:
    """Return how long ranks wait for data, or for a rank that does on the host where something is largest."""
    slow = figures.slow
    reads = slow is not None and slow.cause in ("data", "faults", "waiting")
    is_there = reads and figures.hosts.get(_slow(figures).rank) == figures.worst(part).host
    return figures.input_s + (figures.waiting_s if is_there else 0.0)


def _crowds(figures: Figures) -> str:
    said = [f"{name_ranks(list(ranks))} share {plural(cores, 'core')}" for ranks, cores in figures.crowds]
    return "; ".join(said)


def _of_host(part: str, text: str) -> Callable[[Figures], str]:
    """Return what is said of the host where something is largest."""
    return lambda figures: text.format(figures.worst(part))


#: Of several that apply, that which saves most is to be changed first; of equal ones, the first, which says why.
RULES = (
    VerdictRule(
        "shared cores",
        lambda it: bool(it.crowds),
        _crowds,
        lambda it: "give each rank cores of its own (--bind-to core), or start fewer ranks",
        _crowding_s,
    ),
    VerdictRule(
        "memory",
        lambda it: it.worst("faults").faults >= _FAULTS and it.worst("faults").memory >= _MEMORY,
        _of_host("faults", "{0.host} uses {0.memory:.0%} of its memory, and reads from disk what does not fit"),
        lambda it: "use less memory, or raise its limit",
        lambda it: _reading_s(it, "faults"),
    ),
    VerdictRule(
        "disk",
        lambda it: it.worst("busy").busy >= _FULL,
        _of_host("busy", "disk {0.disk} of {0.host} is busy {0.busy:.0%} of the time"),
        lambda it: "read from faster storage, or keep data in memory",
        lambda it: _reading_s(it, "busy"),
    ),
    VerdictRule(
        "slow rank",
        lambda it: _waits(it, _SLOW, in_turn=False),
        lambda it: _slow(it).words(it.name(_slow(it).rank)),
        lambda it: _slow(it).remedy,
        _evening_s,
    ),
    VerdictRule(
        "uneven ranks",
        lambda it: _waits(it, _SUBSTANTIAL, in_turn=True),
        lambda it: _slow(it).words(),
        lambda it: _slow(it).remedy,
        lambda it: it.waiting_s,
    ),
    VerdictRule(
        "input",
        lambda it: _is_long(it, it.input_s),
        lambda it: f"ranks wait for data in {it.input_s / it.step_s:.0%} of the time",
        lambda it: "let loaders read further ahead, with more workers, or from faster storage",
        lambda it: it.input_s,
    ),
    VerdictRule(
        "network",
        _is_full,
        _of_host("network", "{0.interface} of {0.host} is at {0.network:.0%} of its speed"),
        lambda it: 'send fewer bytes, by compression="int8"',
        lambda it: it.communication_s * (1 - 1 / _NARROWER),
    ),
    VerdictRule(
        "retransmissions",
        _is_lossy,
        _of_host("resent", "{0.host} sends {0.resent:.1%} of its TCP segments again"),
        lambda it: "look for losses of the network",
        _repeating_s,
    ),
    VerdictRule(
        "communication",
        _communicates,
        lambda it: f"communication takes {it.communication_s / it.step_s:.0%} of a step",
        lambda it: "reduce more rarely: larger batches, backward_passes_per_step, LocalSGD",
        lambda it: it.communication_s,
    ),
    VerdictRule(
        "crowded cores",
        lambda it: _crowding_s(it) > 0.0,
        lambda it: f"ranks wait for a core, which others have, in {it.crowded:.0%} of the time in which they compute",
        lambda it: "start fewer ranks or threads (OMP_NUM_THREADS), or stop what else runs",
        _crowding_s,
    ),
    VerdictRule(
        "garbage collector",
        lambda it: it.worst("collecting").collecting >= _SUBSTANTIAL,
        _of_host("collecting", "Python collects garbage in {0.collecting:.0%} of the time"),
        lambda it: "call gc.freeze() before the training, or gc.disable()",
        lambda it: it.worst("collecting").collecting * it.step_s,
    ),
    VerdictRule(
        "throttled",
        lambda it: it.worst("throttled").throttled >= _LOST,
        _of_host("throttled", "{0.host} limits processors, and stops its ranks {0.throttled:.0%} of the time"),
        lambda it: "raise the limit of the container, or start fewer ranks and threads",
        lambda it: it.worst("throttled").throttled * it.step_s,
    ),
    VerdictRule(
        "steal",
        lambda it: it.worst("stolen").stolen >= _LOST,
        _of_host("stolen", "other virtual machines have {0.stolen:.0%} of the processors of {0.host}"),
        lambda it: "use a machine that nobody shares",
        lambda it: it.worst("stolen").stolen * it.step_s,
    ),
    VerdictRule(
        "swapping",
        lambda it: it.worst("swapped").swapped >= _SWAPPED,
        _of_host("swapped", "{0.host} swaps memory to disk"),
        lambda it: "use less memory, or more hosts",
    ),
)


def judge(figures: Figures) -> list[Verdict]:
    """Return the rules that apply, that which saves most first; none to a job that is too short to judge."""
    if _too_short(figures):
        return []
    found = []
    for rule in RULES:
        if rule.applies(figures):
            saves_s = min(rule.saves_s(figures), figures.step_s)
            left_s = figures.step_s - saves_s
            speedup = figures.step_s / left_s if left_s > 0 else float("inf")
            found.append(Verdict(rule.name, rule.says(figures), rule.remedy(figures), saves_s, speedup))
    return sorted(found, key=lambda each: -each.saves_s)


def _too_short(figures: Figures) -> str:
    """Return why a job cannot be judged, in words; empty if it can."""
    if figures.steps_s < _LEAST_S:
        return f"too short to judge: that takes {_LEAST_S:.0f} s of steps"
    if figures.step_s < _LEAST_STEP_S:
        return f"too short to judge: that takes steps of {format_seconds(_LEAST_STEP_S)}"
    return ""


def in_words(figures: Figures, found: Sequence[Verdict]) -> list[str]:
    """Return at most eight lines for people; one of a job that is too short to judge.

    Args:
        figures: of a job.
        found: what `judge` has found in these.
    """
    hosts = f" on {plural(figures.nodes, 'host')}" if figures.nodes > 1 else ""
    speed = f", {figures.samples_per_s:.4g} samples/s" if figures.samples_per_s else ""
    step = format_seconds(figures.step_s)
    took = f"{figures.seconds:.1f} s ({figures.start_s:.1f} s until the end of the first step)"
    job = f"{plural(figures.ranks, 'rank')}{hosts}, {took}, {figures.steps} steps of {step}{speed}"
    if why := _too_short(figures):
        return [f"{job}: {why}"]
    lines = [job]
    parts = {
        "compute": figures.compute_s,
        "input": figures.input_s,
        "waiting for other ranks": figures.waiting_s,
        "communication": figures.communication_s,
    }
    shares = [f"{name} {each / figures.step_s:.0%}" for name, each in parts.items() if each >= 0.005 * figures.step_s]
    lines.append(f"a step: {', '.join(shares)}")
    bounded = [each for each in found if each.saves_s]
    if bounded:
        first = bounded[0]
        times = "" if first.speedup == float("inf") else f": at most {first.speedup:.1f} times as fast"
        lines += [f"slow: {first.says}", f"first: {first.remedy}{times}"]
    else:
        lines.append("nothing to change: no part of a step takes longer than usual")
    others = [*bounded[1:], *(each for each in found if not each.saves_s)]
    lines += [f"also: {each.says}; {each.remedy}" for each in others[:3]]
    return lines
