"""Of a trace: what the time of each training step went into, on each rank, and when each rank came.

A rank enters an operation when its program submits it, and a blocking collective when that begins. Until the last rank
has entered the same one, it waits for other ranks, not for bytes. Which one is the same is found by row, name, step,
and position within the step, so the trace may begin and end anywhere.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

Event = dict[str, Any]
Span = tuple[float, float]  # begin and end, in microseconds

_WORK = ("forward", "backward", "optimizer")


class TracedStep(NamedTuple):
    """A training step of one rank. Times are in microseconds.

    Attributes:
        number: the same on all ranks.
        parts: of its time, ``step`` in all: ``forward``, ``backward``, ``optimizer``, ``communication``, ``waiting``
            and ``rest``, which add up to it; and ``hidden``, of communication beside the first three.
        ready: when its backward pass ended, or it began.
    """

    number: int
    parts: Mapping[str, float]
    ready: float


class _Entry(NamedTuple):
    """How one rank takes part in an operation, or a blocking collective.

    Attributes:
        row, name: which.
        entered: when the rank did (microseconds).
        runs: when it ran at the latest, so that all ranks had entered it.
        ended: when it was done.
    """

    row: str
    name: str
    entered: float
    runs: float
    ended: float


def steps_of(events: Sequence[Event], skip: int) -> tuple[dict[int, list[TracedStep]], dict[int, dict[int, float]]]:
    """Return the steps of each rank that has any; and by step and rank, how much later than the first it came.

    Args:
        events: of a trace.
        skip: steps at the beginning that are left out.

    Returns:
        The steps by rank. And of all steps that each rank has, by their numbers and by rank, by how much less the rank
        waited for others than that which waited most (microseconds): what is hidden behind work holds nobody up.
        Where there was no operation that several ranks have entered, by how much its backward pass ended after the
        first one.
    """
    by_rank: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events[1:]:
        by_rank[event["pid"]].append(event)
    ranks = {rank: _Rank(by_rank[rank], skip) for rank in sorted(by_rank)}
    ranks = {rank: found for rank, found in ranks.items() if found.steps}
    waits, waited = _waits({rank: found.numbered() for rank, found in ranks.items()})
    steps = {rank: found.divided(_union(waits[rank])) for rank, found in ranks.items()}
    numbered = {rank: {each.number: each for each in found} for rank, found in steps.items()}
    behind = {}
    for number in sorted(set.intersection(*map(set, numbered.values()))) if numbered else ():
        came = {
            rank: -each[number].parts["waiting"] if number in waited else each[number].ready
            for rank, each in numbered.items()
        }
        behind[number] = {rank: each - min(came.values()) for rank, each in came.items()}
    return steps, behind


class _Rank:
    """The events of one rank.

    Args:
        events: its own.
        skip: steps that are left out.

    Attributes:
        steps: the spans of its steps, by number.
    """

    def __init__(self, events: Sequence[Event], skip: int) -> None:
        rows = {each["tid"]: each["args"] for each in events if each["name"] == "thread_name"}
        names = {tid: about["name"] for tid, about in rows.items()}
        spans = [each for each in events if each["ph"] == "X"]
        program = [each for each in spans if names.get(each["tid"]) == "program"]
        self._work = {name: _union(_span(each) for each in program if each["name"] == name) for name in _WORK}
        numbers = ((each["args"].get("step", -1), each) for each in program)
        self.steps = {number: _span(each) for number, each in numbers if number >= skip}
        places = {tid: about.get("place") or about["name"] for tid, about in rows.items()}
        self._entries = [
            *_operations(events, places),
            *_calls((each for each in spans if names.get(each["tid"], "").endswith(": blocking")), places),
        ]
        moving = [_span(each) for each in spans if ": " in names.get(each["tid"], "")]
        self._moving = _union(moving)
        self._under_way = [(each.entered, each.ended) for each in self._entries]

    def numbered(self) -> Iterator[tuple[tuple[str, str, int, int], _Entry]]:
        """Yield what it has entered within steps, each with row, name, step, and how many such came before in that."""
        numbers = sorted(self.steps, key=lambda number: self.steps[number])
        begins = [self.steps[number][0] for number in numbers]
        seen: Counter[tuple[str, str, int]] = Counter()
        for entry in sorted(self._entries, key=lambda each: each.entered):
            at = bisect(begins, entry.entered) - 1
            if at >= 0 and entry.entered <= self.steps[numbers[at]][1]:
                key = entry.row, entry.name, numbers[at]
                yield (*key, seen[key]), entry
                seen[key] += 1

    def divided(self, waits: Sequence[Span]) -> list[TracedStep]:
        """Return its steps, given when it waited for other ranks."""
        working = _union(span for spans in self._work.values() for span in spans)
        communicating = _union([*self._moving, *self._under_way])
        found = []
        for number, span in self.steps.items():
            whole = [span]
            parts = {name: _length(_within(spans, whole)) for name, spans in self._work.items()}
            mine = _within(communicating, whole)
            waited = _within(waits, whole)
            parts["waiting"] = _length(waited) - _length(_within(waited, working))
            exposed = _length(mine) - _length(_within(mine, working))
            parts["communication"] = max(exposed - parts["waiting"], 0.0)
            parts["rest"] = max(_length(whole) - sum(parts.values()), 0.0)
            parts["hidden"] = _length(_within(_within(self._moving, working), whole))
            ready = [end for _, end in _within(self._work["backward"], whole)] or [span[0]]
            found.append(TracedStep(number, {**parts, "step": _length(whole)}, ready[-1]))
        return found


def _operations(events: Iterable[Event], places: Mapping[int, str]) -> Iterator[_Entry]:
    """Yield the asynchronous operations that have run; those that began before the trace are left out."""
    found: defaultdict[str, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "operation":
            found[event["id"]].append(event)
    for marks in found.values():
        begun = marks[0]
        runs = [each["ts"] for each in marks if each["name"] == "run"]
        if begun["ph"] == "b" and runs:
            yield _Entry(places.get(begun["tid"], ""), begun["name"], begun["ts"], runs[0], marks[-1]["ts"])


def _calls(spans: Iterable[Event], places: Mapping[int, str]) -> Iterator[_Entry]:
    """Yield the blocking collectives among spans, which hold those of their steps as well."""
    for each in spans:
        if "nbytes" in each["args"]:
            begin, end = _span(each)
            yield _Entry(places[each["tid"]], each["name"], entered=begin, runs=end, ended=end)


def _waits(
    entries: Mapping[int, Iterable[tuple[tuple[str, str, int, int], _Entry]]],
) -> tuple[dict[int, list[Span]], set[int]]:
    """Return by rank when it waited for others; and the steps in which several ranks have entered the same."""
    together: defaultdict[tuple[str, str, int, int], dict[int, _Entry]] = defaultdict(dict)
    for rank, numbered in entries.items():
        for key, entry in numbered:
            together[key][rank] = entry
    waits: dict[int, list[Span]] = {rank: [] for rank in entries}
    waited = set()
    for (_, _, number, _), by_rank in together.items():
        if len(by_rank) == 1:
            continue
        times = [each.entered for each in by_rank.values()]
        for rank, entry in by_rank.items():
            waits[rank].append((entry.entered, max(entry.entered, min(max(times), entry.runs))))
        waited.add(number)
    return waits, waited


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return spans that do not overlap, ascending, and cover the same."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _within(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return what two lists, each as `_union` returns it, have in common."""
    found = []
    index = 0
    for begin, end in spans:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            found.append((max(begin, others[at][0]), min(end, others[at][1])))
            at += 1
    return found


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)
