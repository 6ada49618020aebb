"""``doctor --dump``: what to say of who waits for whom, from what each rank has written down.

``--torch-traces`` writes that as files of torch's flight recorder (`write_torch_traces`).
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from ringreduce.common.errors import ConfigError, ForeignFileError, name_ranks
from ringreduce.common.files import create_file, read_file
from ringreduce.common.quantities import format_nbytes
from ringreduce.common.sealed_files import PLAIN, KeyFile
from ringreduce.observe.snapshots import Snapshot
from ringreduce.observe.waits import Wait, sets_of, waits

_MOST_NBYTES = 64 << 20  # of a dump, which has the last calls and the stacks of a rank
_MOST_RANKS = 1 << 20
_OURS = str(Path(__file__).parents[1])


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
                dump = _printable(json.load(content))
            if not 0 <= int(dump["rank"]) < int(dump["size"]) <= _MOST_RANKS:
                raise ValueError("there is no such rank")
            found[int(dump["rank"])] = dump
        except ForeignFileError as error:
            raise ForeignFileError(f"{path}: {error}") from None
        except (ConfigError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is not what a rank has written down: {error!r}") from None
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
    said = [sentence for wait in waits(dumps) if (sentence := _sentence(dumps, wait))]
    if not said:
        said.append("no rank was waiting for another")
    places = {rank: _place(dumps[rank]) for rank in sorted(dumps)}
    told = "".join(said)
    said += [
        f"rank {rank} is at {where}" for rank, where in places.items() if where and f"rank {rank} is at" not in told
    ]
    silent = [rank for rank in range(max(dump["size"] for dump in dumps.values())) if rank not in dumps]
    if silent:
        said.append(f"{name_ranks(silent)} {'has' if len(silent) == 1 else 'have'} written nothing down")
    return said


def _sentence(dumps: Mapping[int, Snapshot], wait: Wait) -> str:
    """Return who has not come to what; nothing if all have submitted an operation."""
    present = name_ranks(sorted(wait.present))
    first = wait.first
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


#: What the names of the files begin with; a rank follows.
TRACE_PREFIX = "ringreduce_rank_"

#: Of what is in the files.
_VERSION = "2.10"

#: Of one rank: by the number that a call has on all ranks.
_Entries = dict[int, Snapshot]

#: torch's name of what is called so here; what is not here moves nothing: a barrier.
_TYPES = {
    **dict.fromkeys(("allreduce", "sparse_allreduce"), "all_reduce"),
    **dict.fromkeys(("reduce_scatter", "reducescatter"), "reduce_scatter_v"),
    "allgather": "all_gather_v",
    "alltoall": "all_to_all",
    **{same: same for same in ("broadcast", "reduce", "gather", "scatter")},
}
#: Of which ranks may give, or get, different sizes.
_OF_ANY_SIZE = ("allgather", "gather", "scatter")
_DTYPES = {
    **{"float32": "Float", "float64": "Double", "float16": "Half", "bfloat16": "BFloat16"},
    **{"int8": "Char", "uint8": "Byte", "int16": "Short", "int32": "Int", "int64": "Long", "bool": "Bool"},
    **{"complex64": "ComplexFloat", "complex128": "ComplexDouble"},
}
_ARRAY = re.compile(rf"([0-9*]+(?:x[0-9*]+)*) ({'|'.join(_DTYPES)})\b")


def write_torch_traces(dumps: Mapping[int, Snapshot], folder: str | os.PathLike[str]) -> list[Path]:
    """Write a file of torch's flight recorder for each rank, ``ringreduce_rank_0``; returns them.

    ``python -m torch.distributed.flight_recorder.fr_trace OUT -p ringreduce_rank_``, and what else reads these files,
    then find the call to which a rank did not come. Each process set becomes two groups of torch's: its blocking calls,
    and its named operations. What has no equivalent there:

    - the library is always "gloo": those tools refuse names that they do not know;
    - blocking calls have bytes and no dtype: "Byte". What ranks may give of different sizes has none;
    - named operations come in any order, so those of one name are matched: what has begun from the last one backwards,
      what waits from the first one on. Their name follows their type.

    Args:
        dumps: what `load` has read.
        folder: made if need be, for this user alone; files of earlier calls go.

    Raises:
        ConfigError: it cannot be written.
    """
    traces = {rank: {"version": _VERSION, "pg_config": {}, "pg_status": {}, "entries": []} for rank in dumps}
    for number, sets in enumerate(sets_of(dumps)):
        name = next(iter(sets.values()))["name"]
        _add(traces, 2 * number, words=f"{name}: blocking", sets=sets, calls=_calls(dumps, sets))
        _add(traces, 2 * number + 1, words=f"{name}: asynchronous", sets=sets, calls=_operations(sets))
    target = Path(folder)
    written = []
    try:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in target.glob(f"{TRACE_PREFIX}*"):
            each.unlink()
        for rank, trace in traces.items():
            written.append(target / f"{TRACE_PREFIX}{rank}")
            with create_file(written[-1]) as file:
                pickle.dump(trace, file)
    except OSError as error:
        raise ConfigError(f"{error.filename or target} cannot be written: {error.strerror}") from None
    return written


def _add(
    traces: Mapping[int, Snapshot], group: int, words: str, sets: Mapping[int, Snapshot], calls: Mapping[int, _Entries]
) -> None:
    """Add a group, and what each rank has done in it."""
    for rank, each in sets.items():
        trace = traces[rank]
        name = str(group)
        entries = calls[rank]
        trace["pg_config"][name] = {"name": name, "desc": words, "ranks": str(each["ranks"])}
        states = {state: [n for n, entry in entries.items() if entry["state"] in state] for state in _STATES}
        trace["pg_status"][name] = {key: max(states[state], default=-1) for state, key in _STATES.items()}
        for number, entry in sorted(entries.items()):
            trace["entries"].append(
                {
                    "record_id": len(trace["entries"]),
                    "pg_id": group,
                    "process_group": (name, words),
                    "collective_seq_id": number,
                    "p2p_seq_id": 0,
                    "op_id": number,
                    "is_p2p": False,
                    "timeout_ms": 0,
                    **entry,
                }
            )


#: What torch calls the last call that has come so far: of the states, those that it has had then.
_STATES = {
    ("scheduled", "started", "completed"): "last_enqueued_collective",
    ("started", "completed"): "last_started_collective",
    ("completed",): "last_completed_collective",
}


def _calls(dumps: Mapping[int, Snapshot], sets: Mapping[int, Snapshot]) -> dict[int, _Entries]:
    """Return the blocking calls of a set, by rank, from the first one that all ranks still remember."""
    first = max((each["calls"][0]["number"] for each in sets.values() if each["calls"]), default=0)
    return {
        rank: {
            call["number"]: _entry(
                call["collective"],
                [([call["nbytes"]], "Byte")] if call["collective"] not in _OF_ANY_SIZE else [],
                state="completed" if call["ended"] else "started",
                times=(call["started"], call["started"], call["ended"]),
                frames=[] if call["ended"] else _frames(dumps[rank]),
            )
            for call in each["calls"]
            if call["number"] >= first
        }
        for rank, each in sets.items()
    }


def _operations(sets: Mapping[int, Snapshot]) -> dict[int, _Entries]:
    """Return the named operations of a set, by rank, under numbers that are theirs on all ranks."""
    matched = sorted(_matched(sets), key=lambda each: min(map(_since, each.values())))
    found: dict[int, _Entries] = {rank: {} for rank in sets}
    for number, operations in enumerate(matched, 1):
        for rank, each in operations.items():
            kind, _, about = each["signature"].partition("(")
            arrays = [([int(n) for n in shape.split("x") if n != "*"], dtype) for shape, dtype in _ARRAY.findall(about)]
            completed = each["ended"] is not None and each["error"] is None
            place, _, line = each["place"].rpartition(":")
            found[rank][number] = _entry(
                kind,
                [(shape, _DTYPES[dtype]) for shape, dtype in arrays],
                state="scheduled" if each["started"] is None else "completed" if completed else "started",
                times=(each["submitted"], each["started"], each["ended"] if completed else None),
                frames=[_frame("submitted", place, line)] if line.isdigit() else [],
                name=" " + each["name"].replace(":", "_").replace(" ", "_"),
            )
    return found


def _matched(sets: Mapping[int, Snapshot]) -> Iterator[dict[int, Snapshot]]:
    """Yield what is one operation to the ranks, by rank."""
    begun: dict[str, dict[int, list[Snapshot]]] = {}
    waiting: dict[str, dict[int, list[Snapshot]]] = {}
    for rank, each in sets.items():
        for operation in each["operations"]:
            if operation["started"] is not None:
                begun.setdefault(operation["name"], {}).setdefault(rank, []).insert(0, operation)
            elif operation["ended"] is None or operation["error"] is not None:  # else it was withdrawn
                waiting.setdefault(operation["name"], {}).setdefault(rank, []).append(operation)
    for ranks in begun.values():
        # What a rank has begun, all have submitted: those that a rank no longer remembers are left out.
        if set(ranks) == set(sets):
            yield from (_at(ranks, place) for place in range(min(map(len, ranks.values()))))
    for ranks in waiting.values():
        yield from (_at(ranks, place) for place in range(max(map(len, ranks.values()))))


def _at(ranks: Mapping[int, list[Snapshot]], place: int) -> dict[int, Snapshot]:
    return {rank: operations[place] for rank, operations in ranks.items() if place < len(operations)}


def _since(operation: Snapshot) -> tuple[bool, float]:
    """Return what puts operations into the order in which they began, and those that wait behind them."""
    return operation["started"] is None, operation["started"] or operation["submitted"]


def _entry(
    kind: str,
    arrays: Iterable[tuple[list[int], str]],
    state: str,
    times: tuple[float, float | None, float | None],
    frames: list[Snapshot],
    name: str = "",
) -> Snapshot:
    """Return what torch writes of one call.

    Args:
        kind: what it is called here.
        arrays: shape and torch's name of the dtype of each that this rank gives.
        state: torch's.
        times: when it was submitted, begun and completed, seconds since 1970.
        frames: where the program called it, innermost first.
        name: its own.
    """
    type_ = _TYPES.get(kind.removeprefix("grouped "), "barrier")
    given = list(arrays) or [([], "Byte")]
    shapes = [shape for shape, _ in given]
    dtypes = [dtype for _, dtype in given]
    gives_as_much = type_ not in ("all_gather_v", "reduce_scatter_v")
    created, started, completed = (None if each is None else int(each * 1e9) for each in times)
    return {
        "profiling_name": f"gloo:{type_}{name}",
        "input_sizes": shapes,
        "input_dtypes": dtypes,
        "output_sizes": shapes if gives_as_much else [[] for _ in shapes],
        "output_dtypes": dtypes,
        "state": state,
        "time_created_ns": created,
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": completed,
        "retired": completed is not None,
        "frames": frames,
    }


def _frames(dump: Snapshot) -> list[Snapshot]:
    """Return where the main thread of a rank is."""
    return [_frame(each["function"], each["file"], each["line"]) for each in reversed(main_stack(dump))]


def _frame(name: str, file: str, line: str | int) -> Snapshot:
    return {"name": name, "filename": file, "line": int(line)}
