"""What ranks have written down, as files that torch's own tool reads; tests/jobs/test_flight.py does it after a job."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from ringreduce.common.errors import ConfigError
from ringreduce.doctor import dumps

Dump = dict[str, Any]


def call(number: int, collective: str = "allreduce", nbytes: int = 8, ended: bool = True) -> Dump:
    return {
        "number": number,
        "collective": collective,
        "nbytes": nbytes,
        "started": number + 0.25,
        "ended": number + 0.5 if ended else None,
    }


def operation(name: str, at: float, signature: str = "allreduce(sum, 2x3 float32)", **more: Any) -> Dump:
    times = {"submitted": at, "started": at + 0.25, "ended": at + 0.5}
    return {"name": name, "signature": signature, "place": "train.py:12", "error": None, **times, **more}


def dumps_of(*ranks: tuple[list[Dump], list[Dump]], members: list[int] | None = None) -> dict[int, Dump]:
    """What ranks write down that have made some calls and operations as members of one set."""
    members = members or list(range(len(ranks)))
    return {
        rank: {
            "sets": [{"id": 0, "name": "world", "ranks": members, "calls": calls, "operations": operations}],
            "threads": [],
        }
        for rank, (calls, operations) in zip(members, ranks, strict=True)
    }


def entries_of(path: Path) -> list[Dump]:
    return pickle.loads(path.read_bytes())["entries"]


def numbers_of(path: Path) -> list[tuple[str, int]]:
    return [(each["profiling_name"], each["collective_seq_id"]) for each in entries_of(path)]


@pytest.fixture
def analysis(caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """What torch's tool says of a folder."""
    tool = pytest.importorskip("torch.distributed.flight_recorder.fr_trace")

    def say(folder: Path, *options: str) -> str:
        caplog.clear()
        with redirect_stdout(io.StringIO()) as printed:
            tool.main([str(folder), *options])
        return "\n".join([*caplog.messages, printed.getvalue()])

    return say


def test_what_went_well_has_no_culprit(tmp_path: Path, analysis: Callable[..., str]) -> None:
    """Of every collective, with sizes that the ranks may have of their own, as processes of a set of some ranks."""
    kinds = ("allreduce", "reduce_scatter", "allgather", "broadcast", "alltoall", "reduce", "gather", "scatter")
    texts = (
        "allreduce(average, 3 float32, 2x2 int64)",
        "reducescatter(sum, 5 float32, scaled by 1.0 and 1.0)",
        "allgather(*x3 float32)",
        "broadcast(root 0, 3 bool)",
        "alltoall(* bfloat16)",
        "broadcast_object",
    )
    calls = [
        [
            call(number, kind, 8 + rank * (kind in ("allgather", "gather", "scatter")))
            for number, kind in enumerate(kinds, 7)
        ]
        for rank in range(3)
    ]
    named = [operation(f"a {n}:{n}", n, text) for n, text in enumerate(texts)]
    for members in ([0, 1, 2], [1, 4, 5]):
        written = dumps.write_torch_traces(dumps_of(*((each, named) for each in calls), members=members), tmp_path)
        assert [each.name for each in written] == [f"ringreduce_rank_{rank}" for rank in members]
        said = analysis(tmp_path, "-p", dumps.TRACE_PREFIX)
        assert "error" not in said
        assert "Not all ranks" not in said


def test_arguments_that_differ_are_found(tmp_path: Path, analysis: Callable[..., str]) -> None:
    """With both sizes; of blocking calls, both kinds. torch takes any rank for the one that the others must equal."""
    ranks = [([], [operation("w", 1, f"allreduce(sum, {n} float32)", started=None, error="no")]) for n in (5, 5, 8)]
    dumps.write_torch_traces(dumps_of(*ranks), tmp_path)
    said = analysis(tmp_path)
    assert re.search(r"Culprit rank [012]; Error type: SIZE_OR_SYNTAX_MISMATCH", said)
    assert {"[[5]]", "[[8]]"} == set(re.findall(r"sizes: '(.*?)'", said))
    kinds = ("allreduce", "broadcast", "allreduce")
    dumps.write_torch_traces(dumps_of(*(([call(1, kind, ended=False)], []) for kind in kinds)), tmp_path)
    said = analysis(tmp_path)
    assert re.search(r"Culprit rank [012]; Error type: COLLECTIVE_TYPE_MISMATCH", said)
    assert {"broadcast", "all_reduce"} == set(re.findall(r"type: '(.*?)'", said))


def test_ranks_that_remember_different_calls_are_compared_where_they_overlap(
    tmp_path: Path, analysis: Callable[..., str]
) -> None:
    """Calls have numbers; operations of a name that is used again are matched from the last that has begun."""
    short = (
        [call(3), call(4, ended=False)],
        [operation("w", 3), operation("v", 3.1), operation("w", 4, started=None, ended=None)],
    )
    long = (
        [call(2), call(3), call(4)],
        [operation("w", 2), operation("v", 3.1), operation("w", 3.2), operation("u", 5, started=None, ended=6)],
    )
    first, second = dumps.write_torch_traces(dumps_of(short, long), tmp_path)
    blocking = [("gloo:all_reduce", 3), ("gloo:all_reduce", 4)]
    assert numbers_of(second)[:2] == numbers_of(first)[:2] == blocking
    assert [each["state"] for each in entries_of(first)] == ["completed", "started", *["completed"] * 2, "scheduled"]
    # What was withdrawn, u, nobody waits for.
    assert numbers_of(first)[2:] == [("gloo:all_reduce w", 1), ("gloo:all_reduce v", 2), ("gloo:all_reduce w", 3)]
    assert numbers_of(second)[2:] == numbers_of(first)[2:4]
    said = analysis(tmp_path)
    assert said.count("Not all ranks joining collective") == 1
    assert "collective: gloo:all_reduce w" in said
    assert "missing ranks: {1}" in said


def test_entries_are_printed(tmp_path: Path, analysis: Callable[..., str]) -> None:
    """By -j, which takes a package that torch does not bring."""
    pytest.importorskip("tabulate")
    dumps.write_torch_traces(dumps_of(([call(1)], [operation("w", 2)]), ([call(1)], [])), tmp_path)
    said = analysis(tmp_path, "-j")
    assert "all_reduce(input_sizes=[[8]], state=completed)" in said


def test_only_the_user_reads_them(tmp_path: Path) -> None:
    """Files of an earlier call go; a folder that cannot be written to is a typed error."""
    folder = tmp_path / "traces"
    dumps.write_torch_traces(dumps_of(([call(1)], []), ([call(1)], [])), folder)
    (path,) = dumps.write_torch_traces(dumps_of(([call(1)], [])), folder)
    assert list(folder.iterdir()) == [path]
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    with pytest.raises(ConfigError, match="ringreduce_rank_0 cannot be written: "):
        dumps.write_torch_traces({}, path)
