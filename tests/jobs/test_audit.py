"""The end of a job in the audit record, however it comes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import RINGREDUCE, run, run_program

from ringreduce.audit.chain import examine
from ringreduce.common.keys import write_secret

FAILING = """
import os, signal, sys
import ringreduce as rr

rr.init()
rr.barrier()
if rr.rank() == {rank}:
    {end}
rr.barrier()
"""


@pytest.mark.parametrize(
    ("rank", "end", "said"),
    [
        (0, "raise ValueError('no')", "it failed: ValueError: no"),
        (0, "sys.exit(3)", "it exits with code 3"),
        (0, "os.kill(os.getpid(), signal.SIGTERM)", "it was ended by SIGTERM"),
        (1, "raise ValueError('no')", ""),
        (1, "os.kill(os.getpid(), signal.SIGKILL)", ""),
    ],
)
def test_a_job_that_fails_has_an_end_with_the_reason(tmp_path: Path, rank: int, end: str, said: str) -> None:
    """As rank 0 knows it: its own, or that it lost another, or was ended with the job."""
    path = tmp_path / "audit"
    job = run_program(FAILING.format(rank=rank, end=end), RINGREDUCE_AUDIT=str(path))
    assert job.returncode != 0
    found = examine(path.read_bytes())
    assert found.wrong is None
    assert [each["event"] for each in found.lines if each["ranks"] == [0]] == ["begin", "end"]
    (error,) = [each["facts"]["error"] for each in found.lines if each["event"] == "end"]
    assert error == said if said else "rank 1" in error or "SIGTERM" in error
    failed = [each["facts"]["error"] for each in found.lines if each["event"] == "failed"]
    if (rank, said) == (1, "") and "ValueError" in end:
        assert failed == ["it failed: ValueError: no"]


def test_an_object_over_the_limit_that_ends_the_job_is_recorded(tmp_path: Path) -> None:
    """Before the end, whichever rank comes first."""
    source = "import ringreduce as rr; rr.init(); rr.allgather_object(b'x' * 2000)"
    job = run_program(source, ranks=3, RINGREDUCE_AUDIT=str(tmp_path / "audit"), RINGREDUCE_OBJECT_LIMIT="1000")
    assert job.returncode != 0
    found = examine((tmp_path / "audit").read_bytes())
    assert found.wrong is None
    refused = [each["facts"] for each in found.lines if each["event"] == "refused"]
    assert {each["what"] for each in refused} == {"allgather_object"}
    assert "RINGREDUCE_OBJECT_LIMIT=1000" in refused[0]["error"]


SURVIVING = """
import os, signal
import ringreduce as rr

rr.init()
try:
    if rr.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rr.barrier()
except rr.PeerLostError as error:
    rr.go_on(error)
rr.audit("alive", ranks=rr.size())
rr.barrier()  # what rank 0 has said, others do not repeat
"""


def test_who_goes_on_after_a_death_appends_to_the_same_file(tmp_path: Path) -> None:
    """A world that lost its rank 0 has no end, another rank says why; the next one is recorded by the new rank 0."""
    path = tmp_path / "audit"
    job = (RINGREDUCE, "run", "--elastic", "-np", 3, sys.executable, "-c", SURVIVING)
    done = run(*job, RINGREDUCE_AUDIT=str(path))
    found = examine(path.read_bytes())
    assert found.wrong is None
    first, *failed = [each for each in found.lines if each["world"] == found.lines[0]["world"]]
    assert (first["event"], first["facts"]["size"]) == ("begin", 3)
    assert {each["event"] for each in failed} == {"failed"}
    assert all("rank 0" in each["facts"]["error"] for each in failed)
    lines = [each for each in found.lines if each["world"] != first["world"]]
    assert [each["event"] for each in lines] == ["begin", "alive", "end"], done.stderr
    assert [each["facts"] for each in lines[1:]] == [{"ranks": 2}, {"error": None}]
    assert lines[0]["facts"]["size"] == 2


RESTARTING = """
import os, signal
import ringreduce as rr

rr.init()
rr.audit("mine", restart=int(os.environ.get("RINGREDUCE_RESTART", 0)))
if "RINGREDUCE_RESTART" not in os.environ and rr.rank() == 0:
    with open(os.environ["RINGREDUCE_AUDIT"], "ab") as file:
        file.write(b'{"line": 3, "before')  # as a rank leaves that is killed in the midst of a line
    os.kill(os.getpid(), signal.SIGKILL)
rr.barrier()
"""


def test_a_job_that_is_started_again_continues_the_chain(tmp_path: Path) -> None:
    """After half a line of a rank that was killed, which is named; the ranks of the second start say the same.

    Each line is signed.
    """
    path, key_file = tmp_path / "audit", tmp_path / "key"
    write_secret(key_file)
    job = (RINGREDUCE, "run", f"--encrypt={key_file}", "--max-restarts", 1, "-np", 2, sys.executable, "-c", RESTARTING)
    run(*job, RINGREDUCE_AUDIT=str(path)).well()
    found = examine(path.read_bytes())
    assert (found.wrong, found.cut) == (None, [3])
    said = [(each["event"], each["facts"].get("restart")) for each in found.lines if each["event"] != "failed"]
    assert said == [("begin", 0), ("mine", 0), ("begin", 1), ("mine", 1), ("end", None)]
    shown = run(RINGREDUCE, "audit", "show", path).well()
    assert "line 3 was cut off: the process that wrote it was killed" in shown.stdout
    verified = run(RINGREDUCE, "audit", "verify", path, "--key", key_file)
    assert (verified.returncode, "signed: each line" in verified.stdout) == (0, True), verified.stdout
