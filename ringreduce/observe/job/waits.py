"""Who waits for whom, from snapshots of ranks (`Snapshot`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ringreduce.common.errors import name_ranks
from ringreduce.common.quantities import format_nbytes
from ringreduce.observe.seen.snapshots import SeenCall, SeenOperation, SeenSet, Snapshot


@dataclass(frozen=True, slots=True)
class Wait:
    """Ranks that are in a blocking call, or have submitted an operation, and those that have not come to it.

    Attributes:
        where: the name of the process set or group.
        present: what each of those that have come says of it.
        absent: the others that have written something; of calls, these alone have an earlier one, or none.
        unseen: those of the set that have written nothing.
    """

    where: str
    present: Mapping[int, SeenCall | SeenOperation]
    absent: list[int]
    unseen: list[int]

    @property
    def first(self) -> SeenCall | SeenOperation:
        """What the first of those that have come says."""
        return next(iter(self.present.values()))

    @property
    def is_call(self) -> bool:
        return isinstance(self.first, SeenCall)

    def in_words(self) -> str:
        """Return who has not come to what; of an operation that all have submitted, nothing."""
        first = self.first
        present = name_ranks(sorted(self.present))
        if isinstance(first, SeenOperation):
            if not self.absent:
                return ""
            what = f"{first.name!r} ({first.signature})"
            return f"{name_ranks(self.absent)} never submitted {what}, which {present} submitted at {first.place}"
        what = f"blocking call {first.number}, {first.collective} of {format_nbytes(first.nbytes)}"
        if self.where != "world":
            what += f" in the {self.where}"
        if not self.absent:
            return f"{present} were in {what}, to which all have come"
        return f"{name_ranks(self.absent)} never entered {what}, in which {present} waited"

    def of_rank(self, rank: int, now_s: float) -> tuple[float, str]:
        """Return for how many seconds a rank has waited, and in what for whom; ``now_s``: seconds since 1970."""
        entry = self.present[rank]
        absent = self.absent or self.unseen
        whom = name_ranks(absent) if absent else "all, who have come"
        if isinstance(entry, SeenCall):
            return now_s - entry.started, f"{entry.collective} for {whom}"
        return now_s - entry.submitted, f"{entry.name!r} for {whom}"


def _sets_of(snapshots: Mapping[int, Snapshot]) -> list[dict[int, SeenSet]]:
    """Return the process sets, and then the groups: each as what its ranks have written of it, by rank."""
    by_id: dict[int | str, dict[int, SeenSet]] = {}
    for rank, snapshot in snapshots.items():
        for each in snapshot.sets:
            by_id.setdefault(each.id, {})[rank] = each
    return [by_id[key] for key in sorted(by_id, key=lambda key: (isinstance(key, str), key))]


def waits(snapshots: Mapping[int, Snapshot]) -> Iterator[Wait]:
    """Yield for what ranks wait, in each set: operations, and then the blocking call."""
    for sets in _sets_of(snapshots):
        rank, first = next(iter(sets.items()))
        members = range(snapshots[rank].size) if first.ranks is None else first.ranks
        unseen = [rank for rank in members if rank not in snapshots]
        submitted: dict[str, dict[int, SeenOperation]] = {}
        for rank, each in sets.items():
            for operation in each.operations:
                # What failed was waited for; the error of the rank says when.
                if operation.started is None and (operation.ended is None or operation.error is not None):
                    submitted.setdefault(operation.name, {})[rank] = operation
        for operations in submitted.values():
            yield Wait(first.name, operations, absent=[rank for rank in sets if rank not in operations], unseen=unseen)
        last = {rank: each.calls[-1] for rank, each in sets.items() if each.calls}
        number = max((call.number for call in last.values() if call.ended is None), default=None)
        if number is not None:
            calls = {rank: last[rank] for rank in sorted(last) if last[rank].number == number}
            inside = {rank: call for rank, call in calls.items() if call.ended is None}
            absent = [rank for rank in sets if rank not in last or last[rank].number < number]
            yield Wait(first.name, inside, absent=absent, unseen=unseen)


def places_in_words(places: Mapping[int, str], ranks: Sequence[int]) -> str:
    """Return where some ranks are, to be added to a sentence; those of whom no place is known are left out."""
    return "".join(f"; rank {rank} is at {places[rank]}" for rank in ranks if places[rank])
