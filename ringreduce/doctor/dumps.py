"""``doctor --dump``: what to say of who waits for whom, from what each rank has written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from ringreduce.common.errors import ConfigError, ForeignFileError, name_ranks
from ringreduce.common.files import read_file
from ringreduce.common.sealed_files import PLAIN, KeyFile
from ringreduce.observe.job.waits import places_in_words, waits
from ringreduce.observe.seen.activity import place_in_program
from ringreduce.observe.seen.snapshots import Snapshot

_MOST_NBYTES = 64 << 20  # of a dump, which has the last calls and the stacks of a rank
_MOST_RANKS = 1 << 20


def load(folder: str | Path, keys: KeyFile = PLAIN) -> dict[int, Snapshot]:
    """Return what the ranks have written into a folder, by rank.

    Args:
        folder: path of the folder.
        keys: opens what is sealed.

    Raises:
        ConfigError: there is nothing, or something else, or something that these keys do not open.
    """
    found = {}
    for path in sorted(Path(folder).glob("rank-*.json")):
        try:
            sealed = BytesIO(read_file(path, most_nbytes=_MOST_NBYTES, ours=True))
            with keys.opened(sealed, path.name) as content:
                dump = Snapshot.from_json(_printable(json.load(content)))
            if not 0 <= dump.rank < dump.size <= _MOST_RANKS:
                raise ValueError("there is no such rank")
            found[dump.rank] = dump
        except ForeignFileError as error:
            raise ForeignFileError(f"{path}: {error}") from None
        except (ConfigError, OSError, ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is not what a rank has written down: {error}") from None
    if not found:
        raise ConfigError(f"no rank has written anything into {folder}; RINGREDUCE_DUMP={folder} lets them do so")
    return found


def _printable(value: Any) -> Any:
    """Return a value of JSON, in whose texts nothing is left that a terminal would act on: others may have sent it."""
    if isinstance(value, dict):
        return {_printable(name): _printable(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_printable(each) for each in value]
    if isinstance(value, str) and not value.isprintable():
        return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in value)
    return value


def diagnose(dumps: Mapping[int, Snapshot]) -> list[str]:
    """Return what ranks waited for, who did not come, and where each rank is, a sentence each; and who is silent."""
    places = {}
    for rank in sorted(dumps):
        stack = next((each.stack for each in dumps[rank].threads if each.name == "MainThread"), ())
        places[rank] = place_in_program((each.file, each.line, each.function, each.text) for each in reversed(stack))
    said = [sentence + places_in_words(places, wait.absent) for wait in waits(dumps) if (sentence := wait.in_words())]
    if not said:
        said.append("no rank was waiting for another")
    told = "".join(said)
    said += [
        f"rank {rank} is at {where}" for rank, where in places.items() if where and f"rank {rank} is at" not in told
    ]
    silent = [rank for rank in range(max(dump.size for dump in dumps.values())) if rank not in dumps]
    if silent:
        said.append(f"{name_ranks(silent)} {'has' if len(silent) == 1 else 'have'} written nothing down")
    return said
