"""``doctor --dump``: one sentence for what ranks were waiting for, from what each has written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringreduce.bench.cases import format_nbytes
from ringreduce.common.errors import ConfigError, name_ranks

__all__ = ["diagnose", "load", "sets_of"]

Dump = dict[str, Any]

_OURS = str(Path(__file__).parents[1])


def load(folder: str | Path) -> dict[int, Dump]:
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


def diagnose(dumps: Mapping[int, Dump]) -> list[str]:
    """Return what ranks waited for and who did not come, a sentence each; and who has written nothing."""
    size = max(dump["size"] for dump in dumps.values())
    said = [
        sentence
        for sets in sets_of(dumps)
        for sentence in (*_waits_for_operations(dumps, sets), *_waits_in_calls(dumps, sets))
    ]
    if not said:
        said.append("no rank was waiting for another")
    silent = [rank for rank in range(size) if rank not in dumps]
    if silent:
        said.append(f"{name_ranks(silent)} {'has' if len(silent) == 1 else 'have'} written nothing down")
    return said


def sets_of(dumps: Mapping[int, Dump]) -> list[dict[int, Dump]]:
    """Return the process sets, and then the groups: each as what its ranks have written of it, by rank."""
    found: dict[int | str, dict[int, Dump]] = {}
    for rank, dump in dumps.items():
        for each in dump["sets"]:
            found.setdefault(each["id"], {})[rank] = each
    return [found[key] for key in sorted(found, key=lambda key: (isinstance(key, str), key))]


def _waits_for_operations(dumps: Mapping[int, Dump], sets: Mapping[int, Dump]) -> list[str]:
    waiting: dict[str, dict[int, Dump]] = {}
    for rank, each in sets.items():
        for operation in each["operations"]:
            # What failed was waited for; the error of the rank says when.
            if operation["started"] is None and (operation["ended"] is None or operation["error"] is not None):
                waiting.setdefault(operation["name"], {})[rank] = operation
    said = []
    for name, operations in waiting.items():
        absent = [rank for rank in sets if rank not in operations]
        first = next(iter(operations.values()))
        if not absent:
            continue
        present = name_ranks(sorted(operations))
        said.append(
            f"{name_ranks(absent)} never submitted {name!r} ({first['signature']}), which {present} submitted at "
            f"{first['place']}{_whereabouts(dumps, absent)}"
        )
    return said


def _waits_in_calls(dumps: Mapping[int, Dump], sets: Mapping[int, Dump]) -> list[str]:
    last = {rank: each["calls"][-1] for rank, each in sets.items() if each["calls"]}
    inside = {rank: call for rank, call in last.items() if call["ended"] is None}
    if not inside:
        return []
    number = max(call["number"] for call in inside.values())
    present = sorted(rank for rank, call in inside.items() if call["number"] == number)
    call = inside[present[0]]
    what = f"blocking call {number}, {call['collective']} of {format_nbytes(call['nbytes'])}"
    if (name := sets[present[0]]["name"]) != "world":
        what += f" in the {name}"
    absent = [rank for rank in sets if rank not in last or last[rank]["number"] < number]
    if not absent:
        return [f"{name_ranks(present)} were in {what}, to which all have come"]
    waited = f"{name_ranks(absent)} never entered {what}, in which {name_ranks(present)} waited"
    return [waited + _whereabouts(dumps, absent)]


def _whereabouts(dumps: Mapping[int, Dump], ranks: list[int]) -> str:
    """Say where the main threads of ranks are, in the program's own code."""
    places = [f"; rank {rank} is at {place}" for rank in ranks if rank in dumps and (place := _place(dumps[rank]))]
    return "".join(places)


def _place(dump: Dump) -> str:
    main: list[dict[str, Any]] = next((each["stack"] for each in dump["threads"] if each["name"] == "MainThread"), [])
    own = [frame for frame in main if not frame["file"].startswith(_OURS)]
    if not own:
        return ""
    frame = own[-1]
    return f"{frame['file']}:{frame['line']} in {frame['function']}" + (f" ({frame['text']})" if frame["text"] else "")
