"""The flight recorder: what a rank has done last and does now, written down when something goes wrong.

The last calls and operations of every communicator are kept as they come (`Instruments`), at the cost of a list each.
They become a file for each rank, ``rank-3.json``, for `ringreduce doctor --dump FOLDER` and for people:

    rank, size, host, pid, time, error      who, when (seconds since 1970), and why
    sets[]                                  process sets, and groups of torch.distributed: id, name, ranks,
      calls[]                               blocking collectives: number, collective, nbytes, started, ended
      operations[]                          named ones: name, signature, place, submitted, started, ended, error
    threads[]                               name, and stack[]: file, line, function, text; the innermost last

A time that has not come is null.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce.collectives.communicator import Communicator
from ringreduce.common.call_sites import place_of

__all__ = ["Watched", "last_call", "oldest_pending", "write"]

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Watched:
    """Something that a rank is a member of: a process set, or a group.

    Attributes:
        id: the number of a process set; text for a group, the same on all its ranks.
        name: for people.
        ranks: of the world.
        communicators: by how they are called, ``"blocking"`` or ``"asynchronous"``.
        is_open: returns whether it still can be used.
    """

    id: int | str
    name: str
    ranks: Sequence[int]
    communicators: Mapping[str, Communicator]
    is_open: Callable[[], bool]


def write(
    folder: str | os.PathLike[str], rank: int, size: int, sets: Iterable[Watched], error: BaseException | None = None
) -> Path:
    """Write down what this rank has done last; returns the file. Local; takes no lock.

    Args:
        folder: made if need be, for this user alone.
        rank, size: of this rank, and of its world.
        sets: what it is a member of.
        error: why; None: somebody asked.

    Raises:
        OSError: it cannot be written.
    """
    said = {
        "rank": rank,
        "size": size,
        "host": platform.node(),
        "pid": os.getpid(),
        "time": time.time(),
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "sets": [
            {
                "id": each.id,
                "name": each.name,
                "ranks": list(each.ranks),
                "calls": _calls(each.communicators["blocking"]),
                "operations": _operations(each.communicators.get("asynchronous")),
            }
            for each in sets
            if each.is_open()
        ],
        "threads": _threads(),
    }
    path = Path(folder)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path /= f"rank-{rank}.json"
    new = path.with_suffix(f".{os.getpid()}-{next(_numbers)}")  # a signal handler may write in the midst of this
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as file:
        json.dump(said, file, indent=1)
    os.replace(new, path)
    return path


def last_call(watched: Watched) -> list[Any] | None:
    """Return what was called last: name and ranks of where, the number of the call, which, and since when it runs.

    None where there was no call. Since when is in seconds since 1970, and None if the call has ended.
    """
    communicator = watched.communicators["blocking"]
    if not communicator.instruments.calls:
        return None
    started, ended, what, _ = communicator.instruments.calls[-1]
    number = sum(each.calls for each in communicator.tallies.values()) + (not ended)
    return [watched.name, list(watched.ranks), number, what, None if ended else _clock(started)]


def oldest_pending(watched: Watched) -> list[Any] | None:
    """Return which operation this rank has submitted first of those that have not started on all: as `last_call`.

    That is name and ranks of where, the name of the operation, and since when, in seconds since 1970; None: none waits.
    """
    communicator = watched.communicators.get("asynchronous")
    for submitted, started, ended, name, *_ in (
        [] if communicator is None else list(communicator.instruments.operations)
    ):
        if not (started or ended):
            return [watched.name, list(watched.ranks), name, _clock(submitted)]
    return None


def _calls(communicator: Communicator) -> list[dict[str, Any]]:
    recent = list(communicator.instruments.calls)
    ended = sum(each.calls for each in communicator.tallies.values())
    first = ended - sum(1 for call in recent if call[1]) + 1
    return [
        {"number": number, "collective": what, "nbytes": nbytes, "started": _clock(started), "ended": _clock(ended)}
        for number, (started, ended, what, nbytes) in enumerate(recent, first)
    ]


def _operations(communicator: Communicator | None) -> list[dict[str, Any]]:
    if communicator is None:
        return []
    return [
        {
            "name": name,
            "signature": signature,
            "place": place_of(stack),
            "submitted": _clock(submitted),
            "started": _clock(started),
            "ended": _clock(ended),
            "error": error,
        }
        for submitted, started, ended, name, signature, stack, error in list(communicator.instruments.operations)
    ]


def _clock(moment: float) -> float | None:
    """Turn what `time.perf_counter` has said into seconds since 1970; 0: it has not come."""
    return time.time() - (time.perf_counter() - moment) if moment else None


def _threads() -> list[dict[str, Any]]:
    names = {each.ident: each.name for each in threading.enumerate()}
    return [
        {
            "name": names.get(thread, str(thread)),
            "stack": [
                {"file": each.filename, "line": each.lineno, "function": each.name, "text": each.line}
                for each in traceback.extract_stack(frame)
            ],
        }
        for thread, frame in sys._current_frames().items()
    ]
