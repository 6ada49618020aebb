"""``doctor --dump``: one sentence for what ranks were waiting for, from what each has written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringreduce.bench.cases import format_nbytes
from ringreduce.common.errors import ConfigError, name_ranks
from ringreduce.doctor.waits import Wait, waits
from ringreduce.observe.flight_recorder import Snapshot

__all__ = ["diagnose", "load", "main_stack"]

_OURS = str(Path(__file__).parents[1])


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
