"""Who waits for whom, from snapshots of ranks (`ringreduce.observe.snapshots`), and what to say of it.

For `top`, and for ``doctor --dump``, which reads what each rank has written down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce.bench.cases import format_nbytes
from ringreduce.common.errors import ConfigError, name_ranks
from ringreduce.observe.snapshots import Snapshot

__all__ = ["Wait", "diagnose", "load", "main_stack", "sets_of", "waits"]

_OURS = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Wait:
    """Ranks that are in a blocking call, or have submitted an operation, and those that have not come to it.

    Attributes:
        where: the name of the process set or group.
        present: what each of those that have come says of it: an entry of ``calls`` or ``operations``.
        absent: the others that have written something; of calls, these alone have an earlier one, or none.
        unseen: those of the set that have written nothing.
    """

    where: str
    present: dict[int, dict[str, Any]]
    absent: list[int]
    unseen: list[int]

    @property
    def first(self) -> dict[str, Any]:
        """What the first of those that have come says."""
        return next(iter(self.present.values()))

    @property
    def is_call(self) -> bool:
        return "collective" in self.first


def sets_of(snapshots: Mapping[int, Snapshot]) -> list[dict[int, dict[str, Any]]]:
    """Return the process sets, and then the groups: each as what its ranks have written of it, by rank."""
    found: dict[int | str, dict[int, dict[str, Any]]] = {}
    for rank, snapshot in snapshots.items():
        for each in snapshot["sets"]:
            found.setdefault(each["id"], {})[rank] = each
    return [found[key] for key in sorted(found, key=lambda key: (isinstance(key, str), key))]


def waits(snapshots: Mapping[int, Snapshot]) -> Iterator[Wait]:
    """Yield for what ranks wait, in each set: operations, and then the blocking call."""
    for sets in sets_of(snapshots):
        first = next(iter(sets.values()))
        unseen = [rank for rank in first["ranks"] if rank not in snapshots]
        submitted: dict[str, dict[int, dict[str, Any]]] = {}
        for rank, each in sets.items():
            for operation in each["operations"]:
                # What failed was waited for; the error of the rank says when.
                if operation["started"] is None and (operation["ended"] is None or operation["error"] is not None):
                    submitted.setdefault(operation["name"], {})[rank] = operation
        for operations in submitted.values():
            yield Wait(first["name"], operations, [rank for rank in sets if rank not in operations], unseen)
        last = {rank: each["calls"][-1] for rank, each in sets.items() if each["calls"]}
        number = max((call["number"] for call in last.values() if call["ended"] is None), default=None)
        if number is not None:
            inside = {rank: last[rank] for rank in sorted(last) if last[rank]["number"] == number}
            inside = {rank: call for rank, call in inside.items() if call["ended"] is None}
            absent = [rank for rank in sets if rank not in last or last[rank]["number"] < number]
            yield Wait(first["name"], inside, absent, unseen)


def load(folder: str | Path) -> dict[int, Snapshot]:
    """Return what the ranks have written into a folder, by rank.

    Raises:
        ConfigError: there is nothing, or something else.
    """
    found = {}
    for path in sorted(Path(folder).glob("rank-*.json")):
        try:
            dump = json.loads(path.read_text(encoding="utf-8"))
            found[int(dump["rank"])] = dump
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not what a rank has written down: {error!r}") from None
    if not found:
        raise ConfigError(f"no rank has written anything into {folder}; RINGREDUCE_DUMP={folder} lets them do so")
    return found


def diagnose(dumps: Mapping[int, Snapshot]) -> list[str]:
    """Return what ranks waited for and who did not come, a sentence each; and who has written nothing."""
    said = [sentence for wait in waits(dumps) if (sentence := _sentence(dumps, wait))]
    if not said:
        said.append("no rank was waiting for another")
    silent = [rank for rank in range(max(dump["size"] for dump in dumps.values())) if rank not in dumps]
    if silent:
        said.append(f"{name_ranks(silent)} {'has' if len(silent) == 1 else 'have'} written nothing down")
    return said


def _sentence(dumps: Mapping[int, Snapshot], wait: Wait) -> str:
    """Return who has not come to what; nothing if all have submitted an operation."""
    present, first = name_ranks(sorted(wait.present)), wait.first
    if wait.is_call:
        what = f"blocking call {first['number']}, {first['collective']} of {format_nbytes(first['nbytes'])}"
        if wait.where != "world":
            what += f" in the {wait.where}"
        if not wait.absent:
            return f"{present} were in {what}, to which all have come"
        said = f"{name_ranks(wait.absent)} never entered {what}, in which {present} waited"
    elif not wait.absent:
        return ""
    else:
        what = f"{first['name']!r} ({first['signature']})"
        said = f"{name_ranks(wait.absent)} never submitted {what}, which {present} submitted at {first['place']}"
    places = [(rank, _place(dumps[rank])) for rank in wait.absent]
    return said + "".join(f"; rank {rank} is at {place}" for rank, place in places if place)


def main_stack(dump: Snapshot) -> list[dict[str, Any]]:
    """Return where the main thread of a rank is, innermost last."""
    return next((each["stack"] for each in dump["threads"] if each["name"] == "MainThread"), [])


def _place(dump: Snapshot) -> str:
    """Say where the main thread of a rank is, in the program's own code."""
    own = [frame for frame in main_stack(dump) if not frame["file"].startswith(_OURS)]
    if not own:
        return ""
    frame = own[-1]
    return f"{frame['file']}:{frame['line']} in {frame['function']}" + (f" ({frame['text']})" if frame["text"] else "")
